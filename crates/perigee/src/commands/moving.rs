//! `perigee vm move`: starts a live migration, shows its progress, or cancels it.

use std::time::Duration;

use perigee_http::Client;
use perigee_model::job::{Migration, MigrationState, MoveVm};
use perigee_model::phases::{Part, PredictedPhases};
use perigee_model::units::{format_rate, format_seconds};
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{MigrationId, Problem, VmId};

use crate::commands::{asking, moving_volumes};
use crate::output::{self, Column, Format};

const LOOK_EVERY: Duration = Duration::from_millis(200);

const MIGRATION: &[Column<Migration>] = &[
    ("migration", |m| m.id.to_string()),
    ("vm", |m| m.vm.to_string()),
    ("from", |m| m.from.to_string()),
    ("to", |m| m.to.to_string()),
    ("state", |m| output::word(&m.state)),
    ("total", |m| format!("{} ms", m.total_ms)),
    ("pause", |m| format!("{} ms", m.downtime_ms)),
    ("copied", copied),
    ("phases", |m| lines(m).join("\n")),
];

fn copied(m: &Migration) -> String {
    let before = if m.compressed { " before compression" } else { "" };
    format!("{}{before}", output::bytes(m.bytes))
}

/// A migration in one line.
pub fn summary(m: &Migration) -> String {
    let mut line = format!(
        "{} {} -> {}: {} ({}); total {} ms, pause {} ms, {}",
        m.id,
        m.from,
        m.to,
        output::word(&m.state),
        m.reason,
        m.total_ms,
        m.downtime_ms,
        copied(m)
    );
    if m.waited_ms > 0 {
        line = format!("{line}; it waited {} for its link", format_ms(m.waited_ms));
    }
    if !m.state.is_final() {
        line = format!("{line}; {}", state_words(m));
    }
    if !m.mode_reason.is_empty() {
        line = format!("{line}; {}", m.mode_reason);
    }
    if !m.error.is_empty() {
        line = format!("{line}; {}", m.error);
    }
    line
}

fn format_ms(ms: u64) -> String {
    format_seconds(Duration::from_millis(ms).as_secs_f64())
}

/// A migration's phases, one per line: the name, the duration, and a note such as the bytes copied. After them, what was
/// predicted beside what was measured.
pub fn lines(migration: &Migration) -> Vec<String> {
    let line = |part: Part| {
        let pause = if part.paused { "  (paused)" } else { "" };
        let ms = Duration::from_micros(part.duration_us).as_secs_f64() * 1e3;
        format!("{:<14} {ms:>9.1} ms{pause}  {}", part.name, part.note).trim_end().to_owned()
    };
    let mut lines: Vec<String> = migration.phases.parts().into_iter().map(line).collect();
    lines.extend(comparison(migration));
    lines
}

/// Prediction and truth, phase by phase, once the migration is over.
fn comparison(migration: &Migration) -> Vec<String> {
    let (predicted, phases) = (migration.predicted_phases, &migration.phases);
    let predicted_of = |of: fn(&PredictedPhases) -> u64| predicted.as_ref().map(of);
    // The last round counts as copying, though it is sent in the pause.
    let remainder_us = phases.pause.map_or(0, |pause| pause.remainder_us);
    let pause_us = phases.pause.map(|pause| pause.total_us().saturating_sub(remainder_us));
    let rows = [
        ("wait", migration.predicted_wait_ms, Some(migration.waited_ms)),
        (
            "prepare",
            predicted_of(|all| all.prepare_ms),
            phases.prepare.map(|prepare| prepare.total_ms()),
        ),
        (
            "copy",
            predicted_of(|all| all.copy_ms),
            phases.pause.map(|_| phases.copy_ms() + remainder_us / 1000),
        ),
        ("pause", predicted_of(|all| all.pause_ms), pause_us.map(|us| us / 1000)),
        ("total", migration.predicted_total_ms, Some(migration.total_ms)),
    ];
    let is_known = migration.predicted_total_ms.is_some();
    if !is_known || migration.state != MigrationState::Completed {
        return Vec::new();
    }
    let cell = |ms: Option<u64>| ms.map_or_else(|| "?".to_owned(), |ms| format!("{ms} ms"));
    let head = format!("{:<14} {:>12} {:>12}", "", "predicted", "measured");
    let row = |(name, predicted_ms, measured_ms)| {
        format!("{name:<14} {:>12} {:>12}", cell(predicted_ms), cell(measured_ms))
    };
    std::iter::once(head).chain(rows.map(row)).collect()
}

/// Starts the migration and shows its progress until it ends. Ctrl-C ends only the display.
///
/// # Errors
/// `Conflict` if the migration was aborted. The VM is then still at its source.
pub async fn begin(
    client: &Client,
    vm: &VmId,
    ask: &MoveVm,
    format: Format,
) -> Result<(), Problem> {
    let migration: Migration = client.post(&format!("/v1/vms/{vm}/move"), ask).await?;
    if !migration.mode_reason.is_empty() {
        output::note(&format!("{}: {}", migration.id, migration.mode_reason));
    }
    let goes_on = format!("the migration goes on; `perigee vm move {vm} --cancel` cancels it");
    let watching = watch(client, &migration.id, vm);
    let Some(ended) = asking::until_interrupted(watching, &goes_on).await? else { return Ok(()) };
    output::one(format, &ended, MIGRATION)?;
    is_there(&ended)?;
    match ask.volumes {
        VolumesOnMove::Stay => Ok(()),
        VolumesOnMove::Follow => moving_volumes::follow(client, vm, &ended.to).await,
    }
}

/// Cancels the running migration, and waits until it has ended. If the VM has arrived and its volumes still follow it,
/// those that have not come stay.
///
/// # Errors
/// `Conflict` if no migration is running and no volume follows, or if the VM arrives while it is cancelled.
pub async fn cancel(client: &Client, vm: &VmId, format: Format) -> Result<(), Problem> {
    let asked: Migration =
        client.post(&format!("/v1/vms/{vm}/move/cancel"), &serde_json::json!({})).await?;
    if asked.state == MigrationState::Completed {
        return moving_volumes::stay(client, vm, &asked.to).await;
    }
    let ended = watch(client, &asked.id, vm).await?;
    output::one(format, &ended, MIGRATION)?;
    match ended.state {
        MigrationState::Completed => {
            let what = format!("can't cancel the migration of VM {vm}");
            let why = format!("the VM has already arrived at {}", ended.to);
            let stay = match ended.volumes {
                VolumesOnMove::Stay => "",
                VolumesOnMove::Follow => "its volumes stay where they are",
            };
            Err(Problem::conflict(what, why).next(stay))
        }
        _ => Ok(()),
    }
}

fn is_there(ended: &Migration) -> Result<(), Problem> {
    if ended.state == MigrationState::Completed {
        return Ok(());
    }
    let what = format!("can't move VM {} to {}", ended.vm, ended.to);
    Err(Problem::conflict(what, &ended.error).next(format!("the VM is at {}", ended.from)))
}

async fn watch(client: &Client, id: &MigrationId, vm: &VmId) -> Result<Migration, Problem> {
    let bar = output::progress_bar(id, "{msg}");
    let mut said = None;
    loop {
        let path = format!("/v1/vms/{vm}/migrations");
        let goes_on = format!("the migration goes on; `perigee vm info {vm}` shows how far it is");
        let all: Vec<Migration> = asking::get(client, &path, &goes_on).await?;
        let migration = all.into_iter().find(|m| m.id == *id).ok_or_else(|| {
            let what = format!("can't follow migration {id}");
            Problem::not_found(what, "its job was deleted meanwhile")
        })?;
        bar.set_length(migration.bytes + migration.remaining_bytes);
        bar.set_position(migration.bytes);
        bar.set_message(state_words(&migration));
        let state = (migration.state, migration.moves_ahead);
        if bar.is_hidden() && said != Some(state) {
            output::note(&format!("{id} {}", state_words(&migration)));
            said = Some(state);
        }
        if migration.state.is_final() {
            bar.finish_and_clear();
            return Ok(migration);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// The state and the estimated time left, with the wait for other moves.
fn state_words(migration: &Migration) -> String {
    let mut words = output::word(&migration.state);
    match migration.moves_ahead {
        0 => {}
        1 => words.push_str(", waits for 1 other move over the same link"),
        several => {
            words.push_str(&format!(", waits for {several} other moves over the same link"));
        }
    }
    let is_copying = migration.state == MigrationState::Copying && migration.rate_bytes_per_s > 0;
    if is_copying {
        words.push_str(&format!(", {} to send", output::bytes(migration.remaining_bytes)));
    }
    match migration.left_ms {
        Some(left_ms) => words.push_str(&format!(", about {} left", format_ms(left_ms))),
        None if is_copying => {
            words.push_str(&format!(
                "; at this rate it does not end in time: the guest changes {}, and {} are sent",
                format_rate(migration.dirty_bytes_per_s),
                format_rate(migration.rate_bytes_per_s)
            ));
        }
        None => {}
    }
    words
}

#[cfg(test)]
mod tests {
    use perigee_model::phases::{Pause, Phases, Prepare};

    use super::*;

    fn migration() -> Migration {
        let (id, vm) = ("q-0001-m1".parse().expect("a name"), "q-0001".parse().expect("a name"));
        let hosts = ["home1", "cloud1"].map(|host| host.parse().expect("a name"));
        let state = MigrationState::Copying;
        Migration { state, ..Migration::new(id, vm, hosts, "asked".to_owned(), 0) }
    }

    #[test]
    fn the_time_left_is_told_once_the_rate_is_known() {
        let mut migration = migration();
        assert_eq!(state_words(&migration), "copying");
        (migration.remaining_bytes, migration.rate_bytes_per_s) = (100 << 20, 50 << 20);
        migration.left_ms = Some(2000);
        assert_eq!(state_words(&migration), "copying, 100 MiB to send, about 2.0 s left");
        migration.left_ms = None;
        assert!(state_words(&migration).contains("does not end in time: the guest changes"));
    }

    #[test]
    fn a_migration_that_waits_for_its_link_says_so() {
        let state = MigrationState::Preparing;
        let waiting = Migration { state, moves_ahead: 2, left_ms: Some(70_000), ..migration() };
        let words = "preparing, waits for 2 other moves over the same link, about 70 s left";
        assert_eq!(state_words(&waiting), words);
    }

    #[test]
    fn every_phase_that_was_seen_has_a_line() {
        let mut migration = migration();
        migration.phases = Phases {
            prepare: Some(Prepare { qemu_ms: 700, ..Prepare::default() }),
            pause: Some(Pause { epochs_us: 16_400, ..Pause::default() }),
            ..Phases::default()
        };
        let lines = lines(&migration);
        assert!(
            lines.iter().any(|line| line.starts_with("start QEMU") && line.ends_with("700.0 ms"))
        );
        assert!(lines.iter().any(|line| line.contains("16.4 ms  (paused)")), "{lines:?}");
    }

    #[test]
    fn what_was_predicted_stands_beside_what_was_measured() {
        let mut migration = migration();
        migration.state = MigrationState::Completed;
        assert_eq!(lines(&migration), [""; 0], "nothing was predicted");
        migration.predicted_phases =
            Some(PredictedPhases { prepare_ms: 800, copy_ms: 1500, pause_ms: 60 });
        (migration.predicted_total_ms, migration.total_ms) = (Some(2360), 2500);
        migration.phases = Phases {
            prepare: Some(Prepare { qemu_ms: 700, ..Prepare::default() }),
            pause: Some(Pause { epochs_us: 16_400, remainder_us: 9000, ..Pause::default() }),
            ..Phases::default()
        };
        let lines = lines(&migration);
        let row = |name: &str| {
            let row = lines.iter().rfind(|line| line.starts_with(name)).expect("a row");
            row.split_whitespace().skip(1).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(row("wait"), "? 0 ms");
        assert_eq!(row("prepare"), "800 ms 700 ms");
        assert_eq!(row("copy"), "1500 ms 9 ms");
        assert_eq!(row("pause"), "60 ms 16 ms");
        assert_eq!(row("total"), "2360 ms 2500 ms");
    }

    #[test]
    fn an_aborted_migration_is_an_error_that_says_where_the_vm_is() {
        let mut migration = migration();
        (migration.state, migration.error) = (MigrationState::Aborted, "cancelled".to_owned());
        let problem = is_there(&migration).expect_err("it is not there");
        assert_eq!(problem.next, "the VM is at home1");
    }
}
