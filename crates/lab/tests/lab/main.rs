//! Labs with real namespaces, the real relay and stand-ins for the daemons. Needs root, like the lab
//! itself.
//!
//! The stand-in for the `perigee` binary is a script: as supervisor, relay, instance and controller it runs this
//! test binary again (the ignored tests at the end), as any other daemon it sleeps.

mod bench;
mod figures;
mod rent;
mod wan;

use std::path::Path;

use bench::{Bench, DEADLINE, RTT_MS, WAN_MIN, host, kill, round_trip, until};
use perigee_lab::{Definition, Lab, LabId, Steps};
use perigee_model::job::{Host, HostState};
use perigee_model::vm::HostAddresses;
use perigee_model::{Problem, SiteId};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::test]
async fn two_labs_stand_side_by_side_with_a_wan_in_each() {
    let bench = Bench::new();
    let (one, two) = (bench.up().await, bench.up().await);
    for lab in [&one, &two] {
        assert!(round_trip(lab, "home1", "cloud1") >= WAN_MIN);
        assert!(round_trip(lab, "home1", "home2") < DEADLINE);
    }
    assert_eq!(perigee_lab::list(&bench.options.base).expect("a list").len(), 2);
    bench.down(&one.definition.id).await;
    assert!(round_trip(&two, "cloud1", "home2") >= WAN_MIN);
    bench.down(&two.definition.id).await;
}

#[tokio::test]
async fn a_killed_daemon_is_started_again() {
    let bench = Bench::new();
    let lab = bench.up().await;
    for daemon in ["volume", "agent"] {
        // The stand-in for the controller says that all hosts are up before their daemons are.
        let pid = || lab.host_pid(&host("home2"), daemon);
        until(&format!("the first {daemon}"), || pid().is_ok()).await;
        let old = pid().expect("it runs");
        kill(old);
        until(&format!("a new {daemon}"), || pid().is_ok_and(|new| new != old)).await;
    }
    bench.down(&lab.definition.id).await;
}

#[tokio::test]
async fn what_a_lab_left_behind_is_found() {
    let bench = Bench::new();
    let lab = bench.up().await;
    let id = lab.definition.id.clone();
    let mut lost = std::process::Command::new("sh")
        .args(["-c", "read line", "lab", "relay", &id.to_string(), "--base"])
        .stdin(std::process::Stdio::piped())
        .spawn()
        .expect("a process");
    let words = [format!("pg-{id}-site-home"), "directory".to_owned(), lost.id().to_string()];
    // A process that was just started has no command line for a moment.
    until("all that is there", || {
        let found = perigee_lab::remains(&bench.options.base, &id).join("; ");
        words.iter().all(|word| found.contains(word))
    })
    .await;
    lost.kill().expect("kill");
    lost.wait().expect("its end");
    bench.down(&id).await;
}

#[tokio::test]
async fn nothing_stays_when_the_supervisor_was_killed() {
    let bench = Bench::new();
    let lab = bench.up().await;
    let file = lab.dir().join("supervisor.json");
    let text = std::fs::read_to_string(file).expect("supervisor.json");
    let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let pid = i32::try_from(json["pid"].as_i64().expect("a pid")).expect("a pid");
    kill(pid);
    until("the supervisor's end", || {
        perigee_lab::list(&bench.options.base).expect("a list").iter().all(|l| !l.supervised)
    })
    .await;
    assert!(round_trip(&lab, "home1", "cloud1") >= WAN_MIN, "the WAN lives on");
    bench.down(&lab.definition.id).await;
}

#[tokio::test]
async fn a_lab_that_fails_half_way_leaves_nothing() {
    let bench = Bench::new();
    let definition = Definition::default_demo(LabId::random(), RTT_MS);
    let id = definition.id.clone();
    let taken = format!("pg-{id}-cloud1");
    let add = std::process::Command::new("ip").args(["netns", "add", &taken]).status();
    assert!(add.expect("ip").success());
    let refused = perigee_lab::up(definition, &bench.options, &Steps::default()).await;
    assert!(refused.expect_err("the name is taken").to_string().contains(&taken));
    bench.assert_nothing_left(&id);
}

#[tokio::test]
async fn an_error_in_the_work_takes_the_lab_down() {
    let bench = Bench::new();
    let definition = Definition::default_demo(LabId::random(), RTT_MS);
    let id = definition.id.clone();
    let work = async |_lab: Lab| Err::<(), _>(Problem::internal("work", "it went wrong"));
    let steps = Steps::default();
    let result = perigee_lab::with_lab(definition, &bench.options, &steps, work).await;
    assert_eq!(result.expect_err("the work's error").why, "it went wrong");
    bench.assert_nothing_left(&id);
}

#[tokio::test]
async fn run_gives_the_command_the_api_and_its_exit_code_back() {
    let bench = Bench::new();
    let definition = Definition::default_demo(LabId::random(), RTT_MS);
    let id = definition.id.clone();
    let command = ["sh", "-c", "test -S \"${PERIGEE_API#unix:}\" && exit 7"].map(str::to_owned);
    let code = perigee_lab::run(definition, &bench.options, &Steps::default(), &command).await;
    assert_eq!(code.expect("a code"), 7);
    bench.assert_nothing_left(&id);
}

#[tokio::test]
#[ignore = "the stand-in's supervisor"]
async fn as_supervise() {
    let args = std::env::var("LAB_TEST_ARGS").expect("run by the stand-in");
    let args: Vec<&str> = args.split(' ').collect();
    let id = args[2].parse().expect("an id");
    perigee_lab::supervise(Path::new(args[4]), &id).await.expect("supervise");
}

#[test]
#[ignore = "the stand-in's relay"]
fn as_relay() {
    let args = std::env::var("LAB_TEST_ARGS").expect("run by the stand-in");
    let args: Vec<&str> = args.split(' ').collect();
    let id = args[2].parse().expect("an id");
    perigee_lab::wan::relay(Path::new(args[4]), &id).expect("relay");
}

#[tokio::test]
#[ignore = "the stand-in's instance"]
async fn as_instance() {
    let args = std::env::var("LAB_TEST_ARGS").expect("run by the stand-in");
    let args: Vec<&str> = args.split(' ').collect();
    let id = args[2].parse().expect("an id");
    perigee_lab::rent::machine(Path::new(args[5]), &id, args[3]).await.expect("an instance");
}

/// Answers every request with three hosts that are up.
#[tokio::test]
#[ignore = "the stand-in's controller"]
async fn as_controller() {
    let args = std::env::var("LAB_TEST_ARGS").expect("run by the stand-in");
    let socket = args.split(' ').find_map(|a| a.strip_prefix("unix:")).expect("a socket");
    let hosts = serde_json::to_string(&["a", "b", "c"].map(up_host)).expect("JSON");
    let answer = format!(
        "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{hosts}",
        hosts.len()
    );
    let listener = tokio::net::UnixListener::bind(socket).expect("listen");
    loop {
        let (mut stream, _) = listener.accept().await.expect("accept");
        let mut request = [0; 4096];
        let _ = stream.read(&mut request).await;
        let _ = stream.write_all(answer.as_bytes()).await;
    }
}

fn up_host(name: &str) -> Host {
    Host {
        id: host(name),
        addresses: HostAddresses {
            tunnel: None,
            site: SiteId::new("s").expect("a name"),
            agent_url: String::new(),
            volume_url: String::new(),
            nbd_addr: String::new(),
        },
        state: HostState::Up,
        cpus: 1,
        memory_bytes: 1,
        memory_used_bytes: 0,
        memory_available_bytes: None,
        load_1min: None,
        cpus_used_1m: None,
        pressure: Default::default(),
        vcpus_1m: None,
        pool_free_bytes: None,
        pool_size_bytes: None,
        accelerator: None,
        cpu_model: String::new(),
        warnings: Vec::new(),
        waits: Vec::new(),
        drain: None,
        lease: None,
        notice: None,
        measurement: None,
        last_seen_ms: 0,
    }
}
