//! A volume at one host that is read at the other one.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use perigee_http::{Client, Method, file_body};
use perigee_lab::Lab;
use perigee_lab::definition::NBD_PORT;
use perigee_lab::usage::Usage;
use perigee_model::volume::{Attach, Attachment, CreateVolume, VolumeInfo, VolumeSource};
use perigee_model::{HostId, VolumeName};
use serde_json::Value;

use crate::{DEADLINE, run};

fn client(lab: &Lab, host: &HostId, answer_max: Duration) -> Result<Client> {
    let socket = lab.dir().join("hosts").join(host.as_str()).join("volume-control.sock");
    Ok(Client::new(&format!("unix:{}", socket.display()), answer_max)?)
}

/// Makes a volume of random bytes at the second host.
pub async fn prepare(lab: &Lab, [_, home]: &[HostId; 2], bytes: u64) -> Result<()> {
    let file = lab.dir().join("random");
    let count = bytes.to_string();
    run(
        "sh",
        &["-c", "head -c \"$1\" /dev/urandom > \"$2\"", "sh", &count, &file.to_string_lossy()],
    )?;
    let at_home = client(lab, home, DEADLINE)?;
    let new = CreateVolume::new(VolumeName::new("base")?, Some(bytes), VolumeSource::Empty);
    at_home.post::<VolumeInfo>("/v1/volumes", &new).await?;
    let body = file_body(tokio::fs::File::open(&file).await?);
    at_home.send_body::<Value>(Method::PUT, "/v1/volumes/base/data", body).await?;
    Ok(())
}

/// Reads a new clone of it, which no cache has. Returns bytes, seconds, and the CPU seconds of both volume servers.
pub async fn read(lab: &Lab, [reader, home]: &[HostId; 2], round: u32) -> Result<(u64, f64, f64)> {
    let name = VolumeName::new(format!("clone-{round}"))?;
    let source = VolumeSource::Volume(VolumeName::new("base")?);
    let new = CreateVolume::new(name.clone(), None, source);
    let made: VolumeInfo = client(lab, home, DEADLINE)?.post("/v1/volumes", &new).await?;
    let allow = format!("/v1/volumes/{name}/hosts/{reader}");
    client(lab, home, DEADLINE)?.put::<()>(&allow, &()).await?;
    let address = lab.definition.host_address(home).context("a host has an address")?;
    let attach = Attach { nbd_addr: format!("{address}:{NBD_PORT}") };
    let path = format!("/v1/attachments/{name}");
    client(lab, reader, DEADLINE)?.put::<Attachment>(&path, &attach).await?;
    let socket = lab.dir().join("hosts").join(reader.as_str()).join("volume.sock");
    let uri = format!("nbd+unix:///{name}?socket={}", socket.display());
    let before = cpu_s(lab, [reader, home])?;
    let begun = Instant::now();
    run("nbdcopy", &["--no-extents", "--request-size=1048576", &uri, "null:"])?;
    let seconds = begun.elapsed().as_secs_f64();
    Ok((made.size_bytes, seconds, cpu_s(lab, [reader, home])? - before))
}

fn cpu_s(lab: &Lab, hosts: [&HostId; 2]) -> Result<f64> {
    let mut sum = 0.0;
    for host in hosts {
        sum += Usage::of(u32::try_from(lab.host_pid(host, "volume")?)?)?.cpu_s;
    }
    Ok(sum)
}
