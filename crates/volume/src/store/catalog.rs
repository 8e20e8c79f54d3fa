//! What exists in a pool: layers and what they stand on, images, volumes and their epochs, and
//! attached volumes of other hosts. Every change is one SQLite transaction, durable when it returns.

use std::path::Path;
use std::sync::{Mutex, MutexGuard};

use perigee_model::volume::EpochChange;
use perigee_model::{Epoch, ImageName, LayerId, Problem, VolumeName};
use rusqlite::types::{FromSqlError, FromSqlResult, Type, ValueRef};
use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};

const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS layers (
    id TEXT PRIMARY KEY,
    size_bytes INTEGER NOT NULL,
    parent TEXT REFERENCES layers(id),
    poisoned TEXT                       -- why it is read-only, if a flush failed
) STRICT;
CREATE INDEX IF NOT EXISTS layers_by_parent ON layers(parent);
CREATE TABLE IF NOT EXISTS remote_parents (
    layer TEXT PRIMARY KEY REFERENCES layers(id) ON DELETE CASCADE,
    nbd_addr TEXT NOT NULL,
    export TEXT NOT NULL,
    size_bytes INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS images (
    name TEXT PRIMARY KEY,
    layer TEXT NOT NULL UNIQUE REFERENCES layers(id)
) STRICT;
CREATE TABLE IF NOT EXISTS volumes (
    name TEXT PRIMARY KEY,
    head TEXT NOT NULL UNIQUE REFERENCES layers(id),
    size_bytes INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    epoch_issued_max INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS returned_epochs (
    volume TEXT PRIMARY KEY REFERENCES volumes(name) ON DELETE CASCADE,
    epoch_max INTEGER NOT NULL          -- the highest one that was given back for an older one
) STRICT;
CREATE TABLE IF NOT EXISTS attachments (
    volume TEXT PRIMARY KEY,
    nbd_addr TEXT NOT NULL
) STRICT;
";

type Result<T> = rusqlite::Result<T>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RemoteRow {
    pub(super) nbd_addr: String,
    pub(super) export: String,
    pub(super) size_bytes: u64,
}

/// A layer stands on a layer of this pool, on a remote parent, or on nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LayerRow {
    pub(super) id: LayerId,
    pub(super) size_bytes: u64,
    pub(super) parent: Option<LayerId>,
    pub(super) remote: Option<RemoteRow>,
    pub(super) poisoned: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct VolumeRow {
    pub(super) name: VolumeName,
    pub(super) head: LayerId,
    pub(super) size_bytes: u64,
    pub(super) epoch: Epoch,
}

/// Why an epoch stays as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EpochRefused {
    NotIssued {
        issued_max: Epoch,
    },
    NotFrom {
        epoch: Epoch,
    },
    /// A migration gave it up: this is its raise, which comes late.
    Returned,
}

pub(super) struct Catalog {
    connection: Mutex<Connection>,
}

/// A catalog error as the control API tells it.
pub(super) fn problem(what: &str, error: &rusqlite::Error) -> Problem {
    if error.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull) {
        Problem::no_space(what, error).next("free space in the pool")
    } else {
        Problem::internal(what, error)
    }
}

/// A column whose text is parsed into one of our types.
struct Parsed<T>(T);

impl<T: std::str::FromStr<Err: std::error::Error + Send + Sync + 'static>> rusqlite::types::FromSql
    for Parsed<T>
{
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        value.as_str()?.parse().map(Parsed).map_err(|error| FromSqlError::Other(Box::new(error)))
    }
}

fn parsed<T>(row: &Row<'_>, column: usize) -> Result<T>
where
    T: std::str::FromStr<Err: std::error::Error + Send + Sync + 'static>,
{
    row.get::<_, Parsed<T>>(column).map(|parsed| parsed.0)
}

fn unsigned(row: &Row<'_>, column: usize) -> Result<u64> {
    let value: i64 = row.get(column)?;
    u64::try_from(value).map_err(|error| {
        rusqlite::Error::FromSqlConversionFailure(column, Type::Integer, Box::new(error))
    })
}

fn returned_max(tx: &Transaction<'_>, volume: &VolumeName) -> Result<Epoch> {
    let sql = "SELECT epoch_max FROM returned_epochs WHERE volume = ?1";
    let found = tx.query_row(sql, [volume.as_str()], |row| unsigned(row, 0)).optional()?;
    Ok(Epoch(found.unwrap_or(0)))
}

fn return_epoch(tx: &Transaction<'_>, volume: &VolumeName, epoch: Epoch) -> Result<()> {
    let sql = "INSERT INTO returned_epochs VALUES (?1, ?2)
               ON CONFLICT (volume) DO UPDATE SET epoch_max = max(epoch_max, excluded.epoch_max)";
    tx.execute(sql, params![volume.as_str(), signed(epoch.0)?]).map(drop)
}

fn signed(value: u64) -> Result<i64> {
    i64::try_from(value).map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))
}

impl Catalog {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let connection = Connection::open(path)?;
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", "FULL")?;
        connection.pragma_update(None, "foreign_keys", true)?;
        connection.execute_batch(SCHEMA)?;
        Ok(Self { connection: Mutex::new(connection) })
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().expect("no holder panics")
    }

    fn change<T>(&self, work: impl FnOnce(&Transaction<'_>) -> Result<T>) -> Result<T> {
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        let result = work(&transaction)?;
        transaction.commit()?;
        Ok(result)
    }

    pub(super) fn image(&self, name: &ImageName) -> Result<Option<LayerId>> {
        self.lock()
            .query_row("SELECT layer FROM images WHERE name = ?1", [name.as_str()], |row| {
                parsed(row, 0)
            })
            .optional()
    }

    pub(super) fn images(&self) -> Result<Vec<(ImageName, LayerId)>> {
        self.lock()
            .prepare("SELECT name, layer FROM images ORDER BY name")?
            .query_map([], |row| Ok((parsed(row, 0)?, parsed(row, 1)?)))?
            .collect()
    }

    pub(super) fn volume(&self, name: &VolumeName) -> Result<Option<VolumeRow>> {
        let sql = "SELECT name, head, size_bytes, epoch FROM volumes WHERE name = ?1";
        self.lock().query_row(sql, [name.as_str()], volume_row).optional()
    }

    pub(super) fn volumes(&self) -> Result<Vec<VolumeRow>> {
        self.lock()
            .prepare("SELECT name, head, size_bytes, epoch FROM volumes ORDER BY name")?
            .query_map([], volume_row)?
            .collect()
    }

    pub(super) fn layer_ids(&self) -> Result<Vec<LayerId>> {
        self.lock().prepare("SELECT id FROM layers")?.query_map([], |row| parsed(row, 0))?.collect()
    }

    pub(super) fn has_layer(&self, id: LayerId) -> Result<bool> {
        let sql = "SELECT count(*) > 0 FROM layers WHERE id = ?1";
        self.lock().query_row(sql, [id.to_string()], |row| row.get(0))
    }

    /// The layer and all that it stands on in this pool, from the top down.
    pub(super) fn chain(&self, top: LayerId) -> Result<Vec<LayerRow>> {
        let connection = self.lock();
        let mut statement = connection.prepare(
            "SELECT l.id, l.size_bytes, l.parent, l.poisoned, r.nbd_addr, r.export, r.size_bytes
             FROM layers l LEFT JOIN remote_parents r ON r.layer = l.id WHERE l.id = ?1",
        )?;
        let mut chain = Vec::new();
        let mut next = Some(top);
        while let Some(id) = next {
            let row = statement.query_row([id.to_string()], layer_row)?;
            next = row.parent;
            chain.push(row);
        }
        Ok(chain)
    }

    /// What stands on a layer, itself left out: `volume NAME`, `image NAME`.
    pub(super) fn dependants(&self, layer: LayerId) -> Result<Vec<String>> {
        self.lock()
            .prepare(
                "WITH RECURSIVE above(id) AS (
                     SELECT id FROM layers WHERE parent = ?1
                     UNION SELECT l.id FROM layers l JOIN above ON l.parent = above.id
                 )
                 SELECT 'volume ' || name FROM volumes WHERE head IN above
                 UNION ALL SELECT 'image ' || name FROM images WHERE layer IN above",
            )?
            .query_map([layer.to_string()], |row| row.get(0))?
            .collect()
    }

    pub(super) fn add_image(&self, name: &ImageName, layer: &LayerRow) -> Result<()> {
        self.change(|tx| {
            insert_layer(tx, layer)?;
            insert_image(tx, name, layer.id)
        })
    }

    /// A volume of epoch 1 with this head.
    pub(super) fn add_volume(&self, name: &VolumeName, head: &LayerRow) -> Result<()> {
        self.change(|tx| {
            insert_layer(tx, head)?;
            let sql = "INSERT INTO volumes VALUES (?1, ?2, ?3, 1, 1)";
            let size_bytes = signed(head.size_bytes)?;
            tx.execute(sql, params![name.as_str(), head.id.to_string(), size_bytes]).map(drop)
        })
    }

    /// Seals a volume's head, under a name if it gets one, and puts `head` on it.
    pub(super) fn seal(
        &self,
        volume: &VolumeName,
        head: &LayerRow,
        image: Option<(&ImageName, LayerId)>,
    ) -> Result<()> {
        self.change(|tx| {
            insert_layer(tx, head)?;
            if let Some((name, layer)) = image {
                insert_image(tx, name, layer)?;
            }
            let sql = "UPDATE volumes SET head = ?2 WHERE name = ?1";
            tx.execute(sql, params![volume.as_str(), head.id.to_string()]).map(drop)
        })
    }

    /// Forgets the name; tells which layers nothing needs any more.
    pub(super) fn delete_image(&self, name: &ImageName) -> Result<Vec<LayerId>> {
        self.change(|tx| {
            tx.execute("DELETE FROM images WHERE name = ?1", [name.as_str()])?;
            delete_unreferenced(tx)
        })
    }

    /// As [`Self::delete_image`].
    pub(super) fn delete_volume(&self, name: &VolumeName) -> Result<Vec<LayerId>> {
        self.change(|tx| {
            tx.execute("DELETE FROM volumes WHERE name = ?1", [name.as_str()])?;
            delete_unreferenced(tx)
        })
    }

    pub(super) fn poison(&self, layer: LayerId, why: &str) -> Result<()> {
        let sql = "UPDATE layers SET poisoned = ?2 WHERE id = ?1";
        self.lock().execute(sql, params![layer.to_string(), why]).map(drop)
    }

    pub(super) fn issue_epoch(&self, volume: &VolumeName) -> Result<Epoch> {
        let sql = "UPDATE volumes SET epoch_issued_max = epoch_issued_max + 1 WHERE name = ?1
                   RETURNING epoch_issued_max";
        self.change(|tx| tx.query_row(sql, [volume.as_str()], |row| unsigned(row, 0).map(Epoch)))
    }

    /// Compare-and-swap; a repeated one succeeds.
    pub(super) fn change_epoch(
        &self,
        volume: &VolumeName,
        change: EpochChange,
    ) -> Result<std::result::Result<(), EpochRefused>> {
        self.change(|tx| {
            let sql = "SELECT epoch, epoch_issued_max FROM volumes WHERE name = ?1";
            let (epoch, issued_max) = tx.query_row(sql, [volume.as_str()], |row| {
                Ok((Epoch(unsigned(row, 0)?), Epoch(unsigned(row, 1)?)))
            })?;
            if change.to.0 == 0 || change.to > issued_max {
                return Ok(Err(EpochRefused::NotIssued { issued_max }));
            }
            if epoch != change.from && epoch != change.to {
                return Ok(Err(EpochRefused::NotFrom { epoch }));
            }
            if change.to < change.from {
                return_epoch(tx, volume, change.from.min(issued_max))?;
            } else if epoch != change.to && change.to <= returned_max(tx, volume)? {
                return Ok(Err(EpochRefused::Returned));
            }
            let sql = "UPDATE volumes SET epoch = ?2 WHERE name = ?1";
            tx.execute(sql, params![volume.as_str(), signed(change.to.0)?])?;
            Ok(Ok(()))
        })
    }

    pub(super) fn attachments(&self) -> Result<Vec<(VolumeName, String)>> {
        self.lock()
            .prepare("SELECT volume, nbd_addr FROM attachments ORDER BY volume")?
            .query_map([], |row| Ok((parsed(row, 0)?, row.get(1)?)))?
            .collect()
    }

    pub(super) fn attach(&self, volume: &VolumeName, nbd_addr: &str) -> Result<()> {
        let sql = "INSERT INTO attachments VALUES (?1, ?2)
                   ON CONFLICT (volume) DO UPDATE SET nbd_addr = excluded.nbd_addr";
        self.lock().execute(sql, params![volume.as_str(), nbd_addr]).map(drop)
    }

    /// Whether there was one.
    pub(super) fn detach(&self, volume: &VolumeName) -> Result<bool> {
        let sql = "DELETE FROM attachments WHERE volume = ?1";
        self.lock().execute(sql, [volume.as_str()]).map(|rows| rows > 0)
    }
}

fn volume_row(row: &Row<'_>) -> Result<VolumeRow> {
    Ok(VolumeRow {
        name: parsed(row, 0)?,
        head: parsed(row, 1)?,
        size_bytes: unsigned(row, 2)?,
        epoch: Epoch(unsigned(row, 3)?),
    })
}

fn layer_row(row: &Row<'_>) -> Result<LayerRow> {
    let remote = match row.get(4)? {
        Some(nbd_addr) => {
            Some(RemoteRow { nbd_addr, export: row.get(5)?, size_bytes: unsigned(row, 6)? })
        }
        None => None,
    };
    Ok(LayerRow {
        id: parsed(row, 0)?,
        size_bytes: unsigned(row, 1)?,
        parent: row.get::<_, Option<Parsed<LayerId>>>(2)?.map(|parent| parent.0),
        remote,
        poisoned: row.get(3)?,
    })
}

fn insert_layer(tx: &Transaction<'_>, layer: &LayerRow) -> Result<()> {
    let (id, parent) = (layer.id.to_string(), layer.parent.map(|parent| parent.to_string()));
    tx.execute(
        "INSERT INTO layers VALUES (?1, ?2, ?3, ?4)",
        params![id, signed(layer.size_bytes)?, parent, layer.poisoned],
    )?;
    if let Some(remote) = &layer.remote {
        tx.execute(
            "INSERT INTO remote_parents VALUES (?1, ?2, ?3, ?4)",
            params![id, remote.nbd_addr, remote.export, signed(remote.size_bytes)?],
        )?;
    }
    Ok(())
}

fn insert_image(tx: &Transaction<'_>, name: &ImageName, layer: LayerId) -> Result<()> {
    let sql = "INSERT INTO images VALUES (?1, ?2)";
    tx.execute(sql, params![name.as_str(), layer.to_string()]).map(drop)
}

/// Deletes layers that no volume, image or layer needs, from the top of each chain down.
fn delete_unreferenced(tx: &Transaction<'_>) -> Result<Vec<LayerId>> {
    let mut statement = tx.prepare(
        "DELETE FROM layers
         WHERE id NOT IN (SELECT head FROM volumes)
           AND id NOT IN (SELECT layer FROM images)
           AND id NOT IN (SELECT parent FROM layers WHERE parent IS NOT NULL)
         RETURNING id",
    )?;
    let mut deleted = Vec::new();
    loop {
        let layers: Vec<LayerId> =
            statement.query_map([], |row| parsed(row, 0))?.collect::<Result<_>>()?;
        if layers.is_empty() {
            return Ok(deleted);
        }
        deleted.extend(layers);
    }
}
