//! Measures a link by using it, and compares the result with the link's settings.

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
/// After this many probes without an answer, the link counts as silent.
const SILENCES_MAX: usize = 2;
const PATIENCE: Duration = Duration::from_secs(2);
/// A stream without progress for this long is given up.
const STALL: Duration = Duration::from_secs(10);
const WINDOW: Duration = Duration::from_millis(800);
const WINDOW_MAX: Duration = Duration::from_secs(5);
/// The shortest time before counting begins. TCP needs some round trips until it fills the link and has
/// repeated its first losses.
const WARM: Duration = Duration::from_millis(400);
const WARM_ROUND_TRIPS: u32 = 20;
/// The size of a full Ethernet frame, and of the TCP data in it.
const FRAME_BYTES: u64 = 1514;
const PAYLOAD_BYTES: u64 = 1448;

/// What a link does, measured from site to site.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    /// The shortest of several round trips; `None` if there was no answer.
    pub rtt_us: Option<u64>,
    /// The rate of one TCP stream, including headers, from the first site to the second and back.
    pub rate_bits_per_s: [Option<u64>; 2],
}

/// The round-trip time between the first hosts of the two sites; `None` if there is no answer.
///
/// # Errors
/// The hosts' namespaces do not exist.
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

/// The round-trip time, and the rate in each direction.
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
        found
            .ok_or_else(|| Problem::internal(format!("can't measure {link}"), "a site has no host"))
    }

    fn listen(&self) -> Result<(TcpListener, SocketAddr), Problem> {
        let fail = |e| Problem::internal(format!("can't listen in {}", self.namespace), e);
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
            // This does not block, because the connection is already established.
            let (receiver, _) = listener.accept()?;
            receiver.set_read_timeout(Some(STALL))?;
            Ok((sender, receiver))
        }))
    })?;
    // A failed connection is a result of the measurement, not an error.
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

/// Selects Reno, which doubles its window until the link is full. Cubic, the kernel's default, stops
/// doubling when answers are late, as on a busy machine; the link would then seem slower than it is.
fn start_until_full(sender: &TcpStream) -> std::io::Result<()> {
    const NAME: &[u8] = b"reno";
    let length = libc::socklen_t::try_from(NAME.len()).unwrap_or(0);
    // SAFETY: the pointer and the length describe the name, which lives during the call.
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

/// The time before counting begins, and the time for which bytes are counted.
fn times(settings: &LinkSettings) -> (Duration, Duration) {
    let warm = WARM + Duration::from_micros(settings.rtt_us) * WARM_ROUND_TRIPS;
    let hundred_frames = settings.rate.0.map_or(Duration::ZERO, |rate| {
        Duration::from_micros(100 * FRAME_BYTES * 8 * 1_000_000 / rate.max(1))
    });
    (warm, hundred_frames.clamp(WINDOW, WINDOW_MAX))
}

/// Counts the bytes received during `window`, after `warm`. Closing the receiver ends the sender.
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

/// The differences between a link's settings and its measurement, in sentences; empty if there are none.
pub fn differences(settings: &LinkSettings, measured: &Measured) -> Vec<String> {
    let mut found = Vec::new();
    match (settings.down, measured.rtt_us) {
        (true, None) => return found,
        (true, Some(_)) => return vec!["the link is down, but frames still pass".to_owned()],
        (false, None) => return vec!["there is no answer over the link".to_owned()],
        (false, Some(rtt_us)) => {
            let set = format_rtt(settings.rtt_us);
            if rtt_us < settings.rtt_us {
                found.push(format!("the round trip is shorter than the setting of {set}"));
            } else if rtt_us > settings.rtt_us + settings.rtt_us / 4 + 5000 {
                found.push(format!(
                    "the round trip is longer than the setting of {set}: the machine or the link is busy"
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
                "one TCP stream carries {} of {words}: the link's loss slows it down",
                format_bits(rate)
            ));
        } else if rate < set - set / 5 {
            found.push(format!(
                "one TCP stream carries {} of {words}: the machine or the link is busy",
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
        assert!(said(&lossy, Some(16_250), 20_000_000).contains("the link's loss"));
        assert!(said(&set, None, 0).contains("no answer"));
        let down = LinkSettings { down: true, ..set };
        assert_eq!(said(&down, None, 0), "");
        assert!(said(&down, Some(16_250), 0).contains("frames still pass"));
    }
}
