//! What all cells use: the lab's servers, waiting, and checking the content of a volume and of a pool.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use perigee_http::Client;
use perigee_model::home::{HomeState, VolumeHome};
use perigee_model::job::{ClusterVolume, Host, HostState, NewVolume};
use perigee_model::volume::{
    Attach, Attachment, CheckReport, CheckScope, ImageInfo, PoolInfo, VolumeInfo, VolumeSource,
};
use perigee_model::{HostId, Problem, ProblemKind, SiteId, VolumeName};

use super::writer::{BLOCK_BYTES, BLOCKS, QemuIo, Written};
use crate::command::run_within;
use crate::definition::NBD_PORT;
use crate::up::Lab;

const QUICK: Duration = Duration::from_secs(30);
/// For requests that are answered when the work is done.
const SLOW: Duration = Duration::from_secs(150);
/// The time between two looks at something that is awaited.
pub const LOOK_EVERY: Duration = Duration::from_millis(100);
/// For a step that takes a second on an idle machine.
pub const STEP_MAX: Duration = Duration::from_secs(180);
/// The first part of a volume belongs to two writers. The data behind it makes a move take some time.
const BULK_FIRST_BYTE: usize = 2 * BLOCKS * BLOCK_BYTES;
const BULK_BYTES: usize = 32 << 20;
const VOLUME_BYTES: u64 = 64 << 20;

/// The lab on which faults are injected, with one client for each daemon that is asked.
pub struct Ground<'a> {
    pub lab: &'a Lab,
    pub controller: Client,
    /// For requests that are answered when the work is done.
    pub slow: Client,
    /// The host of site `cloud`.
    pub cloud: HostId,
    /// The first host of site `home`.
    pub home: HostId,
    /// Bytes that can't be compressed.
    bulk: Vec<u8>,
}

impl<'a> Ground<'a> {
    /// The first site of the lab is home, the second one the cloud.
    pub fn new(lab: &'a Lab) -> Result<Self, Problem> {
        let host = |site: usize| lab.definition.sites[site].hosts[0].clone();
        let (home, cloud) = (host(0), host(1));
        let bulk = incompressible(BULK_BYTES);
        let file = lab.dir().join("bulk");
        std::fs::write(&file, &bulk)
            .map_err(|error| Problem::internal(format!("can't write {}", file.display()), error))?;
        let (controller, slow) = (lab.client(QUICK)?, lab.client(SLOW)?);
        Ok(Self { lab, controller, slow, cloud, home, bulk })
    }

    /// Waits until every volume server answers and the controller knows it.
    pub async fn is_ready(&self) -> Result<(), Problem> {
        until("the volume servers", STEP_MAX, async || {
            let hosts: Vec<Host> = self.controller.get("/v1/hosts").await?;
            self.possessions().await?;
            Ok(hosts.iter().all(|host| host.state == HostState::Up).then_some(()))
        })
        .await
    }

    /// `None` for a host that the lab does not have.
    pub fn site_of(&self, host: &HostId) -> Option<SiteId> {
        let mut hosts = self.lab.definition.hosts();
        hosts.find(|(_, other)| *other == host).map(|(site, _)| site.clone())
    }

    /// The control API of a host's volume server.
    pub fn server(&self, host: &HostId) -> Result<Client, Problem> {
        let socket = self.lab.lab_dir().host(host).join("volume-control.sock");
        Client::new(&format!("unix:{}", socket.display()), QUICK)
    }

    /// The NBD socket of a host's volume server.
    pub fn socket(&self, host: &HostId) -> PathBuf {
        self.lab.lab_dir().volume_socket(host)
    }

    /// What the controller says of a volume.
    pub async fn volume(&self, name: &VolumeName) -> Result<ClusterVolume, Problem> {
        self.controller.get(&format!("/v1/volumes/{name}")).await
    }

    /// A volume without content at this host.
    pub async fn empty_volume(
        &self,
        name: &VolumeName,
        at: &HostId,
        size_bytes: u64,
    ) -> Result<ClusterVolume, Problem> {
        let new = NewVolume {
            name: name.clone(),
            host: Some(at.clone()),
            size_bytes: Some(size_bytes),
            source: VolumeSource::Empty,
            leave_site: Default::default(),
        };
        self.controller.post("/v1/volumes", &new).await
    }

    /// Makes a volume with data that a move has to copy.
    pub async fn make_volume(
        &self,
        name: &VolumeName,
        at: &HostId,
    ) -> Result<ClusterVolume, Problem> {
        let made = self.empty_volume(name, at, VOLUME_BYTES).await?;
        let mut client = QemuIo::open(&self.socket(at), &format!("{name}@{}", made.epoch)).await?;
        let file = self.lab.dir().join("bulk");
        let write = format!("write -s {} {BULK_FIRST_BYTE} {BULK_BYTES}", file.display());
        let said = client.tell(&write).await?;
        let flushed = client.tell("flush").await?;
        if said.contains("failed") || flushed.contains("failed") {
            return Err(Problem::internal(format!("can't fill volume {name}"), said));
        }
        Ok(made)
    }

    /// Lets a host reach a volume of another host, as the controller does it for a job.
    pub async fn attach(
        &self,
        name: &VolumeName,
        at: &HostId,
        home: &HostId,
    ) -> Result<(), Problem> {
        let address = self.lab.definition.host_address(home).ok_or_else(|| {
            Problem::not_found(format!("can't attach volume {name}"), format!("no host {home}"))
        })?;
        let ask = Attach { nbd_addr: format!("{address}:{NBD_PORT}") };
        let allow = format!("/v1/volumes/{name}/hosts/{at}");
        self.server(home)?.put::<()>(&allow, &()).await?;
        let path = format!("/v1/attachments/{name}");
        self.server(at)?.put::<Attachment>(&path, &ask).await.map(drop)
    }

    /// What this host says of the volume's home, which the controller may not know yet.
    pub async fn home_at(&self, host: &HostId, name: &VolumeName) -> Result<HomeState, Problem> {
        let path = format!("/v1/volumes/{name}/home");
        Ok(self.server(host)?.get::<VolumeHome>(&path).await?.home)
    }

    /// The hosts that say that they are the volume's home.
    pub async fn homes(&self, name: &VolumeName) -> Result<Vec<HostId>, Problem> {
        let mut homes = Vec::new();
        for host in [&self.home, &self.cloud] {
            if matches!(self.home_at(host, name).await?, HomeState::Here { .. }) {
                homes.push(host.clone());
            }
        }
        Ok(homes)
    }

    /// Reads all of a volume through a host, and compares it with what must be there.
    pub async fn compare(
        &self,
        name: &VolumeName,
        through: &HostId,
        written: &[Written],
    ) -> Result<Vec<String>, Problem> {
        let file = self.lab.dir().join("found");
        let export = format!("nbd+unix:///{name}?socket={}", self.socket(through).display());
        let args = ["convert", "-f", "raw", "-O", "raw", &export, &file.to_string_lossy()];
        run_within(STEP_MAX, "qemu-img", &args).await?;
        let disk = std::fs::read(&file)
            .map_err(|error| Problem::internal(format!("can't read {}", file.display()), error))?;
        let mut wrong: Vec<String> =
            written.iter().flat_map(|part| part.differences(&disk)).collect();
        wrong.truncate(3);
        if disk.get(BULK_FIRST_BYTE..BULK_FIRST_BYTE + BULK_BYTES) != Some(&self.bulk[..]) {
            wrong.push("what was written before the fault is not there".to_owned());
        }
        Ok(wrong.into_iter().map(|what| format!("through {through}: {what}")).collect())
    }

    /// Faults of a pool, and files in it that nothing needs.
    pub async fn check_pool(&self, host: &HostId) -> Result<Vec<String>, Problem> {
        let server = self.server(host)?;
        let report: CheckReport = server.post_long("/v1/check", &CheckScope::Pool, |_| {}).await?;
        let faults =
            report.faults.iter().map(|fault| format!("the pool of {host}: {}", fault.what));
        let left =
            report.leftovers.iter().map(|file| format!("left in the pool of {host}: {file}"));
        Ok(faults.chain(left).collect())
    }

    /// Everything that the volume servers have, for people. Equal lists mean that nothing was left behind.
    pub async fn possessions(&self) -> Result<Vec<String>, Problem> {
        let mut all = Vec::new();
        for (_, host) in self.lab.definition.hosts() {
            let server = self.server(host)?;
            let volumes: Vec<VolumeInfo> = server.get("/v1/volumes").await?;
            all.extend(volumes.iter().map(|volume| format!("volume {} on {host}", volume.name)));
            let attached: Vec<Attachment> = server.get("/v1/attachments").await?;
            all.extend(attached.iter().map(|own| format!("attachment {} on {host}", own.volume)));
            let images: Vec<ImageInfo> = server.get("/v1/images").await?;
            all.extend(images.iter().map(|image| format!("image {} on {host}", image.name)));
            let pool: PoolInfo = server.get("/v1/pool").await?;
            if pool.data_bytes > 0 {
                all.push(format!("{} bytes of data on {host}", pool.data_bytes));
            }
        }
        Ok(all)
    }

    /// Deletes a volume, the attachments that the cell has made, and the images of what a lost home had. Waits until
    /// nothing is left that was not there before. Returns what is left, for people.
    pub async fn clean(
        &self,
        name: &VolumeName,
        before: &[String],
    ) -> Result<Vec<String>, Problem> {
        until(&format!("volume {name} to be deleted"), STEP_MAX, async || {
            for host in [&self.home, &self.cloud] {
                gone(self.server(host)?.delete(&format!("/v1/attachments/{name}")).await)?;
            }
            gone(self.controller.delete(&format!("/v1/volumes/{name}")).await).map(Some)
        })
        .await?;
        let mut left = Vec::new();
        let cleaned = until(&format!("all of volume {name} to be gone"), STEP_MAX, async || {
            self.delete_lost(name).await?;
            left = self.possessions().await?;
            left.retain(|own| !before.contains(own));
            Ok(left.is_empty().then_some(()))
        })
        .await;
        match cleaned {
            Err(problem) if left.is_empty() => Err(problem),
            _ => Ok(left.into_iter().map(|own| format!("left behind: {own}")).collect()),
        }
    }

    async fn delete_lost(&self, name: &VolumeName) -> Result<(), Problem> {
        let lost = format!("{name}-lost-");
        for (_, host) in self.lab.definition.hosts() {
            let server = self.server(host)?;
            let images: Vec<ImageInfo> = server.get("/v1/images").await?;
            for image in images.iter().filter(|image| image.name.as_str().starts_with(&lost)) {
                server.delete(&format!("/v1/images/{}", image.name)).await?;
            }
        }
        Ok(())
    }
}

/// Makes it no error to delete what is not there.
fn gone(deleted: Result<(), Problem>) -> Result<(), Problem> {
    match deleted {
        Err(problem) if problem.kind != ProblemKind::NotFound => Err(problem),
        _ => Ok(()),
    }
}

/// Asks again and again until there is an answer. An error counts as no answer yet.
///
/// # Errors
/// What was waited for, and the last error.
pub async fn until<T>(
    what: &str,
    deadline: Duration,
    mut ask: impl AsyncFnMut() -> Result<Option<T>, Problem>,
) -> Result<T, Problem> {
    let end = Instant::now() + deadline;
    loop {
        let last = match ask().await {
            Ok(Some(answer)) => return Ok(answer),
            Ok(None) => String::new(),
            Err(problem) => format!(": {problem}"),
        };
        if Instant::now() > end {
            let why = format!("waited {} s{last}", deadline.as_secs());
            return Err(Problem::unavailable(format!("can't wait any longer for {what}"), why));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Pseudorandom bytes (SplitMix64).
fn incompressible(length: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length);
    let mut state = 1_u64;
    while bytes.len() < length {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bytes.extend_from_slice(&(mixed ^ (mixed >> 31)).to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}
