//! What is kept of the instances of a lab.
//!
//! ```text
//! BASE/ID/rented/lock              held by whoever changes an instance
//!                refuse            if a test makes it: its first word is the error of each `create`, the rest says why
//!                i-….json          the record
//!                i-…/              the root of the instance: what it runs keeps its files there
//!                i-…/user-data     what it was given
//!                i-…/console.log   what that has printed
//!                i-…/boot-id       the id of its boot
//!                i-…/bin/          programs that power it off, and `perigee`
//!                i-…/notice        if a test makes it: the provider takes the instance back at this time, in seconds since 1970
//!                i-…/power-off     it has powered itself off
//!                i-…/disk/         the disk of its pool, if it has one
//!                snap-….json       the record of a snapshot of such a disk
//!                snap-…/           its content
//! ```
//!
//! Only this user can read what is in them, for the user-data have a token.

use std::fs::{DirBuilder, File, Permissions};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use perigee_model::Problem;
use perigee_model::rental::{Instance, InstanceState, ListedInstance, NewInstance};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::process::{Process, wait_until};
use crate::state::LabDir;

/// How long to wait while another process changes an instance.
const LOCK_DEADLINE: Duration = Duration::from_secs(60);
/// Records that are kept. The oldest of those that are gone are removed.
const RECORDS_MAX: usize = 1000;
const PASSABLE: u32 = 0o711;

/// An instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub id: String,
    pub rental: String,
    pub cluster: String,
    pub kind: String,
    pub zone: String,
    pub spot: bool,
    /// The last number of its address.
    pub number: u8,
    pub address: String,
    pub state: InstanceState,
    pub asked_unix_ms: u64,
    /// When it began to run what it was given.
    pub started_unix_s: Option<u64>,
    /// The process that runs in it; `None` until it was started.
    pub machine: Option<Process>,
}

impl Record {
    pub fn new(new: &NewInstance, (number, address): (u8, String), asked_unix_ms: u64) -> Self {
        let random = uuid::Uuid::new_v4().simple().to_string();
        Self {
            id: format!("i-{}", &random[..8]),
            rental: new.rental.clone(),
            cluster: new.cluster.clone(),
            kind: new.kind.clone(),
            zone: new.zone.clone(),
            spot: new.spot,
            number,
            address,
            state: InstanceState::Pending,
            asked_unix_ms,
            started_unix_s: None,
            machine: None,
        }
    }

    /// As the provider tells it.
    pub fn told(&self) -> Instance {
        Instance {
            id: self.id.clone(),
            rental: Some(self.rental.clone()),
            state: self.state,
            kind: self.kind.clone(),
            zone: self.zone.clone(),
            spot: self.spot,
            address: self.is_there().then(|| self.address.clone()),
            started_unix_s: self.started_unix_s,
        }
    }

    /// The same in a list.
    pub fn listed(&self) -> ListedInstance {
        ListedInstance { cluster: self.cluster.clone(), instance: self.told() }
    }

    pub fn is_there(&self) -> bool {
        self.state != InstanceState::Gone
    }
}

/// The instances of one lab.
#[derive(Debug, Clone)]
pub struct Records {
    lab: LabDir,
}

impl Records {
    pub fn new(lab: &LabDir) -> Self {
        Self { lab: lab.clone() }
    }

    pub fn lab(&self) -> &LabDir {
        &self.lab
    }

    /// The base directory of all labs.
    pub fn base(&self) -> PathBuf {
        self.lab.path().parent().map(Path::to_owned).unwrap_or_default()
    }

    fn dir(&self) -> PathBuf {
        self.lab.path().join("rented")
    }

    /// The root of an instance.
    pub fn root(&self, id: &str) -> PathBuf {
        self.dir().join(id)
    }

    pub fn notice(&self, id: &str) -> PathBuf {
        self.root(id).join("notice")
    }

    /// What a test has each `create` refused with.
    pub fn refusal(&self) -> Option<String> {
        std::fs::read_to_string(self.dir().join("refuse")).ok()
    }

    /// Whoever has this changes instances, and nobody else.
    ///
    /// # Errors
    /// If the lab's directory can't be written, or another process does not let go within a minute.
    pub async fn lock(&self) -> Result<File, Problem> {
        let dir = self.dir();
        let what = || format!("can't change the instances in {}", dir.display());
        if !dir.exists() {
            make_passable(&dir)?;
        }
        let file = File::create(dir.join("lock")).map_err(|e| Problem::internal(what(), e))?;
        if wait_until(LOCK_DEADLINE, || file.try_lock().is_ok()).await {
            return Ok(file);
        }
        let why = format!("another process changes one and has not ended within {LOCK_DEADLINE:?}");
        Err(Problem::unavailable(what(), why))
    }

    /// All instances, also those that are gone, by the time of their request.
    ///
    /// # Errors
    /// If a record can't be read: half a list would be wrong.
    pub fn all(&self) -> Result<Vec<Record>, Problem> {
        let ids = self.ids("i-")?;
        let read = |id: &String| self.get(id).transpose();
        let mut all: Vec<Record> = ids.iter().filter_map(read).collect::<Result<_, _>>()?;
        all.sort_by(|a, b| (a.asked_unix_ms, &a.id).cmp(&(b.asked_unix_ms, &b.id)));
        Ok(all)
    }

    /// # Errors
    /// If the record can't be read.
    pub fn get(&self, id: &str) -> Result<Option<Record>, Problem> {
        self.read(id)
    }

    /// The ids with this prefix that have records.
    ///
    /// # Errors
    /// If the directory can't be read.
    pub fn ids(&self, prefix: &str) -> Result<Vec<String>, Problem> {
        let what = || format!("can't list the records in {}", self.dir().display());
        let entries = match std::fs::read_dir(self.dir()) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(Problem::internal(what(), error)),
        };
        let mut ids = Vec::new();
        for entry in entries {
            let name = entry.map_err(|e| Problem::internal(what(), e))?.file_name();
            let id = name.to_str().and_then(|name| name.strip_suffix(".json"));
            ids.extend(id.filter(|id| id.starts_with(prefix)).map(str::to_owned));
        }
        Ok(ids)
    }

    /// # Errors
    /// If the record can't be read.
    pub fn read<T: DeserializeOwned>(&self, id: &str) -> Result<Option<T>, Problem> {
        self.lab.read(&format!("rented/{id}.json"))
    }

    /// # Errors
    /// If the lab's directory can't be written.
    pub fn write<T: Serialize>(&self, id: &str, record: &T) -> Result<(), Problem> {
        self.lab.write(&format!("rented/{id}.json"), record)
    }

    /// Removes a record, unless there is none.
    ///
    /// # Errors
    /// If that fails.
    pub fn remove(&self, id: &str) -> Result<(), Problem> {
        let path = self.dir().join(format!("{id}.json"));
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Problem::internal(format!("can't remove {}", path.display()), error))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Writes a record, and forgets the oldest instances that are gone if there are too many.
    ///
    /// # Errors
    /// If the lab's directory can't be written.
    pub fn put(&self, record: &Record) -> Result<(), Problem> {
        self.write(&record.id, record)?;
        if record.is_there() {
            return Ok(());
        }
        let mut gone = self.all()?;
        gone.retain(|record| !record.is_there());
        let surplus = gone.len().saturating_sub(RECORDS_MAX);
        gone[..surplus].iter().try_for_each(|old| self.remove(&old.id))
    }

    /// When the provider takes an instance back, in seconds since 1970.
    ///
    /// # Errors
    /// If what a test has written is no such time.
    pub fn ends_unix_s(&self, id: &str) -> Result<Option<u64>, Problem> {
        let path = self.notice(id);
        let what = || format!("can't read {}", path.display());
        match std::fs::read_to_string(&path) {
            // Its writer is not done yet.
            Ok(text) if text.is_empty() => Ok(None),
            Ok(text) => {
                let why = || "it is not a time in seconds since 1970".to_owned();
                text.trim().parse().map(Some).map_err(|_| Problem::invalid(what(), why()))
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Problem::internal(what(), error)),
        }
    }
}

/// Makes a directory through which QEMU's users pass, unless it is there.
pub fn make_passable(path: &Path) -> Result<(), Problem> {
    // Not recursively: a lab that is gone is not made anew.
    let made = match DirBuilder::new().mode(PASSABLE).create(path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(error),
        // Whoever runs this may keep files from all others.
        Ok(()) | Err(_) => std::fs::set_permissions(path, Permissions::from_mode(PASSABLE)),
    };
    made.map_err(|e| Problem::internal(format!("can't make {}", path.display()), e))
}
