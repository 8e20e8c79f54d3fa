//! The files of a job that are not among its outputs: its guest names some, and the repository refuses others. Both lists are
//! one record, which has its own key because it may be long.

use std::collections::BTreeMap;
use std::fmt;

use perigee_model::guest::LeftOut;
use perigee_model::job::LeftOutFiles;
use perigee_model::limits::LEFT_OUT;
use perigee_model::{JobId, Problem};
use serde::{Deserialize, Serialize};

use crate::cluster::Cluster;

/// Names that a job's reason has. The others are counted.
const SHOWN: usize = 5;

/// The longest name or reason that is shown there.
const SHOWN_BYTES_MAX: usize = 120;

/// The longest name, and the longest reason, that is kept.
const TEXT_BYTES_MAX: usize = 1000;

/// What one list may take.
const LIST_BYTES_MAX: usize = 1 << 20;

/// Files with the reason. More of them than can be kept are counted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOutList {
    files: BTreeMap<String, Why>,
    bytes: usize,
    more: u64,
    more_lost: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Why {
    why: String,
    is_lost: bool,
}

/// The record of a job.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct OfJob {
    /// What its guest says.
    guest: LeftOutList,
    /// What the repository has refused, the last time that the outputs were fetched.
    repository: LeftOutList,
}

impl LeftOutList {
    /// A file that is there already stays as it is.
    pub fn add(&mut self, path: &str, why: &str, is_lost: bool) {
        let (path, why) = (shortened(path, TEXT_BYTES_MAX), shortened(why, TEXT_BYTES_MAX));
        if self.files.contains_key(&path) {
            return;
        }
        let bytes = self.bytes + path.len() + why.len();
        if bytes > LIST_BYTES_MAX || LEFT_OUT.check(self.files.len() + 1).is_err() {
            self.more += 1;
            self.more_lost += u64::from(is_lost);
            return;
        }
        self.bytes = bytes;
        self.files.insert(path, Why { why, is_lost });
    }

    /// How many files.
    pub fn count(&self) -> u64 {
        self.files.len() as u64 + self.more
    }

    /// Whether one of them was lost by us or by the cluster, and not left out for what it is.
    pub fn has_lost(&self) -> bool {
        self.more_lost > 0 || self.files.values().any(|why| why.is_lost)
    }

    fn with(mut self, other: Self) -> Self {
        for (path, Why { why, is_lost }) in other.files {
            self.add(&path, &why, is_lost);
        }
        (self.more, self.more_lost) = (self.more + other.more, self.more_lost + other.more_lost);
        self
    }

    /// What a job's reason says: lost files, and then the others.
    pub fn in_words(&self) -> Vec<String> {
        let more = [self.more_lost, self.more - self.more_lost];
        let kinds = [(true, "its outputs are not complete"), (false, "left out of the outputs")];
        let all = kinds.into_iter().zip(more).filter_map(|((is_lost, what), more)| {
            let of = self.files.iter().filter(|(_, why)| why.is_lost == is_lost);
            let named: Vec<String> =
                of.clone().take(SHOWN).map(|(path, why)| shown(path, why)).collect();
            let more = more + of.count().saturating_sub(named.len()) as u64;
            let named = named.join(", ");
            match (named.is_empty(), more) {
                (true, 0) => None,
                (_, 0) => Some(format!("{what}: {named}")),
                (_, more) => Some(format!("{what}: {named}, and {more} more")),
            }
        });
        all.collect()
    }

    fn into_files(self) -> LeftOutFiles {
        let files = self.files.into_iter();
        let files = files.map(|(path, Why { why, is_lost })| LeftOut { path, why, is_lost });
        LeftOutFiles { files: files.collect(), more: self.more }
    }
}

fn shown(path: &str, why: &Why) -> String {
    let why = shortened(&why.why, SHOWN_BYTES_MAX);
    match path {
        "" => why,
        path => format!("{:?} ({why})", shortened(path, SHOWN_BYTES_MAX)),
    }
}

fn shortened(text: &str, bytes_max: usize) -> String {
    let end = text.floor_char_boundary(bytes_max);
    if end < text.len() { format!("{}…", &text[..end]) } else { text.to_owned() }
}

impl fmt::Display for LeftOutList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.in_words().join("; "))
    }
}

fn key(job: &JobId) -> String {
    format!("left-out/{job}")
}

async fn of_job(cluster: &Cluster, job: &JobId) -> Result<OfJob, Problem> {
    Ok(cluster.records.read(&key(job)).await?.unwrap_or_default())
}

/// Adds what a job's guest has said. Saying it again changes nothing.
///
/// # Errors
/// If the store fails.
pub async fn add_of_guest(
    cluster: &Cluster,
    job: &JobId,
    said: Vec<LeftOut>,
) -> Result<(), Problem> {
    if said.is_empty() {
        return Ok(());
    }
    let mut all = of_job(cluster, job).await?;
    said.iter().for_each(|one| all.guest.add(&one.path, &one.why, one.is_lost));
    cluster.records.put(&key(job), &all).await
}

/// Records what the repository has refused, and returns all that is left out.
///
/// # Errors
/// If the store fails.
pub async fn set_of_repository(
    cluster: &Cluster,
    job: &JobId,
    refused: LeftOutList,
) -> Result<LeftOutList, Problem> {
    let mut all = of_job(cluster, job).await?;
    if all.repository != refused {
        all.repository = refused;
        cluster.records.put(&key(job), &all).await?;
    }
    Ok(all.guest.with(all.repository))
}

/// All that is left out of a job's outputs.
///
/// # Errors
/// If the store fails.
pub async fn of(cluster: &Cluster, job: &JobId) -> Result<LeftOutFiles, Problem> {
    let all = of_job(cluster, job).await?;
    Ok(all.guest.with(all.repository).into_files())
}

/// Forgets them: the job has begun anew, or is deleted.
///
/// # Errors
/// If the store fails.
pub async fn forget(cluster: &Cluster, job: &JobId) -> Result<(), Problem> {
    cluster.records.remove(&key(job)).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_files_are_told_apart_and_those_that_are_not_named_are_counted() {
        let mut list = LeftOutList::default();
        list.add("/output/pipe", "a FIFO", false);
        assert_eq!(list.in_words(), ["left out of the outputs: \"/output/pipe\" (a FIFO)"]);
        assert!(!list.has_lost());
        for number in 0..7 {
            list.add(&format!("/output/{number}"), "its name is not UTF-8", true);
        }
        let words = list.in_words();
        assert!(
            words[0].starts_with("its outputs are not complete: \"/output/0\" (its name"),
            "{words:?}"
        );
        assert!(words[0].ends_with(", and 2 more") && words.len() == 2, "{words:?}");
        assert_eq!((list.has_lost(), list.count()), (true, 8));
    }

    #[test]
    fn a_list_of_a_hostile_guest_has_an_end() {
        let mut list = LeftOutList::default();
        for number in 0..20_000 {
            list.add(&format!("{number}{}", "x".repeat(5000)), &"y".repeat(5000), false);
        }
        assert!(list.bytes <= LIST_BYTES_MAX && list.count() == 20_000, "{}", list.files.len());
        assert!(list.in_words()[0].ends_with("more"));
    }
}
