//! Cells that are one job with four VMs: data at two distances, moves, and the network that ranks and storage share.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use perigee_lab::bare::nbd;
use perigee_lab::cards::{self, Cards};
use perigee_lab::measuring::{load_1min, median};
use perigee_lab::wan::Rate;
use perigee_model::job::{Job, JobSpec, JobState, Vm};
use perigee_model::{VolumeName, job_file};

use crate::bench::{Bench, DATABASE_MEMORY_BYTES, FIXED, STEPS, STREAMS, SUPPORT, volume};
use crate::cell::{Cell, Kind};
use crate::dilation::Pace;
use crate::found::{self, Outputs};
use crate::results::{CardsUse, Measured, Moved, Side, Work};
use crate::series::{Sampler, ServerPoint};

const LOOK_EVERY: Duration = Duration::from_millis(200);
/// For all programs of a cell.
const DEADLINE: Duration = Duration::from_secs(3600);
/// The first byte of a seed disk that lets its VM go on after `wait:0`.
const FIRST_SIGNAL: u8 = b'A';

/// What a cell's job looks like.
struct Plan {
    vms: u32,
    /// For `works.py`.
    words: Vec<String>,
    /// For each side, at which target its data is; `None`: the side is not there.
    homes: [Option<Side>; 2],
    may_move: bool,
}

impl Plan {
    fn of(cell: Cell, works: &[Work]) -> Self {
        let vms = cell.kind.vms();
        let mut words = vec!["fixed:0".to_owned()];
        let word = |work: Work, side: Side| format!("{}:{}", work.name(), side.name());
        let mut sides = Side::BOTH;
        if cell.begins_far() {
            sides.reverse();
        }
        match cell.kind {
            Kind::MoveHand => {
                words.extend([
                    word(Work::Tpch, Side::Far),
                    "wait:0".to_owned(),
                    word(Work::Tpch, Side::Near),
                ]);
                return Self { vms, words, homes: [Some(Side::Far); 2], may_move: false };
            }
            Kind::MovePlanner => {
                words.extend([word(Work::Tpch, Side::Far), word(Work::Tpch, Side::Near)]);
                return Self { vms, words, homes: [Some(Side::Far); 2], may_move: true };
            }
            Kind::Network => {
                for (number, side) in sides.into_iter().enumerate() {
                    words.push(format!("wait:{number}"));
                    words.extend(works.iter().map(|work| word(*work, side)));
                }
                return Self { vms, words, homes: [Some(Side::Near); 2], may_move: false };
            }
            Kind::Distance | Kind::IscsiPerigee | Kind::IscsiTgt | Kind::Host => {}
        }
        for work in works {
            words.extend(sides.iter().map(|side| word(*work, *side)));
        }
        Self { vms, words, homes: Side::BOTH.map(Some), may_move: false }
    }
}

/// When the machine saw which program begin, in seconds, the end last.
type Seen = Vec<(String, f64)>;

/// What each host's cards had carried when a program began, to it and from it. The last host is the target.
type CarriedAt = Vec<(String, Vec<[cards::Carried; 2]>)>;

/// A cell's job that has ended.
struct Ran {
    job: Job,
    seen: Seen,
    servers: Vec<(String, ServerPoint)>,
    moved: Option<Moved>,
    carried: CarriedAt,
    /// Its clones, which nobody needs any more.
    volumes: Vec<VolumeName>,
}

/// What is done while a job waits, and what came of it.
struct Meanwhile<'a, 'b> {
    bench: &'a Bench<'b>,
    cell: Cell,
    pace: Pace,
    moved: Option<Moved>,
    carried: CarriedAt,
}

impl Bench<'_> {
    /// Measures how long the fixed computation takes in so many VMs at once.
    ///
    /// # Errors
    /// The job fails.
    pub async fn calibrate(&mut self, vms: u32) -> Result<f64> {
        self.free_network().await?;
        let words = ["fixed:0", "fixed:1", "fixed:2"].map(str::to_owned).to_vec();
        let cell = Cell { round: 0, kind: Kind::Distance, rtt_ms: 0, is_dilated: false };
        let plan = Plan { vms, words, homes: [None; 2], may_move: false };
        let ran = self.job(cell, Pace(1.0), &plan).await?;
        let outputs = self.cluster.output(&ran.job.id).await?;
        let marks = Outputs(&outputs).marks(0)?;
        let clock = found::clock(&marks, span_s(&ran.seen)?)?;
        let of = marks.iter().filter(|(label, _)| label.starts_with("fixed"));
        median(of.map(|(_, (began, ended))| (ended - began) / clock)).context("no times")
    }

    /// Measures a cell of a kind that is one job with four VMs.
    ///
    /// # Errors
    /// A program fails or does not find what it should, or the time for it is over.
    pub async fn gang(&mut self, cell: Cell, pace: Pace, works: &[Work]) -> Result<Measured> {
        self.free_network().await?;
        let load_1min = load_1min()?;
        let at_ms = now_ms()?;
        let plan = Plan::of(cell, works);
        let Ran { job, seen, servers, moved, carried, volumes } =
            self.job(cell, pace, &plan).await?;
        self.free_network().await?;
        let outputs = self.cluster.output(&job.id).await?;
        for volume in volumes {
            self.cluster.delete_volume(&volume).await?;
        }
        let outputs = Outputs(&outputs);
        let marks = outputs.marks(0)?;
        let clock = found::clock(&marks, span_s(&seen)?)?;
        let took = |label: &str| marks.get(label).map(|(began, ended)| (ended - began) / clock);
        let mut runs = Vec::new();
        for side in Side::BOTH {
            for work in Work::ALL {
                let label = found::label(work, side);
                let Some(seconds) = took(&label) else { continue };
                let of = (work, side, seconds);
                let mut run = found::run(&self.right, of, outputs, &servers, plan.vms)?;
                run.cards = cards_use(&carried, &label, pace, seconds);
                if !cell.has_series() {
                    (run.guests, run.servers) = (Vec::new(), Vec::new());
                }
                runs.push(found::rounded(run));
            }
        }
        let fixed_s = took("fixed-0");
        let by_planner = job.gang_move.filter(|_| plan.may_move).map(of_move);
        let moved = moved.or(by_planner);
        Ok(Measured { cell, at_ms, load_1min, fixed_s, clock, runs, moved, lacks: Vec::new() })
    }

    /// Runs a cell's job. Its data are clones of its own.
    async fn job(&mut self, cell: Cell, pace: Pace, plan: &Plan) -> Result<Ran> {
        let mut volumes = Vec::new();
        let mut lines = String::new();
        for (side, home) in Side::BOTH.into_iter().zip(plan.homes) {
            let Some(home) = home else { continue };
            let (at, name) = (home.index(), side.name());
            let tables = self.fresh(&self.data[at].tables.clone()).await?;
            let mining = self.fresh(&self.data[at].mining.clone()).await?;
            lines += &format!(
                "  - {{volume: {mining}, mount: /mine-{name}, access: read}}\n  - {{volume: {tables}, mount: /data-{name}, access: clone}}\n"
            );
            volumes.extend([mining, tables]);
        }
        let spec = self.spec(plan, &lines)?;
        let targets = self.cold_targets()?;
        self.set_network(cell, pace).await?;
        let job = self.cluster.submit(&spec).await?;
        let sampler = Sampler::start(self.lab, targets);
        let mut meanwhile =
            Meanwhile { bench: &*self, cell, pace, moved: None, carried: Vec::new() };
        let what = format!("{cell}: {}", plan.words.join(" "));
        let watched = meanwhile.watch(&job, &what, &sampler).await;
        if watched.is_err() {
            // The next cell needs its hosts.
            drop(self.cluster.cancel(&job.id).await);
        }
        let (job, seen) = watched?;
        let Meanwhile { moved, carried, .. } = meanwhile;
        Ok(Ran { job, seen, servers: sampler.stop().await?, moved, carried, volumes })
    }

    fn spec(&self, plan: &Plan, volumes: &str) -> Result<JobSpec> {
        let volumes =
            if volumes.is_empty() { String::new() } else { format!("volumes:\n{volumes}") };
        let text = format!(
            "name: seeds\nimage: {}\ncount: {}\nmpi: true\nmemory: {}MiB\noutput: 64MiB\ntimeout: 1h\n\
             apart: seeds\nplacement: {{site: {}, move: {}}}\n\
             env: {{WORKS: '{}', SUPPORT: '{SUPPORT}', STEPS: '{STEPS}', STREAMS: '{}', FIXED: '{FIXED}', DATABASE_MEMORY: '{DATABASE_MEMORY_BYTES}'}}\n{volumes}\
             command: exec mpirun -x WORKS -x SUPPORT -x STEPS -x STREAMS -x FIXED -x DATABASE_MEMORY -x PERIGEE_OUTPUT -x PERIGEE_PROGRESS /usr/bin/python3 /job/inputs/works.py\n",
            self.image,
            plan.vms,
            self.size.memory_bytes >> 20,
            self.home(),
            if plan.may_move { "auto" } else { "never" },
            plan.words.join(" "),
            STREAMS.join(";"),
        );
        let spec = job_file::parse(&text, "seeds.yaml")?.spec;
        Ok(JobSpec { inputs: Some(self.inputs.clone()), outputs: vec!["/output".into()], ..spec })
    }
}

impl Meanwhile<'_, '_> {
    /// Waits for the job's end, tells the sampler what runs, and does what a waiting job waits for.
    async fn watch(&mut self, job: &Job, what: &str, sampler: &Sampler) -> Result<(Job, Seen)> {
        let mut step = self.bench.steps.begin(what);
        let began = Instant::now();
        let mut seen: Seen = Vec::new();
        loop {
            let now = self.bench.cluster.job(&job.id).await?;
            let label = now.progress.as_ref().map_or_else(String::new, |it| it.label.clone());
            if !label.is_empty() && seen.last().is_none_or(|(last, _)| *last != label) {
                seen.push((label.clone(), began.elapsed().as_secs_f64()));
                sampler.name(&label);
                self.look(&label).await?;
                if let Some(number) = label.strip_prefix("wait-") {
                    step.at(&format!("waits ({number})"));
                    self.act(&now, number.parse()?).await?;
                }
            }
            step.at(&format!("{:?} {label}", now.state));
            if now.state == JobState::Succeeded {
                step.done(&format!("{:.0} s", began.elapsed().as_secs_f64()));
                return Ok((now, seen));
            }
            if now.state.is_final() {
                let said = self.bench.cluster.log_tail(&job.id).await?;
                bail!("{what}: {}:\n{said}", now.reason);
            }
            ensure!(began.elapsed() < DEADLINE, "{what}: it has not ended: {}", now.reason);
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Reads what the cards of the VMs' hosts have carried so far.
    async fn look(&mut self, label: &str) -> Result<()> {
        if self.cell.kind != Kind::Network {
            return Ok(());
        }
        let mut all = Vec::new();
        for host in self.bench.servers(0)?.iter().chain(&self.bench.targets[..1]) {
            all.push(cards::carried(self.bench.lab, host).await?);
        }
        self.carried.push((label.to_owned(), all));
        Ok(())
    }

    /// Does what the job waits for, and lets it go on.
    async fn act(&mut self, job: &Job, number: u8) -> Result<()> {
        match self.cell.kind {
            Kind::MoveHand => {
                let to = self.bench.servers(1)?;
                let moved = self.bench.cluster.move_job(&job.id, &to).await?;
                self.moved = Some(of_move(moved));
            }
            Kind::Network => {
                let is_first = number == 0;
                // Near is a network for each, and far is one for both.
                let cards =
                    if is_first == self.cell.begins_far() { Cards::One } else { Cards::Two };
                let rate = Rate(Some(self.pace.card_bits_per_s()));
                self.bench.set_cards(rate, cards).await?;
            }
            _ => {}
        }
        for member in &job.members {
            let vm: Vm = self.bench.cluster.vm(&member.vm).await?;
            let seed = volume(&format!("{}-seed", member.vm))?;
            let home = vm.volumes.iter().find(|one| one.volume == seed).map(|one| one.home.clone());
            let home = home.with_context(|| format!("{} has no seed disk", member.vm))?;
            nbd::signal(self.bench.lab, &home, &seed, FIRST_SIGNAL + number)?;
        }
        Ok(())
    }
}

fn of_move(moved: perigee_model::gang::moving::GangMove) -> Moved {
    let ended_ms = moved.ended_ms.unwrap_or(moved.started_ms);
    let seconds = ended_ms.saturating_sub(moved.started_ms) as f64 / 1e3;
    let undone =
        if moved.is_undone() { format!("; undone: {}", moved.undone) } else { String::new() };
    Moved { seconds, reason: format!("{}{undone}", moved.reason) }
}

/// From the first program's begin to the end of all.
fn span_s(seen: &[(String, f64)]) -> Result<f64> {
    let began = seen.first().context("no program was seen")?.1;
    let (last, ended) = seen.last().context("no program was seen")?;
    ensure!(last == "done", "the end was not seen, but {last}");
    Ok(ended - began)
}

/// What the cards carried while a program ran: the difference to the next one's begin.
fn cards_use(
    carried: &[(String, Vec<[cards::Carried; 2]>)],
    label: &str,
    pace: Pace,
    seconds: f64,
) -> Option<CardsUse> {
    let at = carried.iter().position(|(of, _)| of == label)?;
    let (before, after) = (&carried[at].1, &carried.get(at + 1)?.1);
    let mut sum = CardsUse { tunnels_bytes: 0, others_bytes: 0, busiest: 0.0 };
    let servers = before.len().saturating_sub(1);
    for (number, (before, after)) in before.iter().zip(after).enumerate() {
        for (before, after) in before.iter().zip(after) {
            let tunnels_bytes = after.tunnels_bytes.saturating_sub(before.tunnels_bytes);
            let others_bytes = after.others_bytes.saturating_sub(before.others_bytes);
            let busier = tunnels_bytes.max(others_bytes) as f64 * 8.0 / seconds;
            sum.busiest = sum.busiest.max(busier / pace.card_bits_per_s() as f64);
            // The last one is the target, whose traffic the servers' cards carry too.
            if number < servers {
                sum.tunnels_bytes += tunnels_bytes;
                sum.others_bytes += others_bytes;
            }
        }
    }
    Some(sum)
}

/// Unix time.
pub fn now_ms() -> Result<u64> {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
    Ok(u64::try_from(since.as_millis())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(kind: Kind, round: u32) -> Cell {
        Cell { round, kind, rtt_ms: 16, is_dilated: true }
    }

    #[test]
    fn each_program_runs_on_both_sides_and_the_sides_take_turns() {
        let works = [Work::Hpa, Work::Tpch];
        let plan = Plan::of(cell(Kind::Distance, 1), &works);
        assert_eq!(plan.words, ["fixed:0", "hpa:near", "hpa:far", "tpch:near", "tpch:far"]);
        let plan = Plan::of(cell(Kind::Distance, 2), &works);
        assert_eq!(plan.words, ["fixed:0", "hpa:far", "hpa:near", "tpch:far", "tpch:near"]);
    }

    #[test]
    fn before_a_move_the_data_is_far_and_afterwards_the_same_data_is_near() {
        let plan = Plan::of(cell(Kind::MoveHand, 2), &[Work::Hpa]);
        assert_eq!(plan.words, ["fixed:0", "tpch:far", "wait:0", "tpch:near"]);
        assert_eq!(plan.homes, [Some(Side::Far); 2]);
    }

    #[test]
    fn a_network_is_set_before_each_side() {
        let plan = Plan::of(cell(Kind::Network, 2), &[Work::Hpa]);
        assert_eq!(plan.words, ["fixed:0", "wait:0", "hpa:far", "wait:1", "hpa:near"]);
    }

    #[test]
    fn the_busiest_card_is_compared_with_its_rate() {
        let carried = |tunnels_bytes, others_bytes| cards::Carried { tunnels_bytes, others_bytes };
        let zero = [carried(0, 0); 2];
        let later = [carried(1_000_000, 4_000_000), carried(0, 500_000)];
        let target = [carried(0, 0), carried(0, 8_000_000)];
        let all =
            [("hpa-near".to_owned(), vec![zero, zero]), ("done".to_owned(), vec![later, target])];
        let found = cards_use(&all, "hpa-near", Pace(10.0), 1.0).expect("it was seen");
        assert_eq!((found.tunnels_bytes, found.others_bytes), (1_000_000, 4_500_000));
        assert!((found.busiest - 0.64).abs() < 1e-9, "64 of 100 Mbit/s: {found:?}");
        assert_eq!(cards_use(&all, "done", Pace(10.0), 1.0), None);
    }
}
