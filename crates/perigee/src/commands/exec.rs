//! `perigee vm exec`: runs a program in a VM through its guest agent.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use perigee_http::Client;
use perigee_model::lasting::{ExecBegun, ExecInVm, ExecStatus};
use perigee_model::{Problem, VmId};

use crate::commands::asking;
use crate::{output, terminal};

/// The first pause between two looks; each is longer than the one before, up to a second.
const LOOK_FIRST: Duration = Duration::from_millis(100);
const LOOK_MAX: Duration = Duration::from_secs(1);

/// Runs it, waits also for a guest or a controller that answers late, prints what it has printed, and ends as it has ended.
pub async fn run(client: &Client, vm: &VmId, command: Vec<String>) -> Result<ExitCode, Problem> {
    let wanted = ExecInVm { command, input_base64: None };
    let path = format!("/v1/vms/{vm}/exec");
    let begun: ExecBegun = client.post(&path, &wanted).await?;
    let mut pause = LOOK_FIRST;
    let ended: ExecStatus = loop {
        let asked = format!("{path}?pid={}", begun.pid);
        let status: ExecStatus =
            asking::get(client, &asked, "the program goes on in the guest").await?;
        if status.exited {
            break status;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LOOK_MAX);
    };
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
    Ok(ExitCode::from(code_of(ended.exit_code, ended.signal)))
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
