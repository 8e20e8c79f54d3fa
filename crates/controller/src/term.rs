//! Whether this controller is the one that commands the hosts ([`perigee_model::term`]).
//!
//! The store has the number of the last start and the place where that was. A copy of the state at another place does not start, and a restored
//! older copy is refused by the hosts, whose term is greater: both until [`take_over`] says that the copy is the controller from now on. A
//! controller that one host has refused says so until then, also after a restart, and does nothing.

use std::path::Path;
use std::sync::Arc;

use perigee_http::{Authority, Claim, Network, Refusal};
use perigee_model::Problem;
use perigee_model::term::{SignedTerm, Term, taken_over};
use perigee_model::units::format_time;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::clock::now_ms;
use crate::records::Records;
use crate::store::{SqliteStore, directory};

const KEY: &str = "controller";

/// Differs on each machine; absent in most containers.
const MACHINE_ID: &str = "/etc/machine-id";

#[derive(Debug, Clone, Serialize, Deserialize)]
struct TermRecord {
    number: u64,
    begun_ms: u64,
    place: StorePlace,
    /// A host has shown a newer term.
    superseded: Option<Superseded>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Superseded {
    /// The number of that term.
    by: u64,
    why: String,
    at_ms: u64,
}

/// Where a store is. The number of its device is not in it, because that may change with each boot, and the number of the file is the same in a
/// snapshot of a filesystem, so there is its path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct StorePlace {
    /// Empty if the machine has no id.
    machine: String,
    directory: String,
    inode: u64,
}

impl StorePlace {
    fn of(state_dir: &Path) -> Result<Self, Problem> {
        use std::os::unix::fs::MetadataExt as _;
        let failed = |path: &Path, e: &dyn std::fmt::Display| {
            let what = format!("can't tell whether {} is a copy", state_dir.display());
            Problem::internal(what, format!("can't read {}: {e}", path.display()))
        };
        let machine = match std::fs::read_to_string(MACHINE_ID) {
            Ok(id) => id.trim().to_owned(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(e) => return Err(failed(Path::new(MACHINE_ID), &e)),
        };
        let file = state_dir.join(directory::STORE);
        let inode = std::fs::metadata(&file).map_err(|e| failed(&file, &e))?.ino();
        let directory = state_dir.canonicalize().map_err(|e| failed(state_dir, &e))?;
        Ok(Self { machine, directory: directory.display().to_string(), inode })
    }

    fn in_words(&self) -> String {
        let machine = match self.machine.as_str() {
            "" => "a machine without an id".to_owned(),
            id => format!("the machine {id}"),
        };
        format!("{} on {machine} (file {})", self.directory, self.inode)
    }
}

/// Begins a new term, and claims it at the hosts.
///
/// # Errors
/// `Superseded` if this is a copy; also when the store fails.
pub async fn begin(
    records: &Records,
    state_dir: &Path,
    authority: &Authority,
    network: &Network,
) -> Result<Arc<Claim>, Problem> {
    let place = StorePlace::of(state_dir)?;
    let before: Option<TermRecord> = records.read(KEY).await?;
    if let Some(before) = &before
        && before.place != place
    {
        return Err(another_place(state_dir, before, &place));
    }
    let superseded = before.as_ref().and_then(|before| before.superseded.clone());
    let last = before.map_or(0, |before| before.number);
    let number = last.checked_add(1).ok_or_else(|| no_more(last))?;
    let record = TermRecord { number, begun_ms: now_ms(), place, superseded: superseded.clone() };
    records.put(KEY, &record).await?;
    let term = Term { number, start: Uuid::new_v4() };
    let signed = match network {
        Network::Tls(_) => authority.sign_term(&term)?,
        Network::Plain => {
            let text = serde_json::to_string(&term)
                .map_err(|e| Problem::internal("can't write the controller's term", e))?;
            SignedTerm(format!("unsigned {text}"))
        }
    };
    let claim = Claim::new(term, &signed, network)?;
    tracing::info!("this is the controller with term {term}");
    if let Some(Superseded { by, why, .. }) = superseded {
        claim.refuse(Refusal { by, why });
    }
    Ok(claim)
}

fn no_more(last: u64) -> Problem {
    Problem::internal("can't begin a new term", format!("there is no number after {last}"))
}

fn another_place(state_dir: &Path, before: &TermRecord, here: &StorePlace) -> Problem {
    let why = format!(
        "this is a copy, and its original may command the hosts: the controller of this state was last started at {}, at {}, and this is {}",
        format_time(before.begun_ms),
        before.place.in_words(),
        here.in_words()
    );
    let what = format!("can't start the controller with the state in {}", state_dir.display());
    Problem::superseded(what, why).next(format!(
        "if this is to be the controller from now on, also after its directory was only moved: {}; the hosts then refuse the original",
        take_over_of(state_dir)
    ))
}

fn take_over_of(state_dir: &Path) -> String {
    format!("perigee controller take-over --state {}", state_dir.display())
}

/// Makes the state in this directory that of the controller from its next start on. The hosts refuse all others then.
///
/// # Errors
/// `NotFound` if there is none, `Conflict` while a controller uses it.
pub async fn take_over(state_dir: &Path) -> Result<u64, Problem> {
    let file = state_dir.join(directory::STORE);
    let what = || format!("can't take over with the state in {}", state_dir.display());
    if !file.try_exists().map_err(|e| Problem::internal(what(), e))? {
        return Err(Problem::not_found(what(), format!("there is no {}", file.display()))
            .next("name the directory of the copy: --state DIR"));
    }
    let _lock = directory::lock(state_dir)?;
    let records = Records::new(Arc::new(SqliteStore::open(&file)?));
    let place = StorePlace::of(state_dir)?;
    let before: Option<TermRecord> = records.read(KEY).await?;
    let seen = before.map_or(0, |b| b.number.max(b.superseded.map_or(0, |other| other.by)));
    let number = taken_over(seen).ok_or_else(|| no_more(seen))?;
    let record = TermRecord { number, begun_ms: now_ms(), place, superseded: None };
    records.put(KEY, &record).await?;
    Ok(number)
}

/// Keeps that a host has refused this controller, until [`take_over`].
///
/// # Errors
/// If the store fails.
pub async fn note(records: &Records, refusal: &Refusal) -> Result<(), Problem> {
    let Some(record) = records.read::<TermRecord>(KEY).await? else { return Ok(()) };
    if record.superseded.is_some() {
        return Ok(());
    }
    let Refusal { by, why } = refusal.clone();
    let superseded = Some(Superseded { by, why, at_ms: now_ms() });
    records.put(KEY, &TermRecord { superseded, ..record }).await
}

/// What a controller answers that does not command any more.
pub fn superseded(state_dir: &Path, what: impl Into<String>, refusal: &Refusal) -> Problem {
    Problem::superseded(what, format!("this controller does nothing any more: {}", refusal.why)).next(format!(
        "ask the other controller; if this one is to command instead: stop it, {}, and start it again",
        take_over_of(state_dir)
    ))
}
