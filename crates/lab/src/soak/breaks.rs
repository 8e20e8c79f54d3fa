//! Breaks things in the lab. A random generator with a seed chooses what, and when.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use perigee_model::job::{Migration, MoveVm};
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{HostId, Problem};

use super::jobs::Stream;
use super::outcome::{Event, Outcome};
use crate::process::signal_pid;
use crate::random::Random;
use crate::up::Lab;
use crate::wan::{self, Change};

/// The shortest and the longest pause between two acts.
const PAUSE_S: (u64, u64) = (3, 15);
/// The shortest and the longest cut of the WAN. Some exceed the 30 s for which a host may be silent.
const CUT_S: (u64, u64) = (1, 40);

/// The shortest and the longest pause before the next long trouble. One begins that long after the soak, and after the last one.
const LONG_PAUSE_S: (u64, u64) = (60, 240);
/// The shortest and the longest of these. Guests stand still meanwhile, and have to go on by themselves.
const LONG_S: (u64, u64) = (120, 420);

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

/// A trouble that lasts. They take turns, and none begins while the WAN is down for a moment.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Long {
    /// The WAN is down.
    Cut,
    /// The volume server of this host is killed, and is not started again.
    Away(HostId),
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

/// What is broken next in the lab, and when: drawn from a seed, so that a soak can be repeated.
pub struct Breaks<'a> {
    lab: &'a Lab,
    acts: Vec<Act>,
    random: Random,
    due: Instant,
    /// When to kill a daemon, in the middle of a move.
    kill_at: Option<Instant>,
    /// When the WAN comes back.
    cut_until: Option<Instant>,
    /// When the next long trouble begins, how many there were, and the longest.
    long_due: Instant,
    longs: u64,
    long_s_max: u64,
    /// The one under way, and when it ends.
    long: Option<(Long, Instant)>,
}

impl<'a> Breaks<'a> {
    /// `power_cuts` adds them to what may happen. `length` is that of the whole soak.
    pub fn new(lab: &'a Lab, seed: u64, power_cuts: bool, length: Duration) -> Self {
        let due = Instant::now() + Duration::from_secs(30);
        let long_due = Instant::now() + Duration::from_secs(LONG_PAUSE_S.0);
        // Of a short soak something is left for all else.
        let long_s_max = (length.as_secs() / 4).clamp(LONG_S.0, LONG_S.1);
        let mut acts = ACTS.to_vec();
        acts.extend(power_cuts.then_some(Act::PowerCut));
        let (random, kill_at, cut_until) = (Random(seed), None, None);
        Self {
            lab,
            acts,
            random,
            due,
            kill_at,
            cut_until,
            long_due,
            longs: 0,
            long_s_max,
            long: None,
        }
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
        if let Some((long, _)) = self.long.take_if(|(_, until)| *until <= now) {
            events.push(self.end_long(long).await?);
            self.long_due = now + Duration::from_secs(self.random.between(LONG_PAUSE_S));
        }
        if self.long.is_none() && self.long_due <= now && self.cut_until.is_none() {
            events.push(self.begin_long(now).await?);
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
        if let Some((long, _)) = self.long.take() {
            let (at_s, what) = (began.elapsed().as_secs_f64(), self.end_long(long).await?);
            outcome.events.push(Event { at_s, what });
        }
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
            Act::Cut if self.cut_until.is_none() && self.long.is_none() => {
                let seconds = self.random.between(CUT_S);
                self.set_wan(false).await?;
                self.cut_until = Some(Instant::now() + Duration::from_secs(seconds));
                Ok(Some(format!("the WAN is down for {seconds} s")))
            }
            Act::Cut => Ok(None),
            Act::PowerCut => self.cut_power(stream).await,
        }
    }

    async fn begin_long(&mut self, now: Instant) -> Result<String, Problem> {
        let seconds = self.random.between((LONG_S.0, self.long_s_max));
        let hosts = self.hosts();
        let host = self.random.pick(&hosts).cloned();
        let (long, what) = match host.filter(|_| self.longs % 2 == 1) {
            Some(host) => {
                self.lab.keep_away(&host, "volume", true)?;
                // One that is just being started is found the next time that something is killed, or is not away.
                if let Ok(pid) = self.lab.host_pid(&host, "volume") {
                    signal_pid(pid, Signal::SIGKILL)?;
                }
                let what = format!("{host}/volume is killed and stays away for {seconds} s");
                (Long::Away(host), what)
            }
            None => {
                self.set_wan(false).await?;
                (Long::Cut, format!("the WAN is down for {seconds} s"))
            }
        };
        self.longs += 1;
        self.long = Some((long, now + Duration::from_secs(seconds)));
        Ok(what)
    }

    async fn end_long(&self, long: Long) -> Result<String, Problem> {
        match long {
            Long::Cut => {
                self.set_wan(true).await?;
                Ok("the WAN is back".to_owned())
            }
            Long::Away(host) => {
                self.lab.keep_away(&host, "volume", false)?;
                Ok(format!("{host}/volume may start again"))
            }
        }
    }

    async fn cut_power(&mut self, stream: &Stream) -> Result<Option<String>, Problem> {
        let mut hosts: Vec<HostId> = self.hosts();
        hosts.retain(|host| !stream.is_spared(host));
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
