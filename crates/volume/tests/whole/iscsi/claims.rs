//! Claims on a volume: who has reserved it keeps it, also when the server is killed.

use perigee_model::volume::{EpochChange, EpochIssued, VolumeInfo};

use perigee_http::{Authority, PeerIdentity};

use super::wire::Initiator;
use crate::server::{MIB, Server};

const OUT: u8 = 0xa0;
const REGISTER: u8 = 0;
const RESERVE: u8 = 1;
const WRITE_EXCLUSIVE: u8 = 1;
const GOOD: (u8, u8) = (0, 0);
const CONFLICT: u8 = 0x18;

/// A PERSISTENT RESERVE OUT whose registration is to be kept.
fn claim(initiator: &mut Initiator, action: u8, kind: u8, key: u64, new_key: u64) -> (u8, u8) {
    let mut list = [key.to_be_bytes(), new_key.to_be_bytes(), [0; 8]].concat();
    list[20] = u8::from(action == REGISTER);
    initiator.run(OUT, 24, &[0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0], &list)
}

fn write(initiator: &mut Initiator) -> (u8, u8) {
    initiator.run(OUT, 512, &[0x2a, 0, 0, 0, 0, 8, 0, 0, 1, 0], &[7; 512])
}

/// The same port each time: a reservation belongs to a name and an ISID.
fn port(server: &Server, name: &str) -> Initiator {
    let mut initiator = Initiator::connect(server);
    initiator.isid = Some([0x80, 0, 0, 0, 0, 1]);
    assert_eq!(initiator.log_in(name, "data", &[]), 0, "the login");
    initiator.greet();
    initiator
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reservation_outlives_the_server_and_not_its_volume() {
    let (owner, other) = ("iqn.2026-11.test:owner", "iqn.2026-11.test:other");
    let mut server = Server::start().await;
    server.create("data", 8 * MIB).await;
    let mut first = port(&server, owner);
    assert_eq!(claim(&mut first, REGISTER, 0, 0, 77), GOOD);
    assert_eq!(claim(&mut first, RESERVE, WRITE_EXCLUSIVE, 77, 0), GOOD);
    assert_eq!(write(&mut port(&server, other)).0, CONFLICT);
    drop(first);

    server.kill();
    server.start_process().await;
    assert_eq!(write(&mut port(&server, other)).0, CONFLICT);
    let mut first = port(&server, owner);
    assert_eq!(write(&mut first), GOOD);
    // Without its registration the reservation goes, and nothing is kept.
    assert_eq!(claim(&mut first, REGISTER, 0, 77, 0), GOOD);
    assert_eq!(write(&mut port(&server, other)), GOOD);
    drop(first);

    server.kill();
    server.start_process().await;
    let mut second = port(&server, other);
    assert_eq!(claim(&mut second, REGISTER, 0, 0, 5), GOOD);
    assert_eq!(claim(&mut second, RESERVE, WRITE_EXCLUSIVE, 5, 0), GOOD);
    drop(second);
    server.control.delete("/v1/volumes/data").await.expect("a deletion");
    server.create("data", 8 * MIB).await;
    let mut owner = port(&server, owner);
    read_serial(&mut owner);
    assert_eq!(write(&mut owner), GOOD, "it is another volume of that name");
}

/// A machine whose volume has another writer now: nothing that it still sends reaches the disk, and it does not come back.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_of_an_old_epoch_writes_no_more_after_the_epoch_was_raised() {
    const IN: u8 = 0xc0;
    const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 8, 0, 0, 1, 0];
    const DATA_PROTECT: u8 = 7;
    let server = Server::start().await;
    let from = server.create("data", 8 * MIB).await.epoch;
    let mut old = port(&server, "iqn.2026-11.test:old");
    assert_eq!(write(&mut old), GOOD);
    let path = "/v1/volumes/data/epoch";
    let issued: EpochIssued =
        server.control.post(&format!("{path}/issue"), &()).await.expect("an epoch");
    let change = EpochChange { from, to: issued.epoch };
    server.control.post::<VolumeInfo>(path, &change).await.expect("the change");

    let zeros = [0x93, 8, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 1, 0, 0];
    for (what, ended) in [
        ("a write", old.execute(OUT, 512, &[0x2a, 0, 0, 0, 0, 8, 0, 0, 1, 0], &[9; 512])),
        ("zeros", old.execute(OUT, 512, &zeros, &[0; 512])),
    ] {
        assert_eq!((ended.status, ended.key), (2, DATA_PROTECT), "{what}: {ended:?}");
    }
    let read = old.execute(IN, 512, &READ, &[]);
    assert_eq!((read.status, read.data), (0, vec![7; 512]), "what was there before");
    let mut late = Initiator::connect(&server);
    assert_ne!(late.log_in("iqn.2026-11.test:old", "data", &[]), 0, "it does not join the writer");
    drop(old);
    let mut late = Initiator::connect(&server);
    assert_ne!(late.log_in("iqn.2026-11.test:old", "data", &[]), 0, "nor when it was away");
}

/// At a host of a cluster volumes are tenants'. An initiator that nobody has added gets none, whether there are others or not.
#[tokio::test(flavor = "multi_thread")]
async fn an_initiator_that_nobody_has_added_gets_nothing_at_a_host_of_a_cluster() {
    let dir = tempfile::tempdir().expect("a directory");
    let authority = Authority::open(&dir.path().join("authority")).expect("an authority");
    let who = PeerIdentity::Host("home1".parse().expect("a name"));
    let own = authority.credentials(&who, &[[127, 0, 0, 1].into()]).expect("credentials");
    own.save(&dir.path().join("identity")).expect("files");
    let server = Server::start().await;
    server.create("acme~data", 8 * MIB).await;
    let log_in =
        |server: &Server| Initiator::connect(server).log_in("iqn.2026-11.test:x", "acme:data", &[]);
    assert_eq!(log_in(&server), 0, "a server that is in no cluster, and knows no clients");
    let server = server.with_tls(&dir.path().join("identity")).await;
    assert_ne!(log_in(&server), 0);
}

fn read_serial(initiator: &mut Initiator) -> Vec<u8> {
    let outcome = initiator.execute(0x40 | 0x80, 255, &[0x12, 1, 0x80, 0, 255, 0], &[]);
    outcome.data[4..].to_vec()
}

/// Linux' initiator goes on with a session after a break without asking what the unit is: it wrote its old pages into the new volume.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_of_a_deleted_volume_does_not_write_into_the_next_one_of_its_name() {
    let name = "iqn.2026-11.test:old";
    let mut server = Server::start().await;
    server.create("data", 8 * MIB).await;
    let mut old = port(&server, name);
    let serial = read_serial(&mut old);
    assert_eq!(write(&mut old), GOOD);
    drop(old);
    server.kill();
    server.start_process().await;
    let mut old = port(&server, name);
    assert_eq!(write(&mut old), GOOD, "the volume is the same");
    drop(old);

    server.control.delete("/v1/volumes/data").await.expect("nobody uses it");
    server.create("data", 8 * MIB).await;
    let mut again = port(&server, name);
    const NOT_SUPPORTED: (u8, u8) = (2, 5);
    assert_eq!(write(&mut again), NOT_SUPPORTED, "it knows another volume");
    drop(again);
    server.kill();
    server.start_process().await;
    let mut again = port(&server, name);
    assert_eq!(write(&mut again), NOT_SUPPORTED, "also when the server was killed");
    assert_ne!(read_serial(&mut again), serial, "the volume is another one");
    assert_eq!(
        write(&mut again),
        NOT_SUPPORTED,
        "somebody else has asked, and the old pages are still there"
    );
    drop(again);
    let mut again = port(&server, name);
    read_serial(&mut again);
    assert_eq!(write(&mut again), GOOD, "who asks first has a new session");
    drop(again);
    assert_eq!(write(&mut port(&server, name)), GOOD);
    assert_eq!(write(&mut port(&server, "iqn.2026-11.test:new")), GOOD, "it has known none");
}
