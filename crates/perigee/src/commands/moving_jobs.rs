//! `perigee job move`: moves all VMs of a job, shows how far they are, or calls that off.

use std::time::Duration;

use perigee_http::Client;
use perigee_model::gang::moving::GangMove;
use perigee_model::job::{Job, JobMoveAsked, MoveJob};
use perigee_model::{JobId, Problem};

use crate::commands::asking::{self, Said};
use crate::output;
use crate::terminal;

const LOOK_EVERY: Duration = Duration::from_millis(300);

/// A move of all VMs of a job in one line.
pub fn summary(of: &GangMove) -> String {
    let to: Vec<&str> = of.legs.iter().map(|leg| leg.to.as_str()).collect();
    let to = if to.is_empty() { String::new() } else { format!(" to {}", to.join(", ")) };
    let how = match (of.is_open(), of.is_undone()) {
        (true, false) => "under way".to_owned(),
        (true, true) => format!("is undone: {}", of.undone),
        (false, false) => "all VMs are there".to_owned(),
        (false, true) => format!("undone: {}", of.undone),
    };
    let trouble = if of.trouble.is_empty() { "" } else { "; " };
    format!("{}{to} ({}): {how}{trouble}{}", of.number, of.reason, of.trouble)
}

/// Starts the move and shows its progress until it is over. Ctrl-C ends only the display.
///
/// # Errors
/// `Conflict` if the VMs are where they were.
pub async fn begin(client: &Client, job: &JobId, ask: &MoveJob) -> Result<(), Problem> {
    let asked: JobMoveAsked = client.post(&format!("/v1/jobs/{job}/move"), ask).await?;
    let goes_on = format!("the move goes on; `perigee job move {job} --cancel` calls it off");
    let watching = watch(client, job, Some(asked.request));
    let Some(over) = asking::until_interrupted(watching, &goes_on).await? else { return Ok(()) };
    if over.is_undone() {
        let problem = Problem::conflict(format!("can't move job {job}"), &over.undone);
        return Err(problem
            .next(format!("its VMs are where they were; `perigee job status {job}` shows them")));
    }
    output::note(&format!("move {}", summary(&over)));
    Ok(())
}

/// Calls the move off, and waits until all VMs are where they were.
///
/// # Errors
/// `Conflict` if the VMs do not move.
pub async fn cancel(client: &Client, job: &JobId) -> Result<(), Problem> {
    let path = format!("/v1/jobs/{job}/move/cancel");
    let _: JobMoveAsked = client.post(&path, &serde_json::json!({})).await?;
    let over = watch(client, job, None).await?;
    output::note(&format!("move {}", summary(&over)));
    Ok(())
}

/// Waits until the move of this request is over; without one, until none is under way.
async fn watch(client: &Client, job: &JobId, request: Option<u64>) -> Result<GangMove, Problem> {
    let goes_on = format!("the move goes on; `perigee job status {job}` shows it");
    let mut said = Said::default();
    loop {
        let found: Job = asking::get(client, &format!("/v1/jobs/{job}"), &goes_on).await?;
        let is_it = |of: &GangMove| request.is_none_or(|request| of.asked >= Some(request));
        if let Some(over) = found.gang_move.clone().filter(|of| is_it(of) && !of.is_open()) {
            return Ok(over);
        }
        if found.state.is_final() {
            return Err(Problem::conflict(format!("can't move job {job}"), "it has ended"));
        }
        if !found.reason.is_empty() && said.is_news(&found.reason) {
            output::note(&terminal::for_stderr(&format!("{job}: {}", found.reason)));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
