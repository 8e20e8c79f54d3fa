//! What a VM has printed on its serial console at hosts that it has left.

use perigee_model::vm::VmReport;
use perigee_model::{JobId, Problem, VmStart};
use serde::{Deserialize, Serialize};

use crate::cluster::{Cluster, HostLink};
use crate::records::vm_of;

/// Of a longer text the end is kept.
const KEPT_BYTES: usize = 64 << 10;

/// The record of what a VM has printed: the last [`KEPT_BYTES`], of all hosts that it has left.
#[derive(Debug, Serialize, Deserialize)]
pub struct Kept {
    /// What it printed since this start is the last that was kept.
    pub start: VmStart,
    pub text: String,
}

/// The key of [`Kept`].
pub fn key(job: &JobId) -> String {
    format!("consoles/{job}")
}

/// Keeps what a VM has printed at a host where its starts up to this one are about to be removed.
///
/// # Errors
/// If the host or the store does not answer.
pub async fn keep(
    cluster: &Cluster,
    job: &JobId,
    up_to: VmStart,
    host: &HostLink,
) -> Result<(), Problem> {
    let ends = |record: &crate::records::JobRecord| {
        !record.kind.is_persistent_vm() && (record.ending.is_some() || record.job.state.is_final())
    };
    // Of an ended job nobody asks for it.
    let Some(record) = cluster.index.of_vm(&vm_of(job)).filter(|record| !ends(record)) else {
        return Ok(());
    };
    let path = format!("/v1/vms/{}", vm_of(job));
    let start = host.agent.get::<VmReport>(&path).await?.spec.start;
    let kept = cluster.records.read::<Kept>(&key(job)).await?;
    // An earlier VM may have had the same name, and an earlier start may be removed later than the last one.
    let is_its = start.submitted_ms == record.job.submitted_ms;
    if !is_its || start > up_to || kept.as_ref().is_some_and(|kept| kept.start >= start) {
        return Ok(());
    }
    let bytes = host.agent.get_bytes(&format!("{path}/console")).await?;
    if bytes.is_empty() {
        return Ok(());
    }
    let of_this_run = kept.filter(|kept| kept.start.by_migration(0) == start.by_migration(0));
    let before = of_this_run.map_or_else(String::new, |kept| kept.text);
    let text = end_of(before + &String::from_utf8_lossy(&bytes));
    cluster.records.put(&key(job), &Kept { start, text }).await
}

fn end_of(text: String) -> String {
    let from = text.ceil_char_boundary(text.len().saturating_sub(KEPT_BYTES));
    text[from..].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_long_text_the_end_is_kept() {
        assert_eq!(end_of("short".to_owned()), "short");
        let long = end_of(format!("begin {}end", "ä".repeat(KEPT_BYTES)));
        assert!(long.len() <= KEPT_BYTES && long.len() > KEPT_BYTES - 4);
        assert!(long.starts_with('ä') && long.ends_with("end"));
    }
}
