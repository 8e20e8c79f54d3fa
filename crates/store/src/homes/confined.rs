//! Data that may not leave its site ([`LeaveSite::Never`]).
//!
//! A layer is marked, and what stands on it is confined too: clones, snapshots, and what was written since. So
//! every chain with a marked layer is confined, under all its names. An image below a confined volume is
//! not marked, because it has no data of the volume.

use std::collections::BTreeSet;
use std::sync::Arc;

use perigee_model::leave_site::{
    FindLayers, FoundLayers, LeaveSite, LeaveSiteAsker, LeaveSiteSet, SetLayersLeaveSite,
    SetLeaveSiteAs, SiteMap,
};
use perigee_model::limits::{FOUND_LAYERS, SITE_ADDRESSES};
use perigee_model::{ImageName, LayerId, Problem, VolumeName};

use crate::catalog::{LayerRow, failed};
use crate::pool::Pool;

/// The most names in a list of what shares data.
const NAMES_MAX: usize = 100;

/// What a policy is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Data {
    /// A volume of this pool.
    Volume(VolumeName),
    /// An image or a snapshot.
    Image(ImageName),
    /// A layer with what is below it.
    Layer(LayerId),
}

impl std::fmt::Display for Data {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Volume(volume) => write!(f, "volume {volume}"),
            Self::Image(image) => write!(f, "image {image}"),
            Self::Layer(layer) => write!(f, "layer {layer}"),
        }
    }
}

impl Pool {
    /// Whether this data may leave its site. `None`: it is not here.
    ///
    /// # Errors
    /// When the catalog can't be read.
    pub async fn leave_site(self: &Arc<Self>, of: &Data) -> Result<Option<LeaveSite>, Problem> {
        let of = of.clone();
        self.run(move |pool| {
            let what = format!("can't find out whether {of} may leave its site");
            let Some(top) = pool.top_of(&what, &of)? else { return Ok(None) };
            pool.catalog
                .is_confined(top)
                .map(|confined| Some(LeaveSite::confined(confined)))
                .map_err(failed(&what))
        })
        .await
    }

    fn top_of(&self, what: &str, of: &Data) -> Result<Option<LayerId>, Problem> {
        let top = match of {
            Data::Volume(volume) => self.catalog.volume(volume).map(|row| row.map(|row| row.head)),
            Data::Image(image) => self.catalog.image(image),
            Data::Layer(layer) => self.catalog.has_layer(*layer).map(|here| here.then_some(*layer)),
        };
        top.map_err(failed(what))
    }

    pub(crate) fn is_volume_confined(
        &self,
        what: &str,
        name: &VolumeName,
    ) -> Result<bool, Problem> {
        let top = self.top_of(what, &Data::Volume(name.clone()))?;
        top.map_or(Ok(false), |top| self.catalog.is_confined(top).map_err(failed(what)))
    }

    /// Changes whether data may leave its site. This does not look for copies at other hosts.
    ///
    /// # Errors
    /// Not found; invalid when confined data is to be released and this is not confirmed; forbidden when it is not the
    /// asker's alone.
    pub async fn set_leave_site(
        self: &Arc<Self>,
        of: &Data,
        ask: impl Into<SetLeaveSiteAs>,
    ) -> Result<LeaveSiteSet, Problem> {
        let of = of.clone();
        let SetLeaveSiteAs { set: ask, asker } = ask.into();
        self.change(move |pool| {
            let what = format!("can't change whether {of} may leave its site");
            let top = pool.top_of(&what, &of)?;
            let top = top.ok_or_else(|| Problem::not_found(&what, "it is not in this pool"))?;
            match ask.leave_site {
                LeaveSite::Never => pool.confine(&what, &of, top),
                LeaveSite::Allowed => pool.let_go(&what, &of, top, ask.confirmed, asker.as_ref()),
            }
        })
        .await
    }

    /// Marks the layer and those below it that nothing else needs. The points of a replica of this volume, and
    /// what it left here when it moved, are nothing else: they are its data. The caller holds the lock `changes`.
    fn confine(&self, what: &str, of: &Data, top: LayerId) -> Result<LeaveSiteSet, Problem> {
        let rows = self.catalog.chain(top).map_err(failed(what))?;
        let own = self.own_part(of, &rows).map_err(failed(what))?;
        let layers: Vec<LayerId> = rows[..own].iter().map(|row| row.id).collect();
        self.catalog.set_confined(&layers, true).map_err(failed(what))?;
        let also = self.users_but(what, &layers, of)?;
        let below = rows.get(own).filter(|_| !rows[own..].iter().any(|row| row.confined));
        let may_leave = match below {
            Some(below) => self.users_but(what, &[below.id], of)?,
            None => BTreeSet::new(),
        };
        let may_leave = may_leave.difference(&also).take(NAMES_MAX).cloned().collect();
        let also = also.into_iter().take(NAMES_MAX).collect();
        let before = LeaveSite::confined(rows.iter().any(|row| row.confined));
        Ok(LeaveSiteSet { before, leave_site: LeaveSite::Never, layers, also, may_leave })
    }

    /// How many layers of the chain, from its top on, are of these data alone.
    fn own_part(&self, of: &Data, rows: &[LayerRow]) -> rusqlite::Result<usize> {
        let volume = match of {
            Data::Volume(volume) => Some(volume),
            Data::Image(_) | Data::Layer(_) => None,
        };
        for (index, pair) in rows.windows(2).enumerate() {
            if self.catalog.has_other_users(pair[1].id, pair[0].id, volume)? {
                return Ok(index + 1);
            }
        }
        Ok(rows.len())
    }

    /// The caller holds the lock `changes`.
    fn let_go(
        &self,
        what: &str,
        of: &Data,
        top: LayerId,
        confirmed: bool,
        asker: Option<&LeaveSiteAsker>,
    ) -> Result<LeaveSiteSet, Problem> {
        let rows = self.catalog.chain(top).map_err(failed(what))?;
        let layers: Vec<LayerId> =
            rows.iter().filter(|row| row.confined).map(|row| row.id).collect();
        let users = self.users_but(what, &layers, of)?;
        if asker.is_some_and(|asker| users.iter().any(|user| !asker.may_change(user))) {
            let why = "it stands on data that others use as well, so only an admin may";
            return Err(Problem::forbidden(what, why)
                .next("ask an admin, or copy what may leave to a new volume"));
        }
        let also: Vec<String> = users.into_iter().take(NAMES_MAX).collect();
        if !layers.is_empty() && !confirmed {
            let others = match &also[..] {
                [] => String::new(),
                also => format!(", and that of {}", also.join(", ")),
            };
            let why = format!("its data{others} could then be copied to any site");
            return Err(Problem::invalid(what, why).next("confirm it: add --yes"));
        }
        self.catalog.set_confined(&layers, false).map_err(failed(what))?;
        let before = LeaveSite::confined(!layers.is_empty());
        let leave_site = LeaveSite::Allowed;
        Ok(LeaveSiteSet { before, leave_site, layers, also, may_leave: Vec::new() })
    }

    /// The volumes and images that stand on one of these layers, except for `but`.
    fn users_but(
        &self,
        what: &str,
        of: &[LayerId],
        but: &Data,
    ) -> Result<BTreeSet<String>, Problem> {
        let mut users = BTreeSet::new();
        for layer in of {
            users.extend(self.catalog.users(*layer).map_err(failed(what))?);
        }
        users.remove(&but.to_string());
        Ok(users)
    }

    /// Which of these layers are here, with what is kept of the volume by its name, because merged layers have other
    /// ids. And what stands on them.
    ///
    /// # Errors
    /// Invalid when it names too many; when the catalog can't be read.
    pub async fn find_layers(self: &Arc<Self>, ask: FindLayers) -> Result<FoundLayers, Problem> {
        let what = "can't look for layers";
        self.run(move |pool| {
            let (mut layers, kept) = pool.here_of(what, &ask)?;
            layers.extend(kept);
            layers.sort();
            layers.dedup();
            let mut users = BTreeSet::new();
            for layer in &layers {
                users.extend(pool.catalog.users(*layer).map_err(failed(what))?);
            }
            let users = users.into_iter().take(NAMES_MAX).collect();
            let mut departed = BTreeSet::new();
            for layer in &layers {
                departed.extend(pool.catalog.departed_on(*layer).map_err(failed(what))?);
            }
            let mut readers = BTreeSet::new();
            for layer in &ask.layers {
                readers.extend(pool.catalog.remote_readers(*layer).map_err(failed(what))?);
            }
            let (departed, readers) =
                (departed.into_iter().collect(), readers.into_iter().take(NAMES_MAX).collect());
            Ok(FoundLayers { layers, users, departed, readers })
        })
        .await
    }

    /// Changes whether these layers may leave their site, for the controller, which knows what their home says.
    ///
    /// # Errors
    /// Invalid when it names too many; when the catalog can't be written.
    pub async fn set_layers_leave_site(
        self: &Arc<Self>,
        SetLayersLeaveSite { of, leave_site, asker }: SetLayersLeaveSite,
    ) -> Result<(), Problem> {
        let what = "can't change whether layers may leave their site";
        self.change(move |pool| {
            let (mut layers, kept) = pool.here_of(what, &of)?;
            if let Some(asker) = asker.as_ref().filter(|_| !leave_site.is_never()) {
                layers = pool.own_layers(what, layers, asker)?;
            }
            pool.catalog.set_confined(&layers, leave_site.is_never()).map_err(failed(what))?;
            let Some(of) = of.volume.map(Data::Volume) else { return Ok(()) };
            for top in kept {
                match leave_site {
                    LeaveSite::Never => pool.confine(what, &of, top)?,
                    LeaveSite::Allowed => pool.let_go(what, &of, top, true, asker.as_ref())?,
                };
            }
            Ok(())
        })
        .await
    }

    /// Those of the layers on which nothing stands but what the asker may change.
    fn own_layers(
        &self,
        what: &str,
        layers: Vec<LayerId>,
        asker: &LeaveSiteAsker,
    ) -> Result<Vec<LayerId>, Problem> {
        let mut own = Vec::new();
        for layer in layers {
            let users = self.catalog.users(layer).map_err(failed(what))?;
            if users.iter().all(|user| asker.may_change(user)) {
                own.push(layer);
            }
        }
        Ok(own)
    }

    /// Those of the layers that are here, and the topmost ones of what is kept of the volume by its name.
    fn here_of(
        &self,
        what: &str,
        find: &FindLayers,
    ) -> Result<(Vec<LayerId>, Vec<LayerId>), Problem> {
        FOUND_LAYERS.check(find.layers.len()).map_err(|error| error.problem(what))?;
        let layers = self.catalog.present(&find.layers).map_err(failed(what))?;
        let kept = find.volume.as_ref().map(|volume| self.catalog.kept_of(volume)).transpose();
        Ok((layers, kept.map_err(failed(what))?.unwrap_or_default()))
    }

    /// The sites of the cluster's hosts, as this pool got them last. `None`: it never got them.
    ///
    /// # Errors
    /// When the catalog can't be read.
    pub async fn sites(self: &Arc<Self>) -> Result<Option<SiteMap>, Problem> {
        let what = "can't read the sites of the hosts";
        self.run(move |pool| pool.catalog.sites().map_err(failed(what))).await
    }

    /// Keeps the sites of the cluster's hosts. They are durable when this returns.
    ///
    /// # Errors
    /// Invalid when there are too many; when the catalog can't be written.
    pub async fn set_sites(self: &Arc<Self>, map: SiteMap) -> Result<(), Problem> {
        let what = "can't keep the sites of the hosts";
        SITE_ADDRESSES.check(map.hosts.len()).map_err(|error| error.problem(what))?;
        self.run(move |pool| pool.catalog.set_sites(&map).map_err(failed(what))).await
    }
}
