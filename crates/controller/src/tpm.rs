//! VMs with a TPM: how large its state is, and which hosts can have them. At the host: `vm/tpm.rs` of the agent.

use perigee_model::HostId;
use perigee_model::vm::HostReport;

use crate::cluster::Cluster;
use crate::records::JobRecord;

/// `swtpm` keeps three parts in it. The largest, the TPM's permanent memory, has less than 256 KiB.
pub const BYTES: u64 = 4 << 20;

/// Whether the VM has a TPM.
pub fn has_one(record: &JobRecord) -> bool {
    record.kind.hardware(&record.job.spec).tpm
}

/// Why this VM can't start at a host that reports so, or move there, now; `None` if it can or has no TPM.
pub fn refusal(record: &JobRecord, report: Option<&HostReport>) -> Option<String> {
    if !has_one(record) {
        return None;
    }
    match report {
        Some(report) => report.no_tpm.clone(),
        None => Some("its agent has said nothing of TPMs".to_owned()),
    }
}

/// The hosts that are up and at which this VM can't be now, each with the reason.
pub fn refusing(cluster: &Cluster, record: &JobRecord) -> Vec<(HostId, String)> {
    if !has_one(record) {
        return Vec::new();
    }
    let refused = |host: &HostId| refusal(record, cluster.hosts.report(host).as_deref());
    let up = cluster.hosts.up().into_iter();
    up.filter_map(|host| Some((host.id.clone(), refused(&host.id)?))).collect()
}
