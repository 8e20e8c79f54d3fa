//! `perigee volume replicate` and `perigee volume promote`

use std::io::{IsTerminal, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use perigee_http::Client;
use perigee_model::replica::{PromoteVolume, Promotion, Replica, ReplicateVolume, StopReplica};
use perigee_model::units::format_duration;
use perigee_model::{Problem, SiteId, VolumeName};

use crate::commands::kept;
use crate::output::{self, Column, Format};

const REPLICA: &[Column<Replica>] = &[
    ("volume", |r| r.volume.to_string()),
    ("site", |r| r.site.to_string()),
    ("host", |r| r.host.to_string()),
    ("every", |r| format_duration(r.every_s)),
    ("keeps", |r| r.keep.to_string()),
    ("points", |r| r.points.to_string()),
    ("state", state),
];

const PROMOTION: &[Column<Promotion>] = &[
    ("volume", |p| p.volume.to_string()),
    ("from", |p| p.from.to_string()),
    ("to", |p| p.to.to_string()),
    ("lost", lost),
];

/// A volume's replicas in one line.
pub fn summary(replicas: &[Replica]) -> String {
    match replicas {
        [] => "-".to_owned(),
        all => {
            let one = |replica: &Replica| format!("{}: {}", replica.host, state(replica));
            all.iter().map(one).collect::<Vec<_>>().join("; ")
        }
    }
}

fn state(replica: &Replica) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    let mut words = Vec::new();
    match replica.age(now_ms) {
        Some(age) => words.push(format!("{} old", format_duration(age.as_secs()))),
        None => words.push("not complete yet".to_owned()),
    }
    if let Some(bytes) = replica.behind_bytes {
        words.push(format!("{} behind", output::bytes(bytes)));
    }
    if let Some(bytes) = replica.missing_bytes {
        words.push(format!("{} to ship", output::bytes(bytes)));
    }
    words.extend(replica.kept.as_ref().map(kept::in_words));
    if replica.stopping {
        words.push("being dropped".to_owned());
    }
    if !replica.problem.is_empty() {
        words.push(replica.problem.clone());
    }
    words.join(", ")
}

/// # Errors
/// As the controller says.
pub async fn replicate(
    client: &Client,
    volume: &VolumeName,
    ask: &ReplicateVolume,
    format: Format,
) -> Result<(), Problem> {
    let replica: Replica = client.post(&format!("/v1/volumes/{volume}/replicas"), ask).await?;
    output::one(format, &replica, REPLICA)
}

/// # Errors
/// As the controller says.
pub async fn stop(
    client: &Client,
    volume: &VolumeName,
    to: SiteId,
    format: Format,
) -> Result<(), Problem> {
    let path = format!("/v1/volumes/{volume}/replicas/stop");
    let replica: Replica = client.post(&path, &StopReplica { to }).await?;
    output::one(format, &replica, REPLICA)
}

/// What is lost with the home, in words.
fn lost(promotion: &Promotion) -> String {
    let age = format_duration(promotion.age_s);
    let mut words = match promotion.silent_s {
        0 => format!("what was written in the last {age}"),
        // A host that is dead writes nothing. Whether it is, nobody here knows.
        silent_s => format!(
            "what was written in the {age} before {} last answered, {} ago, and since then if it runs on",
            promotion.from,
            format_duration(silent_s)
        ),
    };
    match promotion.behind_bytes {
        Some(bytes) => {
            words.push_str(&format!(", at least {} when it last answered", output::bytes(bytes)));
        }
        None => words.push_str("; how much that is is not known"),
    }
    match promotion.in_use {
        Some(true) => words.push_str("; the volume was in use"),
        Some(false) => words.push_str("; the volume was not in use"),
        None => {}
    }
    words
}

/// Says what would be lost, asks whether to go on, and promotes.
///
/// # Errors
/// As the controller says; `Invalid` if nobody can be asked and `yes` is not set.
pub async fn promote(
    client: &Client,
    volume: &VolumeName,
    ask: PromoteVolume,
    yes: bool,
    format: Format,
) -> Result<(), Problem> {
    let path = format!("/v1/volumes/{volume}/promote");
    if ask.cancel {
        let promotion: Promotion = client.post(&path, &ask).await?;
        output::note(&format!("volume {volume} stays at {}", promotion.from));
        return Ok(());
    }
    let would: Promotion = client.post(&path, &ask).await?;
    output::note(&format!(
        "volume {volume} will be the replica at {}; lost with {}: {}",
        would.to,
        would.from,
        lost(&would)
    ));
    if !yes {
        confirm(volume)?;
    }
    // What was shown is what is done.
    let (host, layer) = (Some(would.to), Some(would.layer));
    let ask = PromoteVolume { dry_run: false, host, layer, ..ask };
    let done: Promotion = client.post(&path, &ask).await?;
    output::one(format, &done, PROMOTION)
}

fn confirm(volume: &VolumeName) -> Result<(), Problem> {
    let what = format!("can't promote a replica of volume {volume}");
    if !std::io::stdin().is_terminal() {
        let why = "it has to be confirmed, and the input is not a terminal";
        return Err(Problem::invalid(what, why).next("add --yes to do it without being asked"));
    }
    eprint!("Go on? [y/N] ");
    let mut answer = String::new();
    let asked = std::io::stderr().flush().and_then(|()| std::io::stdin().read_line(&mut answer));
    asked.map_err(|error| Problem::internal(&what, error))?;
    match answer.trim() {
        "y" | "Y" | "yes" => Ok(()),
        _ => Err(Problem::conflict(what, "the answer was not yes")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_promotion_loses_is_told_as_far_as_it_is_known() {
        let mut promotion: Promotion = serde_json::from_value(serde_json::json!({
            "volume": "data", "from": "home1", "to": "cloud1",
            "layer": "00000000-0000-0000-0000-000000000000", "taken_ms": 0, "age_s": 540, "silent_s": 0,
            "behind_bytes": 2 << 20, "in_use": true
        }))
        .expect("a promotion");
        assert_eq!(
            lost(&promotion),
            "what was written in the last 9m, at least 2 MiB when it last answered; the volume was in use"
        );
        promotion.silent_s = 656;
        assert!(
            lost(&promotion).starts_with(
                "what was written in the 9m before home1 last answered, 10m56s ago, and since then if it runs on"
            ),
            "the time for which it is dead counts as lost"
        );
        promotion.silent_s = 0;
        (promotion.behind_bytes, promotion.in_use) = (None, None);
        assert_eq!(
            lost(&promotion),
            "what was written in the last 9m; how much that is is not known"
        );
    }
}
