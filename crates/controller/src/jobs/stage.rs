//! Staging: makes everything that the VM needs before it starts.
//!
//! Each part carries the job as its owner. So a repeated step finds the part, and no other volume is mistaken
//! for it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use perigee_http::Method;
use perigee_model::guest::{GuestNetwork, Mount, RUNNER_MARK, RUNNER_MARK_AT, Seed, USER_NETWORK};
use perigee_model::inputs::INPUTS_MOUNT;
use perigee_model::job::{Access, JobSpec};
use perigee_model::states::JobEvent;
use perigee_model::tenant::SEPARATOR;
use perigee_model::vm::{NetworkKind, VmNetwork};
use perigee_model::volume::{BLOCK_BYTES, CreateVolume, EpochChange, VolumeInfo, VolumeSource};
use perigee_model::{DiskRole, Epoch, HostId, JobId, LeaveSite, Problem, ProblemKind};

use super::driver::{Run, Step};
use super::place::own_volume;
use crate::cluster::{Cluster, HostLink};
use crate::files::inputs;
use crate::files::inputs::Staged;
use crate::guest::{nocloud, nvram, tars};
use crate::records::{PlacedDisk, Placement, owner_of};
use crate::storage::images::NoCopy;
use crate::storage::{attach, images, volumes};
use crate::{networks, tpm};

/// A seed is at least so large.
const SEED_BYTES_MIN: u64 = 1 << 20;

const SEED_DEADLINE: Duration = Duration::from_secs(600);

impl Run {
    pub(super) async fn stage(&mut self) -> Result<Step, Problem> {
        if let Some(step) = self.leave_gone_host().await? {
            return Ok(step);
        }
        let cluster = self.cluster.clone();
        let placement = self.placement()?.clone();
        networks::give_card(&cluster, &mut self.record).await?;
        if !self.knows_all_addresses() {
            // Each other member gives itself an address before it does anything else.
            return Ok(Step::Wait(cluster.timing.poll));
        }
        let to_come = |disk: &&PlacedDisk| disk.role == DiskRole::Inputs && disk.epoch.is_none();
        if let Some(disk) = placement.disks.iter().find(to_come)
            && let Staged::Waits(why) = self.stage_inputs(&disk.home).await?
        {
            self.say(&why).await?;
            return Ok(Step::Wait(cluster.timing.monitor));
        }
        for (index, disk) in placement.disks.iter().enumerate() {
            if disk.epoch.is_none() {
                let disk = self.readable(disk).await?;
                let epoch = self.make_disk(&disk, self.placement()?).await?;
                if let Some(placement) = &mut self.record.value.placement {
                    placement.disks[index] = PlacedDisk { epoch: Some(epoch), ..disk };
                }
                self.record.save().await?;
            }
            if disk.role == DiskRole::Root {
                self.add_runner().await?;
            }
        }
        let placement = self.placement()?.clone();
        if let Some(persistent) = self.record.value.kind.persistent_vm_mut() {
            persistent.made = true;
            persistent.root_is_new = false;
        }
        attach::attach(&cluster, &placement.disks, &placement.start).await?;
        let job = &mut self.record.value.job;
        job.state = job.state.next(JobEvent::Staged)?;
        job.reason.clear();
        self.record.save().await?;
        Ok(Step::Again)
    }

    pub(super) fn placement(&self) -> Result<&Placement, Problem> {
        self.record.value.placement.as_ref().ok_or_else(|| {
            Problem::internal(format!("job {}", self.id), "it is placed and has no placement")
        })
    }

    /// Makes a disk's volume or uses the existing one, and returns the epoch with which the VM opens it.
    async fn make_disk(&self, disk: &PlacedDisk, at: &Placement) -> Result<Epoch, Problem> {
        let home = volumes::reachable(&self.cluster, &disk.home)?;
        let spec = &self.job().spec;
        match (disk.role, &disk.data_of) {
            (role @ (DiskRole::Root | DiskRole::Nvram | DiskRole::Tpm), _)
                if self.persistent().is_some_and(|persistent| persistent.has(role)) =>
            {
                take_over(&home, disk).await.map_err(|problem| self.root_is_lost(&home, problem))
            }
            (DiskRole::Root, _) => {
                let image = images::ensure(&self.cluster, &home, &spec.image).await;
                let image = image.map_err(|no_copy| {
                    match no_copy {
                        // All hosts have said so.
                        NoCopy::Gone(problem) => problem,
                        // Somebody mends it, or deletes what is there. Meanwhile the job says why it waits.
                        NoCopy::NoneGood(problem) | NoCopy::Trouble(problem) => {
                            to_be_tried_again(problem)
                        }
                    }
                })?;
                let source = VolumeSource::Image(spec.image.clone());
                let size_bytes = root_bytes(spec, image.size_bytes).map(whole_blocks);
                // The copy has just been deleted: it is looked for again.
                self.create(&home, disk, size_bytes, source).await.map_err(|problem| match problem
                    .kind
                {
                    ProblemKind::NotFound => to_be_tried_again(problem),
                    _ => problem,
                })
            }
            (DiskRole::Seed, _) => self.make_seed(&home, disk, at).await,
            (DiskRole::CloudInit, _) => self.make_cloud_init(&home, disk).await,
            (DiskRole::Nvram | DiskRole::Tpm, _) => self.make_new(&home, disk).await,
            (DiskRole::Output, _) => {
                let size_bytes = Some(whole_blocks(spec.output_bytes));
                self.create(&home, disk, size_bytes, VolumeSource::Empty).await
            }
            (DiskRole::Inputs, _) => {
                let inputs = self.record.value.inputs.as_ref().ok_or_else(|| {
                    Problem::internal(format!("job {}", self.id), "its inputs are not known")
                })?;
                let source = VolumeSource::Image(inputs.image.clone());
                self.create(&home, disk, None, source).await.map_err(|problem| {
                    match problem.kind {
                        // The image has just been collected: it is made again.
                        ProblemKind::NotFound => to_be_tried_again(problem),
                        _ => problem,
                    }
                })
            }
            (DiskRole::Data(_), Some(source)) if disk.temporary => {
                self.create(&home, disk, None, VolumeSource::Volume(source.clone())).await
            }
            (DiskRole::Data(_), _) if disk.read_only => Ok(info(&home, disk).await?.epoch),
            (DiskRole::Data(_), _) => take_over(&home, disk).await,
        }
    }

    /// Makes the variables of the firmware, or the state of the TPM, of a VM that has never run.
    pub(super) async fn make_new(
        &self,
        home: &HostLink,
        disk: &PlacedDisk,
    ) -> Result<Epoch, Problem> {
        if disk.role == DiskRole::Tpm {
            return self.create(home, disk, Some(tpm::BYTES), VolumeSource::Empty).await;
        }
        let firmware = self.record.value.kind.firmware(&self.job().spec);
        let flash = nvram::at_first(firmware)?;
        self.make_with(home, disk, nvram::BYTES as u64, flash).await
    }

    /// Adds the disk from which cloud-init starts the runner, if the image of a job does not have the runner itself.
    async fn add_runner(&mut self) -> Result<(), Problem> {
        let placement = self.placement()?;
        let is_added = placement.disks.iter().any(|disk| disk.role == DiskRole::CloudInit);
        let root = placement.disks.iter().find(|disk| disk.role == DiskRole::Root);
        let Some(root) = root.filter(|_| !is_added && self.persistent().is_none()) else {
            return Ok(());
        };
        if self.has_runner(root).await? {
            return Ok(());
        }
        let start = volumes::reachable(&self.cluster, &placement.start)?;
        let disk = PlacedDisk {
            role: DiskRole::CloudInit,
            volume: own_volume(&self.id, self.record.value.restarts, DiskRole::CloudInit),
            data_of: None,
            home: start.id.clone(),
            home_changed: false,
            epoch: None,
            read_only: true,
            temporary: true,
            leave_site: LeaveSite::Allowed,
        };
        let runner = read_runner(&self.cluster).map_err(|problem| Problem {
            what: format!("can't start job {}", self.id),
            ..problem
        })?;
        let instance = format!("{}-{}", self.id, self.job().submitted_ms);
        let network = networks::of_vm(&self.record.value)?;
        let made = nocloud::job_disk(
            &instance,
            self.id.as_str().rsplit(SEPARATOR).next().unwrap_or_default(),
            &network,
            &runner,
        );
        let fat =
            made.map_err(|why| Problem::internal(format!("can't start job {}", self.id), why))?;
        let epoch = self.make_with(&start, &disk, fat.disk_bytes, fat.bytes).await?;
        if let Some(placement) = &mut self.record.value.placement {
            placement.disks.push(PlacedDisk { epoch: Some(epoch), ..disk });
        }
        self.record.save().await
    }

    /// Whether the system on the root disk starts the runner by itself. Of data that the controller may not read nothing else is
    /// supposed.
    async fn has_runner(&self, root: &PlacedDisk) -> Result<bool, Problem> {
        let home = volumes::reachable(&self.cluster, &root.home)?;
        let length = RUNNER_MARK_AT + RUNNER_MARK.len();
        let path = format!("/v1/volumes/{}/data?length_bytes={}", root.volume, BLOCK_BYTES);
        match home.volume.get_bytes(&path).await {
            Ok(bytes) => Ok(bytes.get(RUNNER_MARK_AT..length) == Some(RUNNER_MARK)),
            Err(problem) if problem.kind == ProblemKind::Conflict => Ok(true),
            Err(problem) => Err(problem),
        }
    }

    /// Makes sure that the home of the inputs' disk has their image.
    async fn stage_inputs(&mut self, home: &HostId) -> Result<Staged, Problem> {
        let cluster = self.cluster.clone();
        let home = volumes::reachable(&cluster, home)?;
        let spec = self.job().spec.clone();
        let known = self.record.value.inputs.clone();
        inputs::ensure(&cluster, &home, &spec, known.as_ref(), async |found| {
            if self.record.value.inputs.as_ref() == Some(&found) {
                return Ok(());
            }
            self.record.value.inputs = Some(found);
            self.record.save().await
        })
        .await
    }

    /// Makes a volume for this job, or finds the one that an earlier try made.
    pub(super) async fn create(
        &self,
        home: &HostLink,
        disk: &PlacedDisk,
        size_bytes: Option<u64>,
        source: VolumeSource,
    ) -> Result<Epoch, Problem> {
        let owner = Some(owner_of(self.job()));
        let new = CreateVolume::new(disk.volume.clone(), size_bytes, source);
        let ask = CreateVolume { owner: owner.clone(), leave_site: disk.leave_site, ..new };
        match home.volume_slow.post::<VolumeInfo>("/v1/volumes", &ask).await {
            Ok(info) => Ok(info.epoch),
            Err(problem) if problem.kind == ProblemKind::Conflict => match info(home, disk).await {
                Ok(info) if info.owner == owner => Ok(info.epoch),
                Ok(_) => Err(Problem::conflict(
                    format!("can't make volume {} at {}", disk.volume, home.id),
                    "there is a volume with this name that does not belong to this job",
                )
                .next("delete or rename that volume, and submit the job again")),
                Err(_) => Err(problem),
            },
            Err(problem) => Err(problem),
        }
    }

    async fn make_seed(
        &self,
        home: &HostLink,
        disk: &PlacedDisk,
        at: &Placement,
    ) -> Result<Epoch, Problem> {
        let spec = &self.job().spec;
        let network = guest_network(&networks::of_vm(&self.record.value)?);
        let optional = spec.network == NetworkKind::Default;
        let network = network.map(|network| GuestNetwork { optional, ..network });
        let seed = Seed { gang: self.guest_gang()?, ..seed(&self.id, spec, at, network) };
        let seed = self.seed_bytes(&seed)?;
        let size_bytes = whole_blocks((seed.len() as u64).max(SEED_BYTES_MIN));
        let epoch = self.create(home, disk, Some(size_bytes), VolumeSource::Empty).await?;
        write_disk(home, disk, seed).await?;
        Ok(epoch)
    }

    fn seed_bytes(&self, seed: &Seed) -> Result<Vec<u8>, Problem> {
        let fault = |e| Problem::internal(format!("can't make the seed of job {}", self.id), e);
        tars::write_seed(Vec::new(), seed).map_err(fault)
    }

    /// Replaces the seed of a VM that is started once more: nothing is run, and it needs no network and no other VM.
    pub(super) async fn write_collecting_seed(&self) -> Result<(), Problem> {
        let placement = self.placement()?;
        let disk = placement.disks.iter().find(|disk| disk.role == DiskRole::Seed);
        let disk = disk.ok_or_else(|| {
            Problem::internal(format!("can't start job {} again", self.id), "it has no seed")
        })?;
        let home = volumes::reachable(&self.cluster, &disk.home)?;
        let seed = Seed {
            command: Vec::new(),
            env: BTreeMap::new(),
            timeout_s: None,
            output_bytes: None,
            collect: true,
            ..seed(&self.id, &self.job().spec, placement, None)
        };
        write_disk(&home, disk, self.seed_bytes(&seed)?).await
    }
}

/// Writes this to the begin of a disk.
pub(super) async fn write_disk(
    home: &HostLink,
    disk: &PlacedDisk,
    content: Vec<u8>,
) -> Result<(), Problem> {
    let target = format!("/v1/volumes/{}/data", disk.volume);
    let sent = home.volume_slow.send_body::<serde_json::Value>(Method::PUT, &target, content);
    tokio::time::timeout(SEED_DEADLINE, sent).await.map_err(|_| {
        let why = format!("it took longer than {} s", SEED_DEADLINE.as_secs());
        Problem::unavailable(format!("can't write volume {}", disk.volume), why)
    })??;
    Ok(())
}

/// A problem of the cluster, and not of what the job has asked for.
fn to_be_tried_again(problem: Problem) -> Problem {
    match problem.kind {
        ProblemKind::NotFound | ProblemKind::Conflict => {
            Problem { kind: ProblemKind::Unavailable, ..problem }
        }
        _ => problem,
    }
}

/// The size of a job's root disk; `None`: its image's. The outputs are written there first, and a filesystem needs room for itself.
fn root_bytes(spec: &JobSpec, image_bytes: u64) -> Option<u64> {
    let for_outputs = spec.output_bytes.saturating_add(spec.output_bytes / 16);
    let with_room = spec.has_output_room.then(|| image_bytes.saturating_add(for_outputs));
    spec.root_bytes.or(with_room)
}

/// The addresses that a guest is told.
fn guest_network(network: &VmNetwork) -> Option<GuestNetwork> {
    match network {
        // In a bridge the guest asks for its address itself.
        VmNetwork::None | VmNetwork::Bridge(_) => None,
        VmNetwork::User => Some(USER_NETWORK),
        VmNetwork::Cluster(card) => Some(GuestNetwork {
            address: card.address,
            prefix_bits: card.subnet.prefix_bits(),
            gateway: card.subnet.gateway(),
            dns: card.subnet.gateway(),
            optional: false,
        }),
    }
}

const RUNNER: &str = "perigee-runner";

/// Where the runner, a static program, may be. It is installed with `perigee`; in a build of its sources, it is where
/// `scripts/golden-image` makes it.
pub fn runner_places() -> Vec<PathBuf> {
    let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.to_owned()));
    // Beside a debug build there may be one that is not static.
    let near =
        beside.iter().flat_map(|dir| [dir.join("../release").join(RUNNER), dir.join(RUNNER)]);
    near.chain([Path::new("/usr/lib/perigee").join(RUNNER)]).collect()
}

fn read_runner(cluster: &Cluster) -> Result<Vec<u8>, Problem> {
    let known = cluster.settings.runner.clone().into_iter();
    let places: Vec<PathBuf> = known.chain(runner_places()).collect();
    let found = places.iter().find_map(|path| std::fs::read(path).ok());
    found.ok_or_else(|| {
        let why = format!(
            "its image has no runner, and the controller's host does not have the program {RUNNER}"
        );
        let places: Vec<String> = places.iter().map(|path| path.display().to_string()).collect();
        Problem::unavailable("can't start a job", why)
            .next(format!("install it there, as one of: {}", places.join(", ")))
    })
}

fn seed(job: &JobId, spec: &JobSpec, at: &Placement, network: Option<GuestNetwork>) -> Seed {
    let data = at.disks.iter().filter(|disk| disk.role.is_data());
    let has = |role| at.disks.iter().any(|disk| disk.role == role);
    let (has_inputs, has_cloud_init) = (has(DiskRole::Inputs), has(DiskRole::CloudInit));
    let inputs = has_inputs.then(|| Mount {
        role: DiskRole::Inputs,
        path: INPUTS_MOUNT.to_owned(),
        read_only: false,
    });
    let volumes = data.zip(&spec.volumes).map(|(disk, volume)| Mount {
        role: disk.role,
        path: volume.mount.clone(),
        read_only: volume.access == Access::Read,
    });
    Seed {
        job: job.to_string(),
        command: spec.command.clone(),
        env: spec.env.clone(),
        // A volume may be mounted below the inputs.
        mounts: inputs.into_iter().chain(volumes).collect(),
        outputs: spec.outputs.clone(),
        output_bytes: spec.has_output_room.then_some(spec.output_bytes),
        timeout_s: spec.timeout_s,
        stop_grace_s: spec.stop_grace_s,
        // Where cloud-init starts the runner, it configures the card too.
        network: network.filter(|_| !has_cloud_init),
        gang: None,
        collect: false,
    }
}

async fn info(home: &HostLink, disk: &PlacedDisk) -> Result<VolumeInfo, Problem> {
    home.volume.get(&format!("/v1/volumes/{}", disk.volume)).await
}

/// A new epoch for a volume that others wrote before. Sessions with an older epoch can't write any more.
pub(crate) async fn take_over(home: &HostLink, disk: &PlacedDisk) -> Result<Epoch, Problem> {
    let from = info(home, disk).await?.epoch;
    let to = attach::issue_epoch(home, disk).await?;
    let target = format!("/v1/volumes/{}/epoch", disk.volume);
    let changed: VolumeInfo = home.volume.post(&target, &EpochChange { from, to }).await?;
    Ok(changed.epoch)
}

fn whole_blocks(bytes: u64) -> u64 {
    bytes.next_multiple_of(BLOCK_BYTES)
}
