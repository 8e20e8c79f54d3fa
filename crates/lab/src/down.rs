//! Takes a lab down, whatever state it is in: it removes everything that carries the lab's id.
//!
//! Nothing here needs the supervisor, a complete lab or a readable `lab.json`. It can be repeated.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::Signal;
use perigee_model::Problem;

use crate::command::run;
use crate::definition::LabId;
use crate::process::{signal_pid, wait_until};
use crate::state::{self, LabDir};

const SUPERVISOR_DEADLINE: Duration = Duration::from_secs(15);
const KILL_DEADLINE: Duration = Duration::from_secs(15);
const CGROUPS: &str = "/sys/fs/cgroup/perigee";
const NAMESPACES: &str = "/run/netns";

/// Removes every process, namespace, mount and file of one lab. Returns `false` if nothing existed.
///
/// # Errors
/// What could not be removed.
pub async fn down(base: &Path, id: &LabId) -> Result<bool, Problem> {
    let dir = LabDir::new(base, id);
    let was_there = dir.path().exists() || !namespaces(id).is_empty();
    stop_supervisor(&dir).await?;
    kill_processes(id).await?;
    kill_gateways(dir.path()).await?;
    for namespace in namespaces(id) {
        run("ip", &["netns", "delete", &namespace]).await?;
    }
    unmount_below(dir.path()).await?;
    remove_dir(dir.path())?;
    Ok(was_there)
}

/// Removes one host of a lab: what runs in its namespace but this process, the namespace, and its directory with the mounts below. Nothing
/// need be there.
///
/// # Errors
/// What could not be removed.
pub async fn remove_host(namespace: &str, dir: &Path) -> Result<(), Problem> {
    let end = tokio::time::Instant::now() + KILL_DEADLINE;
    kill_in(namespace, end).await?;
    kill_gateways(dir).await?;
    if Path::new(NAMESPACES).join(namespace).exists() {
        // This process may be in the namespace, which then stays as long as the process does. The cable goes now.
        drop(run("ip", &["-n", namespace, "link", "delete", "eth0"]).await);
        run("ip", &["netns", "delete", namespace]).await?;
    }
    unmount_below(dir).await?;
    remove_dir(dir)
}

/// Removes a directory with all that is below it, unless there is none.
pub(crate) fn remove_dir(dir: &Path) -> Result<(), Problem> {
    match std::fs::remove_dir_all(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(Problem::internal(format!("can't remove {}", dir.display()), e))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// A list, for people, of what still carries a lab's id; empty when nothing does.
pub fn remains(base: &Path, id: &LabId) -> Vec<String> {
    let dir = LabDir::new(base, id);
    let mut found: Vec<String> =
        namespaces(id).into_iter().map(|name| format!("namespace {name}")).collect();
    if dir.path().exists() {
        found.push(format!("directory {}", dir.path().display()));
    }
    let words = [
        format!("{}/", dir.path().display()),
        format!("lab supervise {id} "),
        format!("lab relay {id} "),
        format!("lab instance {id} "),
    ];
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    for entry in entries {
        let name = entry.file_name().to_string_lossy().into_owned();
        let own = name == std::process::id().to_string();
        if own || !name.bytes().all(|b| b.is_ascii_digit()) {
            continue;
        }
        // A process that has ended in the meantime has no command line.
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        if words.iter().any(|word| line.contains(word)) {
            found.push(format!("process {name} ({})", line.trim()));
        }
    }
    found
}

/// Takes down every lab below the base directory, and returns their ids.
///
/// # Errors
/// The first problem, after all labs were tried.
pub async fn down_all(base: &Path) -> Result<Vec<LabId>, Problem> {
    let mut first_problem = None;
    let mut done = Vec::new();
    for id in state::ids(base)? {
        match down(base, &id).await {
            Ok(_) => done.push(id),
            Err(problem) => first_problem = first_problem.or(Some(problem)),
        }
    }
    first_problem.map_or(Ok(done), Err)
}

/// The namespaces that carry the lab's id.
pub fn namespaces(id: &LabId) -> Vec<String> {
    let prefix = id.namespace_prefix();
    let Ok(entries) = std::fs::read_dir(NAMESPACES) else { return Vec::new() };
    let mut names: Vec<String> = entries
        .flatten()
        .filter_map(|e| e.file_name().into_string().ok())
        .filter(|name| name.starts_with(&prefix))
        .collect();
    names.sort();
    names
}

async fn stop_supervisor(dir: &LabDir) -> Result<(), Problem> {
    let Some(supervisor) = dir.supervisor() else { return Ok(()) };
    if u32::try_from(supervisor.pid) == Ok(std::process::id()) {
        // This process runs an experiment and is the lab's supervisor itself.
        return Ok(());
    }
    supervisor.signal(Signal::SIGTERM)?;
    if !wait_until(SUPERVISOR_DEADLINE, || !supervisor.alive()).await {
        supervisor.signal(Signal::SIGKILL)?;
        if !wait_until(KILL_DEADLINE, || !supervisor.alive()).await {
            return Err(still_there(&format!("supervisor (process {})", supervisor.pid)));
        }
    }
    Ok(())
}

/// Kills processes until none is left, because a process may fork while the list is read.
async fn kill_processes(id: &LabId) -> Result<(), Problem> {
    let end = tokio::time::Instant::now() + KILL_DEADLINE;
    for namespace in namespaces(id) {
        kill_in(&namespace, end).await?;
    }
    Ok(())
}

async fn kill_in(namespace: &str, end: tokio::time::Instant) -> Result<(), Problem> {
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    let mut killed = BTreeSet::new();
    loop {
        // `ip` fails for a name whose namespace was never mounted. Such a namespace has no processes.
        let listed = run("ip", &["netns", "pids", namespace]).await.unwrap_or_default();
        let mut pids: Vec<i32> = listed.lines().filter_map(|l| l.trim().parse().ok()).collect();
        pids.retain(|pid| *pid != own && crate::process::Process::of(*pid).is_some());
        if pids.is_empty() {
            break;
        }
        for pid in &pids {
            signal_pid(*pid, Signal::SIGKILL)?;
        }
        killed.extend(pids.iter().copied());
        if tokio::time::Instant::now() >= end {
            return Err(still_there(&format!("processes {pids:?} in {namespace}")));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for pid in killed {
        // The agent names a QEMU's cgroup after its pid. Most processes have no such cgroup.
        let _ = std::fs::remove_dir(Path::new(CGROUPS).join(pid.to_string()));
    }
    Ok(())
}

/// A gateway of a tenant's network is a dnsmasq in a namespace of its own, which is not among the lab's. Its command line
/// names the lab's directory, or, at a rented host, its environment does.
async fn kill_gateways(dir: &Path) -> Result<(), Problem> {
    let end = tokio::time::Instant::now() + KILL_DEADLINE;
    loop {
        let left = gateways(dir);
        if left.is_empty() {
            return Ok(());
        }
        for pid in &left {
            signal_pid(*pid, Signal::SIGKILL)?;
        }
        if tokio::time::Instant::now() >= end {
            return Err(still_there(&format!("dnsmasq processes {left:?}")));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn gateways(dir: &Path) -> Vec<i32> {
    let mark = format!("{}/", dir.display());
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let program = std::fs::read_to_string(entry.path().join("comm")).ok()?;
        let names = |file| {
            let text = std::fs::read(entry.path().join(file)).unwrap_or_default();
            String::from_utf8_lossy(&text).contains(&mark)
        };
        let is_own = program.trim() == "dnsmasq" && (names("cmdline") || names("environ"));
        is_own.then_some(pid)
    });
    pids.collect()
}

fn still_there(what: &str) -> Problem {
    Problem::internal(
        "can't take the lab down",
        format!("{what} did not end within {KILL_DEADLINE:?} after SIGKILL"),
    )
    .next("run it again; if a process hangs in a system call, reboot the machine")
}

/// Unmounts the latest mounts first.
async fn unmount_below(dir: &Path) -> Result<(), Problem> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut points: Vec<&str> = mounts
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .filter(|point| Path::new(point).starts_with(dir))
        .collect();
    points.reverse();
    for point in points {
        run("umount", &[point]).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt as _;
    use std::process::Command;

    use super::*;

    /// A process that looks like a gateway's dnsmasq.
    fn dnsmasq(dir: &Path) -> std::process::Child {
        let program = dir.join("dnsmasq");
        std::fs::copy("/bin/sleep", &program).expect("a copy");
        let mut command = Command::new(program);
        // Its first word is not its program, as with a gateway's.
        command.arg0(format!("dnsmasq -l {}/leases", dir.display())).arg("600");
        let child = command.spawn().expect("a process");
        // The kernel lets the parent go on before the new program's name and command line are to be seen.
        let pid = i32::try_from(child.id()).expect("a pid");
        let end = std::time::Instant::now() + KILL_DEADLINE;
        while !gateways(dir).contains(&pid) {
            assert!(std::time::Instant::now() < end, "waited for process {pid} to be listed");
            std::thread::sleep(Duration::from_millis(10));
        }
        child
    }

    #[tokio::test]
    async fn a_gateway_in_a_namespace_of_its_own_is_ended_with_its_lab() {
        let [lab, other] = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
        let (mut its_own, mut another) = (dnsmasq(lab.path()), dnsmasq(other.path()));
        // A process that is waited for by nobody stays in the list.
        let reaped = tokio::task::spawn_blocking(move || its_own.wait());
        kill_gateways(lab.path()).await.expect("it ends");
        assert!(!reaped.await.expect("a task").expect("it ended").success());
        assert!(another.try_wait().expect("a state").is_none(), "another lab's goes on");
        another.kill().expect("it ends");
        another.wait().expect("it ended");
    }
}
