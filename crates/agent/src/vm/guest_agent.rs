//! Asks the program qemu-guest-agent in a guest, where its image has that (QEMU's `docs/interop/qemu-ga.rst`).
//!
//! One question at a time, each over a connection of its own. The guest is not trusted: its answers are bounded in length and
//! time, and mean nothing to this host.

use std::sync::Arc;
use std::time::Duration;

use perigee_model::vm::AskGuestAgent;
use perigee_model::{Problem, ProblemKind};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::Vm;
use crate::files;
use crate::lines::next_line;

/// The time for an answer, with the time for others' questions.
const DEADLINE: Duration = Duration::from_secs(8);
/// The longest answer: what a program has printed comes in one line.
const ANSWER_BYTES_MAX: usize = 8 << 20;
/// The guest's filesystems stand still for at most this time, also if nobody asks to thaw them.
const FROZEN_MAX: Duration = Duration::from_secs(20);
/// Before an answer to `guest-sync-delimited`, so that what an earlier client has left is skipped.
const BEGIN: u8 = 0xff;

/// What may be asked. Nothing here reads the host.
const ALLOWED: [&str; 6] =
    ["guest-ping", "guest-network-get-interfaces", "guest-exec", "guest-exec-status", FREEZE, THAW];
const FREEZE: &str = "guest-fsfreeze-freeze";
const THAW: &str = "guest-fsfreeze-thaw";

#[derive(Debug, Deserialize)]
struct Answer {
    #[serde(default)]
    r#return: Value,
    #[serde(default)]
    error: Option<Refusal>,
}

#[derive(Debug, Deserialize)]
struct Refusal {
    #[serde(default)]
    desc: String,
}

impl Vm {
    /// # Errors
    /// `Unavailable` if no guest agent answers; `Conflict` with what it says if it refuses.
    pub async fn ask_guest_agent(self: &Arc<Self>, ask: AskGuestAgent) -> Result<Value, Problem> {
        if !ALLOWED.contains(&ask.execute.as_str()) {
            let what = format!("can't ask the guest agent of {}", self.id());
            return Err(Problem::invalid(
                what,
                format!("{:?} is not asked by anybody", ask.execute),
            ));
        }
        if ask.execute.starts_with("guest-exec") {
            self.check_shown()?;
        }
        let freezes = ask.execute == FREEZE;
        let answer = self.within_deadline(ask).await;
        // Also after a freeze whose answer did not come.
        if freezes {
            let vm = Arc::clone(self);
            tokio::spawn(async move {
                tokio::time::sleep(FROZEN_MAX).await;
                vm.thaw().await;
            });
        }
        answer
    }

    /// Lets the guest's filesystems go on. If they do, nothing changes.
    pub async fn thaw(&self) {
        let ask = AskGuestAgent { execute: THAW.to_owned(), arguments: json!({}) };
        if let Err(problem) = self.within_deadline(ask).await {
            tracing::debug!(vm = %self.id(), %problem, "its filesystems are not thawed");
        }
    }

    async fn within_deadline(&self, ask: AskGuestAgent) -> Result<Value, Problem> {
        let what = format!("can't ask the guest agent of {}", self.id());
        let asked = timeout(DEADLINE, async {
            let _alone = self.guest_agent_is_free.acquire().await;
            let stream =
                files::connect(&self.dir.guest_agent()).await.map_err(|e| e.to_string())?;
            converse(stream, &ask).await
        });
        let why = match asked.await {
            Ok(Ok(Answer { error: None, r#return })) => return Ok(r#return),
            Ok(Ok(Answer { error: Some(refusal), .. })) => {
                let said: String = refusal.desc.chars().take(500).collect();
                return Err(Problem::new(ProblemKind::Conflict, what, said));
            }
            Ok(Err(why)) => why,
            Err(_) => format!("it did not answer within {} s", DEADLINE.as_secs()),
        };
        Err(Problem::unavailable(what, why)
            .next("the guest needs qemu-guest-agent, and has to have booted"))
    }
}

async fn converse(stream: UnixStream, ask: &AskGuestAgent) -> Result<Answer, String> {
    let (reader, mut writer) = stream.into_split();
    let mut reader = BufReader::new(reader);
    // Any number will do: only what comes after the delimiter counts.
    let sync = json!({"execute": "guest-sync-delimited", "arguments": {"id": 1}});
    let mut line = vec![BEGIN];
    line.extend(format!("{sync}\n").bytes());
    writer.write_all(&line).await.map_err(|e| e.to_string())?;
    skip_to_begin(&mut reader).await?;
    let mut partial = Vec::new();
    next_answer(&mut reader, &mut partial).await?;
    let question = format!("{}\n", json!({"execute": ask.execute, "arguments": ask.arguments}));
    writer.write_all(question.as_bytes()).await.map_err(|e| e.to_string())?;
    next_answer(&mut reader, &mut partial).await
}

async fn skip_to_begin(reader: &mut (impl AsyncBufReadExt + Unpin)) -> Result<(), String> {
    let mut skipped = 0;
    loop {
        let available = reader.fill_buf().await.map_err(|e| e.to_string())?;
        if available.is_empty() {
            return Err("it has closed the connection".to_owned());
        }
        let found = available.iter().position(|byte| *byte == BEGIN);
        let taken = found.map_or(available.len(), |at| at + 1);
        reader.consume(taken);
        skipped += taken;
        if found.is_some() {
            return Ok(());
        }
        if skipped > ANSWER_BYTES_MAX {
            return Err("it talks without being asked".to_owned());
        }
    }
}

async fn next_answer(
    reader: &mut (impl AsyncBufReadExt + Unpin),
    partial: &mut Vec<u8>,
) -> Result<Answer, String> {
    let line = next_line(reader, partial, ANSWER_BYTES_MAX).await.map_err(|e| e.to_string())?;
    let line = line.ok_or("it has closed the connection")?;
    serde_json::from_slice(&line).map_err(|e| format!("it answers with no JSON: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest that has something left from an earlier client, and then answers.
    async fn guest(mut stream: UnixStream, says: &'static [u8]) {
        let mut buffer = [0; 512];
        let mut heard = Vec::new();
        while heard.iter().filter(|byte| **byte == b'\n').count() < 1 {
            let length = tokio::io::AsyncReadExt::read(&mut stream, &mut buffer).await.unwrap();
            heard.extend_from_slice(&buffer[..length]);
        }
        assert_eq!(heard[0], BEGIN);
        stream.write_all(b"{\"return\": \"old\"}\n\xff{\"return\": 1}\n").await.unwrap();
        stream.write_all(says).await.unwrap();
        // Until the other side has read it.
        let _ = tokio::io::AsyncReadExt::read(&mut stream, &mut buffer).await;
    }

    async fn asked(says: &'static [u8]) -> Result<Answer, String> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        tokio::spawn(guest(theirs, says));
        let ask = AskGuestAgent { execute: "guest-ping".to_owned(), arguments: json!({}) };
        timeout(Duration::from_secs(60), converse(ours, &ask)).await.expect("it ends")
    }

    #[tokio::test]
    async fn what_an_earlier_client_has_left_is_no_answer() {
        assert_eq!(asked(b"{\"return\": {\"pid\": 7}}\n").await.unwrap().r#return["pid"], 7);
    }

    #[tokio::test]
    async fn a_refusal_and_nonsense_are_told_apart() {
        let refused = asked(b"{\"error\": {\"class\": \"x\", \"desc\": \"no such file\"}}\n").await;
        assert_eq!(refused.unwrap().error.expect("refused").desc, "no such file");
        assert!(asked(b"hello\n").await.unwrap_err().contains("no JSON"));
    }
}
