//! What a VM has done over time, as curves: CPU time, requests and bytes of its disks.
//!
//! The samples are sums that only grow, at any times. A curve has the means of equal parts of the time, whose length is a round one, and which begin at
//! round times: so a curve stays the same until the next part is over, and an open page is told of no change before.

use perigee_model::job::Sample;
use perigee_model::units::{format_duration, format_rate, format_time};

use crate::parts::{Cell, Curve, Curves, Mark, Section, Stroke};
use crate::words::thing;

/// So many parts at most; of a long time a third as many at least.
const PARTS: u64 = 60;
/// The lengths that a part may have, in seconds; longer ones are whole numbers of days.
const LENGTHS_S: [u64; 14] = [1, 2, 5, 10, 20, 60, 120, 300, 600, 1200, 3600, 7200, 21_600, 43_200];
const DAY_S: u64 = 86_400;
/// A table has so many rows at most.
const ROWS: usize = 12;
/// The size of a curve, in its own units.
const WIDTH: u64 = 600;
const HEIGHT: f64 = 100.0;

/// What a curve shows of a sample, as a sum.
type Sum = fn(&Sample) -> u64;

/// What is drawn together.
struct Drawn {
    title: &'static str,
    lines: &'static [(&'static str, Sum)],
    said: fn(f64) -> String,
}

const CPU: Drawn = Drawn {
    title: "vCPUs that run",
    lines: &[("run", |sample| sample.vcpu_ms)],
    said: |per_s| format!("{:.2}", per_s / 1000.0),
};
const REQUESTS: Drawn = Drawn {
    title: "Requests of its disks per second",
    lines: &[("reads", |sample| sample.io.reads), ("writes", |sample| sample.io.writes)],
    said: |per_s| format!("{per_s:.0}"),
};
const BYTES: Drawn = Drawn {
    title: "Bytes of its disks",
    lines: &[("read", |sample| sample.io.read_bytes), ("written", |sample| sample.io.write_bytes)],
    said: |per_s| format_rate(whole(per_s)),
};

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
fn whole(value: f64) -> u64 {
    value as u64
}

/// The equal parts of the time of which something is known.
struct Parts {
    first_ms: u64,
    length_ms: u64,
    count: u64,
}

impl Parts {
    /// `None` if there are less than two.
    fn of(samples: &[Sample]) -> Option<Self> {
        let (first, last) = (samples.first()?.at_ms, samples.last()?.at_ms);
        let lengths = LENGTHS_S.into_iter().chain((1..).map(|days| days * DAY_S));
        let parts = |length_s: u64| {
            let length_ms = length_s * 1000;
            let first_ms = first.div_ceil(length_ms) * length_ms;
            let count = (last / length_ms * length_ms).saturating_sub(first_ms) / length_ms;
            Self { first_ms, length_ms, count }
        };
        // A clock that was set may have made the time as long as it can be.
        let fits = lengths.take(40_000).map(parts).find(|parts| parts.count <= PARTS)?;
        (fits.count >= 2).then_some(fits)
    }

    fn begins_ms(&self, part: u64) -> u64 {
        self.first_ms + part * self.length_ms
    }

    /// What a sum grew by in each second of each part.
    fn rates(&self, samples: &[Sample], sum: Sum) -> Vec<f64> {
        let at = |part: u64| at(samples, self.begins_ms(part), sum);
        let seconds = self.length_ms as f64 / 1e3;
        (0..self.count).map(|part| (at(part + 1) - at(part)).max(0.0) / seconds).collect()
    }

    /// When a part was, in words.
    fn when(&self, part: u64, parts: u64) -> String {
        let (from, to) = (self.begins_ms(part), self.begins_ms(part + parts));
        format!("{} to {}", clock(from), clock(to))
    }
}

/// A time of the day.
fn clock(at_ms: u64) -> String {
    format_time(at_ms).split(' ').nth(1).unwrap_or_default().to_owned()
}

/// A sum at a time between the first and the last sample, as if it had grown evenly between two of them.
fn at(samples: &[Sample], at_ms: u64, sum: Sum) -> f64 {
    let after = samples.partition_point(|sample| sample.at_ms < at_ms);
    let Some(next) = samples.get(after) else {
        return samples.last().map_or(0.0, |last| sum(last) as f64);
    };
    let before = after.checked_sub(1).and_then(|before| samples.get(before)).unwrap_or(next);
    let between_ms = next.at_ms.saturating_sub(before.at_ms);
    if between_ms == 0 {
        return sum(next) as f64;
    }
    let share = at_ms.saturating_sub(before.at_ms) as f64 / between_ms as f64;
    sum(before) as f64 + share * sum(next).saturating_sub(sum(before)) as f64
}

/// The curves of a job's VM, with a table for those who don't see them. `command` shows the same figures.
pub fn section(samples: &[Sample], command: String) -> Option<Section> {
    let first = samples.first()?;
    let section = Section::new("curves", "Over time", command);
    let Some(parts) = Parts::of(samples) else {
        let texts = vec!["Too little was measured yet.".to_owned()];
        return Some(Section { texts, ..section });
    };
    let length = format_duration(parts.length_ms / 1000);
    let text = format!("Means of {length} each, from {}.", format_time(first.at_ms));
    let drawn = [CPU, REQUESTS, BYTES];
    let rates: Vec<Vec<Vec<f64>>> = drawn
        .iter()
        .map(|one| one.lines.iter().map(|(_, sum)| parts.rates(samples, *sum)).collect())
        .collect();
    let moves = moves(samples, &parts);
    let curves = drawn.iter().zip(&rates).map(|(one, rates)| curve(one, rates, &parts, &moves));
    let curves = Curves {
        all: curves.collect(),
        from: clock(parts.begins_ms(0)),
        to: clock(parts.begins_ms(parts.count)),
    };
    let mut section = Section { curves: Some(curves), texts: vec![text], ..section };
    section = section.table(
        &["time", "#vCPUs that run", "#reads/s", "#writes/s", "#read", "#written", "host"],
        rows(samples, &drawn, &rates, &parts),
        "",
    );
    if let Some(table) = &mut section.table {
        table.caption = "What it did over time".to_owned();
    }
    Some(section)
}

fn curve(drawn: &Drawn, rates: &[Vec<f64>], parts: &Parts, moves: &[Mark]) -> Curve {
    let most = rates.iter().flatten().fold(0.0_f64, |most, rate| most.max(*rate));
    let scale = if most > 0.0 { HEIGHT / most } else { 0.0 };
    let strokes = drawn.lines.iter().zip(rates).map(|((name, _), rates)| {
        let point = |(part, rate): (u64, &f64)| {
            let middle = WIDTH * (2 * part + 1) / (2 * parts.count);
            format!("{middle},{:.1}", HEIGHT - rate * scale)
        };
        let points: Vec<String> = (0..).zip(rates).map(point).collect();
        Stroke { name, points: points.join(" ") }
    });
    let said = |part: u64| {
        let each = drawn.lines.iter().zip(rates).map(|((name, _), rates)| {
            let rate = rates.get(usize::try_from(part).unwrap_or(usize::MAX)).copied();
            format!("{} {name}", (drawn.said)(rate.unwrap_or_default()))
        });
        format!("{}: {}", parts.when(part, 1), each.collect::<Vec<_>>().join(", "))
    };
    let left = |part: u64| WIDTH * part / parts.count;
    let marks = (0..parts.count).map(|part| Mark {
        x: left(part),
        width: left(part + 1) - left(part),
        words: said(part),
    });
    let means = drawn.lines.iter().zip(rates).map(|((name, _), rates)| {
        let mean = rates.iter().sum::<f64>() / rates.len().max(1) as f64;
        let most = rates.iter().fold(0.0_f64, |most, rate| most.max(*rate));
        format!("{name}: {} in the mean, {} at most", (drawn.said)(mean), (drawn.said)(most))
    });
    Curve {
        title: drawn.title,
        words: means.collect::<Vec<_>>().join("; "),
        most: (drawn.said)(most),
        strokes: strokes.collect(),
        moves: moves.to_vec(),
        marks: marks.collect(),
    }
}

/// When the VM came to another host.
fn moves(samples: &[Sample], parts: &Parts) -> Vec<Mark> {
    let pairs = samples.windows(2).filter(|pair| pair[0].host != pair[1].host);
    let whole_ms = parts.length_ms * parts.count;
    let mark = |pair: &[Sample]| {
        let since_ms = pair[1].at_ms.saturating_sub(parts.first_ms).min(whole_ms);
        let words = format!("{}: it came to {}", clock(pair[1].at_ms), pair[1].host);
        Mark { x: WIDTH * since_ms / whole_ms, width: 0, words }
    };
    pairs.map(mark).collect()
}

fn rows(
    samples: &[Sample],
    drawn: &[Drawn],
    rates: &[Vec<Vec<f64>>],
    parts: &Parts,
) -> Vec<Vec<Cell>> {
    let count = usize::try_from(parts.count).unwrap_or(usize::MAX);
    let together = count.div_ceil(ROWS);
    let row = |first: usize| {
        let last = (first + together).min(count);
        let mut row = vec![Cell::text(parts.when(first as u64, (last - first) as u64))];
        for (one, rates) in drawn.iter().zip(rates) {
            let mean =
                |rates: &Vec<f64>| rates[first..last].iter().sum::<f64>() / (last - first) as f64;
            row.extend(rates.iter().map(|rates| Cell::number((one.said)(mean(rates)))));
        }
        let ends_ms = parts.begins_ms(last as u64);
        let at = samples.partition_point(|sample| sample.at_ms < ends_ms);
        let host = samples.get(at).or(samples.last()).map(|sample| thing("hosts", &sample.host));
        row.push(host.unwrap_or_default());
        row
    };
    // The newest first, as all lists of what has happened.
    let mut rows: Vec<Vec<Cell>> = (0..count).step_by(together).map(row).collect();
    rows.reverse();
    rows
}

#[cfg(test)]
mod tests {
    use perigee_model::HostId;
    use perigee_model::volume::IoStats;

    use super::*;

    const BEGIN_MS: u64 = 1_795_450_022_300;

    /// Each so many milliseconds: half a vCPU, 100 reads of 4 KiB a second, and no write.
    fn steady(count: u64, every_ms: u64) -> Vec<Sample> {
        let sample = |number: u64| {
            let since_ms = number * every_ms;
            let reads = since_ms / 10;
            let io = IoStats { reads, read_bytes: reads * 4096, ..IoStats::default() };
            let host = HostId::new(if number < count / 2 { "home1" } else { "home2" });
            let host = host.expect("a name");
            Sample { at_ms: BEGIN_MS + since_ms, host, progress: None, io, vcpu_ms: since_ms / 2 }
        };
        (0..count).map(sample).collect()
    }

    #[test]
    fn a_steady_job_has_level_curves_whatever_its_samples_are() {
        for (count, every_ms) in [(100, 500), (1000, 500), (700, 61_000), (40, 3_000_000)] {
            let samples = steady(count, every_ms);
            let parts = Parts::of(&samples).expect("parts");
            assert!((PARTS / 3..=PARTS).contains(&parts.count), "{} of {count}", parts.count);
            assert_eq!(parts.first_ms % parts.length_ms, 0);
            let near = |sum: Sum, rate: f64| {
                let rates = parts.rates(&samples, sum);
                assert!(rates.iter().all(|one| (one - rate).abs() < rate / 50.0), "{rates:?}");
            };
            near(|sample| sample.vcpu_ms, 500.0);
            near(|sample| sample.io.reads, 100.0);
            assert_eq!(
                parts.rates(&samples, |sample| sample.io.writes),
                vec![0.0; usize::try_from(parts.count).expect("few")]
            );
        }
    }

    #[test]
    fn a_curve_stays_the_same_until_the_next_part_is_over() {
        let all = steady(1000, 500);
        let text = |count: usize| format!("{:?}", section(&all[..count], String::new()));
        let length =
            usize::try_from(Parts::of(&all[..900]).expect("parts").length_ms / 500).expect("few");
        let changes = (900..900 + 2 * length).filter(|count| text(*count) != text(count + 1));
        assert_eq!(changes.count(), 2);
    }

    #[test]
    fn curves_have_words_and_a_table_for_those_who_do_not_see_them() {
        let shown = section(&steady(100, 500), "a command".to_owned()).expect("curves");
        let curves = shown.curves.expect("curves");
        let words: Vec<&str> = curves.all.iter().map(|curve| curve.words.as_str()).collect();
        assert_eq!(words[0], "run: 0.50 in the mean, 0.50 at most");
        assert_eq!(
            words[1],
            "reads: 100 in the mean, 100 at most; writes: 0 in the mean, 0 at most"
        );
        let moved: Vec<&str> = curves.all[0].moves.iter().map(|mark| mark.words.as_str()).collect();
        assert!(matches!(moved[..], [one] if one.ends_with("it came to home2")), "{moved:?}");
        let rows = shown.table.expect("a table").rows;
        assert!((6..=ROWS).contains(&rows.len()), "{}", rows.len());
        assert_eq!(rows[0].last().expect("a host").text, "home2");
        assert_eq!(rows[0][2].text, "100");
    }

    #[test]
    fn what_was_measured_for_a_moment_is_no_curve() {
        assert!(section(&[], String::new()).is_none());
        let short = section(&steady(2, 500), String::new()).expect("a section");
        assert!(short.curves.is_none() && short.texts[0].contains("Too little"));
    }

    #[test]
    fn a_clock_that_was_set_makes_no_page_endless() {
        let mut samples = steady(3, 500);
        samples[2].at_ms = u64::MAX / 2;
        assert!(section(&samples, String::new()).expect("a section").curves.is_none());
        samples[2].at_ms = 0;
        section(&samples, String::new()).expect("a section");
    }
}
