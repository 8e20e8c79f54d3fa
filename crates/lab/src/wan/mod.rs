//! The WAN between a lab's sites: the settings of each link, how they are applied, and how a link is
//! measured.
//!
//! | question | file |
//! |---|---|
//! | which settings has a link, and how are they written | `settings.rs` |
//! | does a frame arrive, and when | `wire.rs` |
//! | how many bytes has a frame on the wire | `frame.rs` |
//! | where are frames kept until they are due | `ring.rs` |
//! | what carries frames if the kernel has no netem | `relay.rs`, `tap.rs` |
//! | what carries frames if it has netem | `netem.rs` |
//! | does a link behave as it is set | `measure.rs` |

mod frame;
mod measure;
mod netem;
mod relay;
mod ring;
mod settings;
mod tap;
mod wire;

use std::fs::File;
use std::time::Duration;

use perigee_model::{Problem, SiteId};
use serde::{Deserialize, Serialize};

pub use measure::{Measured, measure};
pub use relay::{LinkState, relay};
pub use settings::{
    Change, LinkSettings, Rate, format_bits, format_loss, format_rtt, parse_loss, parse_rtt,
};
pub use wire::Counts;

use crate::command::run;
use crate::definition::{Definition, Link, find_link};
use crate::process::wait_until;
use crate::state::LabDir;
use crate::up::Lab;

/// How long to wait while another process changes the same lab's WAN.
const LOCK_DEADLINE: Duration = Duration::from_secs(30);
const QUEUE_FRAMES: &str = "10000";

/// What delays and drops the frames between the sites.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Emulator {
    /// The kernel's network emulator.
    Netem,
    /// A process of the lab, `perigee lab relay`.
    Relay,
}

/// The content of `wan.json`: the current settings.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Wan {
    pub emulator: Emulator,
    pub links: Vec<Link>,
}

/// A link's settings and measurement.
#[derive(Debug, Clone, Serialize)]
pub struct LinkReport {
    #[serde(flatten)]
    pub link: Link,
    pub measured: Measured,
    /// The differences between the two, in sentences.
    pub differences: Vec<String>,
    /// The frames from the first site to the second, and back. Only the relay counts them.
    pub counts: Option<[Counts; 2]>,
}

/// Makes the links' network cards in the sites, and writes the settings to `wan.json`. The sites' bridges
/// must exist. If the relay is needed, it is started afterwards.
///
/// # Errors
/// The first step that failed.
pub async fn create(definition: &Definition, dir: &LabDir) -> Result<Emulator, Problem> {
    let emulator = match definition.sites.first() {
        Some(site) if netem::works(&definition.site_namespace(&site.name)).await => Emulator::Netem,
        _ => Emulator::Relay,
    };
    for link in &definition.links {
        let [a, b] = &link.sites;
        let ends = [(a, b), (b, a)]
            .map(|(site, other)| (definition.site_namespace(site), definition.wan_device(other)));
        let [(a, a_device), (b, b_device)] = &ends;
        if emulator == Emulator::Netem {
            let cable = ["type", "veth", "peer", "name", b_device, "netns", b];
            run("ip", &[&["link", "add", a_device, "netns", a][..], &cable].concat()).await?;
        } else {
            for (namespace, device) in &ends {
                run("ip", &["-n", namespace, "tuntap", "add", device, "mode", "tap"]).await?;
            }
        }
        for (namespace, device) in &ends {
            let ip = ["-n", namespace, "link", "set", device];
            // With the default queue of 1000 frames, four TCP streams lose frames.
            let plug = ["txqueuelen", QUEUE_FRAMES, "master", "br0", "up"];
            run("ip", &[&ip[..], &plug].concat()).await?;
            // A site does not forward frames between two other sites: each pair has its own link.
            run("ip", &[&ip[..], &["type", "bridge_slave", "isolated", "on"]].concat()).await?;
        }
        if emulator == Emulator::Netem {
            netem::apply(definition, &definition.links, link).await?;
        }
    }
    dir.set_wan(&Wan { emulator, links: definition.links.clone() })?;
    Ok(emulator)
}

/// Prepares a host that is connected while the lab runs, whatever the links' settings are then.
///
/// # Errors
/// `NotFound` when the lab has no network yet, and when `ip` fails.
pub async fn prepare_host(dir: &LabDir, namespace: &str) -> Result<(), Problem> {
    match dir.wan()?.emulator {
        Emulator::Netem => netem::set_segments(namespace, netem::SEGMENTS_MIN).await,
        Emulator::Relay => Ok(()),
    }
}

/// Changes a link while the lab runs.
///
/// # Errors
/// `NotFound` when the link does not exist or the lab has no network yet.
pub async fn set(lab: &Lab, one: &SiteId, other: &SiteId, change: Change) -> Result<Link, Problem> {
    let dir = lab.lab_dir();
    let _lock = lock(dir).await?;
    let mut wan = dir.wan()?;
    let index = find_link(&wan.links, one, other)?;
    wan.links[index].settings = change.of(wan.links[index].settings);
    let link = wan.links[index].clone();
    dir.set_wan(&wan)?;
    match wan.emulator {
        Emulator::Netem => netem::apply(&lab.definition, &wan.links, &link).await?,
        Emulator::Relay => drop(relay::ask(dir)?),
    }
    Ok(link)
}

/// Changes every link between the sites in the same way.
///
/// # Errors
/// The lab has no network yet.
pub async fn set_all(lab: &Lab, change: Change) -> Result<(), Problem> {
    for link in &lab.definition.links {
        set(lab, &link.sites[0], &link.sites[1], change).await?;
    }
    Ok(())
}

async fn lock(dir: &LabDir) -> Result<File, Problem> {
    let path = dir.path().join("net/wan.lock");
    let what = || format!("can't lock {}", path.display());
    let file = File::create(&path).map_err(|e| Problem::internal(what(), e))?;
    if wait_until(LOCK_DEADLINE, || file.try_lock().is_ok()).await {
        return Ok(file);
    }
    let why = format!("another process changes the WAN and has not ended within {LOCK_DEADLINE:?}");
    Err(Problem::unavailable(what(), why))
}

/// Measures links one after the other. This takes about 3 s per link and loads it.
///
/// # Errors
/// The lab has no network.
pub fn report(lab: &Lab, links: &[Link]) -> Result<Vec<LinkReport>, Problem> {
    let mut reports = Vec::new();
    for link in links {
        let measured = measure(&lab.definition, link)?;
        reports.push(LinkReport {
            differences: measure::differences(&link.settings, &measured),
            link: link.clone(),
            measured,
            counts: None,
        });
    }
    for state in counts(lab)? {
        let report = reports.iter_mut().find(|r| r.link.sites == state.link.sites);
        if let Some(report) = report {
            report.counts = Some(state.counts);
        }
    }
    Ok(reports)
}

/// The relay's counts so far. netem has none.
///
/// # Errors
/// `Unavailable` when the relay is not running at this moment.
pub fn counts(lab: &Lab) -> Result<Vec<LinkState>, Problem> {
    let wan = lab.lab_dir().wan()?;
    if wan.emulator == Emulator::Netem || wan.links.is_empty() {
        return Ok(Vec::new());
    }
    Ok(relay::ask(lab.lab_dir())?.links)
}

/// Returns one line for each link, with its settings and its measurement. A rate is measured only if one
/// is set.
///
/// # Errors
/// The lab has no network.
pub fn verify(definition: &Definition, links: &[Link]) -> Result<Vec<String>, Problem> {
    let round_trips: Vec<Result<Option<u64>, Problem>> = std::thread::scope(|scope| {
        let all: Vec<_> = links
            .iter()
            .map(|link| scope.spawn(|| measure::round_trip(definition, link)))
            .collect();
        all.into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    let mut lines = Vec::new();
    for (link, rtt_us) in links.iter().zip(round_trips) {
        let measured = match (link.settings.rate.0, rtt_us?) {
            (Some(_), Some(_)) if links.len() <= VERIFIED_RATES_MAX => measure(definition, link)?,
            (_, rtt_us) => Measured { rtt_us, ..Measured::default() },
        };
        lines.push(line(link, &measured));
    }
    Ok(lines)
}

/// Rates are not measured if a lab has more links than this, because it would take too long.
const VERIFIED_RATES_MAX: usize = 6;

fn line(link: &Link, measured: &Measured) -> String {
    let mut words = vec![format!("{link}: set {}", link.settings)];
    match measured.rtt_us {
        Some(rtt_us) => words
            .push(format!("measured {:.2} ms", Duration::from_micros(rtt_us).as_secs_f64() * 1e3)),
        None => words.push("no answer".to_owned()),
    }
    if let [Some(there), Some(back)] = measured.rate_bits_per_s {
        words.push(format!("{} and {} back", format_bits(there), format_bits(back)));
    }
    words.extend(measure::differences(&link.settings, measured));
    words.join("; ")
}
