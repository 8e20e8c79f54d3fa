//! `perigee vm exec`: runs a program in a VM through its guest agent.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use perigee_http::Client;
use perigee_model::persistent_vm::{ExecBegun, ExecInVm, ExecStatus};
use perigee_model::{Problem, VmId};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::commands::asking;
use crate::{output, terminal};

/// The first pause between two looks; each is longer than the one before, up to a second.
const LOOK_FIRST: Duration = Duration::from_millis(100);
const LOOK_MAX: Duration = Duration::from_secs(1);

/// Runs it, waits also for a guest or a controller that answers late, prints what it has printed, and ends as it has ended. If this
/// command is to end, the program ends too; if it was killed, the controller notices.
pub async fn run(client: &Client, vm: &VmId, command: Vec<String>) -> Result<ExitCode, Problem> {
    let mut signals = Signals::new()?;
    let wanted = ExecInVm { command, input_base64: None, end_unwatched: true };
    let path = format!("/v1/vms/{vm}/exec");
    let begun: ExecBegun = client.post(&path, &wanted).await?;
    let of_it = format!("{path}?pid={}", begun.pid);
    let (ended, signal) = tokio::select! {
        ended = until_it_ends(client, &of_it) => (ended?, None),
        signal = signals.any() => (end(client, vm, &of_it).await?, Some(signal)),
    };
    print(vm, &ended)?;
    let code = match signal {
        Some(signal) => 128 + signal,
        None => code_of(ended.exit_code, ended.signal),
    };
    Ok(ExitCode::from(code))
}

async fn until_it_ends(client: &Client, of_it: &str) -> Result<ExecStatus, Problem> {
    let mut pause = LOOK_FIRST;
    loop {
        let status: ExecStatus =
            asking::get(client, of_it, "the program ends soon, because nobody asks about it")
                .await?;
        if status.exited {
            return Ok(status);
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LOOK_MAX);
    }
}

async fn end(client: &Client, vm: &VmId, of_it: &str) -> Result<ExecStatus, Problem> {
    output::note(&format!("ending the program in {vm}"));
    client.delete_answered(of_it).await
}

/// What ends this command: Ctrl-C, `kill`, and a terminal that is closed.
struct Signals([(u8, Signal); 3]);

impl Signals {
    fn new() -> Result<Self, Problem> {
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let heard = kinds.map(|kind| {
            let number = u8::try_from(kind.as_raw_value()).unwrap_or_default();
            signal(kind).map(|signal| (number, signal))
        });
        let problem = |e: std::io::Error| Problem::internal("can't wait for signals", e);
        let [one, two, three] = heard;
        Ok(Self([one.map_err(problem)?, two.map_err(problem)?, three.map_err(problem)?]))
    }

    /// The number of the first one that comes.
    async fn any(&mut self) -> u8 {
        let [one, two, three] = &mut self.0;
        tokio::select! {
            _ = one.1.recv() => one.0,
            _ = two.1.recv() => two.0,
            _ = three.1.recv() => three.0,
        }
    }
}

fn print(vm: &VmId, ended: &ExecStatus) -> Result<(), Problem> {
    let decoded = |text: &str| {
        BASE64_STANDARD.decode(text).map_err(|e| {
            Problem::internal(format!("can't read what the program in {vm} has printed"), e)
        })
    };
    output::put(&decoded(&ended.stdout_base64)?);
    let said = decoded(&ended.stderr_base64)?;
    let said = terminal::for_stderr(&String::from_utf8_lossy(&said));
    // Nobody may read it any more.
    let _ = std::io::stderr().write_all(said.as_bytes());
    if ended.truncated {
        output::note("the guest agent has dropped a part of what it printed");
    }
    Ok(())
}

/// As a shell says it. Both are the guest's word.
fn code_of(exit_code: Option<i32>, signal: Option<i32>) -> u8 {
    let code = match (exit_code, signal) {
        (Some(code), _) => code,
        (None, signal) => signal.unwrap_or(0).saturating_add(128),
    };
    u8::try_from(code).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_names_no_real_signal_is_a_failure_and_no_overflow() {
        assert_eq!(code_of(Some(7), None), 7);
        assert_eq!(code_of(None, Some(9)), 137);
        for odd in [i32::MAX, i32::MIN] {
            assert_eq!((code_of(None, Some(odd)), code_of(Some(odd), None)), (1, 1));
        }
    }
}
