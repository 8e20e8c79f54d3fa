//! The results of a run: `results.json`.

use std::collections::BTreeMap;

use perigee_lab::measuring::median;
use serde::{Deserialize, Serialize};

use crate::goals::Goal;

/// The whole content of `results.json`.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Results {
    /// The versions of each server, of fio and of the kernel.
    pub versions: BTreeMap<String, String>,
    pub rounds: u32,
    /// A quick run shows that everything works; its figures are not meaningful.
    pub quick: bool,
    pub results: Vec<Measurement>,
    /// The figures that are not measured per request.
    pub figures: Vec<Figure>,
    pub goals: Vec<Goal>,
}

/// One workload on one server in one round.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    pub workload: String,
    pub server: String,
    pub transport: String,
    pub round: u32,
    /// The load generator: `own` or `fio`.
    pub generator: String,
    /// The position on the x axis, if it belongs to a curve.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<f64>,
    pub iops: f64,
    pub mib_per_s: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    pub server_cpu_s_per_million: f64,
    pub server_rss_mib: f64,
    pub server_private_mib: f64,
    /// With the time of one flush at the end added to that of the requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops_with_flush: Option<f64>,
    /// MiB that were read from the device during the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_read_mib: Option<f64>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    pub name: String,
    pub server: String,
    pub value: f64,
    pub unit: String,
    /// The position on the x axis, if it belongs to a curve.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<f64>,
}

/// In the place of a server's name: what the machine does without one.
pub const MACHINE: &str = "machine";

/// A figure of the measurements.
pub type Column = fn(&Measurement) -> Option<f64>;

pub const IOPS: Column = |m| Some(m.iops);
pub const IOPS_WITH_FLUSH: Column = |m| m.iops_with_flush;
pub const P99_US: Column = |m| Some(m.p99_us);
pub const CPU: Column = |m| Some(m.server_cpu_s_per_million);

impl Results {
    /// The median over the rounds of our own generator.
    pub fn median(
        &self,
        workload: &str,
        transport: &str,
        server: &str,
        column: Column,
    ) -> Option<f64> {
        self.median_at(workload, transport, server, None, column)
    }

    pub fn median_at(
        &self,
        workload: &str,
        transport: &str,
        server: &str,
        at: Option<f64>,
        column: Column,
    ) -> Option<f64> {
        let values: Vec<f64> = self
            .results
            .iter()
            .filter(|m| m.workload == workload && m.transport == transport)
            .filter(|m| m.server == server && m.generator == "own" && m.at == at)
            .filter_map(column)
            .collect();
        median(values)
    }

    pub fn figure(&self, name: &str, server: &str) -> Option<f64> {
        self.figures.iter().find(|f| f.name == name && f.server == server).map(|f| f.value)
    }

    /// The names of the servers in the order in which they appear.
    pub fn servers(&self, workload: &str, transport: &str) -> Vec<String> {
        let mut servers: Vec<String> = Vec::new();
        for m in &self.results {
            let here = m.workload == workload && m.transport == transport;
            if here && m.generator == "own" && !servers.contains(&m.server) {
                servers.push(m.server.clone());
            }
        }
        servers
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn measurement(workload: &str, server: &str, transport: &str, iops: f64) -> Measurement {
        Measurement {
            workload: workload.into(),
            server: server.into(),
            transport: transport.into(),
            generator: "own".into(),
            iops,
            p99_us: 1e9 / iops,
            server_cpu_s_per_million: 1e6 / iops,
            ..Measurement::default()
        }
    }

    #[test]
    fn a_median_is_taken_over_the_rounds_of_one_case() {
        let mut results = Results::default();
        for iops in [1.0, 9.0, 5.0] {
            results.results.push(measurement("read", "a", "unix", iops));
            results.results.push(measurement("read", "b", "unix", 100.0));
            results.results.push(measurement("read", "a", "tcp", 100.0));
        }
        results.results.push(Measurement {
            generator: "fio".into(),
            ..measurement("read", "a", "unix", 1000.0)
        });
        assert_eq!(results.median("read", "unix", "a", IOPS), Some(5.0));
        assert_eq!(results.median("read", "unix", "c", IOPS), None);
        assert_eq!(results.servers("read", "unix"), ["a", "b"]);
    }

    #[test]
    fn results_survive_their_file() {
        let mut results = Results { rounds: 5, ..Results::default() };
        results.results.push(measurement("read", "a", "unix", 2.0));
        let text = serde_json::to_string(&results).expect("JSON");
        let back: Results = serde_json::from_str(&text).expect("the same JSON");
        assert_eq!(back.results, results.results);
    }
}
