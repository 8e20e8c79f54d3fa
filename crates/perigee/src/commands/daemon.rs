//! What goes on beside a daemon: signs of life for systemd, and its file is read again at SIGHUP.

use std::convert::Infallible;

use perigee_http::notify;
use perigee_model::Problem;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::filter::Targets;

use crate::config::Told;
use crate::logging;

/// The key of every daemon that counts without a restart.
const LOG: &str = "log";

/// Takes what a daemon is told now, or leaves all as it was.
type Take = Box<dyn FnMut(&Told) -> Result<(), Problem> + Send>;

/// Which settings a daemon takes while it runs, and how.
pub struct Live {
    pub keys: &'static [&'static str],
    pub take: Take,
}

impl Live {
    /// For a daemon that takes no more than the levels of its log.
    pub fn log_only() -> Self {
        Self { keys: &[], take: Box::new(|_| Ok(())) }
    }
}

/// Runs a daemon to its end. `log` is what it was told to log.
pub async fn run(
    told: Option<Told>,
    log: Option<Targets>,
    live: Live,
    daemon: impl Future<Output = Result<(), Problem>>,
) -> Result<(), Problem> {
    log.iter().for_each(logging::set);
    tokio::select! {
        ended = daemon => ended,
        never = notify::keep_alive() => match never {},
        never = keep_reading(told, live) => match never {},
    }
}

/// Reads the file again at each SIGHUP. A daemon without a file ends at that signal, as a program does whose terminal is closed.
async fn keep_reading(told: Option<Told>, mut live: Live) -> Infallible {
    let Some(first) = told.filter(|told| told.file.is_some()) else {
        return std::future::pending().await;
    };
    let mut hangups = match signal(SignalKind::hangup()) {
        Ok(hangups) => hangups,
        Err(error) => {
            tracing::warn!("the settings will not be read again: {error}");
            return std::future::pending().await;
        }
    };
    let mut last = first.clone();
    loop {
        if hangups.recv().await.is_none() {
            return std::future::pending().await;
        }
        notify::reloading();
        let read = last.again().and_then(|new| {
            take(&first, &last, &new, &mut live)?;
            Ok(new)
        });
        match read {
            Ok(new) => last = new,
            Err(problem) => tracing::error!("the settings stay as they were: {problem}"),
        }
        notify::reloaded();
    }
}

/// Takes what can change while the daemon runs, and says what can't.
fn take(first: &Told, last: &Told, new: &Told, live: &mut Live) -> Result<(), Problem> {
    let is_live = |key: &String| key == LOG || live.keys.contains(&key.as_str());
    let (now, _): (Vec<String>, _) = last.differing(new).into_iter().partition(is_live);
    let (_, later): (Vec<String>, Vec<String>) =
        first.differing(new).into_iter().partition(is_live);
    (live.take)(new)?;
    if now.iter().any(|key| key == LOG) {
        let info = || Targets::new().with_default(tracing::Level::INFO);
        logging::set(&new.value::<Targets>(LOG).unwrap_or_else(info));
    }
    let file = new.file.as_ref().map(|file| file.display().to_string()).unwrap_or_default();
    match now.is_empty() {
        true => tracing::info!("read {file} again: nothing has changed that counts at once"),
        false => tracing::info!("read {file} again: {} counts from now on", now.join(", ")),
    }
    if !later.is_empty() {
        let (later, unit) = (later.join(", "), new.daemon.unit());
        tracing::warn!("{later} in {file} counts after a restart: systemctl restart {unit}");
    }
    Ok(())
}
