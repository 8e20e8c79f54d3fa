//! The catalog's clients, and the clones that were made for them.

use perigee_model::client::{
    Binding, Chap, InitiatorName, Lifetime, MacAddress, NewClient, Over, Service,
};
use perigee_model::{ClientName, ImageName, VolumeName};
use rusqlite::types::Type;
use rusqlite::{OptionalExtension, Row, params};

use crate::catalog::columns::{optional_parsed, optional_unsigned, parsed, signed, unsigned};
use crate::catalog::{Catalog, NewVolume, Result, admissions, insert_volume};

/// A client of another protocol: an iSCSI initiator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ClientRow {
    pub(crate) name: ClientName,
    pub(crate) mac: Option<MacAddress>,
    pub(crate) initiator: InitiatorName,
    pub(crate) chap: Option<Chap>,
    pub(crate) target_chap: Option<Chap>,
    pub(crate) binding: Option<Binding>,
    /// The volume that it booted last.
    pub(crate) volume: Option<VolumeName>,
    pub(crate) boots: u64,
    pub(crate) booted_s: Option<u64>,
}

impl ClientRow {
    pub(crate) fn new(new: NewClient) -> Self {
        let NewClient { name, mac, initiator, chap, target_chap } = new;
        let initiator = initiator.unwrap_or_else(|| InitiatorName::of(&name));
        let (binding, volume, booted_s) = (None, None, None);
        Self { name, mac, initiator, chap, target_chap, binding, volume, boots: 0, booted_s }
    }
}

/// A clone that was made for a client. The client may have been removed since.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CloneRow {
    pub(crate) volume: VolumeName,
    pub(crate) client: ClientName,
    pub(crate) lifetime: Lifetime,
}

/// A clone for a single boot that is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SpentClone {
    pub(crate) volume: VolumeName,
    /// Its client was removed, but the machine may still be running from the clone.
    pub(crate) may_be_running: bool,
}

const CLIENT_ROWS: &str = "
    SELECT name, mac, initiator, chap_user, chap_secret, target_user, target_secret,
           bound_volume, bound_image, lifetime, over, volume, boots, booted_s
    FROM clients";

impl Catalog {
    pub(crate) fn clients(&self) -> Result<Vec<ClientRow>> {
        self.lock()
            .prepare(&format!("{CLIENT_ROWS} ORDER BY name"))?
            .query_map([], client_row)?
            .collect()
    }

    /// Whether a client was ever added. Removing the last client does not open the pool to everybody.
    pub(crate) fn has_known_clients(&self) -> Result<bool> {
        let sql = "SELECT has_known_clients FROM pool";
        self.lock().prepare_cached(sql)?.query_row([], |row| row.get(0))
    }

    pub(crate) fn client(&self, name: &ClientName) -> Result<Option<ClientRow>> {
        self.client_where("name", name.as_str())
    }

    pub(crate) fn client_of_mac(&self, mac: &MacAddress) -> Result<Option<ClientRow>> {
        self.client_where("mac", &mac.to_string())
    }

    pub(crate) fn client_of_initiator(
        &self,
        initiator: &InitiatorName,
    ) -> Result<Option<ClientRow>> {
        self.client_where("initiator", initiator.as_str())
    }

    fn client_where(&self, column: &str, value: &str) -> Result<Option<ClientRow>> {
        let sql = format!("{CLIENT_ROWS} WHERE {column} = ?1");
        self.lock().prepare_cached(&sql)?.query_row([value], client_row).optional()
    }

    pub(crate) fn add_client(&self, client: &ClientRow) -> Result<()> {
        let secret = |chap: &Option<Chap>| chap.as_ref().map(|c| c.secret.reveal().to_owned());
        let user = |chap: &Option<Chap>| chap.as_ref().map(|c| c.user.to_string());
        self.change(|tx| {
            tx.execute("UPDATE pool SET has_known_clients = 1", [])?;
            tx.execute(
                "INSERT INTO clients (name, mac, initiator, chap_user, chap_secret, target_user,
                                      target_secret, arrived)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, 0)",
                params![
                    client.name.as_str(),
                    client.mac.map(|mac| mac.to_string()),
                    client.initiator.as_str(),
                    user(&client.chap),
                    secret(&client.chap),
                    user(&client.target_chap),
                    secret(&client.target_chap),
                ],
            )
            .map(drop)
        })
    }

    /// Returns whether the client existed.
    pub(crate) fn remove_client(&self, name: &ClientName) -> Result<bool> {
        let sql = "DELETE FROM clients WHERE name = ?1";
        self.lock().execute(sql, [name.as_str()]).map(|rows| rows > 0)
    }

    /// Returns whether the client exists.
    pub(crate) fn bind_client(&self, name: &ClientName, binding: Option<&Binding>) -> Result<bool> {
        let (volume, image, lifetime) = match binding.map(|binding| &binding.service) {
            None => (None, None, None),
            Some(Service::Volume(volume)) => (Some(volume.as_str()), None, None),
            Some(Service::Image { image, lifetime }) => {
                (None, Some(image.as_str()), Some(lifetime_text(*lifetime)))
            }
        };
        let over = binding.map_or(Over::default(), |binding| binding.over).to_string();
        let sql = "UPDATE clients SET bound_volume = ?2, bound_image = ?3, lifetime = ?4, over = ?5
                   WHERE name = ?1";
        let rows =
            self.lock().execute(sql, params![name.as_str(), volume, image, lifetime, over])?;
        Ok(rows > 0)
    }

    /// Records the volume from which a client boots now.
    pub(crate) fn booted(&self, name: &ClientName, volume: &VolumeName, now_s: u64) -> Result<()> {
        let sql = "UPDATE clients SET arrived = arrived AND volume IS ?2, volume = ?2,
                          boots = boots + 1, booted_s = ?3
                   WHERE name = ?1";
        let row = params![name.as_str(), volume.as_str(), signed(now_s)?];
        self.lock().execute(sql, row).map(drop)
    }

    /// Adds a volume that is a client's clone.
    pub(crate) fn add_clone(&self, volume: &NewVolume, clone: &CloneRow) -> Result<()> {
        self.change(|tx| {
            admissions::forget(tx, &volume.name)?;
            insert_volume(tx, volume)?;
            let sql = "INSERT INTO client_clones (volume, client, lifetime, opened)
                       VALUES (?1, ?2, ?3, 0)";
            let lifetime = lifetime_text(clone.lifetime);
            let row = params![clone.volume.as_str(), clone.client.as_str(), lifetime];
            tx.execute(sql, row).map(drop)
        })
    }

    pub(crate) fn clone_row(&self, volume: &VolumeName) -> Result<Option<CloneRow>> {
        let sql = "SELECT volume, client, lifetime FROM client_clones WHERE volume = ?1";
        self.lock().query_row(sql, [volume.as_str()], clone_row).optional()
    }

    /// Whether a client with a secret boots from a volume, is bound to it, or has it as a clone.
    pub(crate) fn has_secret(&self, volume: &VolumeName) -> Result<bool> {
        let sql = "SELECT EXISTS (SELECT 1 FROM clients WHERE chap_user IS NOT NULL AND (
                       volume = ?1 OR bound_volume = ?1
                       OR name = (SELECT client FROM client_clones WHERE volume = ?1)))";
        self.lock().prepare_cached(sql)?.query_row([volume.as_str()], |row| row.get(0))
    }

    /// Records that a session of a volume begins: the client that boots from it has opened it.
    pub(crate) fn note_opened(&self, volume: &VolumeName) -> Result<()> {
        let connection = self.lock();
        for sql in [
            "UPDATE clients SET arrived = 1 WHERE volume = ?1 AND NOT arrived",
            "UPDATE client_clones SET opened = 1 WHERE volume = ?1 AND NOT opened",
        ] {
            connection.prepare_cached(sql)?.execute([volume.as_str()])?;
        }
        Ok(())
    }

    /// The clones of a client's earlier boots from which it may still run: it has not opened its present volume yet. One that has
    /// booted once at most runs from none of them: they were an earlier client's of that name.
    pub(crate) fn running_clones(&self, client: &ClientName) -> Result<Vec<VolumeName>> {
        let sql = "SELECT c.volume FROM client_clones c JOIN clients ON clients.name = c.client
                   WHERE c.client = ?1 AND c.opened AND NOT clients.arrived AND clients.boots > 1
                     AND clients.volume IS NOT c.volume";
        let volume = |row: &Row<'_>| parsed(row, 0);
        self.lock().prepare_cached(sql)?.query_map([client.as_str()], volume)?.collect()
    }

    /// The clones for a single boot that is over. A clone's boot is over if the clone was never opened and is
    /// not the client's current disk, if the client has opened another volume since, or if the client was
    /// removed.
    pub(crate) fn spent_clones(&self) -> Result<Vec<SpentClone>> {
        let sql = "SELECT c.volume, clients.name IS NULL AND opened
                   FROM client_clones c LEFT JOIN clients ON clients.name = c.client
                   WHERE c.lifetime = 'ephemeral' AND clients.volume IS NOT c.volume
                     AND (clients.name IS NULL OR arrived OR NOT opened)";
        let spent =
            |row: &Row<'_>| Ok(SpentClone { volume: parsed(row, 0)?, may_be_running: row.get(1)? });
        self.lock().prepare(sql)?.query_map([], spent)?.collect()
    }
}

fn lifetime_text(lifetime: Lifetime) -> &'static str {
    match lifetime {
        Lifetime::Persistent => "persistent",
        Lifetime::Ephemeral => "ephemeral",
    }
}

fn lifetime(row: &Row<'_>, column: usize) -> Result<Lifetime> {
    match row.get::<_, String>(column)?.as_str() {
        "persistent" => Ok(Lifetime::Persistent),
        "ephemeral" => Ok(Lifetime::Ephemeral),
        other => Err(wrong(column, format!("{other:?} is not a lifetime of a clone"))),
    }
}

fn over(row: &Row<'_>, column: usize) -> Result<Over> {
    match row.get::<_, String>(column)?.as_str() {
        "iscsi" => Ok(Over::Iscsi),
        "nbd" => Ok(Over::Nbd),
        other => Err(wrong(column, format!("{other:?} is not a protocol of volumes"))),
    }
}

fn wrong(column: usize, why: String) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(column, Type::Text, why.into())
}

/// A user name from this column, and the secret from the next one.
fn chap(row: &Row<'_>, column: usize) -> Result<Option<Chap>> {
    let Some(user) = optional_parsed(row, column)? else { return Ok(None) };
    Ok(Some(Chap { user, secret: parsed(row, column + 1)? }))
}

fn clone_row(row: &Row<'_>) -> Result<CloneRow> {
    Ok(CloneRow { volume: parsed(row, 0)?, client: parsed(row, 1)?, lifetime: lifetime(row, 2)? })
}

fn client_row(row: &Row<'_>) -> Result<ClientRow> {
    let volume: Option<VolumeName> = optional_parsed(row, 7)?;
    let image: Option<ImageName> = optional_parsed(row, 8)?;
    let service = match (volume, image) {
        (Some(volume), _) => Some(Service::Volume(volume)),
        (None, Some(image)) => Some(Service::Image { image, lifetime: lifetime(row, 9)? }),
        (None, None) => None,
    };
    let over = over(row, 10)?;
    Ok(ClientRow {
        name: parsed(row, 0)?,
        mac: optional_parsed(row, 1)?,
        initiator: parsed(row, 2)?,
        chap: chap(row, 3)?,
        target_chap: chap(row, 5)?,
        binding: service.map(|service| Binding { service, over }),
        volume: optional_parsed(row, 11)?,
        boots: unsigned(row, 12)?,
        booted_s: optional_unsigned(row, 13)?,
    })
}
