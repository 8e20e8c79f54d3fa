//! Asks the program qemu-guest-agent in a guest, where its image has that (QEMU's `docs/interop/qemu-ga.rst`).
//!
//! One question at a time, each over a connection of its own. The guest is not trusted: its answers are bounded in length and
//! time, and mean nothing to this host.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use perigee_model::guest_agent::{ANSWER_BYTES_MAX, Card, FilePart, FileWritten, ProgramStatus};
use perigee_model::persistent_vm::ExecBegun;
use perigee_model::vm::AskGuestAgent;
use perigee_model::{Problem, ProblemKind};
use rustix::rand::GetRandomFlags;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::Vm;
use crate::files;
use crate::lines::{LineError, next_line};

/// The time for an answer, with the time for others' questions.
const DEADLINE: Duration = Duration::from_secs(8);
/// After this time the guest is asked to let its filesystems go on, also if nobody else asks it to.
const FROZEN_MAX: Duration = Duration::from_secs(20);
/// How long a guest that refuses is asked again.
const REFUSALS_MAX: Duration = Duration::from_secs(900);
/// What an earlier client has left is skipped up to here: qemu-guest-agent answers with at most 16 MiB of each of a program's two outputs.
const SKIPPED_BYTES_MAX: usize = 64 << 20;
/// Before an answer to `guest-sync-delimited`, so that what an earlier client has left is skipped.
const BEGIN: u8 = 0xff;

/// Reads an answer as what the question asks for. Nothing that a guest says beside that is kept.
type Read = fn(&[u8]) -> Result<Said, String>;

/// When a guest that goes on is told the time: each time so long after the time before.
const TOLD_AFTER: [Duration; 4] =
    [Duration::ZERO, Duration::from_secs(2), Duration::from_secs(8), Duration::from_secs(30)];

/// What may be asked, and how its answer is read. Nothing here reads the host.
const ALLOWED: [(&str, Read); 13] = [
    ("guest-ping", nothing),
    // How many filesystems stand still, and how many have stood still until now.
    (FREEZE, as_a::<u64>),
    (THAW, as_a::<u64>),
    ("guest-network-get-interfaces", as_a::<Vec<Card>>),
    ("guest-exec", as_a::<ExecBegun>),
    ("guest-exec-status", as_a::<ProgramStatus>),
    // A number by which the guest knows the open file.
    ("guest-file-open", as_a::<i64>),
    ("guest-file-read", as_a::<FilePart>),
    ("guest-file-write", as_a::<FileWritten>),
    ("guest-file-flush", nothing),
    ("guest-file-close", nothing),
    // Unix time in nanoseconds.
    (GET_TIME, as_a::<i64>),
    (SET_TIME, nothing),
];
const GET_TIME: &str = "guest-get-time";
const SET_TIME: &str = "guest-set-time";
/// A guest's clock that is less behind stays as it is.
const BEHIND_MIN_NS: i64 = 50_000_000;
const FREEZE: &str = "guest-fsfreeze-freeze";
const THAW: &str = "guest-fsfreeze-thaw";

#[derive(Debug, Deserialize)]
struct Answer<T> {
    r#return: Option<T>,
    #[serde(default)]
    error: Option<Refusal>,
}

#[derive(Debug, Deserialize)]
struct Refusal {
    #[serde(default)]
    desc: String,
}

/// What was asked for, or in the guest's words why not.
type Said = Result<Value, String>;

fn read<T: DeserializeOwned>(line: &[u8]) -> Result<Result<Option<T>, String>, String> {
    let answer: Answer<T> = serde_json::from_slice(line)
        .map_err(|e| format!("its answer is not what was asked for: {e}"))?;
    Ok(match answer.error {
        Some(refusal) => Err(refusal.desc.chars().take(500).collect()),
        None => Ok(answer.r#return),
    })
}

fn as_a<T: DeserializeOwned + Serialize>(line: &[u8]) -> Result<Said, String> {
    match read::<T>(line)? {
        Ok(Some(answer)) => serde_json::to_value(answer).map(Ok).map_err(|e| e.to_string()),
        Ok(None) => Err("its answer is empty".to_owned()),
        Err(refusal) => Ok(Err(refusal)),
    }
}

fn nothing(line: &[u8]) -> Result<Said, String> {
    Ok(read::<IgnoredAny>(line)?.map(|_| Value::Null))
}

impl Vm {
    /// # Errors
    /// `Unavailable` if no guest agent answers; `Conflict` with what it says if it refuses.
    pub async fn ask_guest_agent(self: &Arc<Self>, ask: AskGuestAgent) -> Result<Value, Problem> {
        if ask.execute.starts_with("guest-exec") || ask.execute.starts_with("guest-file") {
            self.check_shown()?;
        }
        if ask.execute != FREEZE {
            return self.within_deadline(ask, &|| {}).await;
        }
        // In a task of its own: who asked may go away, and the guest's filesystems have to go on.
        let what = format!("can't ask the guest agent of {}", self.id());
        let (vm, (said, answer)) = (Arc::clone(self), oneshot::channel());
        tokio::spawn(async move {
            let number = AtomicU32::new(0);
            // One that was never sent takes no earlier one's thaw away.
            let note = || {
                number.store(vm.freezes.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
            };
            let answer = vm.within_deadline(ask, &note).await;
            // A guest whose answer did not come in time has frozen them later, or will: nobody waits for that now.
            let is_late = answer.as_ref().is_err_and(|e| e.kind == ProblemKind::Unavailable);
            let is_heard = said.send(answer).is_ok();
            let number = number.load(Ordering::Relaxed);
            if number == 0 {
                return;
            }
            if is_heard && !is_late {
                tokio::time::sleep(FROZEN_MAX).await;
            }
            vm.thaw_after(number).await;
        });
        answer.await.map_err(|e| Problem::internal(what, e))?
    }

    /// The VM goes on after it has stood still, and with it its guest's clock: the guest sets it by this host's. Of a job the runner
    /// does that; without one it is the guest's agent, if there is one.
    pub fn tell_time(self: &Arc<Self>) {
        // A busy guest reads the time late, and then the time is late too. So the guest is told again.
        let vm = Arc::downgrade(self);
        tokio::spawn(async move {
            for after in TOLD_AFTER {
                tokio::time::sleep(after).await;
                let Some(vm) = vm.upgrade() else { return };
                vm.intents.tell_time();
            }
        });
        if !self.spec.machine.persistent {
            return;
        }
        let vm = Arc::clone(self);
        tokio::spawn(async move {
            if let Err(problem) = vm.set_late_clock().await {
                tracing::debug!(vm = %vm.id(), %problem, "its clock is not set");
            }
        });
    }

    /// A clock that is right stays as it is, however late a busy guest answers: the time of the question counts.
    async fn set_late_clock(&self) -> Result<(), Problem> {
        let ask =
            |execute: &str, arguments| AskGuestAgent { execute: execute.to_owned(), arguments };
        let asked_ns = AtomicI64::new(now_ns());
        let note = || asked_ns.store(now_ns(), Ordering::Relaxed);
        let said = self.within_deadline(ask(GET_TIME, json!({})), &note).await?;
        let asked_ns = asked_ns.load(Ordering::Relaxed);
        let behind_ns = asked_ns.saturating_sub(said.as_i64().unwrap_or(i64::MAX));
        if behind_ns < BEHIND_MIN_NS {
            return Ok(());
        }
        let time = ask(SET_TIME, json!({"time": now_ns()}));
        self.within_deadline(time, &|| {}).await?;
        tracing::info!(vm = %self.id(), behind_ms = behind_ns / 1_000_000, "the guest's clock was behind and is set");
        Ok(())
    }

    /// Lets the guest's filesystems go on. If they do, nothing changes.
    pub async fn thaw(&self) {
        self.thaw_after(self.freezes.load(Ordering::Relaxed)).await;
    }

    /// The same, unless another freeze has come after this one: that has a thaw of its own. A guest that is busy, or whose
    /// disks stand still, answers later. So it is asked as long as it runs, but not without end if it refuses.
    async fn thaw_after(&self, freeze: u32) {
        let begun = Instant::now();
        let mut pause = Duration::from_secs(1);
        while !self.qemu_has_ended() && self.freezes.load(Ordering::Relaxed) == freeze {
            let ask = AskGuestAgent { execute: THAW.to_owned(), arguments: json!({}) };
            let Err(problem) = self.within_deadline(ask, &|| {}).await else {
                return;
            };
            tracing::debug!(vm = %self.id(), %problem, "its filesystems are not thawed");
            if problem.kind == ProblemKind::Conflict && begun.elapsed() > REFUSALS_MAX {
                return;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(60));
        }
    }

    /// `sent` is called when the question goes to the guest.
    async fn within_deadline(
        &self,
        ask: AskGuestAgent,
        sent: &(dyn Fn() + Sync),
    ) -> Result<Value, Problem> {
        let what = format!("can't ask the guest agent of {}", self.id());
        let Some((_, read)) = ALLOWED.iter().find(|(execute, _)| *execute == ask.execute) else {
            let why = format!("{:?} is not asked by anybody", ask.execute);
            return Err(Problem::invalid(what, why));
        };
        let asked = timeout(DEADLINE, async {
            let _alone = self.guest_agent_is_free.acquire().await;
            let stream =
                files::connect(&self.dir.guest_agent()).await.map_err(|e| e.to_string())?;
            converse(stream, &ask, *read, sent).await
        });
        let why = match asked.await {
            Ok(Ok(Ok(answer))) => return Ok(answer),
            Ok(Ok(Err(refusal))) => return Err(Problem::new(ProblemKind::Conflict, what, refusal)),
            Ok(Err(why)) => why,
            Err(_) => format!("it did not answer within {} s", DEADLINE.as_secs()),
        };
        Err(Problem::unavailable(what, why)
            .next("the guest needs qemu-guest-agent, and has to have booted"))
    }
}

/// Unix time of this host.
fn now_ns() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

async fn converse(
    stream: UnixStream,
    ask: &AskGuestAgent,
    read: Read,
    sent: &(dyn Fn() + Sync),
) -> Result<Said, String> {
    let (reader, mut writer) = stream.into_split();
    let mut reader = BufReader::new(reader);
    // A guest may answer an earlier client only now. QEMU's reference says: a number of its own, and all before it is left out.
    let mut id = [0; 4];
    rustix::rand::getrandom(&mut id, GetRandomFlags::empty()).map_err(|e| e.to_string())?;
    let id = u32::from_ne_bytes(id);
    let sync = json!({"execute": "guest-sync-delimited", "arguments": {"id": id}});
    let mut line = vec![BEGIN];
    line.extend(format!("{sync}\n").bytes());
    writer.write_all(&line).await.map_err(|e| e.to_string())?;
    let mut partial = Vec::new();
    loop {
        skip_to_begin(&mut reader).await?;
        if next_answer(&mut reader, &mut partial).await?.is_ok_and(|line| is_sync(&line, id)) {
            break;
        }
    }
    let question = format!("{}\n", json!({"execute": ask.execute, "arguments": ask.arguments}));
    sent();
    writer.write_all(question.as_bytes()).await.map_err(|e| e.to_string())?;
    match next_answer(&mut reader, &mut partial).await? {
        Ok(line) => read(&line),
        Err(too_long) => Ok(Err(too_long)),
    }
}

/// Whether this is the answer to `guest-sync-delimited` with this number.
fn is_sync(line: &[u8], id: u32) -> bool {
    matches!(read::<u32>(line), Ok(Ok(Some(answered))) if answered == id)
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
        if skipped > SKIPPED_BYTES_MAX {
            return Err("it talks without being asked".to_owned());
        }
    }
}

/// The next line, or that it is too long.
async fn next_answer(
    reader: &mut (impl AsyncBufReadExt + Unpin),
    partial: &mut Vec<u8>,
) -> Result<Result<Vec<u8>, String>, String> {
    match next_line(reader, partial, ANSWER_BYTES_MAX).await {
        Ok(Some(line)) => Ok(Ok(line)),
        Ok(None) => Err("it has closed the connection".to_owned()),
        Err(LineError::TooLong(_)) => Ok(Err(format!(
            "its answer is longer than {} KiB; what a program prints can go to a file there (perigee vm cp)",
            ANSWER_BYTES_MAX >> 10
        ))),
        Err(LineError::Io(error)) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest that has something left from an earlier client, and then answers.
    async fn guest(mut stream: UnixStream, left: &'static [u8], says: &'static [u8]) {
        let mut buffer = [0; 512];
        let mut heard = Vec::new();
        while heard.iter().filter(|byte| **byte == b'\n').count() < 1 {
            let length = tokio::io::AsyncReadExt::read(&mut stream, &mut buffer).await.unwrap();
            heard.extend_from_slice(&buffer[..length]);
        }
        assert_eq!(heard[0], BEGIN);
        let sync: Value = serde_json::from_slice(&heard[1..]).unwrap();
        let id = &sync["arguments"]["id"];
        // An answer to an earlier client whose question came late, and its own.
        stream
            .write_all(b"{\"return\": \"old\"}\n\xff{\"return\": 1}\n{\"error\": {}}\n")
            .await
            .unwrap();
        stream.write_all(left).await.unwrap();
        stream.write_all(&[BEGIN]).await.unwrap();
        stream.write_all(format!("{{\"return\": {id}}}\n").as_bytes()).await.unwrap();
        // Who has heard enough goes away.
        let _ = stream.write_all(says).await;
        // Until the other side has read it.
        let _ = tokio::io::AsyncReadExt::read(&mut stream, &mut buffer).await;
    }

    async fn asked_with(says: &'static [u8], execute: &str) -> Result<Said, String> {
        asked_after(b"", says, execute).await
    }

    async fn asked_after(
        left: &'static [u8],
        says: &'static [u8],
        execute: &str,
    ) -> Result<Said, String> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        tokio::spawn(guest(theirs, left, says));
        let ask = AskGuestAgent { execute: execute.to_owned(), arguments: json!({}) };
        let (_, read) = ALLOWED.iter().find(|(allowed, _)| *allowed == execute).unwrap();
        let said = timeout(Duration::from_secs(60), converse(ours, &ask, *read, &|| {}));
        said.await.expect("it ends")
    }

    #[tokio::test]
    async fn what_an_earlier_client_has_left_is_no_answer() {
        let said = asked_with(b"{\"return\": {\"pid\": 7}}\n", "guest-exec").await;
        assert_eq!(said.unwrap().unwrap()["pid"], 7);
    }

    #[tokio::test]
    async fn a_refusal_and_nonsense_are_told_apart() {
        let refusal = b"{\"error\": {\"class\": \"x\", \"desc\": \"no such file\"}}\n";
        assert_eq!(asked_with(refusal, "guest-ping").await.unwrap().unwrap_err(), "no such file");
        let nonsense = asked_with(b"hello\n", "guest-ping").await.unwrap_err();
        assert!(nonsense.contains("not what was asked for"), "{nonsense}");
    }

    #[tokio::test]
    async fn nothing_is_kept_that_was_not_asked_for() {
        let said = br#"{"return": [{"name": "eth0", "x": [[],[],{"y": [[]]}], "ip-addresses": [{"ip-address": "10.0.0.1", "z": 1}]}]}
"#;
        let said = asked_with(said, "guest-network-get-interfaces").await.unwrap().unwrap();
        let kept = json!([{"name": "eth0", "ip-addresses": [{"ip-address": "10.0.0.1"}]}]);
        assert_eq!(said, kept);
        let odd = asked_with(b"{\"return\": [[],[],[]]}\n", "guest-exec").await.unwrap_err();
        assert!(odd.contains("not what was asked for"), "{odd}");
        let pong = asked_with(b"{\"return\": [[],[],[]]}\n", "guest-ping").await;
        assert_eq!(pong.unwrap().unwrap(), Value::Null);
    }

    #[tokio::test]
    async fn an_answer_that_is_too_long_is_given_up_and_does_not_stand_in_the_way_of_the_next() {
        static LONG: [u8; 4 * ANSWER_BYTES_MAX] = [b'x'; 4 * ANSWER_BYTES_MAX];
        let long = asked_with(&LONG, "guest-ping").await.expect("the agent is there").unwrap_err();
        assert!(long.contains("longer than 256 KiB"), "{long}");
        let next = asked_after(&LONG, b"{\"return\": {}}\n", "guest-ping").await;
        assert_eq!(next.expect("the agent is there").unwrap(), Value::Null);
    }
}
