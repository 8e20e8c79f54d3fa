//! A gang as people see it: its members, and their logs.

use perigee_model::gang::member_of;
use perigee_model::job::{Job, LogLine, Member};
use perigee_model::{JobId, Problem};

use crate::cluster::Cluster;
use crate::jobs::log;
use crate::records::{JobRecord, job_key, vm_of};

/// A gang as people see it.
pub fn with_members(job: Job, mut members: Vec<JobRecord>) -> Job {
    members.sort_by_key(|record| record.kind.member().map(|member| member.rank));
    let progress = members.first().and_then(|first| first.job.progress.clone());
    let shown = members.into_iter().filter_map(|record| {
        let member = record.kind.member()?;
        Some(Member {
            sent_bytes: member.talk.by_rank(member.count),
            rank: member.rank,
            vm: vm_of(&record.job.id),
            host: record.job.host,
            address: record.card.map(|card| card.address),
            state: record.job.state,
            reason: record.job.reason,
            exit_code: record.job.exit_code,
        })
    });
    Job { members: shown.collect(), progress: job.progress.or(progress), ..job }
}

/// The number of the last message of a job's guest, or of one VM of a gang: no line of its log has a higher one. 0 if it has said nothing yet.
///
/// # Errors
/// If the store does not answer.
pub async fn last_message_of(
    cluster: &Cluster,
    id: &JobId,
    rank: Option<u32>,
) -> Result<u64, Problem> {
    let record = crate::jobs::record(cluster, id).await?;
    if !record.kind.is_gang() {
        return Ok(record.last_seq);
    }
    let member = member_of(id, rank.unwrap_or_default());
    let member: Option<JobRecord> = cluster.records.read(&job_key(&member)).await?;
    Ok(member.map_or(0, |member| member.last_seq))
}

/// The log of a job, or of one VM of a gang; without a rank, of its first one.
///
/// # Errors
/// `NotFound`; `Invalid` if it has no VM with this rank.
pub async fn log_of(
    cluster: &Cluster,
    id: &JobId,
    rank: Option<u32>,
    (after, limit): (u64, usize),
) -> Result<Vec<LogLine>, Problem> {
    let record = crate::jobs::record(cluster, id).await?;
    let (rank, count) = (rank.unwrap_or_default(), record.job.spec.count);
    if rank >= count {
        let why = match count {
            1 => "it has one VM, with the rank 0".to_owned(),
            _ => format!("its VMs have the ranks 0 to {}", count - 1),
        };
        return Err(Problem::invalid(format!("can't show the log of job {id}"), why));
    }
    if !record.kind.is_gang() {
        return log::read(cluster, id, after, limit).await;
    }
    let member = member_of(id, rank);
    match log::read(cluster, &member, after, limit).await {
        // It has none yet: the gang waits for hosts.
        Err(problem) if problem.kind == perigee_model::ProblemKind::NotFound => Ok(Vec::new()),
        read => read,
    }
}

/// The logs of all VMs of a gang as one, in the order in which their lines arrived. `after` has a number for each rank.
///
/// # Errors
/// `NotFound`; `Invalid` if there are more numbers than VMs.
pub async fn log_of_all(
    cluster: &Cluster,
    id: &JobId,
    after: &[u64],
    limit: usize,
) -> Result<Vec<LogLine>, Problem> {
    let record = crate::jobs::record(cluster, id).await?;
    let count = record.job.spec.count;
    if after.len() > count as usize {
        let why =
            format!("after_each: it has {} numbers, and the job has {count} VMs", after.len());
        return Err(Problem::invalid(format!("can't show the log of job {id}"), why));
    }
    let members: Vec<JobId> = match record.kind.is_gang() {
        true => (0..count).map(|rank| member_of(id, rank)).collect(),
        false => vec![id.clone()],
    };
    log::read_all(cluster, &members, after, limit).await
}
