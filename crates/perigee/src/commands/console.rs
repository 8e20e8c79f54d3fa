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
use perigee_model::persistent_vm::VmState;
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

/// Attaches until Ctrl-] is typed or the VM has stopped. A VM that moves or is restarted is followed, and a controller that is started again is
/// waited for.
pub async fn attach(client: &Client, vm: &VmId) -> Result<(), Problem> {
    let mut socket = client.websocket(&format!("/v1/vms/{vm}/console/attach")).await?;
    output::note(&format!("attached to {vm}; Ctrl-] leaves"));
    let raw = Raw::begin();
    let mut keys = keys();
    let ended = loop {
        match carry(&mut socket, &mut keys, &mut std::io::stdout()).await {
            Left::Here => break Ok(()),
            Left::There => {
                let next = tokio::select! {
                    next = again(client, vm) => next,
                    () = leaves(&mut keys) => Ok(None),
                };
                match next {
                    Ok(Some(next)) => socket = next,
                    Ok(None) => break Ok(()),
                    Err(problem) => break Err(problem),
                }
            }
        }
    };
    drop(raw);
    output::note(&format!("\nleft the console of {vm}"));
    ended
}

/// Returns when Ctrl-] is typed, or the input has ended. Other keys are typed to nobody.
async fn leaves(keys: &mut mpsc::Receiver<Vec<u8>>) {
    while keys.recv().await.is_some_and(|typed| !typed.contains(&LEAVE)) {}
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
        let problem = match client.get::<Vm>(&format!("/v1/vms/{vm}")).await {
            Ok(shown) if has_stopped(&shown) => return Ok(None),
            Ok(_) => match client.websocket(&format!("/v1/vms/{vm}/console/attach")).await {
                Ok(socket) => return Ok(Some(socket)),
                Err(problem) => problem,
            },
            Err(problem) => match problem.kind {
                ProblemKind::NotFound => return Ok(None),
                // The controller may be starting again.
                ProblemKind::Unavailable => problem,
                _ => return Err(problem),
            },
        };
        if begun.elapsed() > PATIENCE {
            return Err(problem);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// One without a job whose guest has ended is being taken down, maybe to be started again.
fn has_stopped(vm: &Vm) -> bool {
    match vm.status {
        VmState::Stopped => true,
        VmState::Shutdown | VmState::Gone => vm.job.is_some(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(status: &str, job: &str) -> String {
        let io = serde_json::json!(perigee_model::volume::IoStats::default());
        format!(
            r#"{{"id":"web","job":{job},"host":null,"status":"{status}","reason":"","cpus":1,"memory_bytes":1,"uptime_ms":1,
            "vcpu_ms":1,"load":{{}},"migration":null,"waits":[],"run":0,"made_ms":0,"io":{io},"volumes":[],"addresses":[]}}"#
        )
    }

    #[tokio::test]
    async fn a_controller_that_is_started_again_is_waited_for() {
        let address = format!("127.0.0.1:{}", perigee_http::unused_port());
        let client = Client::new(&format!("http://{address}"), PATIENCE).expect("a client");
        let vm: VmId = "web".parse().expect("a name");
        let found = tokio::spawn(async move { again(&client, &vm).await });
        tokio::time::sleep(LOOK_EVERY / 2).await;
        let listener = tokio::net::TcpListener::bind(&address).await.expect("still free");
        let (mut stream, _) = listener.accept().await.expect("a request");
        let mut request = [0; 4096];
        assert!(stream.read(&mut request).await.expect("a request") > 0);
        let body = shown("stopped", "null");
        let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        stream.write_all(answer.as_bytes()).await.expect("answered");
        assert!(matches!(found.await.expect("no panic"), Ok(None)), "it is off by now");
    }

    #[test]
    fn a_vm_that_is_restarted_is_followed() {
        let has_stopped = |status: &str, job: &str| {
            super::has_stopped(&serde_json::from_str(&shown(status, job)).expect("a VM"))
        };
        assert!(!has_stopped("shutdown", "null") && !has_stopped("waiting", "null"));
        assert!(has_stopped("stopped", "null") && has_stopped("shutdown", "\"hello-0001\""));
    }

    #[tokio::test]
    async fn a_console_is_left_also_while_its_vm_is_away() {
        let (typed, mut keys) = mpsc::channel(2);
        typed.send(b"ls\n".to_vec()).await.expect("there is room");
        let soon = Duration::from_millis(50);
        timeout(soon, leaves(&mut keys)).await.expect_err("nobody wants to leave");
        typed.send(vec![b'x', LEAVE]).await.expect("there is room");
        timeout(PATIENCE, leaves(&mut keys)).await.expect("it was typed");
        drop(typed);
        timeout(PATIENCE, leaves(&mut keys)).await.expect("the input has ended");
    }

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
