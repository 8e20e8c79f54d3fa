//! Entries for the fuzz targets, with bytes that a guest or its QEMU could send.

use perigee_model::guest::LINE_BYTES_MAX;

use crate::guest;
use crate::lines::next_line;
use crate::qmp;

/// Bytes from a guest's port: lines, messages, and which of them are stored.
pub fn guest_channel(input: &[u8]) {
    let Some((first, input)) = input.split_first() else { return };
    let mut intake = guest::Intake::new(u64::from(first >> 1), first & 1 == 1);
    each_line(input, LINE_BYTES_MAX, |line| {
        let Ok(message) = guest::parse(line) else { return false };
        if let Some(message) = message {
            intake.judge(message.seq);
        }
        true
    });
}

/// Bytes from QEMU's monitor.
pub fn qmp(input: &[u8]) {
    each_line(input, qmp::LINE_BYTES_MAX, |line| {
        qmp::read_line(line);
        true
    });
}

/// Until one of them ends the connection.
fn each_line(mut input: &[u8], bytes_max: usize, mut each: impl FnMut(&[u8]) -> bool) {
    use futures_util::FutureExt;
    let mut partial = Vec::new();
    // A slice never waits.
    while let Some(Ok(Some(line))) = next_line(&mut input, &mut partial, bytes_max).now_or_never() {
        assert!(line.len() <= bytes_max);
        if !each(&line) {
            return;
        }
    }
}
