//! The charts of the demo's report.

use perigee_model::job::Sample;
use perigee_model::plan::Estimate;
use perigee_model::units;

use super::svg::{Anchor, Scale, Svg};
use crate::demo::outcome::{Outcome, Run};

const WIDTH: f64 = 860.0;
const LEFT: f64 = 84.0;
const RIGHT: f64 = WIDTH - 24.0;

/// Two bars for each run: predicted above, measured below. A run without a prediction has one.
pub fn bars(outcome: &Outcome) -> String {
    let rows = outcome.bars();
    let of_row = |predicted: Option<Estimate>| if predicted.is_some() { 58.0 } else { 38.0 };
    let longest = rows
        .iter()
        .flat_map(|(_, predicted, measured_s)| {
            [*measured_s, predicted.map_or(0.0, |p| p.expected_s)]
        })
        .fold(0.0, f64::max);
    let floor = rows.iter().map(|(_, predicted, _)| of_row(*predicted)).fold(8.0, |a, b| a + b);
    let mut svg = Svg::new(WIDTH, floor + 44.0);
    let scale = Scale::new(longest * 1.08, LEFT, RIGHT);
    let axis = "seconds from the VM's start to the end of the job's command";
    x_axis(&mut svg, &scale, 4.0, floor, axis);
    let mut y = 14.0;
    for (name, predicted, measured_s) in rows {
        let middle = y + of_row(predicted) / 2.0 - 5.0;
        svg.text("name", (LEFT - 12.0, middle), Anchor::End, name);
        let class = match predicted {
            Some(predicted) => {
                bar(&mut svg, &scale, "predicted", y, predicted.expected_s, "predicted");
                "measured"
            }
            None => "peer",
        };
        let below = if predicted.is_some() { 20.0 } else { 0.0 };
        bar(&mut svg, &scale, class, y + below, measured_s, "measured");
        y += of_row(predicted);
    }
    svg.finish("Predicted and measured seconds of the runs")
}

fn bar(svg: &mut Svg, scale: &Scale, class: &str, y: f64, seconds: f64, what: &str) {
    let end = scale.at(seconds);
    svg.rect(class, LEFT, y, end - LEFT, 17.0);
    let label = format!("{seconds:.1} s {what}");
    // The label goes inside the bar if there is no room after it.
    let room = RIGHT - end > 120.0;
    let (x, anchor) = if room { (end + 7.0, Anchor::Start) } else { (end - 7.0, Anchor::End) };
    svg.text(if room { "value" } else { "value inside" }, (x, y + 13.0), anchor, &label);
}

fn x_axis(svg: &mut Svg, scale: &Scale, top: f64, floor: f64, label: &str) {
    for (value, text) in scale.ticks() {
        let x = scale.at(value);
        svg.line("grid", (x, top), (x, floor));
        svg.text("tick", (x, floor + 16.0), Anchor::Middle, &text);
    }
    svg.line("axis", (LEFT, floor), (RIGHT, floor));
    svg.text("label", ((LEFT + RIGHT) / 2.0, floor + 36.0), Anchor::Middle, label);
}

const HOST_TOP: f64 = 6.0;
const HOST_HEIGHT: f64 = 20.0;
const RATE_TOP: f64 = 50.0;
const RATE_FLOOR: f64 = 150.0;
const PROGRESS_TOP: f64 = 172.0;
const PROGRESS_FLOOR: f64 = 242.0;

/// What all time lines share. They have the same scales, so that runs can be compared by eye.
pub struct Shared {
    time: Scale,
    rate: Scale,
    /// The host with the data.
    near: String,
}

impl Shared {
    pub fn of(outcome: &Outcome) -> Self {
        let seconds = outcome.runs.iter().map(|run| run.measured_s).fold(0.0, f64::max);
        let fastest = outcome
            .runs
            .iter()
            .flat_map(|run| rates(run).into_iter().map(|(_, rate)| rate))
            .fold(0.0, f64::max);
        Self {
            time: Scale::new(seconds, LEFT, RIGHT),
            rate: Scale::new(fastest, RATE_FLOOR, RATE_TOP),
            near: outcome.data_home.to_string(),
        }
    }
}

/// The VM's host, its read rate and its progress over time. A migration is a band across all three.
pub fn time_line(run: &Run, shared: &Shared) -> String {
    let mut svg = Svg::new(WIDTH, PROGRESS_FLOOR + 44.0);
    let time = &shared.time;
    for (value, text) in shared.rate.ticks() {
        let y = shared.rate.at(value);
        svg.line("grid", (LEFT, y), (RIGHT, y));
        svg.text("tick", (LEFT - 8.0, y + 4.0), Anchor::End, &text);
    }
    let progress = Scale::new(100.0, PROGRESS_FLOOR, PROGRESS_TOP);
    for value in [0.0, 50.0, 100.0] {
        let y = progress.at(value);
        svg.line("grid", (LEFT, y), (RIGHT, y));
        svg.text("tick", (LEFT - 8.0, y + 4.0), Anchor::End, &format!("{value:.0}"));
    }
    x_axis(&mut svg, time, RATE_TOP, PROGRESS_FLOOR, "seconds since the VM's start");
    svg.text("label", (LEFT, RATE_TOP - 8.0), Anchor::Start, "read from disks, MiB/s");
    svg.text("label", (LEFT, PROGRESS_TOP - 7.0), Anchor::Start, "queries done, %");

    migrations(&mut svg, run, time);
    hosts(&mut svg, run, shared);
    let points: Vec<(f64, f64)> =
        rates(run).iter().map(|(s, rate)| (time.at(*s), shared.rate.at(*rate))).collect();
    svg.area("rate-area", &points, RATE_FLOOR);
    svg.polyline("rate", &points);
    svg.polyline("progress", &progress_points(run, time, &progress));
    let end = time.at(run.measured_s);
    svg.line("end", (end, RATE_TOP), (end, PROGRESS_FLOOR));
    svg.finish(&format!("Time line of the run {}", run.name.word()))
}

/// Progress is drawn in steps, because a job reports it only when a query is done.
fn progress_points(run: &Run, time: &Scale, progress: &Scale) -> Vec<(f64, f64)> {
    let mut points: Vec<(f64, f64)> = Vec::new();
    for sample in within(run) {
        let Some(part) = sample.progress else { continue };
        let point = (time.at(seconds(run, sample.at_ms)), progress.at(part * 100.0));
        if let Some(last) = points.last().copied() {
            points.push((point.0, last.1));
        }
        points.push(point);
    }
    points
}

fn migrations(svg: &mut Svg, run: &Run, time: &Scale) {
    for migration in &run.migrations {
        let from = time.at(seconds(run, migration.started_ms));
        let ended_ms = migration.ended_ms.unwrap_or(migration.started_ms + migration.total_ms);
        let to = time.at(seconds(run, ended_ms));
        svg.rect("migration", from, RATE_TOP, (to - from).max(2.0), PROGRESS_FLOOR - RATE_TOP);
        let label = format!(
            "migration {} ms, {} ms pause, {}",
            migration.total_ms,
            migration.downtime_ms,
            units::format_bytes(migration.bytes)
        );
        // The label is above the curves, beside the axis's label.
        let room = RIGHT - from > 290.0;
        let (x, anchor) =
            if room { (from.max(LEFT + 130.0), Anchor::Start) } else { (to, Anchor::End) };
        svg.text("note", (x, RATE_TOP - 8.0), anchor, &label);
    }
}

/// The strip at the top has one section for each host on which the VM ran.
fn hosts(svg: &mut Svg, run: &Run, shared: &Shared) {
    let time = &shared.time;
    svg.text("name", (LEFT - 8.0, HOST_TOP + 14.0), Anchor::End, "host");
    let mut pieces: Vec<(&str, f64, f64)> = Vec::new();
    for sample in within(run) {
        let at = seconds(run, sample.at_ms);
        match pieces.last_mut() {
            Some((host, _, to)) if *host == sample.host.as_str() => *to = at,
            Some((_, _, to)) => {
                *to = at;
                pieces.push((sample.host.as_str(), at, at));
            }
            None => pieces.push((sample.host.as_str(), 0.0, at)),
        }
    }
    if let Some(last) = pieces.last_mut() {
        last.2 = run.measured_s;
    }
    for (host, from, to) in pieces {
        let class = if host == shared.near { "host near" } else { "host far" };
        svg.rect(class, time.at(from), HOST_TOP, time.at(to) - time.at(from), HOST_HEIGHT);
        if time.at(to) - time.at(from) > 50.0 {
            svg.text("host-name", (time.at(from) + 7.0, HOST_TOP + 14.0), Anchor::Start, host);
        }
    }
}

fn within(run: &Run) -> impl Iterator<Item = &Sample> {
    run.samples
        .iter()
        .filter(|s| s.at_ms >= run.started_ms && seconds(run, s.at_ms) <= run.measured_s)
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds of one run")]
fn seconds(run: &Run, at_ms: u64) -> f64 {
    (at_ms as f64 - run.started_ms as f64) / 1000.0
}

/// MiB/s between two neighbouring samples, drawn at the middle between them.
#[expect(clippy::cast_precision_loss, reason = "bytes between two samples")]
fn rates(run: &Run) -> Vec<(f64, f64)> {
    let samples: Vec<&Sample> = within(run).collect();
    samples
        .windows(2)
        .filter_map(|pair| {
            let [a, b] = pair else { return None };
            let (from, to) = (seconds(run, a.at_ms), seconds(run, b.at_ms));
            let mib = b.io.read_bytes.saturating_sub(a.io.read_bytes) as f64 / f64::from(1 << 20);
            (to > from).then(|| (f64::midpoint(from, to), mib / (to - from)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::outcome::RunName;
    use crate::demo::outcome::tests::good;

    #[test]
    fn rates_are_bytes_over_seconds() {
        let outcome = good();
        let run = outcome.run(RunName::Remote).expect("the run");
        assert!(rates(run).iter().all(|(_, rate)| (rate - 3.0).abs() < 1e-9));
    }

    #[test]
    fn every_run_has_two_bars_and_the_one_without_perigee_has_one() {
        let svg = bars(&good());
        assert_eq!(svg.matches("class=\"measured\"").count(), 5);
        assert_eq!(svg.matches("class=\"predicted\"").count(), 5);
        assert_eq!(svg.matches("class=\"peer\"").count(), 1);
    }

    #[test]
    fn a_migration_is_marked_and_splits_the_host_strip() {
        let outcome = good();
        let shared = Shared::of(&outcome);
        let draw = |name| time_line(outcome.run(name).expect("the run"), &shared);
        let large = draw(RunName::Large);
        assert!(large.contains("class=\"migration\"") && large.contains("160 MiB"), "{large}");
        assert!(large.contains(">home1<") && large.contains(">cloud1<"), "{large}");
        assert!(!draw(RunName::Remote).contains("class=\"migration\""));
    }

    #[test]
    fn a_run_without_samples_is_drawn_empty() {
        let mut outcome = good();
        outcome.runs.iter_mut().for_each(|run| run.samples.clear());
        let shared = Shared::of(&outcome);
        assert!(time_line(&outcome.runs[0], &shared).contains("</svg>"));
    }
}
