//! The client beside servers that are absent, silent or endless.

use perigee_model::ProblemKind;

use super::*;

#[tokio::test]
async fn who_does_not_listen_is_named_with_the_reason_and_what_to_do() {
    let client = Client::new("http://127.0.0.1:1", Duration::from_secs(5)).expect("address");
    let problem = client.hint("start it").get::<()>("/").await.expect_err("nobody is there");
    let expected = "no answer from http://127.0.0.1:1: Connection refused (os error 111)";
    assert_eq!(problem.to_string(), format!("{expected}\n  start it"));
}

#[tokio::test]
async fn bytes_that_do_not_come_are_not_waited_for_beyond_the_deadline() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = format!("http://{}", listener.local_addr().expect("an address"));
    let client = Client::new(&address, Duration::from_millis(100)).expect("a client");
    let silent = tokio::time::timeout(Duration::from_secs(60), client.get_bytes("/v1/x"));
    let problem = silent.await.expect("the client gives up").expect_err("nobody answers");
    assert_eq!(problem.kind, ProblemKind::Unavailable, "{problem}");
}

async fn serve(router: axum::Router) -> Client {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = format!("http://{}", listener.local_addr().expect("an address"));
    tokio::spawn(async move { axum::serve(listener, router).await });
    Client::new(&address, Duration::from_secs(60)).expect("a client")
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    use axum::response::Redirect;
    use axum::routing::get;
    let router = axum::Router::new()
        .route("/", get(async || Redirect::temporary("/elsewhere")))
        .route("/elsewhere", get(async || "1"));
    let refused = serve(router).await.get::<u32>("/").await.expect_err("a redirect");
    assert!(refused.why.contains("307"), "{refused}");
}

#[tokio::test]
async fn an_answer_without_an_end_is_read_to_a_limit() {
    let endless = async || {
        let piece = Bytes::from(vec![b' '; 1 << 20]);
        let pieces = futures_util::stream::repeat_with(move || {
            Ok::<_, std::convert::Infallible>(piece.clone())
        });
        Body::from_stream(pieces)
    };
    let client = serve(axum::Router::new().route("/", axum::routing::get(endless))).await;
    for answer in [
        client.get_bytes("/").await.map(drop),
        client.get::<u32>("/").await.map(drop),
        client.get_lines("/", |_: u32| {}).await,
    ] {
        let problem = answer.expect_err("no end");
        assert!(problem.why.contains("64 MiB, which is the limit"), "{problem}");
    }
}

#[tokio::test]
async fn lines_are_whole_however_they_are_cut_into_pieces() {
    for piece_bytes in [1, 2, 3, 5, 100] {
        let cut = async move || {
            let text = b"1\n22\n\"three\"\n4\n";
            let pieces = text.chunks(piece_bytes).map(Bytes::from_static);
            Body::from_stream(futures_util::stream::iter(
                pieces.map(Ok::<_, std::convert::Infallible>),
            ))
        };
        let client = serve(axum::Router::new().route("/", axum::routing::get(cut))).await;
        let mut lines = Vec::new();
        client.get_lines("/", |line: serde_json::Value| lines.push(line)).await.expect("lines");
        let expected = serde_json::json!([1, 22, "three", 4]);
        assert_eq!(serde_json::Value::from(lines), expected, "pieces of {piece_bytes}");
    }
}

#[tokio::test]
async fn a_stream_is_read_piece_by_piece_and_a_file_is_sent() {
    let router = axum::Router::new().route("/", axum::routing::post(async |body: Bytes| body));
    let client = serve(router).await;
    let mut file = tempfile::tempfile().expect("a file");
    std::io::Write::write_all(&mut file, b"[1,2,3]").expect("write");
    std::io::Seek::rewind(&mut file).expect("rewind");
    let body = crate::file_body(tokio::fs::File::from_std(file));
    let echoed: Vec<u32> = client.send_body(Method::POST, "/", body).await.expect("an echo");
    assert_eq!(echoed, [1, 2, 3]);
}

#[test]
fn an_address_from_another_host_is_never_a_unix_socket() {
    let wait = Duration::from_secs(1);
    for bad in [
        "unix:/run/perigee/controller.sock",
        "https://10.0.0.1:1",
        "http://10.0.0.1",
        "http://10.0.0.1:1/v1",
        "http://user@10.0.0.1:1",
        "http://a b:1",
        "http://:1",
        "10.0.0.1:1",
        "",
    ] {
        let refused = Network::Plain.client(bad, Expected::Address, wait);
        assert!(refused.is_err(), "{bad:?}");
    }
    for good in ["http://10.0.0.1:1", "http://[fd00::1]:1/", "http://home-1.example:1"] {
        Network::Plain.client(good, Expected::Address, wait).expect(good);
    }
}

#[tokio::test]
async fn a_lost_answer_is_asked_for_again_with_the_same_key() {
    use tokio::io::AsyncReadExt as _;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = format!("http://{}", listener.local_addr().expect("an address"));
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        let (mut first, _) = listener.accept().await.expect("a client");
        let mut text = vec![0; 4096];
        let count = first.read(&mut text).await.expect("a request");
        let text = String::from_utf8_lossy(&text[..count]).to_lowercase();
        let key = text.lines().find_map(|line| line.strip_prefix("idempotency-key: "));
        tell.send(key.expect("a key").to_owned()).expect("the test listens");
        drop(first);
        let second = async move |headers: HeaderMap| {
            let key = headers["idempotency-key"].to_str().expect("ASCII").to_owned();
            tell.send(key).expect("the test listens");
            axum::Json(7)
        };
        let router = axum::Router::new().route("/v1/jobs", axum::routing::post(second));
        axum::serve(listener, router).await
    });
    let client = Client::new(&address, Duration::from_secs(60)).expect("a client");
    assert_eq!(client.create::<u32>("/v1/jobs", &"a job").await.expect("made"), 7);
    let (first, second) = (told.recv().await.expect("one"), told.recv().await.expect("two"));
    assert_eq!(first, second);
}

#[tokio::test]
async fn what_could_not_be_sent_is_not_tried_again() {
    let client = Client::new("http://127.0.0.1:1", Duration::from_secs(5)).expect("address");
    let problem = client.create::<u32>("/v1/jobs", &"a job").await.expect_err("nobody is there");
    assert!(problem.why.contains("Connection refused"), "{problem}");
}
