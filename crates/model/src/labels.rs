//! Labels of VMs: words that somebody gives a VM to find it again, as `slurm=alpha`. Perigee itself does nothing by them.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Problem;
use crate::limits::{LABEL_BYTES, LABELS};

/// The labels of a VM: a value for each key.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct Labels(BTreeMap<String, String>);

impl Labels {
    /// One label, as a person writes it: `key=value`.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    pub fn parse_one(text: &str) -> Result<(String, String), String> {
        let (key, value) = text.split_once('=').ok_or("a label is written as key=value")?;
        for part in [key, value] {
            check_part(part)?;
        }
        Ok((key.to_owned(), value.to_owned()))
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// # Errors
    /// `Invalid` if there are more than [`LABELS`] allows, or one is none: `what` could not be done.
    pub fn check(&self, what: &str) -> Result<(), Problem> {
        let invalid = |why: String| Problem::invalid(what, format!("labels: {why}"));
        LABELS.check(self.0.len()).map_err(|error| invalid(error.to_string()))?;
        self.0
            .iter()
            .flat_map(<[_; 2]>::from)
            .try_for_each(|part| check_part(part))
            .map_err(invalid)
    }
}

/// A key or a value.
fn check_part(part: &str) -> Result<(), String> {
    LABEL_BYTES.check(part.len()).map_err(|error| error.to_string())?;
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    match part.chars().all(is_allowed) {
        true => Ok(()),
        false => Err(format!("{part:?} has something else than letters, digits and - _ . /")),
    }
}

impl FromIterator<(String, String)> for Labels {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(labels: I) -> Self {
        Self(labels.into_iter().collect())
    }
}

/// As in `slurm=alpha, team=blue`; a dash if there is none.
impl fmt::Display for Labels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let labels: Vec<String> =
            self.0.iter().map(|(key, value)| format!("{key}={value}")).collect();
        if labels.is_empty() { f.pad("-") } else { f.pad(&labels.join(", ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_a_key_and_a_value() {
        let label = Labels::parse_one("slurm=alpha").expect("a label");
        let labels = Labels::from_iter([label]);
        assert_eq!((labels.get("slurm"), labels.get("team")), (Some("alpha"), None));
        assert_eq!(labels.to_string(), "slurm=alpha");
        assert_eq!(Labels::default().to_string(), "-");
        for bad in
            ["slurm", "=alpha", "slurm=", "slurm=a b", "a=b=c", &format!("a={}", "b".repeat(64))]
        {
            assert!(Labels::parse_one(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn too_many_labels_and_what_is_no_label_are_refused() {
        let many = |count: usize| {
            (0..count).map(|n| (format!("k{n}"), "v".to_owned())).collect::<Labels>()
        };
        assert_eq!(many(16).check("can't"), Ok(()));
        assert!(many(17).check("can't").expect_err("17").why.contains("16"));
        let bad = Labels::from_iter([("a".to_owned(), "\n".to_owned())]);
        assert!(bad.check("can't").is_err());
    }
}
