//! The settings of a link between two sites, and their text forms.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Below this rate, and with loss, hosts must send frames of normal size, so that single frames are lost
/// or late and not the 64 KiB that a host otherwise gives to its network card at once.
const SUPER_FRAMES_BITS_PER_S_MIN: u64 = 500_000_000;
const RTT_US_MAX: u64 = 10_000_000;
/// At this rate a full frame takes 1.2 s.
const RATE_BITS_PER_S_MIN: u64 = 10_000;
const RATE_BITS_PER_S_MAX: u64 = 100_000_000_000;
const MILLION: u32 = 1_000_000;
/// The shortest limit for the time that a frame waits for the link. The limit is otherwise one round trip.
const QUEUE_US_MIN: u64 = 50_000;
/// This much may always wait, however slow the link is: two of the largest frames.
const QUEUE_BYTES_MIN: u64 = 128 << 10;

/// Rate and loss apply to each direction. Each direction takes half of the round-trip time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkSettings {
    pub rtt_us: u64,
    #[serde(rename = "rate_bits_per_s")]
    pub rate: Rate,
    /// Lost frames per million.
    pub loss_ppm: u32,
    /// No frame passes.
    pub down: bool,
}

impl LinkSettings {
    /// An unlimited link without loss.
    pub fn of_rtt_us(rtt_us: u64) -> Self {
        Self { rtt_us, rate: Rate::UNLIMITED, loss_ppm: 0, down: false }
    }

    /// Whether hosts may send frames of up to 64 KiB over the link.
    pub fn super_frames(&self) -> bool {
        self.loss_ppm == 0 && self.rate.0.is_none_or(|rate| rate >= SUPER_FRAMES_BITS_PER_S_MIN)
    }

    /// The longest time for which a frame waits for the link. A frame that would wait longer is dropped.
    pub fn wait_us_max(&self) -> u64 {
        let wait_us = self.rtt_us.max(QUEUE_US_MIN);
        let rate = self.rate.0.unwrap_or(RATE_BITS_PER_S_MAX);
        wait_us.max(QUEUE_BYTES_MIN * 8 * 1_000_000 / rate)
    }
}

impl fmt::Display for LinkSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.down {
            return f.write_str("down");
        }
        write!(f, "{}, {}", format_rtt(self.rtt_us), self.rate)?;
        if self.loss_ppm > 0 {
            write!(f, ", {} loss", format_loss(self.loss_ppm))?;
        }
        Ok(())
    }
}

/// A change of settings. Fields that are `None` stay as they are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Change {
    pub rtt_us: Option<u64>,
    pub rate: Option<Rate>,
    pub loss_ppm: Option<u32>,
    pub down: Option<bool>,
}

impl Change {
    /// The settings with what is changed.
    #[must_use]
    pub fn of(&self, settings: LinkSettings) -> LinkSettings {
        LinkSettings {
            rtt_us: self.rtt_us.unwrap_or(settings.rtt_us),
            rate: self.rate.unwrap_or(settings.rate),
            loss_ppm: self.loss_ppm.unwrap_or(settings.loss_ppm),
            down: self.down.unwrap_or(settings.down),
        }
    }
}

/// Bits per second, including the frames' headers; `None` is unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rate(pub Option<u64>);

impl Rate {
    /// As fast as the machine can.
    pub const UNLIMITED: Self = Self(None);
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "unlimited" {
            return Ok(Self::UNLIMITED);
        }
        let units = [("kbit", 1_000), ("Mbit", 1_000_000), ("Gbit", 1_000_000_000)];
        match scaled(text, &units) {
            Some(rate @ RATE_BITS_PER_S_MIN..=RATE_BITS_PER_S_MAX) => Ok(Self(Some(rate))),
            _ => Err(format!(
                "{text:?} is not a link's rate: 10kbit to 100Gbit, as 500kbit, 100Mbit or 1Gbit, or `unlimited`"
            )),
        }
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => f.write_str("unlimited"),
            Some(rate) => f.write_str(&format_bits(rate)),
        }
    }
}

/// Parses `16ms`, `0.5ms`, `800us` or `1s` to microseconds.
///
/// # Errors
/// A sentence for the user.
pub fn parse_rtt(text: &str) -> Result<u64, String> {
    match scaled(text, &[("us", 1), ("ms", 1_000), ("s", 1_000_000)]) {
        Some(rtt_us) if rtt_us <= RTT_US_MAX => Ok(rtt_us),
        _ => Err(format!("{text:?} is not a round-trip time: 0ms to 10s, as 800us, 16ms or 1s")),
    }
}

/// Parses `0.1%` to parts per million.
///
/// # Errors
/// A sentence for the user.
pub fn parse_loss(text: &str) -> Result<u32, String> {
    scaled(text, &[("%", u64::from(MILLION / 100))])
        .and_then(|ppm| u32::try_from(ppm).ok().filter(|ppm| *ppm <= MILLION))
        .ok_or_else(|| format!("{text:?} is not a share of lost frames: 0% to 100%, as 0.1%"))
}

/// `16 ms`, `0.5 ms`.
pub fn format_rtt(rtt_us: u64) -> String {
    match rtt_us % 1000 {
        0 => format!("{} ms", rtt_us / 1000),
        rest => format!("{}.{} ms", rtt_us / 1000, format!("{rest:03}").trim_end_matches('0')),
    }
}

/// `0.1 %`.
pub fn format_loss(loss_ppm: u32) -> String {
    format!("{} %", f64::from(loss_ppm) / f64::from(MILLION / 100))
}

/// `1 Gbit/s`, `97.3 Mbit/s`.
pub fn format_bits(bits_per_s: u64) -> String {
    let (scale, unit) = match bits_per_s {
        1_000_000_000.. => (1_000_000_000, "Gbit/s"),
        1_000_000.. => (1_000_000, "Mbit/s"),
        _ => (1_000, "kbit/s"),
    };
    // A measurement is not exact enough for more than three digits.
    let (whole, thousandths) = (bits_per_s / scale, bits_per_s % scale * 1000 / scale);
    let fraction = match whole {
        0..=9 => format!("{:02}", thousandths / 10),
        10..=99 => (thousandths / 100).to_string(),
        _ => String::new(),
    };
    match fraction.trim_end_matches('0') {
        "" => format!("{whole} {unit}"),
        fraction => format!("{whole}.{fraction} {unit}"),
    }
}

/// Parses a decimal number with one of the units. The result is in the smallest unit.
fn scaled(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = text.split_at(end);
    let scale = units.iter().find(|(name, _)| *name == unit.trim_start())?.1;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if fraction.is_empty() || fraction.len() > 6 {
        return None;
    }
    let digits = 10u64.pow(u32::try_from(fraction.len()).ok()?);
    let whole = whole.parse::<u64>().ok()?.checked_mul(scale)?;
    whole.checked_add(fraction.parse::<u64>().ok()?.checked_mul(scale)? / digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_rates_and_losses_are_read_as_people_write_them() {
        assert_eq!(parse_rtt("16ms"), Ok(16_000));
        assert_eq!(parse_rtt("0.5 ms"), Ok(500));
        assert_eq!((parse_rtt("800us"), parse_rtt("1s")), (Ok(800), Ok(1_000_000)));
        assert_eq!("1Gbit".parse(), Ok(Rate(Some(1_000_000_000))));
        assert_eq!("2.5Mbit".parse(), Ok(Rate(Some(2_500_000))));
        assert_eq!("unlimited".parse(), Ok(Rate::UNLIMITED));
        assert_eq!((parse_loss("0.1%"), parse_loss("100%")), (Ok(1000), Ok(1_000_000)));
        for bad in ["", "16", "ms", "-1ms", "1.2.3ms", "11s", "1 h", "99999999999999999999ms"] {
            assert!(parse_rtt(bad).is_err(), "{bad:?}");
        }
        for bad in ["", "0Mbit", "1Gb", "100", "1kbit", "1000Gbit"] {
            assert!(bad.parse::<Rate>().is_err(), "{bad:?}");
        }
        for bad in ["", "0.1", "101%", "-1%"] {
            assert!(parse_loss(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn what_is_shown_says_the_same() {
        assert_eq!(format_rtt(16_250), "16.25 ms");
        assert_eq!(format_rtt(50), "0.05 ms");
        let shown = [97_310_000, 1_000_000_000, 9_876_000, 640_000, 123_400_000].map(format_bits);
        assert_eq!(shown, ["97.3 Mbit/s", "1 Gbit/s", "9.87 Mbit/s", "640 kbit/s", "123 Mbit/s"]);
        let settings = LinkSettings { loss_ppm: 1000, ..LinkSettings::of_rtt_us(16_000) };
        assert_eq!(settings.to_string(), "16 ms, unlimited, 0.1 % loss");
    }

    #[test]
    fn a_change_leaves_the_rest_as_it_is() {
        let old = LinkSettings { loss_ppm: 1000, ..LinkSettings::of_rtt_us(16_000) };
        assert_eq!(Change::default().of(old), old);
        let cut = Change { down: Some(true), ..Change::default() }.of(old);
        assert_eq!(cut, LinkSettings { down: true, ..old });
        assert_eq!(Change { down: Some(false), ..Change::default() }.of(cut), old);
    }

    #[test]
    fn slow_and_lossy_links_carry_frames_one_by_one() {
        let free = LinkSettings::of_rtt_us(16_000);
        assert!(free.super_frames());
        assert!(LinkSettings { rate: Rate(Some(1_000_000_000)), ..free }.super_frames());
        assert!(!LinkSettings { rate: Rate(Some(100_000_000)), ..free }.super_frames());
        assert!(!LinkSettings { loss_ppm: 1, ..free }.super_frames());
    }
}
