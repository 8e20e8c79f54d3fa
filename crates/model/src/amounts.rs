//! Amounts of which a VM always has a part, and more while others leave it: `memory: 1GiB..4GiB`.
//!
//! The least is what the VM counts with: in the queue, for the room of its host, and for its tenant's quota. The most is what its guest is
//! started with. The difference is given and taken back while the VM runs (`planner/src/amounts.rs`).

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::load::VcpuUse;
use crate::units::format_bytes;

/// What stands between the two ends of a range.
const BETWEEN: &str = "..";

/// `2`, or `1..4`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range<T> {
    /// What is always there.
    pub least: T,
    /// What may be there; `None`: no more.
    pub most: Option<T>,
}

/// Why a text is no amount and no range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadRange {
    /// An end of it is no amount.
    #[error("{0}")]
    End(String),
    /// The second end is not above the first one.
    #[error("{0:?} ends below its beginning: write the least first, as in 1..4")]
    Order(String),
}

impl<T: PartialOrd> Range<T> {
    /// Reads `2` or `1..4`, whose ends `one` reads. A range of which both ends are the same is one amount.
    ///
    /// # Errors
    /// [`BadRange`], with what `one` says.
    pub fn parse<E: fmt::Display>(
        text: &str,
        one: impl Fn(&str) -> Result<T, E>,
    ) -> Result<Self, BadRange> {
        let end = |text: &str| one(text.trim()).map_err(|why| BadRange::End(why.to_string()));
        let Some((least, most)) = text.split_once(BETWEEN) else {
            return Ok(Self { least: end(text)?, most: None });
        };
        let (least, most) = (end(least)?, end(most)?);
        if most < least {
            return Err(BadRange::Order(text.chars().take(80).collect()));
        }
        let most = (most > least).then_some(most);
        Ok(Self { least, most })
    }
}

/// The memory of a VM that has more or less of it while it runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemoryAmount {
    /// What it always has.
    pub least_bytes: u64,
    /// What it may have.
    pub most_bytes: u64,
    /// What its guest has now; `None` if that is not known.
    pub has_bytes: Option<u64>,
    /// What its guest's programs use of that; `None` if its guest does not say.
    pub used_bytes: Option<u64>,
    /// Why it has what it has, in plain words; empty until it was looked at.
    pub reason: String,
}

impl fmt::Display for MemoryAmount {
    /// `1.5 GiB of 1 GiB..4 GiB: its host has no more`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.has_bytes {
            Some(has) => write!(f, "{} of ", format_bytes(has))?,
            None if self.reason.is_empty() => {}
            None => f.write_str("not known of ")?,
        }
        let [least, most] = [self.least_bytes, self.most_bytes].map(format_bytes);
        write!(f, "{least}{BETWEEN}{most}")?;
        if self.reason.is_empty() { Ok(()) } else { write!(f, ": {}", self.reason) }
    }
}

/// The vCPUs of a VM that has more of them than it always has the time of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CpuAmount {
    /// So many vCPUs it always has the time of.
    pub least: u32,
    /// So many it has.
    pub most: u32,
    /// So many ran in the last minute; `None` if that is not known.
    pub used_1m: Option<f64>,
    /// Why it has no more time of its host's CPUs, in plain words.
    pub reason: String,
}

/// A VM whose vCPUs wait for a CPU in less than this part of the time in which they want one has what it wants.
const WAITS: f64 = 0.05;

impl CpuAmount {
    /// `load` is what was measured at its host.
    pub fn of(least: u32, most: u32, load: Option<VcpuUse>) -> Self {
        let reason = match load {
            None => "what it uses is not known yet".to_owned(),
            Some(load) if load.run_delay_share() > WAITS => {
                let percent = load.run_delay_share() * 100.0;
                format!(
                    "others want its host's CPUs too: it waits in {percent:.0} % of the time in which it wants one"
                )
            }
            Some(_) => "it uses no more".to_owned(),
        };
        Self { least, most, used_1m: load.map(|load| load.running_vcpus), reason }
    }
}

impl fmt::Display for CpuAmount {
    /// `2.3 of 1..4: it uses no more`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used = self.used_1m.map_or_else(|| "not known".to_owned(), |used| format!("{used:.1}"));
        write!(f, "{used} of {}{BETWEEN}{}: {}", self.least, self.most, self.reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::parse_bytes;

    fn size(text: &str) -> Result<Range<u64>, BadRange> {
        Range::parse(text, parse_bytes)
    }

    #[test]
    fn an_amount_is_a_range_without_an_end() {
        let one = Ok(Range { least: 1 << 30, most: None });
        assert_eq!(size("1GiB"), one);
        assert_eq!(size("1GiB..1024MiB"), one, "both ends are the same");
        assert_eq!(size("1GiB..4GiB"), Ok(Range { least: 1 << 30, most: Some(4 << 30) }));
        assert_eq!(size("1 GiB .. 4 GiB"), size("1GiB..4GiB"));
    }

    #[test]
    fn what_is_no_range_is_said() {
        for text in ["..", "1GiB..", "..1GiB", "1GiB..2GiB..3GiB", "1GiB-2GiB", "x..1GiB"] {
            assert!(matches!(size(text), Err(BadRange::End(_))), "{text}");
        }
        let order = size("4GiB..1GiB").expect_err("it goes down").to_string();
        assert!(order.contains("the least first"), "{order}");
    }

    #[test]
    fn the_time_of_vcpus_is_shown_with_why_it_is_no_more() {
        let amount = |running_vcpus, waiting_vcpus| {
            CpuAmount::of(1, 4, Some(VcpuUse { running_vcpus, waiting_vcpus })).to_string()
        };
        assert_eq!(amount(2.3, 0.05), "2.3 of 1..4: it uses no more");
        let waits = "it waits in 75 % of the time in which it wants one";
        assert_eq!(
            amount(1.0, 3.0),
            format!("1.0 of 1..4: others want its host's CPUs too: {waits}")
        );
        let unknown = CpuAmount::of(1, 4, None).to_string();
        assert_eq!(unknown, "not known of 1..4: what it uses is not known yet");
    }

    #[test]
    fn a_vm_s_memory_is_shown_with_its_range_and_the_reason() {
        let mut amount = MemoryAmount {
            least_bytes: 1 << 30,
            most_bytes: 4 << 30,
            has_bytes: Some(3 << 29),
            used_bytes: None,
            reason: "home1 has no more".to_owned(),
        };
        assert_eq!(amount.to_string(), "1.5 GiB of 1 GiB..4 GiB: home1 has no more");
        amount.has_bytes = None;
        assert_eq!(amount.to_string(), "not known of 1 GiB..4 GiB: home1 has no more");
        amount.reason.clear();
        assert_eq!(amount.to_string(), "1 GiB..4 GiB", "it is off");
    }
}
