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

use bytes::BytesMut;
use perigee_model::data::{FileAddress, FileEntry};
use perigee_model::inputs::{Input, InputFrom, InputList, UPLOADED_INPUTS};
use perigee_model::job::JobSpec;
use perigee_model::limits::INPUT_LIST_BYTES;
use perigee_model::{Problem, ProblemKind, TenantName};
use perigee_repository::{DataPath, Location, View};

use crate::cluster::Cluster;
use crate::data;
use crate::files::is_sha256;
use crate::records::JobInputs;
use manifest::{Entry, FileOf, Manifest};

pub use ahead::stage_ahead;
pub use collect::collect;
#[cfg(test)]
pub use collect::collect_once;
pub use staging::{Staged, Staging, ensure};

const WHAT: &str = "can't use the inputs of a job";
/// Entries of a directory that are asked for at once.
const PAGE: usize = 10_000;
/// Up to so many uploaded files are looked for one by one.
const FEW: usize = 256;
const PIECE_BYTES: usize = 1 << 20;

/// The files that a job of this tenant may have as its inputs: the tenant's own, and what is shared with it.
fn view(cluster: &Cluster, tenant: &TenantName) -> View {
    View::new(cluster.repository.clone(), data::account_of_tenant(cluster, tenant, false))
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
    let manifest = resolve(cluster, &tenant, sha256).await?;
    summary(&tenant, &manifest).map(Some)
}

fn summary(tenant: &TenantName, manifest: &Manifest) -> Result<JobInputs, Problem> {
    let (bytes, entries) = (manifest.bytes(), manifest.count());
    Ok(JobInputs { image: manifest.image(tenant)?, bytes, entries })
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
    let list: InputList = serde_json::from_slice(&text)
        .map_err(|error| Problem::invalid(WHAT, format!("their list: {error}")))?;
    list.check()?;
    Ok(list)
}

/// The present content of a list of inputs.
async fn resolve(
    cluster: &Cluster,
    tenant: &TenantName,
    sha256: &str,
) -> Result<Manifest, Problem> {
    let list = read_list(cluster, tenant, sha256).await?;
    let view = view(cluster, tenant);
    let there = uploaded_files(&view, tenant, &list).await?;
    let mut manifest = Manifest::default();
    for Input { to, from } in list.inputs {
        match from {
            InputFrom::Directory {} => manifest.add(to, Entry::Directory)?,
            InputFrom::File(file) => {
                if there.get(&file.sha256) != Some(&file.size_bytes) {
                    let why = format!("inputs: the file {} was not uploaded", file.sha256);
                    return Err(Problem::invalid(WHAT, why).next("submit the job again"));
                }
                let at = uploaded(tenant, &file.sha256)?;
                let (size_bytes, executable) = (file.size_bytes, file.executable);
                let sha256 = file.sha256;
                manifest.add(to, Entry::File(FileOf { size_bytes, sha256, executable, at }))?;
            }
            InputFrom::Repository(address) => {
                add_repository(&view, tenant, &mut manifest, to, &address).await?;
            }
        }
    }
    manifest.check()?;
    Ok(manifest)
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
    manifest: &mut Manifest,
    to: String,
    address: &str,
) -> Result<(), Problem> {
    let address: FileAddress = address.parse().map_err(|error| Problem::invalid(WHAT, error))?;
    let owner = address.tenant.as_ref().unwrap_or(tenant);
    let Location::In(owner, path) = Location::new(owner.as_str(), &address.path)? else {
        return Err(Problem::invalid(WHAT, "it names no tenant"));
    };
    let at = |path: &DataPath| Location::In(owner.clone(), path.clone());
    let entry = view.entry(at(&path)).await?;
    if !entry.is_directory() {
        return manifest.add(to, file_of(entry, at(&path))?);
    }
    let mut left = vec![(path, to)];
    while let Some((path, to)) = left.pop() {
        manifest.add(to.clone(), Entry::Directory)?;
        let mut after = None;
        loop {
            let page = view.list(at(&path), after, PAGE).await?;
            for entry in page.entries {
                let (path, to) = (path.join(&entry.name)?, format!("{to}/{}", entry.name));
                if entry.is_directory() {
                    left.push((path, to));
                } else {
                    manifest.add(to, file_of(entry, at(&path))?)?;
                }
            }
            after = page.after;
            if after.is_none() {
                break;
            }
        }
    }
    Ok(())
}

fn file_of(entry: FileEntry, at: Location) -> Result<Entry, Problem> {
    let Some(sha256) = entry.sha256 else {
        let why = format!("inputs: repo:/{at} has no hash, because it was changed on the disk");
        return Err(Problem::invalid(WHAT, why).next("upload it again"));
    };
    Ok(Entry::File(FileOf { size_bytes: entry.size_bytes, sha256, executable: true, at }))
}
