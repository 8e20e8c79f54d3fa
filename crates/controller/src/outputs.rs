//! The outputs of jobs, in the repository: `jobs/JOB` of the job's tenant, or where its file says.
//!
//! ```text
//! output disk, at its home ── a tar ──> entries   what a hostile guest may have written is refused here
//!                                          │ files, links, and what is left out
//!                                       intake   writes each file into the repository
//!                                          │
//!                                repo://TENANT/jobs/JOB ── archive ──> `perigee job output`
//!                                          └── retention: deleted after a while
//! ```
//!
//! Nothing of this is on the controller's disk but the repository's own files, and a job needs the same memory however
//! large its outputs are. Fetching may be cut at any moment: it begins again with an empty `jobs/JOB`.

mod archive;
mod entries;
mod intake;
mod links;
mod retention;

use std::sync::Arc;
use std::{fmt, io};

use bytes::Bytes;
use futures_util::Stream;
use perigee_model::job::{Job, JobSpec};
use perigee_model::spec::check_outputs_to;
use perigee_model::tenant::SEPARATOR;
use perigee_model::{JobId, Problem, ProblemKind, TenantName};
use perigee_repository::{DataPath, Location, View};

use crate::cluster::Cluster;
use crate::data;

#[cfg(feature = "fuzzing")]
pub(crate) use entries::read as read_entries;
pub use intake::{Expected, Taken};
#[cfg(test)]
pub use retention::expire;
pub(crate) use retention::run as keep_to_retention;

/// Names that are shown of what was left out. The others are counted.
const SHOWN: usize = 5;

/// The longest name or reason that is shown.
const TEXT_BYTES_MAX: usize = 120;

/// The entries of a directory that are read at once.
const PAGE: usize = 1000;

/// Where a job's outputs are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    pub tenant: TenantName,
    pub path: DataPath,
    /// It is the job's own directory, which has nothing else.
    pub is_own: bool,
}

impl Place {
    /// # Errors
    /// As [`Place::named`].
    pub fn of(job: &JobId, spec: &JobSpec) -> Result<Self, Problem> {
        if let Some(named) = Self::named(spec)? {
            return Ok(named);
        }
        let short = job.as_str().rsplit(SEPARATOR).next().unwrap_or_default();
        let path = DataPath::parse(&format!("jobs/{short}"))?;
        Ok(Self { tenant: TenantName::of(&spec.name), path, is_own: true })
    }

    /// The place that the job's file names.
    ///
    /// # Errors
    /// `Invalid` if it can't be in the repository, or is among another tenant's files.
    pub fn named(spec: &JobSpec) -> Result<Option<Self>, Problem> {
        let Some(to) = &spec.outputs_to else { return Ok(None) };
        let tenant = TenantName::of(&spec.name);
        let refused = |why: String| Problem::invalid(format!("job {}", spec.name), why);
        let address = check_outputs_to(to).map_err(|e| refused(format!("outputs-to: {e}")))?;
        if address.tenant.is_some_and(|named| named != tenant) {
            let why =
                format!("outputs-to: the outputs of this job can only go to repo://{tenant}/…");
            return Err(refused(why));
        }
        let path = DataPath::parse(&address.path)?;
        if path.names().first().is_some_and(|top| top == "jobs") {
            let why = "outputs-to: what is below jobs/ belongs to the jobs themselves".to_owned();
            return Err(refused(why).next("choose another directory"));
        }
        Ok(Some(Self { tenant, path, is_own: false }))
    }

    fn location(&self) -> Location {
        Location::In(self.tenant.clone(), self.path.clone())
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "repo://{}/{}", self.tenant, self.path)
    }
}

/// What of a job's outputs did not come into the repository, and why.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeftOut {
    count: u64,
    first: Vec<String>,
}

impl LeftOut {
    pub fn add(&mut self, name: &str, why: &str) {
        self.count += 1;
        if self.first.len() < SHOWN {
            let why = shortened(why);
            self.first.push(match name {
                "" => why,
                name => format!("{:?} ({why})", shortened(name)),
            });
        }
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
}

fn shortened(text: &str) -> String {
    let end = text.floor_char_boundary(TEXT_BYTES_MAX);
    if end < text.len() { format!("{}…", &text[..end]) } else { text.to_owned() }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "left out of the outputs: {}", self.first.join(", "))?;
        match self.count.saturating_sub(self.first.len() as u64) {
            0 => Ok(()),
            more => write!(f, ", and {more} more"),
        }
    }
}

/// The repository as a job sees it: its tenant's files.
fn view(cluster: &Arc<Cluster>, job: &JobId, tenant: &TenantName) -> View {
    data::view_of_job(cluster, tenant, job)
}

/// Writes what is in a job's output tar into the repository.
///
/// # Errors
/// If the stream is cut, or the repository can't take a file now. Then all of it is to be done again.
pub async fn take<S, E>(
    cluster: &Arc<Cluster>,
    job: &JobId,
    place: &Place,
    body: S,
    expected: &Expected,
) -> Result<Taken, Problem>
where
    S: Stream<Item = Result<Bytes, E>> + Send + Unpin + 'static,
    E: fmt::Display,
{
    intake::take(&view(cluster, job, &place.tenant), place, body, expected).await
}

/// A job's outputs as a tar, made while it is sent.
///
/// # Errors
/// `NotFound` if it has none.
pub async fn archive(
    cluster: &Arc<Cluster>,
    job: &Job,
) -> Result<impl Stream<Item = Result<Bytes, io::Error>> + Send + use<>, Problem> {
    let place = Place::of(&job.id, &job.spec)?;
    archive::archive(view(cluster, &job.id, &place.tenant), place).await
}

/// Deletes what a job has in its own directory. What went to `outputs-to` stays.
///
/// # Errors
/// If the repository can't be used.
pub async fn remove(cluster: &Arc<Cluster>, job: &Job) -> Result<(), Problem> {
    let place = Place::of(&job.id, &job.spec)?;
    if !place.is_own {
        return Ok(());
    }
    let view = view(cluster, &job.id, &place.tenant);
    remove_tree(&view, &place.tenant, &place.path).await?;
    // With the last outputs goes the directory of all outputs. It stays if others are there.
    if let Some((above, _)) = place.path.split() {
        drop(view.remove_directory(Location::In(place.tenant, above)).await);
    }
    Ok(())
}

/// Deletes a directory with all that is in it. If there is none, that is well.
async fn remove_tree(view: &View, tenant: &TenantName, path: &DataPath) -> Result<(), Problem> {
    let at = |path: &DataPath| Location::In(tenant.clone(), path.clone());
    let unless_gone = |done: Result<(), Problem>| match done {
        Err(problem) if problem.kind == ProblemKind::NotFound => Ok(()),
        done => done,
    };
    // A directory is deleted when it is met for the second time.
    let mut left = vec![(path.clone(), false)];
    while let Some((path, is_empty)) = left.pop() {
        if is_empty {
            unless_gone(view.remove_directory(at(&path)).await)?;
            continue;
        }
        let mut directories = Vec::new();
        let mut after = None;
        loop {
            let page = match view.list(at(&path), after, PAGE).await {
                Err(problem) if problem.kind == ProblemKind::NotFound => break,
                page => page?,
            };
            for entry in &page.entries {
                let below = path.join(&entry.name)?;
                if entry.is_directory() {
                    directories.push(below);
                } else {
                    unless_gone(view.remove_file(at(&below)).await)?;
                }
            }
            after = page.after;
            if after.is_none() {
                break;
            }
        }
        left.push((path, true));
        left.extend(directories.into_iter().map(|below| (below, false)));
    }
    Ok(())
}

#[cfg(test)]
pub mod tests;
