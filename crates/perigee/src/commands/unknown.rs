//! What hosts have and the controller has no record of.

use perigee_model::job::{EndUnknownVm, Unknown, UnknownKind};
use perigee_model::vm::VmStatus;
use perigee_model::{HostId, Problem, VmId};
use tokio::time::{Duration, Instant, sleep};

use crate::context::Context;
use crate::output::{self, Column};
use crate::servers::controller_client;

/// How long a guest may take to power off.
const POWER_OFF_MAX: Duration = Duration::from_secs(120);
const LOOK_EVERY: Duration = Duration::from_secs(1);

const COLUMNS: &[Column<Unknown>] = &[
    ("kind", |one| output::word(&one.kind)),
    ("name", |one| one.name.clone()),
    ("host", |one| one.host.to_string()),
    ("size", |one| output::bytes(one.size_bytes)),
    ("status", |one| one.status.as_ref().map_or_else(|| "-".to_owned(), output::word)),
    ("why", |one| one.why.clone()),
    ("what to do", |one| one.next.clone()),
];

/// All of it, or what is of one kind.
pub async fn list(context: &Context, kind: Option<UnknownKind>) -> Result<(), Problem> {
    let mut all: Vec<Unknown> = controller_client(context)?.get("/v1/unknown").await?;
    all.retain(|one| kind.is_none_or(|kind| one.kind == kind));
    output::list(context.format, &all, COLUMNS)
}

/// Ends a VM that no record names at this host, and waits until it is off.
pub async fn end_vm(
    context: &Context,
    vm: &VmId,
    host: HostId,
    force: bool,
) -> Result<(), Problem> {
    let client = controller_client(context)?;
    let (path, ask) = (format!("/v1/vms/{vm}/end-unknown"), EndUnknownVm { host, force });
    let begun = Instant::now();
    client.post::<serde_json::Value>(&path, &ask).await?;
    loop {
        let all: Vec<Unknown> = client.get("/v1/unknown").await?;
        let is_it = |one: &&Unknown| {
            one.kind == UnknownKind::Vm && one.name == vm.as_str() && one.host == ask.host
        };
        match all.iter().find(is_it).map(|one| one.status) {
            None => return Ok(()),
            Some(Some(VmStatus::Shutdown | VmStatus::Gone)) => {
                client.post::<serde_json::Value>(&path, &ask).await?;
            }
            Some(_) => {}
        }
        if begun.elapsed() > POWER_OFF_MAX {
            let why = format!("its guest has not powered off for {} s", POWER_OFF_MAX.as_secs());
            return Err(Problem::unavailable(format!("VM {vm} goes on"), why)
                .next(format!("end it at once: perigee vm end {vm} --host {} --force", ask.host)));
        }
        sleep(LOOK_EVERY).await;
    }
}
