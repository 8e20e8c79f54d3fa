//! The repository of a cluster: a directory with the files of all tenants.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use perigee_http::{BOOT_ID, Clock, boot_id, private_directory};
use perigee_model::{Problem, ProblemKind, TenantName};
use rustix::fs::{XattrFlags, fsetxattr};
use rustix::io::Errno;
use tokio::sync::Semaphore;

use crate::account::Quota;
use crate::errors::problem;
use crate::http::parallel::Uploads;
use crate::listing::SHA256;
use crate::objects::Objects;
use crate::path::DataPath;
use crate::shares::Shares;
use crate::space::{Space, lock};

/// How often objects that nobody names are looked for.
const TIDY_EVERY: Duration = Duration::from_secs(10);

/// The most threads on which one tenant's requests work with the disk or wait for each other. The process has 512 in all, and
/// a change in a large directory can hold up the tenant's others for seconds.
const PLACES: usize = 64;

/// A tenant's files once they are counted. Who comes meanwhile waits here, and holds up no other tenant.
type Opened = Arc<Mutex<Option<Arc<Space>>>>;

/// The files of all tenants.
#[derive(Debug)]
pub struct Repository {
    directory: PathBuf,
    boot_id: String,
    /// How long ago uploads were cut.
    clock: Arc<Clock>,
    spaces: Mutex<BTreeMap<TenantName, Opened>>,
    /// Those that were told, whoever writes. See [`Repository::set_quota`].
    quotas: Mutex<BTreeMap<TenantName, Quota>>,
    /// What is left of [`PLACES`] for each tenant whose users were here.
    places: Mutex<BTreeMap<TenantName, Arc<Semaphore>>>,
    /// Where contents of files are, if not on the disk.
    objects: OnceLock<Arc<Objects>>,
    pub(crate) shares: Shares,
    pub(crate) uploads: Uploads,
}

impl Repository {
    /// Opens a repository, and makes it if there is none.
    ///
    /// # Errors
    /// If the directory can't be used, or its filesystem has no extended attributes.
    pub fn open(directory: &Path) -> Result<Arc<Self>, Problem> {
        private_directory(directory)?;
        check_attributes(directory)?;
        let boot_id = boot_id(Path::new(BOOT_ID));
        let clock = Arc::new(Clock::new(boot_id.clone()));
        Ok(Arc::new(Self {
            directory: directory.to_owned(),
            boot_id,
            clock,
            spaces: Mutex::default(),
            quotas: Mutex::default(),
            places: Mutex::default(),
            objects: OnceLock::new(),
            shares: Shares::open(directory.join("shares.json"))?,
            uploads: Uploads::default(),
        }))
    }

    /// Keeps the contents of new files in an S3 store. To be called before the first use of the repository.
    pub fn keep_in(&self, objects: Arc<Objects>) {
        self.objects.get_or_init(|| objects);
    }

    /// How much a tenant may keep from now on, also when an admin of another tenant writes, who does not bring its quota.
    pub fn set_quota(&self, tenant: &TenantName, quota: Quota) {
        lock(&self.quotas).insert(tenant.clone(), quota);
    }

    /// Drops uploads that nobody has continued for a while. Their parts are on the disk: this may block.
    pub fn drop_idle_uploads(&self) {
        self.uploads.drop_idle();
        let spaces: Vec<Opened> = lock(&self.spaces).values().cloned().collect();
        for space in spaces {
            let opened = lock(&space).clone();
            opened.iter().for_each(|space| space.drop_old_unfinished());
        }
    }

    /// Deletes objects that nobody names any more. It does not end.
    pub async fn tidy(self: Arc<Self>) {
        if self.objects.get().is_none() {
            return std::future::pending().await;
        }
        loop {
            let repository = Arc::clone(&self);
            let spaces = tokio::task::spawn_blocking(move || {
                let opened = |tenant: &TenantName| repository.space(tenant, false);
                let tenants = repository.tenants();
                let spaces = tenants.iter().filter_map(|tenant| opened(tenant).transpose());
                spaces.collect::<Vec<_>>()
            });
            match spaces.await {
                Ok(spaces) => {
                    for space in spaces {
                        match space {
                            Ok(space) => space.delete_garbage().await,
                            Err(problem) => tracing::warn!(%problem, "can't tidy up"),
                        }
                    }
                }
                Err(error) => tracing::error!(%error, "can't tidy up the repository"),
            }
            tokio::time::sleep(TIDY_EVERY).await;
        }
    }

    fn directory_of(&self, tenant: &TenantName) -> PathBuf {
        self.directory.join("tenants").join(tenant.as_str())
    }

    /// A tenant's files; `None` if it has none, unless its directory is to be made. The first call counts them.
    pub(crate) fn space(
        &self,
        tenant: &TenantName,
        make: bool,
    ) -> Result<Option<Arc<Space>>, Problem> {
        let directory = self.directory_of(tenant);
        let opened = {
            let mut spaces = lock(&self.spaces);
            match spaces.get(tenant) {
                Some(opened) => Arc::clone(opened),
                // The names that somebody asks for are not kept.
                None if !make && !directory.is_dir() => return Ok(None),
                None => Arc::clone(spaces.entry(tenant.clone()).or_default()),
            }
        };
        let mut opened = lock(&opened);
        if opened.is_none() && (make || directory.is_dir()) {
            let space =
                Space::open(tenant.clone(), &directory, &self.boot_id, Arc::clone(&self.clock))?;
            // The one before may have been killed between the end of a file and the end of its shares.
            for share in self.shares.of(tenant) {
                if let Ok(path) = DataPath::parse(&share.path)
                    && let Err(problem) = self.end_shares_if_missing(&space, &path)
                {
                    tracing::warn!(%problem, "a share of what is gone does not end");
                }
            }
            *opened = Some(Arc::new(space.kept_in(self.objects.get().cloned())));
        }
        let quota = lock(&self.quotas).get(tenant).copied();
        if let (Some(space), Some(quota)) = (&*opened, quota) {
            space.usage.set_quota(quota);
        }
        Ok(opened.clone())
    }

    /// The tenant's share of the threads that may block.
    pub(crate) fn places(&self, tenant: &TenantName) -> Arc<Semaphore> {
        let new = || Arc::new(Semaphore::new(PLACES));
        Arc::clone(lock(&self.places).entry(tenant.clone()).or_insert_with(new))
    }

    /// Ends the shares of a path whose name was to go: when it has gone, and when it was gone before, because to end them may
    /// have failed then.
    pub(crate) fn end_shares(
        &self,
        space: &Space,
        path: &DataPath,
        gone: &Result<(), Problem>,
    ) -> Result<(), Problem> {
        match gone {
            Ok(()) => self.shares.end(space.tenant(), path),
            Err(_) => self.end_shares_if_missing(space, path),
        }
    }

    fn end_shares_if_missing(&self, space: &Space, path: &DataPath) -> Result<(), Problem> {
        match space.entry(path) {
            Err(problem) if problem.kind == ProblemKind::NotFound => {
                self.shares.end(space.tenant(), path)
            }
            // There is something, or that is not known.
            _ => Ok(()),
        }
    }

    /// Forgets a tenant that has no files: its unfinished uploads, what it shares, and what is shared with it. Another
    /// tenant may get its name. What an upload that is under way still writes gets no name.
    ///
    /// # Errors
    /// `Conflict` if it has files.
    pub fn forget(&self, tenant: &TenantName) -> Result<(), Problem> {
        if let Some(space) = self.space(tenant, false)? {
            let opened = Arc::clone(lock(&self.spaces).entry(tenant.clone()).or_default());
            // Whoever asks for its files waits until they are gone.
            let mut opened = lock(&opened);
            let what = || format!("can't forget the files of tenant {tenant}");
            space.close()?;
            // Objects of files that were deleted just now are deleted soon, as ever.
            let is_empty = space.drop_parts().map_err(|e| problem(what(), e))?;
            let directory = self.directory_of(tenant);
            let removed = if is_empty { std::fs::remove_dir_all(directory) } else { Ok(()) };
            match removed {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Problem::internal(what(), error));
                }
                _ => *opened = None,
            }
        }
        self.uploads.forget(tenant);
        lock(&self.quotas).remove(tenant);
        lock(&self.places).remove(tenant);
        self.shares.forget(tenant)
    }

    /// Whether a tenant has any file or directory.
    ///
    /// # Errors
    /// If its directory can't be used.
    pub fn has_files(&self, tenant: &TenantName) -> Result<bool, Problem> {
        let Some(space) = self.space(tenant, false)? else { return Ok(false) };
        Ok(!space.list(&DataPath::default(), None, 1)?.entries.is_empty())
    }

    /// How many bytes a tenant's files have, and how many files and directories there are. Unfinished uploads count.
    ///
    /// # Errors
    /// If its directory can't be used.
    pub fn used(&self, tenant: &TenantName) -> Result<(u64, u64), Problem> {
        let space = self.space(tenant, false)?;
        Ok(space.map_or((0, 0), |space| {
            let used = space.usage.used();
            (used.bytes, used.files)
        }))
    }

    /// The tenants that have files.
    pub(crate) fn tenants(&self) -> Vec<TenantName> {
        let entries = std::fs::read_dir(self.directory.join("tenants")).into_iter().flatten();
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let mut tenants: Vec<_> = names.filter_map(|name| TenantName::new(name).ok()).collect();
        tenants.sort();
        tenants
    }
}

/// A file's hash is an extended attribute, so the filesystem must have them.
fn check_attributes(directory: &Path) -> Result<(), Problem> {
    let what = || format!("can't keep files in {}", directory.display());
    let probe = directory.join(".probe");
    let made = File::create(&probe).map_err(|e| Problem::invalid(what(), e))?;
    let set = fsetxattr(&made, SHA256, b"", XattrFlags::empty());
    drop(std::fs::remove_file(&probe));
    match set {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP) => {
            Err(Problem::unsupported(what(), "its filesystem has no extended attributes")
                .next("choose a directory on ext4, XFS or Btrfs"))
        }
        Err(error) => Err(Problem::invalid(what(), std::io::Error::from(error))),
    }
}
