//! Adds up a job's I/O and CPU time over hosts, migrations and restarts of volume servers.
//!
//! A server's counters only grow while it runs, and they may start at any value when a VM arrives. So the meter
//! keeps the last values and adds the differences. Nothing is lost while the controller does not run, because
//! the next difference is then larger.

use std::collections::BTreeMap;

use perigee_model::volume::IoStats;
use perigee_model::{HostId, VolumeName};
use serde::{Deserialize, Serialize};

/// If requests wait and none is answered for this long, the link is down and not only slow.
const OUTAGE_NS_MIN: u64 = 2_000_000_000;

/// Counters that are read at most this late still count as those of the moment.
const LATE_MS_MAX: u64 = 2_000;

/// The sums since the VM started.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    pub vcpu_ms: u64,
    /// The longest run delay of a vCPU, as its hosts report it; `None` if none has.
    pub run_delay_ms: Option<u64>,
    /// One for each disk of the VM.
    pub disks: Vec<DiskTotals>,
}

/// Counters of one disk: `client` at the host of the VM, `home` at the volume's home.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct DiskTotals {
    pub client: IoStats,
    pub home: IoStats,
    /// The requests of `client` while the home was another host.
    pub far_requests: u64,
    /// Time in which requests to the home waited and none was answered.
    pub outage_ns: u64,
}

/// A VM's counters since it started, and as they were at the moments from which predictions are made.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Meter {
    pub totals: Totals,
    /// The totals when the command started.
    pub at_command: Totals,
    /// The totals when the command had ended.
    pub at_exit: Option<Totals>,
    /// The totals when the VM came to its present host, its command started there, or its data came there.
    pub at_arrival: Totals,
    /// Unix time of that moment.
    pub arrived_ms: u64,
    /// The job's progress at that moment, 0 to 1.
    pub progress_at_arrival: f64,
    /// How much later than the command's start and end the counters were read, together.
    late_ms: u64,
    last_vcpu_ms: u64,
    last_run_delay_ms: u64,
    last: Vec<LastSeen>,
    /// How long the VM has stood still in the migrations that were taken into account.
    pub paused_ms: u64,
    /// What has left the sites of rented hosts because of this VM, by the host that it left from; see [`crate::ledger::left_site`].
    #[serde(default)]
    pub left_sites: BTreeMap<HostId, u64>,
    #[serde(default)]
    came: Vec<Came>,
}

/// A data volume that has come from one host to another one while its job ran.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Came {
    pub volume: VolumeName,
    pub from: HostId,
    pub to: HostId,
    /// How often it has come this way.
    pub times: u32,
    /// When the last of these moves began; Unix time.
    pub started_ms: u64,
    /// [`crate::records::JobRecord::restarts`] then.
    pub run: u32,
}

/// Counters as last read; `None` until the first reading at this server.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
struct LastSeen {
    client: Option<IoStats>,
    home: Option<IoStats>,
    /// How long requests to the home have waited since one was last answered.
    silent_ns: u64,
}

/// One disk's counters at one moment; `None` where a volume server did not answer.
#[derive(Debug, Clone, Copy)]
pub struct Reading {
    pub client: Option<IoStats>,
    pub home: Option<IoStats>,
    /// Whether the home is another host than the VM's. Reads that a replica at the VM's host answers do not count as far.
    pub far: bool,
}

impl Meter {
    /// Takes a reading of all disks, in the order of the VM's spec. Counters that are missing this time are
    /// included in the next difference.
    pub fn read(&mut self, vcpu_ms: u64, disks: &[Reading]) {
        // 0 is reported for a VM without a QEMU process.
        if vcpu_ms > 0 {
            self.totals.vcpu_ms += vcpu_ms.checked_sub(self.last_vcpu_ms).unwrap_or(vcpu_ms);
            self.last_vcpu_ms = vcpu_ms;
        }
        if self.last.len() < disks.len() {
            self.last.resize(disks.len(), LastSeen::default());
            self.totals.disks.resize(disks.len(), DiskTotals::default());
        }
        for ((last, total), now) in
            self.last.iter_mut().zip(&mut self.totals.disks).zip(disks.iter())
        {
            if let Some(client) = now.client {
                let before = total.client;
                advance(&mut last.client, &mut total.client, client);
                let added = minus(total.client, before);
                total.outage_ns += last.outage_ns(added);
                if now.far {
                    let requests = added.reads + added.writes + added.flushes;
                    total.far_requests += requests.saturating_sub(added.replica_reads);
                }
            }
            if let Some(home) = now.home {
                advance(&mut last.home, &mut total.home, home);
            }
        }
    }

    /// Takes a reading of the run delay; `None` if its host does not tell.
    pub fn waited(&mut self, run_delay_ms: Option<u64>) {
        let Some(now_ms) = run_delay_ms else { return };
        let added_ms = now_ms.checked_sub(self.last_run_delay_ms).unwrap_or(now_ms);
        self.totals.run_delay_ms = Some(self.totals.run_delay_ms.unwrap_or(0) + added_ms);
        self.last_run_delay_ms = now_ms;
    }

    /// Records that the command started `late_ms` ago.
    pub fn command_started(&mut self, at_ms: u64, late_ms: u64) {
        self.at_command = self.totals.clone();
        self.at_arrival = self.totals.clone();
        self.arrived_ms = at_ms;
        self.late_ms = late_ms;
    }

    /// Records that the command ended `late_ms` ago. Later I/O of the VM is not the job's work.
    pub fn command_ended(&mut self, late_ms: u64) {
        self.at_exit = Some(self.totals.clone());
        self.late_ms = self.late_ms.saturating_add(late_ms);
    }

    /// Whether the totals at the command's start and end are exact enough to describe its work. They are not if
    /// the controller did not run then.
    pub fn is_sharp(&self, command_ms: u64) -> bool {
        self.late_ms <= LATE_MS_MAX.max(command_ms / 10)
    }

    /// Records that the VM is at another host, whose counters were at `before` when the VM had not arrived yet.
    /// `at_home` says for each disk whether that host is its home. There the home's own last reading is the
    /// better start, because it also served the VM at the other host.
    pub fn arrived(&mut self, now_ms: u64, progress: f64, before: &[IoStats], at_home: &[bool]) {
        self.begin_account(now_ms, progress);
        (self.last_vcpu_ms, self.last_run_delay_ms) = (0, 0);
        for (index, last) in self.last.iter_mut().enumerate() {
            let local = at_home.get(index).copied().unwrap_or(false);
            let start = before.get(index).copied();
            last.client = if local { last.home.or(start) } else { start };
        }
    }

    /// The time lost counts from here on. The VM stays where it is.
    pub fn begin_account(&mut self, now_ms: u64, progress: f64) {
        self.at_arrival = self.totals.clone();
        (self.arrived_ms, self.progress_at_arrival) = (now_ms, progress);
    }

    /// A disk's volume has another home; `here`: the host where the VM is. Another host's counters begin
    /// anywhere.
    pub fn home_moved(&mut self, index: usize, here: bool) {
        if let Some(last) = self.last.get_mut(index) {
            last.home = last.client.filter(|_| here);
        }
    }

    /// Adds what has left the site of a rented host.
    pub fn left_site(&mut self, from: HostId, bytes: u64) {
        let sum = self.left_sites.entry(from).or_default();
        *sum = sum.saturating_add(bytes);
    }

    /// Notes a move of a volume. Returns whether the move was not noted yet.
    pub fn came(&mut self, one: Came) -> bool {
        // An older controller keeps those of earlier runs.
        self.came.retain(|other| other.run == one.run);
        let same_way = |other: &&mut Came| {
            (&other.volume, &other.from, &other.to) == (&one.volume, &one.from, &one.to)
        };
        match self.came.iter_mut().find(same_way) {
            Some(known) if known.started_ms == one.started_ms => return false,
            Some(known) => {
                known.times = known.times.saturating_add(one.times);
                known.started_ms = one.started_ms;
            }
            None => self.came.push(one),
        }
        true
    }

    /// The volumes that have come in a run.
    pub fn came_in(&self, run: u32) -> impl Iterator<Item = &Came> {
        self.came.iter().filter(move |came| came.run == run)
    }

    /// The sum over all disks since the VM started.
    pub fn io(&self) -> IoStats {
        self.totals.disks.iter().fold(IoStats::default(), |sum, disk| plus(sum, disk.client))
    }
}

impl Totals {
    /// The increase since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        let disks = self.disks.iter().enumerate().map(|(index, now)| {
            let then = earlier.disks.get(index).copied().unwrap_or_default();
            DiskTotals {
                client: minus(now.client, then.client),
                home: minus(now.home, then.home),
                far_requests: now.far_requests.saturating_sub(then.far_requests),
                outage_ns: now.outage_ns.saturating_sub(then.outage_ns),
            }
        });
        let waited_ms =
            |now_ms: u64| now_ms.saturating_sub(earlier.run_delay_ms.unwrap_or_default());
        Self {
            vcpu_ms: self.vcpu_ms.saturating_sub(earlier.vcpu_ms),
            run_delay_ms: self.run_delay_ms.map(waited_ms),
            disks: disks.collect(),
        }
    }
}

impl LastSeen {
    /// The increase of the outage's duration for these counters, which were added since the last reading.
    fn outage_ns(&mut self, added: IoStats) -> u64 {
        if added.network_requests > 0 {
            self.silent_ns = 0;
            return 0;
        }
        let was_out = self.silent_ns >= OUTAGE_NS_MIN;
        self.silent_ns = self.silent_ns.saturating_add(added.network_busy_ns);
        match self.silent_ns >= OUTAGE_NS_MIN {
            true if was_out => added.network_busy_ns,
            true => self.silent_ns,
            false => 0,
        }
    }
}

fn advance(last: &mut Option<IoStats>, total: &mut IoStats, now: IoStats) {
    if let Some(before) = *last {
        // If counters have become smaller, their server was restarted.
        let restarted =
            now.reads < before.reads || now.writes < before.writes || now.busy_ns < before.busy_ns;
        *total = plus(*total, if restarted { now } else { minus(now, before) });
    }
    *last = Some(now);
}

macro_rules! each_counter {
    ($a:expr, $b:expr, $op:ident) => {
        IoStats {
            reads: $a.reads.$op($b.reads),
            read_bytes: $a.read_bytes.$op($b.read_bytes),
            read_ns: $a.read_ns.$op($b.read_ns),
            writes: $a.writes.$op($b.writes),
            write_bytes: $a.write_bytes.$op($b.write_bytes),
            write_ns: $a.write_ns.$op($b.write_ns),
            flushes: $a.flushes.$op($b.flushes),
            flush_ns: $a.flush_ns.$op($b.flush_ns),
            busy_ns: $a.busy_ns.$op($b.busy_ns),
            network_requests: $a.network_requests.$op($b.network_requests),
            network_ns: $a.network_ns.$op($b.network_ns),
            network_busy_ns: $a.network_busy_ns.$op($b.network_busy_ns),
            network_bytes: $a.network_bytes.$op($b.network_bytes),
            network_saved_bytes: $a.network_saved_bytes.$op($b.network_saved_bytes),
            replica_reads: $a.replica_reads.$op($b.replica_reads),
            fenced: $a.fenced.$op($b.fenced),
        }
    };
}

/// The sum of each counter. One that would overflow stays at its maximum.
pub fn plus(a: IoStats, b: IoStats) -> IoStats {
    each_counter!(a, b, saturating_add)
}

/// The difference of each counter; 0 where it has become smaller.
pub fn minus(a: IoStats, b: IoStats) -> IoStats {
    each_counter!(a, b, saturating_sub)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reads(reads: u64) -> IoStats {
        IoStats { reads, ..IoStats::default() }
    }

    fn reading(client: u64, home: Option<u64>) -> [Reading; 1] {
        [Reading { client: Some(reads(client)), home: home.map(reads), far: false }]
    }

    #[test]
    fn the_first_reading_counts_from_where_the_server_stood() {
        let mut meter = Meter::default();
        meter.read(0, &reading(1000, None));
        meter.read(10, &reading(1007, None));
        assert_eq!(meter.io().reads, 7);
        assert_eq!(meter.totals.vcpu_ms, 10);
    }

    #[test]
    fn a_restarted_volume_server_adds_what_it_counted_since() {
        let mut meter = Meter::default();
        meter.read(0, &reading(0, None));
        meter.read(0, &reading(50, None));
        meter.read(0, &reading(3, None));
        assert_eq!(meter.io().reads, 53);
    }

    #[test]
    fn what_is_not_known_for_a_while_is_neither_lost_nor_counted_twice() {
        let mut meter = Meter::default();
        meter.read(100, &reading(1000, Some(0)));
        meter.read(200, &reading(1050, Some(50)));
        meter.read(0, &[Reading { client: None, home: None, far: true }]);
        meter.read(0, &[]);
        meter.read(300, &reading(1060, Some(60)));
        assert_eq!(meter.io().reads, 60);
        assert_eq!(meter.totals.disks[0].home.reads, 60);
        assert_eq!(meter.totals.vcpu_ms, 300);
    }

    #[test]
    fn a_link_that_answers_nothing_for_seconds_is_out_and_not_slow() {
        let mut meter = Meter::default();
        let mut busy_s = 0;
        let mut outage_s = |waited_s: u64, answered: u64| {
            busy_s += waited_s;
            let (network_busy_ns, network_requests) = (busy_s * 1_000_000_000, answered);
            let client = IoStats { network_busy_ns, network_requests, ..IoStats::default() };
            meter.read(0, &[Reading { client: Some(client), home: None, far: true }]);
            meter.totals.disks[0].outage_ns / 1_000_000_000
        };
        assert_eq!(outage_s(0, 0), 0);
        assert_eq!(outage_s(1, 60), 0);
        assert_eq!(outage_s(1, 60), 0, "one second may be a slow answer");
        assert_eq!(outage_s(1, 60), 2);
        assert_eq!(outage_s(3, 60), 5);
        assert_eq!(outage_s(1, 61), 5);
        assert_eq!(outage_s(1, 62), 5);
    }

    #[test]
    fn requests_that_memory_answers_are_far_too() {
        let mut meter = Meter::default();
        let far = |count| [Reading { client: Some(reads(count)), home: None, far: true }];
        meter.read(0, &far(10));
        meter.read(0, &far(40));
        meter.read(0, &reading(100, None));
        assert_eq!((meter.totals.disks[0].far_requests, meter.io().reads), (30, 90));
    }

    #[test]
    fn a_migration_to_the_home_counts_no_read_twice() {
        let mut meter = Meter::default();
        meter.read(0, &reading(0, Some(100)));
        meter.read(100, &reading(40, Some(140)));
        meter.arrived(1, 0.5, &[reads(120)], &[true]);
        meter.read(20, &reading(145, Some(145)));
        assert_eq!(meter.io().reads, 45);
        assert_eq!(meter.totals.vcpu_ms, 120);
        let here = meter.totals.since(&meter.at_arrival);
        assert_eq!((here.disks[0].client.reads, here.vcpu_ms), (5, 20));
    }

    #[test]
    fn the_run_delay_is_added_up_over_hosts_and_stays_unknown_where_none_tells_it() {
        let mut meter = Meter::default();
        meter.waited(None);
        assert_eq!(meter.totals.since(&meter.at_command).run_delay_ms, None);
        meter.waited(Some(500));
        meter.command_started(1, 0);
        meter.waited(Some(700));
        meter.arrived(2, 0.0, &[], &[]);
        meter.waited(Some(50));
        // The next host's agent does not tell, and then it does again.
        meter.waited(None);
        meter.waited(Some(80));
        assert_eq!(meter.totals.since(&meter.at_command).run_delay_ms, Some(280));
        assert_eq!(meter.totals.since(&meter.at_arrival).run_delay_ms, Some(80));
    }

    #[test]
    fn a_volume_that_comes_twice_counts_twice_however_often_that_is_noted_and_only_in_its_run() {
        let mut meter = Meter::default();
        let host = |name| HostId::new(name).expect("a name");
        let came = |started_ms, run| {
            let volume = VolumeName::new("data").expect("a name");
            Came { volume, from: host("a"), to: host("b"), times: 1, started_ms, run }
        };
        let new = [(1, 0), (1, 0), (2, 0), (2, 0)].map(|(at, run)| meter.came(came(at, run)));
        assert_eq!(new, [true, false, true, false]);
        let times = |meter: &Meter, run| meter.came_in(run).map(|came| came.times).sum::<u32>();
        assert_eq!([0, 1].map(|run| times(&meter, run)), [2, 0]);
        meter.came(came(3, 1));
        assert_eq!([0, 1].map(|run| times(&meter, run)), [0, 1]);
    }
}
