//! What a job costs: reserved before its VM is asked for, and settled at its end.
//!
//! What was spent is reckoned as the plan was (`planner/src/options/cost.rs`): each host for the time of the VM there, from the VM's start
//! until it is taken down; its disks where it started; the bytes that its disks' counters and its migrations say have left a site, and its data
//! volumes that have come from there ([`Run::note_came`]). If a price is not known any more, as that of a host that was removed, what was reserved counts. What a rented host has cost is known from its rental.
//!
//! That is the tenant's part. What the cluster pays for a rented host is reserved and counted in its rental (`rentals/money.rs`).
//!
//! A job that begins anew is reserved for again, and each of its runs is settled by itself.

use std::collections::BTreeMap;

use perigee_model::budget::{JobCost, MoneyRange};
use perigee_model::job::{Migration, MigrationState};
use perigee_model::money::{Money, Price};
use perigee_model::volume::IoStats;
use perigee_model::volume_move::VolumeMove;
use perigee_model::{HostId, Problem, ProblemKind, TenantName, VolumeName};

use super::driver::Run;
use super::gang::GangRun;
use crate::cluster::Cluster;
use crate::cluster::price_list::PricesNow;
use crate::ledger::{self, left_site};
use crate::meter::{self, Came, DiskTotals};
use crate::records::{
    JobRecord, MigrationRecord, PlacedDisk, Placement, migration_prefix, owner_of, vm_of,
};

/// Whom the ledger knows this run of the job as: each run has an entry. An id may be given out again after a restore.
fn owner(record: &JobRecord) -> String {
    format!("job/{}/{}", owner_of(&record.job), record.restarts)
}

/// Whether the ledger has a reservation for this run of the job.
pub fn is_reserved(cluster: &Cluster, record: &JobRecord) -> bool {
    cluster.ledger.entry(&owner(record)).is_some_and(|entry| entry.spent.is_none())
}

/// Gives back what is reserved for a run that has not begun: whoever reserved it was stopped before the record said so.
///
/// # Errors
/// If the store fails.
pub(super) async fn release(cluster: &Cluster, record: &JobRecord) -> Result<(), Problem> {
    if !is_reserved(cluster, record) {
        return Ok(());
    }
    ledger::release(cluster, &owner(record)).await
}

/// Reserves what a run of the job costs at most, before anything is asked for. `false`: its tenant's budget has no room any more, and its
/// hosts are given back; the scheduler says why it waits.
///
/// # Errors
/// If the store fails.
pub(super) async fn reserve(
    cluster: &Cluster,
    record: &mut JobRecord,
    cost: Option<MoneyRange>,
) -> Result<bool, Problem> {
    let Some(predicted) = cost else { return Ok(true) };
    let tenant = TenantName::of(record.job.id.as_str());
    match ledger::reserve(cluster, &owner(record), Some(tenant), predicted.high).await {
        Err(problem) if problem.kind == ProblemKind::NoSpace => {
            cluster.index.take_back(&record.job.id);
            release(cluster, record).await?;
            return Ok(false);
        }
        reserved => reserved?,
    }
    let spent = record.job.cost.and_then(|cost| cost.spent);
    record.job.cost = Some(JobCost { predicted, spent });
    Ok(true)
}

impl Run {
    /// Settles what this run has cost, and adds that to what the job has cost. A VM without a job has no price. The caller stores the record with the end of the run: until
    /// then all of this may be repeated.
    pub(super) async fn settle(&mut self) -> Result<(), Problem> {
        let record = &self.record.value;
        note_left_sites(&self.cluster, record).await?;
        if !record.kind.is_a_job() {
            return Ok(());
        }
        let spent = of_run(&self.cluster, record, &mut Shipped::new()).await?;
        self.record.value.job.cost = settle(&self.cluster, record, spent).await?;
        Ok(())
    }

    /// Notes the data volumes that have come from another host in this run, for the bill: their moves are forgotten before it is settled. Returns
    /// whether one was not noted yet.
    pub(super) fn note_came(&mut self) -> bool {
        let (cluster, record) = (&self.cluster, &mut self.record.value);
        let (Some(placement), Some(ran_ms)) = (&record.placement, record.job.started_ms) else {
            return false;
        };
        if record.kind.is_persistent_vm() {
            return false;
        }
        let (clock, run) = (&cluster.clock, record.restarts);
        let mut is_new = false;
        for disk in placement.disks.iter().filter(|disk| disk.data_of.is_some()) {
            let Some(last) = cluster.index.volume_move(&disk.volume) else { continue };
            let VolumeMove { volume, from, to, started_ms, .. } = last.view.clone();
            if to == disk.home && clock.age_ms(started_ms) <= clock.age_ms(ran_ms) {
                is_new |= record.meter.came(Came { volume, from, to, times: 1, started_ms, run });
            }
        }
        is_new
    }

    /// Adds what the VM's disks have sent since `before`, their totals then, to what has left the sites of rented hosts.
    pub(super) fn disks_have_sent(&mut self, here: &HostId, before: &[DiskTotals]) {
        let record = &self.record.value;
        let Some(placement) = &record.placement else { return };
        let mut left = Vec::new();
        for (number, (disk, now)) in
            placement.disks.iter().zip(&record.meter.totals.disks).enumerate()
        {
            let before = before.get(number).map(|totals| totals.client).unwrap_or_default();
            for (from, to, bytes) in sent(disk, here, &meter::minus(now.client, before)) {
                if bytes > 0 && left_site::leaves(&self.cluster, from, to) {
                    left.push((from.clone(), bytes));
                }
            }
        }
        self.add_left_sites(left);
    }

    /// Adds what a migration has sent.
    pub(super) fn migration_has_sent(&mut self, moved: &Migration) {
        if left_site::leaves(&self.cluster, &moved.from, &moved.to) {
            self.add_left_sites(vec![(moved.from.clone(), moved.bytes)]);
        }
    }

    fn add_left_sites(&mut self, left: Vec<(HostId, u64)>) {
        let record = &mut self.record.value;
        for (from, bytes) in left {
            record.meter.left_site(from, bytes);
        }
        if !record.meter.left_sites.is_empty() {
            left_site::so_far(&self.cluster, &owner(record), &record.meter.left_sites);
        }
    }
}

/// Says what has left the sites of rented hosts because of a run, as it was last saved.
pub(super) fn say_left_sites(cluster: &Cluster, record: &JobRecord) {
    if !record.job.state.is_final() {
        left_site::so_far(cluster, &owner(record), &record.meter.left_sites);
    }
}

/// Notes what has left the sites of rented hosts because of a run that is over.
///
/// # Errors
/// If the store fails.
pub(super) async fn note_left_sites(cluster: &Cluster, record: &JobRecord) -> Result<(), Problem> {
    left_site::over(cluster, &owner(record), &record.meter.left_sites).await
}

impl GangRun {
    /// Settles what the members of this run have cost. Returns what the job has cost with that, which the caller stores with the end of the
    /// run: until then all of this may be repeated.
    pub(super) async fn settle(&self, members: &[&JobRecord]) -> Result<Option<JobCost>, Problem> {
        let (mut sum, mut shipped) = (Some(Money::ZERO), Shipped::new());
        for member in members {
            note_left_sites(&self.cluster, member).await?;
            let spent = of_run(&self.cluster, member, &mut shipped).await?;
            sum = sum.zip(spent).map(|(sum, spent)| sum.plus(spent));
        }
        settle(&self.cluster, &self.record.value, sum).await
    }
}

/// Settles that a run has cost so much; `None`: that is not known, and what was reserved counts. Returns what the job has cost with that.
async fn settle(
    cluster: &Cluster,
    record: &JobRecord,
    spent: Option<Money>,
) -> Result<Option<JobCost>, Problem> {
    let Some(cost) = record.job.cost else {
        // It was cancelled between the reservation and the placement.
        release(cluster, record).await?;
        return Ok(None);
    };
    let owner = owner(record);
    if let Some(entry) = cluster.ledger.entry(&owner) {
        ledger::settle(cluster, &owner, spent.unwrap_or(entry.reserved)).await?;
    }
    // An earlier try may have settled a little less: the clock has gone on since.
    let settled = cluster.ledger.entry(&owner).and_then(|entry| entry.spent);
    let of_run = settled.or(spent).unwrap_or_default();
    Ok(Some(JobCost { spent: Some(cost.spent.unwrap_or_default().plus(of_run)), ..cost }))
}

/// How often a volume of the job file, or clones of it, have come from a host to another one. What clones have in common is shipped once.
type Shipped = BTreeMap<(VolumeName, HostId, HostId), u32>;

/// What this run of a VM has cost until now, without what others have `shipped` before; `None` if a price is not known.
async fn of_run(
    cluster: &Cluster,
    record: &JobRecord,
    shipped: &mut Shipped,
) -> Result<Option<Money>, Problem> {
    let (Some(placement), Some(started_ms)) = (&record.placement, record.job.started_ms) else {
        return Ok(Some(Money::ZERO));
    };
    let Some(prices) = cluster.prices.now(&cluster.rentals) else { return Ok(None) };
    let mut moves: Vec<MigrationRecord> =
        cluster.records.list(&migration_prefix(&vm_of(&record.job.id))).await?;
    moves.retain(|moved| {
        moved.start.run == record.restarts && moved.migration.state == MigrationState::Completed
    });
    let moves: Vec<Migration> = moves.into_iter().map(|moved| moved.migration).collect();
    let ended_ms = record.job.ended_ms.filter(|_| record.job.state.is_final());
    let until_ms = ended_ms.map_or(0, |ended_ms| cluster.clock.age_ms(ended_ms));
    let ages = Ages { since_ms: cluster.clock.age_ms(started_ms).max(until_ms), until_ms };
    let mut bill = Bill { cluster, prices, sum: Some(Money::ZERO) };
    bill.machines(&placement.start, ages, &moves);
    let disk_bytes = bill.disk_bytes(record).await?;
    bill.disks(&placement.start, disk_bytes, ages.since_ms - ages.until_ms);
    if let Some(at) = &record.job.host {
        for (disk, totals) in placement.disks.iter().zip(&record.meter.totals.disks) {
            bill.traffic(disk, at, &totals.client);
        }
    }
    for came in record.meter.came_in(record.restarts) {
        bill.came(placement, came, shipped);
    }
    Ok(bill.sum)
}

/// How long ago a run began and ended, whatever the system's clock was set to since.
#[derive(Debug, Clone, Copy)]
struct Ages {
    since_ms: u64,
    /// 0 if it has not ended; at most `since_ms`.
    until_ms: u64,
}

struct Bill<'a> {
    cluster: &'a Cluster,
    prices: PricesNow,
    /// `None`: a price is not known.
    sum: Option<Money>,
}

impl Bill<'_> {
    /// `None`: it is the users' own, or nobody knows that any more. Then the sum is not known either.
    fn price(&mut self, host: &HostId) -> Option<std::sync::Arc<Price>> {
        if let Ok(found) = self.cluster.hosts.get(host) {
            return self.prices.of(host, &found.addresses.site);
        }
        if let Some(rental) = self.cluster.rentals.of_host(host) {
            return self.prices.of_rental(&rental);
        }
        self.sum = None;
        None
    }

    fn add(&mut self, amount: Option<Money>) {
        self.sum = self.sum.zip(amount).map(|(sum, amount)| sum.plus(amount));
    }

    /// Each host for the time of the VM there.
    fn machines(&mut self, start: &HostId, ages: Ages, moves: &[Migration]) {
        let clock = &self.cluster.clock;
        let (mut at, mut since_ms) = (start.clone(), ages.since_ms);
        let ends = moves.iter().map(|moved| {
            (moved.ended_ms.map_or(ages.until_ms, |ended_ms| clock.age_ms(ended_ms)), Some(moved))
        });
        for (end_ms, moved) in ends.chain([(ages.until_ms, None)]) {
            // Whatever is said of the moves: together the hosts have the whole time.
            let end_ms = end_ms.clamp(ages.until_ms, since_ms);
            if let Some(price) = self.price(&at) {
                self.add(price.machine((since_ms - end_ms).div_ceil(1000)));
            }
            let Some(moved) = moved else { return };
            self.egress(&moved.from, &moved.to, moved.bytes);
            (at, since_ms) = (moved.to.clone(), end_ms);
        }
    }

    /// The root and the output disk of the VM; `None` if the image's size is not known.
    async fn disk_bytes(&self, record: &JobRecord) -> Result<Option<u64>, Problem> {
        crate::planning::disk_bytes(self.cluster, &record.job.spec).await
    }

    fn disks(&mut self, at: &HostId, bytes: Option<u64>, ms: u64) {
        let Some(price) = self.price(at) else { return };
        self.add(bytes.and_then(|bytes| price.disk(bytes, ms.div_ceil(1000))));
    }

    /// What went over the network for a disk.
    fn traffic(&mut self, disk: &PlacedDisk, at: &HostId, io: &IoStats) {
        for (from, to, bytes) in sent(disk, at, io) {
            self.egress(from, to, bytes);
        }
    }

    /// A volume that has come. Of clones of one volume, as the plan has it, the first one counts.
    fn came(&mut self, placement: &Placement, came: &Came, shipped: &mut Shipped) {
        let data = placement.disks.iter().filter_map(|disk| Some((disk, disk.data_of.clone()?)));
        let mut data = data.zip(&placement.traits.data_bytes);
        let found = data.find(|((disk, _), _)| disk.volume == came.volume);
        let Some(((_, of), bytes)) = found else { return };
        let before = shipped.entry((of, came.from.clone(), came.to.clone())).or_default();
        let more = came.times.saturating_sub(*before);
        *before += more;
        self.egress(&came.from, &came.to, bytes.saturating_mul(u64::from(more)));
    }

    fn egress(&mut self, from: &HostId, to: &HostId, bytes: u64) {
        if bytes == 0 || from == to {
            return;
        }
        let (left, reached) = (self.cluster.site_of(from), self.cluster.site_of(to));
        if left.is_some() && left == reached {
            return;
        }
        if let Some(price) = self.price(from) {
            // Where an own host was is not known any more if it was removed.
            self.add(reached.and_then(|_| price.egress(bytes)));
        }
    }
}

/// What went over the network for a disk, from where to where: reads leave the site of its home, and writes that of its VM.
fn sent<'a>(
    disk: &'a PlacedDisk,
    at: &'a HostId,
    io: &IoStats,
) -> [(&'a HostId, &'a HostId, u64); 2] {
    let all = io.read_bytes.saturating_add(io.write_bytes);
    let written = u128::from(io.network_bytes) * u128::from(io.write_bytes);
    let written = written.checked_div(u128::from(all)).unwrap_or(0);
    let written = u64::try_from(written).unwrap_or(u64::MAX);
    [(&disk.home, at, io.network_bytes.saturating_sub(written)), (at, &disk.home, written)]
}
