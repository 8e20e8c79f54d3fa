//! The same guest in bare QEMU, which a script drives over QMP.
//!
//! Its exports have no epoch. So both ends may write all the time, and nothing prevents them from doing so at once. Its
//! disks are volumes at the same volume servers with the same homes, and they are attached at both hosts before
//! the measurement. It migrates with Perigee's parameters.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use perigee_http::{Client, Method};
use perigee_lab::Lab;
use perigee_lab::bare::{Machine, Qemu, Qmp, SEED_BYTES, seed_disk, wait_for_console};
use perigee_lab::definition::NBD_PORT;
use perigee_model::phases::DOWNTIME_LIMIT_FIRST_MS;
use perigee_model::volume::{Attach, Attachment, CreateVolume, VolumeInfo, VolumeSource};
use perigee_model::{HostId, ImageName, VolumeName};
use serde_json::{Value, json};

use crate::guest::{Guest, READY};
use crate::results::Measured;
use crate::{BOOT_DEADLINE, DATA_BYTES, OUTPUT_BYTES};

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
        let qemu = start(lab, guest, &machine, &at, 0, &[])?;
        wait_for_console(&qemu.console(), READY, BOOT_DEADLINE).await?;
        Ok(Self { lab, guest, machine, at, qemu, started: 1 })
    }

    pub fn pid(&self) -> u32 {
        self.qemu.process.pid()
    }

    /// Measures from the start of the destination's QEMU until the source's QEMU reports that the guest has
    /// arrived.
    pub fn move_to(&mut self, to: &HostId) -> Result<Measured> {
        let address = self.lab.definition.host_address(to).context("a host has an address")?;
        let uri = format!("tcp:{address}:{MIGRATION_PORT}");
        let begun = Instant::now();
        let destination = start(
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
        if let Err(problem) = source.migration("completed") {
            return Err(self.qemu.explains(destination.explains(problem)).into());
        }
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
        let reader = if home == near { far } else { near };
        home_client.put::<()>(&format!("/v1/volumes/{name}/hosts/{reader}"), &()).await?;
        let address = lab.definition.host_address(home).context("a host has an address")?;
        let attach = Attach { nbd_addr: format!("{address}:{NBD_PORT}") };
        other.put::<Attachment>(&format!("/v1/attachments/{name}"), &attach).await?;
    }
    let path = format!("/v1/volumes/{}/data", volume(guest, "seed")?);
    at_near.send_body::<Value>(Method::PUT, &path, seed_disk(&guest.seed(), None)?).await?;
    Ok(())
}

fn start(
    lab: &Lab,
    guest: Guest,
    machine: &Machine,
    host: &HostId,
    number: u32,
    more: &[String],
) -> Result<Qemu> {
    let dir = lab.dir().join("bare").join(format!("{}-{number}", guest.name()));
    std::fs::create_dir_all(dir.join("run"))?;
    let volume_socket = lab.dir().join("hosts").join(host.as_str()).join("volume.sock");
    let mut line = machine.line_for(&dir, |name, mut node| {
        let role = if name == "output" { "out" } else { name };
        node["export"] = format!("bare-{}-{role}", guest.name()).into();
        node["server"]["path"] = volume_socket.display().to_string().into();
        Ok(node)
    })?;
    line.extend_from_slice(more);
    Ok(Qemu::start(lab, host, &line, &dir)?)
}
