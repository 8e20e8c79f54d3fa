//! The cluster rents hosts by itself: what an admin allows, what was decided, and why.
//!
//! The planner decides (`planner/src/rent/`); the controller gathers what that needs and carries it out
//! (`controller/src/rentals/automatic/`).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::auto_mode::AutoMode;
use crate::ids::{JobId, RentalId};
use crate::money::Money;

/// How many hosts may be rented at once if nobody says it.
pub const RENTED_MOST_DEFAULT: u32 = 4;

/// Decisions that are kept and shown.
pub const RENT_DECISIONS_MAX: usize = 200;

/// Jobs of a decision that are named. The others are only counted.
pub const RENT_JOBS_NAMED: usize = 32;

/// By whom a host was rented that the rule has rented, as [`crate::rental::Rental::by`] says it.
pub const RENTED_BY_RULE: &str = "the renting rule";

/// `PUT /v1/renting`: what is left out stays as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SetRenting {
    /// Whether the cluster rents by itself.
    #[serde(default)]
    pub mode: Option<AutoMode>,
    /// What an hour of waiting costs a job whose file says nothing of money; 0: it is no reason to rent.
    #[serde(default)]
    pub waiting_costs_per_hour: Option<Money>,
    /// How many hosts may be rented at once.
    #[serde(default)]
    #[schema(maximum = 100)]
    pub most: Option<u32>,
}

/// What an admin has said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RentSettings {
    /// Whether the cluster rents by itself.
    pub mode: AutoMode,
    /// What an hour of waiting costs a job whose file says nothing of money; `None`: such a job is no reason to rent.
    pub waiting_costs_per_hour: Option<Money>,
    /// How many hosts may be rented at once, with those that people rent.
    pub most: u32,
}

impl Default for RentSettings {
    fn default() -> Self {
        Self { mode: AutoMode::default(), waiting_costs_per_hour: None, most: RENTED_MOST_DEFAULT }
    }
}

impl RentSettings {
    /// With what was asked for.
    #[must_use]
    pub fn with(self, ask: SetRenting) -> Self {
        Self {
            mode: ask.mode.unwrap_or(self.mode),
            waiting_costs_per_hour: match ask.waiting_costs_per_hour {
                None => self.waiting_costs_per_hour,
                Some(Money::ZERO) => None,
                some => some,
            },
            most: ask.most.unwrap_or(self.most),
        }
    }
}

/// What is decided about a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RentAction {
    /// A host is rented.
    Rent,
    /// A rented host stays.
    Keep,
    /// A rented host is given back.
    GiveBack,
}

/// For which jobs the rule has rented a host, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RentedFor {
    /// The first ones of the jobs that are to run there.
    pub jobs: Vec<JobId>,
    /// How many those are.
    pub jobs_count: u32,
    /// What the whole queue's waiting and traffic cost less.
    pub saves: Money,
    /// What the machine is expected to cost.
    pub costs: Money,
    /// For so many seconds the machine is paid before more is reserved.
    pub reserve_s: u64,
    /// The figures, in words.
    pub why: String,
}

/// A decision, with its figures.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RentDecision {
    /// When; Unix time.
    pub at_ms: u64,
    /// What is done.
    pub action: RentAction,
    /// Whether it was carried out, or would only be.
    pub done: bool,
    /// The rental; `None` if a host would be rented.
    pub rental: Option<RentalId>,
    /// The provider's name in `providers.yaml`.
    pub provider: String,
    /// As in [`crate::rental::Offer::kind`].
    pub kind: String,
    /// As in [`crate::rental::Offer::zone`].
    pub zone: String,
    /// As in [`crate::rental::Offer::spot`].
    pub spot: bool,
    /// For which jobs, of a host that is rented.
    pub rented_for: Option<RentedFor>,
    /// The figures, in words.
    pub why: String,
}

/// What was learned of the starts of a kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LearnedStart {
    /// The provider's name in `providers.yaml`.
    pub provider: String,
    /// As in [`crate::rental::Offer::kind`].
    pub kind: String,
    /// From how many starts.
    pub starts: u32,
    /// The seconds from the request to the first job, or until the host joined, that are expected.
    pub expected_s: f64,
    /// 9 of 10 starts take at most so many seconds.
    pub high_s: f64,
    /// The mean seconds until the provider takes a spot host back; `None` if that was never seen.
    pub taken_back_every_s: Option<f64>,
}

/// `GET /v1/renting`: what an admin has said, and what the last look has decided.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Renting {
    /// What an admin has said.
    pub settings: RentSettings,
    /// When the cluster last looked; Unix time. `None` if it has not, or does not.
    pub looked_ms: Option<u64>,
    /// What of the budget for rented hosts nobody had reserved; `None` without a budget.
    pub budget_left: Option<Money>,
    /// The decisions of the last look.
    pub decisions: Vec<RentDecision>,
    /// Why no host is rented; empty if one is, or would be.
    pub nothing_because: String,
    /// What is not known, and what is assumed instead.
    pub not_known: Vec<String>,
    /// What was learned of the kinds that were rented.
    pub starts: Vec<LearnedStart>,
    /// The last decisions that were carried out, and what would have been, the newest last: at most 200.
    pub last: Vec<RentDecision>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_stays_and_a_price_of_nothing_is_none() {
        let dime = Some(Money::from_micros(100_000));
        let on = SetRenting { mode: Some(AutoMode::On), ..SetRenting::default() };
        let priced = SetRenting { waiting_costs_per_hour: dime, ..SetRenting::default() };
        let settings = RentSettings::default().with(on).with(priced);
        assert_eq!((settings.mode, settings.waiting_costs_per_hour), (AutoMode::On, dime));
        assert_eq!(settings.most, RENTED_MOST_DEFAULT);
        let free = SetRenting { waiting_costs_per_hour: Some(Money::ZERO), ..on };
        assert_eq!(settings.with(free).waiting_costs_per_hour, None);
    }
}
