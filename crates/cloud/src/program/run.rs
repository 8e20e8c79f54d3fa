//! One run of a program: its input, its output within limits, and the end of its process group.

use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, ChildStdin, Command};

/// A list of 10,000 instances is some 3 MB.
const OUTPUT_BYTES_MAX: usize = 8 << 20;
/// What is kept of the standard error.
const COMPLAINT_BYTES_MAX: usize = 4096;
/// What programs need to find their files, and says nothing in confidence.
const VARIABLES: [&str; 7] =
    ["PATH", "HOME", "LANG", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR"];

/// What is run.
#[derive(Debug)]
pub struct Run<'a> {
    /// The file and its first arguments.
    pub command: &'a [String],
    /// The last argument.
    pub verb: &'a str,
    /// More variables of this process that the program gets.
    pub environment: &'a [String],
    /// How long it may take.
    pub timeout: Duration,
}

/// A run that came to its end.
#[derive(Debug)]
pub struct Ended {
    /// Did it exit with 0?
    pub is_success: bool,
    /// The standard output.
    pub output: Vec<u8>,
    /// The begin of the standard error, in whole lines if it is cut.
    pub complaint: String,
}

/// A run that did not come to its end.
#[derive(Debug)]
pub struct Failed {
    /// The program was not even started.
    pub did_nothing: bool,
    /// Why.
    pub why: String,
}

/// A program that runs. Whatever becomes of the call, its process group ends with this.
struct Running {
    child: Child,
    group: Option<Pid>,
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(group) = self.group.take() {
            // The child was not waited for, so that nobody else has its number. All of them may have ended.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

impl Run<'_> {
    /// Runs the program with this input until it has ended.
    ///
    /// # Errors
    /// Why it did not end by itself.
    pub async fn to_its_end(&self, input: Vec<u8>) -> Result<Ended, Failed> {
        let failed = |why| Failed { did_nothing: false, why };
        let mut running = self.start()?;
        let late =
            || failed(format!("it did not end within {} s, and was ended", self.timeout.as_secs()));
        match tokio::time::timeout(self.timeout, running.ends(input)).await {
            Ok(ended) => ended.map_err(failed),
            Err(_) => Err(late()),
        }
    }

    fn start(&self) -> Result<Running, Failed> {
        let nothing = |why| Failed { did_nothing: true, why };
        let [file, first @ ..] = self.command else {
            return Err(nothing("it names no program".to_owned()));
        };
        let mut command = Command::new(file);
        command.args(first).arg(self.verb).env_clear();
        let names = VARIABLES.into_iter().chain(self.environment.iter().map(String::as_str));
        command.envs(names.filter_map(|name| Some((name, std::env::var_os(name)?))));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.process_group(0).kill_on_drop(true).spawn();
        let child = child.map_err(|error| nothing(format!("can't start {file}: {error}")))?;
        let id = child.id().and_then(|id| i32::try_from(id).ok());
        Ok(Running { child, group: id.and_then(Pid::from_raw) })
    }
}

impl Running {
    async fn ends(&mut self, input: Vec<u8>) -> Result<Ended, String> {
        let (stdin, stdout, stderr) =
            (self.child.stdin.take(), self.child.stdout.take(), self.child.stderr.take());
        let (Some(stdin), Some(stdout), Some(stderr)) = (stdin, stdout, stderr) else {
            return Err("it has no standard input and output".to_owned());
        };
        let group = self.group.ok_or("it has no number")?;
        let exit = async {
            // The number stays the program's until it is waited for below.
            let exit = tokio::task::spawn_blocking(move || {
                waitid(WaitId::Pid(group), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)
            });
            let exited = exit.await.map_err(|error| error.to_string())?;
            exited.map_err(|error| format!("can't wait for its end: {error}"))?;
            // What it has started holds its output open, and is of no use any more.
            let _ = kill_process_group(group, Signal::KILL);
            Ok(())
        };
        let ((), output, complaint, ()) = tokio::try_join!(
            async {
                give(stdin, &input).await;
                Ok(())
            },
            output(stdout),
            async { Ok(begin(stderr).await) },
            exit,
        )?;
        self.group = None;
        let status = self.child.wait().await.map_err(|error| error.to_string())?;
        Ok(Ended { is_success: status.success(), output, complaint })
    }
}

/// A program that does not read its input need not.
async fn give(mut stdin: ChildStdin, input: &[u8]) {
    let _ = stdin.write_all(input).await;
}

async fn output(stdout: impl AsyncRead + Unpin) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let most = OUTPUT_BYTES_MAX as u64 + 1;
    let read = stdout.take(most).read_to_end(&mut bytes).await;
    read.map_err(|error| format!("can't read what it says: {error}"))?;
    if bytes.len() > OUTPUT_BYTES_MAX {
        return Err(format!("it says more than {OUTPUT_BYTES_MAX} bytes, and was ended"));
    }
    Ok(bytes)
}

/// The begin of what it writes. The rest is read too, so that it does not wait for a reader. A line that is cut is left out: nobody recognises half a
/// secret.
async fn begin(mut stderr: impl AsyncRead + Unpin) -> String {
    let (mut kept, mut buffer, mut is_cut) = (Vec::new(), [0; 4096], false);
    while let Ok(length @ 1..) = stderr.read(&mut buffer).await {
        let room = COMPLAINT_BYTES_MAX - kept.len();
        kept.extend_from_slice(&buffer[..length.min(room)]);
        is_cut |= length > room;
    }
    if is_cut {
        let lines_end = kept.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        kept.truncate(lines_end);
    }
    String::from_utf8_lossy(&kept).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_complaint_is_cut_between_lines() {
        let line = "x".repeat(4000);
        let token = "s".repeat(200);
        for (said, expected) in [
            (format!("{line}\n{token}\nmore\n"), format!("{line}\n")),
            (format!("{token}{line}\n"), String::new()),
            (token.clone(), token),
        ] {
            assert_eq!(begin(said.as_bytes()).await, expected);
        }
        let full = "f".repeat(COMPLAINT_BYTES_MAX);
        assert_eq!(begin(full.as_bytes()).await, full);
    }
}
