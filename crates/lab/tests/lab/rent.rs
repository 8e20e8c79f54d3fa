//! Hosts that a lab rents out: real namespaces, and scripts instead of the daemons.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use perigee_lab::rent::{Verb, answer};
use perigee_lab::{Definition, Lab, LabId};
use perigee_model::rental::{Instance, InstanceState, NewInstance};
use serde_json::{Value, json};

use crate::bench::{Bench, DEADLINE, RTT_MS, WAN_MIN, kill, round_trip_to, until};

const CLUSTER: &str = "cluster-1";
/// It writes into its own directory, once for each run, and leaves a process in the background.
const USER_DATA: &str = "#!/bin/sh\necho ran >> /var/lib/perigee/ran\n\
                         ip -o -4 addr show dev eth0 > /var/lib/perigee/address\nsleep 1000 &\n";

fn definition() -> Definition {
    let mut definition = Definition::default_demo(LabId::random(), RTT_MS);
    definition.rent.boot_s = 0;
    definition
}

fn new(rental: &str, user_data: &str) -> Value {
    let new = NewInstance {
        rental: rental.to_owned(),
        cluster: CLUSTER.to_owned(),
        kind: "lab.small".to_owned(),
        zone: "cloud".to_owned(),
        spot: false,
        max_per_hour_micros: None,
        kvm: false,
        image: String::new(),
        disk_bytes: 1 << 30,
        pool: None,
        user_data: user_data.to_owned(),
    };
    serde_json::to_value(new).expect("JSON")
}

async fn ask(lab: &Lab, verb: Verb, asked: Value) -> Value {
    let (answer, done) = answer(lab, verb, &asked.to_string()).await;
    assert!(done, "{verb:?} {asked}: {answer}");
    answer
}

async fn refused(lab: &Lab, verb: Verb, asked: Value) -> (String, String) {
    let (answer, done) = answer(lab, verb, &asked.to_string()).await;
    assert!(!done, "{verb:?} {asked}: {answer}");
    let word = |name: &str| answer["error"][name].as_str().expect("a word").to_owned();
    (word("kind"), word("message"))
}

async fn create(lab: &Lab, rental: &str, user_data: &str) -> Instance {
    let answer = ask(lab, Verb::Create, new(rental, user_data)).await;
    serde_json::from_value(answer["instance"].clone()).expect("an instance")
}

async fn list(lab: &Lab) -> Vec<Instance> {
    let answer = ask(lab, Verb::List, json!({"cluster": CLUSTER})).await;
    serde_json::from_value(answer["instances"].clone()).expect("instances")
}

async fn state(lab: &Lab, id: &str) -> InstanceState {
    list(lab).await.iter().find(|i| i.id == id).expect("it is listed").state
}

async fn until_state(lab: &Lab, id: &str, wanted: InstanceState) {
    let end = tokio::time::Instant::now() + DEADLINE;
    while state(lab, id).await != wanted {
        assert!(tokio::time::Instant::now() < end, "waited for {id} to be {wanted:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn root(lab: &Lab, id: &str) -> PathBuf {
    lab.dir().join("rented").join(id)
}

/// What the instance has at `/var/lib/perigee`.
fn own(lab: &Lab, id: &str) -> PathBuf {
    root(lab, id).join("machine/var/lib/perigee")
}

fn has_namespace(lab: &Lab, id: &str) -> bool {
    PathBuf::from("/run/netns").join(lab.definition.rented_namespace(id)).exists()
}

/// Whether a process runs whose environment has the directory of the instance.
fn has_processes(lab: &Lab, id: &str) -> bool {
    let root = root(lab, id).to_string_lossy().into_owned();
    let entries = std::fs::read_dir("/proc").expect("/proc").flatten();
    let environments = entries.map(|e| std::fs::read(e.path().join("environ")).unwrap_or_default());
    environments.into_iter().any(|text| String::from_utf8_lossy(&text).contains(&root))
}

#[tokio::test]
async fn a_rented_host_runs_what_it_was_given_once_and_nothing_of_it_stays() {
    let bench = Bench::new();
    let lab = bench.up_as(definition()).await;
    let made = create(&lab, "r-1", USER_DATA).await;
    assert_eq!(made.rental.as_deref(), Some("r-1"));
    // The answer was lost, and the caller asks again.
    assert_eq!(create(&lab, "r-1", USER_DATA).await.id, made.id);
    until_state(&lab, &made.id, InstanceState::Running).await;
    let read = |name: &str| std::fs::read_to_string(own(&lab, &made.id).join(name));
    until("the user-data", || read("address").is_ok_and(|text| text.ends_with('\n'))).await;
    assert_eq!(read("ran").expect("it ran"), "ran\n", "twice asked for, and run once");
    let address: Ipv4Addr = made.address.expect("an address").parse().expect("an address");
    assert!(read("address").expect("read").contains(&format!(" {address}/24 ")));
    assert!(round_trip_to(&lab, "cloud1", address) < DEADLINE, "its site answers");
    assert!(round_trip_to(&lab, "home1", address) >= WAN_MIN, "over the WAN");
    assert!(list(&lab).await.iter().all(|i| i.started_unix_s.is_some()));
    let of_another = ask(&lab, Verb::List, json!({"cluster": "cluster-2"})).await;
    assert_eq!(of_another["instances"], json!([]));

    assert!(has_namespace(&lab, &made.id) && has_processes(&lab, &made.id));
    ask(&lab, Verb::End, json!({"instance": made.id})).await;
    ask(&lab, Verb::End, json!({"instance": made.id})).await;
    ask(&lab, Verb::End, json!({"instance": "i-00000000"})).await;
    assert_eq!(state(&lab, &made.id).await, InstanceState::Gone);
    assert_eq!(list(&lab).await[0].address, None);
    assert!(!has_namespace(&lab, &made.id) && !has_processes(&lab, &made.id));
    assert!(!root(&lab, &made.id).exists());
    assert_eq!(create(&lab, "r-1", USER_DATA).await.state, InstanceState::Gone, "no second one");

    // The next one has its address, and goes with the lab whose supervisor is gone.
    let next = create(&lab, "r-2", USER_DATA).await;
    assert_eq!(next.address, Some(address.to_string()));
    until_state(&lab, &next.id, InstanceState::Running).await;
    let text = std::fs::read_to_string(lab.dir().join("supervisor.json")).expect("a process");
    let json: Value = serde_json::from_str(&text).expect("JSON");
    kill(i32::try_from(json["pid"].as_i64().expect("a pid")).expect("a pid"));
    bench.down(&lab.definition.id).await;
}

#[tokio::test]
async fn the_disk_of_a_pool_is_kept_and_the_next_instance_has_one_made_of_it() {
    const WRITES: &str = "#!/bin/sh\necho kept > /var/lib/perigee/pool/file\nsleep 1000 &\n";
    let bench = Bench::new();
    let lab = bench.up_as(definition()).await;
    let with_pool = async |rental: &str, snapshot: Value, user_data: &str| {
        let mut new = new(rental, user_data);
        new["pool"] = json!({"bytes": 1_u64 << 30, "snapshot": snapshot});
        let answer = ask(&lab, Verb::Create, new).await;
        serde_json::from_value::<Instance>(answer["instance"].clone()).expect("an instance")
    };
    let disk = |id: &str| std::fs::read_to_string(root(&lab, id).join("disk/file"));
    let first = with_pool("r-1", Value::Null, WRITES).await;
    until("the user-data", || disk(&first.id).is_ok_and(|text| text.ends_with('\n'))).await;
    let of_first = json!({"rental": "r-1", "cluster": CLUSTER, "instance": first.id});
    let taken = ask(&lab, Verb::Snapshot, of_first.clone()).await;
    assert_eq!(ask(&lab, Verb::Snapshot, of_first).await, taken, "asked twice");
    assert_eq!(taken["snapshot"]["state"], "complete", "{taken}");
    ask(&lab, Verb::End, json!({"instance": first.id})).await;

    let second = with_pool("r-2", taken["snapshot"]["id"].clone(), USER_DATA).await;
    assert_eq!(disk(&second.id).expect("it is there"), "kept\n");
    let listed = ask(&lab, Verb::Snapshots, json!({"cluster": CLUSTER})).await;
    assert_eq!(listed["snapshots"][0]["rental"], "r-1", "{listed}");
    let of_second = json!({"rental": "r-3", "cluster": CLUSTER, "instance": "i-00000000"});
    assert_eq!(refused(&lab, Verb::Snapshot, of_second).await.0, "refused");
    let id = json!({"snapshot": taken["snapshot"]["id"]});
    ask(&lab, Verb::DeleteSnapshot, id.clone()).await;
    ask(&lab, Verb::DeleteSnapshot, id).await;
    let listed = ask(&lab, Verb::Snapshots, json!({"cluster": CLUSTER})).await;
    assert_eq!(listed["snapshots"], json!([]));
    bench.down(&lab.definition.id).await;
}

#[tokio::test]
async fn an_instance_whose_maker_was_killed_is_made_by_who_asks_again() {
    let bench = Bench::new();
    let lab = bench.up_as(definition()).await;
    let made = create(&lab, "r-1", USER_DATA).await;
    until("the user-data", || own(&lab, &made.id).join("ran").exists()).await;
    // As if it had been killed after the namespace was made, and before the machine was recorded.
    let path = lab.dir().join(format!("rented/{}.json", made.id));
    let text = std::fs::read_to_string(&path).expect("a record");
    let mut record: Value = serde_json::from_str(&text).expect("JSON");
    (record["machine"], record["state"]) = (Value::Null, json!("pending"));
    std::fs::write(&path, record.to_string()).expect("written");
    std::fs::remove_file(own(&lab, &made.id).join("ran")).expect("it had run");
    assert_eq!(create(&lab, "r-1", USER_DATA).await.id, made.id);
    until("the user-data", || own(&lab, &made.id).join("ran").exists()).await;
    bench.down(&lab.definition.id).await;
}

#[tokio::test]
async fn a_rented_host_hears_that_it_is_taken_back_and_is_gone_then() {
    let bench = Bench::new();
    let lab = bench.up_as(definition()).await;
    let one = create(&lab, "r-1", USER_DATA).await;
    // The second one powers itself off, as at the end of a lease. This machine stays on.
    let two = create(&lab, "r-2", "#!/bin/sh\nsystemctl is-system-running && systemctl poweroff\n");
    let two = two.await;
    until_state(&lab, &two.id, InstanceState::Gone).await;
    until("the end of its namespace", || !has_namespace(&lab, &two.id)).await;

    until_state(&lab, &one.id, InstanceState::Running).await;
    let end = tokio::time::Instant::now() + DEADLINE;
    while metadata(&lab, &one.id).is_none() {
        assert!(tokio::time::Instant::now() < end, "waited for the metadata address");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let action = metadata(&lab, &one.id).expect("an answer");
    assert!(action.starts_with("HTTP/1.1 404 "), "{action}");
    let none = ask(&lab, Verb::Notices, json!({"cluster": CLUSTER})).await;
    assert_eq!(none["notices"], json!([]));
    let notice = root(&lab, &one.id).join("notice");
    std::fs::write(&notice, "4102444800\n").expect("a notice");
    let told = ask(&lab, Verb::Notices, json!({"cluster": CLUSTER})).await;
    let expected = json!([{"instance": one.id, "ends_unix_s": 4_102_444_800_u64}]);
    assert_eq!(told["notices"], expected);
    let action = metadata(&lab, &one.id).expect("an answer");
    assert!(action.contains("\"action\":\"terminate\""), "{action}");
    assert!(action.contains("\"time\":\"2100-01-01T00:00:00Z\""), "{action}");
    let now_unix_s = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    std::fs::write(&notice, now_unix_s.to_string()).expect("a notice");
    until_state(&lab, &one.id, InstanceState::Gone).await;
    until("the end of its processes", || !has_processes(&lab, &one.id)).await;
    bench.down(&lab.definition.id).await;
}

#[tokio::test]
async fn what_a_lab_does_not_rent_out_is_refused_with_the_reason() {
    let bench = Bench::new();
    let mut definition = definition();
    definition.rent.quota = 1;
    definition.rent.no_capacity = vec!["lab.large".to_owned()];
    definition.rent.kinds.iter_mut().for_each(|kind| kind.kvm = false);
    let lab = bench.up_as(definition).await;
    let offers = ask(&lab, Verb::Offers, json!({})).await;
    assert_eq!(offers["offers"].as_array().expect("a list").len(), 8, "{offers}");
    let with = |field: &str, value: Value| {
        let mut new = new("r-9", "#!/bin/sh\n: a secret\n");
        new[field] = value;
        new
    };
    for (asked, kind, word) in [
        (with("kind", json!("lab.large")), "no-capacity", "lab.large"),
        (with("kind", json!("lab.huge")), "refused", "lab.huge"),
        (with("zone", json!("moon")), "refused", "moon"),
        (with("kvm", json!(true)), "refused", "KVM"),
        (with("spot", json!(7)), "refused", "column"),
    ] {
        let (of_kind, message) = refused(&lab, Verb::Create, asked).await;
        assert_eq!(of_kind, kind, "{message}");
        assert!(message.contains(word) && !message.contains("secret"), "{message}");
    }
    std::fs::write(lab.dir().join("rented/refuse"), "throttled come back later").expect("written");
    let told = refused(&lab, Verb::Create, new("r-1", USER_DATA)).await;
    assert_eq!(told, ("throttled".to_owned(), "come back later".to_owned()));
    std::fs::remove_file(lab.dir().join("rented/refuse")).expect("removed");
    create(&lab, "r-1", USER_DATA).await;
    let (kind, _) = refused(&lab, Verb::Create, new("r-2", USER_DATA)).await;
    assert_eq!((kind.as_str(), list(&lab).await.len()), ("quota", 1));
    let (kind, _) = refused(&lab, Verb::End, json!({"instance": "i-/../.."})).await;
    assert_eq!(kind, "refused");
    bench.down(&lab.definition.id).await;
}

/// What an instance hears of its end; `None` while nobody answers.
fn metadata(lab: &Lab, id: &str) -> Option<String> {
    let namespace = format!("/run/netns/{}", lab.definition.rented_namespace(id));
    let ask = |request: &str| -> std::io::Result<String> {
        let address = SocketAddr::from((Ipv4Addr::new(169, 254, 169, 254), 80));
        let mut stream = TcpStream::connect_timeout(&address, DEADLINE)?;
        let head = format!("{request}\r\nhost: metadata\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    let hear = move || {
        let namespace = std::fs::File::open(namespace).expect("a namespace");
        nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET).expect("setns");
        let ttl = "x-aws-ec2-metadata-token-ttl-seconds: 60";
        let answer = ask(&format!("PUT /latest/api/token HTTP/1.1\r\n{ttl}\r\ncontent-length: 0"));
        let answer = answer.ok()?;
        let token = answer.rsplit("\r\n\r\n").next().expect("a body");
        let path = "GET /latest/meta-data/spot/instance-action HTTP/1.1";
        let unknown = ask(path).expect("an answer");
        assert!(unknown.starts_with("HTTP/1.1 401 "), "without a token: {unknown}");
        Some(ask(&format!("{path}\r\nx-aws-ec2-metadata-token: {token}")).expect("an answer"))
    };
    std::thread::spawn(hear).join().expect("an answer")
}
