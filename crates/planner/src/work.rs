//! The I/O of a job on a volume, according to the counters.

use crate::facts::DiskFacts;
use crate::network::{latencies_s, mean_latency_us, seconds};

/// The I/O of the job on one volume.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct VolumeWork {
    pub reads: f64,
    pub writes: f64,
    pub flushes: f64,
    /// The bytes that it moves over a network, without those that compression keeps off it.
    pub bytes: f64,
    /// The sum of the requests' latencies, and the time with at least one in flight, as measured at the VM.
    /// Their ratio over all runs is the queue depth. A run at a slow disk shows how many requests the job keeps
    /// in flight, so runs count by their time.
    pub latencies_s: f64,
    pub busy_s: f64,
    /// The mean latency of a request at the volume's home.
    pub home_latency_us: f64,
}

impl VolumeWork {
    /// Of all kinds together.
    pub fn requests(&self) -> f64 {
        self.reads + self.writes + self.flushes
    }

    /// The mean number of requests in flight while there is at least one; 1 if nothing was measured.
    pub fn queue_depth(&self) -> f64 {
        if self.busy_s > 0.0 { (self.latencies_s / self.busy_s).max(1.0) } else { 1.0 }
    }

    /// The seconds in which a request is in flight when the VM runs at the volume's home.
    pub(crate) fn home_s(&self) -> f64 {
        self.requests() * self.home_latency_us / 1e6 / self.queue_depth()
    }

    pub(crate) fn learn(disk: &DiskFacts) -> Self {
        let client = &disk.client;
        let saved_bytes = client.network_saved_bytes as f64;
        Self {
            reads: client.reads as f64,
            writes: client.writes as f64,
            flushes: client.flushes as f64,
            bytes: ((client.read_bytes + client.write_bytes) as f64 - saved_bytes).max(0.0),
            latencies_s: latencies_s(client),
            busy_s: seconds(client.busy_ns),
            home_latency_us: mean_latency_us(&disk.at_home),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::disk;

    #[test]
    fn bytes_that_compression_kept_off_the_network_do_not_count() {
        let mut disk = disk("data", "home1", 1000, 1, true);
        let all = VolumeWork::learn(&disk).bytes;
        disk.client.network_saved_bytes = disk.client.network_bytes / 4;
        assert_eq!(VolumeWork::learn(&disk).bytes, all * 0.75);
        // What was read ahead was compressed, too.
        disk.client.network_saved_bytes = disk.client.network_bytes * 2;
        assert_eq!(VolumeWork::learn(&disk).bytes, 0.0);
    }
}
