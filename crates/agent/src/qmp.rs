//! QEMU's monitor protocol: commands with ids, answers in any order, events in between.
//!
//! One task reads the socket; it ends with the connection, and then every waiting command fails
//! with [`QmpError::Closed`] and the event channel ends. Every command has a deadline. Events that
//! nobody takes are kept up to [`EVENTS_MAX`]; beyond that the connection ends, as one that is lost:
//! whoever connects again asks QEMU how it is. QEMU serves
//! one connection at a time, so one that nobody holds any more is closed at once.

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

use crate::lines::next_line;

/// The longest line. QEMU's longest answer here has some kilobytes.
pub(crate) const LINE_BYTES_MAX: usize = 4 << 20;
/// QEMU sends an event a second of a kind that may come often, and the VM's owner takes each at once.
pub const EVENTS_MAX: usize = 4096;
/// QEMU answers within milliseconds; on a machine that is overloaded, seconds.
const COMMAND_DEADLINE: Duration = Duration::from_secs(30);

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

/// When QEMU sent an event, by the host's clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub struct Timestamp {
    pub seconds: u64,
    pub microseconds: u64,
}

impl Timestamp {
    /// Unix time.
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
    Greeting,
    Event(Event),
    Answer {
        id: u64,
        result: Result<Value, String>,
    },
    /// A message that only a later QEMU sends.
    Other,
}

fn parse(line: &[u8]) -> Result<Message, serde_json::Error> {
    let mut value: Value = serde_json::from_slice(line)?;
    if value.get("QMP").is_some() {
        return Ok(Message::Greeting);
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
        Ok(Message::Greeting | Message::Other | Message::Answer { .. }) | Err(_) => {}
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
    /// When no process listens, or it is not a monitor.
    pub async fn connect(path: &Path) -> Result<(Self, mpsc::Receiver<Event>), std::io::Error> {
        let (reader, writer) = UnixStream::connect(path).await?.into_split();
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
        match tokio::time::timeout(COMMAND_DEADLINE, greeted_rx).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return Err(std::io::ErrorKind::ConnectionReset.into()),
            Err(_) => return Err(late()),
        }
        let qmp = Self { inner };
        qmp.execute("qmp_capabilities", json!({})).await.map_err(std::io::Error::other)?;
        Ok((qmp, event_rx))
    }

    /// # Errors
    /// [`QmpError`]; after `Late` the command may still take effect.
    pub async fn execute(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let id = self.inner.next_id.fetch_add(1, Ordering::Relaxed);
        let (answer_tx, answer_rx) = oneshot::channel();
        self.inner.waiting.with(|waiting| {
            waiting.as_mut().ok_or(QmpError::Closed)?.insert(id, answer_tx);
            Ok(())
        })?;
        let mut line = json!({"execute": command, "arguments": arguments, "id": id}).to_string();
        line.push('\n');
        let exchange = async {
            let mut writer = self.inner.writer.lock().await;
            writer.write_all(line.as_bytes()).await.map_err(|_| QmpError::Closed)?;
            drop(writer);
            answer_rx
                .await
                .map_err(|_| QmpError::Closed)?
                .map_err(|reason| QmpError::Refused { command: command.to_owned(), reason })
        };
        let answer = tokio::time::timeout(COMMAND_DEADLINE, exchange).await;
        self.inner.waiting.with(|waiting| waiting.as_mut().map(|waiting| waiting.remove(&id)));
        answer.unwrap_or_else(|_| Err(QmpError::Late { command: command.to_owned() }))
    }

    /// A command without arguments whose answer has a type.
    pub async fn query<T: DeserializeOwned>(&self, command: &str) -> Result<T, QmpError> {
        let value = self.execute(command, json!({})).await?;
        serde_json::from_value(value)
            .map_err(|e| QmpError::Odd { command: command.to_owned(), reason: e.to_string() })
    }
}

async fn read_all(
    reader: OwnedReadHalf,
    waiting: Arc<Waiting>,
    events: mpsc::Sender<Event>,
    greeted: oneshot::Sender<()>,
) {
    let mut greeted = Some(greeted);
    let mut reader = BufReader::new(reader);
    let mut partial = Vec::new();
    while let Ok(Some(line)) = next_line(&mut reader, &mut partial, LINE_BYTES_MAX).await {
        match parse(&line) {
            Ok(Message::Greeting) => {
                greeted.take().map(|greeted| greeted.send(()));
            }
            Ok(Message::Event(event)) => {
                if let Err(TrySendError::Full(event)) = events.try_send(event) {
                    tracing::warn!(
                        event = event.name,
                        limit = EVENTS_MAX,
                        "so many events of QEMU wait, and no more are kept: its monitor is connected again"
                    );
                    break;
                }
                // Where nobody listens any more, the connection is kept for a command.
            }
            Ok(Message::Answer { id, result }) => {
                let answer_tx =
                    waiting.with(|waiting| waiting.as_mut().and_then(|all| all.remove(&id)));
                answer_tx.map(|answer_tx| answer_tx.send(result));
            }
            Ok(Message::Other) => {}
            Err(error) => {
                tracing::warn!(%error, "QEMU's monitor does not speak JSON: closing it");
                break;
            }
        }
    }
    waiting.with(Option::take);
}

/// `query-status`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct StatusInfo {
    pub status: String,
}

/// `query-migrate`, both as source and as destination.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct MigrateInfo {
    /// Empty when there was no migration yet.
    pub status: String,
    pub total_time: u64,
    pub downtime: u64,
    pub ram: RamInfo,
    pub error_desc: String,
    pub socket_address: Vec<SocketAddress>,
}

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

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct SocketAddress {
    pub host: String,
    pub port: String,
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

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt};
    use tokio::net::UnixListener;

    use super::*;

    #[test]
    fn an_answer_is_matched_by_its_id() {
        let message = parse(br#"{"return": {"status": "running"}, "id": 7}"#).unwrap();
        let Message::Answer { id: 7, result: Ok(value) } = message else {
            panic!("{message:?}");
        };
        assert_eq!(value["status"], "running");
    }

    #[test]
    fn a_refusal_carries_its_description() {
        let line = br#"{"id": 3, "error": {"class": "GenericError", "desc": "no such thing"}}"#;
        let message = parse(line).unwrap();
        assert!(
            matches!(&message, Message::Answer { id: 3, result: Err(e) } if e == "no such thing"),
            "{message:?}"
        );
    }

    #[test]
    fn an_event_without_data_is_an_event() {
        let line = br#"{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "STOP"}"#;
        assert!(matches!(parse(line).unwrap(), Message::Event(event) if event.name == "STOP"));
    }

    #[test]
    fn what_a_later_qemu_may_say_is_ignored() {
        assert!(matches!(parse(br#"{"news": 1}"#).unwrap(), Message::Other));
        assert!(matches!(parse(br#"{"id": "text", "return": {}}"#).unwrap(), Message::Other));
        assert!(parse(b"HMP>").is_err());
    }

    #[test]
    fn a_migration_without_figures_is_read() {
        let info: MigrateInfo = serde_json::from_str("{}").unwrap();
        assert_eq!((info.status.as_str(), info.ram.remaining), ("", 0));
        let text = r#"{"status": "active", "total-time": 5, "blocked": false,
            "ram": {"dirty-pages-rate": 4, "page-size": 4096, "mbps": 268.5, "postcopy-bytes": 0},
            "socket-address": [{"port": "4444", "type": "inet", "host": "10.0.0.1"}]}"#;
        let info: MigrateInfo = serde_json::from_str(text).unwrap();
        assert_eq!((info.total_time, info.ram.page_size), (5, 4096));
        assert_eq!(info.socket_address[0].port, "4444");
    }

    /// Answers a monitor's commands in reverse order, two by two, and then closes.
    async fn serve_reversed(listener: UnixListener) {
        let (stream, _) = listener.accept().await.unwrap();
        let (reader, mut writer) = stream.into_split();
        let mut lines = BufReader::new(reader).lines();
        let mut read = async || -> Value {
            serde_json::from_str(&lines.next_line().await.unwrap().unwrap()).unwrap()
        };
        writer.write_all(b"{\"QMP\": {}}\n").await.unwrap();
        let hello = read().await;
        let answer = |request: &Value| {
            format!(
                "{{\"return\": {{\"did\": {}}}, \"id\": {}}}\n",
                request["execute"], request["id"]
            )
        };
        writer.write_all(answer(&hello).as_bytes()).await.unwrap();
        let (first, second) = (read().await, read().await);
        let text = format!("{}{{\"event\": \"STOP\"}}\n{}", answer(&second), answer(&first));
        writer.write_all(text.as_bytes()).await.unwrap();
        read().await;
    }

    #[tokio::test]
    async fn answers_in_another_order_reach_their_commands_and_a_close_ends_the_rest() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let server = tokio::spawn(serve_reversed(UnixListener::bind(&path).unwrap()));
        let (qmp, mut events) = Qmp::connect(&path).await.unwrap();
        let (one, two) = tokio::join!(qmp.execute("one", json!({})), qmp.execute("two", json!({})));
        assert_eq!((&one.unwrap()["did"], &two.unwrap()["did"]), (&json!("one"), &json!("two")));
        assert_eq!(events.recv().await.unwrap().name, "STOP");
        let closed = qmp.execute("three", json!({})).await;
        assert!(matches!(closed, Err(QmpError::Closed)), "{closed:?}");
        assert_eq!(events.recv().await, None);
        server.await.unwrap();
    }

    #[tokio::test]
    async fn events_that_nobody_takes_are_bounded_and_end_the_connection() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let server = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let (reader, mut writer) = stream.into_split();
            writer.write_all(b"{\"QMP\": {}}\n").await.unwrap();
            BufReader::new(reader).lines().next_line().await.unwrap().unwrap();
            writer.write_all(b"{\"return\": {}, \"id\": 1}\n").await.unwrap();
            // Until the other side has had enough.
            while writer.write_all(b"{\"event\": \"RTC_CHANGE\"}\n").await.is_ok() {}
        });
        let (qmp, mut events) = Qmp::connect(&path).await.unwrap();
        let ended = tokio::time::timeout(Duration::from_secs(30), async {
            while qmp.inner.waiting.with(|waiting| waiting.is_some()) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        ended.await.expect("waited 30 s for the connection to end");
        let closed = qmp.execute("query-status", json!({})).await;
        assert!(matches!(closed, Err(QmpError::Closed)), "{closed:?}");
        let mut kept = 0;
        while events.recv().await.is_some() {
            kept += 1;
        }
        assert_eq!(kept, EVENTS_MAX);
        drop(qmp);
        server.await.unwrap();
    }

    /// QEMU greets the next connection only when it has seen the end of this one.
    #[tokio::test]
    async fn a_connection_that_was_given_up_half_way_is_closed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let connecting = tokio::spawn(async move { Qmp::connect(&path).await.map(drop) });
        let (stream, _) = listener.accept().await.unwrap();
        let (reader, mut writer) = stream.into_split();
        writer.write_all(b"{\"QMP\": {}}\n").await.unwrap();
        let mut lines = BufReader::new(reader).lines();
        assert!(lines.next_line().await.unwrap().unwrap().contains("qmp_capabilities"));
        connecting.abort();
        let end = tokio::time::timeout(Duration::from_secs(120), lines.next_line()).await;
        assert!(matches!(end, Ok(Ok(None))), "the connection stays open: {end:?}");
    }
}
