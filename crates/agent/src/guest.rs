//! Stores the guest's messages from the VM's job port in a log, and acknowledges them once they are on disk.
//!
//! After the message `resume` the guest repeats everything that is not acknowledged. The agent sends it at
//! every connect, and whenever a number is missing. An invalid line ends the connection, and the next one
//! begins with `resume` again: after a migration the first line may be the rest of a line that the source
//! has read in part.

mod intake;
mod intents;
mod log;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use perigee_model::Problem;
use perigee_model::guest::{GuestBody, GuestMessage, HostMessage, LINE_BYTES_MAX};
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use crate::files;
use crate::lines::next_line;
use crate::process::Process;
pub(crate) use intake::Intake;
use intake::Verdict;
pub use intents::Intents;
use intents::Wanted;
pub use log::GuestLog;

const RECONNECT: Duration = Duration::from_millis(300);
/// After messages that say nothing new the next ones are read so much later: a guest that floods its port would otherwise take
/// the agent's CPU.
const NOTHING_NEW: Duration = Duration::from_millis(20);
/// Messages that are stored with one sync.
const BATCH_MAX: usize = 256;
/// The highest message number. No guest sends so many, and beyond it arithmetic could overflow.
const SEQ_MAX: u64 = 1 << 53;

/// Reads the port until its QEMU has ended. `from_start` says that the VM booted here, so its first message
/// has the number 1. Otherwise the numbers continue after the source's acknowledgements.
pub async fn listen(
    socket: &Path,
    log: Arc<GuestLog>,
    intents: Arc<Intents>,
    from_start: bool,
    qemu: Process,
) {
    let mut said_full = false;
    while !qemu.has_ended() {
        if log.is_full() {
            if !said_full {
                tracing::warn!(path = %socket.display(), "the guest's messages wait: the log is full, and the controller has not fetched it");
            }
            said_full = true;
            tokio::time::sleep(RECONNECT).await;
            continue;
        }
        said_full = false;
        if let Ok(stream) = files::connect(socket).await {
            let mut intake = Intake::new(log.last_seq(), from_start);
            match converse(stream, &log, &intents, &mut intake).await {
                Ok(()) => {}
                Err(problem) => tracing::debug!(%problem, "the job port is connected again"),
            }
        }
        tokio::time::sleep(RECONNECT).await;
    }
}

async fn converse(
    stream: UnixStream,
    log: &Arc<GuestLog>,
    intents: &Intents,
    intake: &mut Intake,
) -> Result<(), Problem> {
    let (reader, mut writer) = stream.into_split();
    let mut reader = BufReader::with_capacity(LINE_BYTES_MAX, reader);
    let mut partial = Vec::new();
    say(&mut writer, &HostMessage::Resume).await?;
    let (mut wanted, mut told) = (intents.subscribe(), Wanted::default());
    loop {
        let now = *wanted.borrow_and_update();
        for message in now.since(told) {
            say(&mut writer, &message).await?;
        }
        told = now;
        let batch = tokio::select! {
            batch = read_batch(&mut reader, &mut partial) => batch?,
            Ok(()) = wanted.changed() => continue,
        };
        let Some(batch) = batch else { return Ok(()) };
        let mut store = Vec::new();
        let mut resume = false;
        let mut acknowledge = false;
        for message in batch {
            match intake.judge(message.seq) {
                Verdict::Store => {
                    acknowledge = true;
                    if let GuestBody::Synced { number } = message.body {
                        intents.note_synced(number);
                    }
                    store.push(message);
                }
                Verdict::Known => acknowledge = true,
                Verdict::AskAgain => resume = true,
                Verdict::Wait => {}
            }
        }
        if store.is_empty() {
            tokio::time::sleep(NOTHING_NEW).await;
        } else {
            append(log.clone(), store).await?;
        }
        if acknowledge {
            say(&mut writer, &HostMessage::Ack(log.last_seq())).await?;
        }
        if log.is_full() {
            // The guest repeats unacknowledged messages when there is room.
            return Ok(());
        }
        if resume {
            say(&mut writer, &HostMessage::Resume).await?;
        }
    }
}

/// All messages that have arrived; `None` at the end.
async fn read_batch(
    reader: &mut BufReader<OwnedReadHalf>,
    partial: &mut Vec<u8>,
) -> Result<Option<Vec<GuestMessage>>, Problem> {
    let broken = |e: &dyn std::fmt::Display| Problem::internal("can't read the job port", e);
    let Some(line) = next_line(reader, partial, LINE_BYTES_MAX).await.map_err(|e| broken(&e))?
    else {
        return Ok(None);
    };
    let mut batch: Vec<GuestMessage> = parse(&line)?.into_iter().collect();
    while batch.len() < BATCH_MAX {
        match next_line(reader, partial, LINE_BYTES_MAX).now_or_never() {
            Some(Ok(Some(line))) => {
                // An invalid line ends the connection; the guest repeats the messages before it.
                batch.extend(parse(&line)?);
            }
            Some(Err(error)) => return Err(broken(&error)),
            Some(Ok(None)) | None => break,
        }
    }
    Ok(Some(batch))
}

/// Parses a line. A blank line gives `None`: the guest begins with one, to end a partial line.
pub(crate) fn parse(line: &[u8]) -> Result<Option<GuestMessage>, Problem> {
    if line.is_empty() {
        return Ok(None);
    }
    let broken = |e: &dyn std::fmt::Display| Problem::invalid("can't read a guest's message", e);
    let message: GuestMessage = serde_json::from_slice(line).map_err(|e| broken(&e))?;
    if !(1..=SEQ_MAX).contains(&message.seq) {
        return Err(broken(&format!("the number {} is not valid", message.seq)));
    }
    Ok(Some(message))
}

async fn append(log: Arc<GuestLog>, messages: Vec<GuestMessage>) -> Result<(), Problem> {
    tokio::task::spawn_blocking(move || log.append(&messages))
        .await
        .map_err(|e| Problem::internal("can't store a guest's messages", e))?
}

async fn say(writer: &mut OwnedWriteHalf, message: &HostMessage) -> Result<(), Problem> {
    let fail = |e: &dyn std::fmt::Display| Problem::internal("can't write to the job port", e);
    let mut line = serde_json::to_vec(message).map_err(|e| fail(&e))?;
    line.push(b'\n');
    writer.write_all(&line).await.map_err(|e| fail(&e))
}

#[cfg(test)]
mod tests {
    use perigee_model::guest::GuestBody;
    use tokio::io::AsyncBufReadExt;
    use tokio::net::UnixListener;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(120);

    fn line(seq: u64) -> String {
        let body = GuestBody::Started;
        let message = GuestMessage { seq, uptime_ms: seq, body };
        serde_json::to_string(&message).unwrap() + "\n"
    }

    /// The guest's side of one connection.
    struct Guest {
        lines: tokio::io::Lines<BufReader<OwnedReadHalf>>,
        writer: OwnedWriteHalf,
    }

    impl Guest {
        async fn accept(listener: &UnixListener) -> Self {
            let accept = tokio::time::timeout(PATIENCE, listener.accept());
            let (stream, _) = accept.await.expect("the host connects").unwrap();
            let (reader, writer) = stream.into_split();
            Self { lines: BufReader::new(reader).lines(), writer }
        }

        async fn send(&mut self, text: &str) {
            self.writer.write_all(text.as_bytes()).await.unwrap();
        }

        async fn expect(&mut self, wanted: HostMessage) {
            assert_eq!(self.next(&format!("{wanted:?}")).await, wanted);
        }

        async fn next(&mut self, wanted: &str) -> HostMessage {
            let next = tokio::time::timeout(PATIENCE, self.lines.next_line());
            let text = next.await.unwrap_or_else(|_| panic!("waited for {wanted}"));
            serde_json::from_str(&text.unwrap().unwrap()).unwrap()
        }
    }

    #[tokio::test]
    async fn messages_are_acknowledged_when_stored_and_again_after_a_broken_line() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("job.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let log = Arc::new(GuestLog::open(&dir.path().join("events.jsonl"), false).unwrap());
        let me = Process::of_pid(std::process::id()).unwrap();
        let host = tokio::spawn({
            let log = log.clone();
            async move { listen(&socket, log, Arc::default(), true, me).await }
        });

        let mut guest = Guest::accept(&listener).await;
        guest.expect(HostMessage::Resume).await;
        guest.send(&line(1)).await;
        guest.expect(HostMessage::Ack(1)).await;
        guest.send(&line(3)).await;
        guest.expect(HostMessage::Resume).await;
        guest.send("half a line\n").await;

        let mut guest = Guest::accept(&listener).await;
        guest.expect(HostMessage::Resume).await;
        guest.send(&line(1)).await;
        guest.expect(HostMessage::Ack(1)).await;
        guest.send(&line(2)).await;
        guest.expect(HostMessage::Ack(2)).await;
        host.abort();

        let stored: Vec<u64> = log.after(0).unwrap().iter().map(|e| e.message.seq).collect();
        assert_eq!(stored, [1, 2]);
    }

    #[tokio::test]
    async fn a_request_is_told_at_every_connection_and_a_sync_is_answered() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("job.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let log = Arc::new(GuestLog::open(&dir.path().join("events.jsonl"), false).unwrap());
        let me = Process::of_pid(std::process::id()).unwrap();
        let intents = Arc::new(Intents::default());
        let host = tokio::spawn({
            let (log, intents) = (log.clone(), intents.clone());
            async move { listen(&socket, log, intents, true, me).await }
        });
        let mut guest = Guest::accept(&listener).await;
        guest.expect(HostMessage::Resume).await;
        intents.end_command();
        guest.expect(HostMessage::EndCommand).await;
        drop(guest);

        let mut guest = Guest::accept(&listener).await;
        guest.expect(HostMessage::Resume).await;
        guest.expect(HostMessage::EndCommand).await;
        let asked = tokio::spawn(async move { intents.sync().await });
        let HostMessage::SyncNumber(number) = guest.next("a number").await else {
            panic!("it is said which question comes")
        };
        guest.expect(HostMessage::Sync).await;
        // The answer to another agent's question, and then that to this one.
        for (seq, number) in [(1, number.wrapping_sub(1)), (2, number)] {
            assert!(!asked.is_finished());
            let body = GuestBody::Synced { number: Some(number) };
            let synced = GuestMessage { seq, uptime_ms: 1, body };
            guest.send(&(serde_json::to_string(&synced).unwrap() + "\n")).await;
            guest.expect(HostMessage::Ack(seq)).await;
        }
        asked.await.unwrap().unwrap();
        host.abort();
    }
}
