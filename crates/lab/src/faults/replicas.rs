//! Cells with a replica: a fault in a round, and in a promotion.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use perigee_model::job::ClusterVolume;
use perigee_model::replica::{PromoteVolume, Promotion, Replica, ReplicateVolume};
use perigee_model::{HostId, Problem, VolumeName};

use super::ground::{Ground, STEP_MAX, until};
use super::inflict::{Ends, inflict};
use super::outcome::Ran;
use super::table::{Cell, Placement};
use super::volumes::{answered, is_poisoned, start, stop, verify};
use super::writer::{BLOCK_BYTES, QemuIo, Writer, Written};

/// A failed round is tried again after up to a minute.
const ROUND_MAX: Duration = Duration::from_secs(300);
/// The shortest interval between rounds.
const OFTEN_S: u64 = 10;
/// An interval with which only the first round takes place.
const ONCE_S: u64 = 3600;
const GOES_ON: u64 = 20;
/// The fault in a promotion comes this long after the request.
const AFTER_ASKED: Duration = Duration::from_millis(30);
/// What is written after the last round of a replica.
const MARK: u8 = 0xee;

/// Makes a replica or promotes one while the cell's fault is injected, and says what was seen.
pub async fn run(
    ground: &Ground<'_>,
    cell: Cell,
    name: &VolumeName,
    ends: &Ends,
) -> Result<Ran, Problem> {
    match cell.placement {
        Placement::Replica => round(ground, cell, name, ends).await,
        _ => promotion(ground, cell, name, ends).await,
    }
}

/// A fault in a round. Afterwards a round is made with all that was written, and it becomes the volume.
async fn round(
    ground: &Ground<'_>,
    cell: Cell,
    name: &VolumeName,
    ends: &Ends,
) -> Result<Ran, Problem> {
    let made = ground.make_volume(name, &ends.old).await?;
    let writers = start(ground, &made, &[&ends.old]).await?;
    answered(&writers, GOES_ON).await?;
    replicate(ground, name, ends, OFTEN_S).await?;
    let is_under_way = |replica: &Replica| replica.missing_bytes.is_some_and(|bytes| bytes > 0);
    replica_that(ground, name, "a round under way", is_under_way).await?;
    let mut ran = Ran { is_seen: true, ..Ran::default() };
    if cell.fault.fails_requests() {
        writers.iter().for_each(Writer::may_fail);
    }
    inflict(ground.lab, cell.fault, ends).await?;
    let is_poisoned = is_poisoned(ground, name).await?;
    if !is_poisoned {
        answered(&writers, GOES_ON).await?;
    }
    let written = stop(writers, &mut ran).await?;
    if is_poisoned {
        if !cell.fault.fails_disk() {
            ran.faults.push("the volume takes no writes any more".to_owned());
        }
        let says_why = |replica: &Replica| !replica.problem.is_empty();
        let replica = replica_that(ground, name, "why no round is made", says_why).await?;
        ran.ended = format!("no more rounds: {}", replica.problem);
    } else {
        let stopped_ms = now_ms();
        let has_all = |replica: &Replica| replica.complete_ms.is_some_and(|at| at > stopped_ms);
        replica_that(ground, name, "a round with all that was written", has_all).await?;
        "the next round was complete".clone_into(&mut ran.ended);
        if let Err(why) = promote(ground, name, &ends.new).await? {
            ran.faults.push(format!("the replica did not become the volume: {why}"));
        }
    }
    one_home(ground, name).await?;
    verify(ground, name, &written, &mut ran).await?;
    Ok(ran)
}

/// A fault while a replica becomes the volume. Either it does, or the volume is what it was.
async fn promotion(
    ground: &Ground<'_>,
    cell: Cell,
    name: &VolumeName,
    ends: &Ends,
) -> Result<Ran, Problem> {
    let made = ground.make_volume(name, &ends.old).await?;
    let writers = start(ground, &made, &[&ends.old]).await?;
    answered(&writers, GOES_ON).await?;
    let mut ran = Ran::default();
    let mut written = stop(writers, &mut ran).await?;
    replicate(ground, name, ends, ONCE_S).await?;
    replica_that(ground, name, "a complete round", |replica| replica.complete_ms.is_some()).await?;
    let mut client =
        QemuIo::open(&ground.socket(&ends.old), &format!("{name}@{}", made.epoch)).await?;
    client.tell(&format!("write -P {MARK} 0 {BLOCK_BYTES}")).await?;
    client.tell("flush").await?;
    drop(client);

    let is_over = AtomicBool::new(false);
    let promoting = async {
        let promoted = promote(ground, name, &ends.new).await;
        is_over.store(true, Ordering::SeqCst);
        promoted
    };
    let breaking = async {
        tokio::time::sleep(AFTER_ASKED).await;
        // A promotion that was quicker has seen no fault.
        if is_over.load(Ordering::SeqCst) {
            return Ok(false);
        }
        inflict(ground.lab, cell.fault, ends).await.map(|()| true)
    };
    let (promoted, is_seen) = tokio::join!(promoting, breaking);
    ran.is_seen = is_seen?;
    match promoted? {
        Ok(()) => "promoted".clone_into(&mut ran.ended),
        Err(why) => {
            ran.ended = format!("undone: {why}");
            written.iter_mut().for_each(|part: &mut Written| part.must_have(0, MARK));
        }
    }
    one_home(ground, name).await?;
    verify(ground, name, &written, &mut ran).await?;
    Ok(ran)
}

async fn replicate(
    ground: &Ground<'_>,
    name: &VolumeName,
    ends: &Ends,
    every_s: u64,
) -> Result<(), Problem> {
    let what = format!("can't replicate volume {name}");
    let to = ground.site_of(&ends.new).ok_or_else(|| Problem::not_found(what, "no such site"))?;
    let ask = ReplicateVolume { to, every_s, keep: 1 };
    let path = format!("/v1/volumes/{name}/replicas");
    ground.controller.post::<Replica>(&path, &ask).await.map(drop)
}

async fn replica_that(
    ground: &Ground<'_>,
    name: &VolumeName,
    what: &str,
    holds: impl Fn(&Replica) -> bool,
) -> Result<Replica, Problem> {
    let mut last = String::new();
    let path = format!("/v1/volumes/{name}");
    let found = until(what, ROUND_MAX, async || {
        let volume: ClusterVolume = ground.controller.get(&path).await?;
        last = volume.replicas.first().map_or_else(String::new, |replica| format!("{replica:?}"));
        Ok(volume.replicas.into_iter().find(|replica| holds(replica)))
    })
    .await;
    found.map_err(|problem| {
        let why = format!("{}; the replica is {last}", problem.why);
        Problem::unavailable(problem.what, why)
    })
}

/// Asks for the promotion until it is done or called off. The inner error says why it was called off.
async fn promote(
    ground: &Ground<'_>,
    name: &VolumeName,
    to: &HostId,
) -> Result<Result<(), String>, Problem> {
    let path = format!("/v1/volumes/{name}/promote");
    let ask = PromoteVolume { force: true, ..PromoteVolume::default() };
    until("the end of the promotion", STEP_MAX, async || {
        match ground.slow.post::<Promotion>(&path, &ask).await {
            Ok(_) => Ok(Some(Ok(()))),
            // The answer of an earlier request may be lost.
            Err(_) if ground.volume(name).await?.home == *to => Ok(Some(Ok(()))),
            Err(problem) => called_off(problem).map(|why| Some(Err(why))),
        }
    })
    .await
}

/// Why a promotion was called off. After any other error, also one of a disk that has failed, the controller may go on
/// with it by itself, and the clients of the old home would lose their sessions later.
fn called_off(problem: Problem) -> Result<String, Problem> {
    if problem.to_string().contains("was called off") { Ok(problem.why) } else { Err(problem) }
}

/// Waits until the lost home knows that it is not the home any more.
async fn one_home(ground: &Ground<'_>, name: &VolumeName) -> Result<(), Problem> {
    until("the one home of the volume", STEP_MAX, async || {
        let recorded = ground.volume(name).await?.home;
        Ok((ground.homes(name).await? == [recorded]).then_some(()))
    })
    .await
}

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fault table has shown it: the old home's disk failed, the table was filled in as if the volume had stayed
    /// there, and a client got an I/O error when the promotion went on.
    #[test]
    fn a_promotion_is_not_over_because_the_old_home_could_not_give_the_volume_up() {
        let why = "its home cloud1 answers, and did not give it up: the disk with the pool's catalog failed";
        let failed = Problem::internal("can't make a replica of volume v the volume", why)
            .next("it is tried again until it does");
        called_off(failed).expect_err("the controller goes on with it");
        let ended =
            Problem::conflict("can't make a replica of volume v the volume", "home1 was removed")
                .next("it was called off, and the volume stays at cloud1");
        assert_eq!(called_off(ended), Ok("home1 was removed".to_owned()));
    }
}
