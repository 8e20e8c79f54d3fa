//! A lab's directory: the lab's definition, sockets, processes and logs.
//!
//! ```text
//! BASE/ID/lab.json          definition and program; written first, never changed
//!         supervisor.json   the supervisor's process
//!         wan.json          the current settings of the links between the sites
//!         processes.json    the running daemons, by name: `HOST/agent`, `HOST/volume`, `ctl`, `relay`
//!         failed.json       the problem because of which the supervisor gave up
//!         provider          the lab as a provider of rented hosts
//!         providers.yaml    the same for the lab's controller
//!         rented/           its instances
//!         supervisor.log    net/ (relay)   ctl/ (controller)   hosts/HOST/ (pool, agent, sockets, logs)
//! ```
//!
//! Other users may pass through a lab's directory, because QEMU runs as other users, but they can list and read
//! nothing there. Nothing in it is read unless it is certain that only this user and root can have written it.

use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::io::Write;
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use perigee_http::Authority;
use perigee_http::ours;
use perigee_model::units::format_time;
use perigee_model::{HostId, Problem};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::definition::{Definition, LabId};
use crate::process::Process;
use crate::wan::Wan;

/// Only root can make it: a lab starts the program that its `lab.json` names.
pub const DEFAULT_BASE: &str = "/var/lib/perigee-lab";

/// The kernel's limit for the length of a unix socket's path, without the final zero byte.
const SOCKET_PATH_MAX: usize = 107;

/// The mode of a directory that QEMU's users pass through.
const PASSABLE: u32 = 0o711;
const CLOSED: u32 = 0o700;
/// What EC2 takes in most regions, so that a lab's decisions are as they would be there.
const SNAPSHOT_PRICE: &str = "$0.05/GiB-month";

/// As `2026-11-29`.
fn today() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
    format_time(now_ms).chars().take("2026-11-29".len()).collect()
}

/// What a lab is, as its directory keeps it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LabFile {
    pub definition: Definition,
    /// The `perigee` binary of the supervisor and the daemons.
    pub program: PathBuf,
}

/// The directory of one lab: whoever has its path can see and remove the lab.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabDir(PathBuf);

impl LabDir {
    /// The directory need not exist.
    pub fn new(base: &Path, id: &LabId) -> Self {
        Self(base.join(id.to_string()))
    }

    /// `BASE/ID`.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The host's certificate and key.
    pub fn identity(&self, host: &HostId) -> PathBuf {
        self.host(host).join("identity")
    }

    /// The controller's own directory, which is private.
    pub fn controller_state(&self) -> PathBuf {
        self.0.join("ctl/state")
    }

    /// Makes the cluster's authority and enrols all hosts, as `perigee host join` does it on a real one.
    fn enrol_hosts(&self, definition: &Definition) -> Result<(), Problem> {
        if definition.insecure {
            return Ok(());
        }
        let authority = Authority::open(&self.controller_state().join("authority"))?;
        for (_, host) in definition.hosts() {
            let addresses = definition.host_address(host).map(IpAddr::from);
            let addresses: Vec<_> = addresses.into_iter().collect();
            authority.enrol(host, &addresses)?.save(&self.identity(host))?;
        }
        Ok(())
    }

    /// Makes the directory. The process that makes it owns the id.
    ///
    /// # Errors
    /// `Conflict` when a lab with this id exists, `Invalid` when the base's path is too long.
    pub fn create(&self, file: &LabFile) -> Result<(), Problem> {
        let what = || format!("can't make {}", self.0.display());
        for host in file.definition.hosts().map(|(_, h)| h) {
            let length = self.host(host).join("volume-control.sock").as_os_str().len();
            if length > SOCKET_PATH_MAX {
                return Err(Problem::invalid(
                    what(),
                    format!("a socket's path there would have {length} bytes; the limit is {SOCKET_PATH_MAX}"),
                )
                .next("choose a base directory with a shorter path"));
            }
        }
        if let Some(base) = self.0.parent() {
            let made = DirBuilder::new().recursive(true).mode(PASSABLE).create(base);
            made.map_err(|e| Problem::internal(what(), e))?;
            ours::check(base)
                .map_err(|problem| problem.next("choose another base directory with --base"))?;
        }
        DirBuilder::new().mode(PASSABLE).create(&self.0).map_err(|e| match e.kind() {
            std::io::ErrorKind::AlreadyExists => {
                Problem::conflict(what(), "a lab with this id exists already")
                    .next("choose another id, or take it down with `perigee lab down`")
            }
            _ => Problem::internal(what(), e),
        })?;
        for dir in ["net", "ctl"] {
            make_dir(&self.0.join(dir), CLOSED)?;
        }
        make_dir(&self.0.join("hosts"), PASSABLE)?;
        for host in file.definition.hosts().map(|(_, h)| h) {
            make_dir(&self.host(host), PASSABLE)?;
            make_dir(&self.host(host).join("pool"), CLOSED)?;
            make_dir(&self.host(host).join("agent"), PASSABLE)?;
            self.boot_anew(host)?;
        }
        self.enrol_hosts(&file.definition)?;
        self.write_provider(file)?;
        self.write("lab.json", file)
    }

    /// The program of the lab as a provider of rented hosts. It takes only a verb, as each such program.
    pub fn provider(&self) -> PathBuf {
        self.0.join("provider")
    }

    /// The file that names this provider, `lab`, for the lab's controller.
    pub fn providers(&self) -> PathBuf {
        self.0.join("providers.yaml")
    }

    fn write_provider(&self, file: &LabFile) -> Result<(), Problem> {
        let path = self.provider();
        let quoted =
            |path: &Path| format!("'{}'", path.display().to_string().replace('\'', "'\\''"));
        let (program, id) = (quoted(&file.program), &file.definition.id);
        let base = quoted(self.0.parent().unwrap_or(Path::new("/")));
        let text =
            format!("#!/bin/sh\nexec {program} lab provider --lab {id} --base {base} \"$@\"\n");
        let mut options = std::fs::File::options();
        let file = options.create_new(true).write(true).mode(CLOSED).open(&path);
        file.and_then(|mut file| file.write_all(text.as_bytes()))
            .map_err(|e| Problem::internal(format!("can't write {}", path.display()), e))?;
        // A text of JSON is one of YAML.
        let providers = self.providers();
        let program = std::path::absolute(&path)
            .map_err(|e| Problem::internal(format!("can't name {}", path.display()), e))?;
        let snapshots = serde_json::json!({"price": SNAPSHOT_PRICE, "as-of": today()});
        let lab = serde_json::json!({"program": [program], "snapshots": snapshots});
        let named = serde_json::json!({"lab": lab}).to_string();
        write_private(&providers, named.as_bytes())
            .map_err(|e| Problem::internal(format!("can't write {}", providers.display()), e))
    }

    /// # Errors
    /// `NotFound` if there is no such lab.
    pub fn load(&self) -> Result<LabFile, Problem> {
        self.read("lab.json")?.ok_or_else(|| {
            let name = self.0.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Problem::not_found(
                format!("can't open lab {name}"),
                format!("{} has no lab.json", self.0.display()),
            )
            .next("`perigee lab list` shows the labs")
        })
    }

    /// The hosts share a kernel. Whoever changes this file and kills a host's processes has rebooted it.
    pub fn boot_id(&self, host: &HostId) -> PathBuf {
        self.host(host).join("boot-id")
    }

    /// Gives a host a boot id that it did not have before.
    pub fn boot_anew(&self, host: &HostId) -> Result<(), Problem> {
        write_private(&self.boot_id(host), format!("{}\n", uuid::Uuid::new_v4()).as_bytes())
            .map_err(|e| Problem::internal(format!("can't change the boot id of {host}"), e))
    }

    /// A daemon that has this file is not started again.
    fn kept_away(&self, daemon: &str) -> PathBuf {
        self.0.join("away").join(daemon.replace('/', "-"))
    }

    /// Whether a daemon was ended and must not be started again.
    pub fn is_kept_away(&self, daemon: &str) -> bool {
        self.kept_away(daemon).exists()
    }

    /// From now on a daemon is not started again when it has ended, or is.
    ///
    /// # Errors
    /// When the lab's directory can't be written.
    pub fn keep_away(&self, daemon: &str, away: bool) -> Result<(), Problem> {
        let path = self.kept_away(daemon);
        let done = match away {
            true => std::fs::create_dir_all(self.0.join("away"))
                .and_then(|()| std::fs::write(&path, daemon)),
            false => std::fs::remove_file(&path),
        };
        done.map_err(|e| Problem::internal(format!("can't change {}", path.display()), e))
    }

    /// The process that keeps the daemons alive; `None` if the lab does not run, or not yet.
    pub fn supervisor(&self) -> Option<Process> {
        self.read("supervisor.json").ok().flatten()
    }

    /// So that `down` finds it.
    pub fn set_supervisor(&self, process: Process) -> Result<(), Problem> {
        self.write("supervisor.json", &process)
    }

    /// The daemons by name, as they were last started.
    pub fn processes(&self) -> Result<BTreeMap<String, Process>, Problem> {
        Ok(self.read("processes.json")?.unwrap_or_default())
    }

    /// Recorded before a daemon does anything, so that none is left behind after a crash.
    pub fn set_processes(&self, processes: &BTreeMap<String, Process>) -> Result<(), Problem> {
        self.write("processes.json", processes)
    }

    /// Why the lab did not come up.
    pub fn failure(&self) -> Option<Problem> {
        self.read("failed.json").ok().flatten()
    }

    /// For whoever waits for the lab.
    pub fn set_failure(&self, problem: &Problem) -> Result<(), Problem> {
        self.write("failed.json", problem)
    }

    /// The unix socket of the controller's API.
    pub fn controller_socket(&self) -> PathBuf {
        self.0.join("ctl/api.sock")
    }

    /// The directory of a host: its pool, its VMs, its certificates.
    pub fn host(&self, host: &HostId) -> PathBuf {
        self.0.join("hosts").join(host.as_str())
    }

    /// The NBD socket of a host's volume server.
    pub fn volume_socket(&self, host: &HostId) -> PathBuf {
        self.host(host).join("volume.sock")
    }

    /// The socket on which the WAN's relay tells its state.
    pub fn relay_socket(&self) -> PathBuf {
        self.0.join("net/relay.sock")
    }

    /// The links as they were last set.
    ///
    /// # Errors
    /// `NotFound` while the lab is starting.
    pub fn wan(&self) -> Result<Wan, Problem> {
        self.read("wan.json")?.ok_or_else(|| {
            let why = format!("{} has no wan.json", self.0.display());
            Problem::not_found("can't read the lab's WAN", why)
                .next("wait until the lab is up; `perigee lab list` shows the labs")
        })
    }

    /// So that other processes show the links as they are.
    pub fn set_wan(&self, wan: &Wan) -> Result<(), Problem> {
        self.write("wan.json", wan)
    }

    /// What a file of the directory has; `None` if there is no such file.
    pub(crate) fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, Problem> {
        let path = self.0.join(name);
        if self.0.exists() {
            ours::check(&self.0)?;
        }
        match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map(Some)
                .map_err(|e| Problem::internal(format!("can't read {}", path.display()), e)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Problem::internal(format!("can't read {}", path.display()), e)),
        }
    }

    /// Replaces the file atomically: readers see the old text or the new one.
    pub(crate) fn write<T: Serialize>(&self, name: &str, value: &T) -> Result<(), Problem> {
        let path = self.0.join(name);
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = path.with_file_name(format!(".{file}.new"));
        let fail = |e: &dyn std::fmt::Display| {
            Problem::internal(format!("can't write {}", path.display()), e)
        };
        let text = serde_json::to_vec_pretty(value).map_err(|e| fail(&e))?;
        write_private(&temporary, &text).map_err(|e| fail(&e))?;
        std::fs::rename(&temporary, &path).map_err(|e| fail(&e))
    }
}

/// Replaces a file's content. Only this user can read it.
fn write_private(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let mut options = std::fs::File::options();
    options.create(true).truncate(true).write(true).mode(0o600).open(path)?.write_all(content)
}

/// A log to which a program appends. Only this user can read it.
pub fn open_log(path: &Path) -> Result<std::fs::File, Problem> {
    let opened = std::fs::File::options().append(true).create(true).mode(0o600).open(path);
    opened.map_err(|e| Problem::internal(format!("can't open {}", path.display()), e))
}

fn make_dir(path: &Path, mode: u32) -> Result<(), Problem> {
    DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(path)
        .map_err(|e| Problem::internal(format!("can't make {}", path.display()), e))
}

/// The ids of the labs below a base directory, including labs that are not complete.
pub fn ids(base: &Path) -> Result<Vec<LabId>, Problem> {
    let entries = match std::fs::read_dir(base) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Problem::internal(format!("can't list {}", base.display()), e)),
    };
    let mut ids: Vec<LabId> =
        entries.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect();
    ids.sort();
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(id: &str) -> LabFile {
        let definition = Definition::default_demo(id.parse().expect("an id"), 16);
        LabFile { definition, program: PathBuf::from("/bin/true") }
    }

    #[test]
    fn an_id_can_be_taken_once() {
        let base = tempfile::tempdir().expect("a directory");
        let file = file("00aa");
        let dir = LabDir::new(base.path(), &file.definition.id);
        dir.create(&file).expect("the first");
        let refused = dir.create(&file).expect_err("the second");
        assert_eq!(refused.kind, perigee_model::ProblemKind::Conflict);
        assert_eq!(dir.load().expect("lab.json").definition, file.definition);
        assert_eq!(ids(base.path()).expect("a list"), [file.definition.id]);
    }

    /// The lab's program is started by whoever opens the lab.
    #[test]
    fn a_lab_that_another_user_has_made_is_not_opened() {
        if !nix::unistd::Uid::effective().is_root() {
            return;
        }
        let base = tempfile::tempdir().expect("a directory");
        let file = file("00aa");
        let dir = LabDir::new(base.path(), &file.definition.id);
        dir.create(&file).expect("a lab");
        let give = |path: &Path, uid: u32| {
            nix::unistd::chown(path, Some(uid.into()), None).expect("root may");
        };
        give(dir.path(), 4242);
        let refused = dir.load().expect_err("of another user");
        assert!(refused.why.contains("user 4242"), "{refused}");
        give(dir.path(), 0);
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(base.path(), open).expect("a mode");
        let refused = dir.load().expect_err("in a directory that everybody can write");
        assert!(refused.why.contains("other users can write"), "{refused}");
    }

    #[test]
    fn a_base_too_long_for_sockets_is_refused() {
        let base = tempfile::tempdir().expect("a directory");
        let long = base.path().join("x".repeat(90));
        let file = file("00aa");
        let refused = LabDir::new(&long, &file.definition.id).create(&file).expect_err("too long");
        assert_eq!(refused.kind, perigee_model::ProblemKind::Invalid);
    }

    #[test]
    fn a_lab_that_is_not_there_is_not_found() {
        let base = tempfile::tempdir().expect("a directory");
        let dir = LabDir::new(base.path(), &"00ab".parse().expect("an id"));
        assert_eq!(dir.load().expect_err("none").kind, perigee_model::ProblemKind::NotFound);
    }
}
