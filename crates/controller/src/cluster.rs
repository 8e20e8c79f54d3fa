//! What all parts of the controller share: records, hosts, files, and the tasks that drive things.

use std::collections::BTreeSet;
use std::fs::File;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use perigee_model::job::MigrationState;
use perigee_model::{JobId, Problem};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::hosts::Hosts;
use crate::records::{JobRecord, MigrationRecord, Records, job_key};
use crate::store::SqliteStore;
use crate::{cleaner, files, jobs, links, migration};

/// How often and how long; the tests use shorter ones.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Between two looks at a job's VM or a migration.
    pub poll: Duration,
    /// Between two looks at a job's figures.
    pub figures: Duration,
    /// Between two looks at a host, and between tries of a clean-up.
    pub monitor: Duration,
    /// A host that did not answer for so long is unreachable.
    pub host_deadline: Duration,
    /// From VM start to the runner's first word.
    pub boot_deadline: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            poll: Duration::from_millis(250),
            figures: Duration::from_millis(500),
            monitor: Duration::from_secs(2),
            host_deadline: Duration::from_secs(30),
            boot_deadline: Duration::from_secs(300),
        }
    }
}

pub struct Cluster {
    pub records: Records,
    pub hosts: Hosts,
    pub state_dir: PathBuf,
    pub timing: Timing,
    /// Held while room is looked for and taken, so that nothing is given out twice.
    pub placing: tokio::sync::Mutex<()>,
    /// Held while links are measured or images go over them: each would measure the other.
    pub network: tokio::sync::Mutex<()>,
    /// Held by whoever takes things down.
    pub cleaning: tokio::sync::Mutex<()>,
    /// Wakes the cleaner.
    pub clean_now: Notify,
    tasks: Mutex<JoinSet<()>>,
    /// Keeps a second controller away from the state directory.
    lock: Mutex<Option<File>>,
    driven: Mutex<BTreeSet<String>>,
    /// Jobs that have a driver: all that are not in a final state. Saves reading the ended ones.
    unfinished: Mutex<BTreeSet<JobId>>,
}

impl Cluster {
    /// Reads the state of an earlier run and goes on with all that is unfinished.
    ///
    /// # Errors
    /// When the state directory cannot be used.
    pub async fn start(state_dir: &Path, timing: Timing) -> Result<Arc<Self>, Problem> {
        std::fs::create_dir_all(state_dir)
            .map_err(|e| Problem::internal(format!("make {}", state_dir.display()), e))?;
        let lock = lock(state_dir)?;
        files::prepare(state_dir)?;
        let records = Records::new(Arc::new(SqliteStore::open(&state_dir.join("state.db"))?));
        let hosts = Hosts::load(&records, timing.host_deadline).await?;
        let cluster = Arc::new(Self {
            records,
            hosts,
            state_dir: state_dir.to_owned(),
            timing,
            placing: tokio::sync::Mutex::default(),
            network: tokio::sync::Mutex::default(),
            cleaning: tokio::sync::Mutex::default(),
            clean_now: Notify::new(),
            tasks: Mutex::default(),
            lock: Mutex::new(Some(lock)),
            driven: Mutex::default(),
            unfinished: Mutex::default(),
        });
        cluster.resume().await?;
        cluster.spawn(crate::hosts::monitor(Arc::clone(&cluster)));
        cluster.spawn(links::measure_new_links(Arc::clone(&cluster)));
        cluster.spawn(cleaner::run(Arc::clone(&cluster)));
        Ok(cluster)
    }

    async fn resume(self: &Arc<Self>) -> Result<(), Problem> {
        let mut jobs = self.jobs().await?;
        jobs.retain(|record| !record.job.state.is_final());
        // All of them first: every driver counts what the others hold.
        self.unfinished
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(jobs.iter().map(|record| record.job.id.clone()));
        for record in &jobs {
            self.drive_job(&record.job.id);
        }
        for record in self.unfinished_migrations().await? {
            self.drive_migration(&record);
        }
        Ok(())
    }

    /// Every job, ended ones too, in the order of their ids.
    pub async fn jobs(&self) -> Result<Vec<JobRecord>, Problem> {
        self.records.list("jobs/").await
    }

    /// Jobs that still hold a host's memory or volumes.
    pub async fn unfinished_jobs(&self) -> Result<Vec<JobRecord>, Problem> {
        let ids = self.unfinished.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut jobs = Vec::with_capacity(ids.len());
        for id in ids {
            match self.records.read::<JobRecord>(&job_key(&id)).await? {
                Some(record) if !record.job.state.is_final() => jobs.push(record),
                _ => {
                    self.unfinished.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
                }
            }
        }
        Ok(jobs)
    }

    pub async fn unfinished_migrations(&self) -> Result<Vec<MigrationRecord>, Problem> {
        let mut all: Vec<MigrationRecord> = self.records.list("migrations/").await?;
        all.retain(|record| !record.migration.state.is_final());
        Ok(all)
    }

    /// Migrations that their jobs have not taken into account: the VM is on its way, or at the
    /// destination already while its job's record still names the source.
    pub async fn unsettled_migrations(
        &self,
        jobs: &[JobRecord],
    ) -> Result<Vec<MigrationRecord>, Problem> {
        let mut all: Vec<MigrationRecord> = self.records.list("migrations/").await?;
        all.retain(|record| {
            let vm = Some(&record.migration.vm);
            let job = jobs.iter().find(|job| job.job.vm.as_ref() == vm);
            record.migration.state != MigrationState::Aborted
                && job.is_some_and(|job| record.number > job.settled)
        });
        Ok(all)
    }

    pub fn drive_job(self: &Arc<Self>, job: &JobId) {
        let (cluster, job) = (Arc::clone(self), job.clone());
        self.unfinished.lock().unwrap_or_else(PoisonError::into_inner).insert(job.clone());
        self.drive(format!("job {job}"), move || jobs::drive(Arc::clone(&cluster), job.clone()));
    }

    pub fn drive_migration(self: &Arc<Self>, record: &MigrationRecord) {
        let (cluster, vm, number) = (Arc::clone(self), record.migration.vm.clone(), record.number);
        self.drive(format!("migration {}", record.migration.id), move || {
            migration::drive(Arc::clone(&cluster), vm.clone(), number)
        });
    }

    /// Runs a driver until it says that its thing has ended. A driver that fails reads its record
    /// again after a second: what it did before is recorded there.
    fn drive<F>(self: &Arc<Self>, name: String, driver: impl Fn() -> F + Send + 'static)
    where
        F: Future<Output = Result<(), Problem>> + Send + 'static,
    {
        if !self.driven.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone()) {
            return;
        }
        let cluster = Arc::clone(self);
        self.spawn(async move {
            while let Err(problem) = driver().await {
                tracing::error!("{name}: {problem}");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            cluster.driven.lock().unwrap_or_else(PoisonError::into_inner).remove(&name);
        });
    }

    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    /// Stops every task where it is; all of them can go on from their records.
    pub async fn stop(&self) {
        let mut tasks =
            std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        tasks.shutdown().await;
        self.lock.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// The kernel gives the lock back when the process ends, however it ends.
fn lock(state_dir: &Path) -> Result<File, Problem> {
    let path = state_dir.join("lock");
    let file = File::create(&path)
        .map_err(|e| Problem::internal(format!("make {}", path.display()), e))?;
    file.try_lock().map_err(|e| {
        Problem::conflict(format!("use the state directory {}", state_dir.display()), e)
            .next("another controller uses it: stop that one, or choose another directory")
    })?;
    Ok(file)
}

pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
