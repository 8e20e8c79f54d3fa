//! Which VMs no node of Slurm needs any more, and which nodes Slurm has given up: the decision of `perigee slurm reconcile`.
//!
//! Slurm calls no SuspendProgram for a node that was not up within ResumeTimeout, nor for one that has stopped answering. Such a node is
//! down until somebody sets it back, and its VM would run on. A look that finds a node so changes nothing; one that finds it still so
//! after the grace period does.

use std::collections::BTreeMap;
use std::path::Path;

use perigee_http::write_private;
use perigee_model::Problem;
use serde::{Deserialize, Serialize};

use super::scontrol::Node;

/// What is to be done about a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Action {
    /// Its VM ends.
    pub ends_vm: bool,
    /// Slurm is told that it is powered down and may be used again.
    pub resets_node: bool,
    /// Why, in words that follow what Slurm says of the node.
    pub why: &'static str,
}

/// What nobody else will do about a node, and is right to be done if it stays so. `node` is `None` where Slurm shows no such node.
pub fn action(has_vm: bool, node: Option<&Node>) -> Option<Action> {
    let Some(node) = node else {
        let why = "it shows no such node, so the node is powered down or in no configuration";
        return has_vm.then_some(Action { ends_vm: true, resets_node: false, why });
    };
    if COMING_OR_GOING.iter().any(|flag| node.is(flag)) {
        return None;
    }
    let is_down = node.is("DOWN");
    // What a person has set down, for whatever reason, stays so.
    let is_given_up = is_down && SLURMS_REASONS.iter().any(|own| node.reason.starts_with(own));
    match (node.is("POWERED_DOWN"), is_given_up) {
        (true, true) => {
            let why = "it was not up within ResumeTimeout";
            Some(Action { ends_vm: has_vm, resets_node: true, why })
        }
        (true, false) => has_vm.then_some(Action {
            ends_vm: true,
            resets_node: false,
            why: "it is powered down",
        }),
        (false, true) if node.is("NOT_RESPONDING") => {
            let why = "it is down and does not answer";
            Some(Action { ends_vm: has_vm, resets_node: true, why })
        }
        (false, _) => None,
    }
}

/// A ResumeProgram or a SuspendProgram is at work, or will be within seconds: also a node that is powered down gets jobs first. If nothing
/// comes of it, ResumeTimeout follows.
const COMING_OR_GOING: [&str; 6] =
    ["POWER_UP", "POWERING_UP", "POWER_DOWN", "POWERING_DOWN", "ALLOCATED", "MIXED"];

/// What slurmctld itself writes as the reason of a node that it has given up.
const SLURMS_REASONS: [&str; 2] = ["ResumeTimeout reached", "Not responding"];

/// Since when the looks find a node so that something is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// When its VM was made; 0 if it has none. Another VM begins anew.
    made_ms: u64,
    /// The first look that found it so; Unix time.
    since_ms: u64,
}

/// What the looks before have found, by the node's name.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Looks(BTreeMap<String, Seen>);

impl Looks {
    /// Of a file; none if it does not exist yet.
    ///
    /// # Errors
    /// `Invalid` when it can't be read.
    pub fn read(path: &Path) -> Result<Self, Problem> {
        let what = || format!("can't read {}", path.display());
        match std::fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|e| {
                Problem::invalid(what(), e).next("delete the file: all nodes are then seen anew")
            }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(Problem::invalid(what(), error)),
        }
    }

    /// # Errors
    /// If the file can't be written: then the next look does not know of this one.
    pub fn write(&self, path: &Path) -> Result<(), Problem> {
        let bytes =
            serde_json::to_vec(self).map_err(|e| Problem::internal("can't write JSON", e))?;
        write_private(path, &bytes)
    }

    /// A node is found so. Returns the seconds since the first look that found it so.
    pub fn found(&mut self, node: &str, made_ms: u64, now_ms: u64) -> u64 {
        let seen = Seen { made_ms, since_ms: now_ms };
        let known = self.0.entry(node.to_owned()).or_insert(seen);
        // A time that is yet to come was read off a clock that was set back since.
        if known.made_ms != made_ms || known.since_ms > now_ms {
            *known = seen;
        }
        (now_ms - known.since_ms) / 1000
    }

    /// Nothing is to be done about a node, or it was done.
    pub fn forget(&mut self, node: &str) {
        self.0.remove(node);
    }

    /// Forgets the nodes that a look at all has not seen.
    pub fn keep_only(&mut self, is_there: impl Fn(&str) -> bool) {
        self.0.retain(|node, _| is_there(node));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(state: &str, reason: &str) -> Node {
        Node { flags: state.split('+').map(str::to_owned).collect(), reason: reason.to_owned() }
    }

    /// Whether the VM ends, and whether the node is reset.
    fn done(has_vm: bool, state: &str, reason: &str) -> (bool, bool) {
        let action = action(has_vm, Some(&node(state, reason)));
        action.map_or((false, false), |action| (action.ends_vm, action.resets_node))
    }

    #[test]
    fn a_vm_ends_that_no_node_needs() {
        assert_eq!(done(true, "IDLE+CLOUD+POWERED_DOWN", ""), (true, false));
        assert_eq!(done(true, "IDLE+CLOUD+DRAIN+POWERED_DOWN", "by ann"), (true, false));
        let timeout = "ResumeTimeout reached";
        let down = "DOWN+CLOUD+POWERED_DOWN+NOT_RESPONDING";
        assert_eq!(done(true, down, timeout), (true, true));
        assert_eq!(done(true, "DOWN+CLOUD+NOT_RESPONDING", "Not responding"), (true, true));
        assert!(action(true, None).expect("it ends").ends_vm);
    }

    #[test]
    fn a_node_that_slurm_has_given_up_is_reset_and_one_that_a_person_set_down_is_not() {
        let down = "DOWN+CLOUD+POWERED_DOWN+NOT_RESPONDING";
        assert_eq!(done(false, down, "ResumeTimeout reached"), (false, true));
        assert_eq!(done(false, "DOWN+CLOUD+NOT_RESPONDING", "Not responding"), (false, true));
        assert_eq!(done(false, down, "disk is broken"), (false, false));
        // Nobody uses its VM all the same.
        assert_eq!(done(true, down, "disk is broken"), (true, false));
        // Somebody looks at it.
        assert_eq!(done(true, "DOWN+CLOUD+NOT_RESPONDING", "looked at by ann"), (false, false));
        assert_eq!(action(false, None), None);
    }

    #[test]
    fn a_vm_stays_whose_node_is_used_or_on_its_way() {
        for state in [
            "IDLE+CLOUD",
            "ALLOCATED+CLOUD",
            "ALLOCATED+CLOUD+POWERED_DOWN",
            "IDLE+CLOUD+POWERED_DOWN+POWER_UP",
            "MIXED+CLOUD+DRAIN",
            "IDLE+CLOUD+NOT_RESPONDING",
            "ALLOCATED+CLOUD+NOT_RESPONDING+POWERING_UP",
            "IDLE+CLOUD+POWERING_DOWN",
            "DOWN+CLOUD",
            "DOWN+CLOUD+NOT_RESPONDING+POWERING_UP",
            "UNKNOWN+CLOUD",
            "A_WORD_OF_A_LATER_VERSION",
        ] {
            for reason in ["", "Not responding"] {
                assert_eq!(done(true, state, reason), (false, false), "{state} {reason}");
            }
        }
    }

    #[test]
    fn the_grace_period_begins_with_the_first_look_at_this_vm() {
        let mut looks = Looks::default();
        assert_eq!(looks.found("cloud1", 7, 10_000), 0);
        assert_eq!(looks.found("cloud1", 7, 70_000), 60);
        assert_eq!(looks.found("cloud1", 8, 80_000), 0, "another VM of the name");
        assert_eq!(looks.found("cloud1", 8, 20_000), 0, "the clock was set back");
        assert_eq!(looks.found("cloud1", 8, 25_000), 5);
        looks.forget("cloud1");
        assert_eq!(looks.found("cloud1", 8, 99_000), 0, "it was used meanwhile");
    }

    #[test]
    fn the_looks_are_kept_in_a_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("state/looks.json");
        let mut looks = Looks::read(&path).expect("none yet");
        looks.found("cloud1", 7, 10_000);
        looks.write(&path).expect("written");
        assert_eq!(Looks::read(&path), Ok(looks));
        std::fs::write(&path, "{").expect("written");
        assert!(Looks::read(&path).expect_err("it is damaged").next.contains("delete the file"));
    }
}
