use tokio::io::{AsyncBufReadExt, AsyncWriteExt};
use tokio::net::UnixListener;

use super::*;

#[test]
fn an_answer_is_matched_by_its_id() {
    let message = parse(br#"{"return": {"status": "running"}, "id": 7}"#).unwrap();
    let Message::Answer { id: 7, result: Ok(value) } = message else {
        panic!("{message:?}");
    };
    assert_eq!(value["status"], "running");
}

#[test]
fn a_refusal_carries_its_description() {
    let line = br#"{"id": 3, "error": {"class": "GenericError", "desc": "no such thing"}}"#;
    let message = parse(line).unwrap();
    assert!(
        matches!(&message, Message::Answer { id: 3, result: Err(e) } if e == "no such thing"),
        "{message:?}"
    );
}

#[test]
fn an_event_without_data_is_an_event() {
    let line = br#"{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "STOP"}"#;
    assert!(matches!(parse(line).unwrap(), Message::Event(event) if event.name == "STOP"));
}

#[test]
fn what_a_later_qemu_may_say_is_ignored() {
    assert!(matches!(parse(br#"{"news": 1}"#).unwrap(), Message::Other));
    assert!(matches!(parse(br#"{"id": "text", "return": {}}"#).unwrap(), Message::Other));
    assert!(parse(b"HMP>").is_err());
}

#[test]
fn a_migration_without_figures_is_read() {
    let info: MigrateInfo = serde_json::from_str("{}").unwrap();
    assert_eq!((info.status.as_str(), info.ram.remaining), ("", 0));
    let text = r#"{"status": "active", "total-time": 5, "blocked": false,
        "ram": {"dirty-pages-rate": 4, "page-size": 4096, "mbps": 268.5, "postcopy-bytes": 0},
        "socket-address": [{"port": "4444", "type": "inet", "host": "10.0.0.1"}]}"#;
    let info: MigrateInfo = serde_json::from_str(text).unwrap();
    assert_eq!((info.total_time, info.ram.page_size), (5, 4096));
    assert_eq!(info.socket_address[0].port, "4444");
}

/// Answers the two commands after the negotiation in reverse order, and closes at the third.
async fn serve_reversed(listener: UnixListener) {
    let (stream, _) = listener.accept().await.unwrap();
    let (reader, mut writer) = stream.into_split();
    let mut lines = BufReader::new(reader).lines();
    let mut read = async || -> Value {
        serde_json::from_str(&lines.next_line().await.unwrap().unwrap()).unwrap()
    };
    writer.write_all(b"{\"QMP\": {}}\n").await.unwrap();
    let hello = read().await;
    let answer = |request: &Value| {
        format!("{{\"return\": {{\"did\": {}}}, \"id\": {}}}\n", request["execute"], request["id"])
    };
    writer.write_all(answer(&hello).as_bytes()).await.unwrap();
    let (first, second) = (read().await, read().await);
    let text = format!("{}{{\"event\": \"STOP\"}}\n{}", answer(&second), answer(&first));
    writer.write_all(text.as_bytes()).await.unwrap();
    read().await;
}

#[tokio::test]
async fn answers_in_another_order_reach_their_commands_and_a_close_ends_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let server = tokio::spawn(serve_reversed(UnixListener::bind(&path).unwrap()));
    let (qmp, mut events) = Qmp::connect(&path).await.unwrap();
    let (one, two) = tokio::join!(qmp.execute("one", json!({})), qmp.execute("two", json!({})));
    assert_eq!((&one.unwrap()["did"], &two.unwrap()["did"]), (&json!("one"), &json!("two")));
    assert_eq!(events.recv().await.unwrap().name, "STOP");
    let closed = qmp.execute("three", json!({})).await;
    assert!(matches!(closed, Err(QmpError::Closed)), "{closed:?}");
    assert_eq!(events.recv().await, None);
    server.await.unwrap();
}

#[tokio::test]
async fn events_that_nobody_takes_are_bounded_and_end_the_connection() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let server = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let (reader, mut writer) = stream.into_split();
        writer.write_all(b"{\"QMP\": {}}\n").await.unwrap();
        BufReader::new(reader).lines().next_line().await.unwrap().unwrap();
        writer.write_all(b"{\"return\": {}, \"id\": 1}\n").await.unwrap();
        // Until the client closes the connection.
        while writer.write_all(b"{\"event\": \"RTC_CHANGE\"}\n").await.is_ok() {}
    });
    let (qmp, mut events) = Qmp::connect(&path).await.unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(30), async {
        while qmp.inner.waiting.with(|waiting| waiting.is_some()) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    ended.await.expect("waited 30 s for the connection to end");
    let closed = qmp.execute("query-status", json!({})).await;
    assert!(matches!(closed, Err(QmpError::Closed)), "{closed:?}");
    let mut kept = 0;
    while events.recv().await.is_some() {
        kept += 1;
    }
    assert_eq!(kept, EVENTS_MAX);
    drop(qmp);
    server.await.unwrap();
}

/// QEMU greets the next connection only when it has seen the end of this one.
#[tokio::test]
async fn a_connection_that_was_given_up_half_way_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let connecting = tokio::spawn(async move { Qmp::connect(&path).await.map(drop) });
    let (stream, _) = listener.accept().await.unwrap();
    let (reader, mut writer) = stream.into_split();
    writer.write_all(b"{\"QMP\": {}}\n").await.unwrap();
    let mut lines = BufReader::new(reader).lines();
    assert!(lines.next_line().await.unwrap().unwrap().contains("qmp_capabilities"));
    connecting.abort();
    let end = tokio::time::timeout(Duration::from_secs(120), lines.next_line()).await;
    assert!(matches!(end, Ok(Ok(None))), "the connection stays open: {end:?}");
}
