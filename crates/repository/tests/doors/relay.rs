//! A relay in front of a server. It looks at each request, and decides what becomes of it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Pass,
    /// Nobody answers, until the next [`Relay::set`] cuts the connection.
    Silent,
    /// The server gets it, and its answer is lost.
    NoAnswer,
    /// 403.
    Refuse,
}

/// A body up to this length is part of what is decided about.
const SHORT_BYTES: usize = 64 << 10;

type Decide = Box<dyn Fn(&str) -> Fate + Send>;

pub struct Relay {
    pub port: u16,
    decide: Arc<Mutex<Decide>>,
    changes: watch::Sender<()>,
    waiting: Arc<AtomicUsize>,
}

impl Relay {
    pub async fn start(server_port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let decide: Arc<Mutex<Decide>> = Arc::new(Mutex::new(Box::new(|_| Fate::Pass)));
        let (changes, changed) = watch::channel(());
        let waiting = Arc::new(AtomicUsize::new(0));
        let relay =
            Self { port, decide: Arc::clone(&decide), changes, waiting: Arc::clone(&waiting) };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (decide, waiting) = (Arc::clone(&decide), Arc::clone(&waiting));
                let changed = changed.clone();
                tokio::spawn(async move {
                    // The client sees whatever goes wrong.
                    let _ = carry(client, server_port, &decide, &waiting, changed).await;
                });
            }
        });
        relay
    }

    /// How requests are answered from now on.
    pub fn set(&self, decide: impl Fn(&str) -> Fate + Send + 'static) {
        *self.decide.lock().expect("a lock") = Box::new(decide);
        self.changes.send_replace(());
    }

    /// How many requests nobody answers.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
}

/// One request of a connection, and its answer.
async fn carry(
    mut client: TcpStream,
    port: u16,
    decide: &Mutex<Decide>,
    waiting: &AtomicUsize,
    mut changed: watch::Receiver<()>,
) -> std::io::Result<()> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break end;
        }
        if client.read_buf(&mut bytes).await? == 0 {
            return Ok(());
        }
    };
    // A short body is looked at too: some requests say there what they are about.
    let length = String::from_utf8_lossy(&bytes[..end]).lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
    });
    while length.is_some_and(|length| length <= SHORT_BYTES && bytes.len() < end + 4 + length) {
        if client.read_buf(&mut bytes).await? == 0 {
            return Ok(());
        }
    }
    let fate = {
        let decide = decide.lock().expect("a lock");
        changed.mark_unchanged();
        decide(&String::from_utf8_lossy(&bytes))
    };
    match fate {
        Fate::Refuse => {
            let answer =
                b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            client.write_all(answer).await?;
            client.shutdown().await?;
            // What it still sends is read, so that it sees the answer.
            tokio::io::copy(&mut client, &mut tokio::io::sink()).await.map(drop)
        }
        Fate::Silent => {
            waiting.fetch_add(1, Ordering::Relaxed);
            let _ = changed.changed().await;
            waiting.fetch_sub(1, Ordering::Relaxed);
            Ok(())
        }
        Fate::Pass | Fate::NoAnswer => {
            let mut server = TcpStream::connect(("127.0.0.1", port)).await?;
            server.write_all(&bytes[..end]).await?;
            // So the next request comes on a connection of its own.
            server.write_all(b"\r\nConnection: close").await?;
            server.write_all(&bytes[end..]).await?;
            if fate == Fate::Pass {
                return copy_bidirectional(&mut client, &mut server).await.map(drop);
            }
            let (mut from, mut to) = server.split();
            let body = async {
                let (mut client, _) = client.split();
                tokio::io::copy(&mut client, &mut to).await
            };
            let mut answer = [0; 1];
            tokio::select! {
                answered = from.read(&mut answer) => answered.map(drop),
                sent = body => sent.map(drop),
            }
        }
    }
}
