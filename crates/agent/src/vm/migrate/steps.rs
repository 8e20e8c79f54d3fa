//! The steps of a migration that other hosts take part in: epochs at the volumes' homes, and what
//! became of the guest at the destination.

use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use perigee_http::Client;
use perigee_model::vm::EpochRaise;
use perigee_model::volume::{EpochChange, VolumeInfo};
use perigee_model::{Epoch, Problem, ProblemKind};
use tokio::time::{Instant, sleep};

use super::{Outgoing, Stop};

/// How long the guest waits in the pause for the homes of its volumes.
const RAISE_DEADLINE: Duration = Duration::from_secs(10);
const CALL_DEADLINE: Duration = Duration::from_secs(4);
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(1);

impl Outgoing {
    /// Gives the right to write to the destination, at all homes at once.
    pub(super) async fn raise_epochs(&self) -> Result<(), Stop> {
        let deadline = Instant::now() + RAISE_DEADLINE;
        let changes = self
            .record
            .order
            .epochs
            .iter()
            .map(|raise| change(raise, raise.from, raise.to, deadline));
        try_join_all(changes).await?;
        Ok(())
    }

    /// Takes the right to write back. Does not give up: without it the guest cannot go on.
    pub(super) async fn flip_back(&mut self, stop: &Stop) {
        let mut left = self.record.order.epochs.clone();
        loop {
            let deadline = Instant::now() + CALL_DEADLINE;
            let changes = left.iter().map(|raise| change(raise, raise.to, raise.from, deadline));
            let results = join_all(changes).await;
            let mut failed = Vec::new();
            let mut why = String::new();
            for (raise, result) in left.into_iter().zip(results) {
                match result {
                    Ok(()) => {}
                    // A volume that is no more, or has yet another writer, is nobody's to give.
                    Err(problem) if is_final(&problem) => {
                        tracing::error!(%problem, "the epoch does not go back");
                    }
                    Err(problem) => {
                        why = problem.to_string();
                        failed.push(raise);
                    }
                }
            }
            if failed.is_empty() {
                return;
            }
            left = failed;
            self.say(format!("{stop}; the VM stays paused until its volumes are back: {why}"));
            self.hold().await;
            sleep(RETRY_MAX).await;
        }
    }

    /// Whether the guest has run at the destination. `false`: its QEMU is gone there for good.
    /// Asks until there is an answer, and keeps the guest paused so long.
    pub(super) async fn destination_ran(&mut self, stop: &Stop) -> bool {
        let url = self.record.order.destination_agent_url.clone();
        let path = format!("/v1/vms/{}?unless_ran=true", self.vm.id());
        loop {
            self.hold().await;
            let result = match Client::new(&url, CALL_DEADLINE) {
                Ok(client) => client.delete(&path).await,
                Err(problem) => Err(problem),
            };
            match result {
                Ok(()) => return false,
                Err(problem) if problem.kind == ProblemKind::NotFound => return false,
                Err(problem) if problem.kind == ProblemKind::Conflict => return true,
                Err(problem) => self.say(format!(
                    "{stop}; the VM stays paused until the destination says whether it runs there: \
                     {problem}"
                )),
            }
            sleep(RETRY_MAX).await;
        }
    }
}

/// Changes one epoch at the volume's home; tries again while the home does not answer.
async fn change(
    raise: &EpochRaise,
    from: Epoch,
    to: Epoch,
    deadline: Instant,
) -> Result<(), Problem> {
    let client = Client::new(&raise.volume_url, CALL_DEADLINE)?;
    let path = format!("/v1/volumes/{}/epoch", raise.volume);
    let body = EpochChange { from, to };
    let mut retry = RETRY_MIN;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let call = client.post::<VolumeInfo>(&path, &body);
        let problem = match tokio::time::timeout(left, call).await {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(problem)) => problem,
            Err(_) => Problem::unavailable(
                format!("change the epoch of {} at {}", raise.volume, raise.volume_url),
                "no answer in time",
            ),
        };
        if is_final(&problem) || Instant::now() + retry >= deadline {
            return Err(problem);
        }
        sleep(retry).await;
        retry = (retry * 2).min(RETRY_MAX);
    }
}

/// Asking again would not help.
fn is_final(problem: &Problem) -> bool {
    matches!(problem.kind, ProblemKind::Invalid | ProblemKind::NotFound | ProblemKind::Conflict)
}
