//! A promotion that is recorded is carried out, or called off.
//!
//! As long as the lost home may still have the volume, it is the home if it answers again: then the promotion is
//! called off. There is no way back once the replica is the volume, or once a home that answers was asked to give the
//! volume up because a person wants it so. That is recorded before the home is asked.

use std::sync::Arc;
use std::time::Duration;

use perigee_model::home::{Tenure, VolumeHome};
use perigee_model::job::HostState;
use perigee_model::replica::{PromoteReplica, PromoteVolume, Promotion};
use perigee_model::{HostId, LayerId, Problem, ProblemKind, SiteId, VolumeName};
use serde::{Deserialize, Serialize};

use super::driver::forget;
use super::lost::{self, SupersededVolume};
use super::promote::{choose, points, what};
use crate::cluster::{Cluster, HostLink};
use crate::records::{Owned, PROMOTIONS, VolumeRecord, volume_key};
use crate::storage::{left_behind, moves};

/// A home that does not answer is asked again so often, and so long after, before it counts as silent.
const TRIES: u32 = 3;
const PAUSE: Duration = Duration::from_secs(1);

/// A promotion that is not over.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct PromotionRecord {
    pub(super) volume: VolumeName,
    pub(super) view: Promotion,
    pub(super) site: SiteId,
    pub(super) layer: LayerId,
    /// The volume's tenure at the lost home; `None` if that never told it.
    pub(super) lost: Option<Tenure>,
    /// The first one of the new incarnation.
    pub(super) tenure: Tenure,
    /// The lost home may answer.
    pub(super) forced: bool,
    /// The replica is the volume, or the lost home may have given the volume up.
    pub(super) decided: bool,
}

pub(super) fn key(volume: &VolumeName) -> String {
    format!("{PROMOTIONS}{volume}")
}

/// Goes on with promotions that a controller has left in the middle, or that a host did not answer.
pub(super) async fn resume(cluster: &Arc<Cluster>) -> Result<(), Problem> {
    for record in cluster.records.list::<PromotionRecord>(PROMOTIONS).await? {
        if let Err(problem) = go_on(cluster, &record.volume, None).await {
            tracing::warn!("{}: {problem}", what(&record.volume));
        }
    }
    Ok(())
}

/// Carries out the recorded promotion. When its point is gone, or a person names another host, `ask` chooses anew.
///
/// # Errors
/// `Conflict` if somebody is at it, or it was called off because the home answers again; as the hosts answer.
pub(super) async fn go_on(
    cluster: &Arc<Cluster>,
    volume: &VolumeName,
    ask: Option<&PromoteVolume>,
) -> Result<Promotion, Problem> {
    let (_step, record) = take(cluster, volume).await?;
    with(cluster, record, ask).await
}

/// Records a promotion and carries it out. The task that resumes promotions does not get at it in between.
///
/// # Errors
/// `Conflict` if one is recorded or something uses the volume; otherwise as [`go_on`].
pub(super) async fn begin(
    cluster: &Arc<Cluster>,
    record: &PromotionRecord,
) -> Result<Promotion, Problem> {
    let volume = &record.volume;
    let _step = step(cluster, volume)?;
    // While a promotion is recorded, no job that uses the volume begins, and it is neither moved nor deleted.
    cluster.index.begin_promotion(volume).map_err(|why| {
        Problem::conflict(what(volume), why).next(
            "cancel the job or the move first: a VM can't go on with content that is older than what it \
             has seen",
        )
    })?;
    let last = cluster.index.volume_move(volume).filter(|last| !last.view.state.is_final());
    if let Some(last) = last.filter(|last| cluster.hosts.get(&last.view.to).is_err()) {
        cluster.index.end_promotion(volume);
        let from = &last.view.from;
        let why = format!("it is being brought back to {from}");
        return Err(Problem::conflict(what(volume), why).next(match cluster.hosts.state(from) {
            HostState::Up => "try again in some seconds".to_owned(),
            _ => format!(
                "try again when {from} answers; or if it is gone for good: perigee host remove {from} --force"
            ),
        }));
    }
    match cluster.records.create(&key(volume), record).await {
        Ok(true) => {}
        Ok(false) => {
            return Err(Problem::conflict(what(volume), "it is being promoted already"));
        }
        Err(problem) => {
            cluster.index.end_promotion(volume);
            return Err(problem);
        }
    }
    with(cluster, recorded(cluster, volume).await?, None).await
}

async fn with(
    cluster: &Arc<Cluster>,
    record: Owned<PromotionRecord>,
    ask: Option<&PromoteVolume>,
) -> Result<Promotion, Problem> {
    let volume = record.value.volume.clone();
    let mut run = Run { cluster, record };
    let Err(problem) = run.carry_out().await else { return Ok(run.record.value.view) };
    let Some(ask) = ask.filter(|ask| run.is_to_choose(ask, &problem)) else { return Err(problem) };
    // It may have been called off.
    if !cluster.index.is_promoted(&volume) {
        return Err(problem);
    }
    let anew = choose(cluster, &volume, ask).await?;
    run.choose_anew(anew).await?;
    run.carry_out().await?;
    Ok(run.record.value.view)
}

/// Calls off a promotion that is not done.
///
/// # Errors
/// `Conflict` if there is none, or no way back.
pub(super) async fn cancel(
    cluster: &Arc<Cluster>,
    volume: &VolumeName,
) -> Result<Promotion, Problem> {
    let (_step, record) = take(cluster, volume).await?;
    if record.value.decided {
        let Promotion { from, to, .. } = &record.value.view;
        let why = format!("{from} may have given the volume up already");
        return Err(Problem::conflict(format!("can't call off the promotion of {volume}"), why)
            .next(format!(
                "it goes on when {to} answers; to take another host's replica: perigee volume promote {volume} \
                 --host HOST; `perigee image list` shows what {from} has kept as an image"
            )));
    }
    let run = Run { cluster, record };
    run.call_off().await?;
    Ok(run.record.value.view)
}

async fn take<'a>(
    cluster: &'a Cluster,
    volume: &VolumeName,
) -> Result<(crate::cluster::Hold<'a>, Owned<PromotionRecord>), Problem> {
    let step = step(cluster, volume)?;
    Ok((step, recorded(cluster, volume).await?))
}

fn step<'a>(
    cluster: &'a Cluster,
    volume: &VolumeName,
) -> Result<crate::cluster::Hold<'a>, Problem> {
    cluster.index.begin_promotion_step(volume).ok_or_else(|| {
        let why = "a promotion of it is under way";
        Problem::conflict(what(volume), why).next("try again in some seconds")
    })
}

async fn recorded(
    cluster: &Cluster,
    volume: &VolumeName,
) -> Result<Owned<PromotionRecord>, Problem> {
    let record = cluster.records.own::<PromotionRecord>(&key(volume)).await?;
    record.ok_or_else(|| {
        let why = "no promotion of it is under way";
        Problem::conflict(what(volume), why)
            .next(format!("`perigee volume info {volume}` shows where it is"))
    })
}

struct Run<'a> {
    cluster: &'a Arc<Cluster>,
    record: Owned<PromotionRecord>,
}

impl Run<'_> {
    /// Each step can be done again.
    async fn carry_out(&mut self) -> Result<(), Problem> {
        let PromotionRecord { volume, view, layer, tenure, forced, .. } = self.record.value.clone();
        let Promotion { from, to, .. } = view;
        let answers = answers(self.cluster, &volume, &from, forced).await;
        if answers && !forced && !self.record.value.decided {
            return self.end(format!("its home {from} answers again"), ProblemKind::Conflict).await;
        }
        let Ok(host) = self.cluster.hosts.get(&to) else {
            return self.end(format!("host {to} was removed"), ProblemKind::NotFound).await;
        };
        if answers && forced {
            self.have_it_given_up().await?;
        }
        let path = format!("/v1/volumes/{volume}/replica/promote");
        let promoted =
            host.volume.post::<VolumeHome>(&path, &PromoteReplica { layer, tenure }).await;
        match promoted {
            Ok(_) => {}
            Err(problem)
                if matches!(problem.kind, ProblemKind::NotFound | ProblemKind::Conflict) =>
            {
                return self.end(problem.why, problem.kind).await;
            }
            // Nobody asked for it to be done at any later time while the home answers.
            Err(problem) if answers => return self.end(problem.why, problem.kind).await,
            Err(problem) => return Err(problem),
        }
        self.decide().await?;
        self.finish(&host).await
    }

    /// The home answers, and a person has it give the volume up. Nothing is written there any more before the replica
    /// is the volume.
    async fn have_it_given_up(&mut self) -> Result<(), Problem> {
        let PromotionRecord { volume, view: Promotion { from, to, .. }, layer, .. } =
            self.record.value.clone();
        if !self.record.value.decided {
            // The volume would be nowhere if the point were not there.
            match points(self.cluster, &to, &volume).await {
                Ok(replica)
                    if replica.points.iter().any(|p| p.layer == layer && p.missing_bytes == 0) => {}
                Ok(_) => {
                    let why = format!("{to} has the point of the replica no more");
                    return self.end(why, ProblemKind::NotFound).await;
                }
                Err(problem) => return self.end(problem.why, problem.kind).await,
            }
            self.decide().await?;
        }
        let superseded = self.superseded();
        let mut answer = lost::tell(self.cluster, &superseded).await;
        for _ in 1..TRIES {
            if answer.is_ok() {
                break;
            }
            tokio::time::sleep(PAUSE).await;
            answer = lost::tell(self.cluster, &superseded).await;
        }
        answer.map_err(|problem| {
            let why = format!("its home {from} answers, and did not give it up: {}", problem.why);
            let again = "it is tried again until it does";
            Problem::new(problem.kind, what(&volume), why).next(match problem.next.is_empty() {
                true => again.to_owned(),
                false => format!("at {from}: {}; {again}", problem.next),
            })
        })
    }

    /// What the lost home is to be told.
    fn superseded(&self) -> SupersededVolume {
        let PromotionRecord { volume, view, lost, tenure, .. } = &self.record.value;
        SupersededVolume {
            volume: volume.clone(),
            host: view.from.clone(),
            lost: *lost,
            tenure: *tenure,
            to: view.to.clone(),
        }
    }

    async fn decide(&mut self) -> Result<(), Problem> {
        if self.record.value.decided {
            return Ok(());
        }
        self.record.value.decided = true;
        self.record.save().await
    }

    /// The replica is the volume: everybody gets to know it.
    async fn finish(&self, host: &Arc<HostLink>) -> Result<(), Problem> {
        let PromotionRecord { volume, view: Promotion { from, to, .. }, site, .. } =
            &self.record.value;
        let cluster = self.cluster;
        lost::keep(cluster, &self.superseded()).await?;
        let at_home = |_: Option<VolumeRecord>| VolumeRecord {
            name: volume.clone(),
            home: to.clone(),
            seen: None,
        };
        cluster.records.update(&volume_key(volume), at_home).await?;
        // What an earlier home still keeps for the lost one is dropped like a shadow.
        if let Some(last) = cluster.index.incomplete_move(volume)
            && let Some(tenure) = last.tenure
        {
            left_behind::keep(cluster, volume, &last.view.from, tenure.next()).await?;
        }
        moves::forget(cluster, volume).await?;
        forget(cluster, volume, site).await?;
        attach_others(cluster, volume, host, from).await;
        tracing::warn!("volume {volume} is at {to} now; what {from} had written since is lost");
        self.is_over().await
    }

    async fn is_over(&self) -> Result<(), Problem> {
        let volume = &self.record.value.volume;
        self.cluster.records.remove(&key(volume)).await?;
        self.cluster.index.end_promotion(volume);
        Ok(())
    }

    /// It can't be carried out, and is called off if there still is a way back.
    async fn end(&self, why: String, kind: ProblemKind) -> Result<(), Problem> {
        let PromotionRecord { volume, view: Promotion { from, .. }, decided, .. } =
            &self.record.value;
        if *decided {
            return Err(Problem::new(kind, what(volume), why).next(format!(
                "to take another replica: perigee volume promote {volume}; `perigee image list` shows what {from} \
                 has kept as an image"
            )));
        }
        self.call_off().await?;
        tracing::warn!("the promotion of volume {volume} is called off: {why}");
        Err(Problem::new(kind, what(volume), why).next(format!(
            "it was called off, and the volume stays at {from}; to look again: perigee volume promote {volume}"
        )))
    }

    /// The host of the replica may have been asked, and its answer may be lost: it is told until it has answered.
    async fn call_off(&self) -> Result<(), Problem> {
        let PromotionRecord { volume, view: Promotion { from, .. }, lost, .. } = &self.record.value;
        self.refuse_there(from, lost.unwrap_or_default()).await?;
        tracing::info!("the promotion of volume {volume} is called off");
        self.is_over().await
    }

    /// What has become of the replica there is not the volume.
    async fn refuse_there(&self, home: &HostId, tenure: Tenure) -> Result<(), Problem> {
        let PromotionRecord { volume, view, tenure: promoted, .. } = &self.record.value;
        let refused = SupersededVolume {
            volume: volume.clone(),
            host: view.to.clone(),
            lost: Some(*promoted),
            tenure,
            to: home.clone(),
        };
        lost::keep(self.cluster, &refused).await?;
        if let Err(problem) = lost::tell(self.cluster, &refused).await {
            tracing::info!("volume {volume} at {}: {problem}", refused.host);
        }
        Ok(())
    }

    /// Whether a person's request leads to another point.
    fn is_to_choose(&self, ask: &PromoteVolume, problem: &Problem) -> bool {
        let names_another =
            ask.host.as_ref().is_some_and(|host| *host != self.record.value.view.to);
        names_another || matches!(problem.kind, ProblemKind::NotFound | ProblemKind::Conflict)
    }

    async fn choose_anew(&mut self, anew: PromotionRecord) -> Result<(), Problem> {
        self.refuse_there(&anew.view.to, anew.tenure).await?;
        let before = &self.record.value;
        let mut view = anew.view.clone();
        view.from = before.view.from.clone();
        let (lost, forced) = (before.lost, before.forced || anew.forced);
        let decided = before.decided;
        self.record.value = PromotionRecord { view, lost, forced, decided, ..anew };
        self.record.save().await
    }
}

/// Whether a home answers. One that is up and only slow is asked again.
pub(super) async fn answers(
    cluster: &Cluster,
    volume: &VolumeName,
    home: &HostId,
    forced: bool,
) -> bool {
    let Ok(link) = cluster.hosts.get(home) else { return false };
    let path = format!("/v1/volumes/{volume}/home");
    let is_up = cluster.hosts.state(home) == HostState::Up;
    let tries = if is_up && forced { TRIES } else { 1 };
    for at in 0..tries {
        if at > 0 {
            tokio::time::sleep(PAUSE).await;
        }
        match link.volume.get::<VolumeHome>(&path).await {
            Err(problem) if problem.kind == ProblemKind::Unavailable => {}
            _ => return true,
        }
    }
    false
}

/// A host that does not answer finds the volume when the lost home is back and tells it.
async fn attach_others(
    cluster: &Cluster,
    volume: &VolumeName,
    home: &Arc<HostLink>,
    from: &HostId,
) {
    for host in cluster.hosts.up().iter().filter(|host| host.id != home.id && host.id != *from) {
        let answer = moves::attach_at(cluster, host, volume, home).await;
        if let Err(problem) = answer {
            tracing::warn!("volume {volume} at {}: {problem}", host.id);
        }
    }
}
