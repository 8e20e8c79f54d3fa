//! Arguments that several commands take.

use std::path::PathBuf;

use perigee_lab::DEFAULT_BASE;
use perigee_model::amounts::Range;
use perigee_model::units::parse_bytes;

/// Where labs keep their files: one for each machine, unless tests or several users need their own.
#[derive(Debug, clap::Args)]
pub struct BaseOption {
    /// Directory for the files of all labs
    #[arg(long, default_value = DEFAULT_BASE, env = "PERIGEE_LAB_BASE", value_name = "DIR")]
    pub base: PathBuf,
}

/// A number, or a range of them: 1..4.
pub fn count_range(text: &str) -> Result<Range<u32>, String> {
    Range::parse(text, str::parse::<u32>).map_err(|e| e.to_string())
}

/// Bytes, or a range of them: 1GiB..4GiB.
pub fn size_range(text: &str) -> Result<Range<u64>, String> {
    Range::parse(text, parse_bytes).map_err(|e| e.to_string())
}

/// Bytes, with a unit or without one: 512MiB.
pub fn size(text: &str) -> Result<u64, String> {
    parse_bytes(text).map_err(|e| e.to_string())
}
