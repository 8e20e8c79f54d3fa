//! What a job costs: reserved before its VM is asked for, and settled at its end.
//!
//! What was spent is reckoned as the plan was (`planner/src/options/cost.rs`): each host for the time of the VM there, from the VM's start
//! until it is taken down; its disks where it started; the bytes that its disks' counters and its migrations say have left a site. A price
//! that is not known any more counts as what was reserved.

use perigee_model::budget::{JobCost, MoneyRange};
use perigee_model::job::{Migration, MigrationState};
use perigee_model::money::{Money, Price};
use perigee_model::{HostId, Problem, ProblemKind, TenantName};

use super::driver::Run;
use super::gang::GangRun;
use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::cluster::price_list::PricesNow;
use crate::ledger;
use crate::records::{JobRecord, MigrationRecord, PlacedDisk, migration_prefix, owner_of, vm_of};

/// Whom the ledger knows the job as. An id may be given out again after a restore.
fn owner(record: &JobRecord) -> String {
    format!("job/{}", owner_of(&record.job))
}

/// Reserves what a job costs at most, before anything is asked for. `false`: its tenant's budget has no room any more, and its hosts are
/// given back; the scheduler says why it waits.
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
            return Ok(false);
        }
        reserved => reserved?,
    }
    let spent = record.job.cost.and_then(|cost| cost.spent);
    record.job.cost = Some(JobCost { predicted, spent });
    Ok(true)
}

impl Run {
    /// Adds what this run has cost, before its record forgets the run.
    pub(super) async fn add_cost(&mut self) -> Result<(), Problem> {
        let spent = spent_so_far(&self.cluster, &self.record.value).await?;
        if let Some(cost) = &mut self.record.value.job.cost {
            cost.spent = Some(spent);
        }
        Ok(())
    }

    /// Settles what the job has cost. Once more changes nothing.
    pub(super) async fn settle(&mut self) -> Result<(), Problem> {
        if !self.record.value.kind.is_a_job() {
            return Ok(());
        }
        self.add_cost().await?;
        settle(&self.cluster, &mut self.record.value).await
    }
}

impl GangRun {
    /// Adds what the members of this run have cost, before they are forgotten.
    pub(super) async fn add_costs(&mut self, members: &[&JobRecord]) -> Result<(), Problem> {
        let Some(mut cost) = self.record.value.job.cost else { return Ok(()) };
        let reserved = cost.predicted.high;
        let mut sum = cost.spent.unwrap_or_default();
        for member in members {
            sum = sum.plus(of_run(&self.cluster, member, reserved).await?);
        }
        cost.spent = Some(sum);
        self.record.value.job.cost = Some(cost);
        Ok(())
    }

    /// Settles what the job has cost. Once more changes nothing.
    pub(super) async fn settle(&mut self, members: &[&JobRecord]) -> Result<(), Problem> {
        self.add_costs(members).await?;
        settle(&self.cluster, &mut self.record.value).await
    }
}

async fn settle(cluster: &Cluster, record: &mut JobRecord) -> Result<(), Problem> {
    let owner = owner(record);
    let Some(cost) = &mut record.job.cost else {
        // It was cancelled between the reservation and the placement.
        return cluster.ledger.release(&owner).await;
    };
    ledger::settle(cluster, &owner, cost.spent.unwrap_or_default()).await?;
    // An earlier try may have settled a little less: the clock has gone on since.
    let settled = cluster.ledger.entry(&owner).and_then(|entry| entry.spent);
    cost.spent = settled.or(cost.spent);
    Ok(())
}

/// What the runs before this one have cost, and this one until now.
async fn spent_so_far(cluster: &Cluster, record: &JobRecord) -> Result<Money, Problem> {
    let Some(cost) = record.job.cost else { return Ok(Money::ZERO) };
    let now = of_run(cluster, record, cost.predicted.high).await?;
    Ok(cost.spent.unwrap_or_default().plus(now))
}

/// What this run of a VM has cost until now, or `unknown` if a price is not known.
async fn of_run(cluster: &Cluster, record: &JobRecord, unknown: Money) -> Result<Money, Problem> {
    let (Some(placement), Some(started_ms)) = (&record.placement, record.job.started_ms) else {
        return Ok(Money::ZERO);
    };
    let Some(prices) = cluster.prices.now() else { return Ok(unknown) };
    let moves: Vec<MigrationRecord> =
        cluster.records.list(&migration_prefix(&vm_of(&record.job.id))).await?;
    let completed = moves.into_iter().map(|record| record.migration);
    let completed = completed
        .filter(|moved| moved.state == MigrationState::Completed && moved.started_ms >= started_ms);
    let ended_ms = record.job.ended_ms.filter(|_| record.job.state.is_final());
    let mut bill = Bill { cluster, prices, sum: Some(Money::ZERO) };
    let until_ms = ended_ms.unwrap_or_else(now_ms);
    bill.machines(&placement.start, started_ms, until_ms, &completed.collect::<Vec<_>>());
    let disk_bytes = bill.disk_bytes(record).await?;
    bill.disks(&placement.start, disk_bytes, until_ms.saturating_sub(started_ms));
    if let Some(at) = &record.job.host {
        for (disk, totals) in placement.disks.iter().zip(&record.meter.totals.disks) {
            bill.traffic(disk, at, &totals.client);
        }
    }
    let data = placement.disks.iter().filter(|disk| disk.data_of.is_some());
    for (disk, bytes) in data.zip(&placement.traits.data_bytes) {
        bill.came(disk, *bytes, started_ms);
    }
    Ok(bill.sum.unwrap_or(unknown))
}

struct Bill<'a> {
    cluster: &'a Cluster,
    prices: PricesNow,
    /// `None`: a price is not known.
    sum: Option<Money>,
}

impl Bill<'_> {
    fn price(&mut self, host: &HostId) -> Option<std::sync::Arc<Price>> {
        let site = self.cluster.hosts.get(host).ok()?.addresses.site.clone();
        self.prices.of(host, &site)
    }

    fn add(&mut self, amount: Option<Money>) {
        self.sum = self.sum.zip(amount).map(|(sum, amount)| sum.plus(amount));
    }

    /// Each host for the time of the VM there.
    fn machines(&mut self, start: &HostId, started_ms: u64, until_ms: u64, moves: &[Migration]) {
        let (mut at, mut since_ms) = (start.clone(), started_ms);
        let ends = moves.iter().map(|moved| (moved.ended_ms.unwrap_or(until_ms), Some(moved)));
        for (end_ms, moved) in ends.chain([(until_ms, None)]) {
            if let Some(price) = self.price(&at) {
                self.add(price.machine(end_ms.saturating_sub(since_ms).div_ceil(1000)));
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

    /// What went over the network for a disk: reads leave the site of its home, and writes that of its VM.
    fn traffic(&mut self, disk: &PlacedDisk, at: &HostId, io: &perigee_model::volume::IoStats) {
        let all = io.read_bytes.saturating_add(io.write_bytes);
        let written = u128::from(io.network_bytes) * u128::from(io.write_bytes);
        let written = written.checked_div(u128::from(all)).unwrap_or(0);
        let written = u64::try_from(written).unwrap_or(u64::MAX);
        self.egress(&disk.home, at, io.network_bytes.saturating_sub(written));
        self.egress(at, &disk.home, written);
    }

    /// A volume of so many bytes that has come to the VM.
    fn came(&mut self, disk: &PlacedDisk, bytes: u64, started_ms: u64) {
        let last = self.cluster.index.volume_move(&disk.volume);
        let last =
            last.filter(|last| last.view.to == disk.home && last.view.started_ms >= started_ms);
        if let Some(last) = last {
            self.egress(&last.view.from, &last.view.to, bytes);
        }
    }

    fn egress(&mut self, from: &HostId, to: &HostId, bytes: u64) {
        let site =
            |host: &HostId| self.cluster.hosts.get(host).ok().map(|h| h.addresses.site.clone());
        if site(from) == site(to) {
            return;
        }
        if let Some(price) = self.price(from) {
            self.add(price.egress(bytes));
        }
    }
}
