//! The same guest in bare QEMU, which a script drives over QMP. Its card is on a bridge of both hosts that learns where hardware
//! addresses are; QEMU announces the guest's at its new host.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use perigee_http::{Client, Method};
use perigee_lab::Lab;
use perigee_lab::bare::{Machine, NETDEV, Qemu, wait_for_console};
use perigee_lab::definition::NBD_PORT;
use perigee_model::phases::DOWNTIME_LIMIT_FIRST_MS;
use perigee_model::volume::{Attach, Attachment, CreateVolume, VolumeInfo, VolumeSource};
use perigee_model::{HostId, ImageName, VolumeName};
use serde_json::{Value, json};

use crate::dir_of;
use crate::ground::TAP;
use crate::guest::READY;
use crate::results::Sending;

const MIGRATION_PORT: u16 = 4444;
const BOOT_DEADLINE: Duration = Duration::from_secs(900);

pub struct Bare<'a> {
    lab: &'a Lab,
    machine: Machine,
    qemu: Qemu,
    /// A number, so that two QEMUs never share a directory.
    started: u32,
}

impl<'a> Bare<'a> {
    pub async fn boot(
        lab: &'a Lab,
        machine: Machine,
        seed: Vec<u8>,
        hosts: &[HostId; 2],
    ) -> Result<Self> {
        make_disks(lab, seed, hosts).await?;
        let qemu = start(lab, &machine, &hosts[0], 0, &[])?;
        wait_for_console(&qemu.console(), READY, BOOT_DEADLINE).await?;
        Ok(Self { lab, machine, qemu, started: 1 })
    }

    pub fn move_to(&mut self, to: &HostId) -> Result<Sending> {
        let address = self.lab.definition.host_address(to).context("a host has an address")?;
        let uri = format!("tcp:{address}:{MIGRATION_PORT}");
        let incoming = ["-incoming".to_owned(), uri.clone()];
        let destination = start(self.lab, &self.machine, to, self.started, &incoming)?;
        self.started += 1;
        let source = &mut self.qemu.qmp;
        let on = |name: &str| json!({"capability": name, "state": true});
        let capabilities = ["return-path", "events", "auto-converge"].map(on);
        source.execute("migrate-set-capabilities", &json!({"capabilities": capabilities}))?;
        let parameters =
            json!({"downtime-limit": DOWNTIME_LIMIT_FIRST_MS, "max-bandwidth": 1_u64 << 40});
        source.execute("migrate-set-parameters", &parameters)?;
        source.execute("migrate", &json!({"uri": uri}))?;
        source.migration("completed")?;
        let mut sending = None;
        // QEMU calculates it just after it has reported the completion.
        for _ in 0..100 {
            let info = source.execute("query-migrate", &json!({}))?;
            sending = info["downtime"].as_u64().map(|pause_ms| Sending {
                pause_ms,
                copy_ms: info["total-time"].as_u64().unwrap_or_default(),
                sent_bytes: info["ram"]["transferred"].as_u64().unwrap_or_default(),
            });
            if sending.is_some() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // The source's QEMU is ended here.
        self.qemu = destination;
        sending.context("QEMU does not tell the pause of its migration")
    }
}

fn volume(serial: &str) -> Result<VolumeName> {
    Ok(VolumeName::new(format!("bare-web-{serial}"))?)
}

async fn make_disks(lab: &Lab, seed: Vec<u8>, [near, far]: &[HostId; 2]) -> Result<()> {
    let client = |host: &HostId| {
        let socket = dir_of(lab, host).join("volume-control.sock");
        Client::new(&format!("unix:{}", socket.display()), Duration::from_secs(120))
    };
    let (at_near, at_far) = (client(near)?, client(far)?);
    let seed_bytes = u64::try_from(seed.len())?;
    let disks = [
        ("root", VolumeSource::Image(ImageName::new("debian")?), None),
        ("seed", VolumeSource::Empty, Some(seed_bytes)),
        ("out", VolumeSource::Empty, Some(1 << 20)),
    ];
    for (serial, source, size_bytes) in disks {
        let name = volume(serial)?;
        let new = CreateVolume::new(name.clone(), size_bytes, source);
        at_near.post::<VolumeInfo>("/v1/volumes", &new).await?;
        at_near.put::<()>(&format!("/v1/volumes/{name}/hosts/{far}"), &()).await?;
        let address = lab.definition.host_address(near).context("a host has an address")?;
        let attach = Attach { nbd_addr: format!("{address}:{NBD_PORT}") };
        at_far.put::<Attachment>(&format!("/v1/attachments/{name}"), &attach).await?;
    }
    let path = format!("/v1/volumes/{}/data", volume("seed")?);
    at_near.send_body::<Value>(Method::PUT, &path, seed).await?;
    Ok(())
}

fn start(
    lab: &Lab,
    machine: &Machine,
    host: &HostId,
    number: u32,
    more: &[String],
) -> Result<Qemu> {
    let dir: PathBuf = lab.dir().join("bare").join(number.to_string());
    std::fs::create_dir_all(dir.join("run"))?;
    let volume_socket = dir_of(lab, host).join("volume.sock");
    let mut line = machine.line_for(&dir, |name, mut node| {
        let role = if name == "output" { "out" } else { name };
        node["export"] = format!("bare-web-{role}").into();
        node["server"]["path"] = volume_socket.display().to_string().into();
        Ok(node)
    })?;
    let card = line.iter_mut().find(|word| *word == NETDEV).context("QEMU's line has no card")?;
    *card = format!("tap,id=network,ifname={TAP},script=no,downscript=no,vhost=off");
    line.extend_from_slice(more);
    Ok(Qemu::start(lab, host, &line, &dir)?)
}
