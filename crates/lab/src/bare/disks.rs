//! A bare VM's own disks.

use std::path::{Path, PathBuf};
use std::time::Duration;

use perigee_http::{Client, Method};
use perigee_model::guest::Seed;
use perigee_model::volume::{CreateVolume, VolumeInfo, VolumeSource};
use perigee_model::{HostId, ImageName, Problem, VolumeName};
use serde_json::{Value, json};

use super::{Machine, SEED_BYTES, seed_disk};
use crate::up::Lab;

const CONTROL_DEADLINE: Duration = Duration::from_secs(60);

/// Root, seed and output: volumes of the volume server at the VM's host, without an epoch.
pub struct Disks {
    client: Client,
    socket: PathBuf,
    name: String,
}

/// What the disks of a bare VM hold.
pub struct Content<'a> {
    pub image: &'a ImageName,
    pub seed: &'a Seed,
    /// A tar with the job's inputs, which are put on the seed disk.
    pub bundle: Option<&'a Path>,
    pub output_bytes: u64,
}

impl Disks {
    /// Makes the disks of a VM. Its name is a part of the names of the volumes.
    ///
    /// # Errors
    /// The volume server of the host refuses one of them, or the inputs do not fit on a seed disk.
    pub async fn make(
        lab: &Lab,
        host: &HostId,
        name: &str,
        content: Content<'_>,
    ) -> Result<Self, Problem> {
        let home = lab.dir().join("hosts").join(host.as_str());
        let control = format!("unix:{}", home.join("volume-control.sock").display());
        let client = Client::new(&control, CONTROL_DEADLINE)?;
        let disks = Self { client, socket: home.join("volume.sock"), name: name.to_owned() };
        let all = [
            ("root", VolumeSource::Image(content.image.clone()), None),
            ("seed", VolumeSource::Empty, Some(SEED_BYTES as u64)),
            ("output", VolumeSource::Empty, Some(content.output_bytes)),
        ];
        for (disk, source, size_bytes) in all {
            let new = CreateVolume::new(disks.volume(disk)?, size_bytes, source);
            disks.client.post::<VolumeInfo>("/v1/volumes", &new).await?;
        }
        let path = format!("/v1/volumes/{}/data", disks.volume("seed")?);
        let seed = seed_disk(content.seed, content.bundle)?;
        disks.client.send_body::<Value>(Method::PUT, &path, seed).await?;
        Ok(disks)
    }

    fn volume(&self, disk: &str) -> Result<VolumeName, Problem> {
        VolumeName::new(format!("{}-{disk}", self.name))
            .map_err(|e| Problem::internal("can't name a bare VM's disk", e))
    }

    /// The command line of a machine with these disks and a block node for its data. Its files are below `dir`.
    ///
    /// # Errors
    /// The machine's command line has an unexpected form.
    pub fn line(
        &self,
        machine: &Machine,
        dir: &Path,
        data: &Value,
    ) -> Result<Vec<String>, Problem> {
        machine.line_for(dir, |disk, mut node| {
            Ok(match disk {
                "root" | "seed" | "output" => {
                    node["export"] = format!("{}-{disk}", self.name).into();
                    node["server"]["path"] = self.socket.display().to_string().into();
                    node
                }
                // A bare VM's inputs are on its seed disk.
                "inputs" => json!({
                    "driver": "null-co", "node-name": disk, "size": 1 << 20, "read-only": true,
                }),
                _ => data.clone(),
            })
        })
    }

    /// # Errors
    /// The volume server does not delete one of them.
    pub async fn delete(self) -> Result<(), Problem> {
        for disk in ["root", "seed", "output"] {
            self.client.delete(&format!("/v1/volumes/{}", self.volume(disk)?)).await?;
        }
        Ok(())
    }
}
