//! What this machine does without any server. Every server pays these costs, so they say how far the figures of two machines can be compared.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};
use nix::unistd::getppid;
use perigee_lab::measuring::median;

use crate::process::pin_this_thread;
use crate::results::{Figure, MACHINE};

const SYSTEM_CALL: &str = "a system call that does nothing";
const CACHED_READ: &str = "a pread of 4 KiB from the page cache";
const WAKE_UP_SAME: &str = "a wake-up on the same CPU";
const WAKE_UP_ACROSS: &str = "a wake-up across two CPUs";

/// A median of so many batches is the figure.
const BATCHES: u32 = 15;
const CALLS: u32 = 20_000;
const READ_BYTES: usize = 4096;
/// The part of the file that is read; it is in the page cache after the first batch.
const SPAN_BYTES: u64 = 16 << 20;
const ROUND_TRIPS: u32 = 2000;

/// The figures in ns, or µs for wake-ups. The file has at least 16 MiB.
pub fn measure(file: &Path) -> Result<Vec<Figure>> {
    let file = File::open(file).with_context(|| format!("can't read {}", file.display()))?;
    let mut block = [0; READ_BYTES];
    let read = |number: u32| {
        // An odd factor, so that every block has its turn, and not one after the other.
        let blocks = SPAN_BYTES / READ_BYTES as u64;
        let at = u64::from(number).wrapping_mul(2_654_435_761) % blocks * READ_BYTES as u64;
        Ok(file.read_exact_at(&mut block, at)?)
    };
    let mut figures = vec![
        figure(
            SYSTEM_CALL,
            ns_each(|_| {
                getppid();
                Ok(())
            })?,
            "ns",
        ),
        figure(CACHED_READ, ns_each(read)?, "ns"),
        figure(WAKE_UP_SAME, wake_up_us(0, 0)?, "µs"),
    ];
    if thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1) {
        figures.push(figure(WAKE_UP_ACROSS, wake_up_us(0, 1)?, "µs"));
    }
    Ok(figures)
}

fn figure(name: &str, value: f64, unit: &str) -> Figure {
    Figure { name: name.into(), server: MACHINE.into(), value, unit: unit.into(), at: None }
}

/// The time of one call: the median of the batches.
fn ns_each(mut call: impl FnMut(u32) -> Result<()>) -> Result<f64> {
    let mut batches = Vec::new();
    // The first batch only warms up.
    for _ in 0..=BATCHES {
        let begun = Instant::now();
        (0..CALLS).try_for_each(&mut call)?;
        batches.push(begun.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS));
    }
    median(batches.into_iter().skip(1)).context("no batch")
}

/// Half of the time of a byte that goes to another thread and back: each of the two is asleep when its byte comes.
fn wake_up_us(own: usize, other: usize) -> Result<f64> {
    let (mut here, mut there) = UnixStream::pair()?;
    let answers = thread::spawn(move || -> std::io::Result<()> {
        pin_this_thread(other)?;
        let mut byte = [0];
        // The end of the connection ends the thread.
        while there.read(&mut byte)? == 1 {
            there.write_all(&byte)?;
        }
        Ok(())
    });
    // A thread of its own, so that the caller is not bound.
    let asks = thread::spawn(move || -> Result<f64> {
        pin_this_thread(own)?;
        let mut byte = [1];
        let mut batches = Vec::new();
        for _ in 0..=BATCHES {
            let begun = Instant::now();
            for _ in 0..ROUND_TRIPS {
                here.write_all(&byte)?;
                here.read_exact(&mut byte)?;
            }
            batches.push(begun.elapsed().as_secs_f64() * 1e6 / f64::from(2 * ROUND_TRIPS));
        }
        median(batches.into_iter().skip(1)).context("no batch")
    });
    let panicked = |panic| -> ! { std::panic::resume_unwind(panic) };
    let measured = asks.join().unwrap_or_else(|panic| panicked(panic));
    answers.join().unwrap_or_else(|panic| panicked(panic))?;
    measured
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_costs_are_measured_and_none_is_nothing() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(SPAN_BYTES).expect("its length");
        let figures = measure(file.path()).expect("figures");
        assert!(
            figures.len() >= 3 && figures.iter().all(|figure| figure.value > 0.0),
            "{figures:?}"
        );
    }

    #[test]
    fn a_file_that_is_too_short_is_an_error() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        measure(file.path()).expect_err("nothing to read");
    }
}
