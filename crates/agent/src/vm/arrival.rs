//! Whether a VM that comes by migration has run here. This is one byte in a file that is created before QEMU
//! starts. So it can be changed with one write, even if the disk is full.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use perigee_model::Problem;
use perigee_model::switchover::Arrival;

const WAITS: &[u8] = b"waits\n";
const RAN: &[u8] = b"ran  \n";

/// Creates the file, before QEMU starts.
pub fn prepare(path: &Path) -> Result<(), Problem> {
    let write = || -> std::io::Result<()> {
        let temporary = path.with_extension("new");
        let file = OpenOptions::new()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .open(&temporary)?;
        file.write_all_at(WAITS, 0)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)?;
        match path.parent() {
            Some(parent) => std::fs::File::open(parent)?.sync_all(),
            None => Ok(()),
        }
    };
    write().map_err(|e| Problem::internal(format!("can't write {}", path.display()), e))
}

/// Records that the VM has run, before it runs.
pub fn store_ran(path: &Path) -> Result<(), Problem> {
    let write = || -> std::io::Result<()> {
        let file = OpenOptions::new().write(true).open(path)?;
        file.write_all_at(RAN, 0)?;
        file.sync_data()
    };
    write().map_err(|e| Problem::internal(format!("can't write {}", path.display()), e))
}

/// A file that cannot be read means that it is not known.
pub fn read(path: &Path) -> Arrival {
    match std::fs::read(path).as_deref() {
        Ok(WAITS) => Arrival::Waits,
        Ok(RAN) => Arrival::Ran,
        Ok(_) => Arrival::NotKnown,
        Err(error) => {
            tracing::error!(path = %path.display(), %error, "whether a VM has arrived is not known");
            Arrival::NotKnown
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arrival_is_known_only_where_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("arrival");
        assert_eq!(read(&path), Arrival::NotKnown, "a lost file");
        assert!(store_ran(&path).is_err());
        prepare(&path).unwrap();
        assert_eq!(read(&path), Arrival::Waits);
        store_ran(&path).unwrap();
        assert_eq!(read(&path), Arrival::Ran);
        std::fs::write(&path, "").unwrap();
        assert_eq!(read(&path), Arrival::NotKnown, "a torn file");
    }
}
