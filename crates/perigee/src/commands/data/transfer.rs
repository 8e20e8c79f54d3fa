//! What sending and fetching files have in common.

use std::fs::File;
use std::io::Read;

use perigee_http::Client;
use perigee_http::certificate::hex;
use perigee_model::Problem;
use perigee_model::data::{FileAddress, FileEntry, FileList};
use sha2::{Digest, Sha256};

/// How much of a large file one request carries.
pub const PART_BYTES: u64 = 16 << 20;
/// How many requests are under way at the same time. Over a distance, one connection does not fill a link.
pub const AT_ONCE: usize = 4;
/// How often a transfer that is cut goes on by itself.
pub const TRIES: u32 = 5;

/// All of a directory.
pub async fn list(client: &Client, address: &FileAddress) -> Result<Vec<FileEntry>, Problem> {
    let mut entries = Vec::new();
    let mut page = format!("{}?limit=10000", address.url());
    loop {
        let list: FileList = client.get(&page).await?;
        entries.extend(list.entries);
        let Some(after) = list.after else { return Ok(entries) };
        let after = FileAddress { tenant: None, path: after }.url();
        let after = after.rsplit('/').next().unwrap_or_default();
        page = format!("{}?limit=10000&after={after}", address.url());
    }
}

/// Whether a transfer that failed may go on.
pub fn may_go_on(problem: &Problem) -> bool {
    problem.kind == perigee_model::ProblemKind::Unavailable
}

/// The SHA-256 of a file, read from where it is.
pub fn hash(mut file: &File) -> std::io::Result<String> {
    Ok(hex(&hashed(&mut file)?.finalize()))
}

/// All that can be read, hashed; more may follow.
pub fn hashed(from: &mut impl Read) -> std::io::Result<Sha256> {
    let mut hasher = Sha256::new();
    let mut piece = vec![0; 1 << 20];
    loop {
        match from.read(&mut piece)? {
            0 => return Ok(hasher),
            length => hasher.update(&piece[..length]),
        }
    }
}
