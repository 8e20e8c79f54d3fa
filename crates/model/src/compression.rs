//! Decides which reads from another host are sent compressed. No I/O and no clock.
//!
//! Compression pays where it saves clearly more time on the link than both ends spend on it. For each byte:
//!
//! ```text
//! (1 - ratio) x time on the link  >  GAIN_MIN x (time to compress + time to decompress)
//! ```
//!
//! All of this is measured: the link by the bytes that arrive, the ratio by what was compressed, and the work by the
//! time that it took, which grows when the CPUs are busy. Compression may not pay now, and yet pay on this link with
//! other data or idle CPUs. Then a few reads try it again.

use std::time::Duration;

/// Compression must save this many times the time that it takes, because VMs need the CPUs too.
const GAIN_MIN: f64 = 2.0;
/// Compression is tried only where it would pay with this ratio and [`WORK_S_PER_BYTE`].
const RATIO_HOPED: f64 = 0.25;
/// While compression does not pay, one of this many reads tries it.
const TRIED_ONE_OF: u32 = 32;
/// The time to compress and decompress one byte on idle CPUs.
const WORK_S_PER_BYTE: f64 = 5e-9;
/// A mean over fewer bytes is not used.
const KNOWN_BYTES: f64 = 64.0 * 1024.0;
/// After this many bytes, what was measured before counts half.
const REMEMBERED_BYTES: f64 = 2.0 * 1024.0 * 1024.0;
/// Compression saves nothing on shorter reads.
const READ_BYTES_MIN: u32 = 4096;

/// What was measured on the link to another host.
#[derive(Debug, Default)]
pub struct Compression {
    link_s: PerByte,
    compressed_bytes: PerByte,
    work_s: PerByte,
    untried: u32,
}

/// The mean of an amount for each byte, over the last bytes.
#[derive(Debug, Default)]
struct PerByte {
    amount: f64,
    bytes: f64,
}

impl PerByte {
    fn note(&mut self, amount: f64, bytes: u64) {
        if self.bytes > REMEMBERED_BYTES {
            self.amount /= 2.0;
            self.bytes /= 2.0;
        }
        self.amount += amount;
        self.bytes += bytes as f64;
    }

    fn known(&self) -> Option<f64> {
        (self.bytes >= KNOWN_BYTES).then(|| self.amount / self.bytes)
    }
}

impl Compression {
    /// Records that bytes came over the link in this time, from the first to the last.
    pub fn note_arrival(&mut self, bytes: u64, elapsed: Duration) {
        self.link_s.note(elapsed.as_secs_f64(), bytes);
    }

    /// Records a read that was compressed, and the time that both ends spent on it.
    pub fn note_compressed(&mut self, bytes: u64, compressed_bytes: u64, work: Duration) {
        self.compressed_bytes.note(compressed_bytes as f64, bytes);
        self.work_s.note(work.as_secs_f64(), bytes);
    }

    /// Records a read whose bytes did not become fewer.
    pub fn note_incompressible(&mut self, bytes: u64) {
        self.compressed_bytes.note(bytes as f64, bytes);
    }

    /// Whether the next read is to be compressed.
    pub fn wants(&mut self, read_bytes: u32) -> bool {
        let Some(link_s) = self.link_s.known().filter(|_| read_bytes >= READ_BYTES_MIN) else {
            return false;
        };
        let pays = |ratio: f64, work_s: f64| (1.0 - ratio) * link_s > GAIN_MIN * work_s;
        let work_s = self.work_s.known().unwrap_or(WORK_S_PER_BYTE);
        if self.compressed_bytes.known().is_some_and(|ratio| pays(ratio, work_s)) {
            return true;
        }
        if !pays(RATIO_HOPED, WORK_S_PER_BYTE) {
            return false;
        }
        self.untried += 1;
        // Until the ratio is known, each read tries it.
        let tries = self.compressed_bytes.known().is_none() || self.untried >= TRIED_ONE_OF;
        if tries {
            self.untried = 0;
        }
        tries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: u32 = 128 << 10;

    /// What is known after some reads over a link, all of which were compressed to this ratio.
    fn after_reads(bytes_per_s: f64, ratio_percent: u64, work_s_per_byte: f64) -> Compression {
        let mut known = Compression::default();
        for _ in 0..100 {
            let bytes = f64::from(READ);
            let elapsed = Duration::from_secs_f64(bytes / bytes_per_s);
            known.note_arrival(READ.into(), elapsed);
            let work = Duration::from_secs_f64(work_s_per_byte * bytes);
            known.note_compressed(READ.into(), u64::from(READ) * ratio_percent / 100, work);
        }
        known
    }

    fn wanted(known: &mut Compression) -> usize {
        (0..320).filter(|_| known.wants(READ)).count()
    }

    #[test]
    fn a_thin_link_is_spared_and_a_fast_one_is_not() {
        assert_eq!(wanted(&mut after_reads(12e6, 50, 5e-9)), 320);
        assert_eq!(wanted(&mut after_reads(1e9, 50, 5e-9)), 0);
        assert_eq!(wanted(&mut Compression::default()), 0, "nothing is known");
    }

    #[test]
    fn data_that_cannot_be_compressed_are_only_tried_now_and_then() {
        let mut known = after_reads(12e6, 99, 5e-9);
        assert_eq!(wanted(&mut known), 10);
        for _ in 0..200 {
            known.note_compressed(READ.into(), u64::from(READ) / 4, Duration::from_micros(600));
        }
        assert_eq!(wanted(&mut known), 320, "they have become other data");
    }

    #[test]
    fn busy_cpus_end_it_until_they_are_idle_again() {
        let mut known = after_reads(12e6, 50, 1e-7);
        assert_eq!(wanted(&mut known), 10, "it is tried now and then");
        for _ in 0..100 {
            known.note_compressed(READ.into(), u64::from(READ) / 2, Duration::from_micros(600));
        }
        assert_eq!(wanted(&mut known), 320);
    }

    #[test]
    fn short_reads_are_never_compressed() {
        assert!(!after_reads(1e6, 10, 5e-9).wants(512));
    }
}
