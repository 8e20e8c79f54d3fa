//! The steps of a migration that involve other hosts: the epochs at the volumes' homes, and the question to the
//! destination whether the guest ran there.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use perigee_http::{Client, Expected, Network};
use perigee_model::switchover::Fate;
use perigee_model::vm::{
    AskMigrationKey, EndUnlessRan, EpochRaise, ExpectFrames, MigrateOut, MigrationKey, VmReport,
};
use perigee_model::volume::{EpochChange, EpochChanges, FlushVolumes, VolumeInfo};
use perigee_model::{Problem, ProblemKind, VmId};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use super::{ASK_AGAIN, Migration, Stop};

/// How long the guest waits in the pause for the homes of its volumes.
const RAISE_DEADLINE: Duration = Duration::from_secs(10);
const CALL_DEADLINE: Duration = Duration::from_secs(4);
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(1);

/// A connection that was not used for longer may have been closed.
const WARM: Duration = Duration::from_secs(5);

/// The home of some volumes, with a connection that is kept open for the pause.
#[derive(Clone)]
pub(super) struct Home {
    raises: Vec<EpochRaise>,
    client: Result<Client, Problem>,
    /// A flush may still be running in the pause, so it has a connection of its own.
    flushes: Result<Client, Problem>,
}

impl Home {
    /// One home for each volume server.
    pub(super) fn all(order: &MigrateOut, network: &Network) -> Vec<Self> {
        let mut homes: BTreeMap<&str, Vec<EpochRaise>> = BTreeMap::new();
        for raise in &order.epochs {
            homes.entry(&raise.volume_url).or_default().push(raise.clone());
        }
        let client = |url| {
            let client = network.client(url, Expected::Address, CALL_DEADLINE)?;
            Ok(client.granted(order.grant.as_ref()))
        };
        let home = |(url, raises)| Self { raises, client: client(url), flushes: client(url) };
        homes.into_iter().map(home).collect()
    }

    fn client(&self) -> Result<&Client, Problem> {
        self.client.as_ref().map_err(Problem::clone)
    }

    /// Checks before anything is sent whether the epochs can be raised.
    async fn greet(&self) -> Result<(), Problem> {
        try_join_all(self.raises.iter().map(|raise| self.greet_volume(raise))).await.map(drop)
    }

    async fn greet_volume(&self, raise: &EpochRaise) -> Result<(), Problem> {
        let EpochRaise { volume, from, .. } = raise;
        let info: VolumeInfo = self.client()?.get(&format!("/v1/volumes/{volume}")).await?;
        if info.epoch == *from {
            return Ok(());
        }
        let why = format!("its epoch is {}, not {from}", info.epoch);
        Err(Problem::conflict(format!("can't move the writer of {volume}"), why))
    }

    /// Flushes early, so that little is left to flush in the pause.
    async fn flush(&self) -> Result<(), Problem> {
        let volumes = self.raises.iter().map(|raise| raise.volume.clone()).collect();
        self.flushes
            .as_ref()
            .map_err(Problem::clone)?
            .post("/v1/batch/flush", &FlushVolumes { volumes })
            .await
    }

    /// Finds a volume whose epoch is still the source's.
    async fn is_one_not_raised(&self) -> Result<bool, Problem> {
        for EpochRaise { volume, from, .. } in &self.raises {
            let info: VolumeInfo = self.client()?.get(&format!("/v1/volumes/{volume}")).await?;
            if info.epoch == *from {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Raises all epochs in one request. It is repeated while the home does not answer.
    async fn raise(&self, deadline: Instant) -> Result<(), Problem> {
        let changes =
            EpochChanges { changes: self.raises.iter().map(EpochRaise::change).collect() };
        self.insist::<()>("/v1/batch/epochs", &changes, deadline).await
    }

    /// Changes the epochs back one after the other, so that one that cannot be changed back does not prevent
    /// the others.
    fn flip_back(
        &self,
        deadline: Instant,
    ) -> impl Iterator<Item = impl Future<Output = Result<(), Problem>>> {
        self.raises.iter().map(move |raise| async move {
            let change = EpochChange { from: raise.to, to: raise.from };
            let path = format!("/v1/volumes/{}/epoch", raise.volume);
            self.insist::<VolumeInfo>(&path, &change, deadline).await
        })
    }

    async fn insist<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        deadline: Instant,
    ) -> Result<(), Problem> {
        let client = self.client()?;
        let mut retry = RETRY_MIN;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let problem = match tokio::time::timeout(left, client.post::<T>(path, body)).await {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err(problem)) => problem,
                Err(_) => {
                    let what = format!("can't change epochs at {}", client.address());
                    Problem::unavailable(what, "no answer in time")
                }
            };
            if is_final(&problem) || Instant::now() + retry >= deadline {
                return Err(problem);
            }
            sleep(retry).await;
            retry = (retry * 2).min(RETRY_MAX);
        }
    }
}

/// Checks that the destination still waits for this migration. A late order must not send the last state to a
/// QEMU that waits for another one.
async fn greet_destination(
    vm: &VmId,
    order: &MigrateOut,
    destination: Result<Client, Problem>,
) -> Result<(), Problem> {
    let there: VmReport = destination?.get(&format!("/v1/vms/{vm}")).await?;
    let waits = there.spec.arrives_by.as_ref() == Some(&order.migration);
    if waits && there.incoming_uri.as_ref() == Some(&order.uri) {
        return Ok(());
    }
    let why = "the destination does not wait for this migration any more";
    Err(Problem::conflict(format!("can't migrate the VM {vm}"), why))
}

impl Migration {
    fn destination(&self) -> Result<Client, Problem> {
        let url = &self.order.destination_agent_url;
        self.host.network.client(url, Expected::Address, CALL_DEADLINE)
    }

    /// Has frames for the VM wait at the destination, from the pause on. Nothing waits for that: without it the controller says where they go.
    pub(super) fn send_frames(&self) {
        let (Some(to), Some(card)) = (self.order.destination.clone(), self.vm.spec.network.card())
        else {
            return;
        };
        self.vm.send_frames_to(to.clone());
        let (host, card) = (self.host.clone(), card.clone());
        tokio::spawn(async move {
            if let Err(why) = host.networks.send_to(&card, &to).await {
                tracing::debug!("frames do not follow a VM yet: {why}");
            }
        });
        let path = format!("/v1/vms/{}/expect-frames", self.vm.id());
        let tell = ExpectFrames { migration: self.order.migration.clone() };
        let destination = self.destination();
        tokio::spawn(async move {
            let told = async { destination?.post::<()>(&path, &tell).await };
            if let Err(problem) = told.await {
                tracing::debug!(%problem, "frames do not wait at a VM's destination yet");
            }
        });
    }

    /// Gets the key with which QEMU encrypts.
    pub(super) async fn fetch_key(&self) -> Result<(), Stop> {
        let path = format!("/v1/vms/{}/migration-key", self.vm.id());
        let ask = AskMigrationKey { migration: self.order.migration.clone() };
        let key: MigrationKey = self.destination()?.post(&path, &ask).await?;
        Ok(self.vm.dir.keep_migration_key(&key)?)
    }

    /// Asks the homes whether the epochs can be raised, and the destination whether it waits.
    pub(super) fn greet(&self) -> oneshot::Receiver<Result<(), Stop>> {
        let (homes, order) = (self.homes.clone(), self.order.clone());
        let (vm, nudge) = (self.vm.id().clone(), self.nudge.clone());
        let destination = self.destination();
        let (answer, answered) = oneshot::channel();
        tokio::spawn(async move {
            let homes = try_join_all(homes.iter().map(Home::greet));
            let greeted = tokio::try_join!(homes, greet_destination(&vm, &order, destination));
            // The migration may have ended in the meantime.
            let _ = answer.send(greeted.map(drop).map_err(Stop::from));
            nudge.notify_one();
        });
        answered
    }

    /// Uses the connections that the pause needs from time to time, so that they are not closed.
    pub(super) fn keep_warm(&mut self) {
        if self.warmed.elapsed() < WARM {
            return;
        }
        self.warmed = std::time::Instant::now();
        let homes = self.homes.clone();
        tokio::spawn(async move {
            for home in &homes {
                if let Err(problem) = home.greet().await {
                    tracing::debug!(%problem, "a home does not answer before the pause");
                }
            }
        });
    }

    /// Asks the homes to flush the guest's writes so far, while the guest runs. A failure here occurs again in
    /// the pause, where it is handled.
    pub(super) fn flush_homes(&self) {
        let homes = self.homes.clone();
        tokio::spawn(async move {
            for flushed in join_all(homes.iter().map(Home::flush)).await {
                if let Err(problem) = flushed {
                    tracing::debug!(%problem, "disks are not flushed before the pause");
                }
            }
        });
    }

    /// Gives the destination the right to write, at all homes at once.
    pub(super) async fn raise_epochs(&self) -> Result<(), Stop> {
        let deadline = Instant::now() + RAISE_DEADLINE;
        try_join_all(self.homes.iter().map(|home| home.raise(deadline))).await?;
        Ok(())
    }

    /// Takes the right to write back. This never gives up, because without it the guest cannot continue.
    pub(super) async fn flip_back(&mut self) {
        loop {
            self.hear_grant();
            let deadline = Instant::now() + CALL_DEADLINE;
            let changes = self.homes.iter().flat_map(|home| home.flip_back(deadline));
            let mut unanswered = None;
            for result in join_all(changes).await {
                match result {
                    // A refusal may pass, as one of a connection that shows a replaced certificate. Without its disks the
                    // guest would only fail.
                    Err(problem) if problem.kind == ProblemKind::Forbidden => {
                        unanswered = Some(problem);
                    }
                    Err(problem) if is_final(&problem) => {
                        // A volume that does not exist any more, or has yet another writer, cannot be taken
                        // back.
                        tracing::error!(%problem, "the epoch does not go back");
                    }
                    Err(problem) => unanswered = Some(problem),
                    Ok(()) => {}
                }
            }
            let Some(problem) = unanswered else { return };
            self.stays_paused(&format!("until its volumes are back: {problem}"));
            self.hold().await;
            sleep(ASK_AGAIN).await;
        }
    }

    /// Whether a home reports that an epoch was not raised. QEMU sends the last state only after all epochs
    /// were raised, so then the guest never ran at the destination and never will. After the epochs are changed
    /// back, a late raise is refused.
    async fn was_never_let_go(&self) -> bool {
        let asked = join_all(self.homes.iter().map(Home::is_one_not_raised)).await;
        asked.into_iter().any(|answer| answer.unwrap_or(false))
    }

    /// Finds out whether the guest ran at the destination. It asks until the destination or a home knows, and
    /// keeps the guest stopped until then.
    pub(super) async fn ask_destination(&mut self) -> Fate {
        let path = format!("/v1/vms/{}/end-unless-ran", self.vm.id());
        let question = EndUnlessRan { migration: self.order.migration.clone() };
        loop {
            self.hear_grant();
            if self.was_never_let_go().await {
                return Fate::DidNotRun;
            }
            let result = match self.destination() {
                Ok(client) => client.post::<Fate>(&path, &question).await,
                Err(problem) => Err(problem),
            };
            match result {
                Ok(Fate::NotKnown) => {
                    self.stays_paused("because the destination does not know whether it ran there");
                }
                Ok(fate) => return fate,
                Err(problem) => self.stays_paused(&format!(
                    "until the destination says whether it runs there: {problem}"
                )),
            }
            sleep(ASK_AGAIN).await;
            self.hold().await;
        }
    }

    fn stays_paused(&mut self, why: &str) {
        let stop = self.stop.as_ref().map_or_else(String::new, ToString::to_string);
        self.say(format!("{stop}; the VM stays paused {why}"));
    }
}

/// Whether a repeated request would fail in the same way.
fn is_final(problem: &Problem) -> bool {
    matches!(
        problem.kind,
        ProblemKind::Invalid
            | ProblemKind::NotFound
            | ProblemKind::Conflict
            | ProblemKind::Forbidden
    )
}
