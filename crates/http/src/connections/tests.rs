//! Clients that are slow, silent or many.

use std::net::SocketAddr;

use axum::routing::{get, post};
use tokio::net::TcpListener;

use super::*;

/// Short enough for a test, and each alone decides in its test.
const LIMITS: Limits = Limits {
    connections: 4,
    connections_of_one: 4,
    handshake: Duration::from_millis(300),
    headers: Duration::from_millis(300),
    silence: Duration::from_millis(300),
    body_bytes_per_s: 1000,
};

/// Whatever a slow machine does meanwhile.
const PATIENCE: Duration = Duration::from_secs(60);

async fn start(limits: Limits) -> SocketAddr {
    start_guarded(limits, Guard::default()).await
}

async fn start_guarded(limits: Limits, guard: Guard) -> SocketAddr {
    let large = vec![b'x'; 64 << 20];
    let router = Router::new()
        .route("/", get(async || "here"))
        .route("/length", post(async |body: Bytes| body.len().to_string()))
        .route("/large", get(async move || large.clone()));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(serve(listener, router, limits, guard));
    address
}

async fn connect(address: SocketAddr) -> TcpStream {
    TcpStream::connect(address).await.expect("connect")
}

/// Everything until the server hangs up.
async fn rest(stream: &mut TcpStream) -> String {
    let mut text = Vec::new();
    let read = timeout(PATIENCE, stream.read_to_end(&mut text)).await;
    // A reset is an end, too.
    drop(read.expect("the server hangs up"));
    String::from_utf8_lossy(&text).into_owned()
}

/// Sends one byte again and again until the server has hung up.
async fn trickle(mut stream: TcpStream, every: Duration) -> String {
    let (mut reader, mut writer) = stream.split();
    let mut text = Vec::new();
    let send = async {
        while writer.write_all(b"x").await.is_ok() {
            sleep(every).await;
        }
        std::future::pending::<()>().await;
    };
    let read = async {
        tokio::select! {
            () = send => {}
            read = reader.read_to_end(&mut text) => drop(read),
        }
    };
    timeout(PATIENCE, read).await.expect("the server hangs up");
    String::from_utf8_lossy(&text).into_owned()
}

#[tokio::test]
async fn headers_that_come_byte_by_byte_are_not_waited_for() {
    let address = start(LIMITS).await;
    let mut slow = connect(address).await;
    slow.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\nx: ").await.expect("send");
    assert_eq!(trickle(slow, Duration::from_millis(20)).await, "");
}

#[tokio::test]
async fn a_connection_that_asks_nothing_is_closed_before_and_after_a_request() {
    let address = start(LIMITS).await;
    assert_eq!(rest(&mut connect(address).await).await, "");
    let mut idle = connect(address).await;
    idle.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n").await.expect("send");
    assert!(rest(&mut idle).await.ends_with("here"));
}

#[tokio::test]
async fn a_body_that_stops_is_answered_with_the_reason() {
    let address = start(Limits { body_bytes_per_s: 1, ..LIMITS }).await;
    let mut slow = connect(address).await;
    let head = b"POST /length HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\nabc";
    slow.write_all(head).await.expect("send");
    let answer = rest(&mut slow).await;
    assert!(answer.contains("no byte of the body came"), "{answer}");
}

#[tokio::test]
async fn a_body_that_trickles_is_given_up_although_it_is_never_silent() {
    let limits = Limits { silence: Duration::from_secs(2), ..LIMITS };
    let address = start(limits).await;
    let mut slow = connect(address).await;
    let head = b"POST /length HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n";
    slow.write_all(head).await.expect("send");
    let answer = trickle(slow, Duration::from_millis(20)).await;
    assert!(answer.contains("slower than 1000 bytes a second"), "{answer}");
}

#[tokio::test]
async fn an_answer_that_nobody_reads_is_not_kept() {
    let address = start(Limits { connections: 1, ..LIMITS }).await;
    let mut deaf = connect(address).await;
    deaf.write_all(b"GET /large HTTP/1.1\r\nhost: localhost\r\n\r\n").await.expect("send");
    // The deaf client's place is free again when another one is answered.
    let again = async {
        loop {
            let mut other = connect(address).await;
            other.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n").await.expect("send");
            if rest(&mut other).await.ends_with("here") {
                return;
            }
            sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(PATIENCE, again).await.expect("the place is free again");
}

#[tokio::test]
async fn clients_beyond_the_limit_are_told_so_and_the_silent_ones_lock_nobody_out() {
    let address = start(Limits { headers: Duration::from_secs(5), ..LIMITS }).await;
    let mut silent = Vec::new();
    for _ in 0..LIMITS.connections {
        silent.push(connect(address).await);
    }
    let mut refused = 0;
    let answered = async {
        loop {
            let mut other = connect(address).await;
            // A refused connection may be closed before all is sent.
            drop(other.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n").await);
            let answer = rest(&mut other).await;
            if answer.ends_with("here") {
                return;
            }
            assert!(answer.contains("4 connections are open"), "{answer}");
            refused += 1;
        }
    };
    timeout(PATIENCE, answered).await.expect("a place is free again");
    assert!(refused > 0, "the first four had all the places");
}

#[tokio::test]
async fn a_tls_handshake_that_does_not_come_is_not_waited_for() {
    use crate::{Authority, Identity, PeerIdentity};
    let dir = tempfile::tempdir().expect("a directory");
    let authority = Authority::open(dir.path()).expect("an authority");
    let credentials = authority.credentials(&PeerIdentity::Controller, &[]).expect("made");
    let identity = Identity::new(&credentials, crate::identity::Strangers::Heard);
    let guard = Guard { identity: Some(identity.expect("an identity")), ..Guard::default() };
    let address = start_guarded(LIMITS, guard).await;
    assert_eq!(rest(&mut connect(address).await).await, "");
}

/// With Nagle's algorithm, a small file over a connection that is used again took 40 ms more.
#[tokio::test]
async fn an_answers_body_does_not_wait_for_the_acknowledgement_of_its_head() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let _client = TcpStream::connect(address).await.expect("a connection");
    let (stream, _) = listener.accept().await.expect("a connection");
    stream.send_at_once().expect("an option");
    assert!(stream.nodelay().expect("an option"));
}
