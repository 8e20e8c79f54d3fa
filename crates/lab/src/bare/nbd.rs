//! qemu-nbd beside the data: what QEMU reads from over a network without Perigee.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use perigee_model::{HostId, Problem, VolumeName};
use serde_json::{Value, json};

use super::Running;
use crate::up::Lab;

const PORT: u16 = 10900;
const DEADLINE: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A qemu-nbd with a copy-on-write clone of a raw file. It is stopped when this is dropped.
pub struct NbdServer {
    address: String,
    _process: Running,
}

impl NbdServer {
    /// Starts it at a host, and waits until it listens. `dir` gets its files, whose names begin with `name`.
    ///
    /// # Errors
    /// It does not listen in time, or the clone can't be made.
    pub async fn start(
        lab: &Lab,
        host: &HostId,
        raw: &Path,
        dir: &Path,
        name: &str,
    ) -> Result<Self, Problem> {
        let file = |extension: &str| dir.join(format!("{name}.{extension}"));
        let overlay = file("qcow2").display().to_string();
        let raw = raw.display().to_string();
        run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", &raw, "-F", "raw", &overlay])?;
        let address = address(lab, host)?;
        let pid_file = file("pid");
        let line = [
            "qemu-nbd".to_owned(),
            "--persistent".to_owned(),
            "--format=qcow2".to_owned(),
            "--discard=unmap".to_owned(),
            format!("--bind={address}"),
            format!("--port={PORT}"),
            format!("--pid-file={}", pid_file.display()),
            overlay,
        ];
        let process = Running::start(lab, host, &line, &file("log"))?;
        // qemu-nbd writes it when it listens.
        wait_for(&pid_file, "qemu-nbd").await?;
        Ok(Self { address, _process: process })
    }

    /// The block node with which QEMU reads from it.
    pub fn node(&self) -> Value {
        json!({
            "driver": "nbd",
            "node-name": "data0",
            "server": {"type": "inet", "host": self.address, "port": PORT.to_string()},
            "export": "",
            "discard": "unmap",
        })
    }
}

/// The address of a lab's host.
///
/// # Errors
/// The lab has no such host.
pub fn address(lab: &Lab, host: &HostId) -> Result<String, Problem> {
    let address = lab.definition.host_address(host);
    let none = || Problem::not_found(format!("can't find host {host}"), "the lab has none");
    address.map(|address| address.to_string()).ok_or_else(none)
}

/// Waits until a server has made a file.
///
/// # Errors
/// `Unavailable` after [`DEADLINE`].
pub async fn wait_for(file: &Path, what: &str) -> Result<(), Problem> {
    let end = Instant::now() + DEADLINE;
    while !file.exists() {
        if Instant::now() >= end {
            let why = format!("{} was not there within {DEADLINE:?}", file.display());
            return Err(Problem::unavailable(format!("can't start {what}"), why));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    Ok(())
}

/// Copies a volume's content at its home into a raw file.
///
/// # Errors
/// As [`run`].
pub fn copy_volume(
    lab: &Lab,
    home: &HostId,
    volume: &VolumeName,
    raw: &Path,
) -> Result<(), Problem> {
    let socket = lab.lab_dir().volume_socket(home);
    let from = format!("nbd+unix:///{volume}?socket={}", socket.display());
    run("qemu-img", &["convert", "-f", "raw", "-O", "raw", &from, &raw.display().to_string()])
}

/// Fills the first sector of a volume at its home with a byte. Whoever reads the volume past the caches sees it, as a signal.
///
/// # Errors
/// `Internal` with what `qemu-io` said.
pub fn signal(lab: &Lab, home: &HostId, volume: &VolumeName, byte: u8) -> Result<(), Problem> {
    let socket = lab.lab_dir().volume_socket(home);
    let to = format!("nbd+unix:///{volume}?socket={}", socket.display());
    let line = ["-f", "raw", "-c", &format!("write -P {byte} 0 512"), &to];
    let what = || format!("can't write a signal onto volume {volume}");
    let output = Command::new("qemu-io").args(line).output();
    let output = output.map_err(|e| Problem::internal(what(), e))?;
    let said =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    // It ends with 0 even if its command has failed.
    match output.status.success() && !said.concat().contains("failed") {
        true => Ok(()),
        false => Err(Problem::internal(what(), said.concat().trim())),
    }
}

/// Runs a program until it ends.
///
/// # Errors
/// It can't be started, or it failed; the problem has what the program said.
pub fn run(program: &str, arguments: &[&str]) -> Result<(), Problem> {
    let what = || format!("can't run {program} {}", arguments.join(" "));
    let output = Command::new(program).args(arguments).output();
    let output = output.map_err(|e| Problem::internal(what(), e))?;
    if output.status.success() {
        return Ok(());
    }
    Err(Problem::internal(what(), String::from_utf8_lossy(&output.stderr).trim()))
}
