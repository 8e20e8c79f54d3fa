//! Which messages are logged. They go to standard error.

use std::sync::OnceLock;

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{Layer as _, Registry, fmt, reload};

static LEVELS: OnceLock<reload::Handle<Targets, Registry>> = OnceLock::new();

/// Logs at the levels in `PERIGEE_LOG`, such as `debug` or `info,perigee_volume=debug`. Without it, and if it cannot be
/// parsed, all logs have this level.
pub fn start(level: LevelFilter) {
    let wanted = std::env::var("PERIGEE_LOG").ok().and_then(|text| text.parse::<Targets>().ok());
    let (filter, levels) =
        reload::Layer::new(wanted.unwrap_or_else(|| Targets::new().with_default(level)));
    let messages = fmt::layer().with_writer(std::io::stderr).with_ansi(false);
    tracing_subscriber::registry().with(messages.with_filter(filter)).init();
    // Nothing else sets it.
    drop(LEVELS.set(levels));
}

/// Logs at these levels from now on.
pub fn set(wanted: &Targets) {
    let set = LEVELS.get().map(|levels| levels.reload(wanted.clone()));
    if let Some(Err(error)) = set {
        tracing::warn!("the levels of the log stay as they were: {error}");
    }
}
