//! `perigee vm console`: this terminal as the VM's serial console.
//!
//! What the guest prints comes to the terminal as it is, escape sequences too: a console without them is none. So whoever
//! attaches trusts the guest as far as a terminal obeys it. `--log` shows the same as harmless text.

use std::io::{IsTerminal, Read as _};
use std::time::Duration;

use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use perigee_http::Client;
use perigee_http::websocket::WebSocket;
use perigee_model::job::Vm;
use perigee_model::lasting::VmState;
use perigee_model::{Problem, ProblemKind, VmId};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::output;

/// Ctrl-], as with telnet and virsh.
const LEAVE: u8 = 0x1d;
/// How often a VM that moves or starts is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How long it may be away.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long the other side may take to hear that this one leaves.
const GOODBYE_MAX: Duration = Duration::from_secs(1);

/// The terminal in raw mode: each key goes to the guest at once, Ctrl-C too. It is as before when this is dropped.
struct Raw(Option<Termios>);

impl Raw {
    fn begin() -> Self {
        let stdin = std::io::stdin();
        let before = stdin.is_terminal().then(|| tcgetattr(&stdin).ok()).flatten();
        if let Some(before) = &before {
            let mut raw = before.clone();
            cfmakeraw(&mut raw);
            // Without raw mode it is a poor console, and still one.
            let _ = tcsetattr(&stdin, SetArg::TCSADRAIN, &raw);
        }
        Self(before)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _ = tcsetattr(std::io::stdin(), SetArg::TCSADRAIN, before);
        }
    }
}

/// Why a console was left.
enum Left {
    /// The person has left it, or the input has ended.
    Here,
    /// The VM has gone, or moved.
    There,
}

/// Attaches until Ctrl-] is typed or the VM has stopped. A VM that moves is followed.
pub async fn attach(client: &Client, vm: &VmId) -> Result<(), Problem> {
    let mut socket = client.websocket(&format!("/v1/vms/{vm}/console/attach")).await?;
    output::note(&format!("attached to {vm}; Ctrl-] leaves"));
    let raw = Raw::begin();
    let mut keys = keys();
    let ended = loop {
        match carry(&mut socket, &mut keys, &mut std::io::stdout()).await {
            Left::Here => break Ok(()),
            Left::There => match again(client, vm).await {
                Ok(Some(next)) => socket = next,
                Ok(None) => break Ok(()),
                Err(problem) => break Err(problem),
            },
        }
    };
    drop(raw);
    output::note(&format!("\nleft the console of {vm}"));
    ended
}

/// The keys that are typed. A thread reads them that nobody waits for: a read of a terminal can't be ended.
pub(super) fn keys() -> mpsc::Receiver<Vec<u8>> {
    let (typed, keys) = mpsc::channel(16);
    std::thread::spawn(move || {
        let mut buffer = [0; 1024];
        while let Ok(length @ 1..) = std::io::stdin().read(&mut buffer) {
            if typed.blocking_send(buffer[..length].to_vec()).is_err() {
                return;
            }
        }
    });
    keys
}

/// Carries both directions at the same time: a guest that prints what is pasted takes no more of it while nobody reads.
async fn carry(
    socket: &mut (impl AsyncRead + AsyncWrite + Unpin),
    keys: &mut mpsc::Receiver<Vec<u8>>,
    screen: &mut impl std::io::Write,
) -> Left {
    let (mut from, mut to) = tokio::io::split(socket);
    let shows = async {
        let mut buffer = [0; 16 << 10];
        loop {
            let length = match from.read(&mut buffer).await {
                Ok(length @ 1..) => length,
                Ok(0) | Err(_) => return Left::There,
            };
            if screen.write_all(&buffer[..length]).and_then(|()| screen.flush()).is_err() {
                return Left::Here;
            }
        }
    };
    let types = async {
        while let Some(typed) = keys.recv().await {
            let end = typed.iter().position(|key| *key == LEAVE);
            let sent = to.write_all(&typed[..end.unwrap_or(typed.len())]).await;
            if end.is_some() {
                break;
            }
            if sent.is_err() || to.flush().await.is_err() {
                return Left::There;
            }
        }
        // The next one may come at once.
        drop(timeout(GOODBYE_MAX, to.shutdown()).await);
        Left::Here
    };
    tokio::select! {
        left = shows => left,
        left = types => left,
    }
}

/// The console of a VM that has moved to another host or is being restarted; `None` if it does not run any more.
async fn again(client: &Client, vm: &VmId) -> Result<Option<WebSocket>, Problem> {
    let begun = std::time::Instant::now();
    loop {
        let shown = match client.get::<Vm>(&format!("/v1/vms/{vm}")).await {
            Err(problem) if problem.kind == ProblemKind::NotFound => return Ok(None),
            shown => shown?,
        };
        if matches!(shown.status, VmState::Stopped | VmState::Shutdown | VmState::Gone) {
            return Ok(None);
        }
        match client.websocket(&format!("/v1/vms/{vm}/console/attach")).await {
            Ok(socket) => return Ok(Some(socket)),
            Err(problem) if begun.elapsed() > PATIENCE => return Err(problem),
            Err(_) => tokio::time::sleep(LOOK_EVERY).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest that prints what is typed, and whose host keeps little of it.
    #[tokio::test]
    async fn a_long_paste_comes_back_whole() {
        let (mut ours, theirs) = tokio::io::duplex(64);
        let (mut reads, mut prints) = tokio::io::split(theirs);
        let guest = tokio::spawn(async move { tokio::io::copy(&mut reads, &mut prints).await });
        let paste = vec![b'x'; 256 << 10];
        let (typed, mut keys) = mpsc::channel(1);
        let pasted = paste.clone();
        let person = tokio::spawn(async move {
            for part in pasted.chunks(1024) {
                typed.send(part.to_vec()).await.expect("somebody listens");
            }
            // Until all of it is back.
            typed.closed().await;
        });
        let mut screen = Screen { left: paste.len() };
        let carried = carry(&mut ours, &mut keys, &mut screen);
        let left = tokio::time::timeout(Duration::from_secs(60), carried).await.expect("it ends");
        assert!(matches!(left, Left::Here), "the screen ends it");
        drop(keys);
        person.await.expect("it was typed");
        guest.abort();
    }

    /// Fails when it has got everything.
    struct Screen {
        left: usize,
    }

    impl std::io::Write for Screen {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.left -= bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            if self.left == 0 { Err(std::io::Error::other("it has everything")) } else { Ok(()) }
        }
    }
}
