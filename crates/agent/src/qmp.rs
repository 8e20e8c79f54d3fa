//! QEMU's monitor protocol (QMP): commands with ids, answers in any order, and events between them.
//!
//! One task reads the socket. When the connection ends, the task ends, every waiting command fails with
//! [`QmpError::Closed`], and the event channel ends. Every command has a deadline. At most [`EVENTS_MAX`] events
//! wait to be received. If there are more, the connection is closed, and the caller connects again and queries
//! QEMU's state. QEMU serves one connection at a time, so a connection is closed as soon as its last [`Qmp`] is
//! dropped.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;

use crate::files;
use crate::lines::next_line;

/// The longest line that is accepted. QEMU's longest answer has some kilobytes.
pub(crate) const LINE_BYTES_MAX: usize = 4 << 20;
/// The most events that wait to be received. QEMU sends each kind of frequent event at most once a second, and
/// the VM's owner receives each at once.
pub const EVENTS_MAX: usize = 4096;
/// How long a command may take. QEMU answers within milliseconds, on an overloaded machine within seconds.
const COMMAND_DEADLINE: Duration = Duration::from_secs(30);
/// The capability of commands out of band.
const OOB: &str = "oob";

/// Why a command of QEMU's monitor has no answer that can be used.
#[derive(Debug, Clone, thiserror::Error)]
pub enum QmpError {
    #[error("QEMU closed its monitor")]
    Closed,
    #[error("QEMU did not answer {command} within {} s", COMMAND_DEADLINE.as_secs())]
    Late { command: String },
    #[error("QEMU refused {command}: {reason}")]
    Refused { command: String, reason: String },
    #[error("can't understand QEMU's answer to {command}: {reason}")]
    Odd { command: String, reason: String },
}

/// An event as QEMU sends it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Event {
    #[serde(rename = "event")]
    pub name: String,
    #[serde(default)]
    pub data: Value,
    #[serde(default)]
    pub timestamp: Timestamp,
}

/// The time at which QEMU sent an event, by the host's clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub struct Timestamp {
    pub seconds: u64,
    pub microseconds: u64,
}

impl Timestamp {
    /// The Unix time in microseconds.
    pub fn us(self) -> u64 {
        self.seconds.saturating_mul(1_000_000).saturating_add(self.microseconds)
    }
}

#[derive(Debug, Deserialize)]
struct Refusal {
    #[serde(default)]
    desc: String,
}

/// One line from QEMU.
#[derive(Debug)]
enum Message {
    /// Whether it takes commands out of band.
    Greeting {
        has_oob: bool,
    },
    Event(Event),
    Answer {
        id: u64,
        result: Result<Value, String>,
    },
    /// A message that only later versions of QEMU send.
    Other,
}

fn parse(line: &[u8]) -> Result<Message, serde_json::Error> {
    let mut value: Value = serde_json::from_slice(line)?;
    if let Some(greeting) = value.get("QMP") {
        let can = greeting.get("capabilities").and_then(Value::as_array);
        return Ok(Message::Greeting { has_oob: can.is_some_and(|can| can.contains(&OOB.into())) });
    }
    if value.get("event").is_some() {
        return serde_json::from_value(value).map(Message::Event);
    }
    let Some(id) = value.get("id").and_then(Value::as_u64) else { return Ok(Message::Other) };
    if let Some(result) = value.get_mut("return") {
        return Ok(Message::Answer { id, result: Ok(result.take()) });
    }
    if let Some(error) = value.get_mut("error") {
        let refusal: Refusal = serde_json::from_value(error.take())?;
        return Ok(Message::Answer { id, result: Err(refusal.desc) });
    }
    Ok(Message::Other)
}

/// Parses everything that one line may contain; for the fuzz target.
#[cfg(feature = "fuzzing")]
pub(crate) fn read_line(line: &[u8]) {
    match parse(line) {
        Ok(Message::Event(event)) => {
            drop(serde_json::from_value::<BlockIoError>(event.data));
        }
        Ok(Message::Answer { result: Ok(value), .. }) => {
            drop(serde_json::from_value::<StatusInfo>(value.clone()));
            drop(serde_json::from_value::<MigrateInfo>(value));
        }
        Ok(Message::Greeting { .. } | Message::Other | Message::Answer { .. }) | Err(_) => {}
    }
}

/// The commands that wait for their answers; `None` once the connection has ended.
#[derive(Debug)]
struct Waiting(Mutex<Option<HashMap<u64, Waiter>>>);

type Waiter = oneshot::Sender<Result<Value, String>>;

impl Waiting {
    fn with<T>(&self, act: impl FnOnce(&mut Option<HashMap<u64, Waiter>>) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }
}

/// A connection to one QEMU; cheap to clone. It is closed when the last clone is dropped.
#[derive(Debug, Clone)]
pub struct Qmp {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    writer: tokio::sync::Mutex<OwnedWriteHalf>,
    next_id: AtomicU64,
    waiting: Arc<Waiting>,
    reader: AbortHandle,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl Qmp {
    /// Connects and negotiates. The events end with the connection.
    ///
    /// # Errors
    /// If no process of the VM's user listens, or what listens is not a monitor.
    pub async fn connect(path: &Path) -> Result<(Self, mpsc::Receiver<Event>), std::io::Error> {
        Self::begin(files::connect(path).await?).await
    }

    /// Negotiates over a connection to a monitor. The events end with the connection.
    ///
    /// # Errors
    /// If what listens there is not a monitor.
    pub async fn begin(
        stream: UnixStream,
    ) -> Result<(Self, mpsc::Receiver<Event>), std::io::Error> {
        let (reader, writer) = stream.into_split();
        let (event_tx, event_rx) = mpsc::channel(EVENTS_MAX);
        let (greeted_tx, greeted_rx) = oneshot::channel();
        let waiting = Arc::new(Waiting(Mutex::new(Some(HashMap::new()))));
        let reader = tokio::spawn(read_all(reader, waiting.clone(), event_tx, greeted_tx));
        let inner = Arc::new(Inner {
            writer: tokio::sync::Mutex::new(writer),
            next_id: AtomicU64::new(1),
            waiting,
            reader: reader.abort_handle(),
        });
        let late = || std::io::Error::from(std::io::ErrorKind::TimedOut);
        let has_oob = match tokio::time::timeout(COMMAND_DEADLINE, greeted_rx).await {
            Ok(Ok(has_oob)) => has_oob,
            Ok(Err(_)) => return Err(std::io::ErrorKind::ConnectionReset.into()),
            Err(_) => return Err(late()),
        };
        let qmp = Self { inner };
        let enable = if has_oob { json!({"enable": [OOB]}) } else { json!({}) };
        qmp.execute("qmp_capabilities", enable).await.map_err(std::io::Error::other)?;
        Ok((qmp, event_rx))
    }

    /// Sends a command and waits for its answer.
    ///
    /// # Errors
    /// [`QmpError`]. After `Late` the command may still take effect.
    pub async fn execute(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let answer = self.send("execute", command, arguments);
        in_time(command, answer).await
    }

    /// The same out of band: QEMU does it although it is busy with another command. Few commands can be sent so.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    pub async fn execute_oob(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let answer = self.send("exec-oob", command, arguments);
        in_time(command, answer).await
    }

    /// Ends only with the answer, with the connection, or when it is dropped.
    async fn send(&self, how: &str, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let id = self.inner.next_id.fetch_add(1, Ordering::Relaxed);
        let (answer_tx, answer_rx) = oneshot::channel();
        self.inner.waiting.with(|waiting| {
            waiting.as_mut().ok_or(QmpError::Closed)?.insert(id, answer_tx);
            Ok(())
        })?;
        let _asked = Asked { waiting: &self.inner.waiting, id };
        let mut line = json!({how: command, "arguments": arguments, "id": id}).to_string();
        line.push('\n');
        let mut writer = self.inner.writer.lock().await;
        writer.write_all(line.as_bytes()).await.map_err(|_| QmpError::Closed)?;
        drop(writer);
        answer_rx
            .await
            .map_err(|_| QmpError::Closed)?
            .map_err(|reason| QmpError::Refused { command: command.to_owned(), reason })
    }

    /// Sends a command without arguments, and parses its answer.
    pub async fn query<T: DeserializeOwned>(&self, command: &str) -> Result<T, QmpError> {
        parsed(command, self.execute(command, json!({})).await?)
    }

    /// The same without a deadline. QEMU answers when it has done what it is busy with, which may take as long as the home of a
    /// volume is away.
    pub async fn query_patiently<T: DeserializeOwned>(&self, command: &str) -> Result<T, QmpError> {
        parsed(command, self.send("execute", command, json!({})).await?)
    }
}

/// Nobody waits any more for a command when this is dropped.
struct Asked<'a> {
    waiting: &'a Waiting,
    id: u64,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.waiting.with(|waiting| waiting.as_mut().map(|waiting| waiting.remove(&self.id)));
    }
}

async fn in_time(
    command: &str,
    answer: impl Future<Output = Result<Value, QmpError>>,
) -> Result<Value, QmpError> {
    let late = || QmpError::Late { command: command.to_owned() };
    tokio::time::timeout(COMMAND_DEADLINE, answer).await.unwrap_or_else(|_| Err(late()))
}

fn parsed<T: DeserializeOwned>(command: &str, answer: Value) -> Result<T, QmpError> {
    serde_json::from_value(answer)
        .map_err(|e| QmpError::Odd { command: command.to_owned(), reason: e.to_string() })
}

async fn read_all(
    reader: OwnedReadHalf,
    waiting: Arc<Waiting>,
    events: mpsc::Sender<Event>,
    greeted: oneshot::Sender<bool>,
) {
    let mut greeted = Some(greeted);
    let mut reader = BufReader::new(reader);
    let mut partial = Vec::new();
    while let Ok(Some(line)) = next_line(&mut reader, &mut partial, LINE_BYTES_MAX).await {
        match parse(&line) {
            Ok(Message::Greeting { has_oob }) => {
                greeted.take().map(|greeted| greeted.send(has_oob));
            }
            Ok(Message::Event(event)) => {
                if let Err(TrySendError::Full(event)) = events.try_send(event) {
                    tracing::warn!(
                        event = event.name,
                        limit = EVENTS_MAX,
                        "too many events of QEMU wait: its monitor is closed and connected again"
                    );
                    break;
                }
                // If the receiver was dropped, the connection stays open for commands.
            }
            Ok(Message::Answer { id, result }) => {
                let answer_tx =
                    waiting.with(|waiting| waiting.as_mut().and_then(|all| all.remove(&id)));
                answer_tx.map(|answer_tx| answer_tx.send(result));
            }
            Ok(Message::Other) => {}
            Err(error) => {
                tracing::warn!(%error, "QEMU's monitor sent a line that is not JSON: closing it");
                break;
            }
        }
    }
    waiting.with(Option::take);
}

/// The answer to `query-status`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct StatusInfo {
    pub status: String,
}

/// The answer to `query-migrate`, at the source and at the destination.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct MigrateInfo {
    /// Empty before the first migration.
    pub status: String,
    pub total_time: u64,
    pub downtime: u64,
    pub ram: RamInfo,
    pub error_desc: String,
    pub socket_address: Vec<SocketAddress>,
}

/// The part of `query-migrate` about memory: amounts in bytes, the rate in megabits per second.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct RamInfo {
    pub transferred: u64,
    pub remaining: u64,
    pub mbps: f64,
    pub dirty_pages_rate: u64,
    pub page_size: u64,
    /// The current pass over the memory, counted from 1.
    pub dirty_sync_count: u64,
}

impl RamInfo {
    /// How fast QEMU sends; it says so in megabits per second.
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a measured rate: neither negative nor near 2^64"
    )]
    pub fn bytes_per_s(&self) -> u64 {
        (self.mbps * 1e6 / 8.0) as u64
    }

    /// How fast the guest changes its memory.
    pub fn dirty_bytes_per_s(&self) -> u64 {
        self.dirty_pages_rate.saturating_mul(self.page_size)
    }
}

/// Where QEMU listens; a unix socket has neither host nor port.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct SocketAddress {
    pub host: String,
    pub port: String,
}

/// The answer to `query-balloon`.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct BalloonInfo {
    /// What the guest has.
    pub actual: u64,
}

/// The data of `BLOCK_IO_ERROR`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct BlockIoError {
    pub device: String,
    pub node_name: String,
    pub operation: String,
    pub action: String,
    pub nospace: bool,
    pub reason: String,
}

/// The size of a block node.
pub async fn named_size(qmp: &Qmp, name: &str) -> Result<u64, QmpError> {
    let nodes: Vec<Value> = qmp.query("query-named-block-nodes").await?;
    let node = nodes.iter().find(|node| node["node-name"] == name);
    node.and_then(|node| node["image"]["virtual-size"].as_u64()).ok_or_else(|| QmpError::Odd {
        command: "query-named-block-nodes".to_owned(),
        reason: format!("it does not say how large {name} is"),
    })
}

#[cfg(test)]
mod tests;
