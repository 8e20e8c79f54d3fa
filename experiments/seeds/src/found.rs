//! What a program left in its outputs, made into a [`Run`]: what it found is compared with what it should, and what was used meanwhile is put in order.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::bench::STREAMS;
use crate::results::{Means, Run, Side, StepTime, Work};
use crate::right::Right;
use crate::series::{GuestPoint, ServerPoint, of_guest};

/// The outputs of all ranks: names without directories, and texts, in the order of the ranks.
#[derive(Debug, Clone, Copy)]
pub struct Outputs<'a>(pub &'a [(String, String)]);

impl Outputs<'_> {
    fn all(&self, file: &str) -> Vec<&str> {
        self.0.iter().filter(|(name, _)| name == file).map(|(_, text)| text.as_str()).collect()
    }

    fn first(&self, file: &str) -> Result<&str> {
        self.all(file).first().copied().with_context(|| format!("no {file}"))
    }

    /// When each program of a rank began and ended, by its own clock.
    pub fn marks(&self, rank: u32) -> Result<BTreeMap<String, (f64, f64)>> {
        let mut marks = BTreeMap::new();
        for line in self.first(&format!("marks-{rank}"))?.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let [label, began, ended] = words[..] else { bail!("a mark: {line:?}") };
            marks.insert(label.to_owned(), (began.parse()?, ended.parse()?));
        }
        Ok(marks)
    }
}

/// The name under which a program's side is known in the guests.
pub fn label(work: Work, side: Side) -> String {
    format!("{}-{}", work.name(), side.name())
}

/// How fast the first rank's clock went beside the machine's: its span from the first mark to the last, beside the one that was seen.
pub fn clock(marks: &BTreeMap<String, (f64, f64)>, seen_s: f64) -> Result<f64> {
    let began = marks.values().map(|mark| mark.0).reduce(f64::min).context("no marks")?;
    let ended = marks.values().map(|mark| mark.1).fold(began, f64::max);
    match ended > began && seen_s > 0.0 {
        true => Ok((ended - began) / seen_s),
        false => bail!("no time has passed"),
    }
}

/// A program that took so long by the machine's clock.
///
/// # Errors
/// It has not found what it should, or left something out.
pub fn run(
    right: &Right,
    (work, side, seconds): (Work, Side, f64),
    outputs: Outputs<'_>,
    servers: &[(String, ServerPoint)],
    ranks: u32,
) -> Result<Run> {
    let label = label(work, side);
    let mut guests: Vec<Vec<GuestPoint>> = Vec::new();
    let mut clocks = Vec::new();
    for rank in 0..ranks {
        let file = format!("{label}-usage-{rank}");
        let (guest_s, mut points) = of_guest(outputs.first(&file)?).with_context(|| file)?;
        // A guest's clock may be wrong without KVM, and then is so by the same factor all the time.
        // On the host a program may be over within a tick of the clock.
        let clock = if guest_s > 0.0 { guest_s / seconds } else { 1.0 };
        points.iter_mut().for_each(|point| point.at_s /= clock);
        clocks.push(clock);
        guests.push(points);
    }
    let mut steps = Vec::new();
    let found = match work {
        Work::Tpch => {
            let answers = outputs.all(&format!("{label}-answers"));
            for (rank, text) in answers.iter().enumerate() {
                right.check_power(text).with_context(|| format!("{label}, rank {rank}"))?;
            }
            for number in 0..STREAMS.len() {
                let stream = outputs.all(&format!("{label}-stream-{number}"));
                for (rank, text) in stream.iter().enumerate() {
                    let what = || format!("{label}, stream {number}, rank {rank}");
                    right.check_stream(number, text).with_context(what)?;
                }
            }
            steps = step_times(&outputs.all(&format!("{label}-times")), &clocks)?;
            (*answers.first().context("no answers")?).to_owned()
        }
        _ => {
            let found = outputs.first(&format!("{label}-found"))?;
            right.check(work, found)?;
            found.to_owned()
        }
    };
    let mut servers: Vec<ServerPoint> =
        servers.iter().filter(|(of, _)| *of == label).map(|(_, point)| *point).collect();
    let first_s = servers.first().map_or(0.0, |point| point.at_s);
    servers.iter_mut().for_each(|point| point.at_s -= first_s);
    let means = means(&guests, &servers);
    let found_sha256 = Sha256::digest(found).iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(Run { work, side, seconds, found_sha256, steps, means, guests, servers, cards: None })
}

/// The same with fewer digits, for the file.
pub fn rounded(mut run: Run) -> Run {
    let to = |value: &mut f64, digits: f64| *value = (*value * digits).round() / digits;
    for point in run.guests.iter_mut().flatten() {
        to(&mut point.at_s, 100.0);
        for share in [&mut point.busy, &mut point.waits, &mut point.used, &mut point.cached] {
            to(share, 1000.0);
        }
    }
    for point in &mut run.servers {
        to(&mut point.at_s, 100.0);
        to(&mut point.wan_bytes_per_s, 1.0);
        point.cpus.iter_mut().for_each(|cpus| to(cpus, 1000.0));
        point.memory.iter_mut().flatten().for_each(|share| to(share, 1000.0));
    }
    run
}

/// What TPC-H's steps took, as means of the VMs by the machine's clock.
fn step_times(texts: &[&str], clocks: &[f64]) -> Result<Vec<StepTime>> {
    let mut steps: Vec<StepTime> = Vec::new();
    for (text, clock) in texts.iter().zip(clocks) {
        for (index, line) in text.lines().enumerate() {
            let words: Vec<&str> = line.split(' ').collect();
            let [name, began, ended] = words[..] else { bail!("a step's time: {line:?}") };
            let seconds =
                (ended.parse::<f64>()? - began.parse::<f64>()?) / clock / texts.len() as f64;
            match steps.get_mut(index) {
                Some(step) => step.seconds += seconds,
                None => steps.push(StepTime { name: name.to_owned(), seconds }),
            }
        }
    }
    Ok(steps)
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (mut sum, mut count) = (0.0, 0_u32);
    for value in values {
        sum += value;
        count += 1;
    }
    (count > 0).then(|| sum / f64::from(count))
}

fn means(guests: &[Vec<GuestPoint>], servers: &[ServerPoint]) -> Means {
    let all = || guests.iter().flatten();
    let most = |share: fn(&GuestPoint) -> f64| {
        mean(guests.iter().filter_map(|points| points.iter().map(share).reduce(f64::max)))
    };
    let mut wan_bytes = None;
    for pair in servers.windows(2) {
        let [before, now] = pair else { continue };
        *wan_bytes.get_or_insert(0.0) += now.wan_bytes_per_s * (now.at_s - before.at_s);
    }
    Means {
        busy: mean(all().map(|point| point.busy)),
        waits: mean(all().map(|point| point.waits)),
        used_most: most(|point| point.used),
        cached_most: most(|point| point.cached),
        target_cpus: [0, 1].map(|target| mean(servers.iter().map(|point| point.cpus[target]))),
        target_memory_last: [0, 1].map(|target| servers.last()?.memory[target]),
        wan_bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_step_is_the_mean_of_the_vms_by_the_machine_s_clock() {
        let texts = ["14 10.0 12.0\n2 12.0 13.0\n", "14 20.0 28.0\n2 28.0 30.0\n"];
        let steps = step_times(&texts, &[1.0, 2.0]).expect("times");
        let found: Vec<(&str, f64)> = steps.iter().map(|s| (s.name.as_str(), s.seconds)).collect();
        assert_eq!(found, [("14", 3.0), ("2", 1.0)]);
        step_times(&["14 10.0"], &[1.0]).expect_err("no end");
    }

    #[test]
    fn a_clock_is_measured_over_the_whole_of_a_job() {
        let files = [(
            "marks-0".to_owned(),
            "hpa-near 10.0 14.0\nhpa-far 15.0 19.0\ndone 20.0 20.0\n".to_owned(),
        )];
        let marks = Outputs(&files).marks(0).expect("marks");
        assert_eq!(marks["hpa-far"], (15.0, 19.0));
        assert_eq!(clock(&marks, 20.0).expect("a clock"), 0.5);
        clock(&marks, 0.0).expect_err("nothing was seen");
        clock(&BTreeMap::new(), 1.0).expect_err("no marks");
        Outputs(&files).marks(1).expect_err("no such rank");
    }
}
