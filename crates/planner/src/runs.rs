//! The runs of a job that are kept.

use perigee_model::HostId;
use perigee_model::plan::Seconds;
use perigee_model::read_ahead::PROXY_GENERATION;
use serde::{Deserialize, Serialize};

use crate::facts::DiskFacts;
use crate::network::{latencies_s, lost_s, not_computing_s, read_time_share, seconds};
use crate::replay::Replayed;

/// How many runs are kept of one kind of job.
pub const RUNS_KEPT: usize = 16;
/// How many of them may be runs whose distance to their data changed. They teach less than the others.
const CHANGED_KEPT: usize = 2;

/// A run of a job that differs in one of these traits counts as this share of a run.
const OTHER_NAME: f64 = 0.5;
const OTHER_INPUTS: f64 = 0.3;

/// Runs of jobs that are less related than this are of different jobs: they are not compared.
pub(crate) const SAME_JOB: f64 = 0.95;

/// Each older run counts as this share of the next newer one.
pub(crate) const OLDER: f64 = 0.8;

/// A shorter round trip is one within a site. It does not show how many round trips a job needs.
pub(crate) const FAR_S: f64 = 0.0005;

/// The differences between jobs with the same image and command.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Traits {
    /// The name in the job file.
    pub name: String,
    /// The vCPUs of its VM.
    pub cpus: u32,
    /// The memory of its VM.
    pub memory_bytes: u64,
    /// The name of the image.
    pub image: String,
    /// A digest of everything else that the command is given: environment, input files, volumes.
    pub inputs: String,
    /// The bytes in its volumes, in the order of the job file.
    pub data_bytes: Vec<u64>,
}

impl Traits {
    /// How much a run with these traits says about a job with the others, 0 to 1.
    pub(crate) fn relation(&self, other: &Self) -> f64 {
        let ratio = |a: u64, b: u64| a.min(b) as f64 / a.max(b).max(1) as f64;
        let held = |traits: &Self| traits.data_bytes.iter().sum::<u64>();
        let data = match (held(self), held(other)) {
            (0, 0) => 1.0,
            (a, b) => ratio(a, b),
        };
        let memory = ratio(self.memory_bytes, other.memory_bytes);
        let cpus = ratio(self.cpus.into(), other.cpus.into());
        let name = if self.name == other.name { 1.0 } else { OTHER_NAME };
        let inputs = if self.inputs == other.inputs { 1.0 } else { OTHER_INPUTS };
        data * memory * cpus * name * inputs
    }

    /// Whether both are traits of one job, whose data may have grown.
    pub(crate) fn is_same_but_for_data(&self, other: &Self) -> bool {
        let of = |traits: &Self| (traits.cpus, traits.memory_bytes);
        self.name == other.name && self.inputs == other.inputs && of(self) == of(other)
    }
}

/// The measurements of a finished run. It may have been local, remote, or migrated midway.
#[derive(Debug, Clone)]
pub struct Measured {
    /// The job's differences from others with its image and command.
    pub traits: Traits,
    /// Where it started.
    pub host: HostId,
    /// Whether its VM was moved.
    pub moved: bool,
    /// The time from the VM's start to the command's start.
    pub boot_s: f64,
    /// The time from the command's start to its end.
    pub wall_s: f64,
    /// The part of `wall_s` in which the VM was paused for migrations or waited for a link that was down.
    pub paused_s: f64,
    /// vCPU time from the command's start to its end, summed over all vCPUs and hosts.
    pub vcpu_s: f64,
    /// The part of `wall_s` in which the vCPU that waited longest was ready to run and had no CPU; `None` if that is not known.
    pub run_delay_s: Option<f64>,
    /// The vCPUs of its VM.
    pub cpus: u32,
    /// The data volumes, in the order of the job file.
    pub volumes: Vec<MeasuredVolume>,
    /// The result of replaying its block trace.
    pub replayed: Option<Replayed>,
    /// As in [`PastRun`].
    pub distance_changed: bool,
}

/// A data volume of a finished run.
#[derive(Debug, Clone)]
pub struct MeasuredVolume {
    /// Its counters from the command's start to its end.
    pub disk: DiskFacts,
    /// How much longer a dependent request takes than at the volume's home, as probed from the host where the
    /// VM started.
    pub round_trip_s: f64,
    /// The rate of the link to the home; `None` if the VM started there.
    pub rate_bytes_per_s: Option<u64>,
}

/// What one run shows about its job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PastRun {
    /// As in [`Measured`].
    pub traits: Traits,
    /// Where it started.
    pub host: HostId,
    /// Whether its VM was moved.
    pub moved: bool,
    /// The time from the VM's start to the command's start.
    pub boot_s: f64,
    /// The time from the command's start to its end, without pauses and outages, and without `run_delay_s`: what it would have
    /// taken if nobody else had wanted the CPUs.
    pub wall_s: f64,
    /// The time in which the command computed.
    pub cpu_s: f64,
    /// The time for which the command waited for a CPU that others had; `None` if that is not known, and is then in `wall_s`.
    pub run_delay_s: Option<f64>,
    /// The time with at least one request of a data volume in flight, whether the command waited for it or
    /// computed meanwhile.
    pub busy_s: f64,
    /// The time that the command would have waited for blocks if all of them were local.
    pub local_io_s: f64,
    /// The time that the command waited for the network, according to the counters of its volume server.
    pub network_s: f64,
    /// Its data volumes, in the order of the job file.
    pub volumes: Vec<VolumeRun>,
    /// The result of replaying its block trace; `None` if it was not traced.
    pub replayed: Option<Replayed>,
    /// The distance to its data changed while it ran: they came to its VM or left it, or the VM left them. So the run
    /// does not say what any one distance costs.
    pub distance_changed: bool,
    /// The [`PROXY_GENERATION`] at the time of the run.
    pub proxy_generation: u32,
}

/// The I/O of the run on one volume.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct VolumeRun {
    /// Reads, writes and flushes.
    pub requests: f64,
    /// The reads of them; `None`: the run was recorded without this.
    pub reads: Option<f64>,
    /// The reads' share of the time that the requests took together; `None`: as for `reads`.
    pub read_time_share: Option<f64>,
    /// Bytes read and written.
    pub bytes: f64,
    /// The mean number of requests in flight while there is at least one.
    pub queue_depth: f64,
    /// The share of its requests while the home was another host. Some of these are answered from memory.
    pub remote_share: f64,
    /// As in [`MeasuredVolume`].
    pub round_trip_s: f64,
    /// As in [`MeasuredVolume`].
    pub rate_bytes_per_s: Option<u64>,
}

impl PastRun {
    /// Splits the command's wall time into computing, waiting for data volumes as if they were local, waiting
    /// for the network, and the rest. The rest can't be divided from outside: the root disk, timers, the host's
    /// CPU.
    pub fn learn(run: &Measured) -> Self {
        let wall_s = (run.wall_s - run.paused_s).max(0.0);
        let not_computing_s = |wall_s| not_computing_s(wall_s, run.vcpu_s, run.cpus);
        let run_delay_s = run.run_delay_s.map(|s| s.clamp(0.0, not_computing_s(wall_s)));
        let wall_s = wall_s - run_delay_s.unwrap_or(0.0);
        let waiting_s = not_computing_s(wall_s);
        let disks: Vec<DiskFacts> = run.volumes.iter().map(|v| v.disk.clone()).collect();
        let network_s = lost_s(&disks, wall_s, run.vcpu_s, run.cpus);
        let busy_s: f64 = disks.iter().map(|disk| seconds(disk.client.busy_ns)).sum();
        Self {
            traits: run.traits.clone(),
            host: run.host.clone(),
            moved: run.moved,
            boot_s: run.boot_s,
            wall_s,
            cpu_s: wall_s - waiting_s,
            run_delay_s,
            busy_s,
            local_io_s: (busy_s.min(waiting_s) - network_s).max(0.0),
            network_s,
            volumes: run.volumes.iter().map(VolumeRun::learn).collect(),
            replayed: run.replayed,
            distance_changed: run.distance_changed,
            proxy_generation: PROXY_GENERATION,
        }
    }

    /// The measured parts of the run. `migration_s` is the time that the VM was paused.
    pub fn parts(&self, migration_s: f64) -> Seconds {
        Seconds {
            boot_s: self.boot_s,
            // As in a prediction, a wait for a CPU makes the computing longer.
            cpu_s: self.cpu_s + self.run_delay_s.unwrap_or(0.0),
            local_io_s: self.local_io_s,
            network_s: self.network_s,
            other_s: (self.wall_s - self.cpu_s - self.local_io_s - self.network_s).max(0.0),
            migration_s,
            total_s: 0.0,
        }
        .added_up()
    }

    /// Whether it says how long the command takes at one distance. A run over an older proxy does not, and a run
    /// during which the distance changed does not either.
    pub(crate) fn is_at_one_distance(&self) -> bool {
        let is_of_today = self.round_trip_s() <= FAR_S || self.proxy_generation == PROXY_GENERATION;
        is_of_today && !self.distance_changed
    }

    /// The dependent round trips that this run shows by itself: by the time lost to the network, or by the replay
    /// of its trace. `None` if it shows none: it was local and not traced.
    pub(crate) fn round_trips_seen(&self) -> Option<f64> {
        let round_trip_s = self.round_trip_s();
        if round_trip_s > FAR_S {
            return Some((self.network_s - self.bytes_s()).max(0.0) / round_trip_s);
        }
        self.replayed.map(|replayed| replayed.round_trips)
    }

    /// Whether a block trace of another run would show something new: this run was not far from its data and
    /// was not traced.
    pub fn leaves_depth_unknown(&self) -> bool {
        self.distance_changed || self.round_trip_s() <= FAR_S && self.replayed.is_none()
    }

    pub(crate) fn bytes(&self) -> f64 {
        self.volumes.iter().map(|volume| volume.bytes).sum()
    }

    pub(crate) fn requests(&self) -> f64 {
        self.volumes.iter().map(|volume| volume.requests).sum()
    }

    /// The seconds of a dependent round trip in this run: the mean over its volumes, and over local and remote
    /// requests.
    pub(crate) fn round_trip_s(&self) -> f64 {
        let shares = self.volumes.iter().zip(self.shares());
        shares.map(|(volume, share)| share * volume.remote_share * volume.round_trip_s).sum()
    }

    /// The seconds that its bytes needed on the links.
    pub(crate) fn bytes_s(&self) -> f64 {
        let seconds = |volume: &VolumeRun| {
            let rate = volume.rate_bytes_per_s.filter(|rate| *rate > 0)?;
            Some(volume.bytes * volume.remote_share / rate as f64)
        };
        self.volumes.iter().filter_map(seconds).sum()
    }

    /// The share of its disk time during which it computed (read-ahead, several processes).
    pub(crate) fn hidden_share(&self) -> f64 {
        let waited_s = self.local_io_s + self.network_s;
        if self.busy_s > 0.0 { (1.0 - waited_s / self.busy_s).clamp(0.0, 1.0) } else { 0.0 }
    }

    /// The round trips according to the counters, if each request that is not in flight with others counts as
    /// one.
    pub(crate) fn serial_requests(&self) -> f64 {
        self.volumes.iter().map(VolumeRun::serial).sum()
    }

    /// The share of each volume in the dependent round trips.
    pub(crate) fn shares(&self) -> Vec<f64> {
        let all = self.serial_requests();
        let share = |v: &VolumeRun| if all > 0.0 { v.serial() / all } else { 0.0 };
        self.volumes.iter().map(share).collect()
    }
}

impl VolumeRun {
    fn learn(volume: &MeasuredVolume) -> Self {
        let client = &volume.disk.client;
        let requests = (client.reads + client.writes + client.flushes) as f64;
        let busy_s = seconds(client.busy_ns);
        let depth = if busy_s > 0.0 { latencies_s(client) / busy_s } else { 1.0 };
        let remote = volume.disk.far_requests as f64;
        Self {
            requests,
            reads: Some(client.reads as f64),
            read_time_share: Some(read_time_share(client)),
            bytes: (client.read_bytes + client.write_bytes) as f64,
            queue_depth: depth.max(1.0),
            remote_share: if requests > 0.0 { (remote / requests).min(1.0) } else { 0.0 },
            round_trip_s: volume.round_trip_s,
            rate_bytes_per_s: volume.rate_bytes_per_s,
        }
    }

    fn serial(&self) -> f64 {
        self.requests / self.queue_depth.max(1.0)
    }
}

/// Adds a run, the newest last. If there are too many, the oldest one whose distance changed is removed, or else the
/// oldest run of the largest group; a group is the runs with one name at one distance. So a run at a rare distance is
/// kept.
pub fn keep(runs: &mut Vec<PastRun>, newest: PastRun) {
    runs.push(newest);
    while let Some(oldest) = oldest_changed(runs) {
        runs.remove(oldest);
    }
    while runs.len() > RUNS_KEPT {
        runs.remove(oldest_of_most(runs, kind));
    }
}

/// The oldest run of the most frequent kind, where the newest run is the last one.
pub(crate) fn oldest_of_most<R, K: PartialEq>(runs: &[R], kind: impl Fn(&R) -> K) -> usize {
    let kinds: Vec<K> = runs.iter().map(kind).collect();
    let company = |kind: &K| kinds.iter().filter(|other| *other == kind).count();
    let most = kinds.iter().map(company).max().unwrap_or_default();
    kinds.iter().position(|kind| company(kind) == most).unwrap_or_default()
}

/// The oldest run whose distance changed, if there are too many of them or of all.
fn oldest_changed(runs: &[PastRun]) -> Option<usize> {
    let changed = runs.iter().filter(|run| run.distance_changed).count();
    let too_many = changed > CHANGED_KEPT || runs.len() > RUNS_KEPT;
    runs.iter().position(|run| run.distance_changed).filter(|_| too_many)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
fn kind(run: &PastRun) -> (String, u64) {
    (run.traits.name.clone(), (run.round_trip_s() * 1e3).round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::*;

    /// A run that computes for 5 s and reads 1000 times, one at a time; this many reads are remote.
    fn measured(remote_reads: u64, wall_s: f64) -> Measured {
        let mut data = disk("data", "cloud1", remote_reads, 1, true);
        let local = disk("data", "cloud1", 1000 - remote_reads, 1, false);
        for (sum, more) in [(&mut data.client, local.client), (&mut data.at_home, local.at_home)] {
            sum.reads += more.reads;
            sum.read_bytes += more.read_bytes;
            sum.read_ns += more.read_ns;
            sum.busy_ns += more.busy_ns;
        }
        Measured {
            traits: traits(),
            host: host_id("home1"),
            moved: false,
            boot_s: 12.0,
            wall_s,
            paused_s: 0.0,
            vcpu_s: 5.0,
            run_delay_s: None,
            cpus: 1,
            volumes: vec![MeasuredVolume {
                disk: data,
                round_trip_s: ROUND_TRIP_S,
                rate_bytes_per_s: None,
            }],
            replayed: None,
            distance_changed: false,
        }
    }

    #[test]
    fn a_run_is_split_into_the_same_parts_wherever_it_was() {
        for (remote_reads, wall_s) in [(0, 5.2), (1000, 21.4), (500, 13.3)] {
            let run = PastRun::learn(&measured(remote_reads, wall_s));
            let remote_share = remote_reads as f64 / 1000.0;
            assert_close(run.cpu_s, 5.0);
            assert_close(run.network_s, remote_share * 16.2);
            assert_close(run.local_io_s, 0.2);
            assert_close(run.serial_requests(), 1000.0);
            assert_close(run.round_trip_s(), remote_share * ROUND_TRIP_S);
            assert_close(run.parts(0.0).other_s, 0.0);
            assert_close(run.parts(0.0).total_s, 12.0 + wall_s);
        }
    }

    #[test]
    fn disk_time_behind_computing_is_hidden() {
        // 16.4 s of disk time, of which the command waited for 13.4 s.
        let run = PastRun::learn(&measured(1000, 18.4));
        assert_close(run.hidden_share(), 3.0 / 16.4);
        assert_close(run.parts(0.0).other_s, 0.0);
    }

    #[test]
    fn time_without_computing_and_disk_is_other() {
        assert_close(PastRun::learn(&measured(0, 7.2)).parts(0.0).other_s, 2.0);
    }

    #[test]
    fn the_pauses_of_migrations_are_not_the_job() {
        let run = PastRun::learn(&Measured { paused_s: 0.5, ..measured(500, 13.8) });
        assert_close(run.parts(0.0).other_s, 0.0);
        assert_close(run.wall_s, 13.3);
    }

    #[test]
    fn a_run_beside_others_teaches_what_it_would_have_taken_alone() {
        let alone = PastRun::learn(&measured(0, 5.2));
        let beside = Measured { run_delay_s: Some(4.0), ..measured(0, 9.2) };
        let run = PastRun::learn(&beside);
        assert_close(run.wall_s, alone.wall_s);
        assert_close(run.cpu_s, alone.cpu_s);
        assert_close(run.parts(0.0).cpu_s, 9.0);
        assert_close(run.parts(0.0).total_s, 12.0 + 9.2);
        // More than it did not compute can't be a wait.
        let nonsense = Measured { run_delay_s: Some(1e9), ..beside };
        assert_close(PastRun::learn(&nonsense).wall_s, 5.0);
    }

    #[test]
    fn a_run_that_did_nothing_teaches_zeros() {
        let nothing = disk("data", "cloud1", 0, 1, false);
        let mut measured = Measured { vcpu_s: 0.0, ..measured(0, 0.0) };
        measured.volumes[0].disk = nothing;
        let run = PastRun::learn(&measured);
        assert_close(run.round_trip_s() + run.bytes_s() + run.hidden_share(), 0.0);
        assert_close(run.parts(0.0).total_s, 12.0);
    }

    #[test]
    fn relatives_count_less_the_more_they_differ() {
        let here = traits();
        assert_close(here.relation(&here), 1.0);
        let half = Traits { memory_bytes: here.memory_bytes / 2, ..here.clone() };
        assert_close(here.relation(&half), 0.5);
        assert_close(half.relation(&here), 0.5);
        let other = Traits { inputs: "other".to_owned(), data_bytes: vec![64 * MIB], ..half };
        assert_close(here.relation(&other), 0.5 * 0.3 * 0.25);
    }

    /// The data came to the VM, so such a run ends at no distance, as the good local runs do.
    #[test]
    fn runs_whose_distance_changed_push_out_no_others() {
        let mut runs = Vec::new();
        for _ in 0..4 {
            keep(&mut runs, past_run(0.0, 2500.0));
            keep(&mut runs, past_run(ROUND_TRIP_S, 2500.0));
        }
        for _ in 0..20 {
            let changed = PastRun { distance_changed: true, ..past_run(0.0, 2500.0) };
            keep(&mut runs, changed);
        }
        assert_eq!(runs.iter().filter(|run| run.is_at_one_distance()).count(), 8);
        assert_eq!(runs.len(), 8 + CHANGED_KEPT);
        for _ in 0..8 {
            keep(&mut runs, past_run(ROUND_TRIP_S, 2500.0));
        }
        assert!(runs.len() == RUNS_KEPT && !runs.iter().any(|run| run.distance_changed));
    }

    #[test]
    fn of_many_runs_the_rare_distance_stays() {
        let mut runs = Vec::new();
        keep(&mut runs, past_run(0.0, 2500.0));
        for number in 0..100 {
            let boot_s = f64::from(number);
            keep(&mut runs, PastRun { boot_s, ..past_run(ROUND_TRIP_S, 2500.0) });
        }
        assert_eq!(runs.len(), RUNS_KEPT);
        assert_close(runs[0].round_trip_s(), 0.0);
        assert_close(runs[1].boot_s, 85.0);
        assert_close(runs[RUNS_KEPT - 1].boot_s, 99.0);
    }
}
