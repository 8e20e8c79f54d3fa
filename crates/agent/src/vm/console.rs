//! The serial console of a VM. QEMU listens at a socket for one client at a time, and appends all that the guest prints to
//! a log, also while nobody is there. The owner sees to it that the log takes little of the disk (`LOG_BYTES_MAX`).
//!
//! And its screen, if it has one: QEMU speaks VNC (RFB, RFC 6143) at another socket there, without a password: whoever gets this far may
//! see it.

use std::sync::Arc;

use perigee_http::Begun;
use perigee_model::Problem;
use tokio::net::UnixStream;
use tokio::sync::OwnedSemaphorePermit;

use super::{CONSOLE_TAIL_BYTES, Vm};
use crate::files::{self, tail};

/// Viewers of one screen at the same time.
pub(super) const VIEWERS_MAX: usize = 8;

/// The console or the screen of a VM, with one client's place there.
#[derive(Debug)]
pub struct Attached {
    stream: UnixStream,
    _place: OwnedSemaphorePermit,
}

impl Attached {
    /// Carries bytes until one side has closed.
    pub async fn carry(mut self, client: Begun) {
        // What ends it is the guest's or the client's business.
        let ended = client.carry(&mut self.stream).await;
        tracing::debug!(?ended, "a console or a screen was left");
    }
}

impl Vm {
    /// The end of its log.
    ///
    /// # Errors
    /// `Unsupported` if it may not be shown.
    pub fn console(&self) -> Result<String, Problem> {
        self.check_shown()?;
        let text = tail(&self.dir.console(), CONSOLE_TAIL_BYTES).map_err(|e| {
            Problem::internal(format!("can't read the console of {}", self.id()), e)
        })?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// Connects a client to it.
    ///
    /// # Errors
    /// `Conflict` if another client is there, `Unsupported` if it may not be shown.
    pub async fn attach(&self) -> Result<Attached, Problem> {
        self.check_shown()?;
        let what = || format!("can't attach to the console of {}", self.id());
        let alone = Arc::clone(&self.console_is_free).try_acquire_owned();
        let alone = alone.map_err(|_| {
            Problem::conflict(what(), "somebody else is attached to it")
                .next(format!("what it prints is shown by: perigee vm console {} --log", self.id()))
        })?;
        let connected = files::connect(&self.dir.tty()).await;
        let stream = connected.map_err(|e| Problem::unavailable(what(), e))?;
        Ok(Attached { stream, _place: alone })
    }

    /// Connects a viewer to its screen.
    ///
    /// # Errors
    /// `Unsupported` if it has none, or it may not be shown; `Conflict` if too many are there.
    pub async fn view(&self) -> Result<Attached, Problem> {
        let what = || format!("can't show the screen of {}", self.id());
        if !self.spec.machine.hardware.vnc {
            return Err(Problem::unsupported(what(), "it has no screen")
                .next("make a VM with one: perigee vm create --vnc; or use `perigee vm console`"));
        }
        self.check_shown()?;
        let place = Arc::clone(&self.viewers).try_acquire_owned();
        let place = place.map_err(|_| {
            Problem::conflict(what(), format!("{VIEWERS_MAX} viewers are there, which is the most"))
                .next("close one of them")
        })?;
        let connected = files::connect(&self.dir.vnc()).await;
        let stream = connected.map_err(|e| Problem::unavailable(what(), e))?;
        Ok(Attached { stream, _place: place })
    }

    /// # Errors
    /// `Unsupported` if what the guest prints may not be shown.
    pub(super) fn check_shown(&self) -> Result<(), Problem> {
        if !self.spec.locks_memory && !self.spec.hides_output {
            return Ok(());
        }
        let why = "the VM has data that may not leave their site";
        Err(Problem::unsupported(format!("can't show what {} prints", self.id()), why))
    }
}
