//! A job's inputs: a list of files, which become an image at the job's host.
//!
//! ```text
//! list (.inputs/SHA256)     what comes from where; a file of the repository, and so is all that it names
//!   └ resolve (here)        reads the list as the job's tenant may, and looks through directories
//!       └ manifest          each file with its path and hash; its own hash is the name of the image
//!           └ staging       the image at the job's host: there, copied from another host, or made of a tar
//! collect                   images and uploaded files go when no job needs them any more
//! ```
//!
//! The job has a clone of the image as a disk. Nothing of the files is kept outside of the repository and of the pools.

mod ahead;
mod collect;
mod manifest;
mod staging;

use std::collections::HashMap;
use std::time::Duration;

use bytes::BytesMut;
use perigee_model::data::{FileAddress, FileEntry};
use perigee_model::inputs::{Input, InputFrom, InputList, UPLOADED_INPUTS};
use perigee_model::job::JobSpec;
use perigee_model::limits::INPUT_LIST_BYTES;
use perigee_model::{Problem, ProblemKind, TenantName};
use perigee_repository::{DataPath, Location, View};
use tokio::sync::Semaphore;

use crate::accounts::files;
use crate::cluster::Cluster;
use crate::hash::is_sha256;
use crate::records::JobInputs;
use manifest::{Entry, FileOf, Manifest};

#[cfg(feature = "fuzzing")]
pub(crate) use manifest::{
    Entry as ManifestEntry, FileOf as ManifestFile, Manifest as InputManifest,
};

pub use ahead::stage_ahead;
#[cfg(test)]
pub use collect::collect_once;
pub use collect::{collect, forget_tenant};
pub use staging::{Staged, ensure};

const WHAT: &str = "can't use the inputs of a job";
/// Entries of a directory that are asked for at once.
const PAGE: usize = 10_000;
/// Up to so many uploaded files are looked for one by one.
const FEW: usize = 256;
const PIECE_BYTES: usize = 1 << 20;
/// How many lists are read and looked through at the same time: one of each tenant, and so many in all.
static RESOLVING: Semaphore = Semaphore::const_new(4);
/// Who has waited for so long for the others is told so.
const RESOLVING_DEADLINE: Duration = Duration::from_secs(60);

/// The files that a job of this tenant may have as its inputs: the tenant's own, and what is shared with it.
fn view(cluster: &Cluster, tenant: &TenantName) -> View {
    files::view(cluster, tenant, "the controller".to_owned(), false)
}

fn uploaded(tenant: &TenantName, sha256: &str) -> Result<Location, Problem> {
    Location::new(tenant.as_str(), &format!("{UPLOADED_INPUTS}/{sha256}"))
}

/// What the inputs of a job are now; `None` if it has none.
///
/// # Errors
/// `Invalid` or `NotFound`, with the input; another tenant's file is not found.
pub async fn check(cluster: &Cluster, spec: &JobSpec) -> Result<Option<JobInputs>, Problem> {
    let Some(sha256) = &spec.inputs else { return Ok(None) };
    let tenant = TenantName::of(&spec.name);
    resolve(cluster, &tenant, sha256).await.map(|(_, inputs)| Some(inputs))
}

/// Work with up to some hundred thousand entries, off the async threads.
async fn off_thread<T: Send + 'static>(
    act: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> Result<T, Problem> {
    let done = tokio::task::spawn_blocking(act).await;
    done.map_err(|error| Problem::internal(WHAT, error))?
}

/// Reads a list of inputs.
async fn read_list(
    cluster: &Cluster,
    tenant: &TenantName,
    sha256: &str,
) -> Result<InputList, Problem> {
    let missing = || {
        let why = format!("inputs: no list {sha256} was uploaded");
        Problem::invalid(WHAT, why).next(format!("put it to {UPLOADED_INPUTS}/{sha256} first"))
    };
    if !is_sha256(sha256) {
        return Err(missing());
    }
    let view = view(cluster, tenant);
    let mut reading = view.read(uploaded(tenant, sha256)?).await.map_err(|e| match e.kind {
        ProblemKind::NotFound | ProblemKind::Conflict => missing(),
        _ => e,
    })?;
    // It may have been replaced.
    if reading.entry().sha256.as_deref() != Some(sha256) {
        return Err(missing());
    }
    let length = reading.entry().size_bytes;
    INPUT_LIST_BYTES.check(length).map_err(|error| error.problem(WHAT))?;
    let mut text = BytesMut::new();
    while (text.len() as u64) < length {
        let piece = reading.read(text.len() as u64, PIECE_BYTES).await?;
        if piece.is_empty() {
            return Err(Problem::unavailable(WHAT, "their list ended early").next("try again"));
        }
        text.extend_from_slice(&piece);
    }
    off_thread(move || {
        let list: InputList = serde_json::from_slice(&text)
            .map_err(|error| Problem::invalid(WHAT, format!("their list: {error}")))?;
        list.check()?;
        Ok(list)
    })
    .await
}

/// The present content of a list of inputs.
async fn resolve(
    cluster: &Cluster,
    tenant: &TenantName,
    sha256: &str,
) -> Result<(Manifest, JobInputs), Problem> {
    // A list may have 64 MiB, and name 100,000 files.
    let submissions = cluster.staging.submissions(tenant);
    let turn = async {
        let of_tenant = submissions.resolving.lock().await;
        (of_tenant, RESOLVING.acquire().await)
    };
    let _turn = tokio::time::timeout(RESOLVING_DEADLINE, turn).await.map_err(|_| {
        let seconds = RESOLVING_DEADLINE.as_secs();
        let why = format!("the lists of other jobs were being read for {seconds} s");
        Problem::unavailable(WHAT, why).next("try again")
    })?;
    let list = read_list(cluster, tenant, sha256).await?;
    let view = view(cluster, tenant);
    let there = uploaded_files(&view, tenant, &list).await?;
    let of = tenant.clone();
    let (mut manifest, stored) = off_thread(move || {
        let (mut manifest, mut stored) = (Manifest::default(), Vec::new());
        for Input { to, from } in list.inputs {
            match from {
                InputFrom::Directory {} => manifest.add(to, Entry::Directory)?,
                InputFrom::File(file) => {
                    if there.get(&file.sha256) != Some(&file.size_bytes) {
                        let why = format!("inputs: the file {} was not uploaded", file.sha256);
                        return Err(Problem::invalid(WHAT, why).next("submit the job again"));
                    }
                    let at = uploaded(&of, &file.sha256)?;
                    let (size_bytes, executable) = (file.size_bytes, file.executable);
                    let sha256 = file.sha256;
                    manifest.add(to, Entry::File(FileOf { size_bytes, sha256, executable, at }))?;
                }
                InputFrom::Repository(address) => stored.push((to, address)),
            }
        }
        Ok((manifest, stored))
    })
    .await?;
    for (to, address) in stored {
        manifest = add_repository(&view, tenant, manifest, to, &address).await?;
    }
    let tenant = tenant.clone();
    off_thread(move || {
        manifest.check()?;
        let (bytes, entries) = (manifest.bytes(), manifest.count());
        let inputs = JobInputs { image: manifest.image(&tenant)?, bytes, entries };
        Ok((manifest, inputs))
    })
    .await
}

/// The uploaded files that a list names, with their lengths. A file that does not have the hash that is its name counts
/// as not there.
async fn uploaded_files(
    view: &View,
    tenant: &TenantName,
    list: &InputList,
) -> Result<HashMap<String, u64>, Problem> {
    let files = list.inputs.iter().filter_map(|input| match &input.from {
        InputFrom::File(file) => Some(file.sha256.as_str()),
        _ => None,
    });
    let mut wanted: Vec<&str> = files.collect();
    wanted.sort_unstable();
    wanted.dedup();
    let mut found = HashMap::new();
    let mut note = |entry: FileEntry| {
        if entry.sha256.as_ref() == Some(&entry.name) {
            found.insert(entry.name, entry.size_bytes);
        }
    };
    if wanted.len() <= FEW {
        for sha256 in wanted.into_iter().filter(|sha256| is_sha256(sha256)) {
            match view.entry(uploaded(tenant, sha256)?).await {
                Err(problem) if problem.kind == ProblemKind::NotFound => {}
                entry => note(entry?),
            }
        }
        return Ok(found);
    }
    let directory = Location::new(tenant.as_str(), UPLOADED_INPUTS)?;
    let mut after = None;
    loop {
        let page = view.list(directory.clone(), after, PAGE).await?;
        page.entries.into_iter().for_each(&mut note);
        after = page.after;
        if after.is_none() {
            return Ok(found);
        }
    }
}

/// Adds a file, or a directory with all that is in it. The repository keeps no modes, so every file may be run.
async fn add_repository(
    view: &View,
    tenant: &TenantName,
    mut manifest: Manifest,
    to: String,
    address: &str,
) -> Result<Manifest, Problem> {
    let address: FileAddress = address.parse().map_err(|error| Problem::invalid(WHAT, error))?;
    let owner = address.tenant.as_ref().unwrap_or(tenant);
    let Location::In(owner, path) = Location::new(owner.as_str(), &address.path)? else {
        return Err(Problem::invalid(WHAT, "it names no tenant"));
    };
    let at = |path: &DataPath| Location::In(owner.clone(), path.clone());
    let entry = view.entry(at(&path)).await?;
    if !entry.is_directory() {
        manifest.add(to, file_of(entry, at(&path))?)?;
        return Ok(manifest);
    }
    let mut left = vec![(path, to)];
    while let Some((path, to)) = left.pop() {
        manifest.add(to.clone(), Entry::Directory)?;
        let mut after = None;
        loop {
            let page = view.list(at(&path), after, PAGE).await?;
            let (above, below, owner) = (path.clone(), to.clone(), owner.clone());
            let directories;
            (manifest, directories) = off_thread(move || {
                let mut directories = Vec::new();
                for entry in page.entries {
                    let (path, to) = (above.join(&entry.name)?, format!("{below}/{}", entry.name));
                    if entry.is_directory() {
                        directories.push((path, to));
                    } else {
                        let at = Location::In(owner.clone(), path);
                        manifest.add(to, file_of(entry, at)?)?;
                    }
                }
                Ok((manifest, directories))
            })
            .await?;
            left.extend(directories);
            after = page.after;
            if after.is_none() {
                break;
            }
        }
    }
    Ok(manifest)
}

fn file_of(entry: FileEntry, at: Location) -> Result<Entry, Problem> {
    let Some(sha256) = entry.sha256 else {
        let why = format!("inputs: repo:/{at} has no hash, because it was changed on the disk");
        return Err(Problem::invalid(WHAT, why).next("upload it again"));
    };
    Ok(Entry::File(FileOf { size_bytes: entry.size_bytes, sha256, executable: true, at }))
}
