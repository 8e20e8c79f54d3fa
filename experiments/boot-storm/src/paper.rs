//! For each figure: the result in SonD's paper, and whether these storms agree. The figures decide that, so a
//! report never contradicts its own figures.
//!
//! Zhu Xu Dong, "The Performance Analysis of a Service Deployment System Based on the Centralized Storage",
//! 2011. It has 64 clients, servers of 1 to 4 GiB, and 12 disks. A boot there reads far more than here, so only
//! the order of its memory sizes can be compared with ours.

use crate::outcome::{Allocation, Case, Layout, Results, Served};

/// A smaller difference may be chance.
const SAME: f64 = 0.05;

/// `12 % less`, `3 % more` or `the same`.
fn change(from: f64, to: f64) -> String {
    let part = if from > 0.0 { to / from - 1.0 } else { 0.0 };
    let percent = (part * 100.0).abs();
    match part {
        part if part.abs() < SAME => format!("the same within {:.0} %", SAME * 100.0),
        part if part < 0.0 => format!("{percent:.0} % less"),
        _ => format!("{percent:.0} % more"),
    }
}

fn is_less(from: f64, to: f64) -> bool {
    to < from * (1.0 - SAME)
}

fn agrees(yes: bool) -> &'static str {
    if yes { "Ours agrees" } else { "Ours does not agree" }
}

/// The cases of one layout, from the least memory to the most.
fn by_memory(results: &Results, layout: Layout) -> Vec<&Case> {
    let mut cases: Vec<_> = results.memory.iter().filter(|case| case.layout == layout).collect();
    cases.sort_by_key(|case| case.memory_max_mib);
    cases
}

/// The comparison for the response times over time, of one layout.
pub fn response(results: &Results, layout: Layout) -> Option<String> {
    let cases = by_memory(results, layout);
    let [first, .., before_last, last] = cases[..] else { return None };
    let mib = |case: &Case| case.memory_max_mib.unwrap_or_default();
    let more_helps_first = is_less(first.last_up_s, before_last.last_up_s);
    let more_helps_last = is_less(before_last.last_up_s, last.last_up_s);
    let mut text = format!(
        "SonD, figures 2 and 3: all 64 are up after about 210 s with 1 GiB and 140 s with 2 GiB, and 3 or 4 GiB bring \
         nothing more, once memory holds what one client boots. {}: from {} to {} MiB the time is {}, from there to {} MiB {}.",
        agrees(more_helps_first && !more_helps_last),
        mib(first),
        mib(before_last),
        change(first.last_up_s, before_last.last_up_s),
        mib(last),
        change(before_last.last_up_s, last.last_up_s),
    );
    if !more_helps_first {
        text.push_str(
            " The reads saved by memory are few: the clients read the same blocks at nearly the same time, and a block \
             that was read for one is still there for the others.",
        );
    }
    Some(text)
}

/// The comparison for the reloads.
pub fn reloads(results: &Results, layout: Layout) -> Option<String> {
    let cases = by_memory(results, layout);
    let [first, .., last] = cases[..] else { return None };
    let of = |case: &Case, side: fn(&crate::outcome::Cache) -> Served| {
        case.cache.as_ref().map_or(0, |cache| side(cache).reloads)
    };
    let sources = [first, last].map(|case| of(case, |cache| cache.source));
    let privates = [first, last].map(|case| of(case, |cache| cache.private));
    let mut text = format!(
        "SonD, figure 2: the snapshots' reloads fall from 114 with 1 GiB to 32 with 2 GiB, and hardly further. {}: with {} \
         MiB {} requests for source blocks and {} for private ones had to wait for what was in memory before, with {} \
         MiB {} and {}.",
        agrees(sources[1] + privates[1] < sources[0] + privates[0]),
        first.memory_max_mib.unwrap_or_default(),
        sources[0],
        privates[0],
        last.memory_max_mib.unwrap_or_default(),
        sources[1],
        privates[1],
    );
    if sources[0] + privates[0] == 0 {
        text.push_str(
            " Nothing had to be read again: the clients read a block within moments of each other, and what has left \
             memory by then nobody comes back to.",
        );
    } else if privates[0] < sources[0] {
        text.push_str(&format!(
            " Here it is the source that is read again and not the private data: a client writes only {:.1} MiB until it \
             is up, and reads next to nothing of that.",
            results.boot.written_mib
        ));
    }
    Some(text)
}

/// The comparison for the layouts.
pub fn layouts(results: &Results) -> Option<String> {
    let together = by_memory(results, Layout::Together);
    let apart = by_memory(results, Layout::Apart);
    let (together, apart) = (*together.first()?, *apart.first()?);
    let is_so = is_less(together.last_up_s, apart.last_up_s);
    let mut text = format!(
        "SonD, section 3.2 and figure 3: with 1 GiB, source and snapshots on devices of their own bring 258 s down to \
         210 s (19 % less), and the response times with them; in the first 30 s both are alike, since only the source is \
         read. {}: with {} MiB the last client is up after {:.1} s on one device and {:.1} s on two ({}), the mean \
         response time is {}.",
        agrees(is_so),
        together.memory_max_mib.unwrap_or_default(),
        together.last_up_s,
        apart.last_up_s,
        change(together.last_up_s, apart.last_up_s),
        change(together.mean_response_ms, apart.mean_response_ms),
    );
    if !is_so {
        let private = together.cache.as_ref().map_or(0, |cache| {
            let Served { first_loads, reloads, .. } = cache.private;
            first_loads + reloads
        });
        text.push_str(&format!(
            " A second device helps where both have reads to do: of the private data {private} reads came from the disk, so \
             all is as in SonD's first 30 s. And our devices are limited in reads a second, wherever these are: there is no \
             head to move from one side to the other."
        ));
    }
    Some(text)
}

/// The comparison for fixed and on-demand allocation.
pub fn allocation(results: &Results) -> Option<String> {
    let found = |allocation| results.allocation.iter().find(|c| c.allocation == allocation);
    let (fixed, on_demand) = (found(Allocation::Fixed)?, found(Allocation::OnDemand)?);
    let (at_fixed, at_demand) = (fixed.placement?, on_demand.placement?);
    let closer = is_less(at_fixed.private_span_mib, at_demand.private_span_mib);
    Some(format!(
        "SonD, figures 3 and 4: with the whole space of each disk allocated before, the mean disk response time is above \
         20 ms; allocated as it is written, below 20 ms in each test, since what is used then lies close together. {} in \
         the layout: the private blocks that were written lie within {:.0} MiB when all is allocated before and within \
         {:.0} MiB when allocated on demand, and a head that did every read and write in the order asked would move {:.0} \
         MiB and {:.0} MiB on average. In time there is no head here: the mean response time is {:.2} ms and {:.2} ms ({}), \
         and what differs there is not the distance. Perigee always allocates as it is written.",
        agrees(closer),
        at_fixed.private_span_mib,
        at_demand.private_span_mib,
        at_fixed.mean_seek_mib,
        at_demand.mean_seek_mib,
        fixed.mean_response_ms,
        on_demand.mean_response_ms,
        change(fixed.mean_response_ms, on_demand.mean_response_ms),
    ))
}

/// The text above the figures of servers.
pub const PEERS: &str =
    "SonD's paper has no other server beside its own: there is nothing of it to agree with here.";

/// The text beside a figure of servers: Perigee and the peer with the same protocol, each as name and value.
pub fn peers(pairs: &[[(&str, f64); 2]]) -> String {
    let sentence = |[(ours, own), (peer, other)]: &[(&str, f64); 2]| {
        format!(" {ours} beside {peer}: {}.", change(*other, *own))
    };
    pairs.iter().map(sentence).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::Cache;
    use crate::servers::Server;

    fn case(layout: Layout, memory_max_mib: u64, last_up_s: f64, source_reloads: u64) -> Case {
        let served = Served { reloads: source_reloads, ..Served::default() };
        Case {
            server: Server::PerigeeNbd,
            round: 0,
            pace: 1.0,
            layout,
            allocation: Allocation::OnDemand,
            memory_max_mib: Some(memory_max_mib),
            reads_per_s_max: Some(2000),
            last_up_s,
            median_up_s: last_up_s,
            mean_response_ms: last_up_s,
            p99_response_ms: last_up_s,
            server_cpu_s: 1.0,
            memory_peak_mib: 1.0,
            source_device_read_mib: 1.0,
            private_device_read_mib: None,
            response_ms: vec![],
            cache: Some(Cache { source: served, ..Cache::default() }),
            placement: None,
        }
    }

    #[test]
    fn what_is_said_follows_from_the_numbers() {
        let together = [(10, 21.0, 114), (20, 14.0, 32), (40, 14.1, 30)]
            .map(|(mib, s, reloads)| case(Layout::Together, mib, s, reloads));
        let mut results = Results { memory: together.into(), ..Results::default() };
        assert!(response(&results, Layout::Together).unwrap().contains("Ours agrees"));
        assert!(reloads(&results, Layout::Together).unwrap().contains("Ours agrees"));
        assert_eq!(layouts(&results), None);

        results.memory.push(case(Layout::Apart, 10, 20.9, 0));
        assert!(layouts(&results).unwrap().contains("Ours does not agree"));
        results.memory.pop();
        results.memory.push(case(Layout::Apart, 10, 17.0, 0));
        assert!(layouts(&results).unwrap().contains("Ours agrees"));

        results.memory[2].last_up_s = 9.0;
        assert!(response(&results, Layout::Together).unwrap().contains("Ours does not agree"));
    }

    #[test]
    fn a_small_difference_is_none() {
        assert_eq!(change(100.0, 96.0), "the same within 5 %");
        assert_eq!(change(100.0, 90.0), "10 % less");
        assert_eq!(change(100.0, 150.0), "50 % more");
    }
}
