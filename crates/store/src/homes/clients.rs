//! Clients: machines that boot from volumes of this pool, and their clones.
//!
//! A client boots what it is bound to at the moment when it asks. It keeps that volume until it asks
//! again, even if its binding changes. A client that is bound to an image gets a clone. A persistent
//! clone, `CLIENT.IMAGE`, is made at the first boot and used by every later one. A client that starts
//! afresh each time gets `CLIENT.IMAGE.N`. A fresh clone that was not used yet is given out again, so
//! that firmware that asks twice does not make two. A boot is over when the client has opened the volume
//! of a later boot. A mere request does not count, because anybody can make one. The clone is then
//! deleted as soon as no session has it open.
//!
//! A clone and its owner are recorded in one transaction, and the client's row names the new clone before
//! the previous one is spent. So after a crash at any point each clone belongs to a client or is spent.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use perigee_model::client::{
    Binding, Boot, Chap, ClientInfo, InitiatorName, Lifetime, MacAddress, NewClient, Over, Service,
};
use perigee_model::volume::CachePolicy;
use perigee_model::{ClientName, ImageName, Problem, TenantName, VolumeName};

use crate::catalog::{self, ClientRow, CloneRow, LayerRow, NewVolume, SpentClone, failed};
use crate::pool::Pool;

const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// A machine whose client was removed counts as off if it has not had its clone open for this long. It may
/// take a while to come back after a restart of this server or a network failure.
const ABSENT_MIN: Duration = Duration::from_secs(600);

/// The volume to which an initiator may log in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// What the client may open.
    pub volumes: Vec<VolumeName>,
    /// The CHAP user and secret of the initiator.
    pub chap: Option<Chap>,
    /// The CHAP user and secret of the target.
    pub target_chap: Option<Chap>,
}

fn info(row: ClientRow) -> ClientInfo {
    ClientInfo {
        name: row.name,
        mac: row.mac,
        initiator: row.initiator,
        chap_user: row.chap.map(|chap| chap.user),
        binding: row.binding,
        volume: row.volume,
        boots: row.boots,
        booted_s: row.booted_s,
        sessions: Vec::new(),
    }
}

fn unknown(what: &str, client: &ClientName) -> Problem {
    Problem::not_found(what, format!("this pool has no client {client}"))
        .next("`perigee client list` shows the clients")
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The name of a client's persistent clone of an image.
fn kept_name(what: &str, client: &ClientName, image: &ImageName) -> Result<VolumeName, Problem> {
    VolumeName::new(format!("{client}.{image}")).map_err(|error| Problem::invalid(what, error))
}

impl Pool {
    /// All clients, sorted by name.
    ///
    /// # Errors
    /// When the catalog can't be read.
    pub async fn clients(self: &Arc<Self>) -> Result<Vec<ClientInfo>, Problem> {
        self.run(move |pool| {
            let rows = pool.catalog.clients().map_err(failed("can't list the clients"))?;
            Ok(rows.into_iter().map(info).collect())
        })
        .await
    }

    /// # Errors
    /// Not found.
    pub async fn client(self: &Arc<Self>, name: &ClientName) -> Result<ClientInfo, Problem> {
        let name = name.clone();
        self.run(move |pool| pool.client_row(&format!("can't show client {name}"), &name).map(info))
            .await
    }

    fn client_row(&self, what: &str, name: &ClientName) -> Result<ClientRow, Problem> {
        self.catalog.client(name).map_err(failed(what))?.ok_or_else(|| unknown(what, name))
    }

    /// # Errors
    /// A conflict when another client has the name, the MAC address or the initiator name.
    pub async fn add_client(self: &Arc<Self>, new: NewClient) -> Result<ClientInfo, Problem> {
        self.change(move |pool| {
            let what = format!("can't add client {}", new.name);
            check_chap(&what, &new)?;
            let row = ClientRow::new(new);
            for other in pool.catalog.clients().map_err(failed(&what))? {
                check_apart(&what, &row, &other)?;
            }
            pool.catalog.add_client(&row).map_err(failed(&what))?;
            Ok(info(row))
        })
        .await
    }

    /// Removes a client. Its persistent clone stays, because it may have the only copy of data. A clone for
    /// a single boot is deleted as soon as no session has it open.
    ///
    /// # Errors
    /// Not found.
    pub async fn remove_client(self: &Arc<Self>, name: &ClientName) -> Result<(), Problem> {
        let name = name.clone();
        self.run(move |pool| {
            let what = format!("can't remove client {name}");
            match pool.catalog.remove_client(&name).map_err(failed(&what))? {
                true => Ok(()),
                false => Err(unknown(&what, &name)),
            }
        })
        .await?;
        self.drop_spent_clones().await;
        Ok(())
    }

    /// Sets what a client boots from its next boot on. `None` means nothing.
    ///
    /// # Errors
    /// Not found when the client, volume or image does not exist; invalid when the clone's name would not
    /// be valid, or when a boot of this client could not be told from a login.
    pub async fn bind_client(
        self: &Arc<Self>,
        name: &ClientName,
        binding: Option<Binding>,
    ) -> Result<ClientInfo, Problem> {
        let name = name.clone();
        self.run(move |pool| {
            let what = match &binding {
                Some(Binding { service, .. }) => format!("can't bind client {name} to {service}"),
                None => format!("can't unbind client {name}"),
            };
            let row = pool.client_row(&what, &name)?;
            if let Some(binding) = &binding {
                pool.check_binding(&what, &row, binding)?;
            }
            pool.catalog.bind_client(&name, binding.as_ref()).map_err(failed(&what))?;
            pool.client_row(&what, &name).map(info)
        })
        .await
    }

    fn check_binding(&self, what: &str, row: &ClientRow, binding: &Binding) -> Result<(), Problem> {
        if binding.over == Over::Nbd && row.chap.is_some() {
            let why = "it has a CHAP secret, which protects a disk over iSCSI only";
            return Err(
                Problem::invalid(what, why).next("bind it over iSCSI, or add it without a secret")
            );
        }
        match &binding.service {
            Service::Volume(volume) => {
                let found = self.catalog.volume(volume).map_err(failed(what))?;
                found
                    .map(drop)
                    .ok_or_else(|| Problem::not_found(what, "there is no such volume in this pool"))
            }
            Service::Image { image, lifetime } => {
                if self.catalog.image(image).map_err(failed(what))?.is_none() {
                    return Err(Problem::not_found(what, "there is no such image in this pool")
                        .next("import it first"));
                }
                if *lifetime == Lifetime::Ephemeral && row.mac.is_none() {
                    let why = "without the MAC address of the network card a boot can't be told \
                               from a login";
                    return Err(Problem::invalid(what, why)
                        .next("add the client with --mac, or bind it with --persistent"));
                }
                kept_name(what, &row.name, image).map(drop)
            }
        }
    }

    /// Begins a boot of the machine with this network card, and returns its disk.
    ///
    /// # Errors
    /// Not found when no client has this card, or when the volume or image of its binding no longer
    /// exists; a conflict when the client has no binding.
    pub async fn boot(self: &Arc<Self>, mac: &MacAddress) -> Result<Boot, Problem> {
        let mac = *mac;
        let boot = self.change(move |pool| pool.boot_now(&mac)).await?;
        self.drop_spent_clones().await;
        Ok(boot)
    }

    /// The caller holds the lock `changes`.
    fn boot_now(&self, mac: &MacAddress) -> Result<Boot, Problem> {
        let what = format!("can't boot the machine {mac}");
        let found = self.catalog.client_of_mac(mac).map_err(failed(&what))?;
        let row = found.ok_or_else(|| {
            Problem::not_found(&what, "no client has this network card")
                .next(format!("add it: perigee client add NAME --mac {mac}"))
        })?;
        let what = format!("can't boot client {}", row.name);
        let binding = row.binding.as_ref().ok_or_else(|| {
            Problem::conflict(&what, "it is not bound to anything")
                .next(format!("bind it: perigee client bind {} --image IMAGE", row.name))
        })?;
        let (volume, over) = (self.disk(&what, &row, &binding.service)?, binding.over);
        self.catalog.booted(&row.name, &volume, now_s()).map_err(failed(&what))?;
        let ClientRow { name: client, initiator, chap, target_chap, .. } = row;
        Ok(Boot { client, initiator, volume, over, chap, target_chap })
    }

    /// The volume from which a client boots. It is created if it is missing. The caller holds the lock
    /// `changes`.
    fn disk(&self, what: &str, row: &ClientRow, service: &Service) -> Result<VolumeName, Problem> {
        match service {
            Service::Volume(volume) => self.volume_now(volume).map(|_| volume.clone()),
            Service::Image { image, lifetime: Lifetime::Persistent } => {
                let name = kept_name(what, &row.name, image)?;
                match self.catalog.volume(&name).map_err(failed(what))? {
                    Some(_) => self.check_own(what, row, &name).map(|()| name),
                    None => self.make_clone(what, row, image, name, Lifetime::Persistent),
                }
            }
            Service::Image { image, lifetime: Lifetime::Ephemeral } => {
                if let Some(volume) = self.fresh_clone(what, row, image)? {
                    return Ok(volume);
                }
                let name = format!("{}.{image}.{}", row.name, row.boots + 1);
                let name = VolumeName::new(name).map_err(|error| Problem::invalid(what, error))?;
                self.make_clone(what, row, image, name, Lifetime::Ephemeral)
            }
        }
    }

    /// Refuses a volume with the clone's name that does not belong to the client.
    fn check_own(&self, what: &str, row: &ClientRow, name: &VolumeName) -> Result<(), Problem> {
        let made = self.catalog.clone_row(name).map_err(failed(what))?;
        if made.is_some_and(|made| made.client == row.name) {
            return Ok(());
        }
        let why = format!("its clone would have the name {name}, which another volume has already");
        Err(Problem::conflict(what, why)
            .next(format!("bind it to the volume itself: --volume {name}, or delete that volume")))
    }

    /// The clone of the client's last boot, if it was never used and is a clone of the current image.
    fn fresh_clone(
        &self,
        what: &str,
        row: &ClientRow,
        image: &ImageName,
    ) -> Result<Option<VolumeName>, Problem> {
        let Some(name) = &row.volume else { return Ok(None) };
        let made = self.catalog.clone_row(name).map_err(failed(what))?;
        if made.is_none_or(|m| m.lifetime != Lifetime::Ephemeral || m.client != row.name) {
            return Ok(None);
        }
        let volume = match self.volume_now(name) {
            Ok(volume) => volume,
            // It was for one boot. The next one gets another clone.
            Err(problem) => {
                tracing::warn!(volume = %name, %problem, "the clone of the last boot can't be opened");
                return Ok(None);
            }
        };
        let stack = volume.stack();
        let base = self.catalog.image(image).map_err(failed(what))?;
        let fresh = stack.head.is_untouched()
            && volume.open_sessions() == 0
            && stack.below.layers().next().map(|layer| layer.id) == base;
        Ok(fresh.then(|| name.clone()))
    }

    fn make_clone(
        &self,
        what: &str,
        row: &ClientRow,
        image: &ImageName,
        volume: VolumeName,
        lifetime: Lifetime,
    ) -> Result<VolumeName, Problem> {
        self.check_names_free(what, std::slice::from_ref(&volume))?;
        let (parent, size_bytes) = self.image_layer(what, image)?;
        let new = NewVolume {
            name: volume.clone(),
            head: LayerRow::new_head(size_bytes, Some(parent)),
            epoch: catalog::first_epoch(),
            tenant: TenantName::default(),
            owner: None,
            cache: CachePolicy::default(),
        };
        let made = CloneRow { volume, client: row.name.clone(), lifetime };
        self.catalog.add_clone(&new, &made).map_err(failed(what))?;
        Ok(made.volume)
    }

    /// Deletes the clones of single boots that are over and that no session has open. Failures are tried
    /// again at the next boot or by the keeper.
    pub async fn drop_spent_clones(self: &Arc<Self>) {
        self.drop_clones_spent_at(Instant::now()).await;
    }

    pub(crate) async fn drop_clones_spent_at(self: &Arc<Self>, now: Instant) {
        let spent = match self.run(move |pool| pool.catalog.spent_clones()).await {
            Ok(spent) => spent,
            Err(error) => {
                return tracing::error!(%error, "can't find the clones whose boot is over");
            }
        };
        for SpentClone { volume, may_be_running } in spent {
            let absent = || now.saturating_duration_since(self.last_used(&volume)) >= ABSENT_MIN;
            if self.open_sessions(&volume) > 0 || may_be_running && !absent() {
                continue;
            }
            match self.delete_volume(&volume).await {
                Ok(()) => tracing::info!(%volume, "deleted a clone whose boot is over"),
                Err(problem) => {
                    tracing::warn!(%volume, %problem, "can't delete a clone whose boot is over; trying again later")
                }
            }
        }
    }

    /// Deletes spent clones until the future is dropped. A clone's last session may end long after its
    /// client's next boot.
    pub async fn keep_dropping_spent_clones(self: Arc<Self>) {
        let mut moments = tokio::time::interval(SWEEP_EVERY);
        loop {
            moments.tick().await;
            self.drop_spent_clones().await;
        }
    }

    /// The volume to which an initiator may log in at this moment, if a client has this initiator name. For
    /// a client without a MAC address, a login is a boot.
    ///
    /// # Errors
    /// When the client's clone can't be created, or the catalog can't be read.
    pub async fn grant(
        self: &Arc<Self>,
        initiator: &InitiatorName,
    ) -> Result<Option<Grant>, Problem> {
        let what = format!("can't look up the rights of initiator {initiator}");
        let (initiator, now) = (initiator.clone(), what.clone());
        let found = self
            .run(move |pool| pool.catalog.client_of_initiator(&initiator).map_err(failed(&now)));
        let Some(row) = found.await? else { return Ok(None) };
        let volumes = match (row.mac, &row.binding) {
            (None, Some(binding)) => {
                let (row, service) = (row.clone(), binding.service.clone());
                self.change(move |pool| pool.boot_by_login(&what, &row, &service)).await?
            }
            // Anybody can ask for a boot. The machine comes back to what it runs from.
            _ => {
                let name = row.name.clone();
                let running = self
                    .run(move |pool| pool.catalog.running_clones(&name).map_err(failed(&what)))
                    .await?;
                row.volume.into_iter().chain(running).collect()
            }
        };
        Ok(Some(Grant { volumes, chap: row.chap, target_chap: row.target_chap }))
    }

    /// The caller holds the lock `changes`.
    fn boot_by_login(
        &self,
        what: &str,
        row: &ClientRow,
        service: &Service,
    ) -> Result<Vec<VolumeName>, Problem> {
        let volume = self.disk(what, row, service)?;
        // The volume of the earlier boot stays accessible as long as the client uses it.
        let in_use = |old: &VolumeName| *old != volume && self.open_sessions(old) > 0;
        if let Some(old) = row.volume.clone().filter(in_use) {
            return Ok(vec![old, volume]);
        }
        if row.volume.as_ref() != Some(&volume) {
            self.catalog.booted(&row.name, &volume, now_s()).map_err(failed(what))?;
        }
        Ok(vec![volume])
    }

    /// Whether initiators are restricted. A pool is open to all initiators until it gets its first client,
    /// and never again afterwards.
    ///
    /// # Errors
    /// When the catalog can't be read.
    pub async fn has_known_clients(self: &Arc<Self>) -> Result<bool, Problem> {
        let what = "can't find out whether the pool has clients";
        self.run(move |pool| pool.catalog.has_known_clients().map_err(failed(what))).await
    }
}

impl Pool {
    /// Whether a volume is the disk of a client that has a secret.
    ///
    /// # Errors
    /// When the catalog can't be read.
    pub async fn has_secret(self: &Arc<Self>, volume: &VolumeName) -> Result<bool, Problem> {
        let (what, volume) = (format!("can't find out whose disk {volume} is"), volume.clone());
        self.run(move |pool| pool.catalog.has_secret(&volume).map_err(failed(&what))).await
    }
}

fn check_chap(what: &str, new: &NewClient) -> Result<(), Problem> {
    match (&new.chap, &new.target_chap) {
        (None, Some(_)) => Err(Problem::invalid(
            what,
            "the target authenticates itself only to an initiator that authenticates itself too",
        )
        .next("give the client's own CHAP user and secret as well")),
        (Some(own), Some(target)) if own.secret == target.secret => {
            Err(Problem::invalid(what, "both sides have the same secret")
                .next("give them different ones"))
        }
        _ => Ok(()),
    }
}

fn check_apart(what: &str, new: &ClientRow, other: &ClientRow) -> Result<(), Problem> {
    let taken = |why: String| Err(Problem::conflict(what, why));
    if new.name == other.name {
        return taken(format!("a client {} exists already", other.name));
    }
    if let Some(mac) = new.mac.filter(|mac| other.mac == Some(*mac)) {
        return taken(format!("client {} has the network card {mac}", other.name));
    }
    if new.initiator == other.initiator {
        return taken(format!("client {} has the initiator name {}", other.name, other.initiator));
    }
    Ok(())
}
