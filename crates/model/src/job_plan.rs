//! `POST /v1/jobs/plan`: the ways to run a job at the hosts that are there, when it could start at each of them, and the ways to run it at a
//! host that would be rented for it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::plan::{Estimate, OptionCost, Plan, PlanOption, Seconds, Unknown, Way};
use crate::{HostId, SiteId};

/// What a job would take and cost. It rents nothing: `plan` has the choice among the hosts that are there.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobPlan {
    /// The ways at the hosts that are there, beside the other fields in JSON. Their times are from the VM's start.
    #[serde(flatten)]
    pub plan: Plan,
    /// Of those hosts, the ones that have no room for the job now, and when they do. The others have room now.
    #[serde(default)]
    pub waits: Vec<HostWait>,
    /// The ways at hosts that could be rented, the soonest first: the best trades, the soonest one of each way, and what is over a budget.
    #[serde(default)]
    pub rented: Vec<RentOption>,
    /// What was not looked at, and why.
    #[serde(default)]
    pub not_considered: Vec<NotConsidered>,
}

/// When a job could start at a host that has no room for it now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostWait {
    /// Which host.
    pub host: HostId,
    /// The seconds until then; `None` if that is not known.
    pub wait: Option<Estimate>,
    /// What it waits for, or why that is not known.
    pub why: String,
}

/// One way to run a job at a host that would be rented for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RentOption {
    /// The provider's name in `providers.yaml`.
    pub provider: String,
    /// The provider's name of the kind of machine.
    pub kind: String,
    /// The provider's name of the place: the cheapest one.
    pub zone: String,
    /// May the provider take the host back at any time?
    pub spot: bool,
    /// The site that such a host would belong to if nobody names one.
    pub site: SiteId,
    /// What the fields below call the host, which is not there.
    pub host: HostId,
    /// How the job would get to its data.
    pub way: Way,
    /// The seconds from the request to the VM's start.
    pub wait: Estimate,
    /// The expected seconds from the VM's start, part by part.
    pub predicted: Seconds,
    /// Their sum, and how far from it the truth may be.
    pub total: Estimate,
    /// The bytes that it would send between hosts; `None` if that is not known.
    pub shipped_bytes: Option<u64>,
    /// Parts of it that are guessed.
    pub unknown: Vec<Unknown>,
    /// Whether it keeps the budgets, and the job may run so.
    pub possible: bool,
    /// Why not, or how it differs from the way that was chosen.
    pub reason: String,
    /// What it would cost if the host were rented for this job alone: from the request to the command's end, with the host's whole disk.
    pub cost: OptionCost,
}

/// What was not looked at for a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NotConsidered {
    /// The provider's name in `providers.yaml`.
    pub provider: String,
    /// The kind of machine; `None`: nothing of this provider.
    pub kind: Option<String>,
    /// Whether the provider may take it back at any time.
    pub spot: bool,
    /// Why, in a few words.
    pub why: String,
}

impl JobPlan {
    /// When the job could start as an option of the plan says: of a job with several VMs, at the host that has room last. What is not known is
    /// the latest. `None` if there is room now.
    #[must_use]
    pub fn wait_of(&self, option: &PlanOption) -> Option<&HostWait> {
        let hosts = || std::iter::once(&option.start).chain(&option.hosts);
        let waits = self.waits.iter().filter(|wait| hosts().any(|host| *host == wait.host));
        let until_s = |wait: &HostWait| wait.wait.map_or(f64::INFINITY, |wait| wait.expected_s);
        waits.max_by(|one, other| until_s(one).total_cmp(&until_s(other)))
    }

    /// The seconds from now until an option of the plan ends; `None` if that is not known.
    #[must_use]
    pub fn ends(&self, option: &PlanOption) -> Option<Estimate> {
        match self.wait_of(option) {
            None => Some(option.total),
            Some(wait) => wait.wait.map(|wait| wait.and_then(option.total)),
        }
    }
}

impl RentOption {
    /// The seconds from now until its end.
    #[must_use]
    pub fn ends(&self) -> Estimate {
        self.wait.and_then(self.total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Basis;

    fn host(name: &str) -> HostId {
        HostId::new(name).expect("a name")
    }

    fn option(hosts: &[&str]) -> PlanOption {
        PlanOption {
            way: Way::Remote,
            start: host(hosts[0]),
            end: host(hosts[0]),
            predicted: Seconds::default(),
            total: Estimate::default(),
            shipped_bytes: None,
            unknown: Vec::new(),
            longer: None,
            chosen: false,
            reason: String::new(),
            cost: None,
            hosts: hosts.iter().map(|name| host(name)).collect(),
            end_hosts: Vec::new(),
        }
    }

    #[test]
    fn several_vms_wait_for_the_host_that_has_room_last() {
        let wait = |name: &str, seconds: Option<f64>| HostWait {
            host: host(name),
            wait: seconds.map(|s| Estimate { expected_s: s, low_s: s, high_s: s }),
            why: String::new(),
        };
        let plan =
            Plan { basis: Basis::History, options: Vec::new(), figures: Vec::new(), moves: false };
        let waits = vec![wait("c", None), wait("b", Some(9.0)), wait("a", Some(5.0))];
        let plan = JobPlan { plan, waits, rented: Vec::new(), not_considered: Vec::new() };
        let waits_for =
            |hosts: &[&str]| plan.wait_of(&option(hosts)).map(|wait| wait.host.to_string());
        assert_eq!(waits_for(&["a", "b"]).as_deref(), Some("b"));
        assert_eq!(waits_for(&["b", "c", "a"]).as_deref(), Some("c"), "that is not known");
        assert_eq!(waits_for(&["free"]), None);
        assert_eq!(plan.ends(&option(&["free", "b"])).map(|ends| ends.expected_s), Some(9.0));
        assert_eq!(plan.ends(&option(&["a", "c"])), None);
    }
}
