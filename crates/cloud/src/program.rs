//! A provider that is a program of its own: `docs/providers.md` has the protocol.
//!
//! Each call is one run: the verb is the last argument, one JSON object comes on the standard input, one JSON object is wanted on the standard output. A
//! run is ended with its whole process group when its time is over, when it says too much, and when nobody waits for it any more.

mod answer;
mod run;
mod snapshots;

use std::fmt;
use std::time::Duration;

use futures_util::future::BoxFuture;
use perigee_model::kept::SnapshotPrice;
use perigee_model::rental::{Instance, NewInstance, Notice, Offer};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::provider::{CloudError, CloudErrorKind, Provider, Snapshots, short};
use answer::{InstanceAnswer, InstancesAnswer, NoticesAnswer, OffersAnswer};
use run::Run;

/// How long a run may take if its provider names no other time.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// The program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// The provider's name in `providers.yaml`.
    pub name: String,
    /// The program's file and what stands before the verb.
    pub command: Vec<String>,
    /// Which variables of this process's environment the program gets, beside those that every program needs.
    pub environment: Vec<String>,
    /// How long a run may take.
    pub timeout: Duration,
    /// How old its prices may be.
    pub price_age_max_s: u64,
    /// What a snapshot costs. Without a price the program is asked for none.
    pub snapshots: SnapshotPrice,
}

impl Program {
    /// One run. `what` are the words that an error begins with; `secrets` of the input are not in it.
    async fn call<T: DeserializeOwned>(
        &self,
        verb: &str,
        what: &str,
        input: &impl Serialize,
        secrets: &str,
    ) -> Result<T, CloudError> {
        let input = serde_json::to_vec(input);
        let input = input.map_err(|error| no_sense(what, error.to_string()))?;
        let run = Run {
            command: &self.command,
            verb,
            environment: &self.environment,
            timeout: self.timeout,
        };
        let ended = run.to_its_end(input).await.map_err(|failed| {
            let kind = match failed.did_nothing {
                true => CloudErrorKind::Refused,
                false => CloudErrorKind::Unclear,
            };
            said(what, kind, failed.why)
        })?;
        let hide = |text: &str| hidden(text, secrets, &self.environment);
        answer::read(&ended.output, ended.is_success).map_err(|wrong| {
            let complaint = short(&hide(&ended.complaint));
            let complaint = match complaint.is_empty() {
                true => complaint,
                false => format!("; it wrote: {complaint}"),
            };
            let why = short(&hide(&wrong.message));
            said(what, wrong.kind, format!("{why}{complaint}"))
        })
    }
}

fn said(what: &str, kind: CloudErrorKind, why: impl fmt::Display) -> CloudError {
    CloudError::new(kind, format!("{what}: {kind}: {why}"))
}

/// The error for an answer that makes no sense.
fn no_sense(what: &str, why: String) -> CloudError {
    said(what, CloudErrorKind::Unclear, short(&why))
}

/// The text without secrets: values of variables that the program was given, tokens, and what the input has in confidence.
fn hidden(text: &str, secrets: &str, environment: &[String]) -> String {
    // Shorter lines are words that stand everywhere.
    const LINE_MIN: usize = 8;
    let mut text = perigee_model::secret::without_tokens(text);
    let values = environment.iter().filter_map(|name| std::env::var(name).ok());
    let values: Vec<String> = values.collect();
    let lines = values.iter().map(String::as_str).chain([secrets]).flat_map(str::lines);
    let lines = lines.map(|line| line.trim().to_owned());
    let all: Vec<String> = values.iter().cloned().chain(lines).collect();
    for secret in all.into_iter().filter(|secret| secret.len() >= LINE_MIN) {
        text = text.replace(&secret, "…");
        // So it stands in the input.
        let quoted = serde_json::Value::from(secret).to_string();
        text = text.replace(quoted.trim_matches('"'), "…");
    }
    text
}

impl Provider for Program {
    fn name(&self) -> &str {
        &self.name
    }

    fn price_age_max_s(&self) -> u64 {
        self.price_age_max_s
    }

    fn offers(&self) -> BoxFuture<'_, Result<Vec<Offer>, CloudError>> {
        Box::pin(async {
            let what = format!("can't list what {} offers", self.name);
            let answer: OffersAnswer = self.call("offers", &what, &json!({}), "").await?;
            answer.checked().map_err(|why| no_sense(&what, why))
        })
    }

    fn create<'a>(&'a self, new: &'a NewInstance) -> BoxFuture<'a, Result<Instance, CloudError>> {
        Box::pin(async {
            let what = format!("can't rent a {} in {} at {}", new.kind, new.zone, self.name);
            let answer: InstanceAnswer = self.call("create", &what, new, &new.user_data).await?;
            answer.checked(new).map_err(|why| no_sense(&what, why))
        })
    }

    fn list<'a>(&'a self, cluster: &'a str) -> BoxFuture<'a, Result<Vec<Instance>, CloudError>> {
        Box::pin(async move {
            let what = format!("can't list the instances at {}", self.name);
            let input = json!({"cluster": cluster});
            let answer: InstancesAnswer = self.call("list", &what, &input, "").await?;
            answer.checked(cluster).map_err(|why| no_sense(&what, why))
        })
    }

    fn end<'a>(&'a self, instance: &'a str) -> BoxFuture<'a, Result<(), CloudError>> {
        Box::pin(async move {
            let what = format!("can't end {instance} at {}", self.name);
            let input = json!({"instance": instance});
            let _: answer::Done = self.call("end", &what, &input, "").await?;
            Ok(())
        })
    }

    fn notices<'a>(&'a self, cluster: &'a str) -> BoxFuture<'a, Result<Vec<Notice>, CloudError>> {
        Box::pin(async move {
            let what = format!("can't ask {} for notices", self.name);
            let input = json!({"cluster": cluster});
            let answer: NoticesAnswer = self.call("notices", &what, &input, "").await?;
            answer.checked().map_err(|why| no_sense(&what, why))
        })
    }

    fn snapshots(&self) -> Option<&dyn Snapshots> {
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_data_and_tokens_are_not_shown() {
        let token = format!("perigee_0123456789abcdef_{}", "ab".repeat(32));
        let text =
            format!("Traceback: {{\"user_data\": \"#!x\\n  join-secret \\\"1\\\"\\n\"}} {token}");
        let shown = hidden(&text, "#!x\n  join-secret \"1\"\n", &[]);
        assert!(!shown.contains("join-secret") && !shown.contains(&token), "{shown}");
        assert!(shown.contains("Traceback"), "{shown}");
    }
}
