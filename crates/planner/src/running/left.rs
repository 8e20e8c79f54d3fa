//! What is left of a running job: the share of its work, and the time until its end.
//!
//! Its end is predicted from its earlier runs and from its own pace:
//!
//! ```text
//! by its work:  time of a whole run here * share of the work that is left
//! by its time:  time of a whole run here - time that it has run, if nothing was moved
//! by its pace:  time that its progress here took, for the progress that is left
//! ```
//!
//! In the first run of a job, what such a run is taken to take (`learn/one_pass.rs`) stands in place of the earlier runs until
//! its pace shows, as long as the range helps.
//!
//! The mean of the first two counts first. The more of the job is done, the more counts its own pace, which shows what
//! earlier runs can't: a slower link, or another load of the host. Where these differ, the range holds all of them.
//!
//! While a migration takes its VM to another host, the rest of the work is taken to be done there, and what the rest of the
//! move costs is added. While data comes to its host, the rest is taken to be done beside them, and what it waits until they
//! are there is added.

use perigee_model::HostId;
use perigee_model::plan::PredictedEnd;

use crate::copying::copy_cost;
use crate::facts::{DiskFacts, HostFacts, Moving, Running};
use crate::figures::Figures;
use crate::learn::{Learned, Source};
use crate::moving::{Dirty, move_cost};
use crate::network::seconds;
use crate::spread::Spread;

/// In 9 of 10 cases the remaining work differs from the prediction by at most this share.
const LEFT_ERROR: f64 = 0.24;
/// The same if only the command's own progress predicts it.
const PROGRESS_ERROR: (f64, f64) = (0.5, 2.0);
/// Less progress than this is not used for predictions.
const PROGRESS_LEAST: f64 = 0.05;

/// Predicts when the command ends if its VM and its data stay where they are, or where they are on their way to.
pub fn predicted_end(running: &Running) -> PredictedEnd {
    let (cluster, traits) = (&running.cluster, &running.traits);
    let learned = Learned::from_history(cluster, traits, &running.history, &mut Figures::default());
    let by_history = learned
        .ok_or_else(|| "no earlier run of such a job is known".to_owned())
        .and_then(|learned| by_history(running, &learned));
    // Its pace so far says nothing about the other host, or about data that is here.
    let stays = running.moving.is_none() && coming(running).is_empty();
    let by_pace =
        by_progress(running, at_work_s(running)).filter(|left| left.expected > 0.0 && stays);
    let (left, why) = match (by_history, by_pace) {
        (Ok(history), Some(pace)) => {
            let done = running.progress.unwrap_or_default().clamp(0.0, 1.0);
            (history.toward(pace, done), "from its earlier runs and its progress")
        }
        (Ok(history), None) => (history, "from its earlier runs"),
        (Err(_), Some(pace)) => (pace, "from its progress here alone"),
        (Err(why), None) => {
            if let Some(left) = by_other_jobs(running) {
                let why = "from the size of its data and other jobs of its tenant, which is a first guess";
                return PredictedEnd { left: Some(left.estimate()), why: why.to_owned() };
            }
            let why = format!("{why}, and {}", why_no_pace(running));
            return PredictedEnd { left: None, why };
        }
    };
    PredictedEnd { left: Some(left.estimate()), why: why.to_owned() }
}

/// In the first run of a job, until its progress shows its pace. `None` if the range would help nobody, or if the VM or its
/// data moved.
fn by_other_jobs(running: &Running) -> Option<Spread> {
    let is_first = running.history.is_empty() && running.moves == 0 && running.moving.is_none();
    if !is_first || !coming(running).is_empty() {
        return None;
    }
    let learned = Learned::of_first_run(running)?;
    // The range of the whole run is judged: what is left of a range that tells nothing may look as if it told something.
    if !whole(running, &learned).ok()?.estimate().helps() {
        return None;
    }
    by_history(running, &learned).ok()
}

/// The share of the work that is left when none is done.
pub(crate) fn all_left() -> Spread {
    Spread::exactly(1.0).plus(Spread::noise(LEFT_ERROR))
}

/// The share of the work that is left, according to the requests that are still to come. If the command reports its
/// progress, the range covers both shares. `None` if neither is known.
pub(super) fn share_left(running: &Running, learned: &Learned) -> Option<Spread> {
    let by_progress = running.progress.map(|progress| (1.0 - progress).clamp(0.0, 1.0));
    let has_requests = learned.requests >= 1.0;
    let by_requests = has_requests.then(|| 1.0 - (running.requests / learned.requests).min(1.0));
    let expected = by_requests.or(by_progress)?;
    let other = by_progress.unwrap_or(expected);
    let left = Spread::between(expected.min(other), expected, expected.max(other));
    Some(left.plus(Spread::noise(LEFT_ERROR * expected)))
}

/// What the rest of the work costs if it costs as much as the work since the VM's arrival, which cost `so_far_s`.
/// `None` if the command reports no progress, or too little since then.
pub(super) fn by_progress(running: &Running, so_far_s: f64) -> Option<Spread> {
    let progress = running.progress?;
    let here = progress - running.progress_at_arrival;
    if here < PROGRESS_LEAST {
        return None;
    }
    let expected = (so_far_s * (1.0 - progress) / here).max(0.0);
    let (low, high) = PROGRESS_ERROR;
    Some(Spread::between(expected * low, expected, expected * high))
}

/// Where its reads are answered if its VM is at this host.
pub(super) fn sources<'a>(running: &'a Running, at: &HostId) -> Vec<Source<'a>> {
    let disks = running.disks.iter();
    disks.map(|disk| Source { home: &disk.home, far_share: disk.copy.far_share(at) }).collect()
}

/// A host where the VM itself is among those that run there, without it.
pub(super) fn without_it(running: &Running, host: &HostFacts) -> HostFacts {
    let running_vcpus = host.running_vcpus.saturating_sub(running.cpus);
    HostFacts { running_vcpus, ..host.clone() }
}

/// The time of a whole run where the VM is.
fn whole(running: &Running, learned: &Learned) -> Result<Spread, String> {
    let here = running.cluster.host(&running.host).map_err(|why| why.to_string())?;
    let (here, sources) = (without_it(running, here), sources(running, &running.host));
    let place = learned.place(&running.cluster, &here, &sources, &mut Figures::default());
    Ok(learned.at(&place.map_err(|why| why.to_string())?).1)
}

/// An error says why its earlier runs do not tell.
fn by_history(running: &Running, learned: &Learned) -> Result<Spread, String> {
    let cluster = &running.cluster;
    if let Some(left) =
        running.moving.as_ref().and_then(|moving| after_the_move(running, learned, moving))
    {
        return Ok(left);
    }
    let here = cluster.host(&running.host).map_err(|why| why.to_string())?;
    let here = without_it(running, here);
    if let Some(left) = after_the_copy(running, learned, &here) {
        return Ok(left);
    }
    let whole = whole(running, learned)?;
    let share = share_left(running, learned).filter(|share| share.expected > 0.0);
    let by_work = share.map(|share| whole.by(share));
    let so_far = Spread::exactly(-at_work_s(running));
    let by_time = (running.moves == 0).then(|| whole.plus(so_far).at_least(0.0));
    let left = match (by_work, by_time.filter(|left| left.high() > 0.0)) {
        (Some(work), Some(time)) => work.toward(time, 0.5),
        (work, time) => work
            .or(time)
            .ok_or("it takes longer than its earlier runs, or does more than they did")?,
    };
    // Beyond the expected end only the rest of the range is known.
    let expected = if left.expected > 0.0 { left.expected } else { left.high() / 2.0 };
    Ok(Spread::between(left.low().max(0.0), expected, left.high()))
}

/// What is left if the migration takes the VM to the other host. `None` if that can't be predicted.
fn after_the_move(running: &Running, learned: &Learned, moving: &Moving) -> Option<Spread> {
    let to = &moving.to;
    let (cluster, from) = (&running.cluster, &running.host);
    // It has had its room there since the move has begun.
    let there = without_it(running, cluster.host(to).ok()?);
    let place =
        learned.place(cluster, &there, &sources(running, to), &mut Figures::default()).ok()?;
    let dirty = Dirty::of_running(running.dirty_bytes_per_s, &running.disks, running.wall_s);
    let cost = move_cost(cluster, from, to, running.memory_bytes, dirty).ok()?;
    let (_, whole) = learned.at(&place);
    let work = whole.by(share_left(running, learned)?);
    let cost = moving.left_s.map_or_else(|| cost.of_the_job(), |left_s| cost.of_the_rest(left_s));
    (work.expected > 0.0).then(|| work.plus(cost))
}

/// The data that is still to come to the VM's host.
fn coming(running: &Running) -> Vec<(&HostId, u64)> {
    let coming = running.disks.iter().filter_map(|disk| disk.coming.as_ref());
    coming.filter(|coming| coming.bytes > 0).map(|coming| (&coming.from, coming.bytes)).collect()
}

/// What is left if data comes to the VM's host. `None` if none does, or if that can't be predicted.
fn after_the_copy(running: &Running, learned: &Learned, here: &HostFacts) -> Option<Spread> {
    let (cluster, to) = (&running.cluster, &running.host);
    let coming = coming(running);
    if coming.is_empty() {
        return None;
    }
    let place = |is_there: bool| {
        let source = |disk: &'_ DiskFacts| match &disk.coming {
            Some(_) if is_there => (to.clone(), 1.0),
            Some(coming) => (coming.from.clone(), 1.0),
            None => (disk.home.clone(), disk.copy.far_share(to)),
        };
        let found: Vec<(HostId, f64)> = running.disks.iter().map(source).collect();
        let sources: Vec<Source> =
            found.iter().map(|(home, far_share)| Source { home, far_share: *far_share }).collect();
        learned.place(cluster, here, &sources, &mut Figures::default()).ok()
    };
    let share = share_left(running, learned)?;
    let reading = learned.reading(&place(false)?, share.expected);
    let cost = copy_cost(cluster, to, &coming, reading).ok()?;
    let (_, whole) = learned.at(&place(true)?);
    let work = whole.by(share);
    (work.expected > 0.0).then(|| work.plus(cost.of_the_job()))
}

/// The time since the VM's arrival in which its link was up.
fn at_work_s(running: &Running) -> f64 {
    // Disks of one home wait for the same outage, so it counts once.
    let outage_ns = running.disks.iter().map(|disk| disk.outage_ns).max().unwrap_or_default();
    (running.wall_s - seconds(outage_ns)).max(0.0)
}

fn why_no_pace(running: &Running) -> &'static str {
    match running.progress {
        None => "its command does not report its progress",
        Some(progress) if progress >= 1.0 => "its command reports that all is done",
        Some(_) => "its command has reported too little progress here",
    }
}

#[cfg(test)]
mod tests;
