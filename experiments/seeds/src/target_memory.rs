//! The memory of a target, with the files that it has in its disk cache: a control group of the kernel has both, and a limit, as a
//! machine of its own would.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Where the groups of the kernel's first version are.
const FIRST_VERSION: &str = "/sys/fs/cgroup/memory";
const SECOND_VERSION: &str = "/sys/fs/cgroup";

/// A group with the processes of one target. Its processes leave it when this is dropped.
pub struct TargetMemory {
    dir: PathBuf,
    parent: PathBuf,
    limit_bytes: u64,
    usage: &'static str,
}

impl TargetMemory {
    /// `None` if this machine's kernel has no groups that count memory here.
    pub fn new(name: &str, limit_bytes: u64) -> Option<Self> {
        let has = |dir: &str, file: &str| Path::new(dir).join(file).exists();
        let (parent, limit, usage) = if has(FIRST_VERSION, "memory.usage_in_bytes") {
            (FIRST_VERSION, "memory.limit_in_bytes", "memory.usage_in_bytes")
        } else {
            let all =
                std::fs::read_to_string(format!("{SECOND_VERSION}/cgroup.controllers")).ok()?;
            all.split_whitespace().find(|word| *word == "memory")?;
            let children = format!("{SECOND_VERSION}/cgroup.subtree_control");
            std::fs::write(children, "+memory").ok()?;
            (SECOND_VERSION, "memory.max", "memory.current")
        };
        let parent = PathBuf::from(parent);
        let dir = parent.join(name);
        std::fs::create_dir(&dir).ok()?;
        let group = Self { dir, parent, limit_bytes, usage };
        std::fs::write(group.dir.join(limit), limit_bytes.to_string()).ok()?;
        Some(group)
    }

    /// From now on what the process has and reads is counted here.
    pub fn add(&self, pid: u32) -> Result<()> {
        let file = self.dir.join("cgroup.procs");
        std::fs::write(&file, pid.to_string()).with_context(|| file.display().to_string())
    }

    /// The file that says how many bytes are in use, and the limit.
    pub fn gauge(&self) -> Gauge {
        Gauge { file: self.dir.join(self.usage), limit_bytes: self.limit_bytes }
    }
}

impl Drop for TargetMemory {
    fn drop(&mut self) {
        let all = std::fs::read_to_string(self.dir.join("cgroup.procs")).unwrap_or_default();
        for pid in all.lines() {
            // It may have ended.
            drop(std::fs::write(self.parent.join("cgroup.procs"), pid));
        }
        drop(std::fs::remove_dir(&self.dir));
    }
}

/// Reads how full a group is.
#[derive(Debug, Clone)]
pub struct Gauge {
    file: PathBuf,
    limit_bytes: u64,
}

impl Gauge {
    /// The share of the limit that is in use, with the disk cache; `None`: not known.
    pub fn share(&self) -> Option<f64> {
        let text = std::fs::read_to_string(&self.file).ok()?;
        let bytes: u64 = text.trim().parse().ok()?;
        Some(bytes as f64 / self.limit_bytes as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gauge_shows_the_share_of_the_limit_and_nothing_if_it_is_not_known() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("usage");
        let gauge = Gauge { file: file.clone(), limit_bytes: 200 };
        assert_eq!(gauge.share(), None);
        std::fs::write(&file, "50\n").expect("a file");
        assert_eq!(gauge.share(), Some(0.25));
    }
}
