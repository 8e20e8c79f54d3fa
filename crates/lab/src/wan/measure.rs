//! What a link really does, found out by using it, and whether that is what was set.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use nix::libc;
use perigee_model::Problem;
use serde::{Deserialize, Serialize};

use super::settings::{LinkSettings, format_bits, format_rtt};
use crate::definition::{Definition, Link};
use crate::netns;

const CONNECTS: usize = 7;
/// After so many without an answer there is none.
const SILENCES_MAX: usize = 2;
const PATIENCE: Duration = Duration::from_secs(2);
/// A stream that has stood still for so long measures nothing.
const STALL: Duration = Duration::from_secs(10);
const WINDOW: Duration = Duration::from_millis(800);
const WINDOW_MAX: Duration = Duration::from_secs(5);
/// TCP needs some round trips until it fills the link, and has sent again what it lost on the way.
const WARM: Duration = Duration::from_millis(400);
const WARM_ROUND_TRIPS: u32 = 20;
/// An Ethernet frame of full size, and what TCP carries in it.
const FRAME_BYTES: u64 = 1514;
const PAYLOAD_BYTES: u64 = 1448;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    /// The shortest of several; `None` when nobody answered.
    pub rtt_us: Option<u64>,
    /// What one TCP stream carried, with headers, from the first site to the second and back.
    pub rate_bits_per_s: [Option<u64>; 2],
}

/// The round trip between the first hosts of the two sites.
///
/// # Errors
/// When the hosts' namespaces are not there. That nobody answers is no error.
pub fn round_trip(definition: &Definition, link: &Link) -> Result<Option<u64>, Problem> {
    let (from, to) = (Host::first(definition, link, 0)?, Host::first(definition, link, 1)?);
    let (_listener, address) = to.listen()?;
    let timeout = PATIENCE + Duration::from_micros(link.settings.rtt_us);
    netns::within(&from.namespace, || {
        let (mut best, mut silences) = (None, 0);
        for _ in 0..CONNECTS {
            let began = Instant::now();
            if TcpStream::connect_timeout(&address, timeout).is_ok() {
                let rtt_us = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
                best = Some(best.map_or(rtt_us, |b: u64| b.min(rtt_us)));
            } else {
                silences += 1;
            }
            if silences == SILENCES_MAX {
                break;
            }
        }
        Ok(best)
    })
}

/// Round trip and rate in each direction.
///
/// # Errors
/// As [`round_trip`].
pub fn measure(definition: &Definition, link: &Link) -> Result<Measured, Problem> {
    let rtt_us = round_trip(definition, link)?;
    let mut measured = Measured { rtt_us, ..Measured::default() };
    if rtt_us.is_some() {
        for (from, to) in [(0, 1), (1, 0)] {
            measured.rate_bits_per_s[from] = rate(definition, link, from, to)?;
        }
    }
    Ok(measured)
}

struct Host {
    namespace: String,
    address: Ipv4Addr,
}

impl Host {
    /// The first host of a link's first or second site.
    fn first(definition: &Definition, link: &Link, end: usize) -> Result<Self, Problem> {
        let site = definition.sites.iter().find(|s| s.name == link.sites[end]);
        let host = site.and_then(|s| s.hosts.first());
        let found = host.and_then(|host| {
            let namespace = definition.host_namespace(host);
            definition.host_address(host).map(|address| Self { namespace, address })
        });
        found.ok_or_else(|| Problem::internal(format!("measure {link}"), "a site has no host"))
    }

    fn listen(&self) -> Result<(TcpListener, SocketAddr), Problem> {
        let fail = |e| Problem::internal(format!("listen in {}", self.namespace), e);
        netns::within(&self.namespace, || {
            let listener = TcpListener::bind((self.address, 0)).map_err(fail)?;
            let address = listener.local_addr().map_err(fail)?;
            Ok((listener, address))
        })
    }
}

fn rate(
    definition: &Definition,
    link: &Link,
    from: usize,
    to: usize,
) -> Result<Option<u64>, Problem> {
    let (from, to) = (Host::first(definition, link, from)?, Host::first(definition, link, to)?);
    let (listener, address) = to.listen()?;
    let timeout = PATIENCE + Duration::from_micros(link.settings.rtt_us);
    let connected = netns::within(&from.namespace, || {
        Ok(TcpStream::connect_timeout(&address, timeout).and_then(|sender| {
            sender.set_write_timeout(Some(STALL))?;
            start_until_full(&sender)?;
            // It is accepted at once, for it is connected already.
            let (receiver, _) = listener.accept()?;
            receiver.set_read_timeout(Some(STALL))?;
            Ok((sender, receiver))
        }))
    })?;
    // What does not come through is no fault of the measurement, but its result.
    let Ok((mut sender, receiver)) = connected else { return Ok(None) };
    let (warm, window) = times(&link.settings);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let block = vec![0; 256 << 10];
            while sender.write(&block).is_ok_and(|written| written > 0) {}
        });
        Ok(received_bits_per_s(receiver, warm, window).ok())
    })
}

/// Reno doubles what is on its way until the link is full. Cubic, the kernel's own choice, stops
/// earlier where answers come late, as they do on a busy machine, and then measures itself.
fn start_until_full(sender: &TcpStream) -> std::io::Result<()> {
    const NAME: &[u8] = b"reno";
    let length = libc::socklen_t::try_from(NAME.len()).unwrap_or(0);
    // SAFETY: the name is as long as is said, and lives during the call.
    let done = unsafe {
        libc::setsockopt(
            sender.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_CONGESTION,
            NAME.as_ptr().cast(),
            length,
        )
    };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// How long the stream runs before it counts, and how long it counts.
fn times(settings: &LinkSettings) -> (Duration, Duration) {
    let warm = WARM + Duration::from_micros(settings.rtt_us) * WARM_ROUND_TRIPS;
    let hundred_frames = settings.rate.0.map_or(Duration::ZERO, |rate| {
        Duration::from_micros(100 * FRAME_BYTES * 8 * 1_000_000 / rate.max(1))
    });
    (warm, hundred_frames.clamp(WINDOW, WINDOW_MAX))
}

/// Counts after `warm`, for `window`; the receiver's end ends the sender.
fn received_bits_per_s(
    mut receiver: TcpStream,
    warm: Duration,
    window: Duration,
) -> std::io::Result<u64> {
    let mut room = vec![0; 256 << 10];
    let began = Instant::now();
    let (mut bytes, mut counting) = (0u64, None);
    loop {
        let length = match receiver.read(&mut room) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(length) => length as u64,
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        match counting {
            None if began.elapsed() >= warm => counting = Some(Instant::now()),
            None => {}
            Some(start) => {
                bytes += length;
                let elapsed: Duration = start.elapsed();
                if elapsed >= window {
                    let payload_bits = u128::from(bytes) * 8 * 1_000_000_000 / elapsed.as_nanos();
                    let bits = payload_bits * u128::from(FRAME_BYTES) / u128::from(PAYLOAD_BYTES);
                    return Ok(u64::try_from(bits).unwrap_or(u64::MAX));
                }
            }
        }
    }
}

/// Where a link is not what was set, in sentences; empty when it is.
pub fn differences(settings: &LinkSettings, measured: &Measured) -> Vec<String> {
    let mut found = Vec::new();
    match (settings.down, measured.rtt_us) {
        (true, None) => return found,
        (true, Some(_)) => return vec!["the link is down, and yet it answers".to_owned()],
        (false, None) => return vec!["nobody answers over the link".to_owned()],
        (false, Some(rtt_us)) => {
            let set = format_rtt(settings.rtt_us);
            if rtt_us < settings.rtt_us {
                found.push(format!("the round trip is shorter than the {set} that were set"));
            } else if rtt_us > settings.rtt_us + settings.rtt_us / 4 + 5000 {
                found.push(format!(
                    "the round trip is longer than the {set} that were set: the machine or the link is busy"
                ));
            }
        }
    }
    let Some(set) = settings.rate.0 else { return found };
    let words = format_bits(set);
    for rate in measured.rate_bits_per_s.into_iter().flatten() {
        if rate > set + set / 10 {
            found.push(format!("it carries {}, more than {words}", format_bits(rate)));
        } else if rate < set - set / 5 && settings.loss_ppm > 0 {
            found.push(format!(
                "one stream of TCP carries {} of {words}: the loss that was set slows it down",
                format_bits(rate)
            ));
        } else if rate < set - set / 5 {
            found.push(format!(
                "one stream of TCP carries {} of {words}: the machine or the link is busy",
                format_bits(rate)
            ));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::settings::Rate;
    use super::*;

    #[test]
    fn what_differs_from_what_was_set_is_said() {
        let set = LinkSettings { rate: Rate(Some(100_000_000)), ..LinkSettings::of_rtt_us(16_000) };
        let said = |set: &LinkSettings, rtt_us: Option<u64>, rate: u64| {
            let rates = [Some(rate), None];
            differences(set, &Measured { rtt_us, rate_bits_per_s: rates }).join("; ")
        };
        assert_eq!(said(&set, Some(16_250), 97_000_000), "");
        assert!(said(&set, Some(15_999), 97_000_000).contains("shorter"));
        assert!(said(&set, Some(60_000), 97_000_000).contains("longer"));
        assert!(said(&set, Some(16_250), 130_000_000).contains("more than 100 Mbit/s"));
        assert!(said(&set, Some(16_250), 20_000_000).contains("busy"));
        let lossy = LinkSettings { loss_ppm: 1000, ..set };
        assert!(said(&lossy, Some(16_250), 20_000_000).contains("the loss that was set"));
        assert!(said(&set, None, 0).contains("nobody answers"));
        let down = LinkSettings { down: true, ..set };
        assert_eq!(said(&down, None, 0), "");
        assert!(said(&down, Some(16_250), 0).contains("yet it answers"));
    }
}
