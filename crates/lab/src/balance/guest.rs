//! The image of a guest that is busy. It is the golden image, with another program in the place of the one that a machine without a job
//! starts.

use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use perigee_model::Problem;

use crate::command::run_within;

const SCRIPT: &str = include_str!("guest.sh");

/// What the golden image starts where there is no job: `guest/image/diskless-up`.
const PROGRAM: &str = "/usr/sbin/diskless-up";

/// How long a guest is busy and idle in turn, both together.
const TURN_US: u64 = 1_000_000;

/// The second partition of a disk with a DOS label: 16 bytes for each, the first sector in the last 8 of them, as two numbers of 32 bits.
const SECOND_PARTITION: u64 = 446 + 16 + 8;
const SECTOR_BYTES: u64 = 512;

const COPY_MAX: Duration = Duration::from_secs(300);

/// What the guest runs: it wants a CPU for so many percent of the time.
fn script(busy_percent: u64) -> String {
    let busy_us = TURN_US / 100 * busy_percent.min(100);
    let text = SCRIPT.replace("BUSY_US", &busy_us.to_string());
    text.replace("IDLE_US", &(TURN_US - busy_us).to_string())
}

/// Makes the image in a directory, and returns its path.
///
/// # Errors
/// The golden image can't be read, or there is no room for its copy.
pub async fn make_image(golden: &Path, dir: &Path, busy_percent: u64) -> Result<PathBuf, Problem> {
    make_image_of(golden, dir, &script(busy_percent)).await
}

/// The same with another program: what bash is to run when the guest is up.
///
/// # Errors
/// As [`make_image`].
pub async fn make_image_of(golden: &Path, dir: &Path, text: &str) -> Result<PathBuf, Problem> {
    let what = || format!("can't make a busy guest of {}", golden.display());
    let failed = |error: std::io::Error| Problem::internal(what(), error);
    let (image, program, commands) = (dir.join("busy.raw"), dir.join("busy"), dir.join("debugfs"));
    std::fs::write(&program, text).map_err(failed)?;
    let [golden, to] = [golden, &image].map(|path| path.to_string_lossy().into_owned());
    run_within(COPY_MAX, "cp", &["--sparse=always", "--reflink=auto", &golden, &to]).await?;
    let root = format!("{to}?offset={}", root_at(&image).map_err(failed)?);
    let lines = format!(
        "rm {PROGRAM}\nwrite {} {PROGRAM}\nset_inode_field {PROGRAM} mode 0100755\n",
        program.display()
    );
    std::fs::write(&commands, lines).map_err(failed)?;
    run_within(COPY_MAX, "debugfs", &["-w", "-f", &commands.to_string_lossy(), &root]).await?;
    // It succeeds also where a command of its file has failed.
    let is = run_within(COPY_MAX, "debugfs", &["-R", &format!("cat {PROGRAM}"), &root]).await?;
    if is == text {
        return Ok(image);
    }
    Err(Problem::internal(what(), format!("{PROGRAM} in it could not be replaced"))
        .next("build the image again: make image"))
}

/// Where the root filesystem begins, in bytes.
fn root_at(image: &Path) -> std::io::Result<u64> {
    let mut file = std::fs::File::open(image)?;
    file.seek(SeekFrom::Start(SECOND_PARTITION))?;
    let mut first = [0; 4];
    file.read_exact(&mut first)?;
    Ok(u64::from(u32::from_le_bytes(first)) * SECTOR_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_busy_for_its_share_of_each_turn() {
        assert!(script(40).contains("busy_us=400000 idle_us=600000\n"));
        assert!(script(100).contains("busy_us=1000000 idle_us=0\n"));
    }
}
