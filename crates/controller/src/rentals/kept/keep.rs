//! The task that alone writes the records of kept disks: it compares them with what the providers list, and does the one thing that
//! [`perigee_model::kept::decide`] names for each.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use perigee_cloud::{CloudErrorKind, Provider, Snapshots};
use perigee_model::kept::{
    KEPT_MAX_S, KeptDisk, KeptEvent, KeptKnown, KeptState, KeptStep, NewSnapshot, Snapshot,
    SnapshotSeen, SnapshotState, decide,
};
use perigee_model::money::Money;
use perigee_model::rental::states::RentalState;
use perigee_model::replica::Replica;
use perigee_model::{HostId, Problem, RentalId};
use perigee_planner::rent::keep;

use super::super::compare::{Rounds, with_each};
use super::super::{cluster_id, within};
use super::{is_up, pool, record, replicas_of, worth};
use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::cluster::tasks::Task;
use crate::records::{
    KEPT_DISKS, KeptUse, Owned, RentalIntent, is_late, kept_disk_key, kept_use_key,
    rental_intent_key,
};
use crate::storage::replicas::{self, ReplicaRecord};

/// A list with more than this is no list.
const SNAPSHOTS_MAX: usize = 10_000;

/// A disk of which so many hosts were made that did not join is kept no longer.
const FAILED_MAX: u32 = 3;

/// Which lists say something of a kept disk.
struct Watch {
    /// Those that were asked for since.
    from: Instant,
    /// When the first one was asked for, of those in a row that are without it.
    absent_since: Option<Instant>,
}

impl Watch {
    fn from_now() -> Self {
        Self { from: Instant::now(), absent_since: None }
    }
}

/// What the task remembers of one provider. All of it may be lost.
#[derive(Default)]
struct Memory {
    watches: BTreeMap<RentalId, Watch>,
    /// Since when a snapshot is listed that no record owns.
    unowned: BTreeMap<String, Instant>,
}

/// A provider's list, and when it was asked for.
struct List {
    begun: Instant,
    snapshots: Vec<Snapshot>,
}

/// Keeps disks, and ends them. It does not end.
pub async fn run(cluster: Arc<Cluster>, task: Task) {
    let (cluster, task) = (&cluster, &task);
    with_each(cluster, |rounds, provider| async move {
        keep_at(cluster, task, &rounds, &provider).await;
    })
    .await;
}

async fn keep_at(
    cluster: &Arc<Cluster>,
    task: &Task,
    rounds: &Rounds,
    provider: &Arc<dyn Provider>,
) {
    let (timing, mut memory) = (cluster.timing.rentals, Memory::default());
    let mut disks = cluster.records.watch(KEPT_DISKS);
    loop {
        let mut pause = timing.compare;
        let round = async {
            let went = round(cluster, provider, &mut memory).await;
            if went.as_ref().is_ok_and(|(_, hurries)| *hurries) {
                pause = timing.hurry;
            }
            rounds.note(provider.name(), went.map(|(did, _)| did))
        };
        task.round(round).await;
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // One that is wanted is looked at soon, and its own writes make no circle.
            _ = disks.next(), if pause > timing.hurry => tokio::time::sleep(timing.hurry).await,
        }
    }
}

/// Looks at all that the provider keeps. Says also whether it should be looked at again soon.
async fn round(
    cluster: &Arc<Cluster>,
    provider: &Arc<dyn Provider>,
    memory: &mut Memory,
) -> Result<(String, bool), Problem> {
    let name = provider.name();
    let all: Vec<KeptDisk> = cluster.records.list(KEPT_DISKS).await?;
    let own: Vec<KeptDisk> = all.into_iter().filter(|kept| kept.provider == name).collect();
    let alive: Vec<&KeptDisk> = own.iter().filter(|kept| !kept.state.is_over()).collect();
    // Without a price there may still be snapshots of those that were asked for before.
    let may_have = !alive.is_empty()
        || own.iter().any(|kept| kept.asked_ms.is_some())
        || !memory.unowned.is_empty();
    let snapshots = provider.snapshots().filter(|_| may_have || pool::keeps(provider.as_ref()));
    let Some(snapshots) = snapshots else {
        end_unasked(cluster, &alive).await?;
        record::prune(cluster).await?;
        return Ok((format!("{name} keeps no disk"), false));
    };
    memory.watches.retain(|id, _| alive.iter().any(|kept| kept.id == *id));
    let list = match list(cluster, name, snapshots).await {
        Ok(list) => list,
        Err(problem) => {
            end_unasked(cluster, &alive).await?;
            return Err(problem);
        }
    };
    let count = list.snapshots.len();
    let mut problem = None;
    for kept in alive {
        let done = Run { cluster, name, snapshots, list: &list, memory }.step(&kept.id).await;
        problem = problem.or(done.err());
    }
    let unowned = delete_unowned(cluster, name, snapshots, &list, memory).await;
    record::prune(cluster).await?;
    if let Some(problem) = problem.or(unowned.err()) {
        return Err(problem);
    }
    let all: Vec<KeptDisk> = cluster.records.list(KEPT_DISKS).await?;
    let changes = |kept: &KeptDisk| kept.state.is_being_made() || kept.state == KeptState::Ending;
    let hurries = all.iter().any(|kept| kept.provider == name && changes(kept));
    Ok((format!("{name} keeps {count} disks"), hurries))
}

/// Ends those that nobody was asked for and that are not wanted any more: no list says anything of them.
async fn end_unasked(cluster: &Arc<Cluster>, alive: &[&KeptDisk]) -> Result<(), Problem> {
    for kept in alive.iter().filter(|kept| kept.state == KeptState::Wanted) {
        let owned = cluster.records.own::<KeptDisk>(&kept_disk_key(&kept.id)).await?;
        let Some(mut kept) = owned.filter(|one| one.value.state == KeptState::Wanted) else {
            continue;
        };
        let replicas = replicas_of(cluster, &kept.value).await?;
        if let Some(why) = why_not_made(cluster, &kept.value, &replicas).await? {
            take(cluster, &mut kept, KeptEvent::Ends, why).await?;
        }
    }
    Ok(())
}

/// Why one that is not kept yet is not wanted any more.
async fn why_not_made(
    cluster: &Cluster,
    kept: &KeptDisk,
    replicas: &[ReplicaRecord],
) -> Result<Option<String>, Problem> {
    let rental = cluster.rentals.get(&kept.id);
    let intent = rental_intent_key(&kept.id);
    let intent: RentalIntent = cluster.records.read(&intent).await?.unwrap_or_default();
    // Whoever ends it at once waits for nothing, and gives up what only the host has.
    let drains = rental.is_some_and(|one| one.state == RentalState::Draining) && !intent.now;
    let because = match () {
        () if replicas.is_empty() => Some("its replicas were dropped"),
        () if kept.state == KeptState::Wanted && !drains => Some("its host has ended before"),
        () if is_late(kept, |ms| cluster.clock.age_ms(ms)) => Some("it took too long"),
        () => None,
    };
    Ok(because.map(str::to_owned))
}

/// Drops what a host has of replicas that nobody wants any more since its disk was kept. Otherwise no volume that has the name of such a one now could
/// have a replica there, and nobody would ever drop it.
async fn drop_unwanted(cluster: &Cluster, kept: &KeptDisk, user: &RentalId) -> Result<(), Problem> {
    let host = HostId::new(user.as_str()).ok().and_then(|host| cluster.hosts.get(&host).ok());
    // One that is gone has nothing.
    let Some(host) = host else { return Ok(()) };
    let replicas = replicas::list(cluster).await?;
    for volume in &kept.volumes {
        // A replica of another volume with this name has no complete point: what is here is in its way.
        let is_wanted = |one: &Replica| {
            (&one.volume, &one.site) == (volume, &kept.site)
                && [&kept.host, &host.id].contains(&&one.host)
                && one.complete_ms.is_some()
                && !one.stopping
        };
        if !replicas.iter().any(is_wanted) {
            tracing::info!(
                "what host {user} has of a replica of volume {volume} is dropped: nobody wants it"
            );
            host.volume.delete(&format!("/v1/volumes/{volume}/replica")).await?;
        }
    }
    Ok(())
}

async fn list(cluster: &Cluster, name: &str, snapshots: &dyn Snapshots) -> Result<List, Problem> {
    let begun = Instant::now();
    let of = cluster_id(cluster);
    let what = || format!("can't compare the snapshots of provider {name} with the kept disks");
    let answer = within(cluster.timing.rentals.answer, snapshots.list(&of)).await;
    let snapshots = answer.map_err(|error| {
        Problem::unavailable(what(), format!("{}: {}", error.kind, error.message))
            .next("nothing is deleted or made because of this; it is tried again")
    })?;
    if snapshots.len() > SNAPSHOTS_MAX || snapshots.iter().any(|one| one.id.is_empty()) {
        let why = format!("its list has more than {SNAPSHOTS_MAX}, or one without an id");
        return Err(Problem::unavailable(what(), why));
    }
    Ok(List { begun, snapshots })
}

/// Deletes what no record owns, and did not in any list of the grace period.
async fn delete_unowned(
    cluster: &Cluster,
    name: &str,
    snapshots: &dyn Snapshots,
    list: &List,
    memory: &mut Memory,
) -> Result<(), Problem> {
    let all: Vec<KeptDisk> = cluster.records.list(KEPT_DISKS).await?;
    let owns = |kept: &KeptDisk, one: &Snapshot| match &kept.snapshot {
        Some(id) => *id == one.id,
        None => one.rental.as_deref() == Some(kept.id.as_str()),
    };
    let is_owned = |one: &Snapshot| {
        all.iter().any(|kept| !kept.state.is_over() && kept.provider == name && owns(kept, one))
    };
    let mut still = BTreeMap::new();
    let mut failed = None;
    for one in list.snapshots.iter().filter(|one| !is_owned(one)) {
        let first = memory.unowned.get(&one.id).copied().unwrap_or(list.begun);
        still.insert(one.id.clone(), first);
        if list.begun.duration_since(first) < cluster.timing.rentals.grace {
            continue;
        }
        tracing::warn!(
            "no record of this cluster owned snapshot {} of {name}; it is deleted",
            one.id
        );
        let deleted = within(cluster.timing.rentals.answer, snapshots.delete(&one.id)).await;
        if let Err(error) = deleted {
            let what = format!("can't delete snapshot {} of {name}", one.id);
            failed = Some(Problem::unavailable(what, format!("{}: {}", error.kind, error.message)));
        }
    }
    memory.unowned = still;
    failed.map_or(Ok(()), Err)
}

/// One look at one kept disk.
struct Run<'a> {
    cluster: &'a Arc<Cluster>,
    name: &'a str,
    snapshots: &'a dyn Snapshots,
    list: &'a List,
    memory: &'a mut Memory,
}

impl Run<'_> {
    async fn step(mut self, id: &RentalId) -> Result<(), Problem> {
        let owned = self.cluster.records.own::<KeptDisk>(&kept_disk_key(id)).await?;
        let Some(mut kept) = owned else { return Ok(()) };
        self.observe(&mut kept).await?;
        let ends = self.why_ends(&kept.value).await?;
        let is_still = self.is_still(&kept.value).await?;
        let known = KeptKnown {
            state: kept.value.state,
            seen: self.seen(&kept.value),
            is_still,
            ends: ends.is_some(),
        };
        match decide(&known) {
            KeptStep::Wait => Ok(()),
            KeptStep::Ask => self.ask(&mut kept).await,
            KeptStep::Delete => self.delete(&kept.value).await,
            KeptStep::Event(event) => {
                let why = ends.unwrap_or_else(|| why_of(event, &kept.value));
                take(self.cluster, &mut kept, event, why).await
            }
        }
    }

    /// The snapshot that the provider lists of it.
    fn found(&self, kept: &KeptDisk) -> Option<&Snapshot> {
        let is_known = |one: &&Snapshot| kept.snapshot.as_ref() == Some(&one.id);
        let all = &self.list.snapshots;
        match kept.snapshot {
            Some(_) => all.iter().find(is_known),
            None => {
                let tagged = |one: &&Snapshot| one.rental.as_deref() == Some(kept.id.as_str());
                let is_less =
                    |one: &&Snapshot| (one.state != SnapshotState::Complete, one.id.clone());
                all.iter().filter(tagged).min_by_key(is_less)
            }
        }
    }

    async fn observe(&self, kept: &mut Owned<KeptDisk>) -> Result<(), Problem> {
        if kept.value.state == KeptState::Wanted {
            return Ok(());
        }
        let Some(found) = self.found(&kept.value) else { return Ok(()) };
        let (id, stored) = (Some(found.id.clone()), found.stored_bytes);
        let stored_bytes = stored.unwrap_or(kept.value.disk_bytes);
        if (&kept.value.snapshot, kept.value.stored_bytes) == (&id, stored_bytes) {
            return Ok(());
        }
        (kept.value.snapshot, kept.value.stored_bytes) = (id, stored_bytes);
        kept.save().await
    }

    fn seen(&mut self, kept: &KeptDisk) -> SnapshotSeen {
        let found = self.found(kept).map(|one| one.state);
        let (begun, grace) = (self.list.begun, self.cluster.timing.rentals.grace);
        let watch = self.memory.watches.entry(kept.id.clone()).or_insert_with(Watch::from_now);
        if let Some(state) = found {
            watch.absent_since = None;
            return SnapshotSeen::There(state);
        }
        if begun < watch.from {
            return SnapshotSeen::Absent;
        }
        let since = *watch.absent_since.get_or_insert(begun);
        match begun.duration_since(since) >= grace {
            true => SnapshotSeen::AbsentForLong,
            false => SnapshotSeen::Absent,
        }
    }

    /// Whether nothing in the pool changes any more that its replicas need.
    async fn is_still(&self, kept: &KeptDisk) -> Result<bool, Problem> {
        if kept.state != KeptState::Wanted || !is_up(self.cluster, &kept.host) {
            return Ok(false);
        }
        let all = replicas_of(self.cluster, kept).await?;
        Ok(all.iter().all(|one| replicas::is_still(one, &kept.id)))
    }

    /// Why it is not wanted any more.
    async fn why_ends(&self, kept: &KeptDisk) -> Result<Option<String>, Problem> {
        let cluster = self.cluster;
        let replicas = replicas_of(cluster, kept).await?;
        match kept.state {
            KeptState::Wanted | KeptState::Asked => why_not_made(cluster, kept, &replicas).await,
            KeptState::Kept => self.why_kept_no_more(kept, &replicas).await,
            KeptState::Ending | KeptState::Gone => Ok(None),
        }
    }

    async fn why_kept_no_more(
        &self,
        kept: &KeptDisk,
        replicas: &[ReplicaRecord],
    ) -> Result<Option<String>, Problem> {
        let (cluster, is_left) = (self.cluster, replicas.is_empty());
        let mut has_homes = true;
        for replica in replicas {
            has_homes &= replicas::has_home(cluster, &replica.view.volume).await?;
        }
        let key = kept_use_key(&kept.id);
        let used: KeptUse = cluster.records.read(&key).await?.unwrap_or_default();
        if let Some(user) = &used.rental {
            let rental = cluster.rentals.get(user);
            let joined = rental.as_ref().is_some_and(|one| one.joined_ms.is_some());
            let made = rental.as_ref().is_some_and(|one| one.instance.is_some());
            let may_come = rental.is_some_and(|one| !one.state.is_over());
            if joined && (is_left || !may_come) {
                drop_unwanted(cluster, kept, user).await?;
                let why =
                    if is_left { "its replicas are at host" } else { "what it had was at host" };
                return Ok(Some(format!("{why} {user}")));
            }
            if may_come {
                // It is about to join, or its replicas are about to be there.
                return Ok(None);
            }
            // A provider that refuses a host says nothing of the disk.
            let failed = used.failed + u32::from(made);
            let free = KeptUse { rental: None, failed };
            cluster.records.put(&key, &free).await?;
            if failed >= FAILED_MAX && has_homes {
                return Ok(Some(format!("{failed} hosts with a disk made of it did not join")));
            }
        }
        if is_left {
            return Ok(Some("its replicas were dropped".to_owned()));
        }
        let age_s = kept.asked_ms.map_or(0, |ms| cluster.clock.age_ms(ms) / 1000);
        if age_s >= KEPT_MAX_S {
            return Ok(Some(format!("no host was rented there for {} days", KEPT_MAX_S / 86_400)));
        }
        if !has_homes {
            // It may be the last copy, and 30 days of it are reserved.
            return Ok(None);
        }
        Ok(keep::ends(kept, self.price(), record::spent(cluster, kept)))
    }

    /// The price of a snapshot that counts now.
    fn price(&self) -> Option<Money> {
        self.snapshots.price().at(now_ms() / 1000)
    }

    /// Asks for the snapshot if that is worth its price and can be paid: first the ledger, then the record, then the provider.
    async fn ask(&mut self, kept: &mut Owned<KeptDisk>) -> Result<(), Problem> {
        let replicas = replicas_of(self.cluster, &kept.value).await?;
        let price = self.price();
        let facts = worth::facts(self.cluster, &kept.value, &replicas, price).await?;
        let worth = match keep::is_worth(&facts) {
            Ok(worth) => worth,
            Err(why) => return take(self.cluster, kept, KeptEvent::Ends, why).await,
        };
        kept.value.per_gib_month = price.unwrap_or_default();
        (kept.value.shipping, kept.value.stored_bytes) = (worth.shipping, facts.stored_bytes);
        if let Err(problem) = record::reserve(self.cluster, &kept.value).await {
            let is_final = matches!(
                problem.kind,
                perigee_model::ProblemKind::Conflict | perigee_model::ProblemKind::NoSpace
            );
            return match is_final {
                true => take(self.cluster, kept, KeptEvent::Ends, problem.why).await,
                false => Err(problem),
            };
        }
        take(self.cluster, kept, KeptEvent::Asks, worth.why).await?;
        let new = NewSnapshot {
            rental: kept.value.id.to_string(),
            cluster: cluster_id(self.cluster),
            instance: kept.value.instance.clone(),
        };
        let answer = within(self.cluster.timing.rentals.answer, self.snapshots.take(&new)).await;
        self.memory.watches.insert(kept.value.id.clone(), Watch::from_now());
        match answer {
            Ok(snapshot) if !snapshot.id.is_empty() => {
                kept.value.snapshot = Some(snapshot.id);
                kept.save().await
            }
            Ok(_) => Ok(()),
            // A list shows whether it was made.
            Err(error) if error.kind == CloudErrorKind::Unclear => Ok(()),
            Err(error) => {
                let why = format!("{}: {}", error.kind, error.message);
                let why: String = why.chars().take(1000).collect();
                record::release(self.cluster, &kept.value).await?;
                take(self.cluster, kept, KeptEvent::Refused, why.clone()).await?;
                match error.kind {
                    CloudErrorKind::Throttled => Ok(()),
                    _ => take(self.cluster, kept, KeptEvent::Ends, why).await,
                }
            }
        }
    }

    async fn delete(&mut self, kept: &KeptDisk) -> Result<(), Problem> {
        let found = self.found(kept).map(|one| one.id.clone());
        let Some(id) = found.or_else(|| kept.snapshot.clone()) else { return Ok(()) };
        if self.found(kept).is_none() {
            // It was deleted, and lists that begin later say so.
            return Ok(());
        }
        let deleted = within(self.cluster.timing.rentals.answer, self.snapshots.delete(&id)).await;
        self.memory.watches.insert(kept.id.clone(), Watch::from_now());
        deleted.map_err(|error| {
            let what = format!("can't delete snapshot {id} of {}", self.name);
            Problem::unavailable(what, format!("{}: {}", error.kind, error.message))
                .next("it is tried again")
        })
    }
}

/// Records an event, after the ledger. One that somebody has begun to use just now is not ended.
async fn take(
    cluster: &Cluster,
    kept: &mut Owned<KeptDisk>,
    event: KeptEvent,
    why: String,
) -> Result<(), Problem> {
    let turn = cluster.kept_disks.lock().await;
    if (kept.value.state, event) == (KeptState::Kept, KeptEvent::Ends) {
        let key = kept_use_key(&kept.value.id);
        let used: Option<KeptUse> = cluster.records.read(&key).await?;
        let user = used.and_then(|used| used.rental);
        let user = user.and_then(|user| cluster.rentals.get(&user));
        if user.is_some_and(|one| one.joined_ms.is_none() && !one.state.is_over()) {
            return Ok(());
        }
    }
    if kept.value.state.next(event)?.is_over() {
        record::settle(cluster, &kept.value).await?;
    }
    kept.value.take(event, now_ms(), why)?;
    kept.save().await?;
    drop(turn);
    let KeptDisk { id, host, state, why, .. } = &kept.value;
    tracing::info!(rental = %id, "the disk of host {host} is {state}: {why}");
    // Its host waits for it.
    cluster.rentals.changed.notify_waiters();
    Ok(())
}

fn why_of(event: KeptEvent, kept: &KeptDisk) -> String {
    match event {
        KeptEvent::Vanished if kept.state == KeptState::Ending => kept.why.clone(),
        KeptEvent::Vanished => "the provider has no snapshot of it".to_owned(),
        KeptEvent::Ends => "the provider could not make the snapshot".to_owned(),
        KeptEvent::Asks | KeptEvent::Refused | KeptEvent::Complete => kept.why.clone(),
    }
}
