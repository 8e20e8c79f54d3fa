//! Starts a VM's QEMU and waits for its first answer.

use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;

use perigee_http::memory::keep_off_disks;
use perigee_model::Problem;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use super::start_error::StartError;
use super::tls::{End, set_encryption};
use super::{Vm, arrival, memory, network, socket, tpm};
use crate::command::{QEMU, arguments, export, firmware_file};
use crate::confinement::Sandbox;
use crate::host::Host;
use crate::process::{Exit, Process};
use crate::qmp::{Event, MigrateInfo, Qmp, QmpError, SocketAddress};
use crate::{cgroup, files, process};

/// QEMU opens its disks before it answers, and waits some time for the volume server.
const START_DEADLINE: Duration = Duration::from_secs(90);
/// The status of an ended process is there at once, unless the agent is very busy.
const EXIT_DEADLINE: Duration = Duration::from_secs(5);
/// A try to connect to a socket that does not exist yet takes some microseconds.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// A QEMU that has answered.
pub struct Started {
    pub process: Process,
    pub qmp: Qmp,
    pub events: mpsc::Receiver<Event>,
}

/// Starts QEMU. After a failure no process is left.
pub async fn start(vm: &Vm, host: &Host) -> Result<Started, Problem> {
    if vm.spec.locks_memory || vm.spec.hides_output {
        // This process sees what the guest prints, before it drops the words.
        keep_off_disks(&format!("can't start the VM {}", vm.id()))?;
    }
    host.open_ahead(vm.spec.disks.iter().map(export).collect());
    if let Some(file) = firmware_file(vm.spec.machine.firmware)
        && !Path::new(file).exists()
    {
        let why = format!("{file} is not there (package ovmf)");
        return Err(Problem::unsupported(format!("can't start the VM {}", vm.id()), why));
    }
    host.create(&vm.dir)?;
    if vm.spec.arrives_by.is_some() {
        arrival::prepare(&vm.dir.arrival())?;
    }
    files::write_json(&vm.dir.spec(), &vm.spec)?;
    let socket = socket::open(host, vm).await?;
    let cable = network::connect(vm, host).await?;
    let tpm = tpm::start(vm, host, &socket.path).await?;
    let (user, log) = (host.user_of(&vm.dir)?, vm.dir.log());
    let card = cable.as_ref().map(|cable| cable.qemus.as_raw_fd());
    let line = arguments(&vm.spec, &vm.dir, &socket.path, host.accelerator.kind, card);
    let end = cable.as_ref().map(|cable| cable.qemus.as_fd());
    let sandbox = Sandbox::of_qemu(&vm.dir)?;
    let (process, exit) = process::start(QEMU, &line, user, &log, end, Some(sandbox))?;
    if host.has_cgroups {
        let network = cable.as_ref().and_then(|cable| cable.passt);
        let servants: Vec<Process> = network.into_iter().chain(tpm).collect();
        let limited = cgroup::limit(&process, &servants, &vm.spec);
        if let Err(error) = limited {
            tracing::warn!(vm = %vm.id(), %error, "QEMU runs without limits");
        }
    }
    let begun = async {
        let started = first_answer(vm, process, exit).await?;
        let told = memory::begin(vm, &started.qmp).await;
        told.map_err(|error| Problem::internal(format!("can't start the VM {}", vm.id()), error))?;
        share_cpus(vm, process);
        Ok::<_, Problem>(started)
    };
    match begun.await {
        Ok(started) => Ok(started),
        Err(problem) => {
            process.kill().await?;
            cgroup::forget(&process).await;
            Err(problem)
        }
    }
}

/// While several VMs want the CPUs, each has them by its vCPUs. QEMU has started their threads before it answers.
fn share_cpus(vm: &Vm, process: Process) {
    let least = vm.spec.machine.cpus_least.unwrap_or(vm.spec.cpus);
    match process.share_cpus(least, vm.spec.cpus) {
        // Only root may.
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            tracing::debug!(vm = %vm.id(), %error, "it has the CPUs by other parts than by its vCPUs");
        }
        Err(error) => {
            tracing::warn!(vm = %vm.id(), %error, "it has the CPUs by other parts than by its vCPUs");
        }
        Ok(()) => {}
    }
}

async fn first_answer(vm: &Vm, process: Process, exit: Exit) -> Result<Started, Problem> {
    let deadline = Instant::now() + START_DEADLINE;
    let what = || format!("can't start the VM {}", vm.id());
    loop {
        if let Ok((qmp, events)) = Qmp::connect(&vm.dir.qmp()).await {
            return Ok(Started { process, qmp, events });
        }
        if process.has_ended() {
            let said = vm.last_words();
            let kind = StartError::of(&said).kind();
            let status = timeout(EXIT_DEADLINE, exit).await.ok().and_then(Result::ok);
            return Err(Problem::new(kind, what(), why_ended(status, &said)));
        }
        if Instant::now() > deadline {
            let why = format!("QEMU did not answer within {} s", START_DEADLINE.as_secs());
            return Err(Problem::unavailable(what(), why));
        }
        sleep(LOOK_AGAIN).await;
    }
}

/// How QEMU ended, and what it said. A QEMU that is killed says nothing.
fn why_ended(status: Option<ExitStatus>, said: &str) -> String {
    let signal = status.and_then(|status| status.signal());
    let how = match (signal, status.and_then(|status| status.code())) {
        (Some(signal), _) => format!("QEMU was killed by signal {signal}"),
        (None, Some(code)) if said.is_empty() => format!("QEMU ended with code {code}"),
        _ => "QEMU ended".to_owned(),
    };
    match said {
        "" => format!("{how}, and said nothing"),
        said => format!("{how}: {said}"),
    }
}

/// Where a QEMU listens that waits for a migration, if it does already. A unix socket has no port.
pub async fn waits_at(qmp: &Qmp) -> Result<Option<SocketAddress>, QmpError> {
    let info: MigrateInfo = qmp.query("query-migrate").await?;
    Ok(info.socket_address.into_iter().next())
}

/// Makes a QEMU that waits for a migration listen there, unless it already listens. Returns where.
pub async fn listen_for_migration(
    qmp: &Qmp,
    uri: &str,
    compressed: bool,
    tls: Option<&Path>,
) -> Result<SocketAddress, QmpError> {
    if waits_at(qmp).await?.is_none() {
        let capabilities = json!([{"capability": "events", "state": true}]);
        let set = json!({"capabilities": capabilities});
        qmp.execute("migrate-set-capabilities", set).await?;
        set_compression(qmp, compressed).await?;
        set_encryption(qmp, End::Destination, tls).await?;
        qmp.execute("migrate-incoming", json!({"uri": uri})).await?;
    }
    waits_at(qmp).await?.ok_or_else(|| QmpError::Odd {
        command: "query-migrate".to_owned(),
        reason: "it does not say where it listens".to_owned(),
    })
}

/// Sets whether memory is sent compressed. Both QEMUs of a migration must be set to the same. Compression works
/// only with QEMU's additional channels ("multifd"). There is one of them: with two, QEMU 7.2 can wait for ever, and
/// answers nothing any more, if the destination ends in the pause. One channel fails; the thread of the other one
/// ends without the signal that `multifd_send_sync_main` waits for (`multifd_send_thread` in QEMU's `multifd.c`).
pub async fn set_compression(qmp: &Qmp, compressed: bool) -> Result<(), QmpError> {
    let set = json!({"capabilities": [{"capability": "multifd", "state": compressed}]});
    qmp.execute("migrate-set-capabilities", set).await?;
    if compressed {
        let how = json!({"multifd-channels": 1, "multifd-compression": "zstd"});
        qmp.execute("migrate-set-parameters", how).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_export_is_told_from_a_server_that_is_away() {
        let missing = "qemu-system-x86_64: -blockdev …: Requested export 'x@1' not available";
        assert_eq!(StartError::of(missing), StartError::NoExport);
        let away =
            "qemu-system-x86_64: -blockdev …: Failed to connect to '/run/v': Connection refused";
        assert_eq!(StartError::of(away), StartError::NoVolumeServer);
        let other = "qemu-system-x86_64: something is odd";
        assert_eq!(StartError::of(other), StartError::Other);
    }

    /// The words of the real QEMU. It ends before it runs anything.
    #[test]
    fn what_qemu_refuses_is_told_by_who_can_do_something_about_it() {
        use StartError as E;
        let cases: [(&[&str], E); 11] = [
            (&["-smp", "300"], E::BadVm),
            (&["-m", "900000000"], E::NoRoom),
            (&["-accel", "nosuch"], E::HostCannot),
            (&["-nosuch"], E::HostCannot),
            (&["-device", "nosuch"], E::HostCannot),
            (&["-device", "pvpanic,nosuch=1"], E::HostCannot),
            (&["-machine", "nosuch"], E::HostCannot),
            (&["-cpu", "nosuch"], E::HostCannot),
            (&["-cpu", "host"], E::HostCannot),
            (&["-cpu", "Skylake-Server,enforce=on"], E::HostCannot),
            (&["-blockdev", NO_SERVER], E::NoVolumeServer),
        ];
        for (arguments, expected) in cases {
            let base = ["-nodefaults", "-display", "none", "-S", "-machine", "q35"];
            let output = std::process::Command::new(QEMU).args(base).args(arguments).output();
            let said = String::from_utf8(output.expect("QEMU is installed").stderr).unwrap();
            assert_eq!(StartError::of(&said), expected, "{arguments:?}: {said}");
        }
    }

    #[tokio::test]
    async fn a_qemu_that_was_killed_while_it_started_is_told_to_be_killed() {
        let dir = tempfile::tempdir().unwrap();
        let arguments = ["-c".to_owned(), "sleep 60; true".to_owned()];
        let log = dir.path().join("log");
        let (process, exit) = process::start("bash", &arguments, None, &log, None, None).unwrap();
        process.kill().await.unwrap();
        let status = exit.await.ok();
        assert_eq!(why_ended(status, ""), "QEMU was killed by signal 9, and said nothing");
        assert_eq!(why_ended(status, "no disk"), "QEMU was killed by signal 9: no disk");
        assert_eq!(why_ended(None, "no disk"), "QEMU ended: no disk");
        let code = ExitStatus::from_raw(1 << 8);
        assert_eq!(why_ended(Some(code), ""), "QEMU ended with code 1, and said nothing");
    }

    const NO_SERVER: &str =
        "driver=nbd,node-name=a,server.type=unix,server.path=/nonexistent/socket,export=x";
}
