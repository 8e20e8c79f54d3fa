//! What the move of one VM without a job to other hosts would cost and save, or why it can't go there.

use perigee_model::balance::VmBalance;
use perigee_model::job::Start;
use perigee_model::units::{format_bytes, format_seconds};
use perigee_model::{DiskRole, HostId, Problem, VmId, VolumeName};
use perigee_planner::Refused;
use perigee_planner::balance::{Elsewhere, VmLoad, price_s};

use super::data::Data;
use crate::cleaner::Pending;
use crate::cluster::Cluster;
use crate::migration::{self, by_itself};
use crate::planning::shared_links::site_of;
use crate::planning::{Prices, VmPrices, links};
use crate::records::{JobRecord, PlacedDisk, VolumeRecord, volume_key};

/// The ways of one VM.
pub(super) struct Ways<'a> {
    pub cluster: &'a Cluster,
    pub load: &'a VmLoad,
    pub record: &'a JobRecord,
    pub data: &'a Data,
    pub prices: &'a Prices<'a>,
    pub pending: &'a Pending,
}

type Way = ((VmId, HostId), Result<Elsewhere, String>);

/// What comes after a VM to a host: a disk, and its bytes at most.
type Follows<'a> = (&'a PlacedDisk, u64);

impl Ways<'_> {
    /// # Errors
    /// If the store can't be read.
    pub async fn to(&self, targets: Vec<HostId>) -> Result<Vec<Way>, Problem> {
        let (cluster, load) = (self.cluster, self.load);
        let failed = by_itself::failed_lately(cluster, &load.vm, &targets);
        let dearer = by_itself::with_other_price(cluster, self.record);
        let prices = self.prices.of_vm(self.record, &load.host, &targets).await?;
        let own = own_disks(cluster, self.record).await?;
        let of_target = |to: HostId| {
            let refused = failed.iter().find(|failed| failed.to == to);
            let refused = refused.map(|failed| format!("{}; it is tried again later", failed.why));
            let dear = || dearer.iter().find(|(host, _)| *host == to).map(|(_, why)| why.clone());
            let follows = that_follow(&own, &to);
            let there = match refused.or_else(dear).or_else(|| self.stays(&to, &follows)) {
                Some(why) => Err(why),
                None => self.elsewhere(&to, &prices, &follows),
            };
            ((load.vm.clone(), to), there)
        };
        Ok(targets.into_iter().map(of_target).collect())
    }

    /// Why the VM does not go there by itself, whatever that would save.
    fn stays(&self, to: &HostId, follows: &[Follows]) -> Option<String> {
        let site = |host: &HostId| site_of(self.cluster, host);
        let (here, there) = (site(&self.load.host), site(to));
        if let Start::Site(named) = &self.record.job.spec.start
            && here != there
        {
            return Some(format!("the VM was made for site {named}"));
        }
        let is_far = |(disk, _): &&Follows| ![&here, &there].contains(&&site(&disk.home));
        let (far, _) = follows.iter().find(is_far)?;
        let (volume, home) = (&disk_name(far), &far.home);
        Some(format!("volume {volume} at {home} would come after it from another site"))
    }

    fn elsewhere(
        &self,
        to: &HostId,
        prices: &VmPrices,
        follows: &[Follows],
    ) -> Result<Elsewhere, String> {
        let (cluster, load) = (self.cluster, self.load);
        migration::check(cluster, self.record, to, self.pending).map_err(|problem| problem.why)?;
        let refusal = |refused: Refused| {
            if let Refused::LinkNotMeasured { from, to } = &refused {
                links::want_missing(cluster, from, to);
                links::want_missing(cluster, to, from);
            }
            refused.to_string()
        };
        let cost = prices.to(to).map_err(refusal)?;
        if let Some(too_long) = cost.too_long() {
            return Err(too_long);
        }
        let mut there = Elsewhere { price_s: 0.0, data_lost: 0.0 };
        let mut until_all_came_s = 0.0;
        if let Some(waited) = &self.data.waited {
            let come: Vec<VolumeName> =
                follows.iter().map(|(disk, _)| disk.volume.clone()).collect();
            let facts = prices.facts();
            let hosts = (&load.host, to);
            there.data_lost = waited.lost_at(facts, hosts, &come).map_err(refusal)?;
            for (disk, bytes) in follows {
                let lost = waited.lost_until_it_comes(facts, to, &disk.volume).map_err(refusal)?;
                let rate = links::toward(cluster, &disk.home, to);
                let rate = rate.map(|link| link.rate_bytes_per_s as f64).filter(|rate| *rate > 0.0);
                let rate =
                    rate.ok_or_else(|| format!("the link from {} is not measured", disk.home))?;
                until_all_came_s += lost * *bytes as f64 / rate;
            }
        }
        // While the VM stands still it neither computes nor waits for its data.
        let wanted = load.used_cpus.unwrap_or(0.0) + load.waited_cpus.unwrap_or(0.0);
        let busy = wanted + load.data_lost.unwrap_or(0.0);
        there.price_s = price_s(&cost, busy) + until_all_came_s;
        Ok(there)
    }
}

/// A data volume by its name in the VM's spec.
fn disk_name(disk: &PlacedDisk) -> VolumeName {
    disk.data_of.clone().unwrap_or_else(|| disk.volume.clone())
}

/// Those that come after a VM that moves there.
fn that_follow<'a>(own: &[Follows<'a>], to: &HostId) -> Vec<Follows<'a>> {
    own.iter().filter(|(disk, _)| disk.home != *to).copied().collect()
}

/// The disks that come after a VM wherever it goes.
async fn own_disks<'a>(
    cluster: &Cluster,
    record: &'a JobRecord,
) -> Result<Vec<Follows<'a>>, Problem> {
    let mut own = Vec::new();
    let disks = record.placement.iter().flat_map(|placement| &placement.disks);
    for disk in disks.filter(|disk| disk.temporary || !disk.read_only) {
        let bytes = match disk.role {
            DiskRole::Root => record.job.spec.root_bytes.unwrap_or_default(),
            role if role.is_data() => {
                let volume: Option<VolumeRecord> =
                    cluster.records.read(&volume_key(&disk.volume)).await?;
                let seen = volume.and_then(|volume| volume.seen);
                seen.map_or(0, |seen| seen.allocated_bytes)
            }
            _ => 0,
        };
        own.push((disk, bytes));
    }
    Ok(own)
}

/// What is copied after a VM that moves, in plain words after its reason; nothing if it has no disk where it is.
///
/// # Errors
/// If the store can't be read.
pub(super) async fn disks_that_follow(
    cluster: &Cluster,
    vm: &VmBalance,
) -> Result<String, Problem> {
    let Some(record) = cluster.index.of_vm(&vm.vm) else { return Ok(String::new()) };
    let own = own_disks(cluster, &record).await?;
    let bytes = that_follow(&own, &vm.to).iter().map(|(_, bytes)| bytes).sum();
    let rate = links::toward(cluster, &vm.host, &vm.to).map_or(0, |link| link.rate_bytes_per_s);
    if bytes == 0 || rate == 0 {
        return Ok(String::new());
    }
    let takes = format_seconds(bytes as f64 / rate as f64);
    let bytes = format_bytes(bytes);
    Ok(format!("; then its disks follow: {bytes} at most, {takes} at the link's rate"))
}
