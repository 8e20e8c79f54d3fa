//! The sites and the links between them: a map of the sites, and all that was measured.

use std::collections::BTreeMap;
use std::f64::consts::TAU;

use perigee_model::job::{Link, Site};
use perigee_model::units::{format_bytes, format_rate};
use perigee_model::{HostId, SiteId};

use crate::parts::{Cell, Line, Map, Page, Section, Spot};
use crate::words::{DASH, ago, count, rate, thing, word};

/// More sites than these have no room on the map.
const SPOTS: usize = 12;
/// More links than these have no room for words beside them.
const WORDS: usize = 10;
/// Links with less than the first rate are thin, and those with the second one or more are thick.
const RATES: [u64; 2] = [10 << 20, 100 << 20];
/// So many links are listed, the slowest ones.
const LINKS: usize = 400;

/// The page. `links` is `None` for those who are not told.
pub fn page(sites: &[Site], links: Option<&[Link]>, now_ms: u64) -> Page {
    let rows = sites.iter().map(|site| {
        let hosts = site.hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        vec![
            Cell::text(&site.id),
            Cell::number(site.hosts.len()),
            Cell::text(hosts),
            Cell::text(word(&site.place)),
        ]
    });
    let of_sites = Section::new("sites", "Sites", "perigee site list").table(
        &["site", "#hosts", "their names", "place"],
        rows.collect(),
        "There is no site.",
    );
    let mut sections = vec![of_sites];
    if let Some(links) = links {
        let between = between(sites, links);
        if sites.len() > 1 {
            sections.insert(0, map(sites, &between));
            sections.insert(1, pairs(sites, &between));
        }
        sections.push(list(links, now_ms));
    }
    Page::new("Sites and links", "perigee link list", sections)
}

/// The best of what was measured from one site to another: round trip, and rate of one connection.
type Between = BTreeMap<(SiteId, SiteId), (f64, u64)>;

fn between(sites: &[Site], links: &[Link]) -> Between {
    let site_of: BTreeMap<&HostId, &SiteId> =
        sites.iter().flat_map(|site| site.hosts.iter().map(move |host| (host, &site.id))).collect();
    let mut all = Between::new();
    for link in links {
        let (Some(from), Some(to)) = (site_of.get(&link.from), site_of.get(&link.to)) else {
            continue;
        };
        if from == to {
            continue;
        }
        let (rtt_ms, rate) = (link.probe.rtt_ms, link.probe.rate_bytes_per_s);
        let known = all.entry(((*from).clone(), (*to).clone())).or_insert((rtt_ms, rate));
        *known = (known.0.min(rtt_ms), known.1.max(rate));
    }
    all
}

/// The same in either direction, the sites in the order of their names.
fn in_either_direction(between: &Between) -> Between {
    let mut all = Between::new();
    for ((from, to), (rtt_ms, rate)) in between {
        let pair = if from < to { (from, to) } else { (to, from) };
        let known = all.entry((pair.0.clone(), pair.1.clone())).or_insert((*rtt_ms, *rate));
        *known = (known.0.min(*rtt_ms), known.1.max(*rate));
    }
    all
}

/// What the map shows, for reading, and which pairs of sites were not measured.
fn pairs(sites: &[Site], between: &Between) -> Section {
    let ids = || sites.iter().map(|site| &site.id);
    let all = ids().flat_map(|from| ids().filter(move |to| *to != from).map(move |to| (from, to)));
    let rows = all.take(LINKS).map(|(from, to)| {
        let known = between.get(&(from.clone(), to.clone()));
        let rtt = known.map_or_else(|| DASH.to_owned(), |(rtt_ms, _)| format!("{rtt_ms:.1} ms"));
        let (from, to) = (Cell::text(from), Cell::text(to));
        let rate = known.map_or_else(|| Cell::number(DASH), |(_, bytes)| rate(*bytes));
        vec![from, to, Cell::number(rtt), rate]
    });
    let section = Section::new("between", "Between sites", "perigee link list");
    section.table(&["from", "to", "#round trip", "#rate"], rows.collect(), "")
}

fn map(sites: &[Site], between: &Between) -> Section {
    let shown: Vec<&Site> = sites.iter().take(SPOTS).collect();
    let mut map = Map::default();
    for (number, site) in shown.iter().enumerate() {
        let (x, y) = place(number, shown.len());
        map.spots.push(Spot {
            x,
            y,
            name: site.id.to_string(),
            note: count(site.hosts.len(), "host"),
        });
    }
    let spot = |id: &SiteId| {
        let number = shown.iter().position(|site| site.id == *id)?;
        Some(place(number, shown.len()))
    };
    let (between, mut said) = (in_either_direction(between), Vec::new());
    for ((from, to), (rtt_ms, rate)) in &between {
        let label = format!("{rtt_ms:.1} ms, {}", format_rate(*rate));
        let words = format!("{from} and {to}: {label}");
        said.push(words.clone());
        if let (Some(a), Some(b)) = (spot(from), spot(to)) {
            // Not in the middle, where lines cross.
            let middle = ((3 * a.0 + 2 * b.0) / 5, (3 * a.1 + 2 * b.1) / 5 - 3);
            let width = 1 + RATES.iter().filter(|least| rate >= least).count();
            let label = if between.len() > WORDS { String::new() } else { label };
            map.lines.push(Line { from: a, to: b, middle, label, words, width });
        }
    }
    map.words = if said.is_empty() {
        "A map of the sites. No link between them was measured yet.".to_owned()
    } else {
        format!("A map of the sites. {}", said.join("; "))
    };
    let mut section = Section { map: Some(map), ..Section::new("map", "Map", "") };
    section.texts.push(format!(
        "A line is thin below {} and thick from {} on.",
        format_rate(RATES[0]),
        format_rate(RATES[1])
    ));
    if sites.len() > SPOTS {
        section.texts.push(format!("{SPOTS} of {} sites are shown.", sites.len()));
    }
    section
}

/// Where a site is: two side by side, more in a circle.
#[expect(clippy::cast_possible_truncation, reason = "within the map")]
fn place(number: usize, all: usize) -> (i32, i32) {
    let angle = TAU * number as f64 / all.max(1) as f64 + TAU / 2.0;
    ((300.0 + 220.0 * angle.cos()) as i32, (160.0 + 110.0 * angle.sin()) as i32)
}

fn list(links: &[Link], now_ms: u64) -> Section {
    let mut slowest: Vec<&Link> = links.iter().collect();
    slowest.sort_by(|a, b| b.probe.rtt_ms.total_cmp(&a.probe.rtt_ms));
    let rows = slowest.iter().take(LINKS).map(|link| {
        let blocks = link.blocks.map(|blocks| {
            (format!("{} µs", blocks.latency_median_us), format_bytes(blocks.rate_bytes_per_s))
        });
        let (latency, blocks) = blocks.unwrap_or_else(|| (DASH.to_owned(), DASH.to_owned()));
        let blocks = if blocks == DASH { blocks } else { format!("{blocks}/s") };
        vec![
            thing("hosts", &link.from),
            thing("hosts", &link.to),
            Cell::number(format!("{:.2} ms", link.probe.rtt_ms)),
            rate(link.probe.rate_bytes_per_s),
            Cell::number(latency),
            Cell::number(blocks),
            Cell::text(ago(link.measured_ms, now_ms)),
        ]
    });
    let heads = ["from", "to", "#round trip", "#rate", "#block latency", "#block rate", "measured"];
    let empty = "No link was measured yet: perigee link list --probe";
    let mut section =
        Section::new("links", "Links", "perigee link list").table(&heads, rows.collect(), empty);
    if links.len() > LINKS {
        section.texts.push(format!(
            "The {LINKS} of {} with the longest round trips are shown.",
            links.len()
        ));
    }
    section
}
