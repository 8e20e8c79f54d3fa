//! The results on disk: written after each cell, and kept from run to run.

use std::cell::RefCell;
use std::path::{Path, PathBuf};

use perigee_model::Problem;

use super::outcome::{CellResult, Outcome};
use super::table::Cell;
use crate::measuring::{self, QEMU};

/// The results so far, in a directory. They are written after each cell, so that a run that was cut can go on.
pub struct Record {
    dir: PathBuf,
    /// The binary that is tested, and its commit.
    perigee: String,
    outcome: RefCell<Outcome>,
}

impl Record {
    /// Reads what earlier runs have left in a directory.
    ///
    /// # Errors
    /// `Invalid` when it can't be read.
    pub fn open(dir: &Path, perigee: &Path) -> Result<Self, Problem> {
        let outcome = RefCell::new(Outcome::read(dir)?);
        let perigee = measuring::version_of(perigee);
        Ok(Self { dir: dir.to_owned(), perigee, outcome })
    }

    /// Cells that have no result, in the order in which they are run.
    pub fn missing(&self) -> Vec<Cell> {
        let outcome = self.outcome.borrow();
        Cell::all().into_iter().filter(|cell| outcome.of(cell).is_none()).collect()
    }

    /// The results of these cells.
    pub fn of(&self, cells: &[Cell]) -> Vec<CellResult> {
        let outcome = self.outcome.borrow();
        cells.iter().filter_map(|cell| outcome.of(cell).cloned()).collect()
    }

    /// Sets a cell's result, and writes all.
    ///
    /// # Errors
    /// A file can't be written.
    pub fn keep(&self, mut result: CellResult) -> Result<(), Problem> {
        result.perigee.clone_from(&self.perigee);
        let mut outcome = self.outcome.borrow_mut();
        outcome.set(result);
        outcome.versions = measuring::versions(outcome.perigees(), &[QEMU]);
        outcome.write(&self.dir)
    }
}
