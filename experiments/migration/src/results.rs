//! The measurements, the medians, and whether the goals are met.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use perigee_lab::measuring::median;
use perigee_model::phases::Phases;
use serde::{Deserialize, Serialize};

use crate::guest::Guest;

/// How much longer the guest may be paused than with bare QEMU.
pub const PAUSE_LONGER_MS_MAX: f64 = 50.0;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum System {
    Bare,
    Perigee,
}

/// One migration.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Measured {
    /// The time from the request, which includes the start of the destination's QEMU, until the requester knows
    /// that the guest has arrived.
    pub whole_ms: f64,
    /// According to the source's QEMU: from the command to send until the guest has arrived.
    pub qemu_total_ms: u64,
    /// According to the source's QEMU: from stopping the guest until it has arrived. Bare QEMU's destination
    /// lets it run by then. Perigee's agent lets it run later, and that time is added.
    pub pause_ms: u64,
    pub bytes: u64,
    /// The phases of a migration by Perigee.
    pub phases: Option<Phases>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Measurement {
    pub rtt_ms: u32,
    pub guest: Guest,
    pub system: System,
    pub round: u32,
    /// The machine's load, which other processes may have caused.
    pub load_1min: f64,
    #[serde(flatten)]
    pub measured: Measured,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Medians {
    pub whole_ms: f64,
    pub qemu_total_ms: f64,
    pub pause_ms: f64,
    pub mib: f64,
}

/// A comparison of both systems.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Comparison {
    pub rtt_ms: u32,
    pub guest: Guest,
    pub rounds: usize,
    pub bare: Medians,
    pub perigee: Medians,
    /// Perigee's time divided by bare QEMU's; the goal is at most 1.
    pub whole_ratio: f64,
    pub qemu_total_ratio: f64,
    pub whole_goal_met: bool,
    pub pause_longer_ms: f64,
    pub pause_goal_met: bool,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Results {
    pub cpus: usize,
    pub setting: String,
    pub goals: String,
    pub versions: BTreeMap<String, String>,
    pub comparisons: Vec<Comparison>,
    pub measurements: Vec<Measurement>,
}

impl Results {
    /// The results of an earlier run, without the round trips that are measured now.
    pub fn load(out: &Path, now_rtts_ms: &[u32]) -> Result<Self> {
        let path = out.join("results.json");
        let mut results = match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .with_context(|| format!("{} is not of this experiment", path.display()))?,
            Err(_) => Self::default(),
        };
        results.measurements.retain(|m| !now_rtts_ms.contains(&m.rtt_ms));
        Ok(results)
    }

    pub fn compare(&mut self) {
        let mut cases: Vec<(u32, Guest)> =
            self.measurements.iter().map(|m| (m.rtt_ms, m.guest)).collect();
        cases.sort_unstable();
        cases.dedup();
        self.comparisons =
            cases.iter().filter_map(|(rtt_ms, guest)| self.comparison(*rtt_ms, *guest)).collect();
    }

    pub fn of(&self, rtt_ms: u32, guest: Guest, system: System) -> Vec<&Measurement> {
        let is_it = |m: &&Measurement| (m.rtt_ms, m.guest, m.system) == (rtt_ms, guest, system);
        self.measurements.iter().filter(is_it).collect()
    }

    fn comparison(&self, rtt_ms: u32, guest: Guest) -> Option<Comparison> {
        let (all_bare, all_perigee) =
            (self.of(rtt_ms, guest, System::Bare), self.of(rtt_ms, guest, System::Perigee));
        let (bare, perigee) = (medians(&all_bare)?, medians(&all_perigee)?);
        let whole_ratio = perigee.whole_ms / bare.whole_ms;
        let pause_longer_ms = perigee.pause_ms - bare.pause_ms;
        Some(Comparison {
            rtt_ms,
            guest,
            rounds: all_bare.len().min(all_perigee.len()),
            bare,
            perigee,
            whole_ratio,
            qemu_total_ratio: perigee.qemu_total_ms / bare.qemu_total_ms,
            whole_goal_met: whole_ratio <= 1.0,
            pause_longer_ms,
            pause_goal_met: pause_longer_ms <= PAUSE_LONGER_MS_MAX,
        })
    }

    pub fn write(&self, out: &Path) -> Result<()> {
        std::fs::create_dir_all(out)?;
        std::fs::write(out.join("results.json"), serde_json::to_vec_pretty(self)?)?;
        std::fs::write(out.join("report.html"), crate::report::html(self))?;
        Ok(())
    }
}

fn medians(all: &[&Measurement]) -> Option<Medians> {
    let of = |value: fn(&Measured) -> f64| median(all.iter().map(|m| value(&m.measured)));
    Some(Medians {
        whole_ms: of(|m| m.whole_ms)?,
        qemu_total_ms: of(|m| float(m.qemu_total_ms))?,
        pause_ms: of(|m| float(m.pause_ms))?,
        mib: of(|m| float(m.bytes) / f64::from(1 << 20))?,
    })
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds and bytes of one migration")]
fn float(value: u64) -> f64 {
    value as f64
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn results() -> Results {
        let mut results = Results::default();
        for round in 1..=3 {
            for (system, whole_ms, pause_ms) in
                [(System::Bare, 2000.0, 100), (System::Perigee, 2100.0, 130)]
            {
                results.measurements.push(Measurement {
                    rtt_ms: 16,
                    guest: Guest::Idle,
                    system,
                    round,
                    load_1min: 1.0,
                    measured: Measured {
                        whole_ms: whole_ms + f64::from(round),
                        qemu_total_ms: 1500,
                        pause_ms,
                        bytes: 100 << 20,
                        phases: (system == System::Perigee).then(Phases::default),
                    },
                });
            }
        }
        results.compare();
        results
    }

    #[test]
    fn a_missed_goal_stands_as_missed() {
        let compared = results().comparisons[0];
        assert_eq!(compared.rounds, 3);
        assert!((compared.bare.whole_ms - 2002.0).abs() < 1e-9);
        assert!(!compared.whole_goal_met && compared.pause_goal_met);
        assert!((compared.pause_longer_ms - 30.0).abs() < 1e-9);
    }
}
