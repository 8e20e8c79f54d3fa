//! For how much of the time VMs wait for disks whose home is another host.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use perigee_model::{HostId, VmId, VolumeName};

/// A disk of a VM at a host.
pub type Disk = (VmId, HostId, VolumeName);

#[derive(Debug, Clone, Copy)]
struct Seen {
    at: Instant,
    busy_ns: u64,
    /// Between the last two reports; `None` after the first one.
    share: Option<f64>,
}

/// What the reports of disks' waits were at the last looks.
#[derive(Debug, Default)]
pub struct DiskWaits {
    seen: BTreeMap<Disk, Seen>,
    noted: BTreeSet<Disk>,
}

impl DiskWaits {
    /// Notes the time in which requests to another host were in flight, in ns since some moment, as it was reported. Returns the share of the
    /// time since the report before, 0 to 1; `None` if that is not known.
    pub fn note(&mut self, disk: Disk, at: Instant, busy_ns: u64) -> Option<f64> {
        self.noted.insert(disk.clone());
        let last = self.seen.get(&disk).copied();
        let share = match last {
            Some(last) if last.at == at => return last.share,
            // The counter begins anew with its volume server.
            Some(last) if busy_ns >= last.busy_ns && at > last.at => {
                let busy_s = (busy_ns - last.busy_ns) as f64 / 1e9;
                Some((busy_s / (at - last.at).as_secs_f64()).min(1.0))
            }
            _ => None,
        };
        self.seen.insert(disk, Seen { at, busy_ns, share });
        share
    }

    /// Forgets the disks that were not noted since the look before.
    pub fn end_look(&mut self) {
        let noted = std::mem::take(&mut self.noted);
        self.seen.retain(|disk, _| noted.contains(disk));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn disk(host: &str) -> Disk {
        let (vm, volume) = ("web".parse().expect("a name"), "data".parse().expect("a name"));
        (vm, host.parse().expect("a name"), volume)
    }

    #[test]
    fn the_share_is_of_the_time_between_two_reports_and_not_known_before() {
        let (mut waits, begun) = (DiskWaits::default(), Instant::now());
        let at = |s| begun + Duration::from_secs(s);
        assert_eq!(waits.note(disk("home1"), at(0), 5_000_000_000), None);
        assert_eq!(waits.note(disk("home1"), at(10), 7_500_000_000), Some(0.25));
        assert_eq!(waits.note(disk("home1"), at(10), 7_500_000_000), Some(0.25), "no new report");
        assert_eq!(waits.note(disk("home1"), at(20), 0), None, "its volume server began anew");
        assert_eq!(waits.note(disk("home1"), at(21), 9_000_000_000), Some(1.0), "never more");
        assert_eq!(waits.note(disk("home2"), at(22), 9_000_000_000), None, "another host");
        waits.end_look();
        waits.end_look();
        assert_eq!(waits.note(disk("home1"), at(23), 9_000_000_000), None, "it was forgotten");
    }
}
