//! The measurements, and whether the goals are met.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use perigee_lab::measuring::Goal;
use perigee_lab::paper::Figure;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum System {
    Perigee,
    Bare,
}

impl System {
    pub fn name(self) -> &'static str {
        match self {
            Self::Perigee => "Perigee",
            Self::Bare => "bare QEMU",
        }
    }
}

/// One migration. Times are since the clients' begin.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Moved {
    pub to: String,
    pub begun_s: f64,
    pub ended_s: f64,
    #[serde(flatten)]
    pub sending: Sending,
}

/// What the source's QEMU tells of one migration.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Sending {
    /// As the migration experiment has it.
    pub pause_ms: u64,
    /// From its begin to its end, without what is made ready before.
    #[serde(default)]
    pub copy_ms: u64,
    #[serde(default)]
    pub sent_bytes: u64,
}

/// A connection that lasts.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Stream {
    pub goes_on: bool,
    pub longest_gap_ms: f64,
    pub bytes: u64,
}

/// What a load generator got.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Load {
    pub replies: usize,
    /// Requests without a reply, or with another one than the page.
    pub failed: u32,
    /// Between two replies.
    pub longest_gap_ms: f64,
    pub per_100_ms: Vec<u32>,
}

/// All moves of one system.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Run {
    pub system: System,
    pub replies: usize,
    /// Requests without a reply, or with another one than the page.
    pub failed: u32,
    /// Between two replies.
    pub longest_gap_ms: f64,
    pub per_100_ms: Vec<u32>,
    /// Of the application.
    #[serde(default)]
    pub tomcat: Load,
    pub ssh: Stream,
    /// Of `perigee vm ssh`, which bare QEMU has not.
    #[serde(default)]
    pub vm_ssh: Option<Stream>,
    pub download: Stream,
    /// TCP's segments that were sent again.
    pub clients_resent: u64,
    pub guest_resent: u64,
    pub moves: Vec<Moved>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Results {
    pub cpus: usize,
    pub setting: String,
    /// Few moves: the figures say nothing.
    #[serde(default)]
    pub is_quick: bool,
    /// What the paper says of its figure, and what this run says. It follows from the rest.
    #[serde(skip_deserializing)]
    pub paper: Vec<Figure>,
    pub versions: BTreeMap<String, String>,
    pub runs: Vec<Run>,
}

impl Results {
    pub fn of(&self, system: System) -> Option<&Run> {
        self.runs.iter().find(|run| run.system == system)
    }

    pub fn goals(&self) -> Vec<Goal> {
        let Some(run) = self.of(System::Perigee) else { return Vec::new() };
        let moves = run.moves.len();
        let goal = |goal: &str, met: bool, measured: String| Goal {
            goal: goal.to_owned(),
            met: Some(met),
            measured,
        };
        let mut goals = vec![
            goal(
                "no request fails while the guest moves",
                run.failed == 0,
                format!("{} of {} in {moves} moves", run.failed, run.replies + failed(run)),
            ),
            goal(
                "no request to the application fails",
                run.tomcat.failed == 0,
                format!(
                    "{} of {}, with {:.0} ms without a reply at most",
                    run.tomcat.failed,
                    run.tomcat.replies + usize::try_from(run.tomcat.failed).unwrap_or(usize::MAX),
                    run.tomcat.longest_gap_ms
                ),
            ),
            goal(
                "an SSH session goes on",
                run.ssh.goes_on,
                format!("its longest gap was {:.0} ms", run.ssh.longest_gap_ms),
            ),
            goal(
                "a download goes on through all moves",
                run.download.goes_on,
                format!(
                    "{} MiB came, with a gap of {:.0} ms at most",
                    run.download.bytes >> 20,
                    run.download.longest_gap_ms
                ),
            ),
        ];
        if let Some(ssh) = &run.vm_ssh {
            let measured = format!("its longest gap was {:.0} ms", ssh.longest_gap_ms);
            goals.push(goal("a session of perigee vm ssh goes on", ssh.goes_on, measured));
        }
        if let Some(bare) = self.of(System::Bare) {
            let (own, others) = (run.longest_gap_ms, bare.longest_gap_ms);
            goals.push(goal(
                "the longest time without a reply is no longer than with bare QEMU on a plain bridge",
                own <= others,
                format!("{own:.0} ms, and {others:.0} ms with bare QEMU"),
            ));
        }
        goals
    }

    /// Judges, and writes results.json and report.html.
    pub fn write(&mut self, out: &Path) -> Result<()> {
        self.paper = crate::paper::figures(self);
        std::fs::create_dir_all(out)?;
        std::fs::write(out.join("results.json"), serde_json::to_vec_pretty(self)?)?;
        std::fs::write(out.join("report.html"), crate::report::html(self))?;
        Ok(())
    }
}

fn failed(run: &Run) -> usize {
    usize::try_from(run.failed).unwrap_or(usize::MAX)
}

/// Of times in seconds, in their order.
pub fn longest_gap_ms(times: &[f64]) -> f64 {
    times.windows(2).map(|pair| (pair[1] - pair[0]) * 1e3).fold(0.0, f64::max)
}

/// How many there are in each tenth of a second.
pub fn per_100_ms(times: &[f64], whole_s: f64) -> Vec<u32> {
    let mut counts = Vec::new();
    let mut times = times.iter().peekable();
    let mut end_s = 0.1;
    while end_s < whole_s {
        let mut count = 0;
        while times.next_if(|time| **time < end_s).is_some() {
            count += 1;
        }
        counts.push(count);
        end_s += 0.1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_counted_by_tenths_of_a_second() {
        let times = [0.01, 0.02, 0.15, 0.41];
        assert_eq!(per_100_ms(&times, 0.55), [2, 1, 0, 0, 1]);
        assert!((longest_gap_ms(&times) - 260.0).abs() < 1e-6);
    }
}
