//! Executes commands: those that are answered at once, and those that wait for the volume.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::{Bytes, BytesMut};
use perigee_block::device::{Device, IoError, Zeroing, is_within};
use perigee_block::measured::Measured;

use super::scsi::command::{Command, Compare, Range};
use super::scsi::reservations::Out;
use super::scsi::sense::Sense;
use super::scsi::{BLOCK_BYTES, Outcome, UNMAP_RANGES_MAX, inquiry, mode, report};
use super::unit::{Nexus, Unit};

/// The limit of one PRE-FETCH, which is only a hint.
const PREFETCH_BYTES_MAX: u64 = 64 << 20;
/// The longest range that one GET LBA STATUS examines.
const LBA_STATUS_BYTES_MAX: u64 = 1 << 30;
/// A pattern is written in pieces of this size.
const PATTERN_BYTES: u64 = 1 << 20;

/// The volume of a session.
#[derive(Clone)]
pub struct Disk {
    pub unit: Arc<Unit>,
    pub nexus: Arc<Nexus>,
    pub device: Arc<Measured>,
    pub read_only: bool,
}

impl Disk {
    /// The disk's present size in blocks of 512 bytes. If it is another one than at the session's last command,
    /// the session gets a unit attention.
    pub fn blocks(&self) -> u64 {
        let size_bytes = self.device.size_bytes();
        self.nexus.note_size(size_bytes);
        size_bytes / BLOCK_BYTES
    }

    fn is_protected(&self) -> bool {
        self.read_only || self.unit.write_protected.load(Ordering::Acquire)
    }

    /// Checks whether the command may run.
    ///
    /// # Errors
    /// The answer, if it may not.
    pub fn admit(&self, command: &Command) -> Result<(), Outcome> {
        let unaffected = matches!(
            command,
            Command::Inquiry { .. } | Command::ReportLuns { .. } | Command::RequestSense { .. }
        );
        if !unaffected && let Some(attention) = self.nexus.take_attention() {
            return Err(attention.into());
        }
        if command.is_about_content() && self.nexus.knows_another() {
            if self.nexus.goes_on_with_another() {
                let (volume, initiator) = (self.unit.volume(), &self.nexus.port.0);
                tracing::warn!(
                    volume,
                    initiator,
                    "a session goes on that knows another volume of this name: its reads and writes are refused until it logs out and in again"
                );
            }
            return Err(Sense::UNKNOWN_UNIT.into());
        }
        if !self.unit.allows(&self.nexus, command) {
            return Err(Outcome::Conflict);
        }
        if command.writes() && self.is_protected() {
            return Err(Sense::WRITE_PROTECTED.into());
        }
        Ok(())
    }

    /// Answers a command that does not need the volume. `None` means: use [`Self::execute`].
    pub fn answer_now(&self, command: &Command, blocks: u64) -> Option<Outcome> {
        Some(match *command {
            Command::TestUnitReady | Command::PreventAllow => Outcome::DONE,
            Command::Inquiry { .. } if self.nexus.knows_another() => return None,
            Command::Inquiry { page, allocated_bytes } => self.inquiry(page, allocated_bytes),
            Command::RequestSense { descriptors, allocated_bytes } => {
                let sense = self.nexus.take_attention().unwrap_or(Sense::NONE);
                Outcome::answer(sense.encode(descriptors), allocated_bytes)
            }
            Command::ReadCapacity10 => report::capacity_10(blocks),
            Command::ReadCapacity16 { allocated_bytes } => {
                report::capacity_16(blocks, allocated_bytes)
            }
            Command::ReadDefects { long, lists, allocated_bytes } => {
                report::defects(long, lists, allocated_bytes)
            }
            Command::ReportLuns { select, allocated_bytes } => {
                report::luns(select, allocated_bytes)
            }
            Command::ReportOpcodes(ref asked) => report::opcodes(asked),
            Command::ReportTaskManagement { extended, allocated_bytes } => {
                report::task_management(extended, allocated_bytes)
            }
            Command::ModeSense(ref asked) => {
                mode::sense(asked, self.unit.settings(), self.is_protected(), blocks)
            }
            Command::Reserve => self.unit.reserve(&self.nexus),
            Command::Release => {
                self.unit.release(&self.nexus);
                Outcome::DONE
            }
            Command::PersistentIn { action, allocated_bytes } => {
                self.unit.report_reservations(action, allocated_bytes)
            }
            _ => return None,
        })
    }

    fn inquiry(&self, page: Option<u8>, allocated_bytes: u16) -> Outcome {
        let Some(page) = page else {
            return Outcome::answer(inquiry::standard(true), allocated_bytes);
        };
        match inquiry::page(page, &self.unit.identity) {
            Ok(data) => Outcome::answer(data, allocated_bytes),
            Err(sense) => sense.into(),
        }
    }

    /// Writes into the page cache, directly from the received bytes.
    pub fn try_write(&self, range: Range, data: &[u8]) -> Option<Result<(), IoError>> {
        let _order = self.unit.order.try_read().ok()?;
        self.device.try_write(range.offset, data)
    }

    /// Runs a command whose data has fully arrived.
    pub async fn execute(&self, command: Command, data: Bytes) -> Outcome {
        let writes = command.writes();
        let done = match command {
            Command::Read { range, fua } => self.read(range, fua).await,
            Command::Write { range, fua } => self.write(range, data, fua).await,
            Command::WriteVerify { range, compare } => {
                match self.write(range, data.clone(), true).await {
                    Ok(Outcome::Good(_)) if compare => {
                        self.verify(range, Compare::Each, data).await
                    }
                    other => other,
                }
            }
            Command::Verify { range, compare } => self.verify(range, compare, data).await,
            Command::WriteSame { range, unmap, .. } => self.write_same(range, data, unmap).await,
            Command::CompareAndWrite { range, fua } => {
                self.compare_and_write(range, data, fua).await
            }
            Command::OrWrite { range, fua } => self.or_write(range, data, fua).await,
            Command::Unmap { .. } => self.unmap(&data).await,
            Command::SynchronizeCache | Command::StartStop { flush: true } => {
                self.device.flush().await.map(|()| Outcome::DONE)
            }
            Command::Prefetch { range, .. } => {
                let length_bytes = range.length_bytes.min(PREFETCH_BYTES_MAX);
                self.device.prefetch(range.offset, length_bytes).await.map(|()| Outcome::DONE)
            }
            Command::LbaStatus { offset, allocated_bytes } => {
                let rest = self.device.size_bytes().saturating_sub(offset);
                let ahead = rest.min(LBA_STATUS_BYTES_MAX);
                let extents = self.device.extents(offset, ahead).await;
                extents.map(|extents| report::lba_status(offset, &extents, allocated_bytes))
            }
            Command::ModeSelect { long, .. } => Ok(self.mode_select(&data, long)),
            Command::PersistentOut { action, scope_type, .. } => {
                match Out::parse(action, scope_type, &data) {
                    Ok(out) => Ok(self.unit.change_reservations(&self.nexus, &out).await),
                    Err(sense) => Ok(sense.into()),
                }
            }
            Command::StartStop { flush: false } => Ok(Outcome::DONE),
            // The first one of an initiator that knew another unit of this name.
            Command::Inquiry { page, allocated_bytes } => {
                self.unit.get_known(&self.nexus).await;
                Ok(self.inquiry(page, allocated_bytes))
            }
            // These are answered at once or unknown. They must never count as done.
            _ => Ok(Sense::INVALID_OPCODE.into()),
        };
        done.unwrap_or_else(|error| Sense::of(&error, writes).into())
    }

    async fn read(&self, range: Range, fua: bool) -> Result<Outcome, IoError> {
        if fua {
            // FUA reads from the medium, so unwritten data has to be flushed first.
            self.device.flush().await?;
        }
        self.get(range).await.map(Outcome::Good)
    }

    async fn get(&self, range: Range) -> Result<Bytes, IoError> {
        if range.length_bytes == 0 {
            return Ok(Bytes::new());
        }
        let length = u32::try_from(range.length_bytes).expect("a transfer's length was bounded");
        self.device.read(range.offset, length).await
    }

    async fn write(&self, range: Range, data: Bytes, fua: bool) -> Result<Outcome, IoError> {
        let _order = self.unit.order.read().await;
        self.device.write(range.offset, data, fua).await?;
        Ok(Outcome::DONE)
    }

    async fn verify(&self, range: Range, how: Compare, data: Bytes) -> Result<Outcome, IoError> {
        let found = self.get(range).await?;
        let block = data.len().max(1);
        let differs = match how {
            Compare::Nothing => None,
            Compare::Each => first_difference(&found, &data),
            Compare::One => (0_u64..).zip(found.chunks(block)).find_map(|(number, piece)| {
                first_difference(piece, &data).map(|at| number * BLOCK_BYTES + at)
            }),
        };
        Ok(differs.map_or(Outcome::DONE, |at| Sense::miscompare(at).into()))
    }

    async fn write_same(
        &self,
        range: Range,
        block: Bytes,
        unmap: bool,
    ) -> Result<Outcome, IoError> {
        let _order = self.unit.order.read().await;
        let Range { offset, length_bytes } = range;
        if block.iter().all(|byte| *byte == 0) {
            // Without a block from the initiator, zeros are written, and they need no space.
            let free = unmap || block.is_empty();
            let how = if free { Zeroing::FreeSpace } else { Zeroing::KeepSpace };
            self.device.zero(offset, length_bytes, how, false).await?;
            return Ok(Outcome::DONE);
        }
        let piece_bytes = usize::try_from(length_bytes.min(PATTERN_BYTES)).expect("1 MiB at most");
        let pattern = Bytes::from(block.repeat(piece_bytes / block.len()));
        let mut done = 0;
        while done < length_bytes {
            let piece_bytes = (length_bytes - done).min(PATTERN_BYTES);
            let piece = pattern.slice(..usize::try_from(piece_bytes).expect("1 MiB at most"));
            self.device.write(offset + done, piece, false).await?;
            done += piece_bytes;
        }
        Ok(Outcome::DONE)
    }

    /// No other write comes between the comparison and the write. The flush comes after the lock is released,
    /// because it would delay other writes for a long time.
    async fn compare_and_write(
        &self,
        range: Range,
        data: Bytes,
        fua: bool,
    ) -> Result<Outcome, IoError> {
        let (expected, new) = (data.slice(..data.len() / 2), data.slice(data.len() / 2..));
        let order = self.unit.order.write().await;
        if let Some(at) = first_difference(&self.get(range).await?, &expected) {
            return Ok(Sense::miscompare(at).into());
        }
        self.device.write(range.offset, new, false).await?;
        drop(order);
        self.flush_if(fua).await
    }

    async fn or_write(&self, range: Range, data: Bytes, fua: bool) -> Result<Outcome, IoError> {
        let order = self.unit.order.write().await;
        let mut merged = BytesMut::from(self.get(range).await?);
        merged.iter_mut().zip(&data).for_each(|(old, new)| *old |= new);
        self.device.write(range.offset, merged.freeze(), false).await?;
        drop(order);
        self.flush_if(fua).await
    }

    async fn flush_if(&self, fua: bool) -> Result<Outcome, IoError> {
        if fua {
            self.device.flush().await?;
        }
        Ok(Outcome::DONE)
    }

    async fn unmap(&self, list: &[u8]) -> Result<Outcome, IoError> {
        let ranges = match unmap_ranges(list, self.device.size_bytes()) {
            Ok(ranges) => ranges,
            Err(sense) => return Ok(sense.into()),
        };
        let _order = self.unit.order.read().await;
        for Range { offset, length_bytes } in ranges {
            self.device.zero(offset, length_bytes, Zeroing::FreeSpace, false).await?;
        }
        Ok(Outcome::DONE)
    }

    fn mode_select(&self, list: &[u8], long: bool) -> Outcome {
        match mode::select(list, long, self.unit.settings()) {
            Ok(settings) => {
                self.unit.set(&self.nexus, settings);
                Outcome::DONE
            }
            Err(sense) => sense.into(),
        }
    }
}

/// Checks all ranges before the first one is unmapped.
fn unmap_ranges(list: &[u8], size_bytes: u64) -> Result<Vec<Range>, Sense> {
    const HEADER_BYTES: usize = 8;
    const RANGE_BYTES: usize = 16;
    if list.is_empty() {
        return Ok(Vec::new());
    }
    let header = list.get(..HEADER_BYTES).ok_or(Sense::PARAMETER_LIST_LENGTH)?;
    let said = usize::from(u16::from_be_bytes([header[2], header[3]]));
    let descriptors = &list[HEADER_BYTES..];
    let descriptors = &descriptors[..said.min(descriptors.len())];
    if descriptors.len() / RANGE_BYTES > usize::from(UNMAP_RANGES_MAX) {
        return Err(Sense::INVALID_PARAMETER);
    }
    let mut ranges = Vec::new();
    for descriptor in descriptors.chunks_exact(RANGE_BYTES) {
        let first = u64::from_be_bytes(descriptor[..8].try_into().expect("eight"));
        let count = u32::from_be_bytes(descriptor[8..12].try_into().expect("four"));
        if !is_within(size_bytes / BLOCK_BYTES, first, count.into()) {
            return Err(Sense::LBA_OUT_OF_RANGE);
        }
        if count > 0 {
            let length_bytes = u64::from(count) * BLOCK_BYTES;
            ranges.push(Range { offset: first * BLOCK_BYTES, length_bytes });
        }
    }
    Ok(ranges)
}

fn first_difference(found: &[u8], expected: &[u8]) -> Option<u64> {
    if found == expected {
        return None;
    }
    (0..).zip(found.iter().zip(expected)).find(|(_, (a, b))| a != b).map(|(at, _)| at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(ranges: &[(u64, u32)]) -> Vec<u8> {
        let said = u16::try_from(ranges.len() * 16).expect("a few");
        let mut list = (said + 6).to_be_bytes().to_vec();
        list.extend(said.to_be_bytes());
        list.extend([0; 4]);
        for (first, count) in ranges {
            list.extend(first.to_be_bytes());
            list.extend(count.to_be_bytes());
            list.extend([0; 4]);
        }
        list
    }

    #[test]
    fn ranges_to_unmap_lie_within_the_volume() {
        let range =
            |first: u64, count: u64| Range { offset: first * 512, length_bytes: count * 512 };
        let size_bytes = 100 * 512;
        assert_eq!(unmap_ranges(&[], size_bytes), Ok(vec![]));
        let two = unmap_ranges(&list(&[(0, 8), (99, 1), (5, 0)]), size_bytes);
        assert_eq!(two, Ok(vec![range(0, 8), range(99, 1)]));
        assert_eq!(
            unmap_ranges(&list(&[(0, 8), (99, 2)]), size_bytes),
            Err(Sense::LBA_OUT_OF_RANGE)
        );
        assert_eq!(unmap_ranges(&list(&[(u64::MAX, 1)]), size_bytes), Err(Sense::LBA_OUT_OF_RANGE));
        assert_eq!(unmap_ranges(&[0; 7], size_bytes), Err(Sense::PARAMETER_LIST_LENGTH));
        let many = vec![(0, 1); 257];
        assert_eq!(unmap_ranges(&list(&many), size_bytes), Err(Sense::INVALID_PARAMETER));
    }

    #[test]
    fn the_first_byte_that_differs_is_found() {
        assert_eq!(first_difference(b"abcd", b"abcd"), None);
        assert_eq!(first_difference(b"abcd", b"abxd"), Some(2));
    }
}
