//! What the story is made of: two small hosts of one's own, machines for rent, three volumes, and the jobs that read them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use perigee_http::Client;
use perigee_http::certificate::hex;
use perigee_model::job::{ClusterVolume, JobSpec, NewVolume};
use perigee_model::money::Money;
use perigee_model::volume::VolumeSource;
use perigee_model::{HostId, ImageName, LeaveSite, Problem, SiteId, VolumeName, job_file};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::command::run_within;
use crate::definition::{Definition, LabId, SiteDef};
use crate::process::own_cpus;
use crate::random::Random;
use crate::rent::{Kind, Rent};
use crate::up::Lab;
use crate::wan::LinkSettings;

const WORK: &str = include_str!("work.sh");
/// A job takes all vCPUs of a host with one CPU.
pub const JOB_CPUS: u32 = 4;
/// The parts of each volume: as many as the longest job reads.
const PARTS: u32 = 12;
const PART_BYTES: usize = 2 << 20;
const VOLUME_BYTES: u64 = 64 << 20;
const RTT_US: u64 = 16_000;
/// For one volume.
const FILL_MAX: Duration = Duration::from_secs(120);
const CENT: u64 = 10_000;

/// A kind of job. Jobs of a kind share their history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    /// Its data are at home, and a replica is at the site where hosts are rented.
    Report,
    /// Its data are at home only: elsewhere it reads them remotely.
    Search,
    /// Its data may not leave home.
    Audit,
}

impl Task {
    /// In the order in which they run for the first time.
    pub const ALL: [Self; 3] = [Self::Search, Self::Audit, Self::Report];

    /// The job's name.
    pub fn word(self) -> &'static str {
        match self {
            Self::Report => "report",
            Self::Search => "search",
            Self::Audit => "audit",
        }
    }

    /// What is said of the job's data.
    pub fn data(self) -> &'static str {
        match self {
            Self::Report => "its data have a replica at the site cloud",
            Self::Search => "its data are only at home",
            Self::Audit => "its data may not leave home",
        }
    }

    fn volume(self) -> &'static str {
        match self {
            Self::Report => "tables",
            Self::Search => "notes",
            Self::Audit => "patients",
        }
    }

    /// A job works on one part after the other.
    fn parts(self) -> u32 {
        match self {
            Self::Report => 9,
            Self::Search => PARTS,
            Self::Audit => 4,
        }
    }

    /// The job, which works for so long on each part after the part is read. It costs so much for each hour until its end.
    ///
    /// # Errors
    /// Never: the job file is part of this program, and a test reads it.
    pub fn job(self, part_s: u32, waiting_per_hour: Money) -> Result<JobSpec, Problem> {
        let parts = self.parts().to_string();
        let script = WORK.replace("@PARTS@", &parts).replace("@PART_S@", &part_s.to_string());
        let script: String = script.lines().map(|line| format!("  {line}\n")).collect();
        let text = format!(
            "name: {}\nimage: debian\ncpus: {JOB_CPUS}\nmemory: 256MiB\noutput: 16MiB\nnetwork: none\n\
             volumes: [{{volume: {}, access: read}}]\nplacement: {{move: never}}\ntimeout: 15m\n\
             waiting-costs: {}/h\ncommand: |\n{script}",
            self.word(),
            self.volume(),
            waiting_per_hour.exact()
        );
        Ok(job_file::parse(&text, &format!("{}.yaml", self.word()))?.spec)
    }
}

/// The jobs of the queue, in the order of their submission: half of them reports, two audits, and searches.
pub fn queue(jobs: u32) -> Vec<Task> {
    let task = |number: u32| match number {
        1 | 2 => Task::Audit,
        number if number % 2 == 1 => Task::Search,
        _ => Task::Report,
    };
    (1..=jobs).map(task).collect()
}

/// What may be paid in all.
pub const BUDGET: Money = Money::from_micros(300 * CENT);
/// What an hour of waiting costs each job.
pub const WAITING_PER_HOUR: Money = Money::from_micros(100 * CENT);
/// How many hosts may be rented at once.
pub const RENTED_MOST: u32 = 3;

/// Where the controller and most of the data are.
///
/// # Errors
/// Never: the names are part of this program.
pub fn home() -> Result<SiteId, Problem> {
    SiteId::new("home").map_err(|why| Problem::internal("can't name a site", why))
}

/// Where hosts are for rent.
///
/// # Errors
/// Never: the names are part of this program.
pub fn cloud() -> Result<SiteId, Problem> {
    SiteId::new("cloud").map_err(|why| Problem::internal("can't name a site", why))
}

/// One host of one CPU at each of two sites, and machines for rent at the second one.
///
/// # Errors
/// `Unavailable` where this process may use no CPU.
pub fn two_small_hosts(id: LabId) -> Result<Definition, Problem> {
    let cpus = own_cpus();
    let (Some(first), Some(last)) = (cpus.first(), cpus.last()) else {
        return Err(Problem::unavailable("can't make the lab", "this process may use no CPU"));
    };
    let name =
        |text: &str| HostId::new(text).map_err(|why| Problem::internal("can't name a host", why));
    let hosts = [(name("home1")?, *first), (name("cloud1")?, *last)];
    let sites = hosts.each_ref().map(|(host, _)| vec![host.clone()]);
    let [at_home, at_cloud] = sites;
    let sites = vec![
        SiteDef { name: home()?, hosts: at_home },
        SiteDef { name: cloud()?, hosts: at_cloud },
    ];
    let mut definition = Definition::new(id, sites, LinkSettings::of_rtt_us(RTT_US));
    definition.cpus = hosts.into_iter().map(|(host, cpu)| (host, vec![cpu])).collect();
    let kind = |name: &str, count: usize, cents: u64| Kind {
        name: name.to_owned(),
        cpus: u32::try_from(count.min(cpus.len())).unwrap_or(1),
        memory_bytes: (count as u64) << 31,
        kvm: Path::new("/dev/kvm").exists(),
        price: Money::from_micros(cents * CENT),
        spot_price: None,
    };
    definition.rent = Rent {
        boot_s: 3,
        zones: vec![cloud()?],
        budget: BUDGET,
        kinds: vec![kind("lab.small", 1, 120), kind("lab.large", 2, 200)],
        ..Rent::default()
    };
    Ok(definition)
}

/// The image of all jobs.
///
/// # Errors
/// Never: the name is part of this program.
pub fn image() -> Result<ImageName, Problem> {
    ImageName::new("debian").map_err(|why| Problem::internal("can't name the image", why))
}

/// A volume's name.
///
/// # Errors
/// Never: the name is part of this program.
pub fn volume(of: Task) -> Result<VolumeName, Problem> {
    VolumeName::new(of.volume()).map_err(|why| Problem::internal("can't name a volume", why))
}

/// Makes the volume that the jobs of a kind read, at the first host.
///
/// # Errors
/// The step that failed.
pub async fn make_volume(lab: &Lab, client: &Client, of: Task) -> Result<(), Problem> {
    let (_, host) = lab.definition.hosts().next().ok_or_else(|| {
        Problem::internal(format!("can't make volume {}", of.volume()), "the lab has no host")
    })?;
    let leave_site = if of == Task::Audit { LeaveSite::Never } else { LeaveSite::default() };
    let new = NewVolume {
        name: volume(of)?,
        host: Some(host.clone()),
        size_bytes: Some(VOLUME_BYTES),
        source: VolumeSource::Empty,
        leave_site,
    };
    let _: ClusterVolume = client.post("/v1/volumes", &new).await?;
    let file = filesystem(lab.dir(), of).await?;
    let socket = lab.lab_dir().volume_socket(host);
    let export = format!("nbd+unix:///{}?socket={}", of.volume(), socket.display());
    let args = ["convert", "-n", "-f", "raw", "-O", "raw", &file.to_string_lossy(), &export];
    run_within(FILL_MAX, "qemu-img", &args).await?;
    std::fs::remove_file(&file)
        .map_err(|e| Problem::internal(format!("can't remove {}", file.display()), e))
}

/// A file with ext4, and in it the parts with their checksums.
async fn filesystem(dir: &Path, of: Task) -> Result<PathBuf, Problem> {
    let tree = dir.join(format!("{}-files", of.volume()));
    let file = dir.join(format!("{}.raw", of.volume()));
    let write = || -> std::io::Result<()> {
        let mut random = Random(u64::from(of.parts()));
        std::fs::create_dir(&tree)?;
        for part in 1..=PARTS {
            let name = format!("part{part}");
            let bytes: Vec<u8> =
                (0..PART_BYTES / 8).flat_map(|_| random.next().to_le_bytes()).collect();
            std::fs::write(tree.join(format!("{name}.sum")), sum_line(&bytes, &name))?;
            std::fs::write(tree.join(name), bytes)?;
        }
        std::fs::File::create(&file)?.set_len(VOLUME_BYTES)
    };
    write().map_err(|e| Problem::internal(format!("can't write {}", tree.display()), e))?;
    let (from, to) = (tree.to_string_lossy(), file.to_string_lossy());
    run_within(FILL_MAX, "mke2fs", &["-q", "-t", "ext4", "-d", &from, &to]).await?;
    std::fs::remove_dir_all(&tree)
        .map_err(|e| Problem::internal(format!("can't remove {}", tree.display()), e))?;
    Ok(file)
}

fn sum_line(bytes: &[u8], name: &str) -> String {
    format!("{}  {name}\n", hex(&Sha256::digest(bytes)))
}

#[cfg(test)]
mod tests {
    use perigee_model::job::Access;

    use super::*;

    #[test]
    fn each_job_reads_the_volume_of_its_kind_and_says_what_waiting_costs() {
        for task in Task::ALL {
            let spec = task.job(5, WAITING_PER_HOUR).expect("a job");
            assert_eq!(spec.money.waiting_costs_per_hour, Some(WAITING_PER_HOUR));
            assert_eq!(spec.volumes.len(), 1);
            assert_eq!(spec.volumes[0].volume, volume(task).expect("a name"));
            assert_eq!((spec.volumes[0].access, spec.cpus), (Access::Read, JOB_CPUS));
            assert!(task.parts() <= PARTS);
        }
    }

    #[test]
    fn half_of_the_queue_are_reports_and_two_are_audits() {
        let all = queue(24);
        let count = |task| all.iter().filter(|one| **one == task).count();
        assert_eq!([Task::Report, Task::Search, Task::Audit].map(count), [11, 11, 2]);
    }

    #[test]
    fn hosts_are_for_rent_at_one_site_only() {
        let lab = two_small_hosts(LabId::random()).expect("a lab");
        lab.check().expect("it can be made");
        let offers = lab.rent.offers(&lab, 0);
        assert!(offers.len() == 2 && offers.iter().all(|offer| offer.zone == "cloud"));
    }
}
