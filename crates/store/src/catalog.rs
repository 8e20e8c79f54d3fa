//! The catalog of a pool: its layers and their parents, images, volumes and their epochs, and attached
//! volumes of other hosts. Every change is one SQLite transaction, which is durable when it returns.

mod admissions;
mod attachments;
mod clients;
mod columns;
mod confined;
mod contents;
mod copies;
mod epochs;
mod leases;
mod merged;
mod problems;
mod replicas;
mod reservations;
mod reserve;
mod residences;
mod schema;

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use perigee_block::locking::lock;
use perigee_model::backup::BackupTarget;
use perigee_model::home::{Residence, Tenure};
use perigee_model::volume::{CachePolicy, Keep};
use perigee_model::{Epoch, ImageName, Incarnation, LayerId, OwnerName, TenantName, VolumeName};
use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};
use uuid::Uuid;

pub(crate) use crate::catalog::admissions::TooMany;
pub(crate) use crate::catalog::clients::{ClientRow, CloneRow, SpentClone};
use crate::catalog::columns::{
    going_round, layer_bytes, optional_parsed, optional_unsigned, parsed, remote_bytes, signed,
    unsigned,
};
pub(crate) use crate::catalog::contents::Verdict;
pub(crate) use crate::catalog::problems::{failed, io_error, open_problem, problem};
pub(crate) use crate::catalog::replicas::PointRow;
use crate::catalog::reserve::Reserve;
pub(crate) use crate::catalog::schema::OpenError;

type Result<T> = rusqlite::Result<T>;

/// An export of another host below a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RemoteRow {
    /// A host's address, or a target of backups ([`Self::target`]).
    pub(crate) nbd_addr: String,
    pub(crate) export: String,
    pub(crate) size_bytes: u64,
    /// What the layer above keeps of the blocks that are read.
    pub(crate) keep: Keep,
    /// The id of the sealed layer behind the export, if it is known.
    pub(crate) is_layer: Option<LayerId>,
    /// The export has only what the layer itself has. The layer's map here says what that is.
    pub(crate) own: bool,
}

impl RemoteRow {
    /// The backup from which the layer gets its bytes: its target. `None` if a host has them.
    pub(crate) fn target(&self) -> Option<BackupTarget> {
        BackupTarget::of_source(&self.nbd_addr)
    }
}

/// A layer. Its parent is a layer of this pool or a remote export; it may also have none. A copy of a layer's own
/// blocks may have both, and gets its blocks from the export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LayerRow {
    pub(crate) id: LayerId,
    pub(crate) size_bytes: u64,
    pub(crate) parent: Option<LayerId>,
    pub(crate) remote: Option<RemoteRow>,
    pub(crate) poisoned: Option<String>,
    /// The bytes of a sealed layer that are data, if they are known.
    pub(crate) data_bytes: Option<u64>,
    /// No flush of the layer is known to be durable, so it may have no files yet.
    pub(crate) untouched: bool,
    /// It may not leave its site, nor may what stands on it.
    pub(crate) confined: bool,
}

impl LayerRow {
    pub(crate) fn new(id: LayerId, size_bytes: u64, parent: Option<LayerId>) -> Self {
        let (remote, poisoned, data_bytes) = (None, None, None);
        Self {
            id,
            size_bytes,
            parent,
            remote,
            poisoned,
            data_bytes,
            untouched: false,
            confined: false,
        }
    }

    /// Whether it is a copy that still gets blocks from another host.
    pub(crate) fn is_copy(&self) -> bool {
        self.remote.as_ref().is_some_and(|remote| remote.keep != Keep::Never)
    }

    /// A head to which nothing was written yet.
    pub(crate) fn new_head(size_bytes: u64, parent: Option<LayerId>) -> Self {
        Self { untouched: true, ..Self::new(LayerId(Uuid::new_v4()), size_bytes, parent) }
    }
}

/// A layer's space and users, as far as the catalog knows them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LayerSpace {
    pub(crate) parent: Option<LayerId>,
    pub(crate) data_bytes: Option<u64>,
    pub(crate) remote_bytes: u64,
    /// Whether it is a copy that still gets blocks from another host.
    pub(crate) is_copy: bool,
    pub(crate) poisoned: bool,
    /// The number of layers directly above it, counted up to 2.
    pub(crate) children: u64,
    /// It is the topmost layer of an image, of a volume that departed, or of a replica's point.
    pub(crate) named: bool,
    /// See [`LayerRow::confined`].
    pub(crate) confined: bool,
}

/// A volume whose head is in this pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VolumeRow {
    pub(crate) name: VolumeName,
    pub(crate) head: LayerId,
    pub(crate) size_bytes: u64,
    pub(crate) epoch: Epoch,
    pub(crate) tenant: TenantName,
    pub(crate) cache: CachePolicy,
    pub(crate) owner: Option<OwnerName>,
}

/// The columns that [`layer_row`] reads. Column 9 says whether the layer is a head.
const LAYER_ROWS: &str = "
    SELECT l.id, l.size_bytes, l.parent, l.poisoned, r.nbd_addr, r.export, r.size_bytes,
           l.data_bytes, EXISTS (SELECT 1 FROM untouched u WHERE u.layer = l.id),
           EXISTS (SELECT 1 FROM volumes v WHERE v.head = l.id), r.keep, r.is_layer, r.own,
           EXISTS (SELECT 1 FROM held h WHERE h.layer = l.id)
    FROM layers l LEFT JOIN remote_parents r ON r.layer = l.id";
const VOLUME_COLUMNS: &str = "name, head, size_bytes, epoch, tenant, cache, owner";

/// A volume that is to be created, with an empty head.
#[derive(Debug, Clone)]
pub(crate) struct NewVolume {
    pub(crate) name: VolumeName,
    pub(crate) head: LayerRow,
    pub(crate) epoch: Epoch,
    pub(crate) tenant: TenantName,
    pub(crate) cache: CachePolicy,
    pub(crate) owner: Option<OwnerName>,
}

/// The first epoch of a volume that is created now.
pub(crate) fn first_epoch() -> Epoch {
    // Incarnation 0 is that of no volume.
    let random = Uuid::new_v4().as_fields().0.max(1);
    Epoch::first(Incarnation(random))
}

/// A head to seal, and how many of its bytes are data.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sealed {
    pub(crate) layer: LayerId,
    pub(crate) data_bytes: u64,
}

/// The pool's SQLite database: which layers, images and volumes exist. Each method is one transaction.
pub(crate) struct Catalog {
    connection: Mutex<Connection>,
    reserve: Reserve,
}

impl Catalog {
    /// Opens the catalog, also on a full disk.
    pub(crate) fn open(path: &Path) -> std::result::Result<Self, OpenError> {
        match Self::try_open(path) {
            Err(OpenError::Sqlite(_)) if Reserve::free_beside(path) => Self::try_open(path),
            opened => opened,
        }
    }

    fn try_open(path: &Path) -> std::result::Result<Self, OpenError> {
        schema::close_to_others(path)?;
        let mut connection = Connection::open(path)?;
        schema::upgrade(&mut connection)?;
        connection.execute_batch(schema::KEEPERS)?;
        Ok(Self { connection: Mutex::new(connection), reserve: Reserve::beside(path) })
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        lock(&self.connection)
    }

    fn change<T>(&self, work: impl FnOnce(&Transaction<'_>) -> Result<T>) -> Result<T> {
        self.change_with(&mut self.lock(), work)
    }

    /// As [`Self::change`], by who has the connection.
    fn change_with<T>(
        &self,
        connection: &mut Connection,
        work: impl FnOnce(&Transaction<'_>) -> Result<T>,
    ) -> Result<T> {
        let transaction = connection.transaction()?;
        let result = work(&transaction)?;
        transaction.commit()?;
        let _is_there = self.reserve.keep();
        Ok(result)
    }

    pub(crate) fn pool_id(&self) -> Result<String> {
        self.lock().query_row("SELECT id FROM pool", [], |row| row.get(0))
    }

    /// The directories that hold layer files, in addition to the pool's own.
    pub(crate) fn directories(&self) -> Result<Vec<PathBuf>> {
        self.lock()
            .prepare("SELECT dir FROM stores ORDER BY dir")?
            .query_map([], |row| row.get::<_, String>(0).map(PathBuf::from))?
            .collect()
    }

    pub(crate) fn add_directory(&self, dir: &Path) -> Result<()> {
        let sql = "INSERT INTO stores VALUES (?1) ON CONFLICT DO NOTHING";
        self.lock().execute(sql, [dir.to_string_lossy()]).map(drop)
    }

    /// The number of the format's last step.
    pub(crate) fn format_version(&self) -> Result<u64> {
        self.lock().pragma_query_value(None, "user_version", |row| unsigned(row, 0))
    }

    pub(crate) fn image(&self, name: &ImageName) -> Result<Option<LayerId>> {
        self.lock()
            .prepare_cached("SELECT layer FROM images WHERE name = ?1")?
            .query_row([name.as_str()], |row| parsed(row, 0))
            .optional()
    }

    pub(crate) fn images(&self) -> Result<Vec<(ImageName, LayerId)>> {
        self.lock()
            .prepare("SELECT name, layer FROM images ORDER BY name")?
            .query_map([], |row| Ok((parsed(row, 0)?, parsed(row, 1)?)))?
            .collect()
    }

    pub(crate) fn volume(&self, name: &VolumeName) -> Result<Option<VolumeRow>> {
        let sql = format!("SELECT {VOLUME_COLUMNS} FROM volumes WHERE name = ?1");
        self.lock().prepare_cached(&sql)?.query_row([name.as_str()], volume_row).optional()
    }

    pub(crate) fn volumes(&self) -> Result<Vec<VolumeRow>> {
        self.lock()
            .prepare(&format!("SELECT {VOLUME_COLUMNS} FROM volumes ORDER BY name"))?
            .query_map([], volume_row)?
            .collect()
    }

    pub(crate) fn volume_names(&self) -> Result<Vec<VolumeName>> {
        self.lock()
            .prepare("SELECT name FROM volumes ORDER BY name")?
            .query_map([], |row| parsed(row, 0))?
            .collect()
    }

    pub(crate) fn image_names(&self) -> Result<Vec<ImageName>> {
        self.lock()
            .prepare("SELECT name FROM images ORDER BY name")?
            .query_map([], |row| parsed(row, 0))?
            .collect()
    }

    /// The layers of one chain; with `None`, all layers of the pool.
    pub(crate) fn layer_spaces(
        &self,
        top: Option<LayerId>,
    ) -> Result<HashMap<LayerId, LayerSpace>> {
        const ALL: &str = "
            SELECT l.id, l.parent, l.data_bytes, coalesce(r.size_bytes, 0),
                   l.poisoned IS NOT NULL,
                   (SELECT count(*) FROM (SELECT 1 FROM layers c WHERE c.parent = l.id LIMIT 2)),
                   EXISTS (SELECT 1 FROM keepers k WHERE k.layer = l.id AND k.what <> 'volume'),
                   coalesce(r.keep, 'never') <> 'never',
                   EXISTS (SELECT 1 FROM held h WHERE h.layer = l.id)
            FROM layers l LEFT JOIN remote_parents r ON r.layer = l.id";
        let connection = self.lock();
        let space = |row: &Row<'_>| Ok((parsed(row, 0)?, layer_space(row)?));
        match top {
            None => connection.prepare(ALL)?.query_map([], space)?.collect(),
            Some(top) => connection
                .prepare_cached(&format!("{} {ALL} WHERE l.id IN chain", chain("SELECT ?1")))?
                .query_map([top.to_string()], space)?
                .collect(),
        }
    }

    /// All layers, and whether they are heads.
    pub(crate) fn layers(&self) -> Result<Vec<(LayerRow, bool)>> {
        let sql = format!("{LAYER_ROWS} ORDER BY l.id");
        self.lock()
            .prepare(&sql)?
            .query_map([], |row| Ok((layer_row(row)?, row.get(9)?)))?
            .collect()
    }

    /// The damage that SQLite finds in the catalog, as SQLite describes it.
    pub(crate) fn damage(&self) -> Result<Vec<String>> {
        let connection = self.lock();
        let mut found: Vec<String> = connection
            .prepare("PRAGMA integrity_check")?
            .query_map([], |row| row.get(0))?
            .collect::<Result<_>>()?;
        found.retain(|line| line != "ok");
        let mut foreign = connection.prepare("PRAGMA foreign_key_check")?;
        let rows = foreign.query_map([], |row| {
            Ok(format!(
                "a row of table {} names a row of table {} that does not exist",
                row.get::<_, String>(0)?,
                row.get::<_, String>(2)?
            ))
        })?;
        for row in rows {
            found.push(row?);
        }
        Ok(found)
    }

    pub(crate) fn has_layer(&self, id: LayerId) -> Result<bool> {
        let sql = "SELECT count(*) > 0 FROM layers WHERE id = ?1";
        self.lock().query_row(sql, [id.to_string()], |row| row.get(0))
    }

    /// Whether there is such a layer, and it is no volume's head.
    pub(crate) fn is_sealed(&self, id: LayerId) -> Result<bool> {
        let sql = "SELECT count(*) > 0 FROM layers
                   WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM volumes WHERE head = ?1)";
        self.lock().query_row(sql, [id.to_string()], |row| row.get(0))
    }

    /// The layer and all layers below it in this pool, from the top down.
    pub(crate) fn chain(&self, top: LayerId) -> Result<Vec<LayerRow>> {
        let connection = self.lock();
        let mut statement = connection.prepare_cached(&format!("{LAYER_ROWS} WHERE l.id = ?1"))?;
        let mut chain = Vec::new();
        let mut next = Some(top);
        while let Some(id) = next {
            let row = statement.query_row([id.to_string()], layer_row)?;
            next = row.parent;
            chain.push(row);
            if next.is_some_and(|next| chain.iter().any(|row| row.id == next)) {
                return Err(going_round(id));
            }
        }
        Ok(chain)
    }

    /// The volumes and images above a layer, without its own name: `volume NAME`, `image NAME`.
    pub(crate) fn dependants(&self, layer: LayerId) -> Result<Vec<String>> {
        self.names_above("SELECT id FROM layers WHERE parent = ?1", layer, "TRUE")
    }

    /// Those of [`Self::dependants`] that are volumes which departed from here.
    pub(crate) fn departed_dependants(&self, layer: LayerId) -> Result<Vec<String>> {
        let above = "SELECT id FROM layers WHERE parent = ?1";
        self.names_above(above, layer, "what = 'departed'")
    }

    /// The volumes and images with the layer in their chain: `volume NAME`, `image NAME`.
    pub(crate) fn users(&self, layer: LayerId) -> Result<Vec<String>> {
        self.names_above("SELECT ?1", layer, "TRUE")
    }

    /// The volumes and images here that read this layer from another host, and keep nothing of it.
    pub(crate) fn remote_readers(&self, layer: LayerId) -> Result<Vec<String>> {
        let start = "SELECT layer FROM remote_parents WHERE is_layer = ?1 AND layer <> ?1";
        self.names_above(start, layer, "TRUE")
    }

    fn names_above(&self, start: &str, layer: LayerId, which: &str) -> Result<Vec<String>> {
        // DISTINCT or ORDER BY would make SQLite read all keepers, and not use their indices.
        let sql = format!(
            "{} SELECT CASE what
                    WHEN 'volume' THEN 'volume ' || name
                    WHEN 'image' THEN 'image ' || name
                    WHEN 'departed' THEN 'volume ' || name || ', which departed,'
                    WHEN 'replica' THEN 'the replica of volume ' || name
                END
                FROM keepers WHERE layer IN above AND {which}",
            above(start)
        );
        let connection = self.lock();
        let mut statement = connection.prepare(&sql)?;
        let names = statement.query_map([layer.to_string()], |row| row.get(0))?;
        Ok(names.collect::<Result<BTreeSet<_>>>()?.into_iter().collect())
    }

    pub(crate) fn add_image(&self, name: &ImageName, layer: &LayerRow) -> Result<()> {
        self.change(|tx| {
            insert_layer(tx, layer)?;
            insert_image(tx, name, layer.id)
        })
    }

    /// Gives a layer that is here already a name.
    pub(crate) fn name_layer(&self, name: &ImageName, layer: LayerId) -> Result<()> {
        self.change(|tx| insert_image(tx, name, layer))
    }

    /// Adds volumes with their heads, either all of them or none.
    pub(crate) fn add_volumes(&self, volumes: &[NewVolume]) -> Result<()> {
        self.change(|tx| {
            volumes.iter().try_for_each(|volume| {
                admissions::forget(tx, &volume.name)?;
                insert_volume(tx, volume)
            })
        })
    }

    /// Adds a sealed layer, and a volume whose head stands on it.
    pub(crate) fn add_volume_on(&self, layer: &LayerRow, volume: &NewVolume) -> Result<()> {
        self.change(|tx| {
            insert_layer(tx, layer)?;
            admissions::forget(tx, &volume.name)?;
            insert_volume(tx, volume)
        })
    }

    /// Seals a volume's head, names it if an image name is given, and puts `head` on it.
    pub(crate) fn seal(
        &self,
        volume: &VolumeName,
        sealed: Sealed,
        head: &LayerRow,
        image: Option<&ImageName>,
    ) -> Result<()> {
        self.change(|tx| {
            let sql = "UPDATE layers SET data_bytes = ?2 WHERE id = ?1";
            tx.execute(sql, params![sealed.layer.to_string(), signed(sealed.data_bytes)?])?;
            insert_layer(tx, head)?;
            if let Some(name) = image {
                insert_image(tx, name, sealed.layer)?;
            }
            let sql = "UPDATE volumes SET head = ?2, size_bytes = ?3 WHERE name = ?1";
            let size_bytes = signed(head.size_bytes)?;
            tx.execute(sql, params![volume.as_str(), head.id.to_string(), size_bytes]).map(drop)
        })
    }

    /// Removes the volume. Returns the layers that are no longer needed.
    pub(crate) fn delete_volume(&self, name: &VolumeName) -> Result<Vec<LayerId>> {
        self.change_on_full_disk(|tx| {
            // The next volume of this name is another one.
            admissions::forget(tx, name)?;
            let sql = "DELETE FROM volumes WHERE name = ?1 RETURNING head, tenure";
            let deleted = tx.query_row(sql, [name.as_str()], |row| {
                Ok((parsed(row, 0)?, Tenure(unsigned(row, 1)?)))
            });
            let Some((head, tenure)) = deleted.optional()? else { return Ok(Vec::new()) };
            // Its last home may still keep what a late message could take here once more.
            if tenure != Tenure::first(tenure.incarnation()) {
                residences::set_spent(tx, name, &Residence::here(tenure).delete())?;
            }
            delete_unneeded(tx, head)
        })
    }

    /// Records that a layer has files from now on.
    pub(crate) fn touched(&self, layer: LayerId) -> Result<()> {
        let sql = "DELETE FROM untouched WHERE layer = ?1";
        self.lock().execute(sql, [layer.to_string()]).map(drop)
    }

    /// Notes that a sync of this layer's files has failed: what was written since the last one may be lost.
    pub(crate) fn poison(&self, layer: LayerId, why: &str) -> Result<()> {
        let sql = "UPDATE layers SET poisoned = ?2 WHERE id = ?1";
        self.lock().execute(sql, params![layer.to_string(), why]).map(drop)
    }
}

/// `above(id)`: the layers that `start` selects, and all layers above them.
fn above(start: &str) -> String {
    format!(
        "WITH RECURSIVE above(id) AS (
             {start} UNION SELECT l.id FROM layers l JOIN above ON l.parent = above.id
         )"
    )
}

/// `chain(id)`: the layers that `start` selects, and all layers below them.
fn chain(start: &str) -> String {
    format!(
        "WITH RECURSIVE chain(id) AS (
             {start} UNION SELECT parent FROM layers JOIN chain USING (id) WHERE parent IS NOT NULL
         )"
    )
}

fn volume_row(row: &Row<'_>) -> Result<VolumeRow> {
    Ok(VolumeRow {
        name: parsed(row, 0)?,
        head: parsed(row, 1)?,
        size_bytes: layer_bytes(row, 2)?,
        epoch: Epoch(unsigned(row, 3)?),
        tenant: parsed(row, 4)?,
        cache: parsed(row, 5)?,
        owner: optional_parsed(row, 6)?,
    })
}

/// Columns 1 and up of [`Catalog::layer_spaces`].
fn layer_space(row: &Row<'_>) -> Result<LayerSpace> {
    Ok(LayerSpace {
        parent: optional_parsed(row, 1)?,
        data_bytes: optional_unsigned(row, 2)?,
        remote_bytes: unsigned(row, 3)?,
        poisoned: row.get(4)?,
        children: unsigned(row, 5)?,
        named: row.get(6)?,
        is_copy: row.get(7)?,
        confined: row.get(8)?,
    })
}

fn layer_row(row: &Row<'_>) -> Result<LayerRow> {
    let remote = match row.get(4)? {
        Some(nbd_addr) => Some(RemoteRow {
            nbd_addr,
            export: row.get(5)?,
            size_bytes: remote_bytes(row, 6)?,
            keep: parsed(row, 10)?,
            is_layer: optional_parsed(row, 11)?,
            own: row.get(12)?,
        }),
        None => None,
    };
    Ok(LayerRow {
        id: parsed(row, 0)?,
        size_bytes: layer_bytes(row, 1)?,
        parent: optional_parsed(row, 2)?,
        remote,
        poisoned: row.get(3)?,
        data_bytes: optional_unsigned(row, 7)?,
        untouched: row.get(8)?,
        confined: row.get(13)?,
    })
}

fn insert_layer(tx: &Transaction<'_>, layer: &LayerRow) -> Result<()> {
    let (id, parent) = (layer.id.to_string(), layer.parent.map(|parent| parent.to_string()));
    tx.prepare_cached(
        "INSERT INTO layers (id, size_bytes, parent, poisoned, data_bytes)
         VALUES (?1, ?2, ?3, ?4, ?5)",
    )?
    .execute(params![
        id,
        signed(layer.size_bytes)?,
        parent,
        layer.poisoned,
        layer.data_bytes.map(signed).transpose()?
    ])?;
    if layer.untouched {
        tx.prepare_cached("INSERT INTO untouched VALUES (?1)")?.execute([&id])?;
    }
    if layer.confined {
        confined::mark(tx, layer.id)?;
    }
    if let Some(remote) = &layer.remote {
        tx.execute(
            "INSERT INTO remote_parents
             (layer, nbd_addr, export, size_bytes, keep, is_layer, own, one_source)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, 1)",
            params![
                id,
                remote.nbd_addr,
                remote.export,
                signed(remote.size_bytes)?,
                remote.keep.to_string(),
                remote.is_layer.map(|layer| layer.to_string()),
                remote.own
            ],
        )?;
    }
    Ok(())
}

fn insert_image(tx: &Transaction<'_>, name: &ImageName, layer: LayerId) -> Result<()> {
    tx.execute("DELETE FROM released WHERE layer = ?1", [layer.to_string()])?;
    let sql = "INSERT INTO images VALUES (?1, ?2)";
    tx.execute(sql, params![name.as_str(), layer.to_string()]).map(drop)
}

fn insert_volume(tx: &Transaction<'_>, volume: &NewVolume) -> Result<()> {
    let NewVolume { name, head, epoch, tenant, cache, owner } = volume;
    insert_layer(tx, head)?;
    tx.prepare_cached(
        "INSERT INTO volumes (name, head, size_bytes, epoch, epoch_issued_max, tenant, cache, owner,
             tenure)
         VALUES (?1, ?2, ?3, ?7, ?7, ?4, ?5, ?6, ?8)",
    )?
    .execute(params![
        name.as_str(),
        head.id.to_string(),
        signed(head.size_bytes)?,
        tenant.as_str(),
        cache.to_string(),
        owner.as_ref().map(OwnerName::as_str),
        signed(epoch.0)?,
        signed(Tenure::first(epoch.incarnation()).0)?
    ])
    .map(drop)
}

/// Deletes a layer and the layers below it, down to the first one that is still needed.
fn delete_unneeded(tx: &Transaction<'_>, top: LayerId) -> Result<Vec<LayerId>> {
    let mut delete = tx.prepare(
        "DELETE FROM layers
         WHERE id = ?1
           AND NOT EXISTS (SELECT 1 FROM keepers WHERE layer = ?1)
           AND NOT EXISTS (SELECT 1 FROM layers above WHERE above.parent = ?1)
         RETURNING parent",
    )?;
    let mut deleted = Vec::new();
    let mut next = Some(top);
    while let Some(id) = next {
        let gone = delete.query_row([id.to_string()], |row| optional_parsed(row, 0));
        let Some(parent) = gone.optional()? else { break };
        deleted.push(id);
        next = parent;
    }
    Ok(deleted)
}
