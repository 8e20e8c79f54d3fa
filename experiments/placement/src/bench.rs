//! What all parts of the experiment share: the lab, the data at its far host, and what the WAN carries.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, ensure};
use perigee_lab::cluster::Cluster;
use perigee_lab::demo::{self, Stage, Tables, query_bundle};
use perigee_lab::wan::{self, Change};
use perigee_lab::{Lab, Step, Steps, tpch};
use perigee_model::job::{Access, DEFAULT_OWNER, JobSpec, JobVolume, Restart, Start};
use perigee_model::{HostId, VolumeName};

use crate::case::Work;

pub const MEMORY_BYTES: u64 = 256 << 20;
pub const OUTPUT_BYTES: u64 = 16 << 20;
/// Where the data volume is mounted.
pub const MOUNT: &str = "/data";
const SCAN_VOLUME_BYTES: u64 = 1 << 30;

/// How much data the job reads.
pub struct Data {
    /// Of the tables.
    pub scale_factor: f64,
    pub scan_bytes: u64,
}

pub struct Bench<'a> {
    pub lab: &'a Lab,
    pub cluster: Cluster,
    pub steps: &'a Steps,
    /// The host where the jobs start, and the home of their data beyond the WAN.
    pub near: HostId,
    pub far: HostId,
    pub stage: Stage,
    /// The queries' files, also as the controller knows them.
    pub bundle: PathBuf,
    pub bundle_id: String,
    pub table_bytes: u64,
    number: AtomicU32,
}

impl<'a> Bench<'a> {
    /// Imports the image. Unless only moves are measured, it also loads the tables and makes the file for the
    /// scans, both at the far host.
    pub async fn prepare(
        lab: &'a Lab,
        image: &Path,
        data: Option<Data>,
        steps: &'a Steps,
    ) -> Result<Self> {
        let cluster = Cluster::new(lab)?;
        let stage = demo::stage(&lab.definition)?;
        let near = lab.definition.hosts().next().context("a lab has hosts")?.1.clone();
        let far = stage.near.clone();
        let scratch = lab.dir().join("placement");
        std::fs::create_dir_all(&scratch)?;
        let bundle = scratch.join("query.tar");
        query_bundle(&bundle, &tpch::QUERIES)?;
        let bundle_id = cluster.upload(&bundle).await?;
        let number = AtomicU32::new(0);
        let mut bench = Self {
            lab,
            cluster,
            steps,
            near,
            far,
            stage,
            bundle,
            bundle_id,
            table_bytes: 0,
            number,
        };
        let Some(Data { scale_factor, scan_bytes }) = data else {
            bench.cluster.import_image(&bench.stage.image, image).await?;
            return Ok(bench);
        };
        let tables = Tables { image, scale_factor };
        bench.table_bytes =
            demo::prepare(&bench.cluster, &bench.stage, &scratch, tables, steps).await?;
        let volume = bench.data(Work::Scan);
        bench.cluster.create_volume(&volume, &bench.far, SCAN_VOLUME_BYTES).await?;
        let load = demo::load(&bench.cluster, &bench.stage, &scratch, steps);
        let write = bench.write_scan(scan_bytes);
        tokio::try_join!(async { Ok(load.await?) }, write)?;
        Ok(bench)
    }

    async fn write_scan(&self, scan_bytes: u64) -> Result<()> {
        let mut step = self.steps.begin("write the file for the scans");
        let mib = scan_bytes >> 20;
        let command = format!("dd if=/dev/urandom of=/data/scan bs=1M count={mib} && sync");
        let command = ["sh", "-c", &command].map(str::to_owned).to_vec();
        let spec = self.job("scan-write", command, &self.far, Some(self.data(Work::Scan)));
        self.cluster.run(&spec, &mut step).await?;
        step.done("");
        Ok(())
    }

    /// The volume with the data, of which each run gets a clone.
    pub fn data(&self, work: Work) -> VolumeName {
        match work {
            Work::Tpch => self.stage.volume.clone(),
            Work::Scan => VolumeName::new("scan").expect("a constant name"),
        }
    }

    /// A name that no other run has.
    pub fn unique(&self, what: &str) -> String {
        format!("{what}-{}", self.number.fetch_add(1, Ordering::Relaxed))
    }

    pub fn job(
        &self,
        name: &str,
        command: Vec<String>,
        at: &HostId,
        volume: Option<VolumeName>,
    ) -> JobSpec {
        let mount = |volume| JobVolume {
            volume,
            mount: MOUNT.to_owned(),
            access: Access::Write,
            ranks: Vec::new(),
        };
        JobSpec {
            name: name.to_owned(),
            image: self.stage.image.clone(),
            command,
            env: Default::default(),
            cpus: 1,
            memory_bytes: MEMORY_BYTES,
            cpus_max: None,
            memory_max_bytes: None,
            root_bytes: None,
            output_bytes: OUTPUT_BYTES,
            volumes: volume.into_iter().map(mount).collect(),
            outputs: vec!["/output".to_owned()],
            outputs_to: None,
            keep_outputs_s: None,
            publish: Vec::new(),
            start: Start::Host(at.clone()),
            may_migrate: false,
            writes: perigee_model::LeaveSite::Never,
            ranks: perigee_model::LeaveSite::Never,
            timeout_s: Some(900),
            has_output_room: false,
            stop_grace_s: perigee_model::job::STOP_GRACE_S_DEFAULT,
            oom_kill: Default::default(),
            inputs: None,
            owner: DEFAULT_OWNER.to_owned(),
            priority: 0,
            restart: Restart::Never,
            network: Default::default(),
            count: 1,
            mpi: false,
            firmware: Default::default(),
            tpm: false,
            rules: Default::default(),
            money: Default::default(),
        }
    }

    /// Changes the WAN from now on.
    pub async fn set_wan(&self, change: Change) -> Result<()> {
        let sites = &self.lab.definition.sites;
        ensure!(sites.len() == 2, "the experiment's lab has two sites");
        wan::set(self.lab, &sites[0].name, &sites[1].name, change).await?;
        Ok(())
    }

    /// What the WAN has carried in both directions; `None` where nothing counts it.
    pub fn wan_bytes(&self) -> Option<u64> {
        let links = wan::counts(self.lab).ok()?;
        let bytes = links.iter().flat_map(|link| &link.counts).map(|c| c.carried_bytes).sum();
        (!links.is_empty()).then_some(bytes)
    }

    /// What the WAN has carried since an earlier count.
    pub fn wan_bytes_since(&self, before: Option<u64>) -> Option<u64> {
        Some(self.wan_bytes()?.saturating_sub(before?))
    }

    pub fn step(&self, what: impl Into<String>) -> Step {
        self.steps.begin(what)
    }
}
