//! The site of a client or host, here called the asker, and what it may have of data that may not leave this site.
//!
//! Only the asker's address decides its site, and nothing that the asker says. The controller tells each volume
//! server the sites of the hosts' addresses. An address that is not among them belongs to no site, and gets no confined
//! data.
//!
//! | what | this site | another site |
//! |---|---|---|
//! | a volume, for a proxy | yes | over TLS only; the proxy keeps it in memory |
//! | a volume, for any other client | yes | no |
//! | an image, a layer, their checksums | yes; the copy is confined too | no |
//! | the volume's home, its data over HTTP | yes | no |
//!
//! A proxy at this site may have clients from other sites. So when a volume becomes confined, its home closes the sessions of all
//! proxies that do not know it. These open them again for those of their clients that may have the data.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use perigee_block::device::{Device, Extent, IoError, Zeroing};
use perigee_block::exports::{Opener, Peer};
use perigee_block::lease::{LeaseAnswer, LeaseAsk};
use perigee_block::switch::Switch;
use perigee_model::leave_site::{LeaveSite, LeaveSiteSet, SetLeaveSiteAs, SiteMap};
use perigee_model::{Problem, SiteId};
use perigee_store::Data;

use crate::exports::PoolExports;

/// What an asker wants to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// All of it, to keep.
    Copy,
    /// To be the volume's home.
    Home,
    /// The volume's content, over HTTP.
    Content,
    /// To read and write it where it is.
    Session(Opener),
}

/// Where an asker is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum AskerSite {
    /// At this site.
    Here,
    /// At another one.
    Elsewhere(SiteId),
    /// Its address is not in the controller's list.
    Unknown(IpAddr),
}

/// A session of an asker who is not at this site, or of a proxy that does not know that the data are confined.
struct Foreign {
    of: Data,
    want: Want,
    peer: Peer,
    /// Whether the asker was told that the data are confined.
    confined: bool,
    switch: Weak<Switch>,
}

/// The sites of the hosts, and what askers from other sites have open.
#[derive(Default)]
pub struct Sites {
    /// `None`: not told yet.
    told: RwLock<Option<KnownSites>>,
    foreign: Mutex<Vec<Foreign>>,
}

struct KnownSites {
    here: SiteId,
    hosts: HashMap<IpAddr, SiteId>,
}

impl Sites {
    /// Code that holds these locks never panics.
    pub fn set(&self, map: Option<SiteMap>) {
        let told = map.map(|map| {
            let hosts = map.hosts.into_iter().map(|host| (host.address.to_canonical(), host.site));
            KnownSites { here: map.here, hosts: hosts.collect() }
        });
        *self.told.write().unwrap_or_else(PoisonError::into_inner) = told;
    }

    /// The asker's site. This is the only place that decides it.
    fn site_of(&self, peer: Peer) -> AskerSite {
        let Some(address) = peer.address else { return AskerSite::Here };
        let told = self.told.read().unwrap_or_else(PoisonError::into_inner);
        match told.as_ref().and_then(|told| Some((told, told.hosts.get(&address)?))) {
            Some((told, site)) if *site == told.here => AskerSite::Here,
            Some((_, site)) => AskerSite::Elsewhere(site.clone()),
            None if address.is_loopback() => AskerSite::Here,
            None => AskerSite::Unknown(address),
        }
    }

    /// # Errors
    /// A conflict when the asker may not have it.
    fn check(&self, of: &Data, want: Want, peer: Peer) -> Result<(), Problem> {
        let place = self.site_of(peer);
        let told = self.told.read().unwrap_or_else(PoisonError::into_inner);
        let here =
            told.as_ref().map_or("its site".to_owned(), |told| format!("site {}", told.here));
        let (asker, next) = match place {
            AskerSite::Here => return Ok(()),
            AskerSite::Elsewhere(site) => {
                if matches!(want, Want::Session(Opener::Proxy(_))) && peer.encrypted {
                    return Ok(());
                }
                (format!("site {site}"), what_to_do(want))
            }
            AskerSite::Unknown(address) if told.is_none() => (
                format!("{address}"),
                "no controller has told this volume server the sites of the hosts yet",
            ),
            AskerSite::Unknown(address) => (
                format!("{address}, which is no host's address here, so its site is not known"),
                "register the host with the controller, or ask from a host of that site",
            ),
        };
        let what = match want {
            Want::Copy => format!("can't copy {of} from here"),
            Want::Home => format!("can't let {of} go"),
            Want::Content => format!("can't read {of} from here"),
            Want::Session(_) => format!("can't open {of} from here"),
        };
        let why = format!("its policy is leave-site: never; it is at {here}, and {asker} asks");
        Err(Problem::conflict(what, why).next(next))
    }

    fn enter(&self, one: Foreign) {
        let mut foreign = self.lock();
        foreign.retain(|one| one.switch.strong_count() > 0);
        foreign.push(one);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Foreign>> {
        self.foreign.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn what_to_do(want: Want) -> &'static str {
    match want {
        Want::Copy | Want::Home => {
            "use it where it is: a VM elsewhere reads and writes it there, over an encrypted link"
        }
        Want::Content => "read it from a host of its site",
        Want::Session(Opener::Proxy(_)) => {
            "the link has to be encrypted: let both hosts join one cluster, or give this volume server \
             --tls-cert and --tls-key, and the other one --remote-tls-ca"
        }
        Want::Session(Opener::Client) => {
            "open it through the volume server of that site, which reads it over an encrypted link"
        }
    }
}

impl PoolExports {
    /// Whether the data is confined. It is looked up only for askers on the network.
    ///
    /// # Errors
    /// A conflict when it is confined and the asker may not have it.
    pub(crate) async fn check_leaving(
        &self,
        of: &Data,
        want: Want,
        peer: Peer,
    ) -> Result<bool, Problem> {
        if peer.address.is_none() {
            return Ok(false);
        }
        let confined = self.pool.leave_site(of).await? == Some(LeaveSite::Never);
        if confined {
            self.sites.check(of, want, peer)?;
        }
        Ok(confined)
    }

    /// Remembers what an asker from another site has open, and a proxy. It is closed when the asker may not have it any more.
    pub(crate) async fn note_foreign(
        &self,
        of: Data,
        want: Want,
        peer: Peer,
        confined: bool,
        switch: &Arc<Switch>,
    ) -> Result<(), Problem> {
        let is_proxy = matches!(want, Want::Session(Opener::Proxy(_))) && peer.address.is_some();
        if self.sites.site_of(peer) == AskerSite::Here && (confined || !is_proxy) {
            return Ok(());
        }
        let its = Arc::downgrade(switch);
        self.sites.enter(Foreign { of: of.clone(), want, peer, confined, switch: its });
        // Its home may be another host, and have confined it before this was remembered.
        if let Data::Volume(volume) = &of {
            let sessions = self.proxies.sessions(volume);
            let mut own = sessions.iter().filter(|(its, _)| Arc::ptr_eq(its, switch));
            if own.any(|(_, device)| device.upstream.is_confined()) {
                self.sites.check(&of, want, peer)?;
            }
        }
        // The policy may have changed since it was looked up.
        if self.check_leaving(&of, want, peer).await? == confined {
            return Ok(());
        }
        let what = format!("can't open {of} from here");
        let why = "whether it may leave its site was changed at this moment";
        Err(Problem::unavailable(what, why).next("open it again"))
    }

    /// See [`perigee_store::Pool::set_leave_site`]. When this returns, what askers from other sites have open and
    /// may not have any more is closed.
    ///
    /// # Errors
    /// As there.
    pub async fn set_leave_site(
        &self,
        of: &Data,
        ask: SetLeaveSiteAs,
    ) -> Result<LeaveSiteSet, Problem> {
        let set = self.pool.set_leave_site(of, ask).await?;
        self.close_foreign().await?;
        Ok(set)
    }

    /// Keeps the sites of the hosts, durably.
    ///
    /// # Errors
    /// As [`perigee_store::Pool::set_sites`].
    pub async fn set_sites(&self, map: SiteMap) -> Result<(), Problem> {
        self.pool.set_sites(map.clone()).await?;
        self.sites.set(Some(map));
        self.close_foreign().await
    }

    /// Closes what askers from elsewhere have open and may not have any more, and what they have open without
    /// knowing that it is confined: they may open that again.
    ///
    /// # Errors
    /// When the catalog can't be read.
    pub(crate) async fn close_foreign(&self) -> Result<(), Problem> {
        let open: Vec<_> = {
            let mut foreign = self.sites.lock();
            foreign.retain(|one| one.switch.strong_count() > 0);
            let open = foreign.iter().map(|one| {
                (one.of.clone(), one.want, one.peer, one.confined, Weak::clone(&one.switch))
            });
            open.collect()
        };
        for (of, want, peer, knows, switch) in open {
            let confined = self.pool.leave_site(&of).await? == Some(LeaveSite::Never);
            if !confined || knows && self.sites.check(&of, want, peer).is_ok() {
                continue;
            }
            let Some(switch) = switch.upgrade() else { continue };
            tracing::info!(%of, ?peer, "closing a connection: the data are confined");
            withdraw(&switch);
        }
        Ok(())
    }

    /// Whether the session's client may have its data if they are confined.
    pub(crate) fn may_have_confined(&self, switch: &Arc<Switch>) -> bool {
        let its = Arc::downgrade(switch);
        let may = |one: &Foreign| self.sites.check(&one.of, one.want, one.peer).is_ok();
        self.sites.lock().iter().filter(|one| one.switch.ptr_eq(&its)).all(may)
    }

    /// Whether a session on a volume with its home at this address goes on, now that the home has confined it: the client and the
    /// home are at this site. A client elsewhere has to open it again.
    pub(crate) async fn goes_on_confined(&self, switch: &Arc<Switch>, nbd_addr: &str) -> bool {
        if !self.may_have_confined(switch) {
            return false;
        }
        let found = tokio::net::lookup_host(nbd_addr).await;
        let found: Vec<_> = found.map(Iterator::collect).unwrap_or_default();
        let is_here = |at: &SocketAddr| {
            let address = Some(at.ip().to_canonical());
            let home = Peer { address, encrypted: false, is_own: false, is_authenticated: false };
            self.sites.site_of(home) == AskerSite::Here
        };
        !found.is_empty() && found.iter().all(is_here)
    }
}

/// Gives a session its last device: a move of the volume, also one that is under way, gives it no other one.
pub(crate) fn withdraw(switch: &Switch) {
    switch.end(withdrawn(switch));
}

/// That device.
pub(crate) fn withdrawn(switch: &Switch) -> Arc<dyn Device> {
    Arc::new(Withdrawn { size_bytes: switch.size_bytes() })
}

/// The device of a client that may not have its data any more. The client's next request ends the connection.
struct Withdrawn {
    size_bytes: u64,
}

fn gone<T: Send + 'static>() -> BoxFuture<'static, Result<T, IoError>> {
    Box::pin(async { Err(IoError::Moved) })
}

impl Device for Withdrawn {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&self, _: u64, _: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        gone()
    }

    fn write(&self, _: u64, _: Bytes, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        gone()
    }

    fn zero(&self, _: u64, _: u64, _: Zeroing, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        gone()
    }

    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
        gone()
    }

    fn extents(&self, _: u64, _: u64) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        gone()
    }

    /// A proxy that reads from its memory asks for nothing else.
    fn lease(&self, _: LeaseAsk) -> BoxFuture<'_, Result<LeaseAnswer, IoError>> {
        gone()
    }
}

#[cfg(test)]
mod tests {
    use perigee_block::lease::NO_HOST;
    use perigee_model::VolumeName;
    use perigee_model::leave_site::SiteAddress;

    use super::*;

    fn site(name: &str) -> SiteId {
        SiteId::new(name).expect("a name")
    }

    fn peer(address: &str, encrypted: bool) -> Peer {
        let address = Some(address.parse().expect("an address"));
        Peer { address, encrypted, is_own: false, is_authenticated: encrypted }
    }

    fn told() -> Sites {
        let host = |address: &str, name| SiteAddress {
            address: address.parse().expect("an address"),
            site: site(name),
        };
        let hosts = vec![host("10.0.0.1", "home"), host("10.0.1.1", "cloud")];
        let sites = Sites::default();
        sites.set(Some(SiteMap { here: site("home"), hosts, teller: None }));
        sites
    }

    fn data() -> Data {
        Data::Volume(VolumeName::new("data").expect("a name"))
    }

    #[test]
    fn an_address_is_of_the_site_that_was_told_or_of_none() {
        let sites = told();
        assert_eq!(sites.site_of(peer("10.0.0.1", false)), AskerSite::Here);
        assert_eq!(sites.site_of(peer("10.0.1.1", false)), AskerSite::Elsewhere(site("cloud")));
        let stranger = peer("10.0.0.2", false);
        assert!(matches!(sites.site_of(stranger), AskerSite::Unknown(_)));
        assert_eq!(sites.site_of(Peer::LOCAL), AskerSite::Here);
        assert_eq!(Sites::default().site_of(peer("127.0.0.1", false)), AskerSite::Here);
        let nobody = peer("10.0.0.1", false);
        assert!(matches!(Sites::default().site_of(nobody), AskerSite::Unknown(_)));
    }

    #[test]
    fn another_site_gets_a_volume_through_an_encrypted_proxy_and_in_no_other_way() {
        let sites = told();
        let proxy = Want::Session(Opener::Proxy(NO_HOST));
        let all = [Want::Copy, Want::Home, Want::Content, Want::Session(Opener::Client), proxy];
        for want in all {
            sites.check(&data(), want, peer("10.0.0.1", false)).expect("its own site");
            for address in ["10.0.1.1", "10.0.9.9"] {
                for encrypted in [false, true] {
                    let allowed = want == proxy && encrypted && address == "10.0.1.1";
                    let got = sites.check(&data(), want, peer(address, encrypted));
                    assert_eq!(got.is_ok(), allowed, "{want:?} {address} {encrypted}: {got:?}");
                }
            }
        }
        let refused = sites.check(&data(), Want::Copy, peer("10.0.1.1", false));
        let text = refused.expect_err("another site").to_string();
        for part in ["volume data", "leave-site: never", "site home", "site cloud"] {
            assert!(text.contains(part), "{text}");
        }
        let stranger = sites.check(&data(), proxy, peer("10.0.9.9", true));
        assert!(stranger.expect_err("a stranger").to_string().contains("10.0.9.9"));
    }
}
