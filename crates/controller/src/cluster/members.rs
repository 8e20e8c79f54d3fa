//! The members of gangs.

use perigee_model::Problem;
use perigee_model::gang::member_of;

use super::Cluster;
use crate::records::{JobRecord, job_key};

/// The records of a gang's members, in the order of their ranks; none for another job.
///
/// # Errors
/// If the store fails.
pub async fn members(cluster: &Cluster, gang: &JobRecord) -> Result<Vec<JobRecord>, Problem> {
    let mut members = Vec::new();
    if gang.kind.is_gang() {
        for rank in 0..gang.job.spec.count {
            let id = member_of(&gang.job.id, rank);
            let found: Option<JobRecord> = cluster.records.read(&job_key(&id)).await?;
            members.extend(found.filter(|found| is_of(found, gang)));
        }
    }
    Ok(members)
}

/// Whether it is a member of this gang, and of no earlier one with its name.
pub fn is_of(found: &JobRecord, gang: &JobRecord) -> bool {
    let member = found.kind.member();
    member.is_some_and(|member| member.gang == gang.job.id)
        && found.job.submitted_ms == gang.job.submitted_ms
}
