//! The guest as a job of Perigee in a network of its tenant, with published ports.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use perigee_http::Client;
use perigee_lab::Lab;
use perigee_lab::bare::{Machine, wait_for_console};
use perigee_lab::cluster::Cluster;
use perigee_model::job::{DEFAULT_OWNER, JobSpec, MigrationState, MoveVm, Restart, Start};
use perigee_model::network::{ClusterNetwork, NewNetwork, Protocol, Publish};
use perigee_model::vm::NetworkKind;
use perigee_model::{HostId, ImageName, JobId, NetworkName, VmId};

use crate::dir_of;
use crate::ground::{Ground, PUBLISHED_HTTP, PUBLISHED_SSH, PUBLISHED_TOMCAT, SUBNET};
use crate::guest::{self, HTTP_PORT, MEMORY_BYTES, READY, SSH_PORT, TOMCAT_PORT};
use crate::results::Sending;

const BOOT_DEADLINE: Duration = Duration::from_secs(900);

pub struct Perigee<'a> {
    lab: &'a Lab,
    cluster: Cluster,
    job: JobId,
    vm: VmId,
}

impl<'a> Perigee<'a> {
    pub async fn boot(lab: &'a Lab, ground: &Ground, image: &Path, at: &HostId) -> Result<Self> {
        let cluster = Cluster::new(lab)?;
        let name = ImageName::new("debian")?;
        cluster.import_image(&name, image).await?;
        let network = NetworkName::new("blue")?;
        let subnet = SUBNET.parse().map_err(anyhow::Error::new)?;
        let new = NewNetwork { name: network.clone(), subnet, nat: true };
        let client = lab.client(Duration::from_secs(30))?;
        client.post::<ClusterNetwork>("/v1/networks", &new).await?;
        let key = std::fs::read_to_string(ground.key.with_extension("pub"))?;
        let publish = |outside, inside| Publish { outside, inside, protocol: Protocol::Tcp };
        let spec = JobSpec {
            name: "web".to_owned(),
            image: name,
            command: guest::command(key.trim()),
            env: Default::default(),
            cpus: 1,
            memory_bytes: MEMORY_BYTES,
            cpus_max: None,
            memory_max_bytes: None,
            root_bytes: None,
            output_bytes: 1 << 20,
            volumes: Vec::new(),
            outputs: Vec::new(),
            outputs_to: None,
            keep_outputs_s: None,
            publish: vec![
                publish(PUBLISHED_HTTP, HTTP_PORT),
                publish(PUBLISHED_SSH, SSH_PORT),
                publish(PUBLISHED_TOMCAT, TOMCAT_PORT),
            ],
            start: Start::Host(at.clone()),
            may_migrate: false,
            writes: perigee_model::LeaveSite::Never,
            ranks: perigee_model::LeaveSite::Never,
            timeout_s: None,
            has_output_room: false,
            stop_grace_s: perigee_model::job::STOP_GRACE_S_DEFAULT,
            oom_kill: Default::default(),
            inputs: None,
            owner: DEFAULT_OWNER.to_owned(),
            priority: 0,
            restart: Restart::Never,
            network: NetworkKind::Cluster(network),
            count: 1,
            mpi: false,
            firmware: Default::default(),
            tpm: false,
            rules: Default::default(),
            money: Default::default(),
        };
        let job = cluster.submit(&spec).await?;
        let vm = VmId::new(job.id.as_str())?;
        let console = dir_of(lab, at).join("agent/vms").join(vm.as_str()).join("run/console.log");
        wait_for_console(&console, READY, BOOT_DEADLINE).await?;
        Ok(Self { lab, cluster, job: job.id, vm })
    }

    pub fn vm(&self) -> &VmId {
        &self.vm
    }

    /// QEMU's command line.
    pub fn machine(&self, host: &HostId) -> Result<Machine> {
        Ok(Machine::of(self.lab, host, &self.vm)?.0)
    }

    /// The content of its seed disk.
    pub async fn seed(&self, host: &HostId) -> Result<Vec<u8>> {
        let socket = dir_of(self.lab, host).join("volume-control.sock");
        let client = Client::new(&format!("unix:{}", socket.display()), Duration::from_secs(30))?;
        Ok(client.get_bytes(&format!("/v1/volumes/{}-seed/data", self.vm)).await?.to_vec())
    }

    pub async fn move_to(&self, to: &HostId) -> Result<Sending> {
        let wish = MoveVm { host: to.clone(), volumes: Default::default(), confirmed: false };
        let asked = self.cluster.ask_to_move(&self.vm, &wish).await?;
        let moved = self.cluster.moved(&asked).await?;
        ensure!(moved.state == MigrationState::Completed, "the move ended so: {}", moved.error);
        let prepare_ms = moved.phases.prepare.map_or(0, |prepare| prepare.total_ms());
        Ok(Sending {
            pause_ms: moved.downtime_ms,
            copy_ms: moved.total_ms.saturating_sub(prepare_ms),
            sent_bytes: moved.bytes,
        })
    }

    pub async fn end(self) -> Result<()> {
        Ok(self.cluster.cancel(&self.job).await?)
    }
}
