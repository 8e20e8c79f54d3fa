//! The demo's jobs and the bundles of their input files.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use perigee_model::job::{Access, DEFAULT_OWNER, JobSpec, JobVolume, Restart, Start};
use perigee_model::{HostId, ImageName, Problem, SiteId, VolumeName, job_file};

use super::outcome::RunName;
use crate::tpch::{self, Query};

const LOAD_SCRIPT: &str = include_str!("load.sh");
const QUERY_SCRIPT: &str = include_str!("query.sh");
const ARCHIVE_SCRIPT: &str = include_str!("archive.sh");
const QUERY_JOB: &str = include_str!("tpch.yaml");
const POSTGRES_CONF: &str = include_str!("postgresql.conf");

/// As the job file says it.
pub(super) const QUERY_COMMAND: &str = "sh inputs/query.sh";

const LOAD_MEMORY_BYTES: u64 = 512 << 20;
pub(super) const OUTPUT_BYTES: u64 = 64 << 20;
/// What [`ARCHIVE_SCRIPT`] writes.
pub(super) const ARCHIVE_BYTES: u64 = 512 << 20;
const TIMEOUT_S: u64 = 900;

/// The names that the jobs share.
#[derive(Debug, Clone)]
pub struct Stage {
    pub image: ImageName,
    pub volume: VolumeName,
    /// The site where all runs but `beside` start.
    pub far: SiteId,
    /// The home of the data volume.
    pub near: HostId,
}

/// Packs the inputs of the loading job: script, schema and tables.
///
/// # Errors
/// `Internal` when a file cannot be read or written.
pub fn load_bundle(tables: &Path, target: &Path) -> Result<(), Problem> {
    let names = tpch::TABLES.map(|table| format!("{}.sql", table.name));
    let mut texts = vec![
        ("load.sh", LOAD_SCRIPT),
        ("postgresql.conf", POSTGRES_CONF),
        ("loaded.sql", tpch::LOADED_SQL),
    ];
    texts.extend(names.iter().zip(&tpch::TABLES).map(|(name, t)| (name.as_str(), t.create_sql)));
    let files = tpch::TABLES.map(|table| tpch::table_path(tables, table.name));
    pack(target, &texts, &files.each_ref().map(std::path::PathBuf::as_path))
}

/// Packs the inputs of the query job: script and queries.
///
/// # Errors
/// `Internal` when the bundle cannot be written.
pub fn query_bundle(target: &Path, queries: &[Query]) -> Result<(), Problem> {
    let names: Vec<&str> = queries.iter().map(|q| q.name).collect();
    let names = names.join(" ");
    let files: Vec<String> = queries.iter().map(|q| format!("{}.sql", q.name)).collect();
    let mut texts = vec![("query.sh", QUERY_SCRIPT), ("queries", names.as_str())];
    texts.extend(files.iter().zip(queries).map(|(file, q)| (file.as_str(), q.postgres)));
    pack(target, &texts, &[])
}

/// The name of the volume with the tables and the archive, which is too large to copy.
///
/// # Errors
/// Never: the name is part of this program.
pub(super) fn large() -> Result<VolumeName, Problem> {
    VolumeName::new("tpch-large").map_err(|e| Problem::internal("can't name the large volume", e))
}

fn mounted(volume: VolumeName, mount: &str, access: Access) -> JobVolume {
    JobVolume { volume, mount: mount.to_owned(), access, ranks: Vec::new() }
}

fn pack(target: &Path, texts: &[(&str, &str)], files: &[&Path]) -> Result<(), Problem> {
    let write = || -> std::io::Result<()> {
        let mut tar = tar::Builder::new(File::create(target)?);
        for (name, text) in texts {
            let mut header = tar::Header::new_gnu();
            header.set_mode(0o644);
            header.set_size(text.len() as u64);
            tar.append_data(&mut header, name, text.as_bytes())?;
        }
        for file in files {
            tar.append_path_with_name(file, file.file_name().unwrap_or_default())?;
        }
        tar.into_inner()?.sync_data()
    };
    write().map_err(|e| Problem::internal(format!("can't write {}", target.display()), e))
}

impl Stage {
    /// Loads the tables, beside the data volume.
    pub fn load_job(&self, bundle: String) -> JobSpec {
        JobSpec {
            name: "tpch-load".to_owned(),
            image: self.image.clone(),
            command: vec!["sh".to_owned(), "inputs/load.sh".to_owned()],
            env: BTreeMap::new(),
            cpus: 1,
            memory_bytes: LOAD_MEMORY_BYTES,
            cpus_max: None,
            memory_max_bytes: None,
            root_bytes: None,
            output_bytes: OUTPUT_BYTES,
            volumes: vec![mounted(self.volume.clone(), "/data", Access::Write)],
            outputs: vec!["/output".to_owned()],
            outputs_to: None,
            keep_outputs_s: None,
            publish: Vec::new(),
            start: Start::Host(self.near.clone()),
            may_migrate: false,
            writes: perigee_model::LeaveSite::Never,
            ranks: perigee_model::LeaveSite::Never,
            timeout_s: Some(TIMEOUT_S),
            has_output_room: false,
            stop_grace_s: perigee_model::job::STOP_GRACE_S_DEFAULT,
            oom_kill: Default::default(),
            inputs: Some(bundle),
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

    /// Writes the archive beside the tables of the large volume.
    ///
    /// # Errors
    /// As [`large`].
    pub(super) fn archive_job(&self) -> Result<JobSpec, Problem> {
        let command = ["sh", "-c", ARCHIVE_SCRIPT].map(str::to_owned).to_vec();
        let volumes = vec![mounted(large()?, "/data", Access::Write)];
        let name = "archive".to_owned();
        let job = self.load_job(String::new());
        Ok(JobSpec { name, command, volumes, inputs: None, ..job })
    }

    /// Runs the queries. The runs differ only in where they start, whether they may move, and in their volume.
    ///
    /// # Errors
    /// Never: the job file is part of this program, and a test reads it.
    pub fn query_job(&self, run: RunName, bundle: String) -> Result<JobSpec, Problem> {
        let (start, may_migrate) = match run {
            RunName::Remote => (Start::Site(self.far.clone()), false),
            RunName::Beside => (Start::Host(self.near.clone()), false),
            RunName::Planned | RunName::Large | RunName::Replica => {
                (Start::Site(self.far.clone()), true)
            }
        };
        let mut spec = job_file::parse(QUERY_JOB, "tpch.yaml")?.spec;
        if run == RunName::Large {
            spec.volumes = vec![mounted(large()?, "/data", Access::Clone)];
        }
        Ok(JobSpec { start, may_migrate, inputs: Some(bundle), ..spec })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_query_bundle_holds_script_list_and_a_file_for_each_query() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("query.tar");
        query_bundle(&path, &tpch::QUERIES).expect("a bundle");
        let mut archive = tar::Archive::new(File::open(path).expect("the bundle"));
        let names: Vec<String> = archive
            .entries()
            .expect("entries")
            .map(|e| e.expect("an entry").path().expect("a path").display().to_string())
            .collect();
        for wanted in ["query.sh", "queries", "Q6.sql", "Q17.sql"] {
            assert!(names.iter().any(|n| n == wanted), "{wanted} is not in {names:?}");
        }
    }

    #[test]
    fn the_job_file_is_one_and_names_the_stages_things() {
        let name = |text: &str| VolumeName::new(text).expect("a name");
        let stage = Stage {
            image: ImageName::new("debian-pg").expect("a name"),
            volume: name("tpch"),
            far: SiteId::new("home").expect("a name"),
            near: HostId::new("cloud1").expect("a name"),
        };
        let planned = stage.query_job(RunName::Planned, "bundle".to_owned()).expect("a job");
        assert!(planned.may_migrate);
        assert_eq!(planned.image, stage.image);
        assert_eq!(planned.volumes[0].volume, stage.volume);
        let beside = stage.query_job(RunName::Beside, "bundle".to_owned()).expect("a job");
        assert_eq!(beside.start, Start::Host(stage.near.clone()));
        assert!(!beside.may_migrate);
        assert_eq!(beside.command.join(" "), QUERY_COMMAND);
        let large = stage.query_job(RunName::Large, "bundle".to_owned()).expect("a job");
        assert_eq!(large.volumes[0].volume, super::large().expect("a name"));
    }
}
