//! The format of a pool, and the upgrade from the formats before it.
//!
//! SQLite's `user_version` is the format's version. A new file has version 0. All missing steps are one
//! transaction, so a crash leaves the old format or the new one. A newer format is refused before
//! anything is written.

use std::fs::Permissions;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rusqlite::Connection;

/// The newest format, which is the one that is written.
const VERSION: i64 = STEPS.len() as i64;

/// Step N upgrades from version N to N + 1.
const STEPS: [&str; 1] = ["
CREATE TABLE pool (                     -- one row
    id TEXT NOT NULL,
    has_known_clients INTEGER NOT NULL DEFAULT 0,   -- never 0 again
    site TEXT                           -- NULL: not told yet
) STRICT;
INSERT INTO pool (id) VALUES (lower(hex(randomblob(16))));
CREATE TABLE stores (                   -- directories of layers beside the pool's own
    dir TEXT PRIMARY KEY
) STRICT;
CREATE TABLE layers (
    id TEXT PRIMARY KEY,
    size_bytes INTEGER NOT NULL,
    parent TEXT REFERENCES layers(id),
    poisoned TEXT,                      -- why it is read-only, if a flush failed
    data_bytes INTEGER,                 -- of a sealed layer, once it is known
    content TEXT                        -- SHA-256 of what it shows, or has to show when the copy is complete
) STRICT;
CREATE INDEX layers_by_parent ON layers(parent);
CREATE TABLE untouched (                -- layers of which no flush is known to be durable
    layer TEXT PRIMARY KEY REFERENCES layers(id) ON DELETE CASCADE
) STRICT;
CREATE TABLE staged (                   -- layers that were made before anything stood on them
    layer TEXT PRIMARY KEY REFERENCES layers(id) ON DELETE CASCADE
) STRICT;
CREATE TABLE held (                     -- layers that may not leave their site, nor may what stands on them
    layer TEXT PRIMARY KEY REFERENCES layers(id) ON DELETE CASCADE
) STRICT;
CREATE TABLE released (                 -- layers whose names were deleted while something stood on them
    layer TEXT PRIMARY KEY REFERENCES layers(id) ON DELETE CASCADE
) STRICT;
CREATE TABLE remote_parents (
    layer TEXT PRIMARY KEY REFERENCES layers(id) ON DELETE CASCADE,
    nbd_addr TEXT NOT NULL,
    export TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    keep TEXT NOT NULL,                 -- 'never', 'read' or 'all'
    is_layer TEXT,                      -- which sealed layer it is, where that is known
    own INTEGER NOT NULL,               -- 1: only what the layer itself has
    one_source INTEGER NOT NULL,        -- 1: all that the copy has came from this source
    -- 1: other content came from there. 2: other content came, and nobody knows from whom.
    refused INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE images (
    name TEXT PRIMARY KEY,
    layer TEXT NOT NULL UNIQUE REFERENCES layers(id)
) STRICT;
CREATE TABLE volumes (
    name TEXT PRIMARY KEY,
    head TEXT NOT NULL UNIQUE REFERENCES layers(id),
    size_bytes INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    epoch_issued_max INTEGER NOT NULL,
    tenant TEXT NOT NULL,
    cache TEXT NOT NULL,
    owner TEXT,                         -- the job that made it, if no person did
    tenure INTEGER NOT NULL             -- grows with each move
) STRICT;
CREATE TABLE returned_epochs (
    volume TEXT PRIMARY KEY REFERENCES volumes(name) ON DELETE CASCADE,
    epoch_max INTEGER NOT NULL          -- the highest one that was given back for an older one
) STRICT;
CREATE TABLE reservations (             -- who has a claim on a volume over SCSI, kept over a restart
    volume TEXT PRIMARY KEY REFERENCES volumes(name) ON DELETE CASCADE,
    state TEXT NOT NULL
) STRICT;
CREATE TABLE seen_units (               -- what each port of an initiator has last found under a name
    export TEXT NOT NULL,
    port TEXT NOT NULL,
    serial TEXT NOT NULL,
    PRIMARY KEY (export, port)
) STRICT;
CREATE TABLE leases (                   -- hosts that may have blocks of a volume in memory
    volume TEXT PRIMARY KEY REFERENCES volumes(name) ON DELETE CASCADE,
    host INTEGER NOT NULL
) STRICT;
CREATE TABLE attachments (
    volume TEXT PRIMARY KEY,
    nbd_addr TEXT NOT NULL
) STRICT;
CREATE TABLE admissions (                  -- other hosts that may open a volume, which may come here later
    volume TEXT NOT NULL,
    host TEXT NOT NULL,
    PRIMARY KEY (volume, host)
) STRICT;
CREATE TABLE sites (                    -- where other hosts are
    address TEXT PRIMARY KEY,
    site TEXT NOT NULL
) STRICT;
CREATE TABLE departed (                 -- volumes that have other homes, which may still need their layers
    volume TEXT NOT NULL,
    tenure INTEGER NOT NULL,            -- at the new home
    top TEXT REFERENCES layers(id),     -- NULL: it had none
    nbd_addr TEXT NOT NULL,             -- of the new home
    control_url TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    epoch_issued_max INTEGER NOT NULL,
    epoch_returned_max INTEGER NOT NULL,
    tenant TEXT NOT NULL,
    cache TEXT NOT NULL,
    owner TEXT,
    held INTEGER NOT NULL,              -- 1: the volume itself was
    PRIMARY KEY (volume, tenure)
) STRICT;
CREATE INDEX departed_by_top ON departed(top);
CREATE TABLE spent_tenures (            -- of volumes that are not here: none up to it begins here any more
    volume TEXT NOT NULL,
    incarnation INTEGER NOT NULL,
    tenure INTEGER NOT NULL,
    had INTEGER NOT NULL,               -- the highest that began here; 0: none did
    PRIMARY KEY (volume, incarnation)
) STRICT;
CREATE TABLE replicas (                 -- points of replicas of volumes that have their homes elsewhere
    volume TEXT NOT NULL,
    layer TEXT NOT NULL REFERENCES layers(id),
    tenure INTEGER NOT NULL,            -- at the home
    taken_ms INTEGER NOT NULL,          -- by the controller's clock
    size_bytes INTEGER NOT NULL,
    tenant TEXT NOT NULL,
    cache TEXT NOT NULL,
    PRIMARY KEY (volume, layer)
) STRICT;
CREATE INDEX replicas_by_layer ON replicas(layer);
CREATE TABLE replica_pins (             -- layers of volumes here that replicas elsewhere stand on
    volume TEXT NOT NULL REFERENCES volumes(name) ON DELETE CASCADE,
    replica TEXT NOT NULL,              -- its site
    layer TEXT NOT NULL REFERENCES layers(id) ON DELETE CASCADE,
    filling INTEGER NOT NULL,           -- the replica still copies it and what is below it
    PRIMARY KEY (volume, replica, layer)
) STRICT;
CREATE INDEX replica_pins_by_layer ON replica_pins(layer);
CREATE TABLE clients (                  -- machines that boot from volumes
    name TEXT PRIMARY KEY,
    mac TEXT UNIQUE,
    initiator TEXT NOT NULL UNIQUE,
    chap_user TEXT,
    chap_secret TEXT,                   -- as it is: CHAP can't be answered with a hash of it
    target_user TEXT,
    target_secret TEXT,
    bound_volume TEXT,                  -- what it boots next: a volume,
    bound_image TEXT,                   -- or a clone of an image
    lifetime TEXT,                      -- of that clone
    over TEXT NOT NULL DEFAULT 'iscsi',
    volume TEXT,                        -- what it booted last
    boots INTEGER NOT NULL DEFAULT 0,
    booted_s INTEGER,
    arrived INTEGER NOT NULL            -- 1: it has opened what it booted last
) STRICT;
CREATE TABLE client_clones (            -- volumes that were made for clients, who may be gone
    volume TEXT PRIMARY KEY REFERENCES volumes(name) ON DELETE CASCADE,
    client TEXT NOT NULL,
    lifetime TEXT NOT NULL,
    opened INTEGER NOT NULL
) STRICT;
"];

/// What keeps a layer and all layers below it from being deleted. Each connection makes this view for itself, so it is
/// not part of the format.
pub(super) const KEEPERS: &str = "
CREATE TEMP VIEW keepers (layer, what, name) AS
    SELECT head, 'volume', name FROM volumes
    UNION ALL SELECT layer, 'image', name FROM images
    UNION ALL SELECT top, 'departed', volume FROM departed WHERE top IS NOT NULL
    UNION ALL SELECT layer, 'replica', volume FROM replicas";

/// The reason why a catalog can't be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    #[error("its format is version {found}, and this program knows versions up to {VERSION}")]
    Newer { found: i64 },
    #[error(transparent)]
    Sqlite(#[from] rusqlite::Error),
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// Denies other users access, because the catalog has secrets. SQLite gives its other files the same mode.
pub(super) fn close_to_others(path: &Path) -> std::io::Result<()> {
    std::fs::File::options().append(true).create(true).mode(0o600).open(path)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o600))
}

/// Upgrades the catalog to the newest format.
pub(super) fn upgrade(connection: &mut Connection) -> Result<(), OpenError> {
    upgrade_by(connection, &STEPS)
}

fn upgrade_by(connection: &mut Connection, steps: &[&str]) -> Result<(), OpenError> {
    let (found, version) = (user_version(connection)?, steps.len() as i64);
    if found > version {
        return Err(OpenError::Newer { found });
    }
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "foreign_keys", true)?;
    let missing = usize::try_from(found).map_or(steps, |done| &steps[done..]);
    if missing.is_empty() {
        return Ok(());
    }
    let transaction = connection.transaction()?;
    for step in missing {
        transaction.execute_batch(step)?;
    }
    transaction.pragma_update(None, "user_version", version)?;
    Ok(transaction.commit()?)
}

fn user_version(connection: &Connection) -> rusqlite::Result<i64> {
    connection.pragma_query_value(None, "user_version", |row| row.get(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a next format would come.
    const NEXT: &str = "ALTER TABLE volumes ADD COLUMN note TEXT NOT NULL DEFAULT 'none';
                        CREATE TABLE notes (id TEXT) STRICT;";

    fn catalog_of_this_version() -> Connection {
        let mut connection = Connection::open_in_memory().expect("a catalog");
        upgrade(&mut connection).expect("the format");
        let rows = "INSERT INTO layers (id, size_bytes) VALUES ('a', 4096);
                    INSERT INTO volumes (name, head, size_bytes, epoch, epoch_issued_max, tenant, cache, tenure)
                    VALUES ('v', 'a', 4096, 3, 5, 'acme', 'shared', 1);";
        connection.execute_batch(rows).expect("rows");
        connection
    }

    #[test]
    fn an_older_format_keeps_its_rows_and_gets_the_new_columns() {
        let mut connection = catalog_of_this_version();
        let steps = [STEPS[0], NEXT];
        upgrade_by(&mut connection, &steps).expect("an upgrade");
        assert_eq!(user_version(&connection), Ok(VERSION + 1));
        let sql =
            "SELECT epoch, tenant, note FROM volumes JOIN layers ON id = head WHERE name = 'v'";
        let row = connection.query_row(sql, [], |row| {
            Ok((row.get(0)?, row.get::<_, String>(1)?, row.get::<_, String>(2)?))
        });
        assert_eq!(row, Ok((3, "acme".to_owned(), "none".to_owned())));
        upgrade_by(&mut connection, &steps).expect("a second opening changes nothing");
    }

    #[test]
    fn an_upgrade_that_fails_half_way_leaves_the_old_format() {
        let mut connection = catalog_of_this_version();
        connection.execute_batch("CREATE TABLE notes (x TEXT)").expect("what the step trips over");
        upgrade_by(&mut connection, &[STEPS[0], NEXT]).expect_err("there is a table of that name");
        assert_eq!(user_version(&connection), Ok(VERSION));
        let columns = "SELECT count(*) FROM pragma_table_info('volumes') WHERE name = 'note'";
        assert_eq!(connection.query_row(columns, [], |row| row.get(0)), Ok(0));
    }

    #[test]
    fn a_newer_format_is_refused_and_left_alone() {
        let mut connection = Connection::open_in_memory().expect("a catalog");
        connection.pragma_update(None, "user_version", VERSION + 1).expect("a version");
        let refused = upgrade(&mut connection).expect_err("nobody knows it here");
        assert!(matches!(refused, OpenError::Newer { found } if found == VERSION + 1));
        let tables = "SELECT count(*) FROM sqlite_schema";
        assert_eq!(connection.query_row(tables, [], |row| row.get(0)), Ok(0));
    }
}
