//! What a run has found: the content of `results.json`.

use std::collections::BTreeMap;

use perigee_model::job::{Migration, MigrationState};
use perigee_model::load::VcpuUse;
use perigee_model::{HostId, VmId};
use serde::{Deserialize, Serialize};

/// All of it. Times are seconds since balancing was switched on.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Outcome {
    pub versions: BTreeMap<String, String>,
    /// For how much of the time each VM wants a CPU.
    pub busy_percent: u64,
    /// The machine's load when the run began: what others do on the same CPUs is in all figures.
    pub load_1min: f64,
    /// Before balancing was switched on.
    pub before: Measured,
    /// When no VM moved any more.
    pub after: Measured,
    pub moves: Vec<Move>,
    /// When the controller was killed.
    pub killed_at_s: f64,
    /// The VMs, where they are at the end.
    pub vms: Vec<VmAtEnd>,
    /// What is wrong whatever the machine's speed; empty when all is right.
    pub faults: Vec<String>,
}

/// What the VMs did with the hosts' CPUs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    pub seconds: f64,
    /// The VMs of each host together.
    pub hosts: BTreeMap<HostId, VcpuUse>,
}

impl Measured {
    /// The run delay of all VMs, in seconds for each second.
    pub fn run_delay(&self) -> f64 {
        self.hosts.values().map(|load| load.waiting_vcpus).sum()
    }
}

/// A move that the balancer has decided.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Move {
    pub vm: VmId,
    pub from: HostId,
    pub to: HostId,
    pub decided_at_s: f64,
    /// When the rule would decide it, by the account at the first look with known loads; `None` if no such look was seen before the
    /// decision.
    pub predicted_at_s: Option<f64>,
    pub ended_at_s: Option<f64>,
    pub pause_ms: u64,
    pub state: MigrationState,
    pub reason: String,
    /// Why it was aborted.
    pub error: String,
}

impl Move {
    /// `began_ms` is when balancing was switched on, Unix time of the controller.
    pub fn of(migration: Migration, began_ms: u64, predicted_at_s: Option<f64>) -> Self {
        let at_s = |ms: u64| ms.saturating_sub(began_ms) as f64 / 1000.0;
        Self {
            decided_at_s: at_s(migration.started_ms),
            ended_at_s: migration.ended_ms.map(at_s),
            predicted_at_s,
            vm: migration.vm,
            from: migration.from,
            to: migration.to,
            pause_ms: migration.downtime_ms,
            state: migration.state,
            reason: migration.reason,
            error: migration.error,
        }
    }
}

/// A VM when all is over.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VmAtEnd {
    pub vm: VmId,
    pub host: Option<HostId>,
    /// How often its guest has begun: once, unless it has lost its state.
    pub begun: usize,
    /// What its guest has said is wrong with its disk.
    pub broken: Vec<String>,
    /// Files that it has written and read again.
    pub rounds: u64,
}

impl VmAtEnd {
    /// `said` is what the console of the VM's guest has shown.
    pub fn of(vm: VmId, host: Option<HostId>, said: &str) -> Self {
        let lines = || said.lines().filter_map(|line| Some(line.trim().split_once("busy: ")?.1));
        let rounds = lines().filter_map(|line| line.strip_prefix("round ")?.parse().ok()).max();
        Self {
            vm,
            host,
            begun: lines().filter(|line| *line == "begun").count(),
            broken: lines().filter(|line| line.contains("broken")).map(str::to_owned).collect(),
            rounds: rounds.unwrap_or(0),
        }
    }
}

impl Outcome {
    /// Finds what is wrong whatever the machine's speed.
    pub fn judge(&mut self) {
        let mut faults = Vec::new();
        if !self.moves.iter().any(|one| one.state == MigrationState::Completed) {
            faults.push("no VM has moved".to_owned());
        }
        for one in &self.moves {
            if one.state != MigrationState::Completed {
                let Move { vm, from, to, error, .. } = one;
                faults.push(format!("the move of {vm} from {from} to {to} was aborted: {error}"));
            }
        }
        for end in &self.vms {
            let moves = self.moves.iter().filter(|one| one.vm == end.vm).count();
            if moves > 1 {
                faults.push(format!("{} has moved {moves} times", end.vm));
            }
            if end.begun != 1 {
                faults.push(format!("the guest of {} has begun {} times", end.vm, end.begun));
            }
            faults.extend(end.broken.iter().map(|said| format!("{} says {said}", end.vm)));
        }
        self.faults.extend(faults);
    }

    /// What came of it, for people.
    pub fn lines(&self) -> Vec<String> {
        let [before, after] = [&self.before, &self.after].map(Measured::run_delay);
        let left = if before > 0.0 { after / before * 100.0 } else { f64::NAN };
        let mut lines = vec![format!(
            "run delay of all VMs: {before:.2} s per second before, {after:.2} after ({left:.0} %)"
        )];
        for one in &self.moves {
            let predicted = one.predicted_at_s.map_or("not predicted".to_owned(), |at_s| {
                format!("the rule predicted {at_s:.0} s")
            });
            lines.push(format!(
                "after {:.0} s ({predicted}) {} {}, pause {} ms",
                one.decided_at_s, one.vm, one.reason, one.pause_ms
            ));
        }
        lines.push(format!("the controller was killed after {:.1} s", self.killed_at_s));
        lines.extend(self.faults.iter().map(|fault| format!("fault: {fault}")));
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moved(vm: &str) -> Move {
        let host = |name: &str| HostId::new(name).expect("a name");
        Move {
            vm: VmId::new(vm).expect("a name"),
            from: host("home1"),
            to: host("home2"),
            decided_at_s: 20.0,
            predicted_at_s: Some(20.0),
            ended_at_s: Some(25.0),
            pause_ms: 30,
            state: MigrationState::Completed,
            reason: String::new(),
            error: String::new(),
        }
    }

    fn outcome(moves: Vec<Move>, said: &str) -> Vec<String> {
        let vms = vec![VmAtEnd::of(VmId::new("busy1").expect("a name"), None, said)];
        let mut outcome = Outcome { moves, vms, ..Outcome::default() };
        outcome.judge();
        outcome.faults
    }

    const SAID: &str = "SeaBIOS\r\nbusy: begun\r\nbusy: round 1\r\nbusy: round 2\r\n";

    #[test]
    fn one_move_of_a_guest_that_goes_on_is_right_and_its_rounds_are_counted() {
        assert_eq!(outcome(vec![moved("busy1")], SAID), Vec::<String>::new());
        let at_end = VmAtEnd::of(VmId::new("busy1").expect("a name"), None, SAID);
        assert_eq!((at_end.begun, at_end.rounds), (1, 2));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let faults = |moves, said: &str, why: &str| {
            let faults = outcome(moves, said);
            assert!(faults.iter().any(|fault| fault.contains(why)), "{why}: {faults:?}");
        };
        faults(vec![], SAID, "no VM has moved");
        faults(vec![moved("busy1"), moved("busy1")], SAID, "busy1 has moved 2 times");
        let aborted = Move { state: MigrationState::Aborted, ..moved("busy1") };
        faults(vec![aborted], SAID, "was aborted");
        faults(vec![moved("busy1")], &SAID.repeat(2), "has begun 2 times");
        faults(
            vec![moved("busy1")],
            &format!("{SAID}busy: broken in round 3\r\n"),
            "broken in round 3",
        );
    }
}
