//! `perigee volume move`: starts a volume's move, shows its progress, or cancels it.

use std::time::{Duration, Instant};

use perigee_http::Client;
use perigee_model::job::{Vm, VmVolume};
use perigee_model::units::format_seconds;
use perigee_model::volume_move::{MoveVolume, VolumeMove, VolumeMoveState};
use perigee_model::{HostId, Problem, ProblemKind, VmId, VolumeName};

use crate::commands::asking;
use crate::output::{self, Column, Format};

const LOOK_EVERY: Duration = Duration::from_millis(200);

/// From a migration's end until the VM's job knows of it.
const ARRIVAL_DEADLINE: Duration = Duration::from_secs(60);

const MOVE: &[Column<VolumeMove>] = &[
    ("volume", |m| m.volume.to_string()),
    ("from", |m| m.from.to_string()),
    ("to", |m| m.to.to_string()),
    ("state", |m| output::word(&m.state)),
    ("taken after", |m| milliseconds(m.started_ms, m.taken_ms)),
    ("total", |m| milliseconds(m.started_ms, m.ended_ms)),
    ("cause", |m| m.cause.to_string()),
    ("problem", |m| m.problem.clone()),
];

fn milliseconds(from_ms: u64, to_ms: Option<u64>) -> String {
    to_ms.map_or_else(|| "-".to_owned(), |to_ms| format!("{} ms", to_ms.saturating_sub(from_ms)))
}

/// A move in one line.
pub fn summary(shown: &VolumeMove) -> String {
    format!("{} -> {}: {}", shown.from, shown.to, state_words(shown))
}

/// A volume of a VM in one line.
pub fn of_vm(volume: &VmVolume) -> String {
    let mut line = format!("{} at {}", volume.volume, volume.home);
    if volume.follows {
        line.push_str(", follows");
    }
    match &volume.last_move {
        Some(last) if !last.state.is_final() || !last.problem.is_empty() => {
            format!("{line}; {}", summary(last))
        }
        _ => line,
    }
}

/// Starts the move and shows its progress until it ends. Ctrl-C ends only the display.
///
/// # Errors
/// `Conflict` if the move was called off. The volume is then still at its old host.
pub async fn begin(
    client: &Client,
    volume: &VolumeName,
    ask: &MoveVolume,
    format: Format,
) -> Result<(), Problem> {
    let asked: VolumeMove = client.post(&format!("/v1/volumes/{volume}/move"), ask).await?;
    let goes_on = format!(
        "the move goes on; `perigee volume info {volume}` shows how far it is, `perigee volume move {volume} --cancel` calls it off"
    );
    let watching = watch(client, &asked);
    let Some(ended) = asking::until_interrupted(watching, &goes_on).await? else { return Ok(()) };
    output::one(format, &ended, MOVE)?;
    is_there(&ended)
}

/// Cancels the move, and waits until that is done.
///
/// # Errors
/// `Conflict` if the volume does not move, or has its new home already.
pub async fn cancel(client: &Client, volume: &VolumeName, format: Format) -> Result<(), Problem> {
    let path = format!("/v1/volumes/{volume}/move/cancel");
    let asked: VolumeMove = client.post(&path, &serde_json::json!({})).await?;
    let ended = watch(client, &asked).await?;
    output::one(format, &ended, MOVE)?;
    match ended.state {
        VolumeMoveState::CalledOff => Ok(()),
        _ => Err(Problem::conflict(
            format!("can't cancel the move of volume {volume}"),
            format!("{} had taken it already", ended.to),
        )
        .next(format!("to move it back: perigee volume move {volume} {}", ended.from))),
    }
}

/// Shows the volumes that come after a VM, until all are there.
///
/// # Errors
/// When a volume stays behind.
pub async fn follow(client: &Client, vm: &VmId, to: &HostId) -> Result<(), Problem> {
    let watching = watch_following(client, vm, to);
    asking::until_interrupted(watching, &follow_on(vm)).await.map(drop)
}

fn follow_on(vm: &VmId) -> String {
    format!("the volumes go on following; `perigee vm info {vm}` shows how far they are")
}

async fn get_vm(client: &Client, vm: &VmId) -> Result<Vm, Problem> {
    asking::get(client, &format!("/v1/vms/{vm}"), &follow_on(vm)).await
}

/// Waits until no volume follows the VM any more, and shows where they are.
///
/// # Errors
/// As [`Client::get`].
pub async fn stay(client: &Client, vm: &VmId, to: &HostId) -> Result<(), Problem> {
    let begun = Instant::now();
    loop {
        let shown = match get_vm(client, vm).await {
            Err(problem) if problem.kind == ProblemKind::NotFound => return Ok(()),
            shown => shown?,
        };
        // Its job is about to hear that it has arrived; or it has moved on.
        let is_known = shown.host.as_ref() == Some(to) || begun.elapsed() > ARRIVAL_DEADLINE;
        if is_known && !shown.volumes.iter().any(|volume| volume.follows) {
            shown.volumes.iter().for_each(|volume| output::note(&of_vm(volume)));
            return Ok(());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

async fn watch_following(client: &Client, vm: &VmId, to: &HostId) -> Result<(), Problem> {
    let begun = Instant::now();
    loop {
        // A VM whose job has ended has no volumes any more.
        let shown = match get_vm(client, vm).await {
            Err(problem) if problem.kind == ProblemKind::NotFound => return Ok(()),
            shown => shown?,
        };
        if shown.host.as_ref() != Some(to) {
            // Its job is about to hear that it has arrived; or it has moved on.
            if begun.elapsed() > ARRIVAL_DEADLINE || shown.migration.is_some() {
                output::note(&format!(
                    "VM {vm} is at {}; `perigee vm info {vm}` shows its volumes",
                    output::or_dash(shown.host.as_ref())
                ));
                return Ok(());
            }
        } else if let Some(volume) = shown.volumes.iter().find(|volume| volume.is_moving()) {
            match &volume.last_move {
                Some(last) if !last.state.is_final() => {
                    let ended = watch(client, last).await?;
                    output::note(&format!("{}: {}", ended.volume, summary(&ended)));
                    is_there(&ended)?;
                }
                _ => {}
            }
        } else {
            return Ok(());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn is_there(ended: &VolumeMove) -> Result<(), Problem> {
    let what = format!("can't move volume {} to {}", ended.volume, ended.to);
    match ended.state {
        VolumeMoveState::CalledOff => Err(Problem::conflict(what, &ended.problem)
            .next(format!("the volume is at {}", ended.from))),
        VolumeMoveState::Lost => Err(Problem::conflict(what, &ended.problem)),
        _ => Ok(()),
    }
}

async fn watch(client: &Client, asked: &VolumeMove) -> Result<VolumeMove, Problem> {
    let bar = output::progress_bar(&asked.volume, "{msg}");
    let (mut said, mut most_bytes) = (None, 0);
    loop {
        let path = format!("/v1/volumes/{}/move", asked.volume);
        let goes_on =
            format!("the move goes on; `perigee volume info {}` shows how far it is", asked.volume);
        let now: VolumeMove = match asking::get(client, &path, &goes_on).await {
            Err(problem) if problem.kind == ProblemKind::NotFound => {
                let what = format!("can't follow the move of volume {}", asked.volume);
                return Err(Problem::not_found(what, "the volume was deleted meanwhile"));
            }
            now => now?,
        };
        if now.started_ms != asked.started_ms {
            let what = format!("can't follow the move of volume {}", asked.volume);
            return Err(Problem::conflict(what, "it ended, and another one has begun"));
        }
        let missing_bytes = now.missing_bytes.unwrap_or(0);
        most_bytes = missing_bytes.max(most_bytes);
        bar.set_length(most_bytes);
        bar.set_position(most_bytes - missing_bytes);
        bar.set_message(state_words(&now));
        if bar.is_hidden() && said != Some(now.state) {
            output::note(&format!("{} {}", now.volume, state_words(&now)));
            said = Some(now.state);
        }
        if now.state.is_final() {
            bar.finish_and_clear();
            return Ok(now);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// The state, what is still to be copied, and what stands against it.
fn state_words(shown: &VolumeMove) -> String {
    let mut words = output::word(&shown.state).replace('_', " ");
    if let Some(missing_bytes) = shown.missing_bytes.filter(|_| !shown.state.is_final()) {
        // The whole size counts until it is known which parts hold data.
        words = format!("{words}, up to {} to copy", output::bytes(missing_bytes));
    }
    if let Some(left_ms) = shown.left_ms.filter(|_| !shown.state.is_final()) {
        let left_s = Duration::from_millis(left_ms).as_secs_f64();
        words = format!("{words}, about {} left", format_seconds(left_s));
    }
    if !shown.problem.is_empty() {
        words = format!("{words}; {}", shown.problem);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(state: &str) -> VolumeMove {
        serde_json::from_value(serde_json::json!({
            "volume": "data", "from": "home1", "to": "cloud1", "state": state, "cause": "asked",
            "started_ms": 0, "taken_ms": null, "ended_ms": null, "missing_bytes": 100 << 20,
            "problem": ""
        }))
        .expect("a move")
    }

    #[test]
    fn what_is_still_to_be_copied_is_told_until_the_move_is_over() {
        assert_eq!(summary(&shown("filling")), "home1 -> cloud1: filling, up to 100 MiB to copy");
        let with_rate = VolumeMove { left_ms: Some(12_000), ..shown("filling") };
        assert_eq!(state_words(&with_rate), "filling, up to 100 MiB to copy, about 12 s left");
        assert_eq!(state_words(&shown("called_off")), "called off");
    }

    #[test]
    fn a_move_that_was_called_off_is_an_error_that_says_where_the_volume_is() {
        let mut ended = shown("called_off");
        ended.problem = "cancelled".to_owned();
        let problem = is_there(&ended).expect_err("it is not there");
        assert_eq!(
            (problem.why.as_str(), problem.next.as_str()),
            ("cancelled", "the volume is at home1")
        );
        assert!(is_there(&shown("completed")).is_ok());
    }
}
