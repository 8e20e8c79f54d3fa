//! Rules of VMs about each other: which share one host, and which never do.
//!
//! A rule names a group of VMs of one tenant. The VMs that name the same group with `together` are kept on one host, and those that name it
//! with `apart` on different ones. Only VMs that are at a host, or on the way to one, count. The decision is `planner/src/queue/groups.rs`.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::ids::GroupName;
use crate::spec::BadSpec;

/// The rules of a VM, or of each VM of a job.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostRules {
    /// It is at one host with the other VMs of this group.
    #[serde(default)]
    pub together: Option<GroupName>,
    /// It is at no host that has another VM of this group.
    #[serde(default)]
    pub apart: Option<GroupName>,
}

impl HostRules {
    /// What can't be kept, of a job or VM that has so many VMs.
    ///
    /// # Errors
    /// [`BadSpec`] if the two rules contradict each other.
    pub fn check(&self, count: u32) -> Result<(), BadSpec> {
        match (&self.together, &self.apart) {
            (Some(together), Some(apart)) if together == apart => {
                Err(BadSpec::TogetherAndApart(apart.clone()))
            }
            (Some(_), Some(_)) if count > 1 => Err(BadSpec::ManyTogetherAndApart),
            _ => Ok(()),
        }
    }
}

/// As in `together web, apart db`; a dash if there is none.
impl fmt::Display for HostRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rules = [("together", &self.together), ("apart", &self.apart)];
        let words = rules.iter().filter_map(|(rule, group)| Some((rule, group.as_ref()?)));
        let words: Vec<String> = words.map(|(rule, group)| format!("{rule} {group}")).collect();
        if words.is_empty() { f.pad("-") } else { f.pad(&words.join(", ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(together: Option<&str>, apart: Option<&str>) -> HostRules {
        let group = |name: &str| GroupName::new(name).expect("a name");
        HostRules { together: together.map(group), apart: apart.map(group) }
    }

    #[test]
    fn rules_that_contradict_each_other_are_refused() {
        let same = rules(Some("db"), Some("db")).check(1).expect_err("they contradict");
        assert_eq!(same.to_string(), "together and apart can't both name db");
        assert_eq!(rules(Some("web"), Some("db")).check(1), Ok(()));
        assert_eq!(rules(Some("web"), None).check(4), Ok(()));
        let many = rules(Some("web"), Some("db")).check(4).expect_err("its VMs are either");
        assert!(many.to_string().contains("several VMs"), "{many}");
    }

    #[test]
    fn rules_are_shown_in_words() {
        assert_eq!(rules(Some("web"), Some("db")).to_string(), "together web, apart db");
        assert_eq!(HostRules::default().to_string(), "-");
    }
}
