//! Typed names and ids. A name is what people type; an id is what the system made up.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::limits::NAME_BYTES;
use crate::tenant::{DEFAULT_TENANT, SEPARATOR};

/// Why a text is not a name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a name: {range}, each of a-z, 0-9, '.', '_' and '-', the first a letter or a digit",
    range = NAME_BYTES.range()
)]
pub struct BadName {
    text: String,
}

/// A name of one word as a regular expression, without its length ([`NAME_BYTES`]); `check_word` is the same.
pub const WORD_PATTERN: &str = "^[a-z0-9][a-z0-9._-]*$";

/// The same for the name of a tenant's thing, which may have its tenant before it; `check_full` is the same.
pub const FULL_PATTERN: &str = "^[a-z0-9][a-z0-9._-]*(~[a-z0-9][a-z0-9._-]*){0,2}$";

fn is_word(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
        && text
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '.' | '_' | '-'))
}

/// A name that is one word.
fn check_word(text: &str) -> Result<(), BadName> {
    checked(text, is_word(text))
}

/// The name of a tenant's thing: one word, or several with [`SEPARATOR`] between them. Three words are the most that
/// [`TenantName::meant`] makes.
fn check_full(text: &str) -> Result<(), BadName> {
    let words = text.split(SEPARATOR).count();
    checked(text, words <= 3 && text.split(SEPARATOR).all(is_word))
}

fn checked(text: &str, is_name: bool) -> Result<(), BadName> {
    if is_name && NAME_BYTES.check(text.len()).is_ok() {
        Ok(())
    } else {
        Err(BadName { text: text.chars().take(80).collect() })
    }
}

/// A name that belongs to a tenant; see [`crate::tenant`].
pub trait Owned: Sized {
    /// The text as a name.
    ///
    /// # Errors
    /// [`BadName`] when it is none.
    fn named(text: String) -> Result<Self, BadName>;

    /// The full name.
    fn full(&self) -> &str;
}

macro_rules! owned {
    ($($name:ident)*) => {
        $(impl Owned for $name {
            fn named(text: String) -> Result<Self, BadName> {
                Self::new(text)
            }

            fn full(&self) -> &str {
                &self.0
            }
        })*
    };
}

macro_rules! name_type {
    // `WORD_PATTERN` and `FULL_PATTERN`: the derive takes literals only.
    (check_word $($named:tt)*) => { name_type!("^[a-z0-9][a-z0-9._-]*$" check_word $($named)*); };
    (check_full $($named:tt)*) => {
        name_type!("^[a-z0-9][a-z0-9._-]*(~[a-z0-9][a-z0-9._-]*){0,2}$" check_full $($named)*);
    };
    ($pattern:literal $check:ident $(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
        #[serde(try_from = "String", into = "String")]
        #[schema(value_type = String, pattern = $pattern)]
        pub struct $name(String);

        impl $name {
            /// The text as a name.
            ///
            /// # Errors
            /// [`BadName`] unless it is 1 to 63 of `a-z`, `0-9`, `.`, `_` and `-`, and begins with a
            /// letter or a digit. The name of a tenant's thing may have the tenant and `~` before it.
            pub fn new(text: impl Into<String>) -> Result<Self, BadName> {
                let text = text.into();
                $check(&text)?;
                Ok(Self(text))
            }

            /// As it was given: names are compared byte by byte.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl FromStr for $name {
            type Err = BadName;
            fn from_str(text: &str) -> Result<Self, BadName> {
                Self::new(text)
            }
        }

        impl TryFrom<String> for $name {
            type Error = BadName;
            fn try_from(text: String) -> Result<Self, BadName> {
                Self::new(text)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> String {
                name.0
            }
        }
    };
}

name_type!(check_word /// A machine that runs an agent and a volume server.
    HostId);
name_type!(check_word /// A group of hosts with fast links between them.
    SiteId);
name_type!(check_full /// A volume's full name, unique in the cluster. It is also the NBD export name.
    VolumeName);
name_type!(check_full /// The full name of a sealed layer: an imported image or a snapshot.
    ImageName);
name_type!(check_word /// People who share their volumes, images, VMs and jobs, and whose space and share of the cluster
    /// are counted together.
    TenantName);
name_type!(check_word /// A person or program of a tenant.
    UserName);
name_type!(check_full /// Who made a volume, where that is a job and not a person: nobody else takes or deletes it for its own.
    OwnerName);
name_type!(check_word /// A group of VMs of a tenant that share a host, or never do ([`crate::host_rules`]).
    GroupName);
name_type!(check_word /// A machine that boots from a volume of a pool.
    ClientName);
name_type!(check_full /// A backup: the full name of what it is of, and the time.
    BackupName);
name_type!(check_full /// A schedule of backups: the full name of what it is of, and a number if there are several.
    ScheduleName);
name_type!(check_full /// A job, `NAME-NNNN`: the full name of the job file's job and a number.
    JobId);
name_type!(check_full /// A virtual machine.
    VmId);
name_type!(check_word /// A rented host's rental.
    RentalId);
name_type!(check_full /// One attempt to move a VM.
    MigrationId);

name_type!(check_full /// The full name of a network.
    NetworkName);

owned!(BackupName ScheduleName VolumeName ImageName JobId VmId NetworkName);

impl Default for TenantName {
    /// Who has what nobody else was named for.
    fn default() -> Self {
        Self(DEFAULT_TENANT.to_owned())
    }
}

/// A layer's UUID: the same on every host that holds a copy of that sealed layer.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(transparent)]
#[schema(value_type = String)]
pub struct LayerId(pub Uuid);

impl fmt::Display for LayerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for LayerId {
    type Err = uuid::Error;
    fn from_str(text: &str) -> Result<Self, uuid::Error> {
        text.parse().map(LayerId)
    }
}

/// Which volume of its name it is: drawn when the volume is made. One that is deleted and made again
/// under its name has another one. None has 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Incarnation(pub u32);

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

impl FromStr for Incarnation {
    type Err = std::num::ParseIntError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        u32::from_str_radix(text, 16).map(Self)
    }
}

/// Who may write a volume: a session writes only while its epoch is the volume's.
///
/// The number has the volume's incarnation in front, and then counts from 1: what was meant for a
/// volume that was deleted does not fit the next one of its name. (It has 52 bits, which JSON's
/// readers take as they are.)
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(transparent)]
#[schema(value_type = u64)]
pub struct Epoch(pub u64);

impl Epoch {
    /// As many bits count the epochs of one incarnation.
    const COUNT_BITS: u32 = 20;
    /// As many epochs one incarnation has.
    pub const COUNT_MAX: u64 = (1 << Self::COUNT_BITS) - 1;

    /// The epoch of a new volume.
    pub fn first(incarnation: Incarnation) -> Self {
        Self(u64::from(incarnation.0) << Self::COUNT_BITS | 1)
    }

    /// Of which volume it is, among those that ever had the volume's name in a pool.
    pub fn incarnation(self) -> Incarnation {
        Incarnation(u32::try_from(self.0 >> Self::COUNT_BITS).unwrap_or(u32::MAX))
    }

    /// The one after it; `None` after the last one of the incarnation.
    pub fn next(self) -> Option<Self> {
        let next = Self(self.0.checked_add(1)?);
        (next.incarnation() == self.incarnation()).then_some(next)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_lower_case_letters_digits_and_three_signs() {
        assert!(VolumeName::new("tpch-1.data_a").is_ok());
        assert!(VolumeName::new("x".repeat(63)).is_ok());
        for bad in ["", "-a", "A", "a/b", "a b", "a@1", &"x".repeat(64)] {
            assert!(VolumeName::new(bad).is_err(), "{bad:?} must be refused");
        }
    }

    #[test]
    fn only_a_tenant_s_thing_has_a_tenant_in_its_name() {
        assert!(VolumeName::new("acme~data").is_ok());
        assert!(VolumeName::new("acme~blue~data").is_ok(), "what somebody else's name becomes");
        for bad in ["acme~", "~data", "acme~~data", "acme~-a", "a~b~c~d", "Acme~data"] {
            assert!(VolumeName::new(bad).is_err(), "{bad:?} must be refused");
        }
        assert!(HostId::new("acme~home1").is_err() && TenantName::new("a~b").is_err());
    }

    #[test]
    fn epochs_of_two_incarnations_are_never_the_same() {
        let [old, new] = [Incarnation(7), Incarnation(8)];
        assert_eq!(Epoch::first(old).incarnation(), old);
        let mut last = Epoch(Epoch::first(old).0 + Epoch::COUNT_MAX - 2);
        last = last.next().expect("the last one");
        assert_eq!(last.next(), None);
        assert!(last < Epoch::first(new));
        assert_eq!(Epoch(3).incarnation(), Incarnation(0));
        assert_eq!(new.to_string().parse(), Ok(new));
    }

    #[test]
    fn a_bad_name_in_json_is_refused() {
        assert!(serde_json::from_str::<HostId>("\"../etc\"").is_err());
    }
}
