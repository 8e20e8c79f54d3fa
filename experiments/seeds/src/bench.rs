//! The lab with the data at both hosts, and the job that is measured.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use perigee_http::Client;
use perigee_lab::cluster::Cluster;
use perigee_lab::demo::{self, Stage};
use perigee_lab::measuring::load_1min;
use perigee_lab::wan::{self, Change};
use perigee_lab::{Lab, Steps};
use perigee_model::job::{Host, Job, JobSpec, JobState, LogLine};
use perigee_model::{HostId, VolumeName, job_file};
use sha2::{Digest, Sha256};

use crate::results::{HostRun, Run, StepTime, VM_COUNT, Work};
use crate::right::{self, Right, python};
use crate::series::{Sampler, ServerPoint, of_guest};
use crate::{domain0, tables};

const MEMORY: &str = "320MiB";
pub const SUPPORT: &str = "0.02";
/// The database's volume has this much, and eight times the size of the tables.
const TABLES_BYTES: u64 = 1 << 30;
const MINING_BYTES: u64 = 1 << 30;
const SLOW: Duration = Duration::from_secs(600);
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// For all programs at one distance.
const RUN_DEADLINE: Duration = Duration::from_secs(3 * 3600);
const SCRIPTS: [(&str, &str); 2] =
    [("works.sh", include_str!("works.sh")), ("rank.sh", include_str!("rank.sh"))];
const PROGRAMS: [&str; 4] = ["hpa.py", "pfp.py", "blast.py", "itemsets.py"];
/// The files of TPC-H, and the directories that the guests have them in.
const TPCH: &str = "tpch";
const TABLES: &str = "tables";
/// Below the scratch directory.
const PROGRAMS_DIR: &str = "programs";
const MINING: &str = "mining";
const TPCH_RIGHT: &str = "tpch-right";

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Size {
    pub transactions: u32,
    pub sequences: u32,
    pub scale_factor: f64,
}

/// The volumes with the data of one home: what HPA, PFP and BLAST read, and the database.
struct Data {
    mining: VolumeName,
    tables: VolumeName,
}

pub struct Bench<'a> {
    lab: &'a Lab,
    cluster: Cluster,
    client: Client,
    steps: &'a Steps,
    stage: Stage,
    /// The host of the VMs, and the one at the other end of the WAN.
    hosts: [HostId; 2],
    /// At each of them.
    data: [Data; 2],
    inputs: String,
    pub transactions_bytes: u64,
    pub table_bytes: u64,
    /// The directory of the programs, and the one with their data.
    workloads: PathBuf,
    scratch: PathBuf,
    /// What HPA, PFP and BLAST have to find.
    right: Right,
    number: u32,
}

fn sha256(text: &str) -> String {
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn name(text: &str) -> Result<VolumeName> {
    Ok(VolumeName::new(text)?)
}

impl<'a> Bench<'a> {
    /// Makes the data at the far host, and copies it to the VMs' host.
    pub async fn prepare(
        lab: &'a Lab,
        image: &Path,
        workloads: &Path,
        size: Size,
        steps: &'a Steps,
    ) -> Result<Self> {
        let cluster = Cluster::new(lab)?;
        let stage = demo::stage(&lab.definition)?;
        let near = lab.definition.hosts().next().context("a lab has hosts")?.1.clone();
        let hosts = [near, stage.near.clone()];
        let scratch = lab.dir().join("seeds");
        std::fs::create_dir_all(&scratch)?;
        let step = steps.begin(
            "make the transactions, the sequences and the tables, and find the right results on this machine",
        );
        let workloads = std::path::absolute(workloads)?;
        let mining = scratch.join(MINING);
        let transactions_bytes =
            right::make_data(&workloads, size.transactions, size.sequences, &mining)?;
        let right = Right::find(&workloads, &mining)?;

        let table_bytes = tables::write(size.scale_factor, &scratch.join(TABLES))?;
        let answers = python(
            &workloads,
            &["tpch/reference.py", "answers", &scratch.join(TABLES).display().to_string()],
        )?;
        std::fs::write(scratch.join(TPCH_RIGHT), answers)?;
        step.done(&format!("{} itemsets", right.itemsets.lines().count()));

        let image = std::path::absolute(image.join("debian-pg.raw"))?;
        let step = steps.begin("import the image at both hosts");
        cluster.import_image(&stage.image, &image).await?;
        step.done("");
        write_programs(&workloads, &scratch.join(PROGRAMS_DIR))?;
        let bundle = scratch.join("programs.tar");
        pack(&bundle, &[(&scratch.join(PROGRAMS_DIR), "")])?;
        let inputs = cluster.upload(&bundle).await?;
        let far = Data { mining: name("mining-far")?, tables: stage.volume.clone() };
        let near = Data { mining: name("mining-near")?, tables: name("tables-near")? };
        let mut bench = Self {
            lab,
            client: lab.client(SLOW)?,
            cluster,
            steps,
            stage,
            hosts,
            data: [near, far],
            inputs,
            transactions_bytes,
            table_bytes,
            workloads,
            scratch,
            right,
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

    /// Writes the programs' data onto a volume at the far host.
    async fn fill(&mut self, inputs: String) -> Result<()> {
        let volume = self.data[1].mining.clone();
        self.cluster.create_volume(&volume, &self.hosts[1], MINING_BYTES).await?;
        let text = format!(
            "name: fill\nimage: {}\nmemory: {MEMORY}\nplacement: {{host: {}, move: never}}\n\
             volumes:\n  - {{volume: {volume}, mount: /mine, access: write}}\ncommand: |\n  \
             set -e\n  cp /job/inputs/* /mine/\n  sync\n",
            self.stage.image, self.hosts[1]
        );
        let spec = job_file::parse(&text, "fill.yaml")?.spec;
        let mut step = self.steps.begin("write the data of the programs onto a volume");
        self.cluster.run(&JobSpec { inputs: Some(inputs), ..spec }, &mut step).await?;
        step.done("");
        Ok(())
    }

    /// Makes the database of the tables, on a volume at the far host.
    async fn load(&self) -> Result<()> {
        let volume = &self.stage.volume;
        let bytes = TABLES_BYTES + 8 * self.table_bytes;
        self.cluster.create_volume(volume, &self.hosts[1], bytes >> 20 << 20).await?;
        let bundle = self.scratch.join("load.tar");
        let programs = self.scratch.join(PROGRAMS_DIR).join(TPCH);
        pack(&bundle, &[(&programs, TPCH), (&self.scratch.join(TABLES), TABLES)])?;
        let inputs = self.cluster.upload(&bundle).await?;
        let text = format!(
            "name: load\nimage: {}\nmemory: 512MiB\ntimeout: 1h\nplacement: {{host: {}, move: never}}\n\
             volumes:\n  - {{volume: {volume}, mount: /data, access: write}}\n\
             command: [sh, inputs/tpch/load.sh, inputs/tables, /data/pg]\n",
            self.stage.image, self.hosts[1]
        );
        let spec = job_file::parse(&text, "load.yaml")?.spec;
        let mut step = self.steps.begin("load the tables into PostgreSQL");
        self.cluster.run(&JobSpec { inputs: Some(inputs), ..spec }, &mut step).await?;
        step.done("");
        Ok(())
    }

    /// The same programs on the host itself, one after the other.
    pub fn on_host(&self, works: &[Work]) -> Result<Vec<HostRun>> {
        let step = self.steps.begin("the same programs on the host itself");
        let from = domain0::From {
            programs: &self.scratch.join(PROGRAMS_DIR),
            mining: &self.scratch.join(MINING),
            tables: &self.scratch.join(TABLES),
        };
        let measured = domain0::measure(from, works)?;
        let mut runs = Vec::new();
        for (work, found) in measured {
            self.check(work, &found.found, &found.answers)?;
            let (seconds, busy, load_1min) = (found.seconds, found.busy, found.load_1min);
            runs.push(HostRun { work, seconds, busy, load_1min });
        }
        step.done("");
        Ok(runs)
    }

    /// Whether a program has found what it should: what one process finds, and answers as SQLite gives them.
    fn check(&self, work: Work, found: &str, answers: &[String]) -> Result<()> {
        match work {
            Work::Hpa | Work::Pfp | Work::Blast => self.right.check(work, found)?,
            Work::Tpch => {
                ensure!(answers.len() == VM_COUNT as usize, "{} VMs have answers", answers.len());
                let right = self.scratch.join(TPCH_RIGHT).display().to_string();
                for (rank, text) in answers.iter().enumerate() {
                    let got = self.scratch.join("tpch-got");
                    std::fs::write(&got, text)?;
                    let line = ["tpch/reference.py", "compare", &right, &got.display().to_string()];
                    python(&self.workloads, &line).with_context(|| format!("rank {rank}"))?;
                }
            }
        }
        Ok(())
    }

    /// The same data at the VMs' host: clones that are moved there.
    async fn copy_near(&self) -> Result<()> {
        let step = self.steps.begin(format!("copy the data to {}", self.hosts[0]));
        let [near, far] = &self.data;
        for (copy, of) in [(&near.mining, &far.mining), (&near.tables, &far.tables)] {
            self.cluster.clone_volume(copy, of).await?;
            self.cluster.move_volume(copy, &self.hosts[0]).await?;
            let moved = self.cluster.volume_moved(copy).await?;
            ensure!(moved.to == self.hosts[0], "{copy} did not come: {moved:?}");
        }
        step.done("");
        Ok(())
    }

    /// What the VMs at their host run with: `kvm` or `tcg`.
    pub async fn accelerator(&self) -> Result<String> {
        let hosts: Vec<Host> = self.client.get("/v1/hosts").await?;
        let host = hosts.into_iter().find(|host| host.id == self.hosts[0]).context("no host")?;
        Ok(host.accelerator.map_or_else(String::new, |it| format!("{it:?}").to_lowercase()))
    }

    async fn set_wan(&self, rtt_ms: u32) -> Result<()> {
        let sites = &self.lab.definition.sites;
        let rtt_us = Some(u64::from(rtt_ms) * 1000);
        wan::set(self.lab, &sites[0].name, &sites[1].name, Change { rtt_us, ..Change::default() })
            .await?;
        Ok(())
    }

    /// Runs the programs one after the other on four VMs. `None`: their data is local.
    pub async fn run(&mut self, rtt_ms: Option<u32>, works: &[Work]) -> Result<Vec<Run>> {
        self.set_wan(rtt_ms.unwrap_or(0)).await?;
        self.number += 1;
        let home = usize::from(rtt_ms.is_some());
        // A volume of its own, so that no cache has anything of it. The database is cloned for each VM anyway.
        let mining = name(&format!("mining-{}", self.number))?;
        self.cluster.clone_volume(&mining, &self.data[home].mining).await?;
        let words: Vec<&str> = works.iter().map(|work| work.name()).collect();
        let text = format!(
            "name: seeds\nimage: {}\ncount: {VM_COUNT}\nmpi: true\nmemory: {MEMORY}\noutput: 64MiB\ntimeout: 3h\n\
             placement: {{host: {}, move: never}}\nenv: {{WORKS: '{}', SUPPORT: '{SUPPORT}'}}\n\
             volumes:\n  - {{volume: {mining}, mount: /mine, access: read}}\n  - {{volume: {}, mount: /data, access: clone}}\n\
             command: [sh, inputs/works.sh]\n",
            self.stage.image,
            self.hosts[0],
            words.join(" "),
            self.data[home].tables,
        );
        let spec = job_file::parse(&text, "seeds.yaml")?.spec;
        let spec =
            JobSpec { inputs: Some(self.inputs.clone()), outputs: vec!["/output".into()], ..spec };
        let load_1min = load_1min()?;
        let job = self.cluster.submit(&spec).await?;
        let sampler = Sampler::start(self.lab, &self.hosts);
        let where_is =
            rtt_ms.map_or_else(|| "local data".to_owned(), |rtt| format!("data {rtt} ms away"));
        let marks = self
            .end(&job, &format!("{} on {VM_COUNT} VMs, {where_is}", words.join(", ")), &sampler)
            .await?;
        let servers = sampler.stop().await?;
        let outputs = self.cluster.output(&job.id).await?;
        self.cluster.delete_volume(&mining).await?;
        let outcome = |work: &Work| {
            let at = marks.iter().position(|(label, _)| label == work.name());
            let began_and_ended = at.and_then(|at| Some((marks.get(at)?.1, marks.get(at + 1)?.1)));
            let (began_s, ended_s) =
                began_and_ended.with_context(|| format!("{} was not seen", work.name()))?;
            let run = Run {
                work: *work,
                rtt_ms,
                seconds: ended_s - began_s,
                load_1min,
                ..Run::default()
            };
            self.outcome(run, &outputs, &servers)
        };
        works.iter().map(outcome).collect()
    }

    /// Waits for the job's end, and tells the sampler what runs. Returns since when which program ran, in seconds, the end last.
    async fn end(&self, job: &Job, what: &str, sampler: &Sampler) -> Result<Vec<(String, f64)>> {
        let mut step = self.steps.begin(what);
        let began = Instant::now();
        let path = format!("/v1/jobs/{}", job.id);
        let mut marks: Vec<(String, f64)> = Vec::new();
        loop {
            let now: Job = self.client.get(&path).await?;
            let progress = now.progress.as_ref().filter(|_| now.state == JobState::Running);
            let label = progress.map_or("", |progress| progress.label.as_str());
            if marks.last().is_none_or(|(last, _)| last != label) {
                marks.push((label.to_owned(), began.elapsed().as_secs_f64()));
                sampler.name(label);
            }
            step.at(&format!("{:?} {label}", now.state));
            if now.state == JobState::Succeeded {
                step.done(&format!("{:.0} s", began.elapsed().as_secs_f64()));
                return Ok(marks);
            }
            if now.state.is_final() {
                let lines: Vec<LogLine> = self.client.get(&format!("{path}/log?rank=0")).await?;
                let last = &lines[lines.len().saturating_sub(20)..];
                let said: Vec<&str> = last.iter().map(|line| line.line.as_str()).collect();
                bail!("{what}: {}:\n{}", now.reason, said.join("\n"));
            }
            ensure!(began.elapsed() < RUN_DEADLINE, "{what}: it has not ended: {}", now.reason);
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Adds what the program found, and what it used meanwhile.
    fn outcome(
        &self,
        mut run: Run,
        outputs: &[(String, String)],
        servers: &[(String, ServerPoint)],
    ) -> Result<Run> {
        let work = run.work;
        let of = |file: &str| -> Vec<String> {
            outputs.iter().filter(|(name, _)| name == file).map(|(_, text)| text.clone()).collect()
        };
        for rank in 0..VM_COUNT {
            let file = format!("{}-usage-{rank}", work.name());
            let text: String = of(&file).pop().with_context(|| format!("no {file}"))?;
            let (guest_s, mut points) = of_guest(&text).with_context(|| file)?;
            // A guest's clock may be wrong without KVM, and then is so by the same factor all the time.
            let clock = guest_s / run.seconds;
            points.iter_mut().for_each(|point| point.at_s /= clock);
            run.clocks.push(clock);
            run.guests.push(points);
        }
        let answers = of("tpch-answers");
        let found = match work {
            Work::Tpch => answers.first().context("no answers")?.clone(),
            _ => of(&format!("{}-found", work.name())).pop().context("no results")?,
        };
        self.check(work, &found, &answers)?;
        run.found_sha256 = sha256(&found);
        if work == Work::Tpch {
            run.steps = step_times(&of("tpch-times"), &run.clocks)?;
        }
        let mine = servers.iter().filter(|(label, _)| label == work.name());
        run.servers = mine.map(|(_, point)| *point).collect();
        let first_s = run.servers.first().map_or(0.0, |point| point.at_s);
        run.servers.iter_mut().for_each(|point| point.at_s -= first_s);
        Ok(run)
    }
}

/// What TPC-H's steps took, as means of the VMs by the machine's clock.
fn step_times(texts: &[String], clocks: &[f64]) -> Result<Vec<StepTime>> {
    let mut steps: Vec<StepTime> = Vec::new();
    // Outputs come in the order of the ranks.
    for (text, clock) in texts.iter().zip(clocks) {
        for (index, line) in text.lines().enumerate() {
            let words: Vec<&str> = line.split(' ').collect();
            let [name, began, ended] = words[..] else { bail!("a step's time: {line:?}") };
            let seconds =
                (ended.parse::<f64>()? - began.parse::<f64>()?) / clock / texts.len() as f64;
            match steps.get_mut(index) {
                Some(step) => step.seconds += seconds,
                None => steps.push(StepTime { name: name.to_owned(), seconds }),
            }
        }
    }
    Ok(steps)
}

/// The programs, as the guests have them.
pub fn write_programs(workloads: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to.join(TPCH))?;
    for (name, text) in SCRIPTS {
        std::fs::write(to.join(name), text)?;
    }
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
    fn the_time_of_a_step_is_the_mean_of_the_vms_by_the_machine_s_clock() {
        let texts =
            ["14 10.0 12.0\n2 12.0 13.0\n", "14 20.0 28.0\n2 28.0 30.0\n"].map(str::to_owned);
        let steps = step_times(&texts, &[1.0, 2.0]).expect("times");
        let found: Vec<(&str, f64)> = steps.iter().map(|s| (s.name.as_str(), s.seconds)).collect();
        assert_eq!(found, [("14", 3.0), ("2", 1.0)]);
        step_times(&["14 10.0".to_owned()], &[1.0]).expect_err("no end");
    }
}
