//! `report.html`: the storms on one page. A pure function of [`Results`].

use std::fmt::Write;

use perigee_lab::measuring::median;
use perigee_lab::report::page::{self, figure, row};
use perigee_lab::report::plots::{Bar, Trace, bars, traces};
use perigee_lab::report::svg::escape;

use crate::outcome::{Allocation, Case, Layout, Results};
use crate::paper;
use crate::servers::Server;

// Writing to a String cannot fail, so the results of `write!` below are ignored.

const PAPER: &str = "002 is Zhu Xu Dong: \"The performance analysis of a service deployment system based on the centralized storage\" (SonD). \
     Its boots read far more than these, so only the order of the memory sizes can be compared.";

pub fn html(results: &Results) -> String {
    let mut page = page::start("Perigee: a boot storm", "");
    let boot = results.boot;
    let _ = writeln!(
        page,
        "<h1>A boot storm</h1>\n<p class=\"lead\">{} diskless clients boot together. Each replays one recorded boot: \
         {} requests in {:.1} s, {:.1} MiB read and {:.1} MiB written, each request as long after the answer \
         it waited for as in the recording.</p>",
        results.clients, boot.requests, boot.recorded_s, boot.read_mib, boot.written_mib
    );
    page::papers(&mut page, PAPER, &results.paper);
    peers(&mut page, results);
    memory(&mut page, results);
    allocation(&mut page, results);
    page::end(&mut page, &results.versions);
    page
}

type Value = fn(&Case) -> f64;

fn peers(page: &mut String, results: &Results) {
    let _ = writeln!(page, "<h2>Servers beside each other</h2>\n<p>{}</p>", escape(paper::PEERS));
    let figures: [(&str, &str, Value); 5] = [
        ("Until the last client is up", "seconds", |case| case.last_up_s),
        ("Mean response time", "milliseconds", |case| case.mean_response_ms),
        ("CPU time of the server", "seconds", |case| case.server_cpu_s),
        ("Read from the device", "MiB", |case| case.source_device_read_mib),
        ("Peak memory of the server with its page cache", "MiB", |case| case.memory_peak_mib),
    ];
    let mut paces: Vec<f64> = results.peers.iter().map(|case| case.pace).collect();
    paces.sort_by(f64::total_cmp);
    paces.dedup();
    for (pace, (title, unit, value)) in
        paces.into_iter().flat_map(|pace| figures.map(|figure| (pace, figure)))
    {
        let found = |server: Server| {
            let is_it = |case: &&Case| case.server == server && case.pace.total_cmp(&pace).is_eq();
            let cases = results.peers.iter().filter(is_it);
            median(cases.map(value))
        };
        let bar = |server: Server| {
            let value = found(server)?;
            let class = if server.is_perigee() { "ours" } else { "peer" };
            Some(Bar { name: server.name().into(), class, value, label: format!("{value:.2}") })
        };
        let bars_found: Vec<Bar> = Server::ALL.into_iter().filter_map(bar).collect();
        if !bars_found.is_empty() {
            let rivals =
                [(Server::PerigeeNbd, Server::QemuNbd), (Server::PerigeeIscsi, Server::Tgt)];
            let beside: Vec<_> = rivals
                .into_iter()
                .filter_map(|(own, peer)| {
                    Some([(own.name(), found(own)?), (peer.name(), found(peer)?)])
                })
                .collect();
            let caption = format!(
                "The clients' own times are {pace} of the recording's. Median of the rounds; source and private \
                 data on one device.{}",
                paper::peers(&beside)
            );
            figure(page, title, &caption, &bars(&bars_found, unit, title));
        }
    }
}

fn memory(page: &mut String, results: &Results) {
    page.push_str("<h2>Memory and devices</h2>\n");
    let Some(first) = results.memory.first() else { return };
    let _ = writeln!(
        page,
        "<p>The server's memory, with the page cache that it fills, is limited; each device answers at most {} reads a \
         second. A reload is a read that could not be answered from memory although all of its blocks had been there \
         before. Simulated is what <code>perigee volume trace simulate</code> says of the same requests and of the memory that \
         the server itself leaves. Each line is one storm: small differences are chance.</p>\n\
         <div class=\"scroll\"><table>\n<tr><th>devices</th><th>memory MiB</th><th>last up s</th><th>mean response ms</th>\
         <th>read from devices MiB</th><th>simulated MiB</th><th>source hits</th><th>loads</th><th>reloads</th><th>private hits</th><th>reloads</th></tr>",
        first.reads_per_s_max.unwrap_or_default()
    );
    for case in &results.memory {
        let cache = case.cache.clone().unwrap_or_default();
        let cells = [
            case.layout.words().to_owned(),
            case.memory_max_mib.unwrap_or_default().to_string(),
            format!("{:.1}", case.last_up_s),
            format!("{:.2}", case.mean_response_ms),
            format!(
                "{:.1}",
                case.source_device_read_mib + case.private_device_read_mib.unwrap_or(0.0)
            ),
            cache.simulated_read_mib.map_or_else(|| "–".to_owned(), |mib| format!("{mib:.1}")),
            cache.source.hits.to_string(),
            cache.source.first_loads.to_string(),
            cache.source.reloads.to_string(),
            cache.private.hits.to_string(),
            cache.private.reloads.to_string(),
        ];
        row(page, "", &cells);
    }
    page.push_str("</table></div>\n");
    for (layout, mib) in &results.too_small {
        let layout = layout.words();
        let _ = writeln!(page, "<p>{mib} MiB, {layout}: too little for the server itself.</p>");
    }
    for layout in [Layout::Together, Layout::Apart] {
        let cases = || results.memory.iter().filter(move |case| case.layout == layout);
        if cases().next().is_none() {
            continue;
        }
        let name = |case: &Case| format!("{} MiB", case.memory_max_mib.unwrap_or_default());
        let lines = |points: fn(&Case) -> Vec<(f64, f64)>| -> Vec<Trace> {
            cases().map(|case| Trace { name: name(case), points: points(case) }).collect()
        };
        let caption = format!("Source and private data {}.", layout.words());
        let times = lines(|case| case.response_ms.clone());
        let title = "Mean response time over the storm";
        figure(page, title, &caption, &traces(&times, ("seconds", "milliseconds"), title));
        let title = "Reloads of source blocks";
        let reloads = lines(|case| {
            case.cache.as_ref().map(|cache| cache.source_reloads.clone()).unwrap_or_default()
        });
        figure(page, title, &caption, &traces(&reloads, ("seconds", "requests so far"), title));
    }
}

fn allocation(page: &mut String, results: &Results) {
    if results.allocation.is_empty() {
        return;
    }
    page.push_str("<h2>Fixed and on-demand allocation</h2>\n");
    let _ = writeln!(
        page,
        "<p>Fixed: after a first write, each client's private file gets its whole size on the disk before the storm. On \
         demand: as Perigee does, a block gets its place when it is written. Source and private data are on one device. \
         Where the blocks lie is what the filesystem says (filefrag); the kernel writes later, and in an order of its \
         own.</p>\n\
         <div class=\"scroll\"><table>\n<tr><th>allocation</th><th>last up s</th><th>mean response ms</th>\
         <th>runs of private blocks</th><th>within MiB</th><th>reads from disk</th><th>mean seek, reads MiB</th>\
         <th>reads and writes MiB</th></tr>"
    );
    let name = |case: &Case| match case.allocation {
        Allocation::Fixed => "fixed",
        Allocation::OnDemand => "on demand",
    };
    for (case, placement) in results.allocation.iter().filter_map(|c| Some((c, c.placement?))) {
        let cells = [
            name(case).to_owned(),
            format!("{:.1}", case.last_up_s),
            format!("{:.2}", case.mean_response_ms),
            placement.private_runs.to_string(),
            format!("{:.0}", placement.private_span_mib),
            placement.disk_reads.to_string(),
            format!("{:.1}", placement.mean_read_seek_mib),
            format!("{:.1}", placement.mean_seek_mib),
        ];
        row(page, "", &cells);
    }
    page.push_str("</table></div>\n");
    let title = "Mean response time over the storm";
    let lines: Vec<Trace> = results
        .allocation
        .iter()
        .map(|case| Trace { name: name(case).to_owned(), points: case.response_ms.clone() })
        .collect();
    figure(page, title, "", &traces(&lines, ("seconds", "milliseconds"), title));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_without_results_is_a_page() {
        let page = html(&Results::default());
        assert!(page.ends_with(page::END) && !page.contains("NaN"));
    }
}
