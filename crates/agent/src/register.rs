//! Registers the host with the controller: at the start, and then regularly as a heartbeat.

use std::time::Duration;

use perigee_http::{Client, Expected, Network, PeerIdentity, notify};
use perigee_model::vm::HostAddresses;
use perigee_model::{HostId, Problem};

const HEARTBEAT: Duration = Duration::from_secs(5);
const RETRY_MIN: Duration = Duration::from_millis(200);

/// How long the controller may take to answer the agent.
pub const ANSWER_MAX: Duration = Duration::from_secs(5);

/// A client of the controller at this address, which is from the configuration.
///
/// # Errors
/// `Invalid` when it can't be used.
pub fn client(
    controller: &str,
    network: &Network,
    answer_max: Duration,
) -> Result<Client, Problem> {
    if controller.starts_with("unix:") {
        return Client::new(controller, answer_max);
    }
    network.client(controller, Expected::Identity(PeerIdentity::Controller), answer_max)
}

/// Registers the host repeatedly. Returns only if the controller's address is not valid.
pub async fn keep_registered(
    controller: Result<Client, Problem>,
    host: &HostId,
    addresses: impl Fn() -> HostAddresses,
) -> Problem {
    let client = match controller {
        Ok(client) => client,
        Err(problem) => return problem,
    };
    let mut retry = RETRY_MIN;
    let mut known = None;
    loop {
        let addresses = addresses();
        let path = format!("/v1/hosts/{host}");
        let result = client.put::<serde_json::Value>(&path, &addresses).await;
        let now_known = result.is_ok();
        if known != Some(now_known) {
            match &result {
                Ok(_) => {
                    let controller = client.address();
                    tracing::info!(controller, "the host is registered with the controller");
                    notify::status(&format!("registered with {controller}"));
                }
                Err(problem) => {
                    tracing::warn!(%problem, "can't register the host with the controller");
                    notify::status(&problem.to_string());
                }
            }
            known = Some(now_known);
        }
        let wait = if now_known { HEARTBEAT } else { retry };
        retry = if now_known { RETRY_MIN } else { (retry * 2).min(HEARTBEAT) };
        tokio::time::sleep(wait).await;
    }
}

/// Tells the controller that this agent stops in order. The VMs go on, unless the machine itself goes down.
pub async fn say_stop(controller: Result<Client, Problem>, host: &HostId) {
    if machine_goes_down().await {
        return;
    }
    let Ok(client) = controller else { return };
    let said = client.post::<()>(&format!("/v1/hosts/{host}/stops"), &serde_json::json!({})).await;
    if let Err(problem) = said {
        tracing::warn!(%problem, "the controller does not know that the agent stops in order");
    }
}

/// Whether systemd stops everything. Where there is none, who stops the agent alone is a person.
pub async fn machine_goes_down() -> bool {
    let asked = tokio::process::Command::new("systemctl").arg("is-system-running").output();
    match tokio::time::timeout(ANSWER_MAX, asked).await {
        Ok(Ok(answer)) => answer.stdout.starts_with(b"stopping"),
        Ok(Err(_)) | Err(_) => false,
    }
}
