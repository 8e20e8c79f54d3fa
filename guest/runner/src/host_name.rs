//! The guest has the name of its job, where nothing else has given it one.

use std::fs::OpenOptions;
use std::io::Write as _;

use perigee_model::tenant::SEPARATOR;

use crate::cloud_init;

const HOSTS: &str = "/etc/hosts";

/// # Errors
/// The job does without it.
pub fn set(job: &str) -> std::io::Result<()> {
    // cloud-init has read the name on its disk.
    if cloud_init::is_there() {
        return Ok(());
    }
    let name = of(job);
    std::fs::write("/proc/sys/kernel/hostname", name)?;
    // Programs look for the address of their own name.
    let mut hosts = OpenOptions::new().append(true).create(true).open(HOSTS)?;
    hosts.write_all(format!("127.0.1.1 {name}\n").as_bytes())
}

/// Without the tenant, which is no part of a host's name.
fn of(job: &str) -> &str {
    job.rsplit(SEPARATOR).next().unwrap_or(job)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_called_as_its_job_is_in_its_tenant() {
        assert_eq!(of("physics~scan-0001"), "scan-0001");
        assert_eq!(of("scan-0001"), "scan-0001");
    }
}
