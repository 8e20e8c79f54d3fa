//! A cluster whose daemons get a new version one after the other, go back, and get the new version again, under a VM that never stops.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use perigee_lab::{Definition, LabId};
use perigee_model::JobId;
use perigee_model::job::{Host, HostState, Job, JobState, MigrationState};
use perigee_model::upgrade::Upgrade;

use super::{Checked, System, ensure, host, until, with_system_and, writer_job};

const HOSTS: [&str; 2] = ["home1", "cloud1"];
const NEW: &str = env!("CARGO_BIN_EXE_perigee");

/// The version that each daemon of the lab has: a link with the name `controller`, or of the host.
struct Versions {
    dir: PathBuf,
    old: PathBuf,
}

impl Versions {
    fn all_old(dir: &Path) -> Self {
        let old = std::env::var("PERIGEE_TEST_OLD")
            .expect("PERIGEE_TEST_OLD names the older perigee; make test-upgrade sets it");
        let versions = Self { dir: dir.to_owned(), old: old.into() };
        for daemon in ["controller"].iter().chain(&HOSTS) {
            versions.set(daemon, &versions.old);
        }
        let at = dir.display();
        let hosts = HOSTS.map(|name| format!("*/hosts/{name}/*) exec {at}/{name} \"$@\" ;;\n"));
        let script = format!(
            "#!/bin/sh\ncase \"$*\" in\n\"controller \"*) exec {at}/controller \"$@\" ;;\n{}*) exec {NEW} \"$@\" ;;\nesac\n",
            hosts.concat()
        );
        std::fs::write(versions.program(), script).expect("write");
        let mode = PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(versions.program(), mode).expect("a mode");
        versions
    }

    /// Runs the version that its daemon has.
    fn program(&self) -> PathBuf {
        self.dir.join("perigee")
    }

    fn set(&self, daemon: &str, program: &Path) {
        let (link, next) = (self.dir.join(daemon), self.dir.join("next"));
        symlink(program, &next).expect("a link");
        std::fs::rename(next, link).expect("a new name");
    }
}

/// The daemons, and a job that writes files all the time and reads them at its end.
struct Cluster {
    system: System,
    versions: Versions,
    writer: JobId,
}

impl Cluster {
    async fn controller_becomes(&self, program: &Path) -> Checked<()> {
        self.versions.set("controller", program);
        self.system.kill_daemon("ctl", None).await?;
        self.hosts_are_up().await?;
        self.goes_on().await
    }

    /// As the package has it: the volume server first, and its VMs go on.
    async fn host_becomes(&self, name: &str, program: &Path) -> Checked<()> {
        self.versions.set(name, program);
        for daemon in ["volume", "agent"] {
            self.system.kill_daemon(daemon, Some(name)).await?;
        }
        self.hosts_are_up().await?;
        self.goes_on().await
    }

    async fn hosts_are_up(&self) -> Checked<()> {
        until("both hosts to be up", async || {
            let hosts: Vec<Host> = self.system.get("/v1/hosts").await?;
            let up = |one: &Host| one.state == HostState::Up && one.cpus > 0;
            Ok((hosts.len() == HOSTS.len() && hosts.iter().all(up)).then_some(()))
        })
        .await
    }

    /// The writer writes, and other jobs run at each of these hosts.
    async fn works_at(&self, hosts: &[&str]) -> Checked<()> {
        for name in hosts {
            let job = self.system.submit(&short_job(name)).await?;
            let job = self.system.ended(&job.id).await?;
            ensure!(job.state == JobState::Succeeded, "{:?}: {}", job.state, job.reason);
            let log = self.system.log(&job.id).await?;
            ensure!(log.iter().any(|line| line == "hello"), "{log:?}");
        }
        self.goes_on().await
    }

    async fn goes_on(&self) -> Checked<()> {
        self.system.progresses(&self.writer, 2).await
    }

    async fn writer(&self) -> Checked<Job> {
        self.system.job(&self.writer).await
    }

    /// The writer's VM, and the volume that it writes, go to another host, and the writer goes on.
    async fn moves_to(&self, name: &str) -> Checked<()> {
        let moved = self.system.begin_move(&self.writer().await?, name).await?;
        let moved = self.system.migration_ended(&self.writer, &moved).await?;
        ensure!(moved.state == MigrationState::Completed, "{moved:?}");
        self.goes_on().await?;
        self.system.does(&["volume", "move", "data", name])?;
        self.goes_on().await
    }

    async fn upgrade(&self) -> Checked<Upgrade> {
        self.system.get("/v1/upgrade").await
    }

    /// The upgrade can't be ended, because of these hosts.
    async fn is_blocked_by(&self, hosts: &[&str]) -> Checked<()> {
        let blocks = self.upgrade().await?.blocks;
        for name in HOSTS {
            let named = blocks.iter().any(|why| why.starts_with(&format!("host {name}:")));
            ensure!(named == hosts.contains(&name), "{name}: {blocks:?}");
        }
        let refused = self.system.perigee(&["upgrade", "finish"]);
        ensure!(refused.status.success() == hosts.is_empty(), "{hosts:?}: {refused:?}");
        Ok(())
    }

    /// With a host that is off no request fails, while versions differ.
    async fn works_while_off(&self, off: &str, on: &str) -> Checked<()> {
        for daemon in ["volume", "agent"] {
            self.system.lab.keep_away(&host(off), daemon, true)?;
            super::kill_9(self.system.lab.host_pid(&host(off), daemon)?);
        }
        until("the host to be away", async || {
            let off: Host = self.system.get(&format!("/v1/hosts/{off}")).await?;
            Ok((off.state == HostState::Unreachable).then_some(()))
        })
        .await?;
        for list in ["hosts", "jobs", "vms", "volumes", "images", "networks", "backups"] {
            let _: serde_json::Value = self.system.get(&format!("/v1/{list}")).await?;
        }
        self.works_at(&[on]).await?;
        self.is_blocked_by(&[off]).await?;
        for daemon in ["volume", "agent"] {
            self.system.lab.keep_away(&host(off), daemon, false)?;
        }
        self.hosts_are_up().await
    }
}

fn short_job(at: &str) -> String {
    format!(
        "name: short\nimage: debian\nmemory: 256MiB\ncommand: [echo, hello]\nplacement:\n  host: {at}\n  move: never\n"
    )
}

#[test]
#[ignore = "an older version has to be built first; `make test-upgrade` runs it"]
fn a_cluster_is_upgraded_one_daemon_after_the_other_and_goes_back() {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).expect("a mode");
    let versions = Versions::all_old(dir.path());
    let program = versions.program();
    let mut definition = Definition::default_demo(LabId::random(), 2);
    for site in &mut definition.sites {
        site.hosts.retain(|name| HOSTS.contains(&name.as_str()));
    }
    with_system_and(definition, program, async |system| {
        system.volume("data", "home1", 64 << 20).await?;
        let writer = system.submit(&writer_job("home1")).await?.id;
        is_upgraded(&Cluster { system, versions, writer }).await
    });
}

async fn is_upgraded(cluster: &Cluster) -> Checked<()> {
    let (new, old) = (Path::new(NEW), cluster.versions.old.clone());
    cluster.works_at(&HOSTS).await?;

    cluster.controller_becomes(new).await?;
    cluster.is_blocked_by(&HOSTS).await?;
    cluster.works_at(&HOSTS).await?;
    cluster.host_becomes("home1", new).await?;
    cluster.is_blocked_by(&["cloud1"]).await?;
    cluster.works_at(&HOSTS).await?;
    cluster.moves_to("cloud1").await?;
    cluster.moves_to("home1").await?;
    cluster.works_while_off("cloud1", "home1").await?;

    cluster.host_becomes("home1", &old).await?;
    cluster.controller_becomes(&old).await?;
    cluster.works_at(&HOSTS).await?;
    for name in HOSTS {
        cluster.host_becomes(name, new).await?;
    }
    // New hosts with an old controller.
    cluster.works_at(&HOSTS).await?;
    cluster.moves_to("cloud1").await?;
    cluster.controller_becomes(new).await?;
    cluster.is_blocked_by(&[]).await?;
    let done = cluster.upgrade().await?;
    ensure!(done.held_back_level.is_none(), "{done:?}");
    cluster.works_at(&HOSTS).await?;

    cluster.system.stop_writer(&cluster.writer).await?;
    let ended = cluster.system.ended(&cluster.writer).await?;
    ensure!(ended.state == JobState::Succeeded, "{:?}: {}", ended.state, ended.reason);
    Ok(())
}
