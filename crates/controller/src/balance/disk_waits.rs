//! What VMs without a job did with their disks between the last two reports that looks have seen.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use perigee_model::{HostId, VmId, VolumeName};

use crate::meter::{Meter, Reading, Totals};

/// A VM at a host. Another host's counters begin anywhere.
pub type At = (VmId, HostId);

/// A disk and its home.
pub type Disk = (VolumeName, HostId);

/// What was done in some time.
#[derive(Debug, Clone, PartialEq)]
pub struct Done {
    /// Above 0.
    pub wall_s: f64,
    /// For each disk, in their order.
    pub totals: Totals,
}

#[derive(Debug)]
struct Seen {
    at: Instant,
    disks: Vec<Disk>,
    meter: Meter,
    /// Between the last two reports; `None` after the first one.
    done: Option<Done>,
}

/// What the reports were at the last looks.
#[derive(Debug, Default)]
pub struct DiskWaits {
    seen: BTreeMap<At, Seen>,
    noted: BTreeSet<At>,
}

impl DiskWaits {
    /// Notes a report of a VM: when it was made, the CPU time of its vCPUs in ms, and the counters of its disks. Returns what was done since
    /// the report before. `None` if that is not known: it is the first report, the disks or their homes are others, or a volume server
    /// did not answer, whose figures the next report has.
    pub fn note(
        &mut self,
        of: At,
        at: Instant,
        vcpu_ms: u64,
        disks: &[(Disk, Reading)],
    ) -> Option<Done> {
        self.noted.insert(of.clone());
        let names = disks.iter().map(|(disk, _)| disk);
        let readings: Vec<Reading> = disks.iter().map(|(_, reading)| *reading).collect();
        let is_whole = |one: &Reading| one.client.is_some() && one.home.is_some();
        let known = self.seen.get_mut(&of).filter(|seen| seen.disks.iter().eq(names.clone()));
        if let Some(seen) = known
            && at >= seen.at
        {
            if at == seen.at || !readings.iter().all(is_whole) {
                return seen.done.clone().filter(|_| at == seen.at);
            }
            let before = seen.meter.totals.clone();
            seen.meter.read(vcpu_ms, &readings);
            let wall_s = (at - seen.at).as_secs_f64();
            seen.at = at;
            seen.done = Some(Done { wall_s, totals: seen.meter.totals.since(&before) });
            return seen.done.clone();
        }
        self.seen.remove(&of);
        if readings.iter().all(is_whole) {
            let mut meter = Meter::default();
            meter.read(vcpu_ms, &readings);
            let disks = names.cloned().collect();
            self.seen.insert(of, Seen { at, disks, meter, done: None });
        }
        None
    }

    /// Forgets the VMs that were not noted since the look before.
    pub fn end_look(&mut self) {
        let noted = std::mem::take(&mut self.noted);
        self.seen.retain(|of, _| noted.contains(of));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use perigee_model::volume::IoStats;

    use super::*;

    fn at(host: &str) -> At {
        ("web".parse().expect("a name"), host.parse().expect("a name"))
    }

    fn disk(home: &str, busy_s: u64) -> (Disk, Reading) {
        let stats = IoStats { network_busy_ns: busy_s * 1_000_000_000, ..IoStats::default() };
        let disk = ("data".parse().expect("a name"), home.parse().expect("a name"));
        (disk, Reading { client: Some(stats), home: Some(stats), far: true })
    }

    #[test]
    fn what_was_done_is_of_the_time_between_two_reports_and_not_known_before() {
        let (mut waits, begun) = (DiskWaits::default(), Instant::now());
        let after = |s| begun + Duration::from_secs(s);
        let mut note = |host: &str, s, vcpu_ms, disk| {
            let done = waits.note(at(host), after(s), vcpu_ms, &[disk]);
            if s == 30 {
                waits.end_look();
                waits.end_look();
            }
            done.map(|done| {
                let busy_s = done.totals.disks[0].client.network_busy_ns / 1_000_000_000;
                (done.wall_s, done.totals.vcpu_ms, busy_s)
            })
        };
        assert_eq!(note("home1", 0, 100, disk("cloud1", 5)), None);
        assert_eq!(note("home1", 10, 300, disk("cloud1", 7)), Some((10.0, 200, 2)));
        assert_eq!(note("home1", 10, 300, disk("cloud1", 7)), Some((10.0, 200, 2)), "no new one");
        let silent = |(of, reading): (Disk, Reading)| (of, Reading { home: None, ..reading });
        assert_eq!(note("home1", 15, 400, silent(disk("cloud1", 8))), None, "its home is silent");
        assert_eq!(note("home1", 20, 500, disk("cloud1", 9)), Some((10.0, 200, 2)), "of both");
        assert_eq!(note("home1", 25, 600, disk("cloud2", 9)), None, "another home");
        assert_eq!(note("home2", 30, 600, disk("cloud2", 9)), None, "another host");
        assert_eq!(note("home2", 35, 600, disk("cloud2", 9)), None, "it was forgotten");
    }
}
