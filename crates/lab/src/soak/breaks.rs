//! Breaks things in the lab. A random generator with a seed chooses what, and when.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use perigee_model::job::{Migration, MoveVm};
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{HostId, Problem};

use super::jobs::Stream;
use super::outcome::{Event, Outcome};
use crate::process::signal_pid;
use crate::up::Lab;
use crate::wan::{self, Change};

/// The shortest and the longest pause between two acts.
const PAUSE_S: (u64, u64) = (3, 15);
/// The shortest and the longest cut of the WAN. Some exceed the 30 s for which a host may be silent.
const CUT_S: (u64, u64) = (1, 40);

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the same seed gives the same numbers.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number from the first to the last, both included.
    fn between(&mut self, (first, last): (u64, u64)) -> u64 {
        first + self.next() % (last - first + 1)
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        let at = usize::try_from(self.next()).unwrap_or(0) % from.len().max(1);
        from.get(at)
    }
}

/// One thing to do to the lab.
#[derive(Debug, Clone, Copy)]
enum Act {
    Move,
    /// Starts a move and kills a daemon while the VM migrates.
    MoveAndKill,
    Kill,
    Cut,
    /// Kills all that runs on a host, as a power cut does.
    PowerCut,
}

/// The acts to choose from: more moves than kills, and more kills than cuts.
const ACTS: [Act; 10] = [
    Act::Move,
    Act::Move,
    Act::Move,
    Act::MoveAndKill,
    Act::MoveAndKill,
    Act::MoveAndKill,
    Act::Kill,
    Act::Kill,
    Act::Kill,
    Act::Cut,
];

pub struct Breaks<'a> {
    lab: &'a Lab,
    acts: Vec<Act>,
    random: Random,
    due: Instant,
    /// When to kill a daemon, in the middle of a move.
    kill_at: Option<Instant>,
    /// When the WAN comes back.
    cut_until: Option<Instant>,
}

impl<'a> Breaks<'a> {
    pub fn new(lab: &'a Lab, seed: u64, power_cuts: bool) -> Self {
        let due = Instant::now() + Duration::from_secs(30);
        let mut acts = ACTS.to_vec();
        acts.extend(power_cuts.then_some(Act::PowerCut));
        Self { lab, acts, random: Random(seed), due, kill_at: None, cut_until: None }
    }

    /// Performs the acts that are due.
    ///
    /// # Errors
    /// When the lab itself cannot be changed.
    pub async fn act_if_due(
        &mut self,
        stream: &Stream,
        outcome: &mut Outcome,
        began: Instant,
    ) -> Result<(), Problem> {
        let now = Instant::now();
        let mut events = Vec::new();
        if self.cut_until.is_some_and(|until| until <= now) {
            self.cut_until = None;
            self.set_wan(true).await?;
            events.push("the WAN is back".to_owned());
        }
        if self.kill_at.is_some_and(|at| at <= now) {
            self.kill_at = None;
            events.extend(self.kill()?);
        }
        if self.due <= now {
            self.due = now + Duration::from_secs(self.random.between(PAUSE_S));
            events.extend(self.act(stream).await?);
        }
        let at_s = began.elapsed().as_secs_f64();
        outcome.events.extend(events.into_iter().map(|what| Event { at_s, what }));
        Ok(())
    }

    /// Stops breaking things, and brings the WAN back.
    ///
    /// # Errors
    /// When the WAN cannot be changed.
    pub async fn mend(&mut self, outcome: &mut Outcome, began: Instant) -> Result<(), Problem> {
        self.kill_at = None;
        if self.cut_until.take().is_some() {
            self.set_wan(true).await?;
            let at_s = began.elapsed().as_secs_f64();
            outcome.events.push(Event { at_s, what: "the WAN is back".to_owned() });
        }
        Ok(())
    }

    async fn act(&mut self, stream: &Stream) -> Result<Option<String>, Problem> {
        match self.random.pick(&self.acts).copied().unwrap_or(Act::Move) {
            Act::Move => Ok(self.begin_move(stream).await),
            Act::MoveAndKill => {
                let after = Duration::from_millis(self.random.between((0, 6000)));
                self.kill_at = Some(Instant::now() + after);
                Ok(self.begin_move(stream).await)
            }
            Act::Kill => self.kill(),
            Act::Cut if self.cut_until.is_none() => {
                let seconds = self.random.between(CUT_S);
                self.set_wan(false).await?;
                self.cut_until = Some(Instant::now() + Duration::from_secs(seconds));
                Ok(Some(format!("the WAN is down for {seconds} s")))
            }
            Act::Cut => Ok(None),
            Act::PowerCut => self.cut_power().await,
        }
    }

    async fn cut_power(&mut self) -> Result<Option<String>, Problem> {
        let hosts: Vec<HostId> = self.hosts();
        let Some(host) = self.random.pick(&hosts) else { return Ok(None) };
        super::cut_power(self.lab, host).await?;
        Ok(Some(format!("cut the power of {host}")))
    }

    fn hosts(&self) -> Vec<HostId> {
        self.lab.definition.hosts().map(|(_, host)| host.clone()).collect()
    }

    /// Asks to move one of the running VMs. A refusal is correct if the VM cannot move now.
    async fn begin_move(&mut self, stream: &Stream) -> Option<String> {
        let running = stream.running();
        let job = self.random.pick(&running)?;
        let vm = job.vm.clone()?;
        let hosts = self.hosts();
        let others: Vec<&HostId> =
            hosts.iter().filter(|host| job.host.as_ref() != Some(*host)).collect();
        let to = (*self.random.pick(&others)?).clone();
        let what = format!("move {vm} to {to}");
        let path = format!("/v1/vms/{vm}/move");
        match stream
            .client()
            .post::<Migration>(
                &path,
                &MoveVm { host: to, volumes: VolumesOnMove::Stay, confirmed: false },
            )
            .await
        {
            Ok(_) => Some(what),
            Err(problem) => Some(format!("{what}: refused: {}", problem.why)),
        }
    }

    /// Kills one daemon with SIGKILL; its supervisor starts it again.
    fn kill(&mut self) -> Result<Option<String>, Problem> {
        let mut daemons = vec![("controller".to_owned(), self.lab.controller_pid())];
        for (_, host) in self.lab.definition.hosts() {
            for daemon in ["agent", "volume"] {
                daemons.push((format!("{host}/{daemon}"), self.lab.host_pid(host, daemon)));
            }
        }
        let alive: Vec<(String, i32)> =
            daemons.into_iter().filter_map(|(name, pid)| Some((name, pid.ok()?))).collect();
        let Some((name, pid)) = self.random.pick(&alive) else { return Ok(None) };
        signal_pid(*pid, Signal::SIGKILL)?;
        Ok(Some(format!("kill {name}")))
    }

    async fn set_wan(&self, is_up: bool) -> Result<(), Problem> {
        wan::set_all(self.lab, Change { down: Some(!is_up), ..Change::default() }).await
    }
}
