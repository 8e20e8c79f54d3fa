//! A pool's files in more than one directory: images on one disk, the volumes' private data on another.
//!
//! The store looks for a file in all directories. New files of a layer go to the directory that has the
//! layer's other files. New layers go to the directory for private data if the server was given one, else
//! to the pool's own. The catalog lists the directories, so that one that is not mounted is noticed at
//! once. Without its files a layer would look as if it had never been written.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use perigee_model::Problem;

use crate::catalog::{Catalog, failed};
use crate::disk::files::{BlockFile, DiskFiles, LayerFiles};

/// The directories with layers' files. Each layer's files are all in one of them.
pub(crate) struct Directories {
    /// The pool's own directory first.
    directories: Vec<DiskFiles>,
    /// The index of the directory for new layers.
    new_in: usize,
}

/// The subdirectory with this pool's files only.
fn dir_in(directory: &Path, pool_id: &str) -> PathBuf {
    directory.join(format!("perigee-{pool_id}"))
}

impl Directories {
    /// Opens all directories of a pool. `private` is added if the pool does not have it yet.
    ///
    /// # Errors
    /// Unavailable when a directory of the pool does not exist.
    pub(crate) fn open(
        what: &str,
        own: PathBuf,
        catalog: &Catalog,
        private: Option<&Path>,
    ) -> Result<Self, Problem> {
        let pool_id = catalog.pool_id().map_err(failed(what))?;
        if let Some(directory) = private {
            add(what, catalog, directory, &pool_id)?;
        }
        let mut directories = vec![DiskFiles { dir: own }];
        let mut new_in = 0;
        for directory in catalog.directories().map_err(failed(what))? {
            let dir = dir_in(&directory, &pool_id);
            if !dir.is_dir() {
                let why = format!("it has private data in {}, which does not exist", dir.display());
                return Err(Problem::unavailable(what, why).next("mount that disk"));
            }
            if private.and_then(|private| private.canonicalize().ok()).as_ref() == Some(&directory)
            {
                new_in = directories.len();
            }
            directories.push(DiskFiles { dir });
        }
        Ok(Self { directories, new_in })
    }

    /// The directory that has a file of this layer.
    fn of_layer(&self, name: &str) -> &DiskFiles {
        let stem = name.split('.').next().unwrap_or(name);
        let has = |files: &&DiskFiles| {
            ["data", "map"].iter().any(|kind| files.dir.join(format!("{stem}.{kind}")).exists())
        };
        self.directories.iter().find(has).unwrap_or(&self.directories[self.new_in])
    }
}

/// Adds a directory to the pool, durably. Nothing is created in a directory that the pool already has: if
/// its subdirectory is missing, its disk is not mounted.
fn add(what: &str, catalog: &Catalog, directory: &Path, pool_id: &str) -> Result<(), Problem> {
    let cannot = |error: io::Error| {
        Problem::invalid(what, format!("private data can't be in {}: {error}", directory.display()))
    };
    std::fs::create_dir_all(directory).map_err(cannot)?;
    let real = directory.canonicalize().map_err(cannot)?;
    if catalog.directories().map_err(failed(what))?.contains(&real) {
        return Ok(());
    }
    let made = std::fs::create_dir_all(dir_in(&real, pool_id))
        .and_then(|()| std::fs::File::open(&real)?.sync_all());
    made.map_err(cannot)?;
    catalog.add_directory(&real).map_err(failed(what))
}

impl LayerFiles for Directories {
    fn create(&self, name: &str, length_bytes: u64) -> io::Result<Arc<dyn BlockFile>> {
        self.of_layer(name).create(name, length_bytes)
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn BlockFile>> {
        let mut missing = io::Error::from(io::ErrorKind::NotFound);
        for directory in &self.directories {
            match directory.open(name) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => missing = error,
                found => return found,
            }
        }
        Err(missing)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.directories.iter().try_for_each(|directory| directory.remove(name))
    }

    fn allocated_bytes(&self, name: &str) -> io::Result<u64> {
        self.directories.iter().map(|directory| directory.allocated_bytes(name)).sum()
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let names: io::Result<Vec<_>> = self.directories.iter().map(LayerFiles::names).collect();
        Ok(names?.concat())
    }

    fn sync_names(&self) -> io::Result<()> {
        self.directories.iter().try_for_each(LayerFiles::sync_names)
    }
}
