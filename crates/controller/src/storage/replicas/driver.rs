//! The driver of a replica.

use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_model::grant::Allowed;
use perigee_model::home::{HomeState, VolumeHome};
use perigee_model::replica::{
    CHAIN_LAYERS_MAX, PinReplica, PullReplica, PulledReplica, ReplicaPin, ReplicaPoint,
    VolumeReplica,
};
use perigee_model::units::{format_bytes, format_duration};
use perigee_model::volume::{Compacted, VolumeInfo};
use perigee_model::{Problem, ProblemKind, SiteId, VolumeName};

use super::kept::{Place, place};
use super::{ReplicaIntent, ReplicaRecord, intent_key, record_key};
use crate::clock::now_ms;
use crate::cluster::{Cluster, HostLink};
use crate::records::{KEPT_DISKS, Owned};
use crate::storage::volumes;

/// The longest pause between two tries. The pause is doubled each time.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// How often the home is asked how far the replica is behind.
const LOOK_EVERY: Duration = Duration::from_secs(15);
/// If nothing of a round has arrived for this long, the replica's problem says so.
const STALLED_MAX: Duration = Duration::from_secs(600);
/// If nothing has arrived for this many times as long, the round begins anew.
const STALLED_TIMES: u32 = 6;
/// How often the pause before a round begins anew once more is doubled at most.
const DOUBLED_MAX: u32 = 6;

/// Makes the replica's rounds until it is not wanted any more.
///
/// # Errors
/// When the store fails; the caller tries again.
pub async fn drive(cluster: Arc<Cluster>, volume: VolumeName, site: SiteId) -> Result<(), Problem> {
    let key = intent_key(&volume, &site);
    let mut intents = cluster.records.watch_key(&key);
    let mut disks = cluster.records.watch(KEPT_DISKS);
    let (mut rounds, mut pause) = (Rounds::default(), cluster.timing.poll);
    loop {
        let Some(intent) = cluster.records.read::<ReplicaIntent>(&key).await? else {
            return Ok(());
        };
        let record = cluster.records.own::<ReplicaRecord>(&record_key(&volume, &site)).await?;
        // The replica was promoted or dropped, and its intent is not needed any more.
        let Some(record) = record else { return cluster.records.remove(&key).await };
        // The point that becomes the volume stays, and so does the replica.
        if cluster.index.is_promoted(&volume) {
            tokio::time::sleep(cluster.timing.figures).await;
            continue;
        }
        let mut run = Run { cluster: Arc::clone(&cluster), intent, record, rounds: &mut rounds };
        let done = if run.intent.stop {
            run.stop().await.map(|()| None)
        } else if run.is_kept().await? {
            Ok(Some(cluster.timing.figures))
        } else {
            run.step().await.map(Some)
        };
        let wait = match done {
            Ok(None) => return Ok(()),
            Ok(Some(wait)) => {
                pause = cluster.timing.poll;
                wait
            }
            Err(problem) => {
                run.note(&problem).await?;
                pause = (pause * 2).min(PAUSE_MAX);
                pause
            }
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            _ = intents.next() => {}
            _ = disks.next() => {}
        }
    }
}

/// What the driver remembers while the controller runs.
#[derive(Default)]
struct Rounds {
    /// When the last round began.
    begun: Option<Instant>,
    /// How many bytes of it were missing, and since when.
    missing: Option<(u64, Instant)>,
    /// How often a round began anew since the last complete one.
    anew: u32,
}

impl Rounds {
    /// How long nothing has come of the round that lacks these bytes. `before` is what was seen by the last step; it
    /// is `None` if that could not ask both hosts, because then nothing could come.
    fn still(&mut self, before: Option<(u64, Instant)>, missing_bytes: u64) -> Duration {
        let unchanged = before.filter(|(bytes, _)| *bytes == missing_bytes);
        let (_, since) = *self.missing.insert(unchanged.unwrap_or((missing_bytes, Instant::now())));
        since.elapsed()
    }

    /// Whether a round that can't be completed may begin anew now. What is wrong may be wrong again, so each time
    /// takes longer than the last.
    fn may_begin_anew(&self) -> bool {
        let pause = match self.anew {
            0 => Duration::ZERO,
            times => STALLED_MAX * (1 << (times - 1).min(DOUBLED_MAX)),
        };
        self.begun.is_none_or(|begun| begun.elapsed() >= pause)
    }
}

struct Run<'a> {
    cluster: Arc<Cluster>,
    intent: ReplicaIntent,
    record: Owned<ReplicaRecord>,
    rounds: &'a mut Rounds,
}

impl Run<'_> {
    /// Whether it stands still because its disk is kept, or is about to be. Notes that, and where it is.
    async fn is_kept(&mut self) -> Result<bool, Problem> {
        let before = self.record.value.clone();
        let place = place(&self.cluster, &before).await?;
        let now = &mut self.record.value;
        now.held = match &place {
            Place::Kept(disk) => Some(disk.clone()),
            Place::Here | Place::At(_) => None,
        };
        if let Place::At(host) = place {
            tracing::info!("the replica of volume {} is at {host} now", now.view.volume);
            // What is under way there asks with the rights of another host: it begins anew.
            (now.view.host, now.from_nbd_addr) = (host, Some(String::new()));
            *self.rounds = Rounds::default();
        }
        let is_kept = now.held.is_some();
        if is_kept {
            now.view.problem.clear();
        }
        if *now != before {
            self.record.save().await?;
        }
        Ok(is_kept)
    }

    /// Does what is due. Returns how long to wait until the next step.
    async fn step(&mut self) -> Result<Duration, Problem> {
        let before = self.rounds.missing.take();
        let home = self.home().await?;
        let host = self.cluster.hosts.get(&self.record.value.view.host)?;
        let replica: Result<VolumeReplica, Problem> = host.volume.get(&self.path("replica")).await;
        let pins: Vec<ReplicaPin> = home.volume.get(&self.path("replica/pins")).await?;
        let of_replica = |pin: &&ReplicaPin| pin.replica == self.intent.site;
        let pins: Vec<ReplicaPin> = pins.iter().filter(of_replica).cloned().collect();
        let info: VolumeInfo =
            home.volume.get(&format!("/v1/volumes/{}", self.intent.volume)).await?;
        // What is known of the home is told when it is lost: also while the replica's host is away.
        let replica = match replica {
            Ok(replica) => replica,
            Err(problem) => {
                self.observe(&home, None, &pins, &info).await?;
                return Err(problem);
            }
        };
        if let Some(newest) = replica.points.first().filter(|point| point.missing_bytes > 0)
            && pins.iter().any(|pin| pin.filling && pin.layer == newest.layer)
        {
            self.observe(&home, Some(&replica), &pins, &info).await?;
            let still = self.rounds.still(before, newest.missing_bytes);
            if self.is_hopeless(&home, newest, still) && self.rounds.may_begin_anew() {
                tracing::warn!("{}: the round begins anew: {}", self.what(), newest.problem);
                self.begin_round(&host, &home).await?;
                self.rounds.anew += 1;
                return Ok(Duration::ZERO);
            }
            // The round goes on as soon as it can. A new round would ship again what has arrived already.
            if newest.broken || still > STALLED_MAX {
                return Err(self.stalled(newest));
            }
            self.is_well().await?;
            return Ok(self.cluster.timing.figures);
        }
        let newest = replica.points.first().filter(|point| point.missing_bytes == 0);
        if let Some(newest) = newest {
            self.rounds.anew = 0;
            self.completed(&host, &home, newest, &pins, (&replica, &info)).await?;
        }
        let wait = self.until_due(newest);
        if wait > Duration::ZERO {
            let pins: Vec<ReplicaPin> = home.volume.get(&self.path("replica/pins")).await?;
            let pins: Vec<ReplicaPin> =
                pins.into_iter().filter(|pin| pin.replica == self.intent.site).collect();
            self.observe(&home, Some(&replica), &pins, &info).await?;
            self.is_well().await?;
            return Ok(wait.min(LOOK_EVERY));
        }
        self.observe(&home, Some(&replica), &pins, &info).await?;
        if self.cluster.index.is_promoted(&self.intent.volume) {
            return Ok(self.cluster.timing.figures);
        }
        self.begin_round(&host, &home).await?;
        Ok(Duration::ZERO)
    }

    /// The volume's home, unless it may be changing.
    async fn home(&self) -> Result<Arc<HostLink>, Problem> {
        let volume = &self.intent.volume;
        let home = volumes::settled_home(&self.cluster, volume).await;
        let home = home.map_err(|problem| match problem.kind {
            ProblemKind::NotFound => {
                let promote = format!("perigee volume promote {volume}");
                Problem::not_found(self.what(), "the volume's home is gone")
                    .next(format!("to make this replica the volume: {promote}"))
            }
            _ => problem,
        })?;
        if self.cluster.index.incomplete_move(volume).is_some() {
            let why = format!("{home} is still copying the volume from its last home");
            return Err(Problem::unavailable(self.what(), why));
        }
        let home = volumes::reachable(&self.cluster, &home)?;
        if home.addresses.site == self.intent.site {
            let why = format!("the volume's home {} is at this site now", home.id);
            return Err(Problem::conflict(self.what(), why).next(format!(
                "to end it: perigee volume replicate {volume} --to {} --stop",
                self.intent.site
            )));
        }
        Ok(home)
    }

    /// Whether the present round can't be completed: its copies ask an address at which the home is not any more, what
    /// has come is not used, or nothing has come for very long.
    fn is_hopeless(&self, home: &HostLink, point: &ReplicaPoint, still: Duration) -> bool {
        let from = self.record.value.from_nbd_addr.as_ref();
        let is_elsewhere = from.is_some_and(|from| *from != home.addresses.nbd_addr);
        is_elsewhere || point.broken || still > STALLED_MAX * STALLED_TIMES
    }

    fn stalled(&self, point: &ReplicaPoint) -> Problem {
        let missing = format_bytes(point.missing_bytes);
        let mut why = match point.broken {
            true => format!("what has arrived can't be used, and {missing} are missing"),
            false => {
                let minutes = STALLED_MAX.as_secs() / 60;
                format!("nothing has arrived for {minutes} minutes, and {missing} are missing")
            }
        };
        if !point.problem.is_empty() {
            why = format!("{why}: {}", point.problem);
        }
        let ReplicaIntent { volume, site, .. } = &self.intent;
        Problem::unavailable(self.what(), why).next(format!(
            "it is tried again; to begin anew at once: perigee volume replicate {volume} --to {site} --stop, and \
             then without --stop"
        ))
    }

    /// Tells the home to keep only this point's layer for the replica, and has long chains merged.
    async fn completed(
        &self,
        host: &HostLink,
        home: &HostLink,
        newest: &ReplicaPoint,
        pins: &[ReplicaPin],
        (replica, info): (&VolumeReplica, &VolumeInfo),
    ) -> Result<(), Problem> {
        let is_told = |pin: &ReplicaPin| pin.layer == newest.layer && !pin.filling;
        if !matches!(pins, [pin] if is_told(pin)) {
            let layer = Some(newest.layer);
            let pin = PinReplica { replica: self.intent.site.clone(), layer };
            home.volume.post::<()>(&self.path("replica/pins"), &pin).await?;
            tracing::info!("volume {} has a replica at {}", self.intent.volume, host.id);
        }
        let layers = info.chain.len() as u64;
        for (server, layers, path) in
            [(home, layers, "compact"), (host, replica.layers, "replica/compact")]
        {
            if layers > CHAIN_LAYERS_MAX {
                let path = self.path(path);
                let done = server.volume_slow.post_long::<Compacted>(&path, &(), |_| {}).await;
                // The next round tries it again.
                if let Err(problem) = done {
                    tracing::warn!("volume {} at {}: {problem}", self.intent.volume, server.id);
                }
            }
        }
        Ok(())
    }

    /// How long until the next round is due. The first one is due at once. After a restart of the controller the age
    /// of the newest point decides.
    fn until_due(&self, newest: Option<&ReplicaPoint>) -> Duration {
        let every = Duration::from_secs(self.intent.every_s);
        let Some(newest) = newest else { return Duration::ZERO };
        let age = self.rounds.begun.map_or_else(
            || Duration::from_millis(self.cluster.clock.age_ms(newest.taken_ms)),
            |begun| begun.elapsed(),
        );
        every.saturating_sub(age)
    }

    async fn begin_round(&mut self, host: &HostLink, home: &HostLink) -> Result<(), Problem> {
        let (volume, site) = (self.intent.volume.clone(), self.intent.site.clone());
        let grant = self.cluster.grant(&host.id, Allowed::Replica { volume, site })?;
        let ask = PullReplica {
            from: home.volume_server(),
            replica: self.intent.site.clone(),
            keep: self.intent.keep,
            taken_ms: now_ms(),
            grant,
        };
        let begun: PulledReplica = host.volume_slow.post(&self.path("replica/pull"), &ask).await?;
        (self.rounds.begun, self.rounds.missing) = (Some(Instant::now()), None);
        let from = Some(ask.from.nbd_addr);
        if self.record.value.from_nbd_addr != from {
            self.record.value.from_nbd_addr = from;
            self.record.save().await?;
        }
        tracing::info!(
            "a round of the replica of volume {} at {} ships {} bytes",
            self.intent.volume,
            host.id,
            begun.ships_bytes
        );
        Ok(())
    }

    /// Keeps what is known in case that the home is lost. `None`: the replica's host does not answer.
    async fn observe(
        &mut self,
        home: &HostLink,
        replica: Option<&VolumeReplica>,
        pins: &[ReplicaPin],
        info: &VolumeInfo,
    ) -> Result<(), Problem> {
        let at_home: VolumeHome = home.volume.get(&self.path("home")).await?;
        let mut now = self.record.value.clone();
        now.home = Some(home.id.clone());
        now.in_use = Some(info.sessions > 0);
        if let HomeState::Here { tenure, .. } = at_home.home {
            now.tenure = Some(tenure);
        }
        let view = &mut now.view;
        (view.every_s, view.keep) = (self.intent.every_s, self.intent.keep);
        let complete_pin = match replica {
            None => pins.iter().find(|pin| !pin.filling),
            Some(replica) => {
                let complete = replica.complete();
                view.complete_ms = complete.map(|point| point.taken_ms);
                let points = replica.points.iter().filter(|point| point.missing_bytes == 0).count();
                view.points = u32::try_from(points).unwrap_or(u32::MAX);
                let missing = replica.points.first().map(|point| point.missing_bytes);
                view.missing_bytes = missing.filter(|bytes| *bytes > 0);
                complete.and_then(|point| pins.iter().find(|pin| pin.layer == point.layer))
            }
        };
        view.behind_bytes = complete_pin.map(|pin| pin.newer_bytes);
        if now == self.record.value {
            return Ok(());
        }
        self.record.value = now;
        self.record.save().await
    }

    /// The last step had no trouble.
    async fn is_well(&mut self) -> Result<(), Problem> {
        if self.record.value.view.problem.is_empty() {
            return Ok(());
        }
        self.record.value.view.problem.clear();
        self.record.save().await
    }

    /// Drops what the replica has, and what the home keeps for it.
    async fn stop(&mut self) -> Result<(), Problem> {
        let Run { cluster, intent, .. } = self;
        if let Ok(host) = cluster.hosts.get(&self.record.value.view.host) {
            host.volume.delete(&format!("/v1/volumes/{}/replica", intent.volume)).await?;
        }
        if let Ok(volume) = volumes::find(cluster, &intent.volume).await
            && let Ok(home) = cluster.hosts.get(&volume.home)
        {
            let pin = PinReplica { replica: intent.site.clone(), layer: None };
            let path = format!("/v1/volumes/{}/replica/pins", intent.volume);
            home.volume.post::<()>(&path, &pin).await?;
        }
        let key = intent_key(&intent.volume, &intent.site);
        // A replica may have been asked for again meanwhile, or is from here on.
        let _turn = cluster.replica_records.lock().await;
        let intent_now: Option<ReplicaIntent> = cluster.records.read(&key).await?;
        if intent_now.is_some_and(|now| !now.stop) {
            return Ok(());
        }
        forget(cluster, &intent.volume, &intent.site).await
    }

    async fn note(&mut self, problem: &Problem) -> Result<(), Problem> {
        let key = record_key(&self.intent.volume, &self.intent.site);
        // What the step changed but could not store does not count.
        let stored = self.cluster.records.own::<ReplicaRecord>(&key).await?;
        let Some(stored) = stored else { return Ok(()) };
        self.record = stored;
        // Where the replica's problem is shown, it is clear what could not be done.
        let mut text = match problem.what == self.what() {
            true => problem.why.clone(),
            false => format!("{}: {}", problem.what, problem.why),
        };
        if !problem.next.is_empty() {
            text = format!("{text}; {}", problem.next);
        }
        if self.record.value.view.problem == text {
            return Ok(());
        }
        tracing::warn!("{}: {text}", self.what());
        self.record.value.view.problem = text;
        self.record.save().await
    }

    fn what(&self) -> String {
        let every = format_duration(self.intent.every_s);
        let ReplicaIntent { volume, site, .. } = &self.intent;
        format!("can't replicate volume {volume} to {site} every {every}")
    }

    fn path(&self, verb: &str) -> String {
        format!("/v1/volumes/{}/{verb}", self.intent.volume)
    }
}

/// Removes the replica's records.
pub(super) async fn forget(
    cluster: &Cluster,
    volume: &VolumeName,
    site: &SiteId,
) -> Result<(), Problem> {
    cluster.records.remove(&record_key(volume, site)).await?;
    cluster.records.remove(&intent_key(volume, site)).await
}
