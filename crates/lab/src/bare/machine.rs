//! Takes the command line of a QEMU that Perigee runs, for another QEMU.

use std::path::{Path, PathBuf};

use perigee_model::{HostId, Problem, VmId};
use serde_json::Value;

use crate::up::Lab;

/// The number of an open file in Perigee's command line is another file in the other QEMU. So that has a network of its own, which leads nowhere.
pub const NETDEV: &str = "user,id=network,restrict=on";

/// A QEMU's command line, and the directory of its files.
#[derive(Debug, Clone)]
pub struct Machine {
    line: Vec<String>,
    dir: PathBuf,
}

impl Machine {
    /// The machine of the QEMU that runs a VM of Perigee at a host, and that QEMU's process.
    ///
    /// # Errors
    /// `NotFound` when no such QEMU runs.
    pub fn of(lab: &Lab, host: &HostId, vm: &VmId) -> Result<(Self, u32), Problem> {
        let home = lab.dir().join("hosts").join(host.as_str());
        let dir = home.join("agent/vms").join(vm.as_str());
        let mark = dir.join("run").display().to_string();
        let entries = std::fs::read_dir("/proc")
            .map_err(|e| Problem::internal("can't list the processes", e))?;
        for name in entries.flatten().map(|entry| entry.file_name()) {
            let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else {
                continue;
            };
            // A process that ends in the meantime no longer has a command line.
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let line: Vec<String> = line
                .split(|byte| *byte == 0)
                .filter(|word| !word.is_empty())
                .map(|word| String::from_utf8_lossy(word).into_owned())
                .collect();
            let is_qemu = line.first().is_some_and(|program| program.contains("qemu-system"));
            if is_qemu && line.iter().any(|word| word.contains(&mark)) {
                return Ok((Self { line, dir }, pid));
            }
        }
        Err(Problem::not_found(
            format!("can't find the QEMU of VM {vm}"),
            format!("none at {host}"),
        ))
    }

    /// The same machine with another directory and other disks. `disk` gets the name and the block node of
    /// each of Perigee's disks, and gives the node in its place.
    ///
    /// # Errors
    /// Those of `disk`, and `Internal` when a disk is still Perigee's.
    pub fn line_for(
        &self,
        dir: &Path,
        mut disk: impl FnMut(&str, Value) -> Result<Value, Problem>,
    ) -> Result<Vec<String>, Problem> {
        let not_read =
            |e: &dyn std::fmt::Display| Problem::internal("can't read the QEMU's command line", e);
        let (from_dir, to_dir) = (self.dir.display().to_string(), dir.display().to_string());
        let mut line = Vec::with_capacity(self.line.len());
        let mut words = self.line.iter();
        while let Some(word) = words.next() {
            // The experiment's QEMU boots, even if this one arrived by migration.
            if word == "-incoming" {
                words.next();
            } else if word == "-S" {
            } else if word == "-netdev" {
                words.next();
                line.extend([word.clone(), NETDEV.to_owned()]);
            } else if word.contains("\"driver\":\"nbd\"") {
                let node: Value = serde_json::from_str(word).map_err(|e| not_read(&e))?;
                let name = node["node-name"].as_str().unwrap_or_default().to_owned();
                line.push(disk(&name, node)?.to_string());
            } else {
                line.push(word.replace(&from_dir, &to_dir));
            }
        }
        Ok(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_machine_gets_other_paths_and_disks() {
        let words = |line: &[&str]| line.iter().map(ToString::to_string).collect::<Vec<_>>();
        let machine = Machine {
            line: words(&[
                "qemu-system-x86_64",
                "-pidfile",
                "/l/home1/vms/q/run/qemu.pid",
                "-blockdev",
                r#"{"driver":"nbd","export":"q-root@7","node-name":"root","server":{"path":"/l/home1/volume.sock","type":"unix"}}"#,
                "-netdev",
                "stream,id=network,server=on,addr.type=fd,addr.str=5",
                "-S",
                "-incoming",
                "defer",
            ]),
            dir: PathBuf::from("/l/home1/vms/q"),
        };
        let line = machine
            .line_for(Path::new("/b"), |name, mut node| {
                node["export"] = format!("bare-{name}").into();
                node["server"]["path"] = "/l/cloud1/volume.sock".into();
                Ok(node)
            })
            .expect("a line");
        assert_eq!(line[2], "/b/run/qemu.pid");
        assert!(line[4].contains(r#""export":"bare-root""#) && line[4].contains("/l/cloud1/"));
        assert_eq!(line[5..], ["-netdev", "user,id=network,restrict=on"]);
    }
}
