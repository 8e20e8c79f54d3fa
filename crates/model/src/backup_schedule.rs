//! Schedules of backups: when the next backup is due, and which ones are kept. Pure.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::backup::{BackupOf, BackupTarget, BackupUser};
use crate::limits::{BACKUP_EVERY_S, BACKUP_PERIODS};
use crate::units::format_time;
use crate::{BackupName, ImageName, Problem, ScheduleName, VmId, VolumeName};

const HOUR_MS: u64 = 3_600_000;
const DAY_MS: u64 = 24 * HOUR_MS;
/// The first day of Unix time was a Thursday.
const DAYS_FROM_MONDAY: u64 = 3;

/// Asks for backups of a volume, VM or image again and again. The same thing with the same target changes the schedule that is there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewBackupSchedule {
    /// The volume. It may be in use. Either this, a VM or an image is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<VolumeName>,
    /// The VM, which has no job. It may run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<VmId>,
    /// The image: at each time the one that has this name then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageName>,
    /// As in [`crate::backup::NewBackup`].
    pub to: BackupTarget,
    /// The time from one backup to the next, in seconds.
    pub every_s: u64,
    /// Which complete backups of the schedule are kept, beside the newest one; none: all are.
    #[serde(default)]
    pub keep: Vec<KeepRule>,
    /// As in [`crate::backup::NewBackup`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encrypted: bool,
}

impl NewBackupSchedule {
    /// Refuses what can't be a schedule.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn check(&self, what: &str) -> Result<(), Problem> {
        self.to.check()?;
        BACKUP_EVERY_S.check(self.every_s).map_err(|error| error.problem(what))?;
        for rule in &self.keep {
            BACKUP_PERIODS.check(rule.count).map_err(|error| error.problem(what))?;
        }
        let units: BTreeSet<KeepUnit> = self.keep.iter().map(|rule| rule.unit).collect();
        if units.len() < self.keep.len() {
            let why = "what is kept names a kind of period twice";
            return Err(Problem::invalid(what, why).next("name each kind once, as in 24h,7d,4w"));
        }
        Ok(())
    }
}

/// A period of the calendar, in UTC. A week begins on Monday.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum KeepUnit {
    /// An hour.
    Hour,
    /// A day.
    Day,
    /// Seven days.
    Week,
    /// A month.
    Month,
    /// A year.
    Year,
}

/// As people write them.
const UNITS: [(&str, KeepUnit); 5] = [
    ("h", KeepUnit::Hour),
    ("d", KeepUnit::Day),
    ("w", KeepUnit::Week),
    ("mo", KeepUnit::Month),
    ("y", KeepUnit::Year),
];

impl KeepUnit {
    /// The period with this moment, as a text that no other period of this kind has.
    fn period_of(self, unix_ms: u64) -> String {
        match self {
            // `2026-11-23 16:07:02 UTC`
            Self::Year => format_time(unix_ms)[..4].to_owned(),
            Self::Month => format_time(unix_ms)[..7].to_owned(),
            Self::Week => format!("{}", (unix_ms / DAY_MS + DAYS_FROM_MONDAY) / 7),
            Self::Day => format!("{}", unix_ms / DAY_MS),
            Self::Hour => format!("{}", unix_ms / HOUR_MS),
        }
    }
}

/// For each of the last so many periods that have a backup, the newest one in it is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct KeepRule {
    /// How many periods.
    pub count: u32,
    /// What kind of period.
    pub unit: KeepUnit,
}

impl fmt::Display for KeepRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = UNITS.iter().find(|(_, unit)| *unit == self.unit);
        write!(f, "{}{}", self.count, named.map_or("", |(name, _)| name))
    }
}

/// What is kept, as people write it: `24h,7d,4w,12mo,2y`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Keep(pub Vec<KeepRule>);

/// Why a text does not say what is kept.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no number of hours, days, weeks, months or years: write it as in 24h,7d,4w,12mo,2y"
)]
pub struct BadKeep(String);

impl FromStr for Keep {
    type Err = BadKeep;

    fn from_str(text: &str) -> Result<Self, BadKeep> {
        let rule = |part: &str| {
            let part = part.trim();
            let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
            let (number, word) = part.split_at(digits);
            let unit = UNITS.iter().find(|(name, _)| *name == word);
            let (Ok(count), Some((_, unit))) = (number.parse(), unit) else {
                return Err(BadKeep(part.chars().take(40).collect()));
            };
            Ok(KeepRule { count, unit: *unit })
        };
        text.split(',').map(rule).collect::<Result<_, _>>().map(Self)
    }
}

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&all.join(","))
    }
}

/// Which of the backups of these moments are kept: for each rule the newest one of each of the last periods that have one, and the newest of all. Without
/// rules, all. How long ago a backup was made does not count: a clock that is set, or a time without backups, deletes nothing.
pub fn kept(taken_ms: impl IntoIterator<Item = u64>, rules: &[KeepRule]) -> BTreeSet<u64> {
    let all: BTreeSet<u64> = taken_ms.into_iter().collect();
    if rules.is_empty() {
        return all;
    }
    let mut kept: BTreeSet<u64> = all.last().copied().into_iter().collect();
    for rule in rules {
        let (mut left, mut last) = (rule.count, String::new());
        for at_ms in all.iter().rev() {
            let period = rule.unit.period_of(*at_ms);
            if period == last {
                continue;
            }
            if left == 0 {
                break;
            }
            (left, last) = (left - 1, period);
            kept.insert(*at_ms);
        }
    }
    kept
}

/// When the next backup is due, after one that was due at `due_ms`: as many intervals later as it takes. So what was missed is not made up for.
pub fn next_after(due_ms: u64, every_s: u64, now_ms: u64) -> u64 {
    let every_ms = every_s.saturating_mul(1000).max(1);
    let missed = now_ms.saturating_sub(due_ms) / every_ms;
    due_ms.saturating_add(every_ms.saturating_mul(missed + 1))
}

/// A schedule of backups.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BackupSchedule {
    /// The name of what it is of, and a number if there are several.
    pub name: ScheduleName,
    /// The volume; `None`: it is of a VM or an image.
    pub volume: Option<VolumeName>,
    /// The VM; `None`: it is of a volume or an image.
    pub vm: Option<VmId>,
    /// The image; `None`: it is of a volume or a VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageName>,
    /// Where its backups are.
    pub to: BackupTarget,
    /// The time from one backup to the next, in seconds.
    pub every_s: u64,
    /// Which complete backups are kept, beside the newest one; none: all are.
    pub keep: Vec<KeepRule>,
    /// When it was asked for first; Unix time.
    pub made_ms: u64,
    /// When the next backup is due; Unix time. `None`: it has ended.
    pub next_ms: Option<u64>,
    /// The backup that is being shipped. No other one begins meanwhile.
    pub under_way: Option<BackupName>,
    /// When the disks were sealed for the newest complete backup; Unix time.
    pub last_success_ms: Option<u64>,
    /// The last backup that has failed, also before a later one that has not.
    pub last_failure: Option<BackupFailure>,
    /// How many complete backups it has.
    pub kept: u64,
    /// Why it has ended; empty: it goes on.
    pub ended: String,
    /// What is wrong: why the last backup has failed, what the present one waits for, or why old ones can't be deleted. Empty: nothing.
    pub problem: String,
    /// The user who has asked for it; `None`: an admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<BackupUser>,
    /// Its backups are encrypted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encrypted: bool,
}

impl BackupSchedule {
    /// In words what it is of.
    pub fn of_in_words(&self) -> String {
        let of = BackupOf::one(self.volume.clone(), self.vm.clone(), self.image.clone());
        of.map_or_else(|_| "nothing".to_owned(), |of| of.to_string())
    }
}

/// A backup that has failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BackupFailure {
    /// When; Unix time.
    pub at_ms: u64,
    /// Why.
    pub why: String,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::units::parse_time;

    fn rules(text: &str) -> Vec<KeepRule> {
        text.parse::<Keep>().expect("rules").0
    }

    /// The moments of these times that are kept, the newest first.
    fn kept_of(times: &[&str], keep: &str) -> Vec<String> {
        let at =
            |time: &&str| parse_time(&format!("{time}:00Z").replace(' ', "T")).expect("a time");
        let kept = kept(times.iter().map(at), &rules(keep));
        kept.into_iter().rev().map(|at| format_time(at)[..16].to_owned()).collect()
    }

    #[test]
    fn the_newest_backup_of_each_of_the_last_periods_is_kept() {
        let times = [
            "2026-11-01 09:00",
            "2026-11-08 09:00",
            "2026-11-22 23:00",
            "2026-11-23 08:00",
            "2026-11-23 08:30",
            "2026-11-23 09:10",
            "2026-11-23 09:50",
        ];
        assert_eq!(kept_of(&times, "2h"), ["2026-11-23 09:50", "2026-11-23 08:30"]);
        assert_eq!(kept_of(&times, "2d"), ["2026-11-23 09:50", "2026-11-22 23:00"]);
        // The 22nd was a Sunday. A week without a backup does not count.
        let weeks = ["2026-11-23 09:50", "2026-11-22 23:00", "2026-11-08 09:00"];
        assert_eq!(kept_of(&times, "3w"), weeks);
        assert_eq!(kept_of(&times, "2h,2d").len(), 3);
        assert_eq!(kept_of(&times, "12mo"), ["2026-11-23 09:50"]);
        let years = ["2025-12-31 23:59", "2026-01-01 00:00"];
        assert_eq!(kept_of(&years, "5y").len(), 2);
    }

    #[test]
    fn what_is_kept_is_written_as_it_is_read() {
        for text in ["24h", "24h,7d,4w", "1h,1d,1w,12mo,2y"] {
            assert_eq!(text.parse::<Keep>().expect("rules").to_string(), text);
        }
        for bad in ["", "h", "24", "24m", "24h,", "-1h", "1.5h", "99999999999h"] {
            bad.parse::<Keep>().expect_err(bad);
        }
    }

    #[test]
    fn what_was_missed_makes_one_backup() {
        assert_eq!(next_after(1000, 60, 1000), 61_000);
        assert_eq!(next_after(1000, 60, 60_999), 61_000);
        assert_eq!(next_after(1000, 60, 61_000), 121_000);
        // The clock was set back.
        assert_eq!(next_after(1_000_000, 60, 1000), 1_060_000);
    }

    #[test]
    fn a_schedule_that_names_a_period_twice_is_refused() {
        let ask = |every_s, keep: &str| NewBackupSchedule {
            volume: Some(VolumeName::new("data").expect("a name")),
            vm: None,
            image: None,
            to: BackupTarget { address: "/srv".to_owned(), endpoint: None },
            every_s,
            keep: rules(keep),
            encrypted: false,
        };
        ask(3600, "24h,7d").check("w").expect("a schedule");
        ask(3600, "24h,7d,1h").check("w").expect_err("hours twice");
        ask(3600, "0h").check("w").expect_err("no period");
        ask(1, "1h").check("w").expect_err("too often");
    }

    proptest! {
        #[test]
        fn the_newest_one_is_kept_and_who_prunes_after_each_backup_keeps_the_same(
            gaps_s in prop::collection::vec(60_u64..200_000, 1..60),
            (hours, days, weeks) in (1_u32..30, 1_u32..10, 1_u32..6),
        ) {
            let rules = rules(&format!("{hours}h,{days}d,{weeks}w"));
            let (mut now_ms, mut all, mut left) = (0, BTreeSet::new(), BTreeSet::new());
            for gap_s in gaps_s {
                now_ms += gap_s * 1000;
                all.insert(now_ms);
                left.insert(now_ms);
                left = kept(left, &rules);
                prop_assert!(left.contains(&now_ms));
                prop_assert!(left.len() <= (hours + days + weeks) as usize);
            }
            prop_assert_eq!(left, kept(all, &rules));
        }
    }
}
