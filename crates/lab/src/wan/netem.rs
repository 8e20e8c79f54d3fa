//! The WAN if the kernel has netem: a veth pair between two sites, with a netem queue at each end.

use std::time::Duration;

use perigee_model::Problem;

use super::settings::LinkSettings;
use crate::command::run;
use crate::definition::{Definition, Link};

const BITS_PER_FRAME: u64 = 1514 * 8;
const FRAMES_MIN: u64 = 1000;
/// The queue's length for a link without a rate, where a frame may have 64 KiB.
const FRAMES_MAX: u64 = 100_000;
/// The kernel's default for a network card.
const SEGMENTS_MAX: &str = "65535";
/// Each frame is one packet.
pub const SEGMENTS_MIN: &str = "1";

/// Finds out whether the kernel has netem, by using it in a namespace of the lab.
pub async fn works(namespace: &str) -> bool {
    let tc = |action: &'static str| {
        let args =
            ["-n", namespace, "qdisc", action, "dev", "br0", "root", "netem", "delay", "1ms"];
        async move { run("tc", &args).await }
    };
    tc("add").await.is_ok() && tc("delete").await.is_ok()
}

/// Applies a link's settings.
///
/// # Errors
/// `tc` fails.
pub async fn apply(definition: &Definition, links: &[Link], link: &Link) -> Result<(), Problem> {
    let [a, b] = &link.sites;
    for (site, other) in [(a, b), (b, a)] {
        let namespace = definition.site_namespace(site);
        let queue = queue_words(&definition.wan_device(other), &link.settings);
        let mut args = vec!["-n", &namespace];
        args.extend(queue.iter().map(String::as_str));
        run("tc", &args).await?;
        // netem treats a large frame as one, so the hosts have to cut frames before they send them.
        let all = links.iter().filter(|l| l.sites.contains(site));
        let super_frames = all.into_iter().all(|l| l.settings.super_frames());
        let segments = if super_frames { SEGMENTS_MAX } else { SEGMENTS_MIN };
        for host in definition.sites.iter().filter(|s| &s.name == site).flat_map(|s| &s.hosts) {
            set_segments(&definition.host_namespace(host), segments).await?;
        }
    }
    Ok(())
}

/// How many packets a host of this namespace may send as one frame.
///
/// # Errors
/// `ip` fails.
pub async fn set_segments(namespace: &str, segments: &str) -> Result<(), Problem> {
    run("ip", &["-n", namespace, "link", "set", "eth0", "gso_max_segs", segments]).await.map(drop)
}

/// The arguments of `tc` for one direction: what this card sends gets these settings, whatever it had before.
fn queue_words(device: &str, settings: &LinkSettings) -> Vec<String> {
    let loss_ppm = if settings.down { 1_000_000 } else { settings.loss_ppm };
    let limit = frames(settings).to_string();
    let delay = format!("{}us", settings.rtt_us.div_ceil(2));
    let loss = format!("{}%", f64::from(loss_ppm) / 1e4);
    // `replace` changes a netem that is there, and that keeps a rate that is not named. 0 means no rate.
    let rate = format!("{}bit", settings.rate.0.unwrap_or(0));
    let mut words: Vec<&str> = vec!["qdisc", "replace", "dev", device, "root", "netem"];
    words.extend(["limit", &limit, "delay", &delay, "loss", "random", &loss, "rate", &rate]);
    words.into_iter().map(str::to_owned).collect()
}

/// How many frames netem's queue holds: those in transit, and those that wait for the link.
fn frames(settings: &LinkSettings) -> u64 {
    let Some(rate) = settings.rate.0 else { return FRAMES_MAX };
    let held = Duration::from_micros(settings.rtt_us / 2 + settings.wait_us_max());
    let bits = u128::from(rate) * held.as_micros() / 1_000_000;
    let frames = u64::try_from(bits / u128::from(BITS_PER_FRAME)).unwrap_or(FRAMES_MAX);
    frames.clamp(FRAMES_MIN, FRAMES_MAX)
}

#[cfg(test)]
mod tests {
    use super::super::settings::Rate;
    use super::*;

    /// A free link, a slow one that loses frames, and one that is down.
    fn examples() -> [LinkSettings; 3] {
        let free = LinkSettings::of_rtt_us(16_000);
        let slow = LinkSettings { rate: Rate(Some(100_000_000)), loss_ppm: 1000, ..free };
        [free, slow, LinkSettings { down: true, ..free }]
    }

    #[test]
    fn netem_gets_half_of_the_round_trip_and_what_is_set() {
        let words = examples().map(|settings| queue_words("wan1", &settings).join(" "));
        let netem = "qdisc replace dev wan1 root netem";
        assert_eq!(words[0], format!("{netem} limit 100000 delay 8000us loss random 0% rate 0bit"));
        let slow = "limit 1000 delay 8000us loss random 0.1% rate 100000000bit";
        assert_eq!(words[1], format!("{netem} {slow}"));
        assert_eq!(
            words[2],
            format!("{netem} limit 100000 delay 8000us loss random 100% rate 0bit")
        );
    }

    /// `tc` reads its arguments before it looks for the card.
    #[test]
    fn tc_understands_what_netem_gets() {
        for settings in examples() {
            let words = queue_words("no-such-card", &settings);
            let output = std::process::Command::new("tc").args(&words).output().expect("iproute2");
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(said.contains("Cannot find device"), "tc {}: {said}", words.join(" "));
        }
    }

    #[test]
    fn a_rate_that_is_taken_away_is_named_to_netem() {
        let [free, slow, _] = examples();
        assert_ne!(slow.rate, free.rate);
        assert!(queue_words("wan1", &free).ends_with(&["rate".to_owned(), "0bit".to_owned()]));
    }

    #[test]
    fn netem_holds_what_is_on_its_way_and_what_waits() {
        let gigabit =
            LinkSettings { rate: Rate(Some(1_000_000_000)), ..LinkSettings::of_rtt_us(100_000) };
        // 150 ms at 1 Gbit/s.
        assert_eq!(frames(&gigabit), 150_000_000 / 12_112);
    }
}
