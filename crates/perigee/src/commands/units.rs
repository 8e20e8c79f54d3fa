//! Units of systemd that the package has: they are enabled and started, or whoever runs the command is told how to start the daemons by hand.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use perigee_model::Problem;
use tokio::process::Command;
use tokio::time::timeout;

use crate::config::Daemon;

/// It is there where systemd runs the machine.
const SYSTEMD: &str = "/run/systemd/system";
/// A daemon says that it is ready, and the volume server may have much to look at before.
const START_MAX: Duration = Duration::from_secs(300);

/// Whether the units of these daemons can be started; else why not.
///
/// # Errors
/// If systemctl can't be run.
pub async fn missing(daemons: &[Daemon]) -> Result<Option<String>, Problem> {
    if !Path::new(SYSTEMD).is_dir() {
        return Ok(Some("systemd does not run this machine".to_owned()));
    }
    for daemon in daemons {
        let unit = daemon.unit();
        if systemctl(&["cat", &unit]).await?.is_err() {
            return Ok(Some(format!("this machine has no {unit} (the package has it)")));
        }
    }
    Ok(None)
}

/// Whether systemd runs one of these daemons.
///
/// # Errors
/// If systemctl can't be run.
pub async fn is_any_active(daemons: &[Daemon]) -> Result<bool, Problem> {
    if !Path::new(SYSTEMD).is_dir() {
        return Ok(false);
    }
    let units: Vec<String> = daemons.iter().map(|daemon| daemon.unit()).collect();
    let names: Vec<&str> = units.iter().map(String::as_str).collect();
    Ok(systemctl(&[&["is-active", "--quiet"][..], &names].concat()).await?.is_ok())
}

/// Has the daemons run from now on and after each boot. `verb` is `start` or `restart`.
///
/// # Errors
/// What systemd says.
pub async fn start(daemons: &[Daemon], verb: &str) -> Result<(), Problem> {
    let units: Vec<String> = daemons.iter().map(|daemon| daemon.unit()).collect();
    let names: Vec<&str> = units.iter().map(String::as_str).collect();
    for words in [&["enable", "--quiet"][..], &[verb]] {
        let words = [words, &names].concat();
        if let Err(why) = systemctl(&words).await? {
            let what = format!("can't {} {}", words[0], names.join(" "));
            let logs: Vec<String> = names.iter().map(|name| format!("-u {name}")).collect();
            return Err(Problem::unavailable(what, why)
                .next(format!("see what it says: journalctl {} -n 30", logs.join(" "))));
        }
    }
    Ok(())
}

/// Takes the machine down: `verb` is `poweroff` or `reboot`.
///
/// # Errors
/// What systemd says.
pub async fn power(verb: &str) -> Result<(), Problem> {
    let said = systemctl(&[verb]).await?;
    said.map_err(|why| {
        Problem::unavailable(format!("can't run systemctl {verb}"), why)
            .next("take the machine down by hand")
    })
}

/// The inner error is what systemctl says.
async fn systemctl(words: &[&str]) -> Result<Result<(), String>, Problem> {
    let what = || format!("can't run systemctl {}", words.join(" "));
    let mut command = Command::new("systemctl");
    command.args(words).stdin(Stdio::null()).kill_on_drop(true);
    let ran = timeout(START_MAX, command.output()).await.map_err(|_| {
        let why = format!("it did not end within {} s", START_MAX.as_secs());
        Problem::unavailable(what(), why).next("see what hangs: systemctl list-jobs")
    })?;
    let output = ran.map_err(|e| Problem::internal(what(), e))?;
    Ok(match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
    })
}
