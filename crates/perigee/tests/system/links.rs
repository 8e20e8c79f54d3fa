//! Migrations over one thin link.

use perigee_lab::wan::{LinkSettings, Rate};
use perigee_lab::{Definition, LabId};
use perigee_model::job::{Migration, MigrationState};

use super::{ensure, host, until, with_system_of};

/// A job that counts until it is cancelled.
fn counting_job(name: &str) -> String {
    format!(
        "name: {name}\nimage: debian\nmemory: 256MiB\nplacement: {{host: home1, move: never}}\n\
         command: |\n  n=0\n  while true; do\n    n=$((n + 1))\n    \
         echo \"$n/1000000 rounds\" > $PERIGEE_PROGRESS\n    sleep 0.2\n  done\n"
    )
}

/// Over 100 Mbit/s. Both arrive compressed, and the second one begins when the first one has ended.
#[test]
fn two_vms_move_one_after_another_over_a_thin_link() {
    let rate = Rate(Some(100_000_000));
    let thin = LinkSettings { rate, ..LinkSettings::of_rtt_us(4_000) };
    let definition = Definition::new(LabId::random(), Definition::default_sites(), thin);
    with_system_of(definition, async |system| {
        let mut jobs = Vec::new();
        for name in ["first", "second"] {
            jobs.push(system.submit(&counting_job(name)).await?.id);
        }
        for id in &jobs {
            system.progresses(id, 1).await?;
        }
        let probed = system.perigee(&["link", "list", "--probe"]);
        ensure!(probed.status.success(), "{}", String::from_utf8_lossy(&probed.stderr));
        let mut moving = Vec::new();
        for id in &jobs {
            let job = system.job(id).await?;
            moving.push((job.clone(), system.begin_move(&job, "cloud1").await?));
        }
        let (second, migration) = &moving[1];
        let waiting = until("the second move to wait for its link", async || {
            let path = format!("/v1/vms/{}/migrations", second.id);
            let all: Vec<Migration> = system.get(&path).await?;
            let found = all.into_iter().find(|m| m.id == migration.id);
            Ok(found.filter(|m| m.moves_ahead == 1 || m.waited_ms > 0))
        })
        .await?;
        ensure!(waiting.left_ms.is_some() && waiting.predicted_wait_ms.is_some(), "{waiting:?}");
        let mut ended = Vec::new();
        for (job, migration) in &moving {
            let migration = system.migration_ended(&job.id, migration).await?;
            ensure!(migration.state == MigrationState::Completed, "{}", migration.error);
            ensure!(migration.compressed, "{}", migration.mode_reason);
            eprintln!(
                "{}: waited {} ms (predicted {:?}), took {} ms (predicted {:?}), {}",
                migration.id,
                migration.waited_ms,
                migration.predicted_wait_ms,
                migration.total_ms,
                migration.predicted_total_ms,
                migration.mode_reason
            );
            ended.push(migration);
        }
        let turn_ms = ended[1].started_ms + ended[1].waited_ms;
        ensure!(ended[1].waited_ms > 0 && Some(turn_ms) >= ended[0].ended_ms, "{ended:?}");
        for (job, _) in &moving {
            system.progresses(&job.id, 2).await?;
            let now = system.job(&job.id).await?;
            ensure!(now.host == Some(host("cloud1")), "{now:?}");
        }
        Ok(())
    });
}
