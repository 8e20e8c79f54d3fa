//! Who gets in: CHAP one way and both, lists of clients, targets of others.

use crate::server::{MIB, Server, assert_io, said, try_run};

const INQUIRER: &str = "iqn.2026-11.test:inquirer";

fn inquire(server: &Server, user: &str, volume: &str) -> Result<(), String> {
    let url = server.iscsi_url_of(user, volume);
    let output = try_run(&["iscsi-inq", "-i", INQUIRER, &url]);
    let text = said(&output);
    if output.status.success() && text.contains("PERIGEE") { Ok(()) } else { Err(text) }
}

/// One of QEMU's programs on the volume, with an initiator name of its own. `user`: who proves that
/// it has `secret`.
fn qemu(
    server: &Server,
    program: &[&str],
    initiator: &str,
    user: Option<&str>,
    secret: &str,
) -> std::process::Output {
    let secret = format!("secret,id=s,data={secret}");
    let proof = user.map(|user| format!(",file.user={user},file.password-secret=s"));
    let disk = format!(
        "driver=raw,file.driver=iscsi,file.transport=tcp,file.portal={},file.lun=0,\
         file.target=iqn.2026-11.org.perigee:data,file.initiator-name={initiator}{}",
        server.iscsi_addr,
        proof.unwrap_or_default()
    );
    try_run(&[program, &["--object", &secret, "--image-opts", &disk]].concat())
}

#[tokio::test(flavor = "multi_thread")]
async fn chap_lets_in_who_has_the_secret_and_nobody_else() {
    let mut server = Server::start().await;
    server.create("data", 8 * MIB).await;
    server
        .know_clients(
            "iqn.2026-11.test:inquirer data chap=alice:correct-horse mutual=perigee:battery-staple\n",
        )
        .await;
    inquire(&server, "alice%correct-horse@", "data").expect("the right secret");
    for wrong in ["alice%wrong-horse-22@", "bob%correct-horse@", ""] {
        let refused = inquire(&server, wrong, "data").expect_err("a wrong secret, or none");
        assert!(refused.to_lowercase().contains("auth"), "{wrong}: {refused}");
    }
    let mutual = |secret: &str| {
        let url = server.iscsi_url_of("alice%correct-horse@", "data");
        let url = format!("{url}?target_user=perigee&target_password={secret}");
        try_run(&["iscsi-inq", "-i", INQUIRER, &url])
    };
    let proved = mutual("battery-staple");
    assert!(proved.status.success(), "{proved:?}");
    let doubted = mutual("another-secret");
    assert!(!doubted.status.success(), "the target does not have this secret: {doubted:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn chap_is_right_wrong_or_missing_with_qemu_s_driver() {
    let mut server = Server::start().await;
    server.create("data", 8 * MIB).await;
    server
        .know_clients(&format!(
            "{INQUIRER} data chap=alice:correct-horse\niqn.2026-11.test:open data\n"
        ))
        .await;
    let (io, img) = (["qemu-io", "-c", "write -P 5 0 64k", "-c", "flush"], ["qemu-img", "info"]);
    // The driver sends no proof if it is given none, and is let in where none is wanted.
    assert_io(&qemu(&server, &io, "iqn.2026-11.test:open", None, "unused"));
    assert_io(&qemu(&server, &io, INQUIRER, Some("alice"), "correct-horse"));
    assert_io(&qemu(&server, &img, INQUIRER, Some("alice"), "correct-horse"));
    for (user, secret) in
        [(Some("alice"), "wrong-horse-22"), (Some("bob"), "correct-horse"), (None, "unused")]
    {
        let refused = qemu(&server, &img, INQUIRER, user, secret);
        let text = said(&refused).to_lowercase();
        assert!(!refused.status.success() && text.contains("auth"), "{user:?} {secret}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_s_target_answers_like_one_that_is_not_there() {
    let mut server = Server::start().await;
    server.create("data", 8 * MIB).await;
    server.create("other", 8 * MIB).await;
    server.know_clients("iqn.2026-11.test:inquirer data\n").await;
    inquire(&server, "", "data").expect("its own");
    let others = inquire(&server, "", "other").expect_err("another's");
    let nothing = inquire(&server, "", "nothing").expect_err("not there");
    assert_eq!(others.replace("other", "X"), nothing.replace("nothing", "X"));

    let portal = format!("iscsi://{}", server.iscsi_addr);
    let seen = said(&try_run(&["iscsi-ls", "-i", INQUIRER, &portal]));
    assert!(seen.contains("perigee:data") && !seen.contains("other"), "{seen}");
    let seen = said(&try_run(&["iscsi-ls", "-i", "iqn.2026-11.test:stranger", &portal]));
    assert!(!seen.contains("perigee:"), "{seen}");

    // A change of the list counts at once.
    server.know_clients("iqn.2026-11.test:inquirer data other\n").await;
    inquire(&server, "", "other").expect("its own now");
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_of_the_pool_get_what_they_are_bound_to() {
    let server = Server::start().await;
    server.create("data", 8 * MIB).await;
    server.create("other", 8 * MIB).await;
    inquire(&server, "", "other").expect("a pool without clients is open");
    let client = serde_json::json!({
        "name": "one", "initiator": INQUIRER,
        "chap": { "user": "one", "secret": "a-long-enough-secret" },
    });
    let _: serde_json::Value = server.control.post("/v1/clients", &client).await.expect("a client");
    let binding = serde_json::json!({ "service": { "volume": "data" }, "over": "iscsi" });
    let bound: Result<serde_json::Value, _> =
        server.control.put("/v1/clients/one/binding", &binding).await;
    bound.expect("a binding");
    inquire(&server, "one%a-long-enough-secret@", "data").expect("what it is bound to");
    inquire(&server, "one%a-long-enough-secret@", "other").expect_err("something else");
    inquire(&server, "one%another-long-secret@", "data").expect_err("a wrong secret");
    // NBD without TLS asks for no secret.
    let over_nbd = |uri: &str| try_run(&["qemu-io", "-f", "raw", "-c", "read 0 4k", uri]);
    let refused = over_nbd(&server.tcp_uri("data"));
    assert!(!refused.status.success() && said(&refused).contains("CHAP secret"), "{refused:?}");
    assert_io(&over_nbd(&server.tcp_uri("other")));
    assert_io(&over_nbd(&server.uri("data")));
}

#[tokio::test(flavor = "multi_thread")]
async fn of_machines_that_ask_for_a_secret_at_the_same_time_one_gets_it() {
    let server = Server::start().await;
    server.create("data", MIB).await;
    let client = serde_json::json!({
        "name": "one", "mac": "52:54:00:77:00:01",
        "chap": { "user": "one", "secret": "a-long-enough-secret" },
    });
    let _: serde_json::Value = server.control.post("/v1/clients", &client).await.expect("a client");
    let binding = serde_json::json!({ "service": { "volume": "data" }, "over": "iscsi" });
    let bound: Result<serde_json::Value, _> =
        server.control.put("/v1/clients/one/binding", &binding).await;
    bound.expect("a binding");
    let mut asked = tokio::task::JoinSet::new();
    for number in 1..=16 {
        let control = server.control.clone();
        let ask = serde_json::json!({
            "mac": "52:54:00:77:00:01", "address": format!("10.0.0.{number}"),
        });
        asked.spawn(async move { control.post::<serde_json::Value>("/v1/boot", &ask).await });
    }
    let answers = asked.join_all().await;
    assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 1, "{answers:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_was_killed_is_found_again_by_qemu_s_driver() {
    let mut server = Server::start().await;
    server.create("data", 64 * MIB).await;
    let url = server.iscsi_url("data");
    assert_io(&try_run(&["qemu-io", "-t", "unsafe", "-f", "raw", "-c", "write -P 9 1M 8M", &url]));
    server.kill();
    server.start_process().await;
    assert_io(&try_run(&["qemu-io", "-f", "raw", "-c", "read -P 9 1M 8M", &url]));
    let file = server.pool.with_extension("raw").display().to_string();
    std::fs::write(&file, crate::server::sample(64 * MIB)).expect("a file");
    crate::server::run(&["qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", &file, &url]);
    crate::server::run(&["qemu-img", "compare", "-f", "raw", "-F", "raw", &file, &url]);
    crate::server::run(&[
        "qemu-img",
        "compare",
        "-f",
        "raw",
        "-F",
        "raw",
        &file,
        &server.uri("data"),
    ]);
    std::fs::remove_file(&file).expect("the file");
}
