//! Which path is which page.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::extract::Query;
use axum::http::header::CONTENT_DISPOSITION;
use axum::http::{HeaderMap, Uri};
use axum::response::{Html, IntoResponse as _, Response};
use perigee_http::Failure;
use perigee_model::job::{ClusterVolume, Host, Job, LogLine, Sample, Vm};
use perigee_model::tenant::Tenant;
use perigee_model::{HostId, JobId, Problem, RentalId, TenantName, VmId, VolumeName};
use perigee_web::lists::{self, Asked};
use perigee_web::parts::{Log, Page};
use perigee_web::{Frame, front, money, sites, things};
use serde::Deserialize;

use super::ask::Ask;
use super::{Shared, actions, live, machine};
use crate::api::caller::{Caller, Full};
use crate::api::{self, cookie};
use crate::cluster::Cluster;
use crate::jobs;

/// The pages on which nothing is asked.
pub const PATHS: [&str; 18] = [
    "/",
    "/jobs",
    "/jobs/{job}",
    "/queue",
    "/vms",
    "/vms/{vm}",
    "/vms/{vm}/console",
    "/vms/{vm}/screen",
    "/volumes",
    "/volumes/{volume}",
    "/sites",
    "/audit",
    "/tenants",
    "/tenants/{tenant}",
    "/hosts",
    "/hosts/{host}",
    "/rentals",
    "/rentals/{rental}",
];

/// So many lines of a log's end are shown.
const LOG_LINES: usize = 500;
/// The script has the log already, and asks for the rest of the page with this header.
const WITHOUT_LOG: &str = "perigee-without-log";
/// The script was told that the page has this state now, and asks for it.
const TOLD: &str = "perigee-state";
/// The end of a log is looked for among so many of the last messages of a guest at first.
const LOG_MESSAGES: u64 = 1000;
/// Where too few of them are lines, it is looked for among so many times as many.
const LOG_FURTHER: u64 = 8;
/// A log is read in so many pieces at most; more than it has ([`crate::jobs`] keeps 16 MiB).
const LOG_READS_MAX: usize = 64;
/// So many changes are on the page of the audit log.
const CHANGES: usize = 500;

/// What the query of a page may say.
#[derive(Debug, Default, Deserialize)]
pub struct Shown {
    /// What a list's names have in them.
    #[serde(default)]
    find: String,
    /// The number of a list's page, from 1 on.
    #[serde(default)]
    page: usize,
    /// The VM of a job with several ones whose log is shown.
    rank: Option<u32>,
}

/// Any of the pages.
pub async fn show(
    axum::extract::State(web): Shared,
    caller: Caller,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Html<String>, Failure> {
    let told = headers.get(TOLD).and_then(|state| state.to_str().ok());
    let text = web.looks.page(&web.cluster, &caller, &uri, told).await?;
    let rank = shown(&uri)?.rank;
    let ask = Ask::new(&web.cluster, &caller);
    let log = match (job_of(&uri), machine::console_of(uri.path())) {
        (None, None) => None,
        _ if headers.contains_key(WITHOUT_LOG) => Some(Log::default()),
        (Some(job), _) => Some(log(&ask, job, rank).await?),
        (None, Some(vm)) => Some(machine::printed(&ask, vm).await?),
    };
    let has_machine = machine::is_machine(uri.path());
    let path = uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
    let frame = Frame {
        who: caller.who.clone(),
        role: Some(caller.role),
        can_log_out: cookie::token(&headers, uri.path()).is_some(),
        is_live: !has_machine && !actions::is_question(uri.path()),
        has_machine,
        path,
    };
    Ok(Html(text.document(log.as_ref(), &frame)))
}

fn shown(uri: &Uri) -> Result<Shown, Problem> {
    let query = Query::<Shown>::try_from_uri(uri);
    query.map(|Query(shown)| shown).map_err(|e| Problem::invalid("request query", e.body_text()))
}

/// The job whose page this is.
pub fn job_of(uri: &Uri) -> Option<&str> {
    let name = uri.path().strip_prefix("/jobs/")?;
    (!name.is_empty() && !name.contains('/')).then_some(name)
}

/// What a page shows, but for a job's log.
///
/// # Errors
/// As the API; `NotFound` if there is no such page.
pub async fn page(cluster: &Arc<Cluster>, caller: &Caller, uri: &Uri) -> Result<Page, Problem> {
    let page = page_of(&Ask::new(cluster, caller), uri).await?;
    let page = Page { notice: api::notice(cluster).unwrap_or_default(), ..page };
    // Others see the names of hosts, and no more of them.
    Ok(if caller.is_admin() { page } else { page.without_links("/hosts/") })
}

async fn page_of(ask: &Ask<'_>, uri: &Uri) -> Result<Page, Problem> {
    let caller = ask.caller;
    let Shown { find, page, .. } = shown(uri)?;
    let asked = Asked { find, page };
    let parts: Vec<&str> = uri.path().split('/').skip(1).collect();
    match parts[..] {
        [""] => Ok(front::page(&ask.all().await)),
        ["jobs"] => jobs(ask, &asked).await,
        ["jobs", job] => job_page(ask, job).await,
        ["queue"] => {
            let all = ask.get("/v1/jobs", api::jobs::list(ask.state(), caller.clone())).await?;
            Ok(front::queue(&all, &asked, ask.now_ms))
        }
        ["vms"] => {
            let answer = api::vms::list_lately(ask.state(), caller.clone());
            let all = ask.get("/v1/vms", answer).await?;
            let has = |vm: &Vm, text: &str| vm.id.as_str().contains(text);
            let rows = |shown: Vec<_>| front::vms("vms", shown.into_iter());
            Ok(lists::page("VMs", "/vms", "perigee vm list", &all, &asked, has, rows))
        }
        ["vms", vm] => vm_page(ask, vm).await,
        ["vms", vm, "console"] => machine::page(ask, vm, things::console).await,
        ["vms", vm, "screen"] => machine::page(ask, vm, things::screen).await,
        ["volumes"] => {
            let answer = api::catalog::volumes(ask.state(), caller.clone());
            let all = ask.get("/v1/volumes", answer).await?;
            let has = |volume: &ClusterVolume, text: &str| volume.name.as_str().contains(text);
            let rows = |shown: Vec<_>| things::volumes("volumes", shown.into_iter());
            Ok(lists::page("Volumes", "/volumes", "perigee volume list", &all, &asked, has, rows))
        }
        ["volumes", volume] => {
            let full: Full<VolumeName> = ask.full(volume).await?;
            let path = format!("/v1/volumes/{volume}");
            let found = ask.get(&path, api::catalog::volume(ask.state(), full)).await?;
            Ok(things::volume(&found, ask.now_ms))
        }
        ["hosts"] => {
            let all = ask.get("/v1/hosts", api::hosts::list(ask.state())).await?;
            let (vms, volumes) = ask.vms_and_volumes().await?;
            let held = front::Held::of(&vms, &volumes);
            let has = |host: &Host, text: &str| host.id.as_str().contains(text);
            let rows = |shown: Vec<_>| front::hosts("hosts", shown.into_iter(), &held);
            Ok(lists::page("Hosts", "/hosts", "perigee host list", &all, &asked, has, rows))
        }
        ["hosts", host] => host_page(ask, host).await,
        ["sites"] => sites_page(ask).await,
        ["rentals"] => rentals(ask).await,
        ["rentals", rental] => {
            let path = format!("/v1/rentals/{rental}");
            let answer = api::rentals::info(ask.state(), ask.word::<RentalId>(rental)?);
            Ok(money::rental(&ask.get(&path, answer).await?, ask.now_ms))
        }
        ["tenants"] if ask.may_get("/v1/tenants") => {
            let all = ask.get("/v1/tenants", api::tenants::list(ask.state())).await?;
            let has = |tenant: &Tenant, text: &str| tenant.name.as_str().contains(text);
            let rows = |shown: Vec<_>| money::tenants(shown.into_iter());
            let (title, command) = ("Tenants and quotas", "perigee tenant list");
            Ok(lists::page(title, "/tenants", command, &all, &asked, has, rows))
        }
        // Whoever is no admin has one.
        ["tenants"] => tenant(ask, caller.tenant.as_str()).await,
        ["tenants", name] => tenant(ask, name).await,
        ["audit"] => audit(ask).await,
        _ => match actions::question(ask, &parts).await {
            Some(page) => page,
            None => Err(Problem::not_found(format!("GET {}", uri.path()), "there is no such page")
                .next("the first page is /")),
        },
    }
}

async fn jobs(ask: &Ask<'_>, asked: &Asked) -> Result<Page, Problem> {
    let answer = api::jobs::list(ask.state(), ask.caller.clone());
    let mut all = ask.get("/v1/jobs", answer).await?;
    all.reverse();
    let has =
        |job: &Job, text: &str| job.id.as_str().contains(text) || job.spec.owner.contains(text);
    let rows = |shown: Vec<_>| {
        front::jobs("jobs", "Jobs, the newest first", shown.into_iter(), ask.now_ms)
    };
    Ok(lists::page("Jobs", "/jobs", "perigee job list", &all, asked, has, rows))
}

async fn job_page(ask: &Ask<'_>, name: &str) -> Result<Page, Problem> {
    let job = ask.job(name).await?;
    let path = format!("/v1/jobs/{}/decisions", job.id);
    let full: Full<JobId> = Full(job.id.clone());
    let decisions = ask.get(&path, api::jobs::decisions(ask.state(), full)).await?;
    let samples = samples(ask, &job.id).await?;
    Ok(perigee_web::job::page(&job, &decisions, &samples, ask.now_ms))
}

async fn vm_page(ask: &Ask<'_>, name: &str) -> Result<Page, Problem> {
    let full: Full<VmId> = ask.full(name).await?;
    let again = Full(full.0.clone());
    let (path, moves) = (format!("/v1/vms/{name}"), format!("/v1/vms/{name}/migrations"));
    let vm = ask.get(&path, api::vms::info(ask.state(), full)).await?;
    let moves = ask.get(&moves, api::vms::migrations(ask.state(), again)).await?;
    // One without a job has none.
    let job = vm.job.as_ref().and_then(|_| JobId::new(vm.id.as_str()).ok());
    let samples = match &job {
        Some(job) => samples(ask, job).await?,
        None => Vec::new(),
    };
    Ok(things::vm(&vm, &moves, &samples, ask.now_ms))
}

async fn samples(ask: &Ask<'_>, job: &JobId) -> Result<Vec<Sample>, Problem> {
    let path = format!("/v1/jobs/{job}/samples");
    ask.get(&path, api::jobs::samples(ask.state(), Full(job.clone()))).await
}

async fn host_page(ask: &Ask<'_>, name: &str) -> Result<Page, Problem> {
    let host: api::Name<HostId> = ask.word(name)?;
    let found = ask.get(&format!("/v1/hosts/{name}"), api::hosts::info(ask.state(), host)).await?;
    let (mut vms, volumes) = ask.vms_and_volumes().await?;
    let held = front::Held::of(&vms, &volumes);
    vms.retain(|vm| vm.host.as_ref() == Some(&found.id));
    Ok(things::host(&found, &held, &vms, ask.now_ms))
}

async fn sites_page(ask: &Ask<'_>) -> Result<Page, Problem> {
    let all = ask.get("/v1/sites", api::hosts::sites(ask.state())).await?;
    let links = match ask.may_get("/v1/links") {
        true => Some(ask.get("/v1/links", api::hosts::links(ask.state())).await?),
        false => None,
    };
    Ok(sites::page(&all, links.as_deref(), ask.now_ms))
}

async fn rentals(ask: &Ask<'_>) -> Result<Page, Problem> {
    let all = ask.get("/v1/rentals", api::rentals::list(ask.state())).await?;
    let kept = ask.get("/v1/kept-disks", api::rentals::kept_disks(ask.state())).await?;
    let renting = ask.get("/v1/renting", api::renting::show(ask.state())).await?;
    let prices = ask.get("/v1/prices", api::prices::prices(ask.state())).await?;
    Ok(money::rentals(&all, &kept, &renting, &prices, ask.now_ms))
}

async fn tenant(ask: &Ask<'_>, name: &str) -> Result<Page, Problem> {
    let tenant: api::Name<TenantName> = ask.word(name)?;
    let answer = api::tenants::info(ask.state(), ask.caller.clone(), tenant);
    Ok(money::tenant(&ask.get(&format!("/v1/tenants/{name}"), answer).await?))
}

async fn audit(ask: &Ask<'_>) -> Result<Page, Problem> {
    let since = api::tenants::Since { since_ms: 0, tenant: None };
    let answer = api::tenants::audit(ask.state(), ask.caller.clone(), Ok(Query(since)));
    let all = ask.get("/v1/audit", answer).await?;
    let section = front::changes(&all, CHANGES, ask.now_ms);
    Ok(Page::new("Changes", "perigee audit", vec![section]))
}

/// The end of a job's log, and where it goes on.
async fn log(ask: &Ask<'_>, name: &str, rank: Option<u32>) -> Result<Log, Problem> {
    let Full(job): Full<JobId> = ask.full(name).await?;
    // A job that ends while its log is read has more lines than were read.
    let goes_on = ask.cluster.index.job(&job).is_some();
    let last = jobs::last_message_of(ask.cluster, &job, rank).await?;
    let mut among = LOG_MESSAGES;
    let end = loop {
        let from = last.saturating_sub(among);
        let end = LogEnd::read(ask, &job, (rank, from)).await?;
        if from == 0 || end.lines.len() == LOG_LINES {
            break end;
        }
        among = among.saturating_mul(LOG_FURTHER);
    };
    let of_rank = rank.map_or_else(String::new, |rank| format!(" --rank {rank}"));
    Ok(Log {
        label: format!("The end of the log of job {job}"),
        command: format!("perigee job log {job}{of_rank}"),
        live: if goes_on { live::log_query(rank, end.after) } else { String::new() },
        note: match end.is_cut {
            true => format!("The last {} lines. The command shows all.", end.lines.len()),
            false => String::new(),
        },
        lines: end.lines.iter().map(live::logged).collect(),
    })
}

/// The last lines of a log.
struct LogEnd {
    lines: VecDeque<LogLine>,
    /// The number of the last one.
    after: u64,
    /// There are lines before them.
    is_cut: bool,
}

impl LogEnd {
    /// Those after the message with this number.
    async fn read(
        ask: &Ask<'_>,
        job: &JobId,
        (rank, from): (Option<u32>, u64),
    ) -> Result<Self, Problem> {
        let mut end = Self { lines: VecDeque::new(), after: from, is_cut: from > 0 };
        for _ in 0..LOG_READS_MAX {
            let more = ask.log(job, (rank, end.after, None)).await?;
            let Some(last) = more.last() else { break };
            end.after = last.seq;
            end.lines.extend(more);
            let too_many = end.lines.len().saturating_sub(LOG_LINES);
            end.is_cut |= too_many > 0;
            end.lines.drain(..too_many);
        }
        Ok(end)
    }
}

/// The outputs of a job, as a file to keep.
pub async fn output(
    axum::extract::State(web): Shared,
    caller: Caller,
    axum::extract::Path(job): axum::extract::Path<String>,
) -> Result<Response, Failure> {
    let ask = Ask::new(&web.cluster, &caller);
    let full: Full<JobId> = ask.full(&job).await?;
    let name = format!("attachment; filename=\"{}.tar\"", full.0);
    let answer = api::jobs::output(ask.state(), full).await?;
    Ok(([(CONTENT_DISPOSITION, name)], answer).into_response())
}
