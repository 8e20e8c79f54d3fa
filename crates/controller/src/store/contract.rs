//! The contract of every store, as tests. `Fixture` makes a store and can open the same state a second time.

use std::time::Duration;

use serde_json::json;

use super::{Change, SqliteStore, Store, Swap, Write};

trait Fixture {
    fn open(&self) -> Box<dyn Store>;
}

struct Sqlite(tempfile::TempDir);

impl Fixture for Sqlite {
    fn open(&self) -> Box<dyn Store> {
        Box::new(SqliteStore::open(&self.0.path().join("state.db")).expect("open"))
    }
}

/// Makes one test for each rule and each store.
macro_rules! contract {
    ($module:ident, $fixture:expr, [$($rule:ident),* $(,)?]) => {
        mod $module {
            $(#[tokio::test]
            async fn $rule() {
                super::$rule(&$fixture).await;
            })*
        }
    };
}

contract!(
    sqlite,
    super::Sqlite(tempfile::tempdir().expect("tempdir")),
    [
        what_was_put_is_read,
        a_key_is_made_only_once,
        two_keys_are_written_at_once_or_not_at_all,
        a_write_with_an_old_revision_is_refused,
        a_deleted_key_comes_back_with_a_new_revision,
        a_list_is_in_order_and_stays_in_its_prefix,
        a_list_goes_on_after_a_key_and_ends_at_its_limit,
        a_watcher_sees_its_prefix_in_order,
        a_watcher_of_a_key_sees_no_longer_keys,
        a_slow_watcher_is_told_that_it_missed_changes,
        one_of_many_racing_writers_wins,
        state_is_there_after_opening_again,
    ]
);

async fn put(store: &dyn Store, key: &str, value: i32) -> super::Revision {
    let old = store.get(key).await.expect("get").map(|e| e.revision);
    match store.compare_and_swap(key, old, Write::Put(json!(value))).await.expect("swap") {
        Swap::Done(revision) => revision,
        Swap::Differs => panic!("nobody else writes {key}"),
    }
}

async fn a_list_goes_on_after_a_key_and_ends_at_its_limit(fixture: &impl Fixture) {
    let store = fixture.open();
    for (value, key) in ["a", "l/1", "l/2", "l/3", "l/4", "m"].iter().zip(0..).map(|(k, v)| (v, k))
    {
        put(&*store, key, value).await;
    }
    let keys = async |after: &str, limit| {
        let entries = store.list_after("l/", after, limit).await.expect("list");
        entries.into_iter().map(|entry| entry.key).collect::<Vec<_>>()
    };
    assert_eq!(keys("", 2).await, ["l/1", "l/2"]);
    assert_eq!(keys("l/2", 2).await, ["l/3", "l/4"]);
    assert_eq!(keys("l/1x", 9).await, ["l/2", "l/3", "l/4"]);
    assert!(keys("l/4", 9).await.is_empty());
}

async fn what_was_put_is_read(fixture: &impl Fixture) {
    let store = fixture.open();
    assert_eq!(store.get("a").await.expect("get"), None);
    let revision = put(&*store, "a", 1).await;
    let entry = store.get("a").await.expect("get").expect("there");
    assert_eq!((entry.value, entry.revision), (json!(1), revision));
}

async fn a_key_is_made_only_once(fixture: &impl Fixture) {
    let store = fixture.open();
    put(&*store, "a", 1).await;
    let again = store.compare_and_swap("a", None, Write::Put(json!(2))).await.expect("swap");
    assert_eq!(again, Swap::Differs);
    assert_eq!(store.get("a").await.expect("get").expect("there").value, json!(1));
}

async fn two_keys_are_written_at_once_or_not_at_all(fixture: &impl Fixture) {
    let store = fixture.open();
    let mut watch = store.watch("b");
    put(&*store, "b", 0).await;
    let made = store.create_with("a", json!(1), ("b", json!(1))).await.expect("create");
    assert!(matches!(made, Swap::Done(_)));
    let again = store.create_with("a", json!(2), ("b", json!(2))).await.expect("create");
    assert_eq!(again, Swap::Differs);
    for key in ["a", "b"] {
        assert_eq!(store.get(key).await.expect("get").expect("there").value, json!(1), "{key}");
    }
    let mut seen = Vec::new();
    for _ in 0..2 {
        match watch.next().await {
            Some(Change::Put(entry)) => seen.push(entry.value),
            other => panic!("not a write: {other:?}"),
        }
    }
    assert_eq!(seen, [json!(0), json!(1)], "a watcher sees the key beside, too");
}

async fn a_write_with_an_old_revision_is_refused(fixture: &impl Fixture) {
    let store = fixture.open();
    let old = put(&*store, "a", 1).await;
    put(&*store, "a", 2).await;
    for write in [Write::Put(json!(3)), Write::Delete] {
        let swap = store.compare_and_swap("a", Some(old), write).await.expect("swap");
        assert_eq!(swap, Swap::Differs);
    }
    assert_eq!(store.get("a").await.expect("get").expect("there").value, json!(2));
}

async fn a_deleted_key_comes_back_with_a_new_revision(fixture: &impl Fixture) {
    let store = fixture.open();
    let first = put(&*store, "a", 1).await;
    let deleted = store.compare_and_swap("a", Some(first), Write::Delete).await.expect("swap");
    assert!(matches!(deleted, Swap::Done(_)));
    assert_eq!(store.get("a").await.expect("get"), None);
    assert!(put(&*store, "a", 1).await > first);
}

async fn a_list_is_in_order_and_stays_in_its_prefix(fixture: &impl Fixture) {
    let store = fixture.open();
    for key in ["a/2", "b/1", "a/1", "a", "a0", "a/\u{fc}"] {
        put(&*store, key, 0).await;
    }
    let keys: Vec<_> = store.list("a/").await.expect("list").into_iter().map(|e| e.key).collect();
    assert_eq!(keys, ["a/1", "a/2", "a/\u{fc}"]);
}

async fn a_watcher_sees_its_prefix_in_order(fixture: &impl Fixture) {
    let store = fixture.open();
    let mut watch = store.watch("a/");
    let first = put(&*store, "a/1", 1).await;
    put(&*store, "b/1", 1).await;
    let second = put(&*store, "a/1", 2).await;
    let deleted = store.compare_and_swap("a/1", Some(second), Write::Delete).await.expect("swap");
    assert!(matches!(deleted, Swap::Done(_)));
    let mut seen = Vec::new();
    for _ in 0..3 {
        let change = tokio::time::timeout(Duration::from_secs(5), watch.next())
            .await
            .expect("waited 5 s for a change")
            .expect("the store is there");
        seen.push(match change {
            Change::Put(entry) => Some((entry.value, entry.revision)),
            Change::Deleted(_) => None,
            Change::Missed => panic!("3 changes are not too many"),
        });
    }
    assert_eq!(seen, [Some((json!(1), first)), Some((json!(2), second)), None]);
}

async fn a_watcher_of_a_key_sees_no_longer_keys(fixture: &impl Fixture) {
    let store = fixture.open();
    let mut watch = store.watch("a/web").of_key("a/web");
    let longer = put(&*store, "a/web2", 1).await;
    let deleted = store.compare_and_swap("a/web2", Some(longer), Write::Delete).await;
    assert!(matches!(deleted.expect("swap"), Swap::Done(_)));
    put(&*store, "a/web", 2).await;
    match watch.next().await {
        Some(Change::Put(entry)) => assert_eq!((&*entry.key, entry.value), ("a/web", json!(2))),
        other => panic!("not its write: {other:?}"),
    }
}

async fn a_slow_watcher_is_told_that_it_missed_changes(fixture: &impl Fixture) {
    let store = fixture.open();
    let mut watch = store.watch("a");
    for n in 0..1100 {
        put(&*store, "a", n).await;
    }
    assert_eq!(watch.next().await, Some(Change::Missed));
}

async fn one_of_many_racing_writers_wins(fixture: &impl Fixture) {
    let store = fixture.open();
    let revision = put(&*store, "a", 0).await;
    let swaps = futures_util::future::join_all(
        (1..=8).map(|n| store.compare_and_swap("a", Some(revision), Write::Put(json!(n)))),
    )
    .await;
    let won = swaps.into_iter().filter(|s| matches!(s, Ok(Swap::Done(_)))).count();
    assert_eq!(won, 1);
}

async fn state_is_there_after_opening_again(fixture: &impl Fixture) {
    let revision = put(&*fixture.open(), "a", 7).await;
    let entry = fixture.open().get("a").await.expect("get").expect("there");
    assert_eq!((entry.value, entry.revision), (json!(7), revision));
}
