//! A pool's files in more than one directory: sources on one disk, private data on another.
//!
//! A file is where it is found. New files of a layer go beside those that it has; new layers go
//! to the place that the server was given for private data, or else to the pool's own. The
//! catalog has the list of places, so that one that is not mounted is missed at once: in it, a
//! layer without files would look like one that was never written.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use perigee_model::Problem;

use super::catalog::{self, Catalog};
use super::files::{BlockFile, DiskFiles, LayerFiles};

pub(super) struct Places {
    /// The pool's own directory first.
    places: Vec<DiskFiles>,
    /// Where layers go that have no file yet.
    new_in: usize,
}

/// The directory in a place that has this pool's files and no others.
fn dir_in(place: &Path, pool_id: &str) -> PathBuf {
    place.join(format!("perigee-{pool_id}"))
}

impl Places {
    /// All places of a pool. `private` becomes one if it is not yet.
    ///
    /// # Errors
    /// Unavailable when a place of the pool is not there.
    pub(super) fn open(
        what: &str,
        own: PathBuf,
        catalog: &Catalog,
        private: Option<&Path>,
    ) -> Result<Self, Problem> {
        let failed = |error| catalog::problem(what, &error);
        let pool_id = catalog.pool_id().map_err(failed)?;
        if let Some(place) = private {
            add(what, catalog, place, &pool_id)?;
        }
        let mut places = vec![DiskFiles { dir: own }];
        let mut new_in = 0;
        for place in catalog.places().map_err(failed)? {
            let dir = dir_in(&place, &pool_id);
            if !dir.is_dir() {
                let why =
                    format!("private data of it are in {}, which is not there", dir.display());
                return Err(Problem::unavailable(what, why).next("mount that disk"));
            }
            if private.and_then(|private| private.canonicalize().ok()).as_ref() == Some(&place) {
                new_in = places.len();
            }
            places.push(DiskFiles { dir });
        }
        Ok(Self { places, new_in })
    }

    /// The place that has a file of this layer.
    fn of_layer(&self, name: &str) -> &DiskFiles {
        let stem = name.split('.').next().unwrap_or(name);
        let has = |place: &&DiskFiles| {
            ["data", "map"].iter().any(|kind| place.dir.join(format!("{stem}.{kind}")).exists())
        };
        self.places.iter().find(has).unwrap_or(&self.places[self.new_in])
    }
}

/// Makes a directory one of the pool's places, durably. In one that is a place already nothing is
/// made: what is missing there is a disk that is not mounted.
fn add(what: &str, catalog: &Catalog, place: &Path, pool_id: &str) -> Result<(), Problem> {
    let failed = |error| catalog::problem(what, &error);
    let cannot = |error: io::Error| {
        Problem::invalid(what, format!("private data can't be in {}: {error}", place.display()))
    };
    std::fs::create_dir_all(place).map_err(cannot)?;
    let real = place.canonicalize().map_err(cannot)?;
    if catalog.places().map_err(failed)?.contains(&real) {
        return Ok(());
    }
    let made = std::fs::create_dir_all(dir_in(&real, pool_id))
        .and_then(|()| std::fs::File::open(&real)?.sync_all());
    made.map_err(cannot)?;
    catalog.add_place(&real).map_err(failed)
}

impl LayerFiles for Places {
    fn create(&self, name: &str, length_bytes: u64) -> io::Result<Arc<dyn BlockFile>> {
        self.of_layer(name).create(name, length_bytes)
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn BlockFile>> {
        let mut missing = io::Error::from(io::ErrorKind::NotFound);
        for place in &self.places {
            match place.open(name) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => missing = error,
                found => return found,
            }
        }
        Err(missing)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.places.iter().try_for_each(|place| place.remove(name))
    }

    fn allocated_bytes(&self, name: &str) -> io::Result<u64> {
        self.places.iter().map(|place| place.allocated_bytes(name)).sum()
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let names: io::Result<Vec<_>> = self.places.iter().map(LayerFiles::names).collect();
        Ok(names?.concat())
    }

    fn sync_names(&self) -> io::Result<()> {
        self.places.iter().try_for_each(LayerFiles::sync_names)
    }
}
