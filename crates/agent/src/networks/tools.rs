//! Runs the programs that set up the kernel's network. Each has a deadline, and says in its error which program it was.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use serde::de::DeserializeOwned;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::time::timeout;

const DEADLINE: Duration = Duration::from_secs(10);
const LATE: &str = "took longer than";

/// Runs a program with this input, and gives what it prints.
pub async fn run(program: &str, arguments: &[&str], input: &str) -> Result<String, String> {
    run_within(DEADLINE, program, arguments, input).await
}

async fn run_within(
    deadline: Duration,
    program: &str,
    arguments: &[&str],
    input: &str,
) -> Result<String, String> {
    let failed = |error: std::io::Error| match error.kind() {
        ErrorKind::NotFound => format!("{program} is not installed"),
        _ => format!("can't run {program}: {error}"),
    };
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = command.kill_on_drop(true).spawn().map_err(failed)?;
    let mut stdin = running.stdin.take();
    let write = async {
        if let Some(mut stdin) = stdin.take() {
            // A program that has failed reads no more.
            let _ = stdin.write_all(input.as_bytes()).await;
        }
    };
    // It may say much before it has read all.
    let ended = async { tokio::join!(write, running.wait_with_output()).1 };
    let late = |_| format!("{program} {LATE} {} s", deadline.as_secs());
    let ended = timeout(deadline, ended).await.map_err(late)?.map_err(failed)?;
    if ended.status.success() {
        return Ok(String::from_utf8_lossy(&ended.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&ended.stderr);
    let said = said.lines().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
    Err(format!("{program} {} failed: {said}", arguments.join(" ")))
}

/// Whether this error of [`run`] is the host's passing trouble: the program did not end in time.
pub fn was_late(error: &str) -> bool {
    error.contains(LATE)
}

/// Runs all lines of a batch, also if one of them fails.
pub async fn batch(program: &str, lines: &[String]) -> Result<(), String> {
    if lines.is_empty() {
        return Ok(());
    }
    let text = lines.join("\n") + "\n";
    run(program, &["-force", "-batch", "-"], &text).await.map(drop)
}

/// The same in the network namespace of a process.
pub async fn batch_within(pid: u32, lines: &[String]) -> Result<(), String> {
    let namespace = namespace_of(pid);
    let arguments = [&namespace, "--", "ip", "-force", "-batch", "-"];
    run("nsenter", &arguments, &(lines.join("\n") + "\n")).await.map(drop)
}

/// The option of `nsenter` for the network namespace of a process.
pub fn namespace_of(pid: u32) -> String {
    format!("--net=/proc/{pid}/ns/net")
}

/// What a program says as JSON; nothing is an empty list.
pub async fn list<T: DeserializeOwned>(
    program: &str,
    arguments: &[&str],
) -> Result<Vec<T>, String> {
    let text = run(program, arguments, "").await?;
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    serde_json::from_str(&text)
        .map_err(|error| format!("{program} says what can't be read: {error}"))
}

/// Of all agents in this network namespace one has this. Another one is told `None`.
pub fn only_one(what: &str) -> Result<Option<Flock<File>>, String> {
    let namespace = std::fs::metadata("/proc/thread-self/ns/net");
    let namespace =
        namespace.map_err(|error| format!("can't tell the network namespace: {error}"))?;
    let path = PathBuf::from(format!("/run/perigee-{what}-{}.lock", namespace.ino()));
    let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(&path);
    let file = file.map_err(|error| format!("can't open {}: {error}", path.display()))?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, error)) => Err(format!("can't lock {}: {error}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Until now each waited for the other one: a batch with many lines that fail says more than a pipe takes.
    #[tokio::test]
    async fn a_program_may_say_much_before_it_has_read_its_input() {
        let much = "line\n".repeat(100_000);
        let talks = ["-c", "head -c 1000000 /dev/zero; cat"];
        let said = run("sh", &talks, &much).await.expect("it ends");
        assert_eq!(said.len(), 1_000_000 + much.len());
    }

    /// A slow host is tried again, and one that can't is not.
    #[tokio::test]
    async fn a_program_that_is_late_is_told_from_one_that_fails() {
        let short = Duration::from_millis(100);
        let late = run_within(short, "sleep", &["3600"], "").await.expect_err("it is slow");
        let failed = run("sh", &["-c", "echo no >&2; exit 1"], "").await.expect_err("it fails");
        assert!(was_late(&late) && !was_late(&failed), "{late}; {failed}");
        assert!(failed.ends_with("failed: no"), "{failed}");
    }
}
