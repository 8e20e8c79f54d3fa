//! What clients boot, and what they may log in to.

use std::os::unix::fs::PermissionsExt;
use std::time::Instant;

use perigee_model::client::{Binding, Chap, Lifetime, MacAddress, NewClient, Over, Service};
use perigee_model::volume::Snapshot;
use perigee_model::{ClientName, Problem, ProblemKind};

use super::*;

fn client_name(text: &str) -> ClientName {
    ClientName::new(text).unwrap()
}

fn mac(number: u8) -> MacAddress {
    format!("52:54:00:00:00:{number:02x}").parse().unwrap()
}

fn new_client(name: &str, card: Option<u8>) -> NewClient {
    let (initiator, chap, target_chap) = (None, None, None);
    NewClient { name: client_name(name), mac: card.map(mac), initiator, chap, target_chap }
}

fn clone_of(image: &str, lifetime: Lifetime) -> Service {
    Service::Image { image: image_name(image), lifetime }
}

async fn bind(pool: &Arc<Pool>, client: &str, service: Service) {
    let binding = Binding { service, over: Over::Iscsi };
    pool.bind_client(&client_name(client), Some(binding)).await.unwrap();
}

async fn boot(pool: &Arc<Pool>, card: u8) -> Result<String, Problem> {
    pool.boot(&mac(card)).await.map(|boot| boot.volume.to_string())
}

async fn volumes(pool: &Arc<Pool>) -> Vec<String> {
    let (volumes, _) = pool.names().await.unwrap();
    volumes.iter().map(ToString::to_string).collect()
}

async fn granted(pool: &Arc<Pool>, client: &str) -> Vec<String> {
    let client = pool.client(&client_name(client)).await.unwrap();
    let grant = pool.grant(&client.initiator).await.unwrap().unwrap();
    grant.volumes.iter().map(ToString::to_string).collect()
}

/// A pool with images `a` and `b` of the source volume `v`, and a client `c` with card 1.
async fn pool_with_client(dir: &Path) -> Arc<Pool> {
    let pool = open_real(dir).await;
    let device = empty(&pool, "v", 4 * 4096).await;
    for (byte, image) in [(1, "a"), (2, "b")] {
        device.write(0, bytes(byte, 4 * 4096), true).await.unwrap();
        pool.snapshot(&volume_name("v"), Snapshot { image: image_name(image) }).await.unwrap();
    }
    pool.add_client(new_client("c", Some(1))).await.unwrap();
    pool
}

#[tokio::test]
async fn a_clone_that_is_kept_is_the_same_at_each_boot_and_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let pool = pool_with_client(dir.path()).await;
    bind(&pool, "c", clone_of("a", Lifetime::Persistent)).await;
    assert_eq!(volumes(&pool).await, ["v"], "made at the first boot");
    assert_eq!(boot(&pool, 1).await.unwrap(), "c.a");
    let device = session(&pool, "c.a").await;
    device.write(0, bytes(7, 4096), true).await.unwrap();
    drop((device, pool));

    let pool = open_real(dir.path()).await;
    assert_eq!(boot(&pool, 1).await.unwrap(), "c.a");
    let expected = [vec![7; 4096], vec![1; 3 * 4096]].concat();
    assert_eq!(all(&session(&pool, "c.a").await).await, expected);
    let client = pool.client(&client_name("c")).await.unwrap();
    assert_eq!(client.boots, 2);
    pool.remove_client(&client_name("c")).await.unwrap();
    assert_eq!(volumes(&pool).await, ["c.a", "v"], "it may have what nobody else has");
}

#[tokio::test]
async fn a_fresh_clone_is_made_at_each_boot_and_the_one_before_goes_when_nobody_uses_it() {
    let dir = tempfile::tempdir().unwrap();
    let pool = pool_with_client(dir.path()).await;
    bind(&pool, "c", clone_of("a", Lifetime::Ephemeral)).await;
    assert_eq!(boot(&pool, 1).await.unwrap(), "c.a.1");
    let device = session(&pool, "c.a.1").await;
    device.write(0, bytes(7, 4096), false).await.unwrap();
    assert_eq!(boot(&pool, 1).await.unwrap(), "c.a.2", "the first one is in use");
    assert_eq!(volumes(&pool).await, ["c.a.1", "c.a.2", "v"]);
    assert_eq!(all(&session(&pool, "c.a.2").await).await, vec![1; 4 * 4096]);
    drop(device);
    pool.drop_spent_clones().await;
    assert_eq!(volumes(&pool).await, ["c.a.2", "v"]);
    pool.remove_client(&client_name("c")).await.unwrap();
    assert_eq!(volumes(&pool).await, ["c.a.2", "v"], "the machine may still run from it");
    pool.drop_clones_spent_at(Instant::now() + Duration::from_secs(600)).await;
    assert_eq!(volumes(&pool).await, ["v"]);
}

#[tokio::test]
async fn a_restart_does_not_sweep_a_running_clone_because_somebody_asked_for_the_next_boot() {
    let dir = tempfile::tempdir().unwrap();
    let pool = pool_with_client(dir.path()).await;
    bind(&pool, "c", clone_of("a", Lifetime::Ephemeral)).await;
    assert_eq!(boot(&pool, 1).await.unwrap(), "c.a.1");
    let running = session(&pool, "c.a.1").await;
    assert_eq!(boot(&pool, 1).await.unwrap(), "c.a.2", "anybody can ask");
    drop((running, pool));

    let pool = open_real(dir.path()).await;
    pool.drop_spent_clones().await;
    assert_eq!(volumes(&pool).await, ["c.a.1", "c.a.2", "v"], "its machine comes back to it");
    assert_eq!(granted(&pool, "c").await, ["c.a.2", "c.a.1"], "and is let in");
    drop(session(&pool, "c.a.2").await);
    assert_eq!(granted(&pool, "c").await, ["c.a.2"]);
    pool.drop_spent_clones().await;
    assert_eq!(volumes(&pool).await, ["c.a.2", "v"], "it has booted from the next one");
}

#[tokio::test]
async fn a_restart_does_not_sweep_the_running_clone_of_a_client_that_was_removed() {
    let dir = tempfile::tempdir().unwrap();
    let pool = pool_with_client(dir.path()).await;
    bind(&pool, "c", clone_of("a", Lifetime::Ephemeral)).await;
    assert_eq!(boot(&pool, 1).await.unwrap(), "c.a.1");
    let running = session(&pool, "c.a.1").await;
    pool.remove_client(&client_name("c")).await.unwrap();
    drop((running, pool));

    let pool = open_real(dir.path()).await;
    pool.drop_spent_clones().await;
    assert_eq!(volumes(&pool).await, ["c.a.1", "v"]);
    pool.add_client(new_client("c", Some(1))).await.unwrap();
    pool.drop_clones_spent_at(Instant::now() + Duration::from_secs(3600)).await;
    assert_eq!(volumes(&pool).await, ["c.a.1", "v"], "the client is back and runs from nothing");
}

#[tokio::test]
async fn a_pool_stays_closed_to_strangers_after_its_last_client_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(dir.path()).await;
    assert!(!pool.has_known_clients().await.unwrap());
    pool.add_client(new_client("c", Some(1))).await.unwrap();
    pool.remove_client(&client_name("c")).await.unwrap();
    assert!(pool.has_known_clients().await.unwrap());
    drop(pool);
    assert!(open_real(dir.path()).await.has_known_clients().await.unwrap());
}

#[tokio::test]
async fn a_fresh_clone_that_nobody_used_is_handed_out_again() {
    let dir = tempfile::tempdir().unwrap();
    let pool = pool_with_client(dir.path()).await;
    bind(&pool, "c", clone_of("a", Lifetime::Ephemeral)).await;
    for _ in 0..3 {
        assert_eq!(boot(&pool, 1).await.unwrap(), "c.a.1");
    }
    session(&pool, "c.a.1").await.write(0, bytes(7, 1), false).await.unwrap();
    assert_eq!(boot(&pool, 1).await.unwrap(), "c.a.4", "what was written is no start");
    bind(&pool, "c", clone_of("b", Lifetime::Ephemeral)).await;
    assert_eq!(boot(&pool, 1).await.unwrap(), "c.b.5", "another image");
    assert_eq!(volumes(&pool).await, ["c.a.1", "c.b.5", "v"], "the machine may run from the first");
    drop(session(&pool, "c.b.5").await);
    pool.drop_spent_clones().await;
    assert_eq!(volumes(&pool).await, ["c.b.5", "v"]);
}

#[tokio::test]
async fn what_a_client_is_bound_to_counts_from_its_next_boot_on() {
    let dir = tempfile::tempdir().unwrap();
    let pool = pool_with_client(dir.path()).await;
    bind(&pool, "c", clone_of("a", Lifetime::Persistent)).await;
    assert_eq!(granted(&pool, "c").await, [""; 0], "it has not booted yet");
    boot(&pool, 1).await.unwrap();
    bind(&pool, "c", Service::Volume(volume_name("v"))).await;
    assert_eq!(granted(&pool, "c").await, ["c.a"]);
    assert_eq!(boot(&pool, 1).await.unwrap(), "v");
    assert_eq!(granted(&pool, "c").await, ["v"]);
    pool.bind_client(&client_name("c"), None).await.unwrap();
    assert_eq!(granted(&pool, "c").await, ["v"], "it runs on");
    assert_eq!(boot(&pool, 1).await.unwrap_err().kind, ProblemKind::Conflict);
}

#[tokio::test]
async fn who_is_not_known_gets_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let pool = pool_with_client(dir.path()).await;
    let refused = boot(&pool, 9).await.unwrap_err();
    assert_eq!(refused.kind, ProblemKind::NotFound);
    assert!(refused.to_string().contains("52:54:00:00:00:09"), "{refused}");
    let stranger = "iqn.1993-08.org.debian:01:stranger".parse().unwrap();
    assert_eq!(pool.grant(&stranger).await.unwrap(), None);
}

#[tokio::test]
async fn a_login_without_a_card_to_boot_over_is_a_boot() {
    let dir = tempfile::tempdir().unwrap();
    let pool = pool_with_client(dir.path()).await;
    pool.add_client(new_client("d", None)).await.unwrap();
    assert_eq!(granted(&pool, "d").await, [""; 0], "it is not bound");
    let fresh = Binding { service: clone_of("a", Lifetime::Ephemeral), over: Over::Iscsi };
    let refused = pool.bind_client(&client_name("d"), Some(fresh)).await.unwrap_err();
    assert!(refused.to_string().contains("--mac"), "{refused}");
    bind(&pool, "d", clone_of("a", Lifetime::Persistent)).await;
    assert_eq!(granted(&pool, "d").await, ["d.a"]);
    let device = session(&pool, "d.a").await;
    bind(&pool, "d", clone_of("b", Lifetime::Persistent)).await;
    assert_eq!(granted(&pool, "d").await, ["d.a", "d.b"], "it uses the first one still");
    drop(device);
    assert_eq!(granted(&pool, "d").await, ["d.b"]);
}

#[tokio::test]
async fn another_s_volume_of_the_clone_s_name_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let pool = pool_with_client(dir.path()).await;
    empty(&pool, "c.a", 4096).await;
    bind(&pool, "c", clone_of("a", Lifetime::Persistent)).await;
    let refused = boot(&pool, 1).await.unwrap_err();
    assert!(refused.kind == ProblemKind::Conflict && refused.to_string().contains("c.a"));
}

#[tokio::test]
async fn two_clients_share_neither_name_nor_card_nor_initiator() {
    let dir = tempfile::tempdir().unwrap();
    let pool = pool_with_client(dir.path()).await;
    let same_initiator = NewClient {
        initiator: Some("iqn.2026-11.org.perigee.client:c".parse().unwrap()),
        ..new_client("d", Some(2))
    };
    for taken in [new_client("c", Some(2)), new_client("d", Some(1)), same_initiator] {
        let refused = pool.add_client(taken).await.unwrap_err();
        assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    }
    pool.remove_client(&client_name("c")).await.unwrap();
    pool.add_client(new_client("d", Some(1))).await.unwrap();
}

#[tokio::test]
async fn secrets_are_kept_closed_to_others() {
    let dir = tempfile::tempdir().unwrap();
    let pool = pool_with_client(dir.path()).await;
    let chap = |user, secret: &str| {
        Some(Chap { user: client_name(user), secret: secret.parse().unwrap() })
    };
    let with_secrets = NewClient {
        chap: chap("d", "correct-horse"),
        target_chap: chap("server", "battery-staple"),
        ..new_client("d", None)
    };
    let same = NewClient { target_chap: chap("server", "correct-horse"), ..with_secrets.clone() };
    assert_eq!(pool.add_client(same).await.unwrap_err().kind, ProblemKind::Invalid);
    let added = pool.add_client(with_secrets.clone()).await.unwrap();
    let grant = pool.grant(&added.initiator).await.unwrap().unwrap();
    assert_eq!((grant.chap, grant.target_chap), (with_secrets.chap, with_secrets.target_chap));
    for file in ["catalog.sqlite", "catalog.sqlite-wal"] {
        let mode = std::fs::metadata(dir.path().join(file)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
    }
}
