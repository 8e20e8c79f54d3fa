//! A volume's home moves: this pool lets a volume go, or becomes its home. The rules are
//! [`perigee_model::home::Residence`]'s; each change is one transaction of the catalog.

use std::sync::Arc;
use std::time::Duration;

use perigee_block::lease::NO_HOST;
use perigee_model::home::{
    CallOff, Depart, Departed, DepartedLayer, HomeRefused, HomeState, Residence, TakeVolume,
    Tenure, VolumeHome,
};
use perigee_model::limits::DEPARTED_VOLUMES;
use perigee_model::volume::{CachePolicy, Keep};
use perigee_model::{LayerId, LeaveSite, Problem, VolumeName};

use crate::catalog::{self, Sealed, failed};
use crate::layers::layer::{self, live_name};
use crate::pool::Pool;
use crate::volume::{Stack, Volume, io_problem};

/// How long a volume that departs waits for other hosts to drop what they have of it in memory. The new home then
/// asks again. Meanwhile the hosts are told to drop it.
const LEASES_END_MAX: Duration = Duration::from_secs(2);

pub(crate) fn refused(what: &str, why: HomeRefused) -> Problem {
    let problem = match &why {
        HomeRefused::Departed { tenure, to } => {
            let why = format!("it departed with tenure {tenure} to {}", to.nbd_addr);
            Problem::conflict(what, why)
        }
        HomeRefused::NotHere => Problem::not_found(what, &why),
        _ => Problem::conflict(what, &why),
    };
    match why {
        HomeRefused::NoMoreTenures => problem.next("clone the volume and use the clone"),
        _ => problem.next("look where the volume is, and move it from there"),
    }
}

impl Pool {
    /// Where the volume's home is, as far as this pool knows. It may also be a volume that it never had.
    ///
    /// # Errors
    /// When the catalog can't be read.
    pub async fn home(self: &Arc<Self>, name: &VolumeName) -> Result<VolumeHome, Problem> {
        let name = name.clone();
        self.run(move |pool| pool.home_now(&name)).await
    }

    pub(crate) fn home_now(&self, name: &VolumeName) -> Result<VolumeHome, Problem> {
        let what = format!("can't say where the home of volume {name} is");
        let mut home = self.catalog.home_state(name).map_err(failed(&what))?;
        let mut why_missing = None;
        if let HomeState::Here { missing_bytes, .. } = &mut home {
            // It may be deleted at the same time.
            if let Some(row) = self.catalog.volume(name).map_err(failed(&what))? {
                *missing_bytes = self.missing_bytes(row.head).map_err(failed(&what))?;
                why_missing = self.why_missing(row.head).map_err(failed(&what))?;
            }
        }
        Ok(VolumeHome { volume: name.clone(), home, failed: why_missing })
    }

    /// Whether this pool is the volume's home.
    ///
    /// # Errors
    /// When the catalog can't be read.
    pub async fn is_here(self: &Arc<Self>, name: &VolumeName) -> Result<bool, Problem> {
        let name = name.clone();
        self.run(move |pool| {
            let what = format!("can't say where the home of volume {name} is");
            Ok(pool.catalog.tenure(&name).map_err(failed(&what))?.is_some())
        })
        .await
    }

    /// Does what may take long before a volume departs. It flushes the volume, so that little is left to flush while
    /// sessions are held, and has other hosts drop what they have of it in memory. For some seconds after that no host
    /// gets a lease. A volume that is not here may have departed already.
    ///
    /// # Errors
    /// The flush failed; unavailable while another host has blocks of it in memory.
    pub async fn prepare_departure(self: &Arc<Self>, name: &VolumeName) -> Result<(), Problem> {
        let what = format!("can't let volume {name} go");
        let Ok(volume) = self.volume(name).await else { return Ok(()) };
        volume.flush().await.map_err(|error| io_problem(&what, &error))?;
        self.end_leases(&what, &volume).await
    }

    /// Whether it is still to depart.
    pub(crate) async fn may_depart(
        self: &Arc<Self>,
        what: &str,
        name: &VolumeName,
        ask: &Depart,
    ) -> Result<bool, Problem> {
        let (name, what, ask) = (name.clone(), what.to_owned(), ask.clone());
        self.run(move |pool| {
            let residence = pool.catalog.residence(&name, ask.tenure).map_err(failed(&what))?;
            let decided = residence.depart(ask.tenure, &ask.to);
            if decided.map_err(|why| refused(&what, why))?.is_none() {
                return Ok(false);
            }
            pool.check_can_move(&what, &name, ask.tenure)?;
            let count = pool.catalog.departed_count().map_err(failed(&what))? + 1;
            DEPARTED_VOLUMES.check(count).map_err(|error| {
                Problem::conflict(&what, error)
                    .next("wait until other moves from here are complete")
            })?;
            Ok(true)
        })
        .await
    }

    fn check_can_move(&self, what: &str, name: &VolumeName, tenure: Tenure) -> Result<(), Problem> {
        if self.catalog.reservations(name).map_err(failed(what))?.is_some() {
            let why = "a SCSI initiator has a persistent reservation of it";
            return Err(Problem::conflict(what, why).next("release the reservation first"));
        }
        if self.catalog.is_of_client(name).map_err(failed(what))? {
            let why = "a machine without disks boots from it";
            return Err(Problem::conflict(what, why)
                .next("unbind or remove the client first (`perigee client unbind`)"));
        }
        let Some(row) = self.catalog.volume(name).map_err(failed(what))? else { return Ok(()) };
        let rows = self.catalog.chain(row.head).map_err(failed(what))?;
        if let Some(why) = rows.first().and_then(|head| head.poisoned.as_ref()) {
            let why = format!("it is read-only since a flush failed: {why}");
            return Err(Problem::conflict(what, why).next("copy the volume to a healthy disk"));
        }
        let is_restored = |remote: &catalog::RemoteRow| remote.target().is_some();
        if rows.iter().any(|row| row.remote.as_ref().is_some_and(is_restored)) {
            let why = "some of its bytes are still to come from a backup";
            return Err(Problem::unavailable(what, why)
                .next("wait until `perigee volume info` shows no missing bytes, then try again"));
        }
        let comes = |remote: &catalog::RemoteRow| remote.keep == Keep::All;
        let arrives = tenure != Tenure::first(tenure.incarnation())
            && rows.iter().any(|row| row.remote.as_ref().is_some_and(comes));
        if arrives {
            let why = "its last move is not complete: some of its blocks are still to come here";
            return Err(Problem::unavailable(what, why)
                .next("wait until `perigee volume info` shows no missing bytes, then try again"));
        }
        Ok(())
    }

    /// This waits for other hosts, so no lock is held.
    pub(crate) async fn end_leases(&self, what: &str, volume: &Arc<Volume>) -> Result<(), Problem> {
        match tokio::time::timeout(LEASES_END_MAX, volume.end_leases(NO_HOST)).await {
            Ok(ended) => ended.map_err(|error| io_problem(what, &error)),
            Err(_) => {
                let why = format!(
                    "another host has blocks of it in memory and has not given them up within {} s",
                    LEASES_END_MAX.as_secs()
                );
                Err(Problem::unavailable(what, why)
                    .next("ask again: the host is told, or its time ends"))
            }
        }
    }

    /// The caller ensures that nothing writes to the volume, and that its head is flushed. With an error comes
    /// whether the volume may be gone nevertheless.
    pub(crate) fn depart_now(
        &self,
        what: &str,
        name: &VolumeName,
        ask: &Depart,
        stack: &Stack,
    ) -> Result<(), (Problem, bool)> {
        let head = &stack.head;
        let adds_nothing =
            self.head_adds_nothing(stack).map_err(|error| (failed(what)(error), false))?;
        let (top, sealed) = if adds_nothing {
            (stack.below.layers().next().map(|below| below.id), None)
        } else {
            let layer = head.layer.id;
            (Some(layer), Some(Sealed { layer, data_bytes: head.layer.data_bytes() }))
        };
        let departed = self.catalog.depart(name, ask.tenure, &ask.to, top, sealed);
        let unneeded = match departed {
            Ok(Ok(unneeded)) => unneeded,
            Ok(Err(why)) => return Err((refused(what, why), false)),
            Err(error) => {
                // It is not known whether this was recorded. The next one who opens the volume looks.
                self.forget_volume(name);
                return Err((failed(what)(error), true));
            }
        };
        self.forget_volume(name);
        if sealed.is_some() {
            head.layer.set_cache(CachePolicy::Shared);
            if let Err(error) = self.files.remove(&live_name(head.layer.id)) {
                tracing::warn!(layer = %head.layer.id, %error, "can't remove a sealed layer's live map");
            }
            self.note_sealed();
        }
        self.remove_layers(&unneeded);
        Ok(())
    }

    /// Whether the layers below the head show all that the volume does.
    pub(crate) fn head_adds_nothing(&self, stack: &Stack) -> rusqlite::Result<bool> {
        let head = &stack.head;
        let below = stack.below.layers().next();
        // A layer that is larger than the volume would show what the volume cut off.
        let fits = below.is_none_or(|below| below.blocks() <= head.layer.blocks());
        let rows = self.catalog.chain(head.layer.id)?;
        Ok(head.is_untouched() && fits && rows[0].remote.is_none())
    }

    pub(crate) fn departed(
        &self,
        what: &str,
        name: &VolumeName,
        tenure: Tenure,
    ) -> Result<Departed, Problem> {
        let row = self
            .catalog
            .departed(name, tenure)
            .map_err(failed(what))?
            .ok_or_else(|| Problem::conflict(what, "what departed was forgotten meanwhile"))?;
        let chain = match row.top {
            Some(top) => self.departed_chain(top).map_err(failed(what))?,
            None => Vec::new(),
        };
        let is_confined = row.confined || chain.iter().any(|layer| layer.leave_site.is_never());
        Ok(Departed {
            leave_site: LeaveSite::confined(is_confined),
            tenure,
            size_bytes: row.size_bytes,
            epochs: row.epochs,
            chain,
            tenant: row.tenant,
            cache: row.cache,
            owner: row.owner,
        })
    }

    pub(crate) fn departed_chain(&self, top: LayerId) -> rusqlite::Result<Vec<DepartedLayer>> {
        let spaces = self.catalog.layer_spaces(Some(top))?;
        let rows = self.catalog.chain(top)?;
        Ok(rows
            .into_iter()
            .map(|row| DepartedLayer {
                layer: row.id,
                size_bytes: row.size_bytes,
                leave_site: LeaveSite::confined(row.confined),
                data_bytes: spaces.get(&row.id).map_or(0, |space| self.layer_bytes(row.id, space)),
                own: (row.id == top).then(|| self.own_blocks(&row)).flatten(),
            })
            .collect())
    }

    /// Whether this server may still become the volume's home by this request. `false`: it is it already.
    ///
    /// # Errors
    /// As [`Residence::take`]; a conflict when another volume of this name is here.
    pub async fn may_arrive(
        self: &Arc<Self>,
        name: &VolumeName,
        tenure: Tenure,
    ) -> Result<bool, Problem> {
        let name = name.clone();
        self.run(move |pool| {
            pool.may_arrive_now(&format!("can't take volume {name}"), &name, tenure)
        })
        .await
    }

    pub(crate) fn may_arrive_now(
        &self,
        what: &str,
        name: &VolumeName,
        tenure: Tenure,
    ) -> Result<bool, Problem> {
        let here = self.catalog.tenure(name).map_err(failed(what))?;
        if here.is_some_and(|here| here.incarnation() != tenure.incarnation()) {
            let why = "this pool has another volume with that name";
            return Err(
                Problem::conflict(what, why).next("delete that one first, if it is not needed")
            );
        }
        let residence = self.catalog.residence(name, tenure).map_err(failed(what))?;
        let decided = residence.take(tenure).map_err(|why| refused(what, why))?;
        Ok(decided.is_some())
    }

    pub(crate) fn arrive_now(
        &self,
        what: &str,
        name: &VolumeName,
        take: &TakeVolume,
        departed: &Departed,
    ) -> Result<(), Problem> {
        let (rows, parent) = self.parent_rows(what, &take.from.nbd_addr, &departed.chain)?;
        for row in &rows {
            layer::clear(&*self.files, row.id).map_err(|error| io_problem(what, &error.into()))?;
        }
        let arrived = self.catalog.arrive(name, take.tenure, departed, &rows, parent);
        arrived.map_err(failed(what))?.map_err(|why| refused(what, why))
    }

    /// This server never becomes the home in the tenure after this one, unless it did already.
    ///
    /// # Errors
    /// When the catalog can't be written.
    pub async fn refuse_home(
        self: &Arc<Self>,
        name: &VolumeName,
        CallOff { tenure }: CallOff,
    ) -> Result<VolumeHome, Problem> {
        let name = name.clone();
        self.change(move |pool| {
            let what = format!("can't refuse volume {name}");
            let now: Residence = pool.catalog.refuse_home(&name, tenure).map_err(failed(&what))?;
            if now.has_refused(tenure) {
                pool.drop_staged(&name);
                let home = HomeState::NotHere { refused: now.spent, had: now.had };
                return Ok(VolumeHome { volume: name, home, failed: None });
            }
            pool.home_now(&name)
        })
        .await
    }

    /// Drops what was kept of a volume that departed. `tenure` is the one at its new home, which must have
    /// everything. What is forgotten already, or never departed, is no error.
    ///
    /// # Errors
    /// When the catalog can't be written.
    pub async fn forget_departed(
        self: &Arc<Self>,
        name: &VolumeName,
        tenure: Tenure,
    ) -> Result<(), Problem> {
        let name = name.clone();
        self.change(move |pool| {
            let what = format!("can't forget volume {name}, which departed");
            let forgotten = pool.catalog.forget_departed(&name, tenure);
            let unneeded = forgotten.map_err(failed(&what))?;
            pool.drop_copies(&unneeded);
            pool.remove_layers(&unneeded);
            // Layers that were kept for its new home may be free to be merged now.
            pool.note_sealed();
            Ok(())
        })
        .await
    }

    /// Where the volume went, for who looks for it here.
    ///
    /// # Errors
    /// When the catalog can't be read.
    pub async fn moved_to(self: &Arc<Self>, name: &VolumeName) -> Result<Option<String>, Problem> {
        let home = self.home(name).await?.home;
        match home {
            HomeState::Departed { to, .. } => Ok(Some(to.nbd_addr)),
            HomeState::NotHere { refused, .. } if refused != Tenure(0) => {
                let attached = self.attachments().await?;
                Ok(attached.into_iter().find(|(volume, _)| volume == name).map(|(_, at)| at))
            }
            HomeState::Here { .. } | HomeState::NotHere { .. } => Ok(None),
        }
    }
}
