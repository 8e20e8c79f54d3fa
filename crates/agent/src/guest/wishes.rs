//! What the guest is asked for over its job port, beside acknowledgements.
//!
//! A wish is told at every connection until it is taken back with the VM, so a restarted guest port loses none. An agent
//! that starts again has forgotten it: whoever wants it asks again.

use std::time::Duration;

use perigee_model::Problem;
use perigee_model::guest::HostMessage;
use tokio::sync::watch;

/// How long a guest may take to write what is in its memory to its disks.
const SYNC_DEADLINE: Duration = Duration::from_secs(60);

/// What is wanted of a guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The command of a gang's member may start.
    begin: bool,
    /// The command is to end, and the outputs are to be collected.
    end_command: bool,
    /// How often it was asked to write everything to its disks.
    syncs: u64,
}

impl Wanted {
    /// What there is to say to a guest that was told `before`.
    pub fn since(self, before: Self) -> impl Iterator<Item = HostMessage> {
        let begin = (self.begin && !before.begin).then_some(HostMessage::Begin);
        let end = (self.end_command && !before.end_command).then_some(HostMessage::EndCommand);
        let sync = (self.syncs > before.syncs).then_some(HostMessage::Sync);
        begin.into_iter().chain(end).chain(sync)
    }
}

/// The wishes for one guest, and what it has done.
#[derive(Debug, Default)]
pub struct Wishes {
    wanted: watch::Sender<Wanted>,
    /// How often it said that it has written everything.
    synced: watch::Sender<u64>,
}

impl Wishes {
    pub fn subscribe(&self) -> watch::Receiver<Wanted> {
        self.wanted.subscribe()
    }

    pub fn begin_command(&self) {
        self.wanted.send_if_modified(|wanted| !std::mem::replace(&mut wanted.begin, true));
    }

    pub fn end_command(&self) {
        self.wanted.send_if_modified(|wanted| !std::mem::replace(&mut wanted.end_command, true));
    }

    /// The guest has said that it is done.
    pub fn note_synced(&self) {
        self.synced.send_modify(|count| *count += 1);
    }

    /// Asks the guest to write everything to its disks, and waits until it has.
    ///
    /// # Errors
    /// `Unavailable` if it does not say so in time.
    pub async fn sync(&self) -> Result<(), Problem> {
        let mut synced = self.synced.subscribe();
        self.wanted.send_modify(|wanted| wanted.syncs += 1);
        let done = tokio::time::timeout(SYNC_DEADLINE, synced.changed()).await;
        if matches!(done, Ok(Ok(()))) {
            return Ok(());
        }
        let why = format!("it did not answer within {} s", SYNC_DEADLINE.as_secs());
        Err(Problem::unavailable("can't have the guest write its memory to its disks", why))
    }
}
