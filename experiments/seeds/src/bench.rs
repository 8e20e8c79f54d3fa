//! The papers' cluster: four servers and a target at one site, two servers and a target at the other. And what all cells need: the data at both
//! targets, the network's pace, and the programs.
//!
//! Each target is at a site of the lab of its own, which only a LAN without delay separates from the servers: so no VM is placed there. All hosts'
//! network cards have the rate of the paper's Ethernet, dilated.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use perigee_lab::cards::{self, Cards};
use perigee_lab::cluster::Cluster;
use perigee_lab::wan::{self, Change, LinkSettings, Rate};
use perigee_lab::{Definition, Lab, LabId, SiteDef, Steps};
use perigee_model::job::{Host, JobSpec};
use perigee_model::{HostId, ImageName, SiteId, VolumeName, job_file};

use crate::cell::Cell;
use crate::dilation::Pace;
use crate::results::Side;
use crate::right::{self, Right};
use crate::series::Target;
use crate::tables;
use crate::target_memory::TargetMemory;

pub const SUPPORT: &str = "0.02";
/// The power test's steps, and the throughput test's streams.
pub const STEPS: &str = "refresh-1 14 refresh-2";
pub const STREAMS: [&str; 2] = ["6", "12"];
/// What PostgreSQL and the disk cache of its files may have in a guest. The files are larger.
pub const DATABASE_MEMORY_BYTES: u64 = 24 << 20;
/// How much the work `fixed` of `works.sh` computes.
pub const FIXED: &str = "200000";
/// The database's volume has this much, and eight times the size of the tables.
const TABLES_BYTES: u64 = 512 << 20;
const MINING_BYTES: u64 = 256 << 20;
/// Beside the guests' memory the paper's target had twice as much.
const TARGET_MEMORY: u64 = 2;
const SCRIPT: (&str, &str) = ("works.py", include_str!("works.py"));
const PROGRAMS: [&str; 4] = ["hpa.py", "pfp.py", "blast.py", "itemsets.py"];
/// The files of TPC-H, and the directories that the guests have them in.
const TPCH: &str = "tpch";
const TABLES: &str = "tables";
/// The sites with servers, and their targets' sites.
const SERVERS: [(&str, &[&str]); 2] =
    [("home", &["home1", "home2", "home3", "home4"]), ("cloud", &["cloud1", "cloud2"])];
const TARGETS: [(&str, &str); 2] = [("san", "store1"), ("vault", "store2")];

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Size {
    pub transactions: u32,
    pub sequences: u32,
    pub scale_factor: f64,
    /// Of each guest.
    pub memory_bytes: u64,
}

/// The volumes with the data at one target: what HPA, PFP and BLAST read, and the database.
pub struct Data {
    pub mining: VolumeName,
    pub tables: VolumeName,
}

pub struct Bench<'a> {
    pub lab: &'a Lab,
    pub cluster: Cluster,
    pub steps: &'a Steps,
    pub image: ImageName,
    pub size: Size,
    /// Of the VMs' site, and of the other one.
    pub targets: [HostId; 2],
    pub data: [Data; 2],
    pub inputs: String,
    pub transactions_bytes: u64,
    pub table_bytes: u64,
    pub database_bytes: u64,
    pub scratch: PathBuf,
    /// What the programs have to find.
    pub right: Right,
    memory: [Option<TargetMemory>; 2],
    number: u32,
}

pub fn volume(text: &str) -> Result<VolumeName> {
    Ok(VolumeName::new(text)?)
}

/// The lab. `image` is the image's directory.
///
/// # Errors
/// Never: the names are valid constants.
pub fn cluster(image: &Path) -> Result<Definition> {
    let site = |name: &str, hosts: &[&str]| -> Result<SiteDef> {
        let hosts: Result<Vec<HostId>, _> = hosts.iter().map(|host| HostId::new(*host)).collect();
        Ok(SiteDef { name: SiteId::new(name)?, hosts: hosts? })
    };
    let mut sites = Vec::new();
    for ((servers, hosts), (store, target)) in SERVERS.into_iter().zip(TARGETS) {
        sites.extend([site(servers, hosts)?, site(store, &[target])?]);
    }
    let mut definition = Definition::new(LabId::random(), sites, LinkSettings::of_rtt_us(0));
    definition.probe_kernel = Some(image.join("vmlinuz"));
    // The guests with an iSCSI initiator of their own reach the targets through it.
    definition.bridges.push(crate::iscsi::BRIDGE.to_owned());
    Ok(definition)
}

/// Whether a link is between the two sites of the paper, and not within one.
pub fn is_wan(sites: &[SiteId; 2]) -> bool {
    let place = |site: &SiteId| {
        let is = |name: &str| site.as_str() == name;
        (0..2).position(|index| is(SERVERS[index].0) || is(TARGETS[index].0))
    };
    place(&sites[0]) != place(&sites[1])
}

impl<'a> Bench<'a> {
    /// Makes the data at the far target, and copies it to the near one.
    ///
    /// # Errors
    /// A step fails; the error names it.
    pub async fn prepare(
        lab: &'a Lab,
        image: &Path,
        workloads: &Path,
        size: Size,
        steps: &'a Steps,
    ) -> Result<Self> {
        let cluster = Cluster::new(lab)?;
        let scratch = lab.dir().join("seeds");
        std::fs::create_dir_all(&scratch)?;
        let step = steps.begin("make the transactions, the sequences and the tables, and find the right results on this machine");
        let workloads = std::path::absolute(workloads)?;
        let mining = scratch.join("mining-near");
        let transactions_bytes =
            right::make_data(&workloads, size.transactions, size.sequences, &mining)?;
        let table_bytes = tables::write(size.scale_factor, &scratch.join(TABLES))?;
        let right = Right::find(&workloads, &mining, &scratch)?;
        let right = right.with_answers(&scratch.join(TABLES))?;
        step.done(&format!("{} itemsets", right.itemsets.lines().count()));

        let name = ImageName::new("debian")?;
        let step = steps.begin("import the image at all hosts");
        cluster.import_image(&name, &std::path::absolute(image.join("debian-pg.raw"))?).await?;
        step.done("");
        write_programs(&workloads, &scratch.join("programs"))?;
        let bundle = scratch.join("programs.tar");
        pack(&bundle, &[(&scratch.join("programs"), "")])?;
        let inputs = cluster.upload(&bundle).await?;
        let data = |side: &str| -> Result<Data> {
            let of = |what: &str| volume(&format!("{what}-{side}"));
            Ok(Data { mining: of("mining")?, tables: of("tables")? })
        };
        let targets = [HostId::new(TARGETS[0].1)?, HostId::new(TARGETS[1].1)?];
        let limit = TARGET_MEMORY * size.memory_bytes;
        let group = |host: &HostId| {
            TargetMemory::new(&format!("perigee-seeds-{}-{host}", lab.definition.id), limit)
        };
        let memory = targets.each_ref().map(group);
        let mut bench = Self {
            lab,
            cluster,
            steps,
            image: name,
            size,
            targets,
            data: [data("near")?, data("far")?],
            inputs,
            transactions_bytes,
            table_bytes,
            database_bytes: 0,
            scratch,
            right,
            memory,
            number: 0,
        };
        let bundle = bench.scratch.join("mining.tar");
        pack(&bundle, &[(&mining, "")])?;
        let inputs = bench.cluster.upload(&bundle).await?;
        bench.fill(inputs).await?;
        bench.load().await?;
        bench.copy_near().await?;
        Ok(bench)
    }

    /// Writes the programs' data onto a volume at the far target.
    async fn fill(&self, inputs: String) -> Result<()> {
        let volume = &self.data[1].mining;
        self.cluster.create_volume(volume, &self.targets[1], MINING_BYTES).await?;
        let text = format!(
            "name: fill\nimage: {}\nmemory: 256MiB\nplacement: {{host: {}, move: never}}\n\
             volumes:\n  - {{volume: {volume}, mount: /mine, access: write}}\ncommand: |\n  \
             set -e\n  cp /job/inputs/* /mine/\n  sync\n",
            self.image, self.targets[1]
        );
        let spec = job_file::parse(&text, "fill.yaml")?.spec;
        let mut step = self.steps.begin("write the data of the programs onto a volume");
        self.cluster.run(&JobSpec { inputs: Some(inputs), ..spec }, &mut step).await?;
        step.done("");
        Ok(())
    }

    /// Makes the database of the tables, on a volume at the far target.
    async fn load(&mut self) -> Result<()> {
        let volume = &self.data[1].tables;
        let bytes = TABLES_BYTES + 8 * self.table_bytes;
        self.cluster.create_volume(volume, &self.targets[1], bytes >> 20 << 20).await?;
        let bundle = self.scratch.join("load.tar");
        let programs = self.scratch.join("programs").join(TPCH);
        pack(&bundle, &[(&programs, TPCH), (&self.scratch.join(TABLES), TABLES)])?;
        let inputs = self.cluster.upload(&bundle).await?;
        let text = format!(
            "name: load\nimage: {}\nmemory: 512MiB\ntimeout: 1h\nplacement: {{host: {}, move: never}}\n\
             volumes:\n  - {{volume: {volume}, mount: /data, access: write}}\ncommand: |\n  \
             set -e\n  sh inputs/tpch/load.sh inputs/tables /data/pg\n  \
             du -sk /data/pg >$PERIGEE_OUTPUT/database-kib\n",
            self.image, self.targets[1]
        );
        let spec = job_file::parse(&text, "load.yaml")?.spec;
        let mut step = self.steps.begin("load the tables into PostgreSQL");
        let job = self.cluster.run(&JobSpec { inputs: Some(inputs), ..spec }, &mut step).await?;
        let outputs = self.cluster.output(&job.id).await?;
        let said = outputs.iter().find(|(name, _)| name == "database-kib");
        let kib = said.and_then(|(_, text)| text.split_whitespace().next()?.parse::<u64>().ok());
        self.database_bytes = kib.context("the database's size")? << 10;
        step.done(&format!("{} MiB", self.database_bytes >> 20));
        Ok(())
    }

    /// The same data at the near target: clones that are moved there.
    async fn copy_near(&self) -> Result<()> {
        let step = self.steps.begin(format!("copy the data to {}", self.targets[0]));
        let [near, far] = &self.data;
        for (copy, of) in [(&near.mining, &far.mining), (&near.tables, &far.tables)] {
            self.cluster.clone_volume(copy, of).await?;
            self.cluster.move_volume(copy, &self.targets[0]).await?;
            let moved = self.cluster.volume_moved(copy).await?;
            ensure!(moved.to == self.targets[0], "{copy} did not come: {moved:?}");
        }
        step.done("");
        Ok(())
    }

    /// What the VMs run with: `kvm` or `tcg`.
    pub async fn accelerator(&self) -> Result<String> {
        let hosts: Vec<Host> =
            self.lab.client(std::time::Duration::from_secs(30))?.get("/v1/hosts").await?;
        let server = self.servers(0)?.remove(0);
        let host = hosts.into_iter().find(|host| host.id == server).context("no host")?;
        Ok(host.accelerator.map_or_else(String::new, |it| format!("{it:?}").to_lowercase()))
    }

    /// The servers of a site of the paper's: 0, where the VMs start, or 1.
    pub fn servers(&self, site: usize) -> Result<Vec<HostId>> {
        SERVERS[site].1.iter().map(|host| Ok(HostId::new(*host)?)).collect()
    }

    /// The name of the site with the servers where the VMs start.
    pub fn home(&self) -> &'static str {
        SERVERS[0].0
    }

    /// The network of a cell: the round trip between the sites, and the rate of each host's card.
    pub async fn set_network(&self, cell: Cell, pace: Pace) -> Result<()> {
        for link in &self.lab.definition.links {
            let rtt_ms = if is_wan(&link.sites) { cell.rtt_ms } else { 0 };
            wan::set(self.lab, &link.sites[0], &link.sites[1], pace.link(rtt_ms)?).await?;
        }
        self.set_cards(Rate(Some(pace.card_bits_per_s())), Cards::One).await
    }

    /// As fast as the machine, for preparations.
    pub async fn free_network(&self) -> Result<()> {
        let change = Change { rtt_us: Some(0), rate: Some(Rate::UNLIMITED), ..Change::default() };
        wan::set_all(self.lab, change).await?;
        self.set_cards(Rate::UNLIMITED, Cards::One).await
    }

    pub async fn set_cards(&self, rate: Rate, cards: Cards) -> Result<()> {
        for (_, host) in self.lab.definition.hosts() {
            cards::set(self.lab, host, rate, cards).await?;
        }
        Ok(())
    }

    /// The volume servers of both targets, in their groups, which have forgotten what they had read.
    pub fn cold_targets(&self) -> Result<[Target; 2]> {
        for host in &self.targets {
            crate::domain0::forget(&self.lab.dir().join("hosts").join(host.as_str()).join("pool"))?;
        }
        let of = |side: Side| -> Result<Target> {
            let host = &self.targets[side.index()];
            let pid = u32::try_from(self.lab.host_pid(host, "volume")?)?;
            self.target(side, vec![pid])
        };
        Ok([of(Side::Near)?, of(Side::Far)?])
    }

    /// A target with these processes, which are in its group from now on.
    pub fn target(&self, side: Side, pids: Vec<u32>) -> Result<Target> {
        let group = self.memory[side.index()].as_ref();
        if let Some(group) = group {
            for pid in &pids {
                group.add(*pid)?;
            }
        }
        Ok(Target { pids, memory: group.map(TargetMemory::gauge) })
    }

    /// Of each target, if both have a limit.
    pub fn target_memory_bytes(&self) -> Option<u64> {
        let both = self.memory.iter().all(Option::is_some);
        both.then_some(TARGET_MEMORY * self.size.memory_bytes)
    }

    /// A clone of a volume with a name of its own, so that no cache has anything of it.
    pub async fn fresh(&mut self, of: &VolumeName) -> Result<VolumeName> {
        self.number += 1;
        let name = volume(&format!("{of}-{}", self.number))?;
        self.cluster.clone_volume(&name, of).await?;
        Ok(name)
    }

    /// A name that no job of this lab has.
    pub fn unique(&mut self, what: &str) -> String {
        self.number += 1;
        format!("{what}-{}", self.number)
    }
}

/// The programs, as the guests have them.
pub fn write_programs(workloads: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to.join(TPCH))?;
    let (name, text) = SCRIPT;
    std::fs::write(to.join(name), text)?;
    for program in PROGRAMS {
        std::fs::copy(workloads.join(program), to.join(program))?;
    }
    for file in std::fs::read_dir(workloads.join(TPCH))? {
        let file = file?;
        if file.file_type()?.is_file() {
            std::fs::copy(file.path(), to.join(TPCH).join(file.file_name()))?;
        }
    }
    Ok(())
}

/// Packs the files of directories into a tar, each below a name there.
fn pack(path: &Path, directories: &[(&Path, &str)]) -> Result<()> {
    let mut tar = tar::Builder::new(std::fs::File::create(path)?);
    for (directory, name) in directories {
        add(&mut tar, directory, Path::new(name))?;
    }
    tar.into_inner()?.sync_data()?;
    Ok(())
}

fn add(tar: &mut tar::Builder<std::fs::File>, directory: &Path, to: &Path) -> Result<()> {
    for file in std::fs::read_dir(directory)? {
        let file = file?;
        let to = to.join(file.file_name());
        match file.file_type()?.is_dir() {
            true => add(tar, &file.path(), &to)?,
            false => tar.append_path_with_name(file.path(), to)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn six_servers_and_two_targets_are_at_two_sites_with_the_wan_between() {
        let definition = cluster(Path::new("/")).expect("a lab");
        definition.check().expect("it can be built");
        assert_eq!(definition.hosts().count(), 8);
        assert_eq!(definition.bridges, ["br0"]);
        let all: Vec<(String, bool)> =
            definition.links.iter().map(|link| (link.to_string(), is_wan(&link.sites))).collect();
        let of = |wan: bool| -> Vec<&str> {
            all.iter().filter(|(_, is)| *is == wan).map(|(name, _)| name.as_str()).collect()
        };
        assert_eq!(of(false), ["home-san", "cloud-vault"]);
        assert_eq!(of(true), ["home-cloud", "home-vault", "san-cloud", "san-vault"]);
    }
}
