//! A client that writes and verifies a part of a volume: QEMU's NBD client, as patient as a VM's disk.
//!
//! It knows what each of its blocks must contain. A write that was answered and is lost, or that went to another
//! copy of the volume, is seen when the volume is read at the end.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use perigee_model::Problem;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::command::cannot_start;

/// Each writer has this many blocks of [`BLOCK_BYTES`].
pub const BLOCKS: usize = 128;
/// Clients write whole blocks of this size, all bytes of a block alike.
pub const BLOCK_BYTES: usize = 64 << 10;
/// The longest wait for one request. Longer than every fault lasts.
const ANSWER_MAX: Duration = Duration::from_secs(200);
const PROMPT: &[u8] = b"qemu-io> ";
/// A client that may not get errors gives up after this many.
const PROBLEMS_MAX: usize = 5;
const PAUSE: Duration = Duration::from_millis(4);
/// Before a request that failed is sent again.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(300);

/// qemu-io, which takes one command after the other.
pub struct QemuIo {
    _child: Child,
    commands: ChildStdin,
    answers: ChildStdout,
}

impl QemuIo {
    /// Opens an export of the server behind a unix socket.
    pub async fn open(socket: &std::path::Path, export: &str) -> Result<Self, Problem> {
        let disk = format!(
            "driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={},file.export={export},\
             file.reconnect-delay=600",
            socket.display()
        );
        let mut child = Command::new("qemu-io")
            .args(["--image-opts", &disk])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| cannot_start("qemu-io", &error))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (commands, answers) =
            pipes.ok_or_else(|| Problem::internal("can't start qemu-io", "it has no pipes"))?;
        let mut client = Self { _child: child, commands, answers };
        client.answer(export).await?;
        Ok(client)
    }

    /// Gives a command. The answer is what qemu-io printed, also if the command failed.
    pub async fn tell(&mut self, command: &str) -> Result<String, Problem> {
        let written = self.commands.write_all(format!("{command}\n").as_bytes()).await;
        written.map_err(|error| Problem::internal(format!("can't {command}"), error))?;
        self.answer(command).await
    }

    async fn answer(&mut self, command: &str) -> Result<String, Problem> {
        let fail = |why: String| Problem::unavailable(format!("can't {command}"), why);
        let mut said = Vec::new();
        let read = async {
            while !said.ends_with(PROMPT) {
                let mut part = [0; 4096];
                match self.answers.read(&mut part).await {
                    Ok(0) => return Err(fail("qemu-io has ended".to_owned())),
                    Ok(length) => said.extend_from_slice(&part[..length]),
                    Err(error) => return Err(fail(error.to_string())),
                }
            }
            Ok(())
        };
        let in_time = tokio::time::timeout(ANSWER_MAX, read).await;
        in_time.map_err(|_| fail(format!("no answer for {} s", ANSWER_MAX.as_secs())))??;
        said.truncate(said.len() - PROMPT.len());
        Ok(String::from_utf8_lossy(&said).trim().to_owned())
    }
}

/// What a block may contain, and what it may have contained since the last flush.
#[derive(Debug, Clone)]
struct Block {
    now: Vec<u8>,
    before: Vec<u8>,
}

/// What a writer has left in its part of the volume.
#[derive(Debug)]
pub struct Written {
    first_byte: usize,
    blocks: BTreeMap<usize, Block>,
    /// What went wrong, for people.
    pub problems: Vec<String>,
    /// The longest time that a request took.
    pub longest: Duration,
}

impl Written {
    fn new(first_byte: usize) -> Self {
        let block = Block { now: vec![0], before: Vec::new() };
        let blocks = (0..BLOCKS).map(|at| (at, block.clone())).collect();
        Self { first_byte, blocks, problems: Vec::new(), longest: Duration::ZERO }
    }

    /// The blocks of the disk whose content is wrong, in words.
    pub fn differences(&self, disk: &[u8]) -> Vec<String> {
        let wrong = self.blocks.iter().filter_map(|(at, block)| {
            let first = self.first_byte + at * BLOCK_BYTES;
            let found = disk.get(first..first + BLOCK_BYTES)?;
            let is_right = block.now.iter().any(|byte| found.iter().all(|found| found == byte));
            let (expected, found) = (&block.now, found[0]);
            (!is_right).then(|| {
                format!("the 64 KiB at {first} must be all {expected:?}, but begin with {found}")
            })
        });
        wrong.collect()
    }

    /// Somebody else has written this block.
    pub fn must_have(&mut self, at: usize, byte: u8) {
        if let Some(block) = self.blocks.get_mut(&at) {
            block.now = vec![byte];
        }
    }

    fn begin_write(&mut self, at: usize, byte: u8) {
        if let Some(block) = self.blocks.get_mut(&at) {
            block.now.push(byte);
        }
    }

    fn written(&mut self, at: usize, byte: u8) {
        if let Some(block) = self.blocks.get_mut(&at) {
            block.before.append(&mut block.now);
            block.now.push(byte);
        }
    }

    fn flushed(&mut self) {
        self.blocks.values_mut().for_each(|block| block.before.clear());
    }

    /// What was answered before is not certain any more.
    fn not_flushed(&mut self) {
        for block in self.blocks.values_mut() {
            block.now.append(&mut block.before);
        }
    }
}

#[derive(Default)]
struct Shared {
    answered: AtomicU64,
    stop: AtomicBool,
    may_fail: AtomicBool,
}

/// A writer that works until it is stopped.
pub struct Writer {
    shared: Arc<Shared>,
    task: tokio::task::JoinHandle<Written>,
}

impl Writer {
    /// `first_byte`: where its part of the volume begins.
    pub fn start(client: QemuIo, first_byte: usize) -> Self {
        let shared = Arc::<Shared>::default();
        let task = tokio::spawn(work(client, first_byte, Arc::clone(&shared)));
        Self { shared, task }
    }

    /// From now on a request may fail. It is sent again until it succeeds.
    pub fn may_fail(&self) {
        self.shared.may_fail.store(true, Ordering::Relaxed);
    }

    /// How many requests were answered well.
    pub fn answered(&self) -> u64 {
        self.shared.answered.load(Ordering::Relaxed)
    }

    /// Whether it has stopped by itself, which is a fault.
    pub fn has_ended(&self) -> bool {
        self.task.is_finished()
    }

    /// Lets it finish its request, and returns what was acknowledged.
    pub async fn stop(self) -> Result<Written, Problem> {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.task.await.map_err(|error| Problem::internal("can't stop a client", error))
    }
}

async fn work(mut client: QemuIo, first_byte: usize, shared: Arc<Shared>) -> Written {
    let mut written = Written::new(first_byte);
    let mut count = 0_usize;
    while !shared.stop.load(Ordering::Relaxed) && written.problems.len() < PROBLEMS_MAX {
        count += 1;
        // A number that is coprime to the number of blocks: every block gets its turn.
        let at = count * 37 % BLOCKS;
        let byte = u8::try_from(1 + (count + count / 255) % 255).unwrap_or(1);
        let began = Instant::now();
        let done = match count % 8 {
            0 => flush(&mut client, &mut written).await,
            3 | 6 => read(&mut client, &mut written, count * 53 % BLOCKS).await,
            _ => write(&mut client, &mut written, at, byte).await,
        };
        written.longest = written.longest.max(began.elapsed());
        match done {
            Ok(()) => {
                shared.answered.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(PAUSE).await;
            }
            Err(wrong) => {
                let is_content = wrong.contains("verification");
                if is_content || !shared.may_fail.load(Ordering::Relaxed) {
                    written.problems.push(wrong);
                }
                tokio::time::sleep(PAUSE_AFTER_ERROR).await;
            }
        }
    }
    if let Err(wrong) = flush(&mut client, &mut written).await
        && !shared.may_fail.load(Ordering::Relaxed)
    {
        written.problems.push(wrong);
    }
    written
}

async fn ask(client: &mut QemuIo, command: &str) -> Result<(), String> {
    let said = client.tell(command).await.map_err(|problem| problem.to_string())?;
    let has_failed = ["failed", "error", "No space"].iter().any(|word| said.contains(word));
    if has_failed { Err(format!("{command}: {said}")) } else { Ok(()) }
}

async fn write(
    client: &mut QemuIo,
    written: &mut Written,
    at: usize,
    byte: u8,
) -> Result<(), String> {
    written.begin_write(at, byte);
    let first = written.first_byte + at * BLOCK_BYTES;
    ask(client, &format!("write -P {byte} {first} {BLOCK_BYTES}")).await?;
    if let Some(block) = written.blocks.get_mut(&at) {
        block.now.pop();
    }
    written.written(at, byte);
    Ok(())
}

async fn flush(client: &mut QemuIo, written: &mut Written) -> Result<(), String> {
    let done = ask(client, "flush").await;
    match &done {
        Ok(()) => written.flushed(),
        Err(_) => written.not_flushed(),
    }
    done
}

/// Reads a block whose content is certain.
async fn read(client: &mut QemuIo, written: &mut Written, at: usize) -> Result<(), String> {
    let Some([byte]) = written.blocks.get(&at).map(|block| &block.now[..]) else { return Ok(()) };
    let first = written.first_byte + at * BLOCK_BYTES;
    ask(client, &format!("read -P {byte} {first} {BLOCK_BYTES}")).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(blocks: &[(usize, u8)]) -> Vec<u8> {
        let mut disk = vec![0; BLOCKS * BLOCK_BYTES];
        for (at, byte) in blocks {
            disk[at * BLOCK_BYTES..(at + 1) * BLOCK_BYTES].fill(*byte);
        }
        disk
    }

    #[test]
    fn a_write_that_was_answered_and_is_lost_is_seen() {
        let mut written = Written::new(0);
        written.written(3, 7);
        assert!(written.differences(&disk(&[(3, 7)])).is_empty());
        assert_eq!(written.differences(&disk(&[])).len(), 1);
        let mut torn = disk(&[(3, 7)]);
        torn[3 * BLOCK_BYTES + 4096] = 0;
        assert_eq!(written.differences(&torn).len(), 1, "a part of a block is old");
    }

    #[test]
    fn a_failed_flush_leaves_open_what_was_written_since_the_last_one() {
        let mut written = Written::new(0);
        written.written(3, 7);
        written.flushed();
        written.written(3, 8);
        written.written(3, 9);
        written.not_flushed();
        for right in [7, 8, 9] {
            assert!(written.differences(&disk(&[(3, right)])).is_empty(), "{right}");
        }
        assert_eq!(written.differences(&disk(&[])).len(), 1, "it was flushed once");
    }
}
