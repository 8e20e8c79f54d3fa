//! Cells without a VM: clients read and write a volume while a fault comes.

use std::time::{Duration, Instant};

use perigee_model::job::ClusterVolume;
use perigee_model::volume::{VolumeHealth, VolumeInfo};
use perigee_model::volume_move::{MoveVolume, VolumeMove, VolumeMoveState};
use perigee_model::{HostId, Problem, VolumeName};

use super::ground::{Ground, STEP_MAX, until};
use super::inflict::{Ends, inflict};
use super::outcome::Ran;
use super::replicas;
use super::table::{Cell, Phase, Placement};
use super::watch::Watch;
use super::writer::{BLOCK_BYTES, BLOCKS, QemuIo, Writer, Written};

/// A move goes on or is undone within this time after the fault has gone.
const MOVE_MAX: Duration = Duration::from_secs(300);
const LOOK_FOR_PHASE_EVERY: Duration = Duration::from_millis(3);
/// A client works well again when this many of its requests were answered.
const GOES_ON: u64 = 20;

/// Runs a cell with a volume of its own of this name, and deletes the volume.
///
/// # Errors
/// Something that was waited for did not come.
pub async fn run(ground: &Ground<'_>, cell: Cell, name: &str) -> Result<Ran, Problem> {
    let name =
        VolumeName::new(name).map_err(|error| Problem::internal("can't name a volume", error))?;
    let before = ground.possessions().await?;
    let ends = ends(ground, cell.placement);
    let ran = match cell.placement {
        Placement::Replica | Placement::Promotion => {
            replicas::run(ground, cell, &name, &ends).await
        }
        _ => used(ground, cell, &name, &ends).await,
    };
    let cleaned = ground.clean(&name, &before).await;
    let mut ran = ran?;
    ran.faults.extend(cleaned?);
    Ok(ran)
}

fn ends(ground: &Ground<'_>, placement: Placement) -> Ends {
    let (home, cloud) = (ground.home.clone(), ground.cloud.clone());
    match placement {
        Placement::Move => Ends { old: home, new: cloud, vm: None },
        _ => Ends { old: cloud, new: home, vm: None },
    }
}

/// A volume that is used, and moves or stays.
async fn used(
    ground: &Ground<'_>,
    cell: Cell,
    name: &VolumeName,
    ends: &Ends,
) -> Result<Ran, Problem> {
    let Ends { old, new, .. } = ends;
    let made = ground.make_volume(name, old).await?;
    ground.attach(name, new, old).await?;
    let clients: &[&HostId] = if cell.placement == Placement::Move { &[old, new] } else { &[new] };
    let writers = start(ground, &made, clients).await?;
    let servers = [(old.clone(), ground.server(old)?), (new.clone(), ground.server(new)?)];
    let watch = Watch::homes(servers, name.clone());
    answered(&writers, GOES_ON).await?;

    let is_seen = match cell.placement {
        Placement::Remote => true,
        _ => begin_move(ground, name, new, cell.phase).await?,
    };
    if is_seen {
        if cell.fault.fails_requests() {
            writers.iter().for_each(Writer::may_fail);
        }
        inflict(ground.lab, cell.fault, ends).await?;
    }
    let mut ran = Ran { is_seen, ..Ran::default() };
    if cell.placement == Placement::Remote {
        "used all the time".clone_into(&mut ran.ended);
    } else {
        (ran.ended, ran.faults) = end_of_move(ground, name, ends).await?;
    }
    if !is_poisoned(ground, name).await? {
        answered(&writers, GOES_ON).await?;
    } else if cell.fault.fails_disk() {
        ran.ended += "; the volume says that a flush has failed";
    } else {
        ran.faults.push("the volume takes no writes any more".to_owned());
    }
    let written = stop(writers, &mut ran).await?;
    ran.faults.extend(watch.end().await?);
    verify(ground, name, &written, &mut ran).await?;
    Ok(ran)
}

/// One writer for each host, each with a part of the volume.
pub async fn start(
    ground: &Ground<'_>,
    volume: &ClusterVolume,
    hosts: &[&HostId],
) -> Result<Vec<Writer>, Problem> {
    let mut writers = Vec::new();
    for (number, host) in hosts.iter().enumerate() {
        let export = format!("{}@{}", volume.name, volume.epoch);
        let client = QemuIo::open(&ground.socket(host), &export).await?;
        writers.push(Writer::start(client, number * BLOCKS * BLOCK_BYTES));
    }
    Ok(writers)
}

/// Waits until more requests of each writer were answered.
pub async fn answered(writers: &[Writer], more: u64) -> Result<(), Problem> {
    let before: Vec<u64> = writers.iter().map(Writer::answered).collect();
    until("the clients' next answers", STEP_MAX, async || {
        let go_on = writers
            .iter()
            .zip(&before)
            .all(|(writer, before)| writer.answered() >= before + more || writer.has_ended());
        Ok(go_on.then_some(()))
    })
    .await
}

/// Stops the clients, and adds to `ran` what they complained of and how long their longest request took, in
/// milliseconds.
pub async fn stop(writers: Vec<Writer>, ran: &mut Ran) -> Result<Vec<Written>, Problem> {
    let mut all = Vec::new();
    for writer in writers {
        let written = writer.stop().await?;
        ran.faults.extend(written.problems.iter().map(|problem| format!("a client: {problem}")));
        ran.longest_ms =
            ran.longest_ms.max(u64::try_from(written.longest.as_millis()).unwrap_or(u64::MAX));
        all.push(written);
    }
    Ok(all)
}

/// Looks at the volume from both hosts, at its home, and at both pools.
pub async fn verify(
    ground: &Ground<'_>,
    name: &VolumeName,
    written: &[Written],
    ran: &mut Ran,
) -> Result<(), Problem> {
    let recorded = ground.volume(name).await?.home;
    let homes = ground.homes(name).await?;
    if homes != [recorded.clone()] {
        ran.faults.push(format!(
            "the controller says that {name} is at {recorded}, the servers {homes:?}"
        ));
    }
    for host in [&ground.home, &ground.cloud] {
        if *host != recorded {
            ground.attach(name, host, &recorded).await?;
        }
        ran.faults.extend(ground.compare(name, host, written).await?);
        ran.faults.extend(ground.check_pool(host).await?);
    }
    Ok(())
}

/// Asks for the move, and waits for the phase. Returns whether it was seen.
async fn begin_move(
    ground: &Ground<'_>,
    name: &VolumeName,
    to: &HostId,
    phase: Phase,
) -> Result<bool, Problem> {
    let path = format!("/v1/volumes/{name}/move");
    let ask = MoveVolume { to: to.clone(), confirmed: false };
    let mut now: VolumeMove = ground.controller.post(&path, &ask).await?;
    let end = Instant::now() + MOVE_MAX;
    while Instant::now() < end {
        let (is_now, is_past) = match now.state {
            VolumeMoveState::Taking => (phase == Phase::Taking, false),
            VolumeMoveState::Redirecting | VolumeMoveState::Filling => {
                (phase == Phase::Filling, phase == Phase::Taking)
            }
            VolumeMoveState::Completed => (phase == Phase::Drop, true),
            _ => (false, true),
        };
        if is_now || is_past {
            return Ok(is_now);
        }
        tokio::time::sleep(LOOK_FOR_PHASE_EVERY).await;
        now = ground.controller.get(&path).await?;
    }
    let what = format!("can't wait any longer for the move of volume {name}");
    Err(Problem::unavailable(what, format!("{now:?}")))
}

/// Waits for the end of a move. Returns what it was, and what is wrong with it.
async fn end_of_move(
    ground: &Ground<'_>,
    name: &VolumeName,
    ends: &Ends,
) -> Result<(String, Vec<String>), Problem> {
    let path = format!("/v1/volumes/{name}/move");
    let mut last = None;
    let ended = until("the move's end", MOVE_MAX, async || {
        let now: VolumeMove = ground.controller.get(&path).await?;
        last = Some(format!("{:?}: {}", now.state, now.problem));
        Ok(now.state.is_final().then_some(now))
    })
    .await;
    let moved = ended.map_err(|problem| {
        let why = format!("{}; the move is {}", problem.why, last.unwrap_or_default());
        Problem::unavailable(problem.what, why)
    })?;
    let home = ground.volume(name).await?.home;
    let mut faults = Vec::new();
    let (ended, expected) = match moved.state {
        VolumeMoveState::Completed => ("completed".to_owned(), &ends.new),
        _ => (format!("undone: {}", moved.problem), &ends.old),
    };
    if moved.state != VolumeMoveState::Completed && moved.problem.is_empty() {
        faults.push("the move does not say why it was undone".to_owned());
    }
    if home != *expected {
        faults.push(format!("{ended}, and the volume is at {home}"));
    }
    Ok((ended, faults))
}

/// Whether the volume's home has failed a flush, after which it takes no further writes.
pub async fn is_poisoned(ground: &Ground<'_>, name: &VolumeName) -> Result<bool, Problem> {
    until(&format!("volume {name} at its home"), STEP_MAX, async || {
        let home = ground.volume(name).await?.home;
        let path = format!("/v1/volumes/{name}");
        let info: VolumeInfo = ground.server(&home)?.get(&path).await?;
        Ok(Some(info.health == VolumeHealth::Poisoned))
    })
    .await
}
