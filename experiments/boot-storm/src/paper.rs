//! For each figure: the result in SonD's paper, and whether these storms agree. The figures decide that, so a
//! report never contradicts its own figures.
//!
//! Zhu Xu Dong, "The Performance Analysis of a Service Deployment System Based on the Centralized Storage",
//! 2011. It has 64 clients, servers of 1 to 4 GiB, and 12 disks. A boot there reads far more than here, so only
//! the order of its memory sizes can be compared with ours.

use perigee_lab::paper::{Figure, judge_nothing};

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

/// The cases of one layout, from the least memory to the most.
fn by_memory(results: &Results, layout: Layout) -> Vec<&Case> {
    let mut cases: Vec<_> = results.memory.iter().filter(|case| case.layout == layout).collect();
    cases.sort_by_key(|case| case.memory_max_mib);
    cases
}

pub fn figures(results: &Results) -> Vec<Figure> {
    let mut figures: Vec<Figure> = Vec::new();
    for layout in [Layout::Together, Layout::Apart] {
        figures.extend([memory(results, layout), reloads(results, layout)].into_iter().flatten());
    }
    figures.extend(layouts(results));
    figures.extend(allocation(results).into_iter().flatten());
    if results.is_quick {
        judge_nothing(&mut figures);
    }
    figures
}

/// With how much memory all are up when, of one layout.
fn memory(results: &Results, layout: Layout) -> Option<Figure> {
    let cases = by_memory(results, layout);
    let [first, .., before_last, last] = cases[..] else { return None };
    let mib = |case: &Case| case.memory_max_mib.unwrap_or_default();
    let more_helps_first = is_less(first.last_up_s, before_last.last_up_s);
    let more_helps_last = is_less(before_last.last_up_s, last.last_up_s);
    let text = format!(
        "From {} to {} MiB the time is {}, from there to {} MiB {}.",
        mib(first),
        mib(before_last),
        change(first.last_up_s, before_last.last_up_s),
        mib(last),
        change(before_last.last_up_s, last.last_up_s),
    );
    let why = if more_helps_first {
        "More memory than what one client boots still helps: the clients are not at the same block at the same time."
    } else {
        "The reads saved by memory are few: the clients read the same blocks at nearly the same time, and a block that was read for \
         one is still there for the others."
    };
    Some(Figure::new(
        &format!("002 Fig. 2, until all are up, {}", layout.words()),
        "All 64 are up after about 210 s with 1 GiB and 140 s with 2 GiB, and 3 or 4 GiB bring nothing more, once memory holds what \
         one client boots.",
        Some((text, more_helps_first && !more_helps_last)),
        why,
    ))
}

fn reloads(results: &Results, layout: Layout) -> Option<Figure> {
    let cases = by_memory(results, layout);
    let [first, .., last] = cases[..] else { return None };
    let of = |case: &Case, side: fn(&crate::outcome::Cache) -> Served| {
        case.cache.as_ref().map_or(0, |cache| side(cache).reloads)
    };
    let sources = [first, last].map(|case| of(case, |cache| cache.source));
    let privates = [first, last].map(|case| of(case, |cache| cache.private));
    let text = format!(
        "With {} MiB {} requests for source blocks and {} for private ones had to wait for what was in memory before, with {} MiB {} and {}.",
        first.memory_max_mib.unwrap_or_default(),
        sources[0],
        privates[0],
        last.memory_max_mib.unwrap_or_default(),
        sources[1],
        privates[1],
    );
    let why = if sources[0] + privates[0] == 0 {
        "Nothing had to be read again: the clients read a block within moments of each other, and what has left memory by then \
         nobody comes back to."
            .to_owned()
    } else {
        format!(
            "Here it is the source that is read again and not the private data: a client writes only {:.1} MiB until it is up, and \
             reads next to nothing of that.",
            results.boot.written_mib
        )
    };
    Some(Figure::new(
        &format!("002 Fig. 2, reloads, {}", layout.words()),
        "The snapshots' reloads fall from 114 with 1 GiB to 32 with 2 GiB, and hardly further.",
        Some((text, sources[1] + privates[1] < sources[0] + privates[0])),
        &why,
    ))
}

fn layouts(results: &Results) -> Option<Figure> {
    let together = by_memory(results, Layout::Together);
    let apart = by_memory(results, Layout::Apart);
    let (together, apart) = (*together.first()?, *apart.first()?);
    let text = format!(
        "With {} MiB the last client is up after {:.1} s on one device and {:.1} s on two ({}), the mean response time is {}.",
        together.memory_max_mib.unwrap_or_default(),
        together.last_up_s,
        apart.last_up_s,
        change(together.last_up_s, apart.last_up_s),
        change(together.mean_response_ms, apart.mean_response_ms),
    );
    let private = together.cache.as_ref().map_or(0, |cache| {
        let Served { first_loads, reloads, .. } = cache.private;
        first_loads + reloads
    });
    Some(Figure::new(
        "002 Fig. 3, source and snapshots apart",
        "With 1 GiB, source and snapshots on devices of their own bring 258 s down to 210 s (19 % less), and the response times with \
         them; in the first 30 s both are alike, since only the source is read.",
        Some((text, is_less(together.last_up_s, apart.last_up_s))),
        &format!(
            "A second device helps where both have reads to do: of the private data {private} reads came from the disk, so all is as \
             in their first 30 s. And our devices are limited in reads a second, wherever these are: there is no head to move from \
             one side to the other."
        ),
    ))
}

/// By what part storms differ in their mean response times that differ in memory only.
fn chance(results: &Results) -> f64 {
    let times_ms: Vec<f64> =
        by_memory(results, Layout::Together).iter().map(|case| case.mean_response_ms).collect();
    let least_ms = times_ms.iter().copied().fold(f64::INFINITY, f64::min);
    let most_ms = times_ms.iter().copied().fold(0.0, f64::max);
    if most_ms > 0.0 { (1.0 - least_ms / most_ms).max(SAME) } else { SAME }
}

/// Fixed and on-demand allocation: where the blocks lie, and the time.
fn allocation(results: &Results) -> Option<[Figure; 2]> {
    let found = |allocation| results.allocation.iter().find(|c| c.allocation == allocation);
    let (fixed, on_demand) = (found(Allocation::Fixed)?, found(Allocation::OnDemand)?);
    let (at_fixed, at_demand) = (fixed.placement?, on_demand.placement?);
    let layout = format!(
        "The private blocks that were written lie within {:.0} MiB when all is allocated before and within {:.0} MiB when allocated on \
         demand, and a head that did every read and write in the order asked would move {:.0} MiB and {:.0} MiB on average. Perigee \
         always allocates as it is written.",
        at_fixed.private_span_mib,
        at_demand.private_span_mib,
        at_fixed.mean_seek_mib,
        at_demand.mean_seek_mib,
    );
    let time = format!(
        "The clients' mean response time is {:.2} ms with all allocated before and {:.2} ms on demand. Storms that differ in memory only differ by up to {:.0} %.",
        fixed.mean_response_ms,
        on_demand.mean_response_ms,
        chance(results) * 100.0,
    );
    let closer = is_less(at_fixed.private_span_mib, at_demand.private_span_mib);
    let faster = on_demand.mean_response_ms < fixed.mean_response_ms * (1.0 - chance(results));
    Some([
        Figure::new(
            "002 Fig. 4, where the blocks lie",
            "Allocated as it is written, what is used lies close together.",
            Some((layout, closer)),
            "The filesystem puts what is written at one time at different places.",
        ),
        Figure::new(
            "002 Fig. 4, response time",
            "With the whole space of each disk allocated before, the mean disk response time is above 20 ms (figure 3); allocated as it \
             is written, it is below 20 ms in each test.",
            Some((time, faster)),
            "There is no head here that has to move, and so the distance of the blocks costs nothing.",
        ),
    ])
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
    use perigee_lab::paper::Verdict;

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
        let verdict = |of: Option<Figure>| of.map(|figure| figure.verdict);
        assert_eq!(verdict(memory(&results, Layout::Together)), Some(Verdict::Agrees));
        assert_eq!(verdict(reloads(&results, Layout::Together)), Some(Verdict::Agrees));
        assert_eq!(layouts(&results), None);

        results.memory.push(case(Layout::Apart, 10, 20.9, 0));
        assert_eq!(verdict(layouts(&results)), Some(Verdict::DoesNotAgree));
        results.memory.pop();
        results.memory.push(case(Layout::Apart, 10, 17.0, 0));
        assert_eq!(verdict(layouts(&results)), Some(Verdict::Agrees));

        results.memory[2].last_up_s = 9.0;
        assert_eq!(verdict(memory(&results, Layout::Together)), Some(Verdict::DoesNotAgree));
    }

    #[test]
    fn a_small_difference_is_none() {
        assert_eq!(change(100.0, 96.0), "the same within 5 %");
        assert_eq!(change(100.0, 90.0), "10 % less");
        assert_eq!(change(100.0, 150.0), "50 % more");
    }
}
