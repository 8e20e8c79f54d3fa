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
//! large its outputs are. They are written below `jobs/.JOB-part`, which becomes `jobs/JOB` when all are there. Fetching
//! may be cut at any moment: it begins again with an empty `jobs/.JOB-part`.

mod archive;
mod entries;
mod intake;
pub mod left_out;
mod links;
mod retention;

use std::sync::Arc;
use std::{fmt, io};

use bytes::Bytes;
use futures_util::Stream;
use perigee_model::data::FileEntry;
use perigee_model::gang::of_member;
use perigee_model::job::{Job, JobSpec};
use perigee_model::spec::check_outputs_to;
use perigee_model::tenant::SEPARATOR;
use perigee_model::{JobId, Problem, ProblemKind, TenantName};
use perigee_repository::{DataPath, Location, View};

use crate::accounts::files;
use crate::cluster::Cluster;

#[cfg(feature = "fuzzing")]
pub(crate) use entries::read as read_entries;
pub use intake::{Expected, OutputsTaken};
use left_out::LeftOutList;
#[cfg(test)]
pub use retention::expire;
pub(crate) use retention::run as keep_to_retention;

/// The entries of a directory that are read at once.
const PAGE: usize = 1000;

/// Where a job's outputs are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputPlace {
    pub tenant: TenantName,
    pub path: DataPath,
    /// It is the job's own directory, which has nothing else.
    pub is_own: bool,
}

impl OutputPlace {
    /// Where a job's outputs are, or will be.
    ///
    /// # Errors
    /// As [`OutputPlace::named`].
    pub fn of(job: &Job) -> Result<Self, Problem> {
        let own = Self::own(&job.id, &job.spec)?;
        // They may have gone there because the other place could not be had.
        match job.outputs.as_ref().is_some_and(|outputs| outputs.at == own.to_string()) {
            true => Ok(own),
            false => Self::wanted(&job.id, &job.spec),
        }
    }

    /// Where a job wants its outputs.
    fn wanted(job: &JobId, spec: &JobSpec) -> Result<Self, Problem> {
        Self::named(spec)?.map_or_else(|| Self::own(job, spec), Ok)
    }

    /// The job's own directory.
    fn own(job: &JobId, spec: &JobSpec) -> Result<Self, Problem> {
        let path = match of_member(short(job)) {
            Some((gang, rank)) => format!("jobs/{gang}/rank-{rank}"),
            None => format!("jobs/{}", short(job)),
        };
        let path = DataPath::parse(&path)?;
        Ok(Self { tenant: TenantName::of(&spec.name), path, is_own: true })
    }

    /// Where its outputs are while they are fetched: nothing may be taken for outputs that is not all of them.
    fn in_work(&self) -> Result<Self, Problem> {
        let path = match self.path.split() {
            Some((above, name)) if self.is_own => above.join(&format!(".{name}-part"))?,
            _ => self.path.clone(),
        };
        Ok(Self { path, ..self.clone() })
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

fn short(job: &JobId) -> &str {
    job.as_str().rsplit(SEPARATOR).next().unwrap_or_default()
}

impl fmt::Display for OutputPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "repo://{}/{}", self.tenant, self.path)
    }
}

/// The repository as a job sees it: as a user of its tenant.
fn view(cluster: &Cluster, job: &JobId, tenant: &TenantName) -> View {
    files::view(cluster, tenant, format!("job {job}"), true)
}

/// Where a member of a gang has its outputs, whose file names a place.
pub fn of_rank(to: &str, rank: u32) -> String {
    format!("{}/rank-{rank}", to.trim_end_matches('/'))
}

/// Whether the place that a job's file names can be had.
///
/// # Errors
/// As [`OutputPlace::named`], and `Conflict` if there is a file.
pub async fn check(cluster: &Cluster, spec: &JobSpec) -> Result<(), Problem> {
    let Some(named) = OutputPlace::named(spec)? else { return Ok(()) };
    if let Some(to) = spec.outputs_to.as_ref().filter(|_| spec.is_gang()) {
        // Each of its VMs has a directory there, and the last one's name is the longest.
        let longest = Some(of_rank(to, spec.count.saturating_sub(1)));
        OutputPlace::named(&JobSpec { outputs_to: longest, ..spec.clone() })?;
    }
    let view = files::view(cluster, &named.tenant, "the controller".to_owned(), false);
    match file_in_the_way(&view, &named).await? {
        None => Ok(()),
        Some(file) => {
            let what = format!("job {}", spec.name);
            Err(Problem::conflict(
                what,
                format!("outputs-to: repo://{}/{file} is a file", named.tenant),
            )
            .next("choose another directory, or delete the file"))
        }
    }
}

/// Where the outputs of a job go now. If there is a file where its file says, they go to its own directory, and the
/// second value says so: nobody is to lose them, and the job is not to wait for somebody who never comes.
///
/// # Errors
/// If the repository can't be used.
pub async fn place_for(
    cluster: &Cluster,
    job: &Job,
) -> Result<(OutputPlace, Option<String>), Problem> {
    let own = OutputPlace::own(&job.id, &job.spec)?;
    let Some(named) = OutputPlace::named(&job.spec)? else { return Ok((own, None)) };
    let view = view(cluster, &job.id, &named.tenant);
    Ok(match file_in_the_way(&view, &named).await? {
        None => (named, None),
        Some(file) => {
            let note =
                format!("its outputs are in {own}, because repo://{}/{file} is a file", own.tenant);
            (own, Some(note))
        }
    })
}

/// A file that has the name of a place, or of a directory above it.
async fn file_in_the_way(view: &View, place: &OutputPlace) -> Result<Option<DataPath>, Problem> {
    let mut at = Some(place.path.clone());
    while let Some(path) = at.filter(|path| !path.is_root()) {
        match view.entry(Location::In(place.tenant.clone(), path.clone())).await {
            Ok(entry) if entry.is_directory() => return Ok(None),
            Ok(_) => return Ok(Some(path)),
            // A conflict: something above it is a file.
            Err(problem)
                if matches!(problem.kind, ProblemKind::NotFound | ProblemKind::Conflict) => {}
            Err(problem) => return Err(problem),
        }
        at = path.split().map(|(above, _)| above);
    }
    Ok(None)
}

/// How many bytes the tenant's quota of files still has.
///
/// # Errors
/// If the repository can't be used.
pub async fn free_bytes(cluster: &Arc<Cluster>, place: &OutputPlace) -> Result<u64, Problem> {
    let (cluster, tenant) = (Arc::clone(cluster), place.tenant.clone());
    let counted = tokio::task::spawn_blocking(move || {
        let (used, _) = cluster.repository.used(&tenant)?;
        Ok(files::quota_of(&cluster, &tenant).bytes.saturating_sub(used))
    });
    counted.await.map_err(|e| Problem::internal("can't look at a quota", e))?
}

/// Writes what is in a job's output tar into the repository.
///
/// # Errors
/// If the stream is cut, or the repository can't take a file now. Then all of it is to be done again.
pub async fn take<S, E>(
    cluster: &Arc<Cluster>,
    job: &JobId,
    place: &OutputPlace,
    body: S,
    expected: &Expected,
) -> Result<OutputsTaken, Problem>
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
    let place = OutputPlace::of(job)?;
    archive::archive(view(cluster, &job.id, &place.tenant), place).await
}

/// Deletes what a job has in its own directory. What went to `outputs-to` stays.
///
/// # Errors
/// If the repository can't be used.
pub async fn remove(cluster: &Arc<Cluster>, job: &Job) -> Result<(), Problem> {
    remove_part(cluster, job).await?;
    let mut place = OutputPlace::of(job)?;
    if job.spec.is_gang() {
        // Those of a part of its members may have gone to its own directory.
        place = OutputPlace::own(&job.id, &job.spec)?;
    }
    if place.is_own {
        remove_place(&view(cluster, &job.id, &place.tenant), place).await
    } else {
        Ok(())
    }
}

/// Deletes what was written of a job's outputs before their fetching was cut.
///
/// # Errors
/// If the repository can't be used.
pub async fn remove_part(cluster: &Arc<Cluster>, job: &Job) -> Result<(), Problem> {
    let place = OutputPlace::own(&job.id, &job.spec)?.in_work()?;
    remove_place(&view(cluster, &job.id, &place.tenant), place).await
}

async fn remove_place(view: &View, place: OutputPlace) -> Result<(), Problem> {
    remove_tree(view, &place.tenant, &place.path).await?;
    // With the last outputs goes the directory of all outputs. It stays if others are there.
    if let Some((above, _)) = place.path.split() {
        drop(view.remove_directory(Location::In(place.tenant, above)).await);
    }
    Ok(())
}

/// Gives outputs that are whole their place. What somebody else has put there stays, unless it has the name of an output.
async fn put_in_place(view: &View, from: &OutputPlace, to: &OutputPlace) -> Result<(), Problem> {
    let at = |path: &DataPath| Location::In(to.tenant.clone(), path.clone());
    let mut left = vec![(from.path.clone(), to.path.clone())];
    while let Some((from, to_path)) = left.pop() {
        match view.rename(at(&from), at(&to_path), true).await {
            Err(problem) if problem.kind == ProblemKind::Conflict => {}
            renamed => {
                renamed?;
                continue;
            }
        }
        let in_way = view.entry(at(&to_path)).await?;
        if view.entry(at(&from)).await?.is_directory() && in_way.is_directory() {
            for entry in all_of(view, at(&from)).await? {
                left.push((from.join(&entry.name)?, to_path.join(&entry.name)?));
            }
            continue;
        }
        match in_way.is_directory() {
            true => remove_tree(view, &to.tenant, &to_path).await?,
            false => view.remove_file(at(&to_path)).await?,
        }
        view.rename(at(&from), at(&to_path), true).await?;
    }
    // What is left of it are directories that were there already.
    remove_tree(view, &from.tenant, &from.path).await
}

/// All entries of a directory; none if it does not exist.
async fn all_of(view: &View, directory: Location) -> Result<Vec<FileEntry>, Problem> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let page = match view.list(directory.clone(), after, PAGE).await {
            Err(problem) if problem.kind == ProblemKind::NotFound => return Ok(all),
            page => page?,
        };
        all.extend(page.entries);
        after = page.after;
        if after.is_none() {
            return Ok(all);
        }
    }
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
