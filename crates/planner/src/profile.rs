//! What a finished run teaches about a job.

use std::collections::BTreeMap;

use perigee_model::VolumeName;
use serde::{Deserialize, Serialize};

use crate::facts::DiskFacts;
use crate::network::{latencies_s, mean_latency_us, not_computing_s, seconds};

/// A finished run, whether it was local, remote or migrated midway.
#[derive(Debug, Clone)]
pub struct Measured {
    /// From VM start to the command's start.
    pub boot_s: f64,
    /// From the command's start to its end.
    pub wall_s: f64,
    /// Time of that in which the VM stood still for migrations.
    pub paused_s: f64,
    /// vCPU time from the command's start to its end, of all vCPUs and hosts.
    pub vcpu_s: f64,
    pub cpus: u32,
    /// The data volumes, by the names in the job file.
    pub volumes: Vec<DiskFacts>,
}

/// What a job does, wherever it runs. The controller keeps it as JSON, one for each history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkProfile {
    /// Runs it was learned from.
    pub runs: u32,
    pub boot_s: f64,
    /// Time in which the command computes.
    pub cpu_s: f64,
    /// Disk time that passed while the command computed (read-ahead, several processes).
    pub overlap_s: f64,
    /// Time in which it neither computes nor waits for its data volumes.
    pub other_s: f64,
    pub volumes: BTreeMap<VolumeName, VolumeWork>,
}

/// What the job does to one volume.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct VolumeWork {
    pub reads: f64,
    pub writes: f64,
    pub flushes: f64,
    pub bytes: f64,
    /// Sum of the requests' times, and time with at least one in flight, as measured wherever the
    /// VM was. Their ratio over all runs is the queue depth: a run at a slow disk, which shows how
    /// many requests the job keeps in flight, counts by its time.
    pub latencies_s: f64,
    pub busy_s: f64,
    /// Mean time of a request at the volume's home.
    pub home_latency_us: f64,
}

impl VolumeWork {
    pub fn requests(&self) -> f64 {
        self.reads + self.writes + self.flushes
    }

    /// Mean requests in flight while there is at least one; 1 when nothing was measured.
    pub fn queue_depth(&self) -> f64 {
        if self.busy_s > 0.0 { (self.latencies_s / self.busy_s).max(1.0) } else { 1.0 }
    }

    /// Seconds in which a request is in flight when the VM runs at the volume's home.
    pub(crate) fn home_s(&self) -> f64 {
        self.requests() * self.home_latency_us / 1e6 / self.queue_depth()
    }

    pub(crate) fn learn(disk: &DiskFacts) -> Self {
        let client = &disk.client;
        Self {
            reads: client.reads as f64,
            writes: client.writes as f64,
            flushes: client.flushes as f64,
            bytes: (client.read_bytes + client.write_bytes) as f64,
            latencies_s: latencies_s(client),
            busy_s: seconds(client.busy_ns),
            home_latency_us: mean_latency_us(&disk.at_home),
        }
    }
}

impl WorkProfile {
    /// What one run teaches, wherever its VM was.
    ///
    /// The command's wall time is what it computes, plus the time its volumes were busy, plus what
    /// is neither, minus what overlaps: `wall = cpu + busy + other - overlap`. Both last terms
    /// can't be told apart from outside, so one of them is zero.
    pub fn learn(run: &Measured) -> Self {
        let wall_s = (run.wall_s - run.paused_s).max(0.0);
        let waiting_s = not_computing_s(wall_s, run.vcpu_s, run.cpus);
        let busy_s: f64 = run.volumes.iter().map(|d| seconds(d.client.busy_ns)).sum();
        Self {
            runs: 1,
            boot_s: run.boot_s,
            cpu_s: wall_s - waiting_s,
            overlap_s: (busy_s - waiting_s).max(0.0),
            other_s: (waiting_s - busy_s).max(0.0),
            volumes: run
                .volumes
                .iter()
                .map(|disk| (disk.volume.clone(), VolumeWork::learn(disk)))
                .collect(),
        }
    }

    /// Share of the disk time that passes while the command computes, 0 to 1.
    pub(crate) fn overlap_share(&self) -> f64 {
        let busy_s: f64 = self.volumes.values().map(|work| work.busy_s).sum();
        if busy_s > 0.0 { (self.overlap_s / busy_s).min(1.0) } else { 0.0 }
    }

    /// With one more run: a mean that gives the newest run at least a quarter, so that a job that
    /// changes is followed.
    #[must_use]
    pub fn with(&self, newest: &Self) -> Self {
        let weight = 1.0 / f64::from(self.runs.saturating_add(1).min(4));
        let mean = |old: f64, new: f64| old + (new - old) * weight;
        let volumes = newest.volumes.iter().map(|(name, new)| {
            let old = self.volumes.get(name).unwrap_or(new);
            let work = VolumeWork {
                reads: mean(old.reads, new.reads),
                writes: mean(old.writes, new.writes),
                flushes: mean(old.flushes, new.flushes),
                bytes: mean(old.bytes, new.bytes),
                latencies_s: mean(old.latencies_s, new.latencies_s),
                busy_s: mean(old.busy_s, new.busy_s),
                home_latency_us: mean(old.home_latency_us, new.home_latency_us),
            };
            (name.clone(), work)
        });
        Self {
            runs: self.runs.saturating_add(1),
            boot_s: mean(self.boot_s, newest.boot_s),
            cpu_s: mean(self.cpu_s, newest.cpu_s),
            overlap_s: mean(self.overlap_s, newest.overlap_s),
            other_s: mean(self.other_s, newest.other_s),
            volumes: volumes.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::*;

    /// A run that computes 5 s and reads 1000 times, one at a time.
    fn run(remote_reads: u64, wall_s: f64, vcpu_s: f64) -> Measured {
        let mut data = disk("data", "cloud1", remote_reads, 1, true);
        let local = disk("data", "cloud1", 1000 - remote_reads, 1, false);
        for (sum, more) in [(&mut data.client, local.client), (&mut data.at_home, local.at_home)] {
            sum.reads += more.reads;
            sum.read_bytes += more.read_bytes;
            sum.read_ns += more.read_ns;
            sum.busy_ns += more.busy_ns;
        }
        let volumes = vec![data];
        Measured { boot_s: 12.0, wall_s, paused_s: 0.0, vcpu_s, cpus: 1, volumes }
    }

    #[test]
    fn a_run_teaches_the_same_wherever_it_was() {
        let local = WorkProfile::learn(&run(0, 5.2, 5.0));
        let remote = WorkProfile::learn(&run(1000, 21.4, 5.0));
        let midway = WorkProfile::learn(&run(500, 13.3, 5.0));
        for profile in [local, remote, midway] {
            assert_close(profile.cpu_s, 5.0);
            assert_close(profile.overlap_share(), 0.0);
            assert_close(profile.other_s, 0.0);
            let work = profile.volumes[&volume_name("data")];
            assert_close(work.reads, 1000.0);
            assert_close(work.home_latency_us, LOCAL_US as f64);
            assert_close(work.queue_depth(), 1.0);
            assert_close(work.home_s(), 0.2);
        }
    }

    #[test]
    fn disk_time_behind_computing_is_overlap() {
        let profile = WorkProfile::learn(&run(1000, 18.4, 5.0));
        // 16.4 s of disk time, of which 13.4 s were waited for.
        assert_close(profile.overlap_share(), 3.0 / 16.4);
        assert_close(profile.other_s, 0.0);
    }

    #[test]
    fn time_without_computing_and_disk_is_other() {
        let profile = WorkProfile::learn(&run(0, 7.2, 5.0));
        assert_close(profile.other_s, 2.0);
        assert_close(profile.overlap_share(), 0.0);
    }

    #[test]
    fn the_pauses_of_migrations_are_not_the_job() {
        let mut measured = run(500, 13.8, 5.0);
        measured.paused_s = 0.5;
        assert_close(WorkProfile::learn(&measured).other_s, 0.0);
    }

    #[test]
    fn a_run_that_did_nothing_teaches_zeros() {
        let nothing = disk("data", "cloud1", 0, 1, false);
        let measured = Measured { volumes: vec![nothing], ..run(0, 0.0, 0.0) };
        let profile = WorkProfile::learn(&measured);
        assert_close(profile.volumes[&volume_name("data")].home_s(), 0.0);
    }

    #[test]
    fn the_queue_depth_is_that_of_the_slow_run() {
        let with_depth = |latency_s: f64, busy_s: f64| {
            let mut profile = history(1000.0);
            profile.runs = 1;
            for work in profile.volumes.values_mut() {
                (work.latencies_s, work.busy_s) = (latency_s, busy_s);
            }
            profile
        };
        let both = with_depth(0.2, 0.2).with(&with_depth(16.0, 8.0));
        assert_close(both.volumes[&volume_name("data")].queue_depth(), 16.2 / 8.2);
    }

    #[test]
    fn the_newest_run_counts_at_least_a_quarter() {
        let mut profile = history(100.0);
        profile.runs = 100;
        assert_close(profile.with(&history(200.0)).volumes[&volume_name("data")].reads, 125.0);
        profile.runs = 1;
        assert_close(profile.with(&history(200.0)).volumes[&volume_name("data")].reads, 150.0);
    }
}
