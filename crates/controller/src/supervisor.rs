//! Starts the controller's tasks: one driver for each unfinished job and migration, and the tasks for hosts,
//! links and cleanups.
//!
//! A driver that fails is started again after a pause, and continues from its record. This is also done after a
//! panic, which is then shown on the job. The other tasks never end, and are started again after a panic too.

mod clock;

use std::collections::BTreeMap;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;
use perigee_http::notify;
use perigee_model::job::JobState;
use perigee_model::vm::HostReport;
use perigee_model::volume::PoolInfo;
use perigee_model::{JobId, Problem};
use perigee_repository::Objects;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};

use crate::cluster::tasks::{Task, text_of};
use crate::cluster::{Cluster, Settings, Timing, Traffic, Wanted};
use crate::files::{inputs, outputs};
use crate::hosts::{enrol, watching};
use crate::planning::links;
use crate::records::{JOB_INTENTS, job_intent_key};
use crate::storage::{backups, images, left_behind, moves, replicas};
use crate::{
    accounts, admissions, amounts, balance, cleaner, drain, hosts, jobs, ledger, measuring,
    migration, networks, prices, rentals, restored, scheduler, term,
};

/// How long a controller that starts waits for hosts that could refuse it.
const PROVE_MAX: Duration = Duration::from_secs(2);

/// The pause before a driver that failed is started again. It doubles with each failure, up to the maximum.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Starts the endless tasks, and one driver for each job, migration, move of a volume and replica that is not over. A
/// driver that fails is started again.
pub struct Supervisor {
    pub cluster: Arc<Cluster>,
    tasks: Mutex<JoinSet<()>>,
    /// The running drivers, and whether each was requested again since it started.
    driven: Mutex<BTreeMap<Wanted, bool>>,
    /// Waits until another controller commands.
    superseded: Mutex<Option<AbortHandle>>,
}

impl Supervisor {
    /// As [`Supervisor::start_with`], with the contents of files on the disk and the settings of a controller that was told nothing.
    ///
    /// # Errors
    /// As [`Supervisor::start_with`].
    #[cfg(test)]
    pub async fn start(
        state_dir: &Path,
        timing: Timing,
        traffic: Traffic,
    ) -> Result<Arc<Self>, Problem> {
        Self::start_with(state_dir, timing, traffic, Settings::default(), None).await
    }

    /// Reads the state of an earlier run and continues everything that is unfinished. The contents of users' files are in
    /// `objects`, if it is given.
    ///
    /// # Errors
    /// If the state directory cannot be used.
    pub async fn start_with(
        state_dir: &Path,
        timing: Timing,
        traffic: Traffic,
        settings: Settings,
        objects: Option<Arc<Objects>>,
    ) -> Result<Arc<Self>, Problem> {
        let (wanted, requests) = mpsc::unbounded_channel();
        let cluster = Cluster::open(state_dir, timing, traffic, settings, wanted).await?;
        objects.into_iter().for_each(|objects| cluster.repository.keep_in(objects));
        accounts::tell_quotas(&cluster);
        enrol::know_revoked(&cluster).await?;
        enrol::know_enrolled_here(&cluster).await?;
        let supervisor = Arc::new(Self {
            cluster: Arc::clone(&cluster),
            tasks: Mutex::default(),
            driven: Mutex::default(),
            superseded: Mutex::default(),
        });
        supervisor.end_when_superseded();
        prove(&cluster).await;
        if cluster.claim.refusal().is_none() {
            supervisor.begin(requests).await?;
        }
        Ok(supervisor)
    }

    /// Looks at the hosts, and continues everything that is unfinished: after a restore only when each host was heard or given up.
    async fn begin(
        self: &Arc<Self>,
        requests: mpsc::UnboundedReceiver<Wanted>,
    ) -> Result<(), Problem> {
        self.keep_running("the monitor of the hosts", hosts::monitor);
        self.keep_running("the watchers of the hosts", watching::run);
        self.keep_running("the controller's own certificate", enrol::keep_own_certificate);
        self.keep_running("the watch over the clock", clock::watch);
        if self.cluster.restored.waits_for().is_none() {
            self.go_on().await?;
            self.keep_acting(requests);
            return Ok(());
        }
        let supervisor = Arc::clone(self);
        self.spawn(async move {
            let wait = || AssertUnwindSafe(restored::wait(&supervisor.cluster)).catch_unwind();
            while let Err(panic) = wait().await {
                let text = text_of(&*panic);
                tracing::error!("the wait for all hosts panicked: {text}; it begins again");
                tokio::time::sleep(PAUSE_MAX).await;
            }
            while let Err(problem) = supervisor.go_on().await {
                tracing::error!("can't go on after the restore, trying again: {problem}");
                tokio::time::sleep(PAUSE_MAX).await;
            }
            supervisor.keep_acting(requests);
        });
        Ok(())
    }

    /// Starts the drivers of what is unfinished.
    async fn go_on(self: &Arc<Self>) -> Result<(), Problem> {
        let cluster = &self.cluster;
        let asked = cluster.records.keys(JOB_INTENTS).await?;
        replicas::drive_all(cluster).await?;
        backups::drive_all(cluster).await?;
        for record in cluster.unfinished_jobs() {
            let id = &record.job.id;
            // A queued job has no driver while it waits, unless a person requested something of it, or it was about to be placed. A VM's disks may be being made.
            let waits = record.job.state == JobState::Queued
                && record.ending.is_none()
                && !record.kind.is_made_of_backup();
            if !waits || asked.contains(&job_intent_key(id)) || jobs::is_reserved(cluster, &record)
            {
                cluster.drive_job(id);
            }
        }
        migration::queue_all(cluster);
        for record in cluster.unfinished_migrations() {
            cluster.drive_migration(&record);
        }
        for record in cluster.index.unfinished_volume_moves() {
            cluster.drive_volume_move(&record.view.volume);
        }
        rentals::drive_all(cluster);
        Ok(())
    }

    /// Starts the drivers that are wanted from now on, and the endless tasks that change something.
    fn keep_acting(self: &Arc<Self>, requests: mpsc::UnboundedReceiver<Wanted>) {
        let supervisor = self;
        supervisor.spawn(begin_wanted(Arc::clone(supervisor), requests));
        supervisor.keep_running("the telling of hosts about networks", networks::keep);
        supervisor.keep_running("the measuring of links", links::run);
        supervisor.keep_running("the scheduler", scheduler::run);
        supervisor.keep_running("the cleaner", cleaner::run);
        supervisor.keep_running("the drain of hosts", drain::run);
        supervisor.keep_running("the balance of loads", balance::run);
        supervisor.keep_running("the memory of VMs", amounts::run);
        supervisor.keep_running("the measuring of hosts", measuring::run);
        supervisor.keep_running("the lists of providers", rentals::compare);
        supervisor.keep_running("the notices of providers", rentals::hear);
        supervisor.keep_running("the keeping of disks", rentals::keep_disks);
        supervisor.keep_running("the renting of hosts", rentals::rent_by_itself);
        supervisor.keep_running("the promotion of replicas", replicas::run);
        supervisor.keep_running("the schedules of backups", backups::run);
        supervisor.keep_running("the keys of restores", backups::send_lost_keys);
        supervisor.keep_running("the shadows of volumes", left_behind::run);
        supervisor.keep_running("imports whose answer was lost", images::finish_imports);
        supervisor.keep_running("the letting in of hosts to volumes", admissions::keep);
        supervisor.keep_running("the sources of copies", images::replace_lost_sources);
        supervisor.keep_running("the collecting of input files", inputs::collect);
        supervisor.keep_running("the staging of queued jobs' inputs", inputs::stage_ahead);
        supervisor.keep_running("the erasure of deleted VMs", jobs::keep_erasing);
        supervisor.keep_running("the reading of prices", prices::keep);
        supervisor.keep_running("the summing up of the ledger", ledger::keep);
        supervisor.keep_running("the retention of outputs", outputs::keep_to_retention);
    }

    /// Ends all tasks when a host has shown that another controller commands. The API goes on, to say so.
    fn end_when_superseded(self: &Arc<Self>) {
        let (supervisor, cluster) = (Arc::downgrade(self), Arc::clone(&self.cluster));
        let watch = tokio::spawn(async move {
            let refusal = cluster.claim.until_refused().await;
            let problem =
                term::superseded(&cluster.state_dir, "the cluster is not commanded", &refusal);
            tracing::error!("{problem}");
            notify::status("another controller commands the hosts: this one changes nothing");
            if let Err(problem) = term::note(&cluster.records, &refusal).await {
                tracing::error!("the next start will ask the hosts again: {problem}");
            }
            if let Some(supervisor) = supervisor.upgrade() {
                supervisor.end_tasks().await;
            }
        });
        *self.superseded.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(watch.abort_handle());
    }

    fn drive(self: &Arc<Self>, wanted: Wanted) {
        let cluster = Arc::clone(&self.cluster);
        match wanted.clone() {
            Wanted::Job(id) => {
                self.keep(wanted, move || Box::pin(jobs::drive(Arc::clone(&cluster), id.clone())))
            }
            Wanted::Migration { vm, number } => self.keep(wanted, move || {
                Box::pin(migration::drive(Arc::clone(&cluster), vm.clone(), number))
            }),
            Wanted::VolumeMove(volume) => self
                .keep(wanted, move || Box::pin(moves::drive(Arc::clone(&cluster), volume.clone()))),
            Wanted::Rental(id) => self
                .keep(wanted, move || Box::pin(rentals::drive(Arc::clone(&cluster), id.clone()))),
            Wanted::Backup(name) => self
                .keep(wanted, move || Box::pin(backups::drive(Arc::clone(&cluster), name.clone()))),
            Wanted::Restore(layer) => self.keep(wanted, move || {
                Box::pin(backups::drive_restore(Arc::clone(&cluster), layer))
            }),
            Wanted::Replica(volume, site) => self.keep(wanted, move || {
                Box::pin(replicas::drive(Arc::clone(&cluster), volume.clone(), site.clone()))
            }),
        }
    }

    /// Runs a driver until it reports that nothing is left to do.
    fn keep<F>(self: &Arc<Self>, wanted: Wanted, driver: impl Fn() -> F + Send + 'static)
    where
        F: Future<Output = Result<(), Problem>> + Send + 'static,
    {
        let mut driven = self.driven.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(again) = driven.get_mut(&wanted) {
            *again = true;
            return;
        }
        driven.insert(wanted.clone(), false);
        drop(driven);
        let supervisor = Arc::clone(self);
        self.spawn(async move {
            let mut pause = PAUSE;
            loop {
                // After a panic the record is as it was last saved. Drivers share nothing else.
                match AssertUnwindSafe(driver()).catch_unwind().await {
                    Ok(Ok(())) if supervisor.is_over(&wanted) => return,
                    Ok(Ok(())) => pause = PAUSE,
                    Ok(Err(problem)) => {
                        tracing::error!("{wanted:?}: {problem}");
                        tokio::time::sleep(pause).await;
                        pause = (pause * 2).min(PAUSE_MAX);
                    }
                    Err(panic) => {
                        supervisor.report_panic(&wanted, &text_of(&*panic), pause).await;
                        tokio::time::sleep(pause).await;
                        pause = (pause * 2).min(PAUSE_MAX);
                    }
                }
            }
        });
    }

    /// Runs a task that has no end, and starts it again after a panic.
    fn keep_running<F>(
        &self,
        name: &'static str,
        task: impl Fn(Arc<Cluster>, Task) -> F + Send + 'static,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        let cluster = Arc::clone(&self.cluster);
        let report = Task::new(&cluster.tasks, name);
        self.spawn(async move {
            let mut pause = PAUSE;
            // These tasks read what they need from the cluster's state when they begin.
            loop {
                let run = task(Arc::clone(&cluster), report.clone());
                let Err(panic) = AssertUnwindSafe(run).catch_unwind().await else { return };
                let text = text_of(&*panic);
                report.panicked(&text);
                tracing::error!("{name} panicked: {text}; it is started again in {pause:?}");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(PAUSE_MAX);
            }
        });
    }

    /// Whether the driver was not requested again while it ran; if so, it is removed.
    fn is_over(&self, wanted: &Wanted) -> bool {
        let mut driven = self.driven.lock().unwrap_or_else(PoisonError::into_inner);
        match driven.get_mut(wanted) {
            Some(again) if *again => {
                *again = false;
                false
            }
            _ => {
                driven.remove(wanted);
                true
            }
        }
    }

    /// Shows a fault of the controller where people look: on the job.
    async fn report_panic(&self, wanted: &Wanted, text: &str, pause: Duration) {
        tracing::error!("{wanted:?}: its driver panicked: {text}");
        let job = match wanted {
            Wanted::Job(id) => Ok(id.clone()),
            Wanted::Migration { vm, .. } => JobId::new(vm.as_str()),
            // It is logged above; the volume may belong to no job.
            Wanted::VolumeMove(_)
            | Wanted::Replica(..)
            | Wanted::Rental(_)
            | Wanted::Backup(_)
            | Wanted::Restore(_) => {
                return;
            }
        };
        let Ok(job) = job else { return };
        let reason = format!(
            "a fault in the controller stopped its driver ({text}); it is started again after {} s",
            pause.as_secs()
        );
        if let Err(problem) = jobs::report_fault(&self.cluster, &job, &reason).await {
            tracing::error!("job {job}: {problem}");
        }
    }

    /// Starts a task that ends with the supervisor.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    /// Stops every task at once. All of them can continue from their records.
    pub async fn stop(&self) {
        let watch = self.superseded.lock().unwrap_or_else(PoisonError::into_inner).take();
        watch.inspect(AbortHandle::abort);
        self.end_tasks().await;
        self.cluster.release();
    }

    async fn end_tasks(&self) {
        let mut tasks =
            std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        tasks.shutdown().await;
    }
}

/// Asks all hosts for something, so that one that has seen a newer term can say so before anything is commanded. One that does not answer soon
/// is not waited for.
async fn prove(cluster: &Cluster) {
    let hosts = cluster.hosts.all();
    let asked = hosts.iter().map(async |host| {
        let agent = host.agent.get::<HostReport>("/v1/host");
        // What they say is asked for again. Only a refusal counts, and the client has noted it.
        drop(futures_util::join!(agent, host.volume.get::<PoolInfo>("/v1/pool")));
    });
    drop(tokio::time::timeout(PROVE_MAX, join_all(asked)).await);
}

async fn begin_wanted(supervisor: Arc<Supervisor>, mut requests: mpsc::UnboundedReceiver<Wanted>) {
    while let Some(wanted) = requests.recv().await {
        supervisor.drive(wanted);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::records::job_key;

    #[tokio::test]
    async fn a_driver_that_panics_is_named_on_its_job_and_started_again() {
        let dir = tempfile::tempdir().expect("tempdir");
        let supervisor =
            Supervisor::start(dir.path(), Timing::default(), Traffic::Plain).await.expect("start");
        let cluster = Arc::clone(&supervisor.cluster);
        let id = JobId::new("q-0001").expect("name");
        let spec = crate::tests::spec(perigee_model::job::Access::Read);
        let record = jobs::new_record(id.clone(), spec);
        assert!(cluster.records.create(&job_key(&id), &record).await.expect("create"));
        let starts = Arc::new(AtomicU32::new(0));
        let (ended, second_start) = mpsc::unbounded_channel();
        let mut second_start = second_start;
        supervisor.keep(Wanted::Job(id.clone()), {
            let starts = Arc::clone(&starts);
            move || {
                let (starts, ended) = (Arc::clone(&starts), ended.clone());
                async move {
                    if starts.fetch_add(1, Ordering::SeqCst) == 0 {
                        panic!("no such disk");
                    }
                    ended.send(()).expect("the test waits");
                    Ok(())
                }
            }
        });
        tokio::time::timeout(Duration::from_secs(60), second_start.recv())
            .await
            .expect("waited 60 s for the second start");
        let reason = jobs::get(&cluster, &id).await.expect("job").reason;
        assert!(reason.contains("a fault in the controller") && reason.contains("no such disk"));
        supervisor.stop().await;
    }
    #[tokio::test]
    async fn a_task_without_an_end_is_started_again_after_a_panic() {
        let dir = tempfile::tempdir().expect("tempdir");
        let supervisor =
            Supervisor::start(dir.path(), Timing::default(), Traffic::Plain).await.expect("start");
        let starts = Arc::new(AtomicU32::new(0));
        let (runs, mut second_start) = mpsc::unbounded_channel();
        supervisor.keep_running("a task", {
            let starts = Arc::clone(&starts);
            move |_, _| {
                let (starts, runs) = (Arc::clone(&starts), runs.clone());
                async move {
                    assert!(starts.fetch_add(1, Ordering::SeqCst) > 0, "not the first time");
                    runs.send(()).expect("the test waits");
                    std::future::pending().await
                }
            }
        });
        tokio::time::timeout(Duration::from_secs(60), second_start.recv())
            .await
            .expect("waited 60 s for the second start");
        let all = supervisor.cluster.tasks.all();
        let task = all.iter().find(|task| task.name == "a task").expect("its status");
        assert!(task.problem.contains("not the first time"), "{task:?}");
        assert_eq!((task.rounds, task.failures), (1, 1), "{task:?}");
        supervisor.stop().await;
    }
}
