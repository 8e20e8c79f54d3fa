//! A host that is drained under load.

use perigee_model::job::{ClusterVolume, JobState};

use super::{ensure, host, until, with_system, writer_job};

const MIB: u64 = 1 << 20;

/// The controller is killed while the host is drained. A guest that sees one error ends, and so does one that reads what it has not written.
#[test]
fn a_host_is_drained_under_two_writers_without_an_error_and_used_again() {
    with_system(async |system| {
        let mut jobs = Vec::new();
        for name in ["data", "more"] {
            system.volume(name, "home1", 64 * MIB).await?;
            let of_its_own = format!("volume: {name}");
            let file = writer_job("home1").replace("volume: data", &of_its_own);
            let file = file.replace("move: never", "move: auto");
            jobs.push((name, system.submit(&file).await?.id));
        }
        for (_, id) in &jobs {
            system.progresses(id, 1).await?;
        }
        let said = |output: &std::process::Output| {
            let text = [&output.stdout, &output.stderr].map(|part| String::from_utf8_lossy(part));
            text.join("\n")
        };
        let would = system.perigee(&["host", "drain", "home1", "--dry-run"]);
        eprintln!("{}", said(&would));
        ensure!(would.status.success(), "{}", said(&would));
        let listed = system.perigee(&["host", "list"]);
        ensure!(!said(&listed).contains("drain"), "{}", said(&listed));
        let begun = std::time::Instant::now();
        let asked = system.perigee(&["host", "drain", "home1"]);
        ensure!(asked.status.success(), "{}", said(&asked));
        system.kill_daemon("controller", None).await?;
        until("the controller to answer", async || {
            system.get::<Vec<ClusterVolume>>("/v1/volumes").await.map(Some)
        })
        .await?;
        let drained = system.perigee(&["host", "drain", "home1", "--wait"]);
        eprintln!("{}after {:.1} s", said(&drained), begun.elapsed().as_secs_f64());
        ensure!(drained.status.success(), "{}", said(&drained));
        let listed = system.perigee(&["host", "list"]);
        ensure!(said(&listed).contains("up, drained"), "{}", said(&listed));
        let volumes: Vec<ClusterVolume> = system.get("/v1/volumes").await?;
        let left = volumes.iter().find(|volume| volume.home == host("home1"));
        ensure!(left.is_none(), "{left:?}");
        let refused =
            system.perigee(&["volume", "create", "new", "--size", "1MiB", "--host", "home1"]);
        ensure!(said(&refused).contains("perigee host undrain home1"), "{}", said(&refused));
        for (_, id) in &jobs {
            system.progresses(id, 2).await?;
        }
        // Once the host is not drained any more, a VM that lacks a CPU may go back.
        for (_, id) in &jobs {
            let job = system.job(id).await?;
            let at = job.host.as_ref().filter(|at| **at != host("home1"));
            ensure!(at.is_some(), "{id} is at {:?}", job.host);
            let at = at.map_or("", |at| at.as_str());
            let pauses: Vec<u64> = job.migrations.iter().map(|moved| moved.downtime_ms).collect();
            eprintln!("{id} is at {at}, pauses in ms: {pauses:?}");
            system.stop_writer(&job, at).await?;
            let ended = system.ended(id).await?;
            let log = system.log(id).await?;
            ensure!(ended.state == JobState::Succeeded, "{} {log:?}", ended.reason);
            ensure!(log.iter().any(|line| line.starts_with("checked ")), "{log:?}");
        }
        let undrained = system.perigee(&["host", "undrain", "home1"]);
        ensure!(undrained.status.success(), "{}", said(&undrained));
        system.volume("new", "home1", MIB).await?;
        until("nothing of the jobs to be left at home1", async || {
            let volumes: Vec<ClusterVolume> = system.get("/v1/volumes").await?;
            let mut at_home1 = volumes.iter().filter(|volume| volume.home == host("home1"));
            Ok(at_home1.all(|volume| volume.name.as_str() == "new").then_some(()))
        })
        .await
    });
}
