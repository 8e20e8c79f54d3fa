//! Machines without disks of their own: who they are, what they boot, and what they have.
//!
//! Routes of the volume server's control API, as in [`crate::volume`]:
//!
//! | method and path | body | answer |
//! |---|---|---|
//! | `GET /clients`, `GET /clients/{client}` | | [`ClientInfo`] |
//! | `POST /clients` | [`NewClient`] | [`ClientInfo`] |
//! | `DELETE /clients/{client}` | | |
//! | `PUT /clients/{client}/binding` | [`Binding`] | [`ClientInfo`] |
//! | `DELETE /clients/{client}/binding` | | [`ClientInfo`] |
//! | `POST /boot` | [`BootRequest`] | [`Boot`] |
//! | `GET /logins` | | [`Login`], of all volumes |

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::tenant::SEPARATOR;
use crate::{ClientName, ImageName, VolumeName};

/// The longest name of an initiator or a target (RFC 7143).
pub const ISCSI_NAME_BYTES_MAX: usize = 223;
/// What the names of all targets and of initiators that were given none begin with.
pub const IQN_PREFIX: &str = "iqn.2026-11.org.perigee";

/// Kinds of exports that stand before a name. No tenant is called so.
pub const EXPORT_KINDS: [&str; 2] = ["image", "layer"];

/// The name of an export's iSCSI target; a volume's export has the volume's name, and the volume is LUN 0. The `~` after
/// a tenant's name can't stand in it (RFC 3722), so there is a `:`.
pub fn target_name(export: &str) -> String {
    format!("{IQN_PREFIX}:{}", export.replace(SEPARATOR, ":"))
}

/// The export of a target with this name; `None` for a name that no target has.
pub fn export_of_target(target: &str) -> Option<String> {
    let export = target.strip_prefix(IQN_PREFIX)?.strip_prefix(':')?;
    let tenant = SEPARATOR.to_string();
    match export.split_once(':') {
        Some((kind, name)) if EXPORT_KINDS.contains(&kind) => {
            Some(format!("{kind}:{}", name.replace(':', &tenant)))
        }
        _ => Some(export.replace(':', &tenant)),
    }
}

/// The Ethernet address of a network card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MacAddress([u8; 6]);

/// Why a text is not one card's address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a network card's address like 52:54:00:12:34:56")]
pub struct BadMac {
    text: String,
}

impl FromStr for MacAddress {
    type Err = BadMac;

    /// With colons or dashes.
    fn from_str(text: &str) -> Result<Self, BadMac> {
        let bad = || BadMac { text: text.chars().take(80).collect() };
        let mut bytes = [0; 6];
        let mut parts = text.split([':', '-']);
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2).ok_or_else(bad)?;
            // from_str_radix alone would take a sign.
            let hex = part.bytes().all(|b| b.is_ascii_hexdigit());
            *byte = u8::from_str_radix(part, 16).ok().filter(|_| hex).ok_or_else(bad)?;
        }
        // A group's address belongs to no card.
        if parts.next().is_some() || bytes == [0; 6] || bytes[0] & 1 == 1 {
            return Err(bad());
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        f.pad(&format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}"))
    }
}

/// The name by which an initiator logs in, in lower case as RFC 3722 folds it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct InitiatorName(String);

/// Why a text is not an initiator's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not an initiator's name: iqn., eui. or naa. and then up to 219 characters of a-z, 0-9, '.', '-' and ':'"
)]
pub struct BadInitiator {
    text: String,
}

impl FromStr for InitiatorName {
    type Err = BadInitiator;

    fn from_str(text: &str) -> Result<Self, BadInitiator> {
        let name = text.to_ascii_lowercase();
        let kind = ["iqn.", "eui.", "naa."].iter().find_map(|kind| name.strip_prefix(kind));
        let chars = name
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b".-:".contains(&b));
        match kind {
            Some(rest) if !rest.is_empty() && chars && name.len() <= ISCSI_NAME_BYTES_MAX => {
                Ok(Self(name))
            }
            _ => Err(BadInitiator { text: text.chars().take(80).collect() }),
        }
    }
}

impl InitiatorName {
    /// Of a client that was given none.
    pub fn of(client: &ClientName) -> Self {
        // A client's name may have an underscore, and an initiator's not.
        Self(format!("{IQN_PREFIX}.client:{}", client.as_str().replace('_', "-")))
    }

    /// As the initiator sends it at login, in lower case.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for InitiatorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

macro_rules! as_text {
    ($name:ident, $error:ident) => {
        impl TryFrom<String> for $name {
            type Error = $error;
            fn try_from(text: String) -> Result<Self, $error> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(value: $name) -> String {
                value.to_string()
            }
        }
    };
}

as_text!(MacAddress, BadMac);
as_text!(InitiatorName, BadInitiator);

/// A CHAP secret. Nothing prints it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Secret(String);

/// Why a text can't be a CHAP secret. It does not show the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "a secret is 12 to 255 letters, digits and marks of ASCII, without spaces, quotes and any of \\ $ # | & ;"
)]
pub struct BadSecret;

impl FromStr for Secret {
    type Err = BadSecret;

    fn from_str(text: &str) -> Result<Self, BadSecret> {
        // RFC 7143 asks for 96 bits; firmware's scripts pass nothing else on unharmed.
        let printable = text.bytes().all(|b| b.is_ascii_graphic() && !b"\\\"'`$#|&;".contains(&b));
        ((12..=255).contains(&text.len()) && printable)
            .then(|| Self(text.to_owned()))
            .ok_or(BadSecret)
    }
}

impl TryFrom<String> for Secret {
    type Error = BadSecret;
    fn try_from(text: String) -> Result<Self, BadSecret> {
        text.parse()
    }
}

impl From<Secret> for String {
    fn from(secret: Secret) -> String {
        secret.0
    }
}

impl Secret {
    /// For those who have to use it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// How one side proves to the other who it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chap {
    /// The name that the proving side sends (`CHAP_N`, RFC 7143, 12.1.3).
    pub user: ClientName,
    /// What both sides know, 12 to 255 characters; it is never sent.
    pub secret: Secret,
}

/// A machine that shall boot from this pool.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NewClient {
    /// The client's name, unique in the pool.
    pub name: ClientName,
    /// Of the card that it boots over.
    #[serde(default)]
    pub mac: Option<MacAddress>,
    /// Default: one that is made of the client's name.
    #[serde(default)]
    pub initiator: Option<InitiatorName>,
    /// What it proves who it is with, over iSCSI.
    #[serde(default)]
    pub chap: Option<Chap>,
    /// What the server proves to it.
    #[serde(default)]
    pub target_chap: Option<Chap>,
}

/// What a client boots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Service {
    /// This volume itself.
    Volume(VolumeName),
    /// A clone of its own of this image.
    Image {
        /// The image to clone.
        image: ImageName,
        /// Whether the clone is kept.
        lifetime: Lifetime,
    },
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Volume(volume) => write!(f, "volume {volume}"),
            Self::Image { image, lifetime: Lifetime::Persistent } => {
                write!(f, "image {image}, kept")
            }
            Self::Image { image, lifetime: Lifetime::Ephemeral } => {
                write!(f, "image {image}, fresh")
            }
        }
    }
}

/// What becomes of a client's clone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lifetime {
    /// Made at the first boot, and the same one at every boot after it.
    Persistent,
    /// A fresh one at every boot.
    Ephemeral,
}

/// How a client reaches its disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Over {
    /// The firmware or the initramfs logs in to the volume's iSCSI target; CHAP proves who it is.
    #[default]
    Iscsi,
    /// The initramfs connects to the volume's NBD export.
    Nbd,
}

impl fmt::Display for Over {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Iscsi => "iscsi",
            Self::Nbd => "nbd",
        })
    }
}

/// What a client boots and how it reaches it. A client without one is told that there is nothing to
/// boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Binding {
    /// What is on its disk.
    pub service: Service,
    /// The protocol; iSCSI where nothing else is said.
    #[serde(default)]
    pub over: Over,
}

/// A client of the pool, as `GET /clients` tells it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ClientInfo {
    /// The client's name, unique in the pool.
    pub name: ClientName,
    /// The address of the card that it boots over, unique in the pool; `None`: it boots by its
    /// initiator's name only.
    pub mac: Option<MacAddress>,
    /// The name that it logs in with, unique in the pool.
    pub initiator: InitiatorName,
    /// Its name in CHAP, if it has to prove who it is. The secret is never shown.
    pub chap_user: Option<ClientName>,
    /// What it boots next.
    pub binding: Option<Binding>,
    /// What it booted last.
    pub volume: Option<VolumeName>,
    /// How often it asked for its disk since it is known here.
    pub boots: u64,
    /// Seconds since 1970.
    pub booted_s: Option<u64>,
    /// Who uses that volume now.
    pub sessions: Vec<Login>,
}

/// An open session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Login {
    /// The volume that the session has open.
    pub volume: VolumeName,
    /// The session's protocol.
    pub over: Over,
    /// Its address, and over iSCSI the initiator's name.
    pub peer: String,
    /// Seconds since 1970.
    pub since_s: u64,
}

/// A machine asks for its disk, by the address of its network card.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BootRequest {
    /// Where the machine asks from, if the boot server knows that.
    #[serde(default)]
    pub address: Option<IpAddr>,
    /// The card's address; the client is the one that was given it.
    pub mac: MacAddress,
}

/// The disk that a machine boots from now.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Boot {
    /// Whose disk it is.
    pub client: ClientName,
    /// The name to log in with, over iSCSI.
    pub initiator: InitiatorName,
    /// Its volume, or the clone that was made for it. Target and export are named after it.
    pub volume: VolumeName,
    /// The protocol to reach it by.
    pub over: Over,
    /// What the client has to prove, over iSCSI; `None`: nothing.
    pub chap: Option<Chap>,
    /// What the server proves to the client; `None`: nothing.
    pub target_chap: Option<Chap>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_of_an_export_is_that_of_no_other_export() {
        for (export, target) in [
            ("data", "iqn.2026-11.org.perigee:data"),
            ("acme~data", "iqn.2026-11.org.perigee:acme:data"),
            ("image:debian", "iqn.2026-11.org.perigee:image:debian"),
            ("image:acme~debian", "iqn.2026-11.org.perigee:image:acme:debian"),
        ] {
            assert_eq!(target_name(export), target);
            assert_eq!(export_of_target(target).as_deref(), Some(export));
        }
        assert_eq!(export_of_target("iqn.2026-11.org.other:data"), None);
    }

    #[test]
    fn a_card_s_address_has_colons_or_dashes_and_is_shown_in_one_way() {
        for text in ["52:54:00:AB:cd:ef", "52-54-00-ab-cd-ef"] {
            let mac: MacAddress = text.parse().expect("an address");
            assert_eq!(mac.to_string(), "52:54:00:ab:cd:ef");
        }
        for bad in
            ["", "52:54:00:ab:cd", "52:54:00:ab:cd:ef:01", "+2:54:00:ab:cd:ef", "01:00:5e:00:00:01"]
        {
            assert!(bad.parse::<MacAddress>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn an_initiator_s_name_is_folded_to_lower_case() {
        let name: InitiatorName = "IQN.1993-08.org.debian:01:Abc".parse().expect("a name");
        assert_eq!(name.as_str(), "iqn.1993-08.org.debian:01:abc");
        let long = format!("iqn.{}", "a".repeat(220));
        for bad in ["", "iqn.", "debian", "iqn.a b", "iqn.a_b", &long] {
            assert!(bad.parse::<InitiatorName>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_secret_is_long_enough_and_never_shown() {
        let secret: Secret = "correct-horse".parse().expect("a secret");
        assert_eq!(format!("{secret:?}"), "Secret(…)");
        let spaced = "with a space in it".parse::<Secret>().expect_err("no firmware takes it");
        assert!(!spaced.to_string().contains("with a"));
        assert!("short".parse::<Secret>().is_err());
    }
}
