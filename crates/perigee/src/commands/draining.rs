//! `perigee host drain` and `undrain`: what leaves a host, and how far that is.

use std::time::Duration;

use perigee_http::Client;
use perigee_model::drain::{DrainFate, DrainHost, DrainStep, HostDrain};
use perigee_model::job::Host;
use perigee_model::units::format_seconds;
use perigee_model::{HostId, Problem};

use crate::commands::asking::{self, Said};
use crate::output::{self, Column, Format};

const LOOK_EVERY: Duration = Duration::from_millis(500);

const STEPS: &[Column<DrainStep>] = &[
    ("what", |s| s.kind.to_string()),
    ("name", |s| s.name.clone()),
    ("does", |s| output::word(&s.fate)),
    ("to", to),
    ("takes", |s| s.takes_s.map_or_else(|| "-".to_owned(), format_seconds)),
    ("sends", |s| s.bytes.map_or_else(|| "-".to_owned(), output::bytes)),
    ("why", |s| s.why.clone()),
];

fn to(step: &DrainStep) -> String {
    match step.to.as_slice() {
        [] => "-".to_owned(),
        hosts => hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    }
}

/// What is left, a line for each, as `host info` shows it.
pub fn left(host: &Host) -> String {
    let left = host.drain.iter().flat_map(|drain| drain.left.iter().flatten());
    left.map(line).collect::<Vec<_>>().join("\n")
}

/// One of the things, what becomes of it, and why.
pub fn line(step: &DrainStep) -> String {
    let to = if step.to.is_empty() { String::new() } else { format!(" to {}", to(step)) };
    let why = if step.why.is_empty() { String::new() } else { format!(": {}", step.why) };
    format!("{} {} {}{to}{why}", step.kind, step.name, output::word(&step.fate))
}

/// Has a host drained, or only says what that would do, and prints what is there. With `waits` it shows the progress until the host is
/// drained. Ctrl-C ends only the display.
///
/// # Errors
/// `Conflict` if the host is waited for, and all that is left can't leave.
pub async fn drain(
    client: &Client,
    host: &HostId,
    (dry_run, waits): (bool, bool),
    format: Format,
) -> Result<(), Problem> {
    let path = format!("/v1/hosts/{host}/drain");
    let drain: HostDrain = client.post(&path, &DrainHost { dry_run }).await?;
    let left = drain.left.as_deref().unwrap_or_default();
    if !waits {
        output::list(format, left, STEPS)?;
        output::note(&summary(host, dry_run, left));
        if !drain.keeps.is_empty() {
            output::note(&format!("host {host} keeps {}", shortened(&drain.keeps)));
        }
        return Ok(());
    }
    let goes_on = format!(
        "the drain goes on; `perigee host info {host}` shows what is left, `perigee host undrain {host}` calls it off"
    );
    let watching = watch(client, host, &goes_on);
    let Some(ended) = asking::until_interrupted(watching, &goes_on).await? else { return Ok(()) };
    let left = ended.left.as_deref().unwrap_or_default();
    output::list(format, left, STEPS)?;
    if left.is_empty() {
        output::note(&format!("host {host} is drained"));
        return Ok(());
    }
    let why = left.iter().map(|step| format!("{} {} stays: {}", step.kind, step.name, step.why));
    let why = why.collect::<Vec<_>>().join("; ");
    Err(Problem::conflict(format!("can't drain host {host}"), why).next(format!(
        "end or move what is named, and the drain goes on by itself; `perigee host undrain {host}` calls it off"
    )))
}

fn summary(host: &HostId, dry_run: bool, left: &[DrainStep]) -> String {
    let stay = left.iter().filter(|step| step.fate == DrainFate::Stays).count();
    match (dry_run, left.len(), stay) {
        (true, 0, _) => format!("nothing is at host {host}"),
        (true, all, 0) => format!("all {all} would leave host {host}"),
        (true, all, stay) => format!("{stay} of {all} can't leave host {host}"),
        (false, 0, _) => format!("host {host} is drained"),
        (false, ..) => format!(
            "host {host} is being drained; `perigee host drain {host} --wait` shows the progress"
        ),
    }
}

/// More of what a host keeps are not named.
const KEPT_NAMED: usize = 10;

fn shortened(keeps: &[String]) -> String {
    let named = keeps.iter().take(KEPT_NAMED).cloned().collect::<Vec<_>>().join(", ");
    match keeps.len().saturating_sub(KEPT_NAMED) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

/// Calls the drain off.
///
/// # Errors
/// `NotFound`.
pub async fn undrain(client: &Client, host: &HostId) -> Result<(), Problem> {
    let path = format!("/v1/hosts/{host}/undrain");
    client.post::<()>(&path, &serde_json::json!({})).await
}

/// Until the host is drained, or all that is left can't leave.
pub async fn watch(client: &Client, host: &HostId, goes_on: &str) -> Result<HostDrain, Problem> {
    let mut said = Said::default();
    loop {
        let now: Host = asking::get(client, &format!("/v1/hosts/{host}"), goes_on).await?;
        let lines = left(&now);
        let Some(drain) = now.drain else {
            let what = format!("can't drain host {host}");
            return Err(Problem::conflict(what, "somebody has called that off"));
        };
        let first = lines.lines().next().map(|line| format!(": {line}")).unwrap_or_default();
        let text = format!("{host} {}{first}", drain.in_words());
        if said.is_news(&format!("{text} {}", letters(drain.left.as_ref().map_or(0, Vec::len)))) {
            output::note(&text);
        }
        if drain.is_drained() || drain.is_stuck() {
            return Ok(drain);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// A count that is news when it changes, unlike digits.
fn letters(count: usize) -> String {
    "|".repeat(count)
}

#[cfg(test)]
mod tests {
    use perigee_model::drain::DrainedKind;

    use super::*;

    fn step(fate: DrainFate, to: &[&str], why: &str) -> DrainStep {
        DrainStep {
            kind: DrainedKind::Vm,
            name: "web".to_owned(),
            fate,
            to: to.iter().map(|host| HostId::new(*host).expect("a name")).collect(),
            why: why.to_owned(),
            takes_s: None,
            bytes: None,
        }
    }

    #[test]
    fn a_line_says_what_becomes_of_a_thing_and_why() {
        assert_eq!(line(&step(DrainFate::Moves, &["home2"], "")), "VM web moves to home2");
        let why = "there is no other host";
        assert_eq!(line(&step(DrainFate::Stays, &[], why)), format!("VM web stays: {why}"));
    }

    #[test]
    fn what_a_drain_would_do_is_said_in_one_sentence() {
        let host = HostId::new("home1").expect("a name");
        let steps =
            [step(DrainFate::Moves, &["home2"], ""), step(DrainFate::Stays, &[], "no room")];
        assert_eq!(summary(&host, true, &steps), "1 of 2 can't leave host home1");
        assert_eq!(summary(&host, true, &steps[..1]), "all 1 would leave host home1");
        assert_eq!(summary(&host, false, &[]), "host home1 is drained");
    }
}
