//! What is at a target (docs/dev/backup.md). All numbers of a piece are little endian.
//!
//! | key | |
//! |---|---|
//! | `perigee-backups` | [`MARKER`]: a target of this format |
//! | `backups/NAME` | [`Manifest`], written last: a backup exists when this does |
//! | `layers/UUID/index` | [`LayerIndex`], written after all pieces of the layer and after the index of its parent |
//! | `layers/UUID/NNNNNNNN-SHA256` | a piece: some runs of the layer's blocks with their bytes |

use std::ops::Range;

use perigee_http::certificate::hex;
use perigee_model::backup::VmBackup;
use perigee_model::volume::BLOCK_BYTES;
use perigee_model::{BackupName, ImageName, LayerId, TenantName, VolumeName};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// The version of the format, which is the only one so far.
pub const FORMAT: u32 = 1;
/// The key of the file that shows that a directory or prefix is a target.
pub const MARKER_KEY: &str = "perigee-backups";
/// Its content.
pub const MARKER: &[u8] = b"backups of Perigee, format 1\n";
/// Below it are the manifests.
pub const MANIFESTS: &str = "backups";

const MAGIC: [u8; 8] = *b"PERIGEEB";
const HEADER_BYTES: usize = 16;
const RUN_BYTES: usize = 16;
/// A piece has at most so many bytes of blocks.
pub const PIECE_DATA_BYTES: usize = 16 << 20;
/// A piece has at most so many runs.
const RUNS_MAX: usize = 1 << 16;
/// No head of a piece is larger.
pub const HEAD_BYTES_MAX: u64 = (HEADER_BYTES + RUNS_MAX * RUN_BYTES) as u64;
/// No piece is larger.
pub const PIECE_BYTES_MAX: u64 = (HEADER_BYTES + RUNS_MAX * RUN_BYTES + PIECE_DATA_BYTES) as u64;
/// No manifest, and no index of a layer, is larger.
pub const LIST_BYTES_MAX: u64 = 64 << 20;
/// No backup has more layers.
pub const LAYERS_MAX: usize = 10_000;

const BLOCK: usize = 4096;

pub fn manifest_key(name: &BackupName) -> String {
    format!("{MANIFESTS}/{name}")
}

/// Below it are the layers.
pub const LAYERS: &str = "layers";

pub fn layer_prefix(layer: LayerId) -> String {
    format!("layers/{layer}")
}

pub fn index_key(layer: LayerId) -> String {
    format!("layers/{layer}/index")
}

/// The last part of a piece's key.
pub fn piece_name(number: usize, sha256: &str) -> String {
    format!("{number:08}-{sha256}")
}

pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// A backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    pub format: u32,
    pub name: BackupName,
    /// The volume; of an image its name, which older versions read as a volume's.
    pub volume: VolumeName,
    /// The image that it is of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageName>,
    /// Whose volume or image it was.
    pub tenant: TenantName,
    /// When the volume was sealed; Unix time.
    pub taken_ms: u64,
    /// The size of the disk that a client sees.
    pub size_bytes: u64,
    /// What it shows may not leave the site where it was.
    #[serde(default)]
    pub confined: bool,
    /// How pieces are encrypted; `None`: not at all, which is the only way so far.
    #[serde(default)]
    pub encryption: Option<String>,
    /// The VM whose root disk it is, and its other disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<Box<VmBackup>>,
    /// From the top down.
    pub layers: Vec<NamedLayer>,
}

impl Manifest {
    /// The data of all its layers.
    pub fn data_bytes(&self) -> u64 {
        let bytes = self.layers.iter().map(|layer| layer.data_bytes);
        bytes.fold(0, u64::saturating_add)
    }
}

/// A layer of a backup, as the manifest names it: for whoever counts what a target needs. A reader begins with the topmost one, and follows the indexes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedLayer {
    pub layer: LayerId,
    pub data_bytes: u64,
}

/// What a layer itself has. The same layer may stand on others at one host, and have all that it shows at another one, so the index says on what it stands here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerIndex {
    pub format: u32,
    pub layer: LayerId,
    pub size_bytes: u64,
    pub parent: Option<LayerId>,
    pub data_bytes: u64,
    /// In the order of their blocks.
    pub pieces: Vec<Piece>,
}

/// A piece, as the index names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    pub bytes: u64,
    pub sha256: String,
    /// What is read to know which blocks the piece has; `None`: an older version has shipped it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head: Option<PieceHead>,
}

/// The beginning of a piece, before the bytes of its blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PieceHead {
    pub bytes: u64,
    pub sha256: String,
}

/// A list with its checksum: a line of JSON, and a line with the SHA-256 of that line.
pub fn with_checksum(list: &impl Serialize) -> Result<Vec<u8>, serde_json::Error> {
    let mut bytes = serde_json::to_vec(list)?;
    let sum = sha256(&bytes);
    bytes.push(b'\n');
    bytes.extend(sum.into_bytes());
    bytes.push(b'\n');
    Ok(bytes)
}

/// The list, if its checksum is right.
///
/// # Errors
/// Why it can't be used.
pub fn checked<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    let mut lines = bytes.split(|byte| *byte == b'\n');
    let (Some(list), Some(sum), Some([]), None) =
        (lines.next(), lines.next(), lines.next(), lines.next())
    else {
        return Err("it is cut off or damaged".to_owned());
    };
    if sha256(list).as_bytes() != sum {
        return Err("it differs from its checksum".to_owned());
    }
    serde_json::from_slice(list).map_err(|error| format!("it can't be understood: {error}"))
}

/// Blocks of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    pub blocks: Range<u64>,
    /// They are zeros, and have no bytes.
    pub is_zero: bool,
}

/// Adds blocks behind those that are there, as one run with the last if they continue it.
pub fn push(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.is_zero == run.is_zero && last.blocks.end == run.blocks.start => {
            last.blocks.end = run.blocks.end;
        }
        _ => runs.push(run),
    }
}

impl Run {
    pub fn length_bytes(&self) -> u64 {
        (self.blocks.end - self.blocks.start) * BLOCK_BYTES
    }
}

/// A piece that is being filled. Equal layers give equal pieces.
#[derive(Debug, Default)]
pub struct PieceBuilder {
    runs: Vec<Run>,
    data: Vec<u8>,
}

impl PieceBuilder {
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    pub fn is_full(&self) -> bool {
        self.runs.len() == RUNS_MAX || self.data.len() == PIECE_DATA_BYTES
    }

    /// The bytes of its blocks.
    pub fn data_bytes(&self) -> u64 {
        self.data.len() as u64
    }

    /// How many bytes of blocks still fit.
    pub fn room_bytes(&self) -> usize {
        PIECE_DATA_BYTES - self.data.len()
    }

    pub fn zeros(&mut self, blocks: Range<u64>) {
        self.add(blocks, true);
    }

    pub fn data(&mut self, first_block: u64, bytes: &[u8]) {
        assert!(bytes.len().is_multiple_of(BLOCK) && bytes.len() <= self.room_bytes());
        self.data.extend_from_slice(bytes);
        self.add(first_block..first_block + (bytes.len() / BLOCK) as u64, false);
    }

    fn add(&mut self, blocks: Range<u64>, is_zero: bool) {
        push(&mut self.runs, Run { blocks, is_zero });
    }

    pub fn finish(self) -> Vec<u8> {
        let runs = u32::try_from(self.runs.len()).expect("a piece has few runs");
        let mut bytes =
            Vec::with_capacity(HEADER_BYTES + self.runs.len() * RUN_BYTES + self.data.len());
        bytes.extend(MAGIC);
        bytes.extend(FORMAT.to_le_bytes());
        bytes.extend(runs.to_le_bytes());
        for run in &self.runs {
            let count = run.blocks.end - run.blocks.start;
            bytes.extend(run.blocks.start.to_le_bytes());
            bytes.extend(((count << 1) | u64::from(run.is_zero)).to_le_bytes());
        }
        bytes.extend(self.data);
        bytes
    }
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// Runs of a piece, each with the place of its bytes in the piece.
pub type PlacedRuns = Vec<(Run, Range<usize>)>;

fn damaged(why: &str) -> String {
    format!("a piece is damaged: {why}")
}

/// The runs of a piece of a layer of so many blocks.
///
/// # Errors
/// Why it is no such piece.
pub fn parse_piece(bytes: &[u8], layer_blocks: u64) -> Result<PlacedRuns, String> {
    let (runs, end) = parse_runs(bytes, layer_blocks)?;
    match end == bytes.len() {
        true => Ok(runs),
        false => Err(damaged("its length is not that of its runs")),
    }
}

/// The runs of a piece of which only the head was read.
///
/// # Errors
/// As [`parse_piece`].
pub fn parse_head(head: &[u8], layer_blocks: u64) -> Result<PlacedRuns, String> {
    let (runs, _) = parse_runs(head, layer_blocks)?;
    match HEADER_BYTES + runs.len() * RUN_BYTES == head.len() {
        true => Ok(runs),
        false => Err(damaged("its head is cut off")),
    }
}

/// The runs, and where the piece ends.
fn parse_runs(bytes: &[u8], layer_blocks: u64) -> Result<(PlacedRuns, usize), String> {
    let header = bytes.get(..HEADER_BYTES).ok_or_else(|| damaged("it is too short"))?;
    let number = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
    if header[..8] != MAGIC || number(8) != FORMAT {
        return Err(damaged("it is of no format that this program knows"));
    }
    let count = usize::try_from(number(12)).expect("a 64-bit machine");
    if count > RUNS_MAX {
        return Err(damaged("it has too many runs"));
    }
    let (mut runs, mut at, mut after) = (Vec::new(), HEADER_BYTES + count * RUN_BYTES, 0);
    for place in (HEADER_BYTES..).step_by(RUN_BYTES).take(count) {
        let first = u64_at(bytes, place).ok_or_else(|| damaged("it is cut off"))?;
        let counted = u64_at(bytes, place + 8).ok_or_else(|| damaged("it is cut off"))?;
        let (blocks, is_zero) = (counted >> 1, counted & 1 == 1);
        let end = first.checked_add(blocks).filter(|end| *end <= layer_blocks);
        let Some(end) = end.filter(|_| first >= after && blocks > 0) else {
            return Err(damaged("a run is not within the layer"));
        };
        let length = if is_zero { 0 } else { blocks.saturating_mul(BLOCK_BYTES) };
        let length = usize::try_from(length).ok().filter(|length| *length <= PIECE_DATA_BYTES);
        let length = length.ok_or_else(|| damaged("a run is too long"))?;
        runs.push((Run { blocks: first..end, is_zero }, at..at + length));
        (at, after) = (at + length, end);
    }
    Ok((runs, at))
}

/// The head of a piece that was just finished.
pub fn head_of(piece: &[u8]) -> Option<PieceHead> {
    let runs = u32::from_le_bytes(piece.get(12..HEADER_BYTES)?.try_into().ok()?);
    let end = HEADER_BYTES + usize::try_from(runs).ok()? * RUN_BYTES;
    Some(PieceHead { bytes: end as u64, sha256: sha256(piece.get(..end)?) })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_piece_is_read_as_it_was_made() {
        let mut piece = PieceBuilder::default();
        piece.data(3, &[1; 2 * BLOCK]);
        piece.data(5, &[2; BLOCK]);
        piece.zeros(6..1 << 40);
        let bytes = piece.finish();
        let runs = parse_piece(&bytes, 1 << 40).expect("a piece");
        let blocks: Vec<_> =
            runs.iter().map(|(run, _)| (run.blocks.clone(), run.is_zero)).collect();
        assert_eq!(blocks, [(3..6, false), (6..1 << 40, true)]);
        let data = &bytes[runs[0].1.clone()];
        assert_eq!((data.len(), data[0], data[3 * BLOCK - 1]), (3 * BLOCK, 1, 2));
        parse_piece(&bytes, (1 << 40) - 1).expect_err("beyond the end of the layer");
        parse_piece(&bytes[..bytes.len() - 1], 1 << 40).expect_err("cut off");
    }

    #[test]
    fn the_head_of_a_piece_says_which_blocks_it_has() {
        let mut piece = PieceBuilder::default();
        piece.data(3, &[1; 2 * BLOCK]);
        piece.zeros(6..8);
        let bytes = piece.finish();
        let head = head_of(&bytes).expect("a head");
        let read = &bytes[..usize::try_from(head.bytes).expect("it is small")];
        assert_eq!(head.sha256, sha256(read));
        assert_eq!(parse_head(read, 8), parse_piece(&bytes, 8));
        parse_head(&bytes, 8).expect_err("more than a head");
        parse_head(&read[..read.len() - 1], 8).expect_err("cut off");
    }

    #[test]
    fn a_list_with_a_changed_byte_is_refused() {
        let list = vec![Piece { bytes: 7, sha256: "ab".to_owned(), head: None }];
        let bytes = with_checksum(&list).expect("JSON");
        assert_eq!(checked::<Vec<Piece>>(&bytes), Ok(list));
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            checked::<Vec<Piece>>(&changed).expect_err("a changed byte");
            checked::<Vec<Piece>>(&bytes[..at]).expect_err("cut off");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_piece_or_refused(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..200),
            is_ours in any::<bool>(),
        ) {
            if is_ours && bytes.len() >= HEADER_BYTES {
                bytes[..8].copy_from_slice(&MAGIC);
                bytes[8..12].copy_from_slice(&FORMAT.to_le_bytes());
                bytes[13..16].fill(0);
            }
            if let Ok(runs) = parse_head(&bytes, 100) {
                prop_assert!(runs.iter().all(|(run, _)| run.blocks.end <= 100));
            }
            if let Ok(runs) = parse_piece(&bytes, 100) {
                prop_assert!(runs.iter().all(|(run, at)| run.blocks.end <= 100 && at.end <= bytes.len()));
            }
        }
    }
}
