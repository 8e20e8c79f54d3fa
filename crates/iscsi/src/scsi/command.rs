//! The SCSI commands of a disk, and how they are parsed (SBC-3, SPC-4). All functions are pure.

mod parse;

pub use parse::parse;

/// A range of bytes within the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    pub offset: u64,
    pub length_bytes: u64,
}

impl Range {
    /// The length of a range that is transferred.
    pub fn transfer_bytes(self) -> usize {
        usize::try_from(self.length_bytes).expect("a transfer's length was bounded")
    }
}

/// The data with which VERIFY compares the blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compare {
    /// None: the blocks must only be readable.
    Nothing,
    /// The same number of blocks from the initiator.
    Each,
    /// One block from the initiator, for all blocks.
    One,
}

/// A valid command, whose range is within the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    Read {
        range: Range,
        fua: bool,
    },
    Write {
        range: Range,
        fua: bool,
    },
    WriteVerify {
        range: Range,
        compare: bool,
    },
    Verify {
        range: Range,
        compare: Compare,
    },
    /// With `data` the initiator sends the block; otherwise zeros are written.
    WriteSame {
        range: Range,
        unmap: bool,
        data: bool,
    },
    CompareAndWrite {
        range: Range,
        fua: bool,
    },
    OrWrite {
        range: Range,
        fua: bool,
    },
    Unmap {
        list_bytes: u16,
    },
    SynchronizeCache,
    Prefetch {
        range: Range,
        immediate: bool,
    },
    LbaStatus {
        offset: u64,
        allocated_bytes: u32,
    },
    TestUnitReady,
    StartStop {
        flush: bool,
    },
    PreventAllow,
    RequestSense {
        descriptors: bool,
        allocated_bytes: u8,
    },
    Inquiry {
        page: Option<u8>,
        allocated_bytes: u16,
    },
    ReadCapacity10,
    ReadCapacity16 {
        allocated_bytes: u32,
    },
    ReadDefects {
        long: bool,
        lists: u8,
        allocated_bytes: u32,
    },
    ReportLuns {
        select: u8,
        allocated_bytes: u32,
    },
    ReportOpcodes(ReportOpcodes),
    ReportTaskManagement {
        extended: bool,
        allocated_bytes: u32,
    },
    ModeSense(ModeSense),
    ModeSelect {
        long: bool,
        list_bytes: u16,
    },
    Reserve,
    Release,
    PersistentIn {
        action: u8,
        allocated_bytes: u16,
    },
    PersistentOut {
        action: u8,
        scope_type: u8,
        list_bytes: u32,
    },
}

/// REPORT SUPPORTED OPERATION CODES (SPC-4, 6.35): all commands, or one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReportOpcodes {
    pub timeouts: bool,
    pub options: u8,
    pub opcode: u8,
    pub service_action: u16,
    pub allocated_bytes: u32,
}

/// MODE SENSE (6) or (10) (SPC-4, 6.13 and 6.14).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModeSense {
    /// The ten-byte form.
    pub long: bool,
    pub block_descriptor: bool,
    pub control: u8,
    pub page: u8,
    pub subpage: u8,
    pub allocated_bytes: u16,
}

impl Command {
    /// Number of bytes that the initiator sends with it.
    pub fn data_out_bytes(&self) -> usize {
        match *self {
            Self::Write { range, .. }
            | Self::WriteVerify { range, .. }
            | Self::OrWrite { range, .. }
            | Self::Verify { range, compare: Compare::Each } => range.transfer_bytes(),
            Self::CompareAndWrite { range, .. } => range.transfer_bytes() * 2,
            Self::Verify { range, compare: Compare::One } if range.length_bytes > 0 => 512,
            Self::WriteSame { data: true, .. } => 512,
            Self::Unmap { list_bytes } | Self::ModeSelect { list_bytes, .. } => list_bytes.into(),
            Self::PersistentOut { list_bytes, .. } => list_bytes as usize,
            _ => 0,
        }
    }

    /// Whether it reads or changes the volume's bytes.
    pub fn is_about_content(&self) -> bool {
        self.writes()
            || matches!(
                self,
                Self::Read { .. }
                    | Self::Verify { .. }
                    | Self::Prefetch { .. }
                    | Self::LbaStatus { .. }
                    | Self::SynchronizeCache
            )
    }

    /// Whether it changes the volume's bytes.
    pub fn writes(&self) -> bool {
        matches!(
            self,
            Self::Write { .. }
                | Self::WriteVerify { .. }
                | Self::WriteSame { .. }
                | Self::CompareAndWrite { .. }
                | Self::OrWrite { .. }
                | Self::Unmap { .. }
        )
    }
}
