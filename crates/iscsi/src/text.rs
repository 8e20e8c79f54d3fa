//! Texts of keys and values, and the negotiation of each key (RFC 7143, chapters 6 and 13). These are pure
//! functions.

use std::fmt::Write;

/// The limit of the keys of one exchange, in all of its PDUs.
pub const TEXT_BYTES_MAX: usize = 64 << 10;
const KEY_BYTES_MAX: usize = 63;
/// The most keys in one text. Real initiators send fewer.
const KEYS_MAX: usize = 64;

/// Why a text of keys and values (RFC 7143, 6.1) can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    #[error("a text is not UTF-8")]
    NotText,
    #[error("a text has an entry that is not KEY=VALUE")]
    NoValue,
    #[error("a text has more than {KEYS_MAX} keys")]
    TooManyKeys,
    #[error("the key {0} appears twice")]
    Twice(String),
    #[error("{key}={value} is not a valid value")]
    Value { key: String, value: String },
}

/// The keys of a text, in their order.
///
/// # Errors
/// When it is not a valid text of keys.
pub fn parse(bytes: &[u8]) -> Result<Vec<(&str, &str)>, TextError> {
    let text = std::str::from_utf8(bytes).map_err(|_| TextError::NotText)?;
    let mut keys: Vec<(&str, &str)> = Vec::new();
    for entry in text.split('\0').filter(|entry| !entry.is_empty()) {
        let (key, value) = entry.split_once('=').ok_or(TextError::NoValue)?;
        if key.is_empty() || key.len() > KEY_BYTES_MAX {
            return Err(TextError::NoValue);
        }
        if keys.iter().any(|(other, _)| *other == key) {
            return Err(TextError::Twice(key.into()));
        }
        if keys.len() == KEYS_MAX {
            return Err(TextError::TooManyKeys);
        }
        keys.push((key, value));
    }
    Ok(keys)
}

/// The value of a key in a text.
pub fn value<'a>(keys: &[(&str, &'a str)], key: &str) -> Option<&'a str> {
    keys.iter().find(|(other, _)| *other == key).map(|(_, value)| *value)
}

/// A text that is being written.
#[derive(Debug, Default, Clone)]
pub struct Answers(Vec<u8>);

impl Answers {
    /// Adds `key=value`, with the zero byte that ends each pair.
    pub fn add(&mut self, key: &str, value: impl std::fmt::Display) {
        let mut entry = String::new();
        write!(entry, "{key}={value}").expect("a string takes everything");
        self.0.extend(entry.as_bytes());
        self.0.push(0);
    }

    /// The data segment, without padding.
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

/// The negotiated parameters of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameters {
    pub header_digest: bool,
    pub data_digest: bool,
    /// The most data that the initiator accepts in one PDU.
    pub their_data_bytes_max: u32,
    pub max_burst_bytes: u32,
    pub first_burst_bytes: u32,
    pub initial_r2t: bool,
    pub immediate_data: bool,
    pub max_outstanding_r2t: u32,
}

/// The most data that this target accepts in one PDU.
pub const OUR_DATA_BYTES_MAX: u32 = 256 << 10;
/// The most data of a burst of a write, for which one R2T asks.
const MAX_BURST_BYTES: u32 = 1 << 20;
/// The most unsolicited data of a command.
const FIRST_BURST_BYTES: u32 = 256 << 10;
const OUTSTANDING_R2T_MAX: u32 = 8;
const LENGTH_RANGE: std::ops::RangeInclusive<u32> = 512..=0xff_ffff;

impl Default for Parameters {
    /// The values of keys that are not negotiated.
    fn default() -> Self {
        Self {
            header_digest: false,
            data_digest: false,
            their_data_bytes_max: 8192,
            max_burst_bytes: 262_144,
            first_burst_bytes: 65_536,
            initial_r2t: true,
            immediate_data: true,
            max_outstanding_r2t: 1,
        }
    }
}

impl Parameters {
    /// Negotiates one operational key: takes the initiator's value, and adds the answer. A `discovery` session
    /// carries no commands, so most keys have no meaning for it.
    ///
    /// # Errors
    /// When the key can't have this value.
    pub fn agree(
        &mut self,
        key: &str,
        value: &str,
        discovery: bool,
        answers: &mut Answers,
    ) -> Result<(), TextError> {
        let wrong = || TextError::Value { key: key.into(), value: value.into() };
        let number = |range| number_in(value, range).ok_or_else(wrong);
        let yes = || boolean(value).ok_or_else(wrong);
        match key {
            "HeaderDigest" => self.header_digest = digest(key, value, answers).ok_or_else(wrong)?,
            "DataDigest" => self.data_digest = digest(key, value, answers).ok_or_else(wrong)?,
            "MaxRecvDataSegmentLength" => self.their_data_bytes_max = number(LENGTH_RANGE)?,
            "DefaultTime2Wait" => answers.add(key, number(0..=3600)?.max(2)),
            // A session whose connection has ended is not kept.
            "DefaultTime2Retain" | "ErrorRecoveryLevel" => {
                number(0..=3600)?;
                answers.add(key, 0);
            }
            "IFMarker" | "OFMarker" => {
                yes()?;
                answers.add(key, "No");
            }
            "IFMarkInt" | "OFMarkInt" => answers.add(key, "Irrelevant"),
            _ if discovery && is_for_commands(key) => answers.add(key, "Irrelevant"),
            "MaxConnections" => answers.add(key, number(1..=65535)?.min(1)),
            "InitialR2T" => {
                self.initial_r2t = yes()?;
                answers.add(key, word(self.initial_r2t));
            }
            "ImmediateData" => {
                self.immediate_data = yes()?;
                answers.add(key, word(self.immediate_data));
            }
            "MaxBurstLength" => {
                self.max_burst_bytes = number(LENGTH_RANGE)?.min(MAX_BURST_BYTES);
                answers.add(key, self.max_burst_bytes);
            }
            "FirstBurstLength" => {
                self.first_burst_bytes = number(LENGTH_RANGE)?.min(FIRST_BURST_BYTES);
                answers.add(key, self.first_burst_bytes);
            }
            "MaxOutstandingR2T" => {
                self.max_outstanding_r2t = number(1..=65535)?.min(OUTSTANDING_R2T_MAX);
                answers.add(key, self.max_outstanding_r2t);
            }
            "DataPDUInOrder" | "DataSequenceInOrder" => {
                yes()?;
                answers.add(key, "Yes");
            }
            "TaskReporting" => answers.add(key, "RFC3720"),
            "iSCSIProtocolLevel" => answers.add(key, number(0..=31)?.min(1)),
            "RDMAExtensions" => answers.add(key, "No"),
            _ => answers.add(key, "NotUnderstood"),
        }
        Ok(())
    }

    /// Resolves dependencies between the keys after all of them were negotiated.
    pub fn settle(&mut self) {
        self.first_burst_bytes = self.first_burst_bytes.min(self.max_burst_bytes);
    }
}

fn is_for_commands(key: &str) -> bool {
    matches!(
        key,
        "MaxConnections"
            | "InitialR2T"
            | "ImmediateData"
            | "MaxBurstLength"
            | "FirstBurstLength"
            | "MaxOutstandingR2T"
            | "DataPDUInOrder"
            | "DataSequenceInOrder"
            | "TaskReporting"
    )
}

/// The first of the initiator's choices that is supported; `None` if none is.
fn digest(key: &str, value: &str, answers: &mut Answers) -> Option<bool> {
    let chosen = value.split(',').find(|choice| matches!(*choice, "None" | "CRC32C"))?;
    answers.add(key, chosen);
    Some(chosen == "CRC32C")
}

fn boolean(value: &str) -> Option<bool> {
    match value {
        "Yes" => Some(true),
        "No" => Some(false),
        _ => None,
    }
}

fn word(yes: bool) -> &'static str {
    if yes { "Yes" } else { "No" }
}

/// A number, decimal or hexadecimal.
pub fn number_in(value: &str, range: std::ops::RangeInclusive<u32>) -> Option<u32> {
    let number = match value.strip_prefix("0x").or_else(|| value.strip_prefix("0X")) {
        Some(hex) if hex.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
            u32::from_str_radix(hex, 16).ok()?
        }
        None if value.bytes().all(|byte| byte.is_ascii_digit()) => value.parse().ok()?,
        _ => return None,
    };
    range.contains(&number).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agree(keys: &[(&str, &str)], discovery: bool) -> (Parameters, String) {
        let (mut parameters, mut answers) = (Parameters::default(), Answers::default());
        for (key, value) in keys {
            parameters.agree(key, value, discovery, &mut answers).expect("a value of the key");
        }
        parameters.settle();
        let text = String::from_utf8(answers.into_bytes()).expect("a text");
        (parameters, text.replace('\0', " "))
    }

    #[test]
    fn a_text_is_keys_and_values() {
        assert_eq!(parse(b"A=1\0B=\0C==x\0\0"), Ok(vec![("A", "1"), ("B", ""), ("C", "=x")]));
        assert_eq!(parse(b""), Ok(vec![]));
        assert_eq!(parse(b"A"), Err(TextError::NoValue));
        assert_eq!(parse(b"=1\0"), Err(TextError::NoValue));
        assert_eq!(parse(b"A=1\0A=2\0"), Err(TextError::Twice("A".into())));
        assert_eq!(parse(b"\xff=1"), Err(TextError::NotText));
        let many: String = (0..=KEYS_MAX).map(|n| format!("K{n}=1\0")).collect();
        assert_eq!(parse(many.as_bytes()), Err(TextError::TooManyKeys));
    }

    #[test]
    fn numbers_are_cut_to_what_the_target_does() {
        let (parameters, text) = agree(
            &[
                ("MaxBurstLength", "16776192"),
                ("FirstBurstLength", "0x10000"),
                ("MaxOutstandingR2T", "100"),
                ("MaxConnections", "4"),
                ("ErrorRecoveryLevel", "2"),
                ("MaxRecvDataSegmentLength", "262144"),
            ],
            false,
        );
        assert_eq!(parameters.max_burst_bytes, MAX_BURST_BYTES);
        assert_eq!(parameters.first_burst_bytes, 65536);
        assert_eq!(parameters.their_data_bytes_max, 262_144);
        assert_eq!(
            text,
            "MaxBurstLength=1048576 FirstBurstLength=65536 MaxOutstandingR2T=8 MaxConnections=1 \
             ErrorRecoveryLevel=0 "
        );
    }

    #[test]
    fn the_initiator_s_first_digest_that_is_known_is_taken() {
        let digests = [("HeaderDigest", "X-other,CRC32C,None"), ("DataDigest", "None,CRC32C")];
        let (parameters, text) = agree(&digests, false);
        assert!(parameters.header_digest && !parameters.data_digest);
        assert_eq!(text, "HeaderDigest=CRC32C DataDigest=None ");
    }

    #[test]
    fn a_discovery_session_has_no_bursts() {
        let keys = [("MaxBurstLength", "512"), ("InitialR2T", "No"), ("X-new", "1")];
        let (parameters, text) = agree(&keys, true);
        assert_eq!(parameters, Parameters::default());
        assert_eq!(text, "MaxBurstLength=Irrelevant InitialR2T=Irrelevant X-new=NotUnderstood ");
    }

    #[test]
    fn values_that_are_none_are_refused() {
        for (key, value) in [
            ("MaxBurstLength", "511"),
            ("MaxBurstLength", "16777216"),
            ("MaxBurstLength", "-1"),
            ("MaxBurstLength", "0x"),
            ("MaxRecvDataSegmentLength", "99999999999999999999"),
            ("InitialR2T", "yes"),
            ("HeaderDigest", "MD5"),
            ("DefaultTime2Wait", ""),
        ] {
            let mut answers = Answers::default();
            let refused = Parameters::default().agree(key, value, false, &mut answers);
            assert_eq!(refused, Err(TextError::Value { key: key.into(), value: value.into() }));
        }
    }

    #[test]
    fn a_first_burst_is_no_longer_than_a_burst() {
        let (parameters, _) = agree(&[("MaxBurstLength", "4096")], false);
        assert_eq!(parameters.first_burst_bytes, 4096);
    }
}
