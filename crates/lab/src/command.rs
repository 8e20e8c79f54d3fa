//! Runs the machine's tools, such as `ip`, and turns their failures into problems.

use std::process::Stdio;
use std::time::Duration;

use perigee_model::Problem;
use tokio::process::Command;

const DEADLINE: Duration = Duration::from_secs(20);

/// Runs a tool and returns what it printed.
///
/// # Errors
/// `Unavailable` when it is not installed; `Internal` when it fails or takes longer than 20 s.
pub async fn run(program: &str, args: &[&str]) -> Result<String, Problem> {
    run_within(DEADLINE, program, args).await
}

/// As [`run`], with another deadline.
///
/// # Errors
/// As [`run`].
pub async fn run_within(
    deadline: Duration,
    program: &str,
    args: &[&str],
) -> Result<String, Problem> {
    let what = || format!("can't run {program} {}", args.join(" "));
    let output = Command::new(program).args(args).stdin(Stdio::null()).kill_on_drop(true).output();
    let output = tokio::time::timeout(deadline, output)
        .await
        .map_err(|_| Problem::internal(what(), format!("it did not end within {deadline:?}")))?
        .map_err(|e| cannot_start(program, &e))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let why = String::from_utf8_lossy(&output.stderr);
    Err(Problem::internal(what(), why.trim()))
}

/// `Unavailable`; if the program is not there, with how to install it.
pub fn cannot_start(program: &str, error: &std::io::Error) -> Problem {
    let problem = Problem::unavailable(format!("can't start {program}"), error);
    if error.kind() == std::io::ErrorKind::NotFound {
        problem.next("`make setup` installs what the lab needs")
    } else {
        problem
    }
}
