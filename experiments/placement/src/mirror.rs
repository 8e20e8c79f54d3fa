//! QEMU's own migration with storage, as a script drives it over QMP: the disk is mirrored over NBD into an
//! overlay at the destination, then the memory is sent, and the mirror ends in the pause. The image below the
//! overlay is at both hosts already, as it is for Perigee.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use perigee_lab::bare::nbd::run;
use perigee_lab::bare::{Machine, Qemu, event_us, seed_disk, wait_for_console};
use perigee_lab::measuring::load_1min;
use perigee_model::HostId;
use perigee_model::guest::Seed;
use perigee_model::phases::DOWNTIME_LIMIT_FIRST_MS;
use serde_json::json;

use crate::bench::{Bench, OUTPUT_BYTES};
use crate::case::BEGUN;
use crate::moves::{FILL_DEADLINE, ROOT_BYTES, command};
use crate::results::{Direction, DiskMove, System};

const MIGRATION_PORT: u16 = 4444;
const NBD_PORT: u16 = 10901;
const EXPORT: &str = "root";
const JOB: &str = "mirror";
const ROOT_FILE: &str = "root.qcow2";

pub async fn measure(
    bench: &Bench<'_>,
    machine: &Machine,
    image: &Path,
    overlay_bytes: u64,
) -> Result<DiskMove> {
    let mib = overlay_bytes >> 20;
    let step = bench.step(format!("a VM with {mib} MiB on its disk, QEMU alone: fill"));
    let base = bench.lab.dir().join("mirror").join(bench.unique("vm"));
    let mut source =
        start(bench, machine, image, &base.join("source"), overlay_bytes, &bench.near, &[])?;
    wait_for_console(&source.console(), BEGUN, FILL_DEADLINE).await?;
    step.done("");
    let step =
        bench.step(format!("a VM with {mib} MiB on its disk, QEMU alone: move to {}", bench.far));
    let load_1min = load_1min()?;
    let before = bench.wan_bytes();
    let asked = Instant::now();
    let address = bench.lab.definition.host_address(&bench.far).context("an address")?.to_string();
    let incoming = ["-S", "-incoming", "defer"].map(str::to_owned);
    let dir = base.join("destination");
    let mut destination = start(bench, machine, image, &dir, overlay_bytes, &bench.far, &incoming)?;
    mirror(&mut source, &mut destination, &address)?;
    let (memory_bytes, paused_us) = migrate(&mut source, &mut destination, &address)?;
    destination.qmp.execute("nbd-server-stop", &json!({}))?;
    destination.qmp.execute("cont", &json!({}))?;
    let resumed_us =
        destination.qmp.event(|e| Ok((e["event"] == "RESUME").then(|| event_us(e))))?;
    let runs_after_ms = asked.elapsed().as_secs_f64() * 1e3;
    let wan_bytes = bench.wan_bytes_since(before);
    let pause_ms = crate::results::float(resumed_us.saturating_sub(paused_us)) / 1e3;
    step.done(&format!("runs after {:.1} s, pause {pause_ms:.0} ms", runs_after_ms / 1e3));
    Ok(DiskMove {
        system: System::Mirror,
        direction: Direction::There,
        overlay_bytes,
        runs_after_ms,
        complete_after_ms: runs_after_ms,
        pause_ms,
        memory_bytes,
        wan_bytes_running: wan_bytes,
        wan_bytes_complete: wan_bytes,
        written_since: None,
        load_1min,
        perigee: String::new(),
    })
}

/// Starts a QEMU on an empty overlay over the image.
fn start(
    bench: &Bench<'_>,
    machine: &Machine,
    image: &Path,
    dir: &Path,
    overlay_bytes: u64,
    host: &HostId,
    more: &[String],
) -> Result<Qemu> {
    make_disks(dir, image, command(overlay_bytes))?;
    std::fs::create_dir_all(dir.join("run"))?;
    let mut line = machine.line_for(dir, |name, node| {
        let (driver, file) = if name == "root" { ("qcow2", ROOT_FILE) } else { ("raw", name) };
        let of = dir.join(file).display().to_string();
        let read_only = node["read-only"].clone();
        Ok(json!({
            "driver": driver,
            "node-name": name,
            "read-only": read_only,
            "discard": "unmap",
            "file": {"driver": "file", "filename": of},
        }))
    })?;
    line.extend_from_slice(more);
    Ok(Qemu::start(bench.lab, host, &line, dir)?)
}

/// Makes a VM's disks in files: an empty overlay over the image, the seed, and an output disk.
pub fn make_disks(dir: &Path, image: &Path, command: Vec<String>) -> Result<()> {
    std::fs::create_dir_all(dir)?;
    let root = dir.join(ROOT_FILE).display().to_string();
    let (backing, size) = (image.display().to_string(), ROOT_BYTES.to_string());
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", &backing, "-F", "raw", &root, &size])?;
    let seed = Seed {
        job: "moved".to_owned(),
        command,
        env: Default::default(),
        mounts: Vec::new(),
        outputs: Vec::new(),
        timeout_s: None,
        output_bytes: None,
        stop_grace_s: perigee_model::job::STOP_GRACE_S_DEFAULT,
        network: None,
        gang: None,
        collect: false,
    };
    std::fs::write(dir.join("seed"), seed_disk(&seed, None)?)?;
    std::fs::File::create(dir.join("output"))?.set_len(OUTPUT_BYTES)?;
    Ok(())
}

/// Copies the overlay until the mirror keeps up with the guest's writes.
fn mirror(source: &mut Qemu, destination: &mut Qemu, address: &str) -> Result<()> {
    let server = json!({"type": "inet", "host": address, "port": NBD_PORT.to_string()});
    let listen =
        json!({"addr": {"type": "inet", "data": {"host": address, "port": NBD_PORT.to_string()}}});
    destination.qmp.execute("nbd-server-start", &listen)?;
    let export =
        json!({"type": "nbd", "id": EXPORT, "node-name": "root", "name": EXPORT, "writable": true});
    destination.qmp.execute("block-export-add", &export)?;
    let target =
        json!({"driver": "nbd", "node-name": "target", "server": server, "export": EXPORT});
    source.qmp.execute("blockdev-add", &target)?;
    let job = json!({"job-id": JOB, "device": "root", "target": "target", "sync": "top"});
    source.qmp.execute("blockdev-mirror", &job)?;
    source.qmp.event(|event| match event["event"].as_str() {
        Some("BLOCK_JOB_READY") => Ok(Some(())),
        Some("BLOCK_JOB_COMPLETED" | "BLOCK_JOB_ERROR") => Err(perigee_model::Problem::internal(
            "can't mirror the disk by QEMU alone",
            &event["data"],
        )),
        _ => Ok(None),
    })?;
    Ok(())
}

/// Sends the memory, and ends the mirror while the guest stands still. Returns the bytes that were sent and when
/// the guest stopped.
fn migrate(source: &mut Qemu, destination: &mut Qemu, address: &str) -> Result<(u64, u64)> {
    let on = |name: &str| json!({"capability": name, "state": true});
    let capabilities =
        ["return-path", "events", "auto-converge", "pause-before-switchover"].map(on);
    let capabilities = json!({"capabilities": capabilities});
    let parameters =
        json!({"downtime-limit": DOWNTIME_LIMIT_FIRST_MS, "max-bandwidth": 1_u64 << 40});
    for qemu in [&mut *source, &mut *destination] {
        qemu.qmp.execute("migrate-set-capabilities", &capabilities)?;
    }
    source.qmp.execute("migrate-set-parameters", &parameters)?;
    let uri = json!({"uri": format!("tcp:{address}:{MIGRATION_PORT}")});
    destination.qmp.execute("migrate-incoming", &uri)?;
    source.qmp.execute("migrate", &uri)?;
    let mut paused_us = 0;
    source.qmp.event(|event| {
        if event["event"] == "STOP" {
            paused_us = event_us(event);
        }
        let switches = event["event"] == "MIGRATION" && event["data"]["status"] == "pre-switchover";
        Ok(switches.then_some(()))
    })?;
    source.qmp.execute("block-job-cancel", &json!({"device": JOB}))?;
    source.qmp.event(|event| Ok((event["event"] == "BLOCK_JOB_COMPLETED").then_some(())))?;
    source.qmp.execute("migrate-continue", &json!({"state": "pre-switchover"}))?;
    source.qmp.migration("completed")?;
    let info = source.qmp.execute("query-migrate", &json!({}))?;
    Ok((info["ram"]["transferred"].as_u64().unwrap_or(0), paused_us))
}
