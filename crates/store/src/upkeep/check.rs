//! Checks a pool for damage: the catalog, the maps, the data against their checksums, and missing or
//! unneeded files. It changes nothing, and works on a pool in use: a layer that is deleted or sealed
//! during the check is not a fault.

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use perigee_model::volume::{BLOCK_BYTES, ByteRange, CheckReport, CheckScope, Fault, FaultKind};
use perigee_model::{LayerId, Problem};

use crate::catalog::LayerRow;
use crate::disk::blocks::PAGE_BLOCKS;
use crate::disk::map::{self, MapError};
use crate::layers::checksums::{self, Compared, Finding};
use crate::layers::layer::{Layer, data_name, map_name, was_flushed};
use crate::pool::Pool;
use crate::work::Work;

/// The number of a layer's users that a fault names.
const USERS_NAMED: usize = 10;

/// A layer to check.
struct Suspect {
    row: LayerRow,
    /// The layer is still being written, so only its map can be checked.
    changes: bool,
}

impl Pool {
    /// # Errors
    /// Not found when the volume or image does not exist; unavailable when the work was stopped. Damage is
    /// not an error; it is in the report.
    pub async fn check(
        self: &Arc<Self>,
        scope: CheckScope,
        work: Arc<Work>,
    ) -> Result<CheckReport, Problem> {
        self.run(move |pool| pool.check_now(&scope, &work)).await
    }

    fn check_now(&self, scope: &CheckScope, work: &Work) -> Result<CheckReport, Problem> {
        let mut report = CheckReport::default();
        match self.catalog.damage() {
            Ok(damage) => {
                report.faults.extend(damage.into_iter().map(|what| catalog_fault(&what)));
            }
            Err(error) => report.faults.push(catalog_fault(&error)),
        }
        let suspects = match self.suspects(scope) {
            Ok(suspects) => suspects,
            Err(Unlisted::Problem(problem)) => return Err(problem),
            Err(Unlisted::Catalog(error)) => {
                report.faults.push(catalog_fault(&error));
                return Ok(report);
            }
        };
        let unneeded = match scope {
            CheckScope::Pool => self.unneeded_files(),
            CheckScope::Volume(_) | CheckScope::Image(_) => Ok(HashSet::new()),
        };
        for suspect in &suspects {
            let bytes = self.files.allocated_bytes(&data_name(suspect.row.id));
            work.expect(if suspect.changes { 0 } else { bytes.unwrap_or(0) });
        }
        for suspect in &suspects {
            self.check_layer(suspect, work, &mut report).map_err(stopped)?;
            report.layers += 1;
        }
        // Listed twice, because a file of a layer that is being made is needed a moment later.
        let still = || Ok::<_, io::Error>((unneeded?, self.unneeded_files()?));
        let (before, after) =
            still().map_err(|e| Problem::internal("can't list the pool's files", e))?;
        report.leftovers = before.intersection(&after).cloned().collect();
        report.leftovers.sort_unstable();
        Ok(report)
    }

    fn suspects(&self, scope: &CheckScope) -> Result<Vec<Suspect>, Unlisted> {
        let top = match scope {
            CheckScope::Pool => {
                return Ok(self
                    .catalog
                    .layers()?
                    .into_iter()
                    .map(|(row, head)| Suspect { changes: head || row.is_copy(), row })
                    .collect());
            }
            CheckScope::Volume(name) => self.catalog.volume(name)?.map(|row| row.head),
            CheckScope::Image(name) => self.catalog.image(name)?,
        };
        let top = top.ok_or_else(|| {
            let (noun, name) = match scope {
                CheckScope::Volume(name) => ("volume", name.as_str()),
                CheckScope::Image(name) => ("image", name.as_str()),
                CheckScope::Pool => ("pool", ""),
            };
            Problem::not_found(
                format!("can't check {noun} {name}"),
                "it does not exist in this pool",
            )
        })?;
        let volume = matches!(scope, CheckScope::Volume(_));
        let rows = self.catalog.chain(top)?.into_iter().enumerate();
        let changes = |depth, row: &LayerRow| volume && depth == 0 || row.is_copy();
        Ok(rows.map(|(depth, row)| Suspect { changes: changes(depth, &row), row }).collect())
    }

    /// # Errors
    /// When the work should stop.
    fn check_layer(
        &self,
        suspect: &Suspect,
        work: &Work,
        report: &mut CheckReport,
    ) -> io::Result<()> {
        let Suspect { row, changes } = suspect;
        let id = row.id;
        let mut found = self.check_map(row);
        if found.is_empty() && !changes {
            match self.open_sealed(row) {
                Ok(layer) if layer.has_files() => found = self.check_data(&layer, work, report)?,
                Ok(_) => {}
                Err(error) => found.push((FaultKind::Map, (None, error.source.to_string()))),
            }
        }
        // A layer that was deleted in the meantime has no files.
        if !found.is_empty() && !matches!(self.catalog.has_layer(id), Ok(false)) {
            let users = self.catalog.users(id).unwrap_or_default();
            report.faults.extend(found.into_iter().map(|found| layer_fault(id, found, &users)));
        }
        Ok(())
    }

    /// Checks that a layer's files exist, and checks its map, but not its data.
    fn check_map(&self, row: &LayerRow) -> Vec<(FaultKind, Finding)> {
        let (id, blocks) = (row.id, row.size_bytes / BLOCK_BYTES);
        if row.untouched && matches!(was_flushed(&*self.files, id, row.size_bytes), Ok(false)) {
            return Vec::new();
        }
        for name in [data_name(id), map_name(id)] {
            match self.files.open(&name) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    let why = format!("its file {name} is missing");
                    return vec![(FaultKind::Missing, (None, why))];
                }
                Err(error) => {
                    let why = format!("its file {name} can't be opened: {error}");
                    return vec![(FaultKind::Missing, (None, why))];
                }
            }
        }
        let pages = self
            .files
            .open(&map_name(id))
            .map_err(MapError::from)
            .and_then(|file| map::damaged_pages(&*file, id, blocks));
        match pages {
            Ok(pages) => pages
                .into_iter()
                .map(|page| {
                    let first = page as u64 * PAGE_BLOCKS;
                    let end = (first + PAGE_BLOCKS).min(blocks);
                    let why = format!("both copies of page {page} of its map are damaged");
                    (FaultKind::Map, (Some(first * BLOCK_BYTES..end * BLOCK_BYTES), why))
                })
                .collect(),
            Err(MapError::Io(error)) => {
                vec![(FaultKind::Map, (None, format!("its map can't be read: {error}")))]
            }
            Err(error) => vec![(FaultKind::Map, (None, format!("its map: {error}")))],
        }
    }

    fn check_data(
        &self,
        layer: &Layer,
        work: &Work,
        report: &mut CheckReport,
    ) -> io::Result<Vec<(FaultKind, Finding)>> {
        let kind_of = |kind| move |finding| (kind, finding);
        Ok(match checksums::compare(&*self.files, layer, work)? {
            Compared::WithoutChecksums => {
                report.without_checksums.push(layer.id);
                Vec::new()
            }
            Compared::DamagedChecksums(findings) => {
                findings.into_iter().map(kind_of(FaultKind::Checksums)).collect()
            }
            Compared::Data { compared_bytes, findings } => {
                report.compared_bytes += compared_bytes;
                findings.into_iter().map(kind_of(FaultKind::Data)).collect()
            }
        })
    }
}

/// The reason why the layers to check can't be listed.
enum Unlisted {
    Problem(Problem),
    Catalog(rusqlite::Error),
}

impl From<Problem> for Unlisted {
    fn from(problem: Problem) -> Self {
        Self::Problem(problem)
    }
}

impl From<rusqlite::Error> for Unlisted {
    fn from(error: rusqlite::Error) -> Self {
        Self::Catalog(error)
    }
}

fn stopped(error: io::Error) -> Problem {
    Problem::unavailable("can't check the pool", error)
}

fn catalog_fault(what: &impl ToString) -> Fault {
    Fault {
        kind: FaultKind::Catalog,
        what: what.to_string(),
        layer: None,
        range: None,
        used_by: Vec::new(),
        users: 0,
    }
}

fn layer_fault(
    id: LayerId,
    (kind, (range, what)): (FaultKind, Finding),
    users: &[String],
) -> Fault {
    let range =
        range.map(|Range { start, end }| ByteRange { offset: start, length_bytes: end - start });
    let used_by = users.iter().take(USERS_NAMED).cloned().collect();
    Fault { kind, what, layer: Some(id), range, used_by, users: users.len() as u64 }
}
