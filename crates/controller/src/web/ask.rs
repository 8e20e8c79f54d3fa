//! Asks the API's own functions for what a page shows.

use std::sync::Arc;

use axum::extract::{Query, State};
use axum::http::Method;
use perigee_http::{Failure, Json, Reply};
use perigee_model::job::{ClusterVolume, Job, LogLine, Vm};
use perigee_model::{JobId, Problem, ProblemKind, VmId};
use perigee_web::known::Known;

use crate::api::caller::{Caller, Full, Named};
use crate::api::{self, Sender};
use crate::clock::now_ms;
use crate::cluster::Cluster;

/// So many moving VMs are asked for their migrations.
const MOVES_MAX: usize = 25;

/// Who asks, and when.
#[derive(Clone, Copy)]
pub struct Ask<'a> {
    pub cluster: &'a Arc<Cluster>,
    pub caller: &'a Caller,
    pub now_ms: u64,
}

/// Whether this caller may send the API such a request.
pub fn may(caller: &Caller, method: &Method, path: &str) -> bool {
    api::may(&Sender::User(caller.clone()), method, path)
}

impl<'a> Ask<'a> {
    pub fn new(cluster: &'a Arc<Cluster>, caller: &'a Caller) -> Self {
        Self { cluster, caller, now_ms: now_ms() }
    }

    pub fn state(&self) -> State<Arc<Cluster>> {
        State(Arc::clone(self.cluster))
    }

    /// Whether this caller may read what is at this path of the API.
    pub fn may_get(&self, path: &str) -> bool {
        may(self.caller, &Method::GET, path)
    }

    /// What the API answers at this path, which the table of callers opens or not.
    ///
    /// # Errors
    /// As the API; `Forbidden` if the table does not open the path.
    pub async fn get<T>(
        &self,
        path: &str,
        answer: impl Future<Output = Reply<T>>,
    ) -> Result<T, Problem> {
        self.send(&Method::GET, path, answer).await
    }

    /// The same for another method.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub async fn send<T>(
        &self,
        method: &Method,
        path: &str,
        answer: impl Future<Output = Reply<T>>,
    ) -> Result<T, Problem> {
        if !may(self.caller, method, path) {
            let why = format!("{} may not ask for this", self.caller.who);
            return Err(Problem::forbidden(format!("can't answer {method} {path}"), why));
        }
        answer.await.map(|Json(value)| value).map_err(|Failure(problem)| problem)
    }

    /// The same for a part of a page, which is left out if the caller may not see it, and named if it could not be asked for.
    async fn part<T>(
        &self,
        path: &str,
        answer: impl Future<Output = Reply<T>>,
    ) -> (Option<T>, Option<Problem>) {
        if !self.may_get(path) {
            return (None, None);
        }
        match self.get(path, answer).await {
            Ok(value) => (Some(value), None),
            Err(problem) => (None, Some(problem)),
        }
    }

    /// The thing that this caller means by a name in a path.
    ///
    /// # Errors
    /// `Invalid` for what is no name; `NotFound` for what this caller does not see.
    pub async fn full<N: Named>(&self, name: &str) -> Result<Full<N>, Problem> {
        let meant = Full::meant(self.cluster, self.caller, name.to_owned()).await;
        meant.map_err(|Failure(problem)| problem)
    }

    /// A value of a path that is no tenant's: a host, a rental, a tenant.
    ///
    /// # Errors
    /// `Invalid` for what is no name.
    pub fn word<T: std::str::FromStr<Err: std::fmt::Display>>(
        &self,
        name: &str,
    ) -> Result<api::Name<T>, Problem> {
        name.parse().map(api::Name).map_err(|e: T::Err| Problem::invalid("request path", e))
    }

    /// Everything that the first page shows, asked for at once.
    pub async fn all(&self) -> Known {
        let caller = || self.caller.clone();
        let (hosts, vms, jobs, volumes, tasks, schedules, rentals, audit) = tokio::join!(
            self.part("/v1/hosts", api::hosts::list(self.state())),
            self.part("/v1/vms", api::vms::list_lately(self.state(), caller())),
            self.part("/v1/jobs", api::jobs::list_open(self.state(), caller())),
            self.part("/v1/volumes", api::catalog::volumes(self.state(), caller())),
            self.part("/v1/tasks", api::tasks::list(self.state())),
            self.part("/v1/backup-schedules", api::backups::list_schedules(self.state(), caller())),
            self.part("/v1/rentals", api::rentals::list(self.state())),
            self.part("/v1/audit", api::tenants::last_changes(self.state(), caller())),
        );
        let problems =
            [hosts.1, vms.1, jobs.1, volumes.1, tasks.1, schedules.1, rentals.1, audit.1];
        let mut known = Known {
            now_ms: self.now_ms,
            hosts: hosts.0,
            vms: vms.0,
            jobs: jobs.0,
            volumes: volumes.0,
            tasks: tasks.0,
            schedules: schedules.0,
            rentals: rentals.0,
            audit: audit.0,
            problems: problems.into_iter().flatten().collect(),
            ..Known::default()
        };
        self.add_moves(&mut known).await;
        known
    }

    /// The migrations that are under way, of the VMs that are known. One that ends meanwhile is not among them.
    async fn add_moves(&self, known: &mut Known) {
        let moving = known.vms.iter().flatten().filter(|vm| vm.migration.is_some());
        let moving: Vec<VmId> = moving.map(|vm| vm.id.clone()).collect();
        known.more_migrations = moving.len().saturating_sub(MOVES_MAX);
        let asked = moving.iter().take(MOVES_MAX).map(|vm| async move {
            let path = format!("/v1/vms/{vm}/migrations");
            self.get(&path, api::vms::migrations(self.state(), Full(vm.clone()))).await
        });
        for answer in futures_util::future::join_all(asked).await {
            match answer {
                Ok(all) => {
                    let last = all.into_iter().next_back().filter(|last| !last.state.is_final());
                    known.migrations.extend(last);
                }
                // The VM has ended meanwhile.
                Err(problem) if problem.kind == ProblemKind::NotFound => {}
                Err(problem) => known.problems.push(problem),
            }
        }
    }

    /// What this caller's VMs and volumes take of hosts is made of these.
    ///
    /// # Errors
    /// As the API.
    pub async fn vms_and_volumes(&self) -> Result<(Vec<Vm>, Vec<ClusterVolume>), Problem> {
        let caller = || self.caller.clone();
        tokio::try_join!(
            self.get("/v1/vms", api::vms::list_lately(self.state(), caller())),
            self.get("/v1/volumes", api::catalog::volumes(self.state(), caller())),
        )
    }

    /// A job.
    ///
    /// # Errors
    /// As the API.
    pub async fn job(&self, name: &str) -> Result<Job, Problem> {
        let (path, full) = (format!("/v1/jobs/{name}"), self.full(name).await?);
        self.get(&path, api::jobs::info(self.state(), full, Ok(Query::default()))).await
    }

    /// The lines of a job's log after this one, at most `limit`.
    ///
    /// # Errors
    /// As the API.
    pub async fn log(
        &self,
        job: &JobId,
        (rank, after, limit): (Option<u32>, u64, Option<usize>),
    ) -> Result<Vec<LogLine>, Problem> {
        let path = format!("/v1/jobs/{job}/log");
        let page = api::jobs::Page { after, limit, rank, after_each: None };
        let asked = api::jobs::log(self.state(), Full(job.clone()), Ok(Query(page)));
        self.get(&path, asked).await
    }
}
