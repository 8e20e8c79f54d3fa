//! Predicts the next run of a job from its earlier runs.
//!
//! A command's time is linear in the time of a round trip. (77 runs of eight workloads at 0 to 16 ms showed
//! this: a line through the times at two distances predicts the time at a third with a median error of 5 to 7
//! %.)
//!
//! ```text
//! T(x) = T(0) + D x + bytes / rate
//! ```
//!
//! `D` is the number of *dependent round trips*: requests during which the command does nothing else. It is
//! learned from the runs by weighted least squares. Newer runs and runs of more similar jobs weigh more. A job whose
//! newest two or more runs all took longer than those before them, or all less, has changed: these do not count. If all
//! runs are at one distance, `D` comes from the counters of their volume servers, or from the replay of their
//! block traces. The same figure is the prior if there are few runs.
//!
//! The line goes through the mean of the runs. So the uncertainty of `D` grows with the distance between the
//! prediction and the runs; at the distance of the runs themselves it has no effect.

use perigee_model::HostId;
use perigee_model::job::Start;
use perigee_model::plan::{Basis, Seconds, Unknown};

use crate::copying::Reading;
use crate::facts::{Cluster, HostFacts, JobFacts, MoneyFacts, Running, Snapshot, VolumeFacts};
use crate::figures::Figures;
use crate::hosts::{computing_factor, cpu_factor};
use crate::network::path;
use crate::refused::Refused;
use crate::runs::{PastRun, Traits};
use crate::spread::Spread;
use one_pass::Seen;

mod fit;
mod one_pass;

/// Measured: in 9 of 10 cases a repeated run differs from the mean of its repetitions by less than this (by 7 %
/// in the median).
const REPEATED: f64 = 0.24;

/// The work of a job, wherever it runs. CPU time is that of a host of mean speed.
#[derive(Debug, Clone)]
pub(crate) struct Learned {
    pub basis: Basis,
    /// The command's seconds at a round trip of `mean_round_trip_s`, without the time for its bytes.
    mean: Spread,
    mean_round_trip_s: f64,
    /// The command waits for this share of the time that the link needs for its bytes.
    bytes: Spread,
    /// `D` in the module's documentation.
    pub round_trips: Spread,
    cpu: Spread,
    /// Of the time that is neither computing nor network, the share that is waiting for local blocks.
    local_share: f64,
    pub volumes: Vec<VolumeLearned>,
    /// The vCPUs of its VM.
    vcpus: u32,
    /// The number of requests of a run.
    pub requests: f64,
    /// How much the next run may differ from the mean, as a share of it.
    repeated: f64,
    pub unknown: Vec<Unknown>,
}

/// The work of a job on one volume.
#[derive(Debug, Clone, Copy)]
pub(crate) struct VolumeLearned {
    /// Its share of the round trips.
    pub share: f64,
    /// The share of its requests that are reads. Writes and flushes go to its home, wherever its replicas are.
    pub read_share: f64,
    /// The reads' share of the time for which the command waits far from the volume's home.
    pub read_time_share: f64,
    /// The bytes that the command reads and writes.
    pub bytes: f64,
    /// The bytes whose time on a link the command waits for.
    pub waited_bytes: f64,
    /// The bytes that a link has to carry: none twice that are in memory.
    pub sent_bytes: f64,
}

/// Where a job's reads of one volume are answered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a> {
    pub home: &'a HostId,
    /// The share of the reads that its home answers. A replica at the job's host answers the others.
    pub far_share: f64,
}

/// The share of a volume's requests that its home answers, by the share of its reads.
pub(crate) fn far_of_all(far_share: f64, read_share: f64) -> f64 {
    1.0 - read_share * (1.0 - far_share)
}

impl<'a> Source<'a> {
    /// Without a replica.
    pub fn home(home: &'a HostId) -> Self {
        Self { home, far_share: 1.0 }
    }
}

/// The properties of a host where the command may run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    /// The mean over the volumes, weighted by their shares of the round trips.
    pub round_trip_s: f64,
    /// The seconds that the command waits for bytes on the links.
    pub bytes_s: f64,
    /// The seconds that the links need at least.
    pub links_s: f64,
    /// The bytes that the links carry.
    pub sent_bytes: f64,
    /// The CPU time here relative to a host of mean speed; more if other VMs compute.
    pub cpu_factor: Spread,
}

impl Place {
    /// With all data there.
    pub fn local(cpu_factor: Spread) -> Self {
        Self { round_trip_s: 0.0, bytes_s: 0.0, links_s: 0.0, sent_bytes: 0.0, cpu_factor }
    }

    /// A mixture of two places, as for a run with a move: this share of the work is done at the first.
    pub fn mixed(&self, share: f64, other: &Self) -> Self {
        let mix = |a: f64, b: f64| a * share + b * (1.0 - share);
        let (a, b) = (self.cpu_factor, other.cpu_factor);
        Self {
            round_trip_s: mix(self.round_trip_s, other.round_trip_s),
            bytes_s: mix(self.bytes_s, other.bytes_s),
            links_s: mix(self.links_s, other.links_s),
            sent_bytes: mix(self.sent_bytes, other.sent_bytes),
            cpu_factor: Spread {
                expected: mix(a.expected, b.expected),
                down: mix(a.down, b.down),
                up: mix(a.up, b.up),
            },
        }
    }
}

impl Learned {
    /// # Errors
    /// [`Refused`] if there are no runs and a volume's home is not up.
    pub fn of(snapshot: &Snapshot, figures: &mut Figures) -> Result<Self, Refused> {
        let Snapshot { cluster, job, history, others } = snapshot;
        Self::of_job((cluster, job), (history.as_slice(), others.as_slice()), figures)
    }

    /// The same of a job whose earlier runs are `history`; `others` are those of other jobs.
    ///
    /// # Errors
    /// As [`Self::of`].
    pub fn of_job(
        (cluster, job): (&Cluster, &JobFacts),
        (history, others): (&[PastRun], &[PastRun]),
        figures: &mut Figures,
    ) -> Result<Self, Refused> {
        match Self::from_history(cluster, &job.traits, history, figures) {
            Some(learned) => Ok(learned),
            None => one_pass::one_pass(cluster, job, Seen { history, others }, figures),
        }
    }

    /// Of a job that runs for the first time, as [`Self::of`] with the same figures. `None` if a home is not up.
    pub fn of_first_run(running: &Running) -> Option<Self> {
        let sizes = running.traits.data_bytes.iter().copied();
        let volumes = running.disks.iter().zip(sizes).map(|(disk, allocated_bytes)| VolumeFacts {
            volume: disk.volume.clone(),
            home: disk.home.clone(),
            allocated_bytes,
            only_read: false,
            copy: disk.copy.clone(),
        });
        let job = JobFacts {
            traits: running.traits.clone(),
            memory_bytes: running.memory_bytes,
            start: Start::Host(running.host.clone()),
            may_migrate: running.may_migrate,
            uses_confined: running.confined_to.is_some(),
            volumes: volumes.collect(),
            dirty_bytes_per_s: running.dirty_bytes_per_s,
            money: MoneyFacts::default(),
            gang: None,
        };
        let seen = Seen { history: &running.history, others: &running.others };
        one_pass::one_pass(&running.cluster, &job, seen, &mut Figures::default()).ok()
    }

    /// `None` if no run is usable.
    pub fn from_history(
        cluster: &Cluster,
        traits: &Traits,
        history: &[PastRun],
        figures: &mut Figures,
    ) -> Option<Self> {
        fit::fit(cluster, traits, history, figures)
    }

    /// A host as a place for this job, with its volumes there. The job's VM is not among those that run there.
    ///
    /// # Errors
    /// [`Refused`] if a link is not measured.
    pub fn place(
        &self,
        cluster: &Cluster,
        host: &HostFacts,
        sources: &[Source],
        figures: &mut Figures,
    ) -> Result<Place, Refused> {
        let mut place = Place::local(computing_factor(cluster, host, self.vcpus));
        for (Source { home, far_share }, volume) in sources.iter().zip(&self.volumes) {
            let far_share = far_of_all(*far_share, volume.read_share);
            if let Some(path) = path(cluster, &host.id, home, figures)? {
                let rate = path.rate_bytes_per_s.max(1) as f64;
                place.round_trip_s += far_share * volume.share * path.round_trip_s;
                place.bytes_s += far_share * volume.waited_bytes / rate;
                place.links_s += far_share * volume.sent_bytes / rate;
                place.sent_bytes += far_share * volume.sent_bytes;
            }
        }
        Ok(place)
    }

    /// Where an earlier run was, without what others did there.
    pub fn place_of(&self, cluster: &Cluster, run: &PastRun) -> Place {
        let link_s = |bytes: fn(&VolumeLearned) -> f64| -> f64 {
            let each = run.volumes.iter().zip(&self.volumes).filter_map(|(was, volume)| {
                let rate = was.rate_bytes_per_s.filter(|rate| *rate > 0)?;
                Some(was.remote_share * bytes(volume) / rate as f64)
            });
            each.sum()
        };
        Place {
            round_trip_s: run.round_trip_s(),
            bytes_s: link_s(|volume| volume.waited_bytes),
            links_s: link_s(|volume| volume.sent_bytes),
            ..Place::local(cpu_factor(cluster, &run.host).0)
        }
    }

    /// Predicts the command's seconds at a place, part by part.
    ///
    /// The time is at least that of the computing, and at least the bytes divided by the links' rate.
    pub fn at(&self, place: &Place) -> (Seconds, Spread) {
        let farther_s = place.round_trip_s - self.mean_round_trip_s;
        let total = [
            self.round_trips.times(farther_s),
            self.slower(place),
            self.bytes.times(place.bytes_s),
        ];
        let total = total.into_iter().fold(self.mean, |sum, part| self.sum(sum, part));
        let noise = Spread { expected: 0.0, ..Spread::repeated(total.expected, self.repeated) };
        let total = self.sum(total, noise);
        let (seconds, expected) = self.expected_at(place);
        (seconds, Spread { expected, ..total }.at_least(0.0))
    }

    /// As [`Self::at`], without the range. With 10,000 hosts the ranges of all of them take long.
    pub fn expected_at(&self, place: &Place) -> (Seconds, f64) {
        let farther_s = place.round_trip_s - self.mean_round_trip_s;
        let slower_s = (place.cpu_factor.expected - 1.0) * self.cpu.expected;
        let network_s = self.round_trips.expected * farther_s;
        let total_s =
            self.mean.expected + network_s + slower_s + self.bytes.expected * place.bytes_s;
        let cpu_s = self.computing_s(place);
        let least_s = cpu_s.max(place.links_s);
        let expected_s = total_s.max(least_s);
        let network_s = self.round_trips.expected * place.round_trip_s + place.bytes_s;
        let network_s = network_s.min(expected_s - cpu_s).max(0.0);
        let rest_s = expected_s - cpu_s - network_s;
        let seconds = Seconds {
            cpu_s,
            network_s,
            local_io_s: rest_s * self.local_share,
            other_s: rest_s * (1.0 - self.local_share),
            ..Seconds::default()
        };
        (seconds.added_up(), expected_s)
    }

    /// How the command waits at a place for reads of volumes elsewhere. Of a running job this share of its work is left.
    pub fn reading(&self, place: &Place, left: f64) -> Reading {
        let (seconds, _) = self.at(place);
        let sum = |of: &dyn Fn(&VolumeLearned) -> f64| self.volumes.iter().map(of).sum::<f64>();
        let shares = sum(&|volume| volume.share);
        let by_reads = sum(&|volume| volume.share * volume.read_time_share);
        let reads = if shares > 0.0 { by_reads / shares } else { 1.0 };
        let (waits_s, work_s) = (seconds.network_s * reads, seconds.total_s - seconds.network_s);
        Reading::of(waits_s * left, work_s * left, true)
    }

    /// The sum of two parts. Parts that are only assumed are often wrong in the same direction: a job that computes
    /// little reads little.
    fn sum(&self, one: Spread, other: Spread) -> Spread {
        match self.basis {
            Basis::OnePass => one.together(other),
            _ => one.plus(other),
        }
    }

    /// The seconds that the command computes at a place.
    pub fn computing_s(&self, place: &Place) -> f64 {
        self.cpu.expected * place.cpu_factor.expected
    }

    /// How much longer the command takes at one place than at another. The uncertainty about the command itself
    /// is the same at both and cancels out.
    pub fn longer(&self, here: &Place, there: &Place) -> Spread {
        self.network_longer(here, there)
            .plus(self.slower(here))
            .plus(self.slower(there).times(-1.0))
    }

    /// The same for the network's part alone.
    pub fn network_longer(&self, here: &Place, there: &Place) -> Spread {
        let bytes_s = Spread::exactly(here.bytes_s - there.bytes_s);
        self.round_trips.times(here.round_trip_s - there.round_trip_s).plus(bytes_s)
    }

    fn slower(&self, place: &Place) -> Spread {
        let factor = place.cpu_factor;
        Spread { expected: factor.expected - 1.0, ..factor }.times(self.cpu.expected)
    }
}

#[cfg(test)]
mod tests;
