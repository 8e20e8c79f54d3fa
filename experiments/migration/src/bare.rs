//! Bare QEMU that a script drives over QMP: without agent, controller and epochs.
//!
//! Its command line is that of Perigee's QEMU with the same guest, except for its paths and its exports, which
//! have no epoch. So both ends may write all the time, and nothing prevents them from doing so at once. Its
//! disks are volumes at the same volume servers with the same homes, and they are attached at both hosts before
//! the measurement. It migrates with Perigee's parameters.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use perigee_http::{Client, Method};
use perigee_lab::Lab;
use perigee_model::phases::DOWNTIME_LIMIT_FIRST_MS;
use perigee_model::volume::{Attach, Attachment, CreateVolume, VolumeInfo, VolumeSource};
use perigee_model::{HostId, ImageName, VolumeName};
use serde_json::{Value, json};

use crate::guest::Guest;
use crate::perigee::Machine;
use crate::qmp::Qmp;
use crate::results::Measured;
use crate::{DATA_BYTES, OUTPUT_BYTES, wait_for_console};

const SEED_BYTES: usize = 1 << 20;
const NBD_PORT: u16 = 10809;
const MIGRATION_PORT: u16 = 4444;

pub struct Bare<'a> {
    lab: &'a Lab,
    guest: Guest,
    /// The machine of Perigee's QEMU with this guest, at the first host.
    machine: Machine,
    at: HostId,
    qemu: Qemu,
    /// A number, so that two QEMUs never share a directory.
    started: u32,
}

struct Qemu {
    process: Running,
    qmp: Qmp,
}

/// The process is stopped when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl<'a> Bare<'a> {
    /// Makes the disks and boots the guest.
    pub async fn boot(
        lab: &'a Lab,
        guest: Guest,
        image: &ImageName,
        machine: Machine,
        hosts: [&HostId; 2],
    ) -> Result<Self> {
        make_disks(lab, guest, image, hosts).await?;
        let at = hosts[0].clone();
        let (qemu, dir) = start(lab, guest, &machine, &at, 0, &[])?;
        wait_for_console(&dir.join("run/console.log")).await?;
        Ok(Self { lab, guest, machine, at, qemu, started: 1 })
    }

    pub fn pid(&self) -> u32 {
        self.qemu.process.0.id()
    }

    /// Measures from the start of the destination's QEMU until the source's QEMU reports that the guest has
    /// arrived.
    pub fn move_to(&mut self, to: &HostId) -> Result<Measured> {
        let address = self.lab.definition.host_address(to).context("a host has an address")?;
        let uri = format!("tcp:{address}:{MIGRATION_PORT}");
        let begun = Instant::now();
        let (destination, _) = start(
            self.lab,
            self.guest,
            &self.machine,
            to,
            self.started,
            &["-incoming".to_owned(), uri.clone()],
        )?;
        self.started += 1;
        let source = &mut self.qemu.qmp;
        let on = |name: &str| json!({"capability": name, "state": true});
        let capabilities = ["return-path", "events", "auto-converge"].map(on);
        source.execute("migrate-set-capabilities", &json!({"capabilities": capabilities}))?;
        let parameters =
            json!({"downtime-limit": DOWNTIME_LIMIT_FIRST_MS, "max-bandwidth": 1_u64 << 40});
        source.execute("migrate-set-parameters", &parameters)?;
        source.execute("migrate", &json!({"uri": uri}))?;
        source.migration_ended()?;
        let whole_ms = begun.elapsed().as_secs_f64() * 1e3;
        let info = final_figures(source)?;
        // The source's QEMU is stopped here.
        self.qemu = destination;
        self.at = to.clone();
        Ok(Measured {
            whole_ms,
            qemu_total_ms: info["total-time"].as_u64().context("QEMU's total time")?,
            pause_ms: info["downtime"].as_u64().context("QEMU's downtime")?,
            bytes: info["ram"]["transferred"].as_u64().unwrap_or(0),
            phases: None,
        })
    }
}

/// QEMU calculates the times just after it has reported the completion.
fn final_figures(source: &mut Qmp) -> Result<Value> {
    for _ in 0..100 {
        let info = source.execute("query-migrate", &json!({}))?;
        if info["total-time"].as_u64().is_some_and(|total_ms| total_ms > 0)
            && info.get("downtime").is_some()
        {
            return Ok(info);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    anyhow::bail!("QEMU does not tell the times of its migration")
}

fn volume(guest: Guest, serial: &str) -> Result<VolumeName> {
    Ok(VolumeName::new(format!("bare-{}-{serial}", guest.name()))?)
}

async fn make_disks(
    lab: &Lab,
    guest: Guest,
    image: &ImageName,
    [near, far]: [&HostId; 2],
) -> Result<()> {
    let client = |host: &HostId| {
        let socket = lab.dir().join("hosts").join(host.as_str()).join("volume-control.sock");
        Client::new(&format!("unix:{}", socket.display()), Duration::from_secs(120))
    };
    let (at_near, at_far) = (client(near)?, client(far)?);
    let disks = [
        ("root", VolumeSource::Image(image.clone()), None, near),
        ("seed", VolumeSource::Empty, Some(SEED_BYTES as u64), near),
        ("out", VolumeSource::Empty, Some(OUTPUT_BYTES), near),
        ("data0", VolumeSource::Empty, Some(DATA_BYTES), far),
    ];
    for (serial, source, size_bytes, home) in disks {
        let name = volume(guest, serial)?;
        let (home_client, other) =
            if home == near { (&at_near, &at_far) } else { (&at_far, &at_near) };
        let new = CreateVolume::new(name.clone(), size_bytes, source);
        home_client.post::<VolumeInfo>("/v1/volumes", &new).await?;
        let address = lab.definition.host_address(home).context("a host has an address")?;
        let attach = Attach { nbd_addr: format!("{address}:{NBD_PORT}") };
        other.put::<Attachment>(&format!("/v1/attachments/{name}"), &attach).await?;
    }
    let path = format!("/v1/volumes/{}/data", volume(guest, "seed")?);
    at_near.send_body::<Value>(Method::PUT, &path, seed(guest)?).await?;
    Ok(())
}

fn seed(guest: Guest) -> Result<Vec<u8>> {
    let job = serde_json::to_vec(&guest.seed())?;
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o600);
    header.set_size(job.len() as u64);
    tar.append_data(&mut header, "job.json", &job[..])?;
    let mut bytes = tar.into_inner()?;
    ensure!(bytes.len() <= SEED_BYTES, "the seed is too long");
    bytes.resize(SEED_BYTES, 0);
    Ok(bytes)
}

fn start(
    lab: &Lab,
    guest: Guest,
    machine: &Machine,
    host: &HostId,
    number: u32,
    more: &[String],
) -> Result<(Qemu, PathBuf)> {
    let dir = lab.dir().join("bare").join(format!("{}-{number}", guest.name()));
    std::fs::create_dir_all(dir.join("run"))?;
    let volume_socket = lab.dir().join("hosts").join(host.as_str()).join("volume.sock");
    let line = machine.line_for(&dir, &volume_socket, |serial| volume(guest, serial))?;
    let namespace = lab.definition.host_namespace(host);
    let mut command = Command::new("nsenter");
    command.arg(format!("--net=/run/netns/{namespace}")).arg("--").args(line).args(more);
    let log = std::fs::File::create(dir.join("qemu.log"))?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    let process = Running(command.spawn()?);
    let qmp = Qmp::connect(&dir.join("run/qmp.sock")).with_context(|| {
        let said = std::fs::read_to_string(dir.join("qemu.log")).unwrap_or_default();
        format!("QEMU said: {}", said.trim())
    })?;
    Ok((Qemu { process, qmp }, dir))
}
