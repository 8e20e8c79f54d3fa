//! The state that all parts of the controller share: records, hosts and the index of unfinished jobs. It starts
//! no tasks: code that needs a driver asks the supervisor through [`Cluster::drive_job`], so this module does
//! not depend on the drivers.

pub mod accounts;
pub mod amounts;
pub mod balance;
mod capacity;
mod drains;
pub mod history_cache;
mod hosts;
mod index;
mod lanes;
mod lately;
pub mod ledger;
mod links;
pub mod measurements;
pub mod members;
mod networks;
pub mod paces;
mod parts;
pub mod price_list;
pub mod rentals;
pub mod renter;
mod restored;
mod settings;
pub mod staging;
mod strange_images;
pub mod tasks;
mod wakes;
mod watched;

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use perigee_http::identity::Strangers;
use perigee_http::{Authority, BOOT_ID, Claim, Clock, Identity, Network, Seldom, boot_id};
use perigee_model::grant::{self, Allowed, GRANT_LIFE_MS, SignedGrant};
use perigee_model::{
    BackupName, HostId, ImageName, JobId, LayerId, Problem, RentalId, SiteId, VmId, VolumeName,
};
use perigee_repository::Repository;
use tokio::sync::{Notify, broadcast, mpsc};

use crate::audit::Audit;
use crate::clock::{CLOCK, now_ms};
use crate::job_files::JobFiles;
use crate::records::asked::Requests;
use crate::records::{
    JobRecord, MigrationRecord, Owned, Records, RentalRecord, VolumeMoveRecord, job_key,
    migration_key, rental_key, volume_move_key,
};
use crate::store::{SqliteStore, directory};
use crate::{level, term};

use accounts::Accounts;
use amounts::Amounts;
use balance::Balances;
pub use capacity::{
    Counters, ERROR_BUCKETS, VCPUS_PER_CPU, capacity, capacity_of, for_vms_bytes, starts_at_once,
};
use history_cache::HistoryCache;
use hosts::Ways;
pub use hosts::{HostEntry, HostLink, Hosts, Said};
pub use index::groups::groups_of;
pub use index::holds::{Alone, Detachment, Hold};
#[cfg(test)]
pub(crate) use index::tests::moved;
pub use index::{Grant, Index, Lent, Usage, Used, demand_of};
pub use lanes::{Lane, Lanes};
pub use lately::Gathered;
use lately::Lately;
use ledger::Ledger;
pub use links::{Ask, Links, Local};
use measurements::Measurements;
use networks::Networks;
use paces::Paces;
use price_list::Prices;
use rentals::{RentalTiming, Rentals};
use renter::{Renter, RenterTiming};
use restored::Restored;
pub use settings::Settings;
use staging::Staging;
use strange_images::StrangeImages;
use tasks::Tasks;
use wakes::Wakes;
use watched::Watched;

/// Intervals and deadlines. The tests use shorter ones.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// The time between two checks of a job's VM or a migration.
    pub poll: Duration,
    /// The time between two readings of a job's figures.
    pub figures: Duration,
    /// The time between two checks of a host, and between two tries of a cleanup.
    pub monitor: Duration,
    /// The agents' figures of loads are means over at most so long (`agent/src/load.rs`). Until then they have in them what a VM did at a host
    /// that it has left.
    pub load_mean: Duration,
    /// Until a measurement of a link that is missing is wanted again: it may have failed, or there was nothing to read.
    pub links_again: Duration,
    /// A host that has not answered for this long is unreachable.
    pub host_deadline: Duration,
    /// The longest time from the VM's start to the runner's first message.
    pub boot_deadline: Duration,
    /// From the first time that a volume's new home could not take it until the move is called off. The
    /// volume may have left its old home: its clients wait, and they give up after a minute.
    pub take_patience: Duration,
    /// How long a volume that is to come to its VM may be refused until it is left where it is.
    pub follow_patience: Duration,
    /// How long a volume's old home keeps its layers after a move that is complete.
    pub shadow: Duration,
    /// How long a cancelled job may take to end its command and to give its outputs.
    pub cancel_deadline: Duration,
    /// How long a VM that has ended may take, started once more, to write its outputs.
    pub collect_deadline: Duration,
    /// How long a program in a guest goes on about which nobody asks, if it is to end then.
    pub exec_unwatched: Duration,
    /// How often the controller renews its own certificate. This also mends one that was made while the clock was wrong.
    pub own_renewal: Duration,
    /// How long hosts that no record has may take to be heard after a restore: agents register every 5 seconds.
    pub restored_min: Duration,
    pub rentals: RentalTiming,
    pub renter: RenterTiming,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            poll: Duration::from_millis(250),
            figures: Duration::from_millis(500),
            monitor: Duration::from_secs(2),
            load_mean: Duration::from_secs(70),
            links_again: Duration::from_secs(60),
            host_deadline: Duration::from_secs(30),
            boot_deadline: Duration::from_secs(300),
            take_patience: Duration::from_secs(20),
            follow_patience: Duration::from_secs(120),
            shadow: Duration::from_secs(3600),
            cancel_deadline: Duration::from_secs(300),
            collect_deadline: Duration::from_secs(1200),
            exec_unwatched: Duration::from_secs(90),
            own_renewal: Duration::from_secs(3600),
            restored_min: Duration::from_secs(6),
            rentals: RentalTiming::default(),
            renter: RenterTiming::default(),
        }
    }
}

/// A job or a migration that needs a driver.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wanted {
    Job(JobId),
    Migration {
        vm: VmId,
        number: u32,
    },
    VolumeMove(VolumeName),
    Replica(VolumeName, SiteId),
    Rental(RentalId),
    Backup(BackupName),
    /// Of a volume whose bytes are still to come from a backup, by its layer.
    Restore(LayerId),
}

/// How the controller talks over TCP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Traffic {
    /// Over TLS, with certificates of the cluster's authority. The controller's own names these addresses and DNS names.
    Tls(Vec<String>),
    /// Nothing is encrypted, and nobody proves who they are.
    Plain,
}

impl Traffic {
    fn network(&self, authority: &Authority) -> Result<Network, Problem> {
        match self {
            Self::Plain => Ok(Network::Plain),
            Self::Tls(called) => {
                let own = authority.controller(called)?;
                Identity::new(&own, Strangers::Heard).map(Network::Tls)
            }
        }
    }

    /// Gives the controller's identity a new certificate, if it has one.
    pub fn renew(&self, authority: &Authority, network: &Network) -> Result<(), Problem> {
        match (self, network.identity()) {
            (Self::Tls(called), Some(identity)) => identity.replace(&authority.controller(called)?),
            _ => Ok(()),
        }
    }
}

/// What all parts of the controller share: the store, what is known of hosts and jobs in memory, and the settings. It
/// starts nothing; drivers and endless tasks belong to the supervisor.
pub struct Cluster {
    pub records: Records,
    /// How long ago something was, whatever is done to the system's clock.
    pub clock: Clock,
    /// Makes the certificates of the hosts.
    pub authority: Authority,
    /// Whoever makes tokens and certificates, or revokes some, takes turns.
    pub enrolling: tokio::sync::Mutex<()>,
    /// The hosts at which the controller looks because they ask for it.
    pub looked_at: std::sync::Mutex<BTreeSet<HostId>>,
    /// Whoever makes or removes both records of a replica takes turns.
    pub replica_records: tokio::sync::Mutex<()>,
    /// Whoever begins to use a kept disk, or ends it, takes turns.
    pub kept_disks: tokio::sync::Mutex<()>,
    /// Held while a backup looks for others and gets its record, so one of two that begin at the same moment goes first; and while a tenant gets its targets. No host is
    /// asked meanwhile.
    pub beginning_backups: tokio::sync::Mutex<()>,
    /// Hosts that tried to join with a token that does not count.
    pub bad_joins: Seldom,
    /// Requests with a token that does not count.
    pub bad_tokens: Seldom,
    /// Requests whose clients have given them keys.
    pub requests: Requests,
    /// Tenants and their users.
    pub accounts: Accounts,
    pub audit: Audit,
    /// How the controller talks with hosts and clients over TCP.
    pub network: Network,
    /// By what it commands the hosts.
    pub claim: Arc<Claim>,
    pub traffic: Traffic,
    pub hosts: Hosts,
    pub index: Index,
    pub state_dir: PathBuf,
    pub timing: Timing,
    pub links: Links,
    /// The files of all tenants.
    pub repository: Arc<Repository>,
    /// The logs and samples of jobs.
    pub job_files: JobFiles,
    /// Inputs of jobs that are being staged.
    pub staging: Staging,
    /// How fast inputs and outputs may come and go.
    pub paces: Paces,
    /// Networks of tenants.
    pub networks: Networks,
    /// Migrations share links.
    pub lanes: Lanes,
    /// What decisions about all running VMs have in common.
    pub lately: Lately,
    pub history_cache: HistoryCache,
    pub wakes: Wakes,
    /// When this controller was started. What it knows of what is older may come from a backup.
    pub begun_ms: u64,
    /// Names of which volumes are being made.
    pub making: Mutex<BTreeSet<VolumeName>>,
    /// What the scheduler did.
    pub counters: Counters,
    /// Wakes the cleaner.
    pub clean_now: Notify,
    /// Wakes the drain of hosts.
    pub drain_now: Notify,
    /// What is done about overloaded hosts.
    pub balances: Balances,
    /// The memory of VMs that may have more or less of it.
    pub amounts: Amounts,
    /// What was measured of hosts.
    pub measurements: Measurements,
    /// Rented hosts.
    pub rentals: Rentals,
    /// The rule by which hosts are rented.
    pub renter: Renter,
    /// Hosts that have to be heard after a restore.
    pub restored: Restored,
    /// Images whose import is to end, because they are deleted.
    pub cancelled_imports: broadcast::Sender<ImageName>,
    /// What hosts have and the controller does not show.
    pub strange_images: StrangeImages,
    pub settings: Settings,
    /// What is reserved and was spent.
    pub ledger: Arc<Ledger>,
    /// What hosts, disks and traffic cost.
    pub prices: Prices,
    /// What the endless tasks did last.
    pub tasks: Arc<Tasks>,
    /// Programs in guests that end when nobody asks about them any more.
    pub watched: Watched,
    wanted: mpsc::UnboundedSender<Wanted>,
    /// The lock that keeps other controllers out of the state directory.
    lock: Mutex<Option<File>>,
}

impl Cluster {
    /// Lets the host do this at other hosts; `None` in a cluster without certificates, where everybody may.
    ///
    /// # Errors
    /// When it can't be signed.
    pub fn grant(&self, host: &HostId, allows: Allowed) -> Result<Option<SignedGrant>, Problem> {
        if self.network.identity().is_none() {
            return Ok(None);
        }
        let until_ms = now_ms().saturating_add(GRANT_LIFE_MS);
        self.authority.sign(&grant::Grant { host: host.clone(), allows, until_ms }).map(Some)
    }

    /// Reads the state of an earlier run. `wanted` passes requests for drivers to the supervisor.
    ///
    /// # Errors
    /// If the state directory cannot be used.
    pub async fn open(
        state_dir: &Path,
        timing: Timing,
        traffic: Traffic,
        settings: Settings,
        wanted: mpsc::UnboundedSender<Wanted>,
    ) -> Result<Arc<Self>, Problem> {
        perigee_http::private_directory(state_dir)?;
        let lock = directory::lock(state_dir)?;
        let records = Records::new(Arc::new(SqliteStore::open(&state_dir.join(directory::STORE))?));
        level::begin(&records).await?;
        level::check(&records, state_dir).await?;
        let clock = open_clock(&records).await?;
        let authority = directory::authority(state_dir)?;
        let network = traffic.network(&authority)?;
        let (accounts, audit) = (Accounts::load(&records).await?, Audit::open(state_dir)?);
        let claim = term::begin(&records, state_dir, &authority, &network).await?;
        let ways = Ways { network: network.clone(), claim: Arc::clone(&claim) };
        let requests = Requests::load(&records).await?;
        let hosts = Hosts::load(&records, timing.host_deadline, ways).await?;
        let index = Index::load(&records).await?;
        let links = Links::load(&records).await?;
        let balances = Balances::load(&records, &clock).await?;
        let history_cache = HistoryCache::load(&records).await?;
        let ledger = Arc::new(Ledger::load(&records).await?);
        let prices = Prices::load(settings.prices.clone(), &settings.renting, &records).await?;
        let rentals = Rentals::load(&records, Arc::clone(&ledger)).await?;
        let renter = Renter::load(&records).await?;
        let restored = Restored::load(&records).await?;
        let measurements = Measurements::load(&records).await?;
        Ok(Arc::new(Self {
            records,
            clock,
            authority,
            enrolling: tokio::sync::Mutex::default(),
            looked_at: std::sync::Mutex::default(),
            replica_records: tokio::sync::Mutex::default(),
            kept_disks: tokio::sync::Mutex::default(),
            beginning_backups: tokio::sync::Mutex::default(),
            bad_joins: Seldom::default(),
            bad_tokens: Seldom::default(),
            requests,
            accounts,
            audit,
            network,
            claim,
            traffic,
            hosts,
            index,
            state_dir: state_dir.to_owned(),
            timing,
            links,
            repository: Repository::open(&state_dir.join("data"))?,
            job_files: JobFiles::new(state_dir),
            staging: Staging::default(),
            paces: Paces::default(),
            networks: Networks::default(),
            lanes: Lanes::default(),
            lately: Lately::default(),
            history_cache,
            wakes: Wakes::default(),
            begun_ms: now_ms(),
            making: Mutex::default(),
            counters: Counters::default(),
            clean_now: Notify::new(),
            drain_now: Notify::new(),
            balances,
            amounts: Amounts::default(),
            measurements,
            rentals,
            renter,
            restored,
            cancelled_imports: broadcast::Sender::new(16),
            strange_images: StrangeImages::default(),
            settings,
            ledger,
            prices,
            tasks: Arc::default(),
            watched: Watched::default(),
            wanted,
            lock: Mutex::new(Some(lock)),
        }))
    }

    /// Every job, including ended ones, sorted by id. This is for people who list them.
    pub async fn jobs(&self) -> Result<Vec<JobRecord>, Problem> {
        self.records.list("jobs/").await
    }

    /// Jobs that are not in a final state: those that hold a host's memory or volumes, or wait.
    pub fn unfinished_jobs(&self) -> Vec<Arc<JobRecord>> {
        self.index.jobs()
    }

    /// Migrations that are not in a final state.
    pub fn unfinished_migrations(&self) -> Vec<Arc<MigrationRecord>> {
        self.index.unfinished_migrations()
    }

    /// The site of a host, also of a rented one that is gone; `None`: nobody knows it any more.
    pub fn site_of(&self, host: &HostId) -> Option<SiteId> {
        match self.hosts.get(host) {
            Ok(found) => Some(found.addresses.site.clone()),
            Err(_) => self.rentals.of_host(host).map(|rental| rental.site),
        }
    }

    /// Takes a job's record as its only owner. Each save also updates the index.
    pub async fn own_job(
        self: &Arc<Self>,
        id: &JobId,
    ) -> Result<Option<Owned<JobRecord>>, Problem> {
        let Some(record) = self.records.own::<JobRecord>(&job_key(id)).await? else {
            return Ok(None);
        };
        // The previous owner may have been stopped after its write and before its update of the index.
        self.index.put_job(&record.value);
        let cluster = Arc::clone(self);
        Ok(Some(record.telling(move |record| cluster.index.put_job(record))))
    }

    /// Like [`Cluster::own_job`], for a migration.
    pub async fn own_migration(
        self: &Arc<Self>,
        vm: &VmId,
        number: u32,
    ) -> Result<Option<Owned<MigrationRecord>>, Problem> {
        let key = migration_key(vm, number);
        let Some(record) = self.records.own::<MigrationRecord>(&key).await? else {
            return Ok(None);
        };
        self.index.put_migration(&record.value);
        let cluster = Arc::clone(self);
        Ok(Some(record.telling(move |record| cluster.index.put_migration(record))))
    }

    /// Writes a new migration; `false` if one with this number exists.
    pub async fn create_migration(&self, record: &MigrationRecord) -> Result<bool, Problem> {
        let key = migration_key(&record.migration.vm, record.number);
        let created = self.records.create(&key, record).await?;
        if created {
            self.index.put_migration(record);
        }
        Ok(created)
    }

    /// As [`Cluster::own_job`], for the last move of a volume.
    pub async fn own_volume_move(
        self: &Arc<Self>,
        volume: &VolumeName,
    ) -> Result<Option<Owned<VolumeMoveRecord>>, Problem> {
        let key = volume_move_key(volume);
        let Some(record) = self.records.own::<VolumeMoveRecord>(&key).await? else {
            return Ok(None);
        };
        self.index.put_volume_move(&record.value);
        let cluster = Arc::clone(self);
        Ok(Some(record.telling(move |record| cluster.index.put_volume_move(record))))
    }

    /// As [`Cluster::own_job`], for a rented host.
    pub async fn own_rental(
        self: &Arc<Self>,
        id: &RentalId,
    ) -> Result<Option<Owned<RentalRecord>>, Problem> {
        let Some(record) = self.records.own::<RentalRecord>(&rental_key(id)).await? else {
            return Ok(None);
        };
        self.rentals.put(&record.value.view);
        let cluster = Arc::clone(self);
        Ok(Some(record.telling(move |record| cluster.rentals.put(&record.view))))
    }

    /// Requests a driver. If the driver is running, it checks the job again.
    pub fn drive_job(&self, job: &JobId) {
        self.want(Wanted::Job(job.clone()));
    }

    /// Requests the driver of a migration, as [`Self::drive_job`].
    pub fn drive_migration(&self, record: &MigrationRecord) {
        let vm = record.migration.vm.clone();
        self.want(Wanted::Migration { vm, number: record.number });
    }

    /// Requests the driver of a volume's last move, as [`Self::drive_job`].
    pub fn drive_volume_move(&self, volume: &VolumeName) {
        self.want(Wanted::VolumeMove(volume.clone()));
    }

    /// Requests the driver of a volume's replica at a site, as [`Self::drive_job`].
    pub fn drive_replica(&self, volume: &VolumeName, site: &SiteId) {
        self.want(Wanted::Replica(volume.clone(), site.clone()));
    }

    /// Requests the driver of a rented host, as [`Self::drive_job`].
    pub fn drive_rental(&self, id: &RentalId) {
        self.want(Wanted::Rental(id.clone()));
    }

    /// Requests the driver of a backup, as [`Self::drive_job`].
    pub fn drive_backup(&self, name: &BackupName) {
        self.want(Wanted::Backup(name.clone()));
    }

    /// Requests the driver of a volume that still gets bytes from a backup, as [`Self::drive_job`].
    pub fn drive_restore(&self, layer: LayerId) {
        self.want(Wanted::Restore(layer));
    }

    fn want(&self, wanted: Wanted) {
        if self.wanted.send(wanted).is_err() {
            tracing::debug!("the controller is ending: no more drivers are started");
        }
    }

    /// Releases the lock on the state directory for another controller.
    pub fn release(&self) {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// The clock goes on from what earlier controllers have seen.
async fn open_clock(records: &Records) -> Result<Clock, Problem> {
    let boot_id = boot_id(Path::new(BOOT_ID));
    let clock = match records.read(CLOCK).await? {
        Some(seen) => Clock::going_on(boot_id, seen),
        None => Clock::new(boot_id),
    };
    records.put(CLOCK, &clock.seen()).await?;
    Ok(clock)
}
