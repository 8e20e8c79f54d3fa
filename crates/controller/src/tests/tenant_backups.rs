//! Backups that users of tenants have made: where they may be, who sees them, and what counts in the quota.

use perigee_http::Client;
use perigee_model::backup::{
    Backup, BackupState, BackupTarget, BackupUser, FoundBackup, LookForBackups, NewBackup,
    RestoreBackup, RestoreImageBackup,
};
use perigee_model::backup_key::BackupKey;
use perigee_model::backup_schedule::{BackupSchedule, NewBackupSchedule};
use perigee_model::job::{ClusterImage, ClusterVolume};
use perigee_model::rental::Rental;
use perigee_model::tenant::{Quota, SetBackupKey, Tenant, TenantBackupKey, TenantBackupTargets};
use perigee_model::{BackupName, ImageName, Problem, ProblemKind, VmId};

use super::rentals::rental;
use super::tenants::{Tenants, is_kind, new_volume, tenant, user_name, volume};
use super::wait_for;
use crate::level;
use crate::records::{ImageRecord, image_key};
use crate::storage::backups::{BackupRecord, new_backup};

const TO: &str = "/srv/acme";
/// One place for all hosts.
const STORE: &str = "s3://bucket/acme";

fn at(address: &str) -> BackupTarget {
    BackupTarget { address: address.to_owned(), endpoint: None }
}

fn of(name: &str, to: &str) -> NewBackup {
    let (vm, image, whole, encrypted) = Default::default();
    NewBackup { volume: Some(volume(name)), vm, image, to: at(to), whole, encrypted }
}

impl Tenants {
    /// `acme` has these volumes, and may have backups.
    async fn with_backups(volumes: &[&str]) -> Self {
        let tenants = Self::up().await;
        tenants.allow("acme", &[TO]).await.expect("a target");
        for name in volumes {
            let new = new_volume(name, 1 << 30);
            let _: ClusterVolume = tenants.ann.post("/v1/volumes", &new).await.expect("a volume");
        }
        tenants
    }

    async fn allow(&self, to: &str, targets: &[&str]) -> Result<Tenant, Problem> {
        let targets = targets.iter().map(|target| at(target)).collect();
        let path = format!("/v1/tenants/{to}/backup-targets");
        self.admin.put(&path, &TenantBackupTargets { targets }).await
    }

    async fn ended(&self, backup: Backup) -> Backup {
        let path = format!("/v1/backups/{}", backup.name);
        wait_for("the backup to end", async || {
            let known: Backup = self.admin.get(&path).await.expect("the backup");
            (known.state != BackupState::Shipping).then_some(known)
        })
        .await
    }

    async fn back_up(&self, by: &Client, ask: &NewBackup) -> Backup {
        self.ended(by.post("/v1/backups", ask).await.expect("a backup")).await
    }

    async fn held_bytes(&self) -> u64 {
        let shown: Tenant = self.ann.get("/v1/tenants/acme").await.expect("an operator sees it");
        shown.backup_bytes
    }
}

async fn listed(by: &Client) -> usize {
    by.get::<Vec<Backup>>("/v1/backups").await.expect("a list").len()
}

#[tokio::test]
async fn a_member_makes_restores_and_deletes_backups_that_no_other_tenant_sees() {
    let tenants = Tenants::with_backups(&["data"]).await;
    let done = tenants.back_up(&tenants.amy, &of("data", TO)).await;
    assert_eq!(done.state, BackupState::Completed, "{done:?}");
    let by = BackupUser { tenant: tenant("acme"), user: user_name("amy") };
    assert_eq!(done.by, Some(by));
    let short = done.name.as_str().strip_prefix("acme~").expect("it is acme's");
    let seen = [&tenants.ann, &tenants.amy, &tenants.bob, &tenants.bea, &tenants.admin];
    let mut counts = Vec::new();
    for client in seen {
        counts.push(listed(client).await);
    }
    assert_eq!(counts, [1, 1, 0, 0, 1]);
    let path = format!("/v1/backups/{}", done.name);
    is_kind(tenants.bob.get::<Backup>(&path).await, ProblemKind::NotFound);
    is_kind(tenants.bob.delete(&path).await, ProblemKind::NotFound);
    let ask = |from| RestoreBackup { volume: volume("copy"), host: None, from, whole: true };
    let restore = format!("{path}/restore");
    is_kind(tenants.bob.post::<ClusterVolume>(&restore, &ask(None)).await, ProblemKind::NotFound);
    let elsewhere = tenants.amy.post::<ClusterVolume>(&restore, &ask(Some(at("/etc")))).await;
    is_kind(elsewhere, ProblemKind::Forbidden);
    let restored: ClusterVolume = tenants
        .amy
        .post(&format!("/v1/backups/{short}/restore"), &ask(None))
        .await
        .expect("a copy");
    assert_eq!(restored.name.as_str(), "acme~copy");
    is_kind(tenants.amy.delete(&format!("{path}?forget=true")).await, ProblemKind::Forbidden);
    tenants.amy.delete(&path).await.expect("it is deleted");
    wait_for("it to be gone", async || (listed(&tenants.admin).await == 0).then_some(())).await;
}

#[tokio::test]
async fn backups_of_tenants_are_only_where_an_admin_has_allowed_them() {
    let tenants = Tenants::up().await;
    let _: ClusterVolume =
        tenants.ann.post("/v1/volumes", &new_volume("data", 1 << 30)).await.expect("a volume");
    let ask = async |by: &Client, to: &str| by.post::<Backup>("/v1/backups", &of("data", to)).await;
    let none = is_kind(ask(&tenants.amy, TO).await, ProblemKind::Forbidden);
    assert!(none.why.contains("tenant acme may use no target"), "{none}");
    tenants.allow("acme", &[TO, "s3://bucket/acme"]).await.expect("targets");
    let other = is_kind(ask(&tenants.amy, "/etc").await, ProblemKind::Forbidden);
    assert!(other.why.contains("these targets only: /srv/acme, s3://bucket/acme"), "{other}");
    // Each has a place alone.
    for of_others in ["/srv/acme", "/srv/acme/blue", "/srv", "s3://bucket"] {
        is_kind(tenants.allow("blue", &[of_others]).await, ProblemKind::Invalid);
        let by_admin = NewBackup { volume: Some(volume("acme~data")), ..of("data", of_others) };
        is_kind(tenants.admin.post::<Backup>("/v1/backups", &by_admin).await, ProblemKind::Invalid);
    }
    is_kind(tenants.allow("acme", &["/srv", "/srv/acme"]).await, ProblemKind::Invalid);
    is_kind(tenants.allow("nobody", &["/srv/n"]).await, ProblemKind::NotFound);
    // A quota that is set keeps the targets.
    tenants.set_quota("acme", Quota { backup_bytes: Some(1 << 30), ..Quota::default() }).await;
    let shown: Tenant = tenants.ann.get("/v1/tenants/acme").await.expect("an operator sees it");
    assert_eq!(shown.backup_targets.len(), 2);
    // The volume server of the version before would count nothing.
    let records = &tenants.lab.cluster.records;
    level::raise(records, level::BACKUPS_OF_TENANTS - 1).await.expect("an older store");
    is_kind(ask(&tenants.amy, TO).await, ProblemKind::Conflict);
}

#[tokio::test]
async fn what_a_tenant_s_backups_hold_counts_in_its_quota() {
    let tenants = Tenants::with_backups(&["a", "b", "c"]).await;
    tenants.set_quota("acme", Quota { backup_bytes: Some(8192), ..Quota::default() }).await;
    let ask = async |name: &str| {
        tenants.amy.post::<Backup>("/v1/backups", &of(name, TO)).await.expect("a backup")
    };
    // Both are asked for at once, and shipped one after the other.
    let both = [ask("a").await, ask("b").await];
    for backup in both.clone() {
        assert_eq!(tenants.ended(backup).await.state, BackupState::Completed);
    }
    assert_eq!(tenants.held_bytes().await, 8192);
    let full = tenants.back_up(&tenants.amy, &of("c", TO)).await;
    assert_eq!(full.state, BackupState::Failed);
    let why = "tenant acme may have 8 KiB of backups and has 8 KiB; 4 KiB more are to be shipped";
    assert!(full.problem.contains(why), "{full:?}");
    tenants.amy.delete(&format!("/v1/backups/{}", both[0].name)).await.expect("deleted");
    wait_for("its bytes", async || (tenants.held_bytes().await == 4096).then_some(())).await;
    tenants.amy.delete(&format!("/v1/backups/{}", full.name)).await.expect("deleted");
    wait_for("it to be gone", async || (listed(&tenants.amy).await == 1).then_some(())).await;
    let again = tenants.back_up(&tenants.amy, &of("c", TO)).await;
    assert_eq!(again.state, BackupState::Completed, "{again:?}");
    is_kind(tenants.admin.delete("/v1/tenants/acme").await, ProblemKind::Conflict);
}

#[tokio::test]
async fn a_tenant_sees_no_backups_that_admins_have_made_of_its_volumes() {
    let tenants = Tenants::with_backups(&["data"]).await;
    let ask = NewBackup { volume: Some(volume("acme~data")), ..of("data", "/srv/admins") };
    let of_admin = tenants.back_up(&tenants.admin, &ask).await;
    assert_eq!((of_admin.state, of_admin.by), (BackupState::Completed, None));
    assert_eq!((listed(&tenants.ann).await, listed(&tenants.admin).await), (0, 1));
    let path = format!("/v1/backups/{}", of_admin.name);
    is_kind(tenants.ann.delete(&path).await, ProblemKind::NotFound);
    assert_eq!(tenants.held_bytes().await, 0);
}

/// A member sees no VMs of others either.
#[tokio::test]
async fn a_member_sees_backups_of_its_own_vms_only() {
    let tenants = Tenants::with_backups(&[]).await;
    let name = BackupName::new("acme~web-20260101-000000").expect("a name");
    let new = new_backup(name.clone(), volume("acme~web-root"), at(TO), 1);
    let by = BackupUser { tenant: tenant("acme"), user: user_name("ann") };
    let vm = Some(VmId::new("acme~web").expect("a name"));
    let view = Backup { vm, by: Some(by), state: BackupState::Completed, ..new };
    let record = BackupRecord { view, whole: false, asks: false, schedule_made_ms: None, vm: None };
    tenants.lab.cluster.records.put(&format!("backups/{name}"), &record).await.expect("a record");
    assert_eq!((listed(&tenants.ann).await, listed(&tenants.amy).await), (1, 0));
    is_kind(tenants.amy.get::<Backup>(&format!("/v1/backups/{name}")).await, ProblemKind::NotFound);
}

#[tokio::test]
async fn an_operator_of_a_tenant_finds_its_backups_at_a_target_and_no_others() {
    let tenants = Tenants::with_backups(&["data"]).await;
    let done = tenants.back_up(&tenants.amy, &of("data", TO)).await;
    {
        let mut hosts = [&tenants.lab.home, &tenants.lab.cloud].into_iter();
        let host = hosts.find(|host| done.host.as_ref() == Some(&host.id)).expect("its host");
        let mut inside = host.inside();
        let there = inside.backups.at.get_mut(TO).expect("the target");
        let other = there.values().next().expect("the backup").clone();
        there.insert(BackupName::new("blue~data-1").expect("a name"), other);
    }
    let look = async |by: &Client, to: &str| {
        let ask = LookForBackups { at: at(to), host: done.host.clone(), tenant: None };
        by.post::<Vec<FoundBackup>>("/v1/look-for-backups", &ask).await
    };
    let found = look(&tenants.ann, TO).await.expect("a list");
    assert_eq!(found.iter().map(|one| &one.name).collect::<Vec<_>>(), [&done.name]);
    is_kind(look(&tenants.ann, "/srv").await, ProblemKind::Forbidden);
    is_kind(look(&tenants.amy, TO).await, ProblemKind::Forbidden);
    // The controller does not know it any more: an operator restores it.
    tenants.admin.delete(&format!("/v1/backups/{}?forget=true", done.name)).await.expect("gone");
    let (volume, host) = (volume("copy"), done.host.clone());
    let ask = RestoreBackup { volume, host, from: Some(at(TO)), whole: true };
    let path = format!("/v1/backups/{}/restore", done.name);
    is_kind(tenants.amy.post::<ClusterVolume>(&path, &ask).await, ProblemKind::NotFound);
    tenants.ann.post::<ClusterVolume>(&path, &ask).await.expect("a copy");
}

#[tokio::test]
async fn an_encrypted_backup_needs_the_tenant_s_key_and_so_do_all_after_it() {
    let tenants = Tenants::with_backups(&["a", "b"]).await;
    tenants.allow("acme", &[STORE]).await.expect("a target");
    let ask = |name, encrypted| NewBackup { encrypted, ..of(name, STORE) };
    let path = "/v1/tenants/acme/backup-key";
    is_kind(tenants.ann.get::<TenantBackupKey>(path).await, ProblemKind::NotFound);
    let none = tenants.amy.post::<Backup>("/v1/backups", &ask("a", true)).await;
    assert!(is_kind(none, ProblemKind::Conflict).why.contains("tenant acme has no key"));
    let set = async |by: &Client, key| by.put::<TenantBackupKey>(path, &SetBackupKey { key }).await;
    is_kind(set(&tenants.amy, None).await, ProblemKind::Forbidden);
    is_kind(set(&tenants.bob, None).await, ProblemKind::NotFound);
    let made = set(&tenants.ann, None).await.expect("a key");
    assert_eq!(tenants.ann.get::<TenantBackupKey>(path).await.expect("its key"), made);
    is_kind(tenants.bob.get::<TenantBackupKey>(path).await, ProblemKind::NotFound);
    // Backups need it, so it stays.
    is_kind(set(&tenants.ann, None).await, ProblemKind::Conflict);
    is_kind(set(&tenants.ann, Some(BackupKey::new([1; 32]))).await, ProblemKind::Conflict);
    set(&tenants.ann, Some(made.key.clone())).await.expect("it is this one");
    tenants.set_quota("acme", Quota::default()).await;
    for (name, encrypted) in [("a", true), ("b", false)] {
        let done = tenants.back_up(&tenants.amy, &ask(name, encrypted)).await;
        assert!(done.state == BackupState::Completed && done.encrypted, "{done:?}");
        let mut hosts = [&tenants.lab.home, &tenants.lab.cloud].into_iter();
        let host = hosts.find(|host| done.host.as_ref() == Some(&host.id)).expect("its host");
        let asked = host.inside().backups.at[STORE][&done.name].clone();
        assert_eq!((asked.encrypted, asked.key), (true, Some(made.key.clone())));
    }
}

#[tokio::test]
async fn an_encrypted_backup_that_has_failed_encrypts_no_others() {
    let tenants = Tenants::with_backups(&["a", "b"]).await;
    tenants.allow("acme", &[STORE]).await.expect("a target");
    let path = "/v1/tenants/acme/backup-key";
    let key = SetBackupKey { key: None };
    tenants.ann.put::<TenantBackupKey>(path, &key).await.expect("a key");
    let refuse = |why: Option<Problem>| {
        for host in [&tenants.lab.home, &tenants.lab.cloud] {
            host.inside().backups.refuses.clone_from(&why);
        }
    };
    refuse(Some(Problem::conflict("can't back up", "others there are not encrypted")));
    let ask = |name, encrypted| NewBackup { encrypted, ..of(name, STORE) };
    let failed = tenants.back_up(&tenants.amy, &ask("a", true)).await;
    assert!(failed.state == BackupState::Failed && failed.encrypted, "{failed:?}");
    refuse(None);
    let done = tenants.back_up(&tenants.amy, &ask("b", false)).await;
    assert!(done.state == BackupState::Completed && !done.encrypted, "{done:?}");
}

/// Its key would go with the tenant.
#[tokio::test]
async fn a_tenant_stays_while_an_admin_has_an_encrypted_backup_of_its_volume() {
    let tenants = Tenants::with_backups(&["data"]).await;
    let path = "/v1/tenants/acme/backup-key";
    let key = SetBackupKey { key: None };
    tenants.ann.put::<TenantBackupKey>(path, &key).await.expect("a key");
    let volume = Some(volume("acme~data"));
    let ask = NewBackup { volume, encrypted: true, ..of("data", "/srv/admins") };
    let done = tenants.back_up(&tenants.admin, &ask).await;
    assert!(done.state == BackupState::Completed && done.by.is_none(), "{done:?}");
    tenants.ann.delete("/v1/volumes/data").await.expect("deleted");
    let needed = tenants.admin.delete("/v1/tenants/acme").await;
    let needed = is_kind(needed, ProblemKind::Conflict);
    assert!(needed.why.contains(&format!("backup {}", done.name)), "{needed}");
}

#[tokio::test]
async fn a_host_that_was_started_again_gets_the_key_for_what_is_still_to_come() {
    let tenants = Tenants::with_backups(&["data"]).await;
    let path = "/v1/tenants/acme/backup-key";
    let made: TenantBackupKey =
        tenants.ann.put(path, &SetBackupKey { key: None }).await.expect("a key");
    let ask = NewBackup { encrypted: true, ..of("data", TO) };
    let done = tenants.back_up(&tenants.amy, &ask).await;
    let ask = RestoreBackup { volume: volume("copy"), host: None, from: None, whole: false };
    let path = format!("/v1/backups/{}/restore", done.name);
    let _: ClusterVolume = tenants.amy.post(&path, &ask).await.expect("a copy");
    let mut hosts = [&tenants.lab.home, &tenants.lab.cloud].into_iter();
    let host = hosts.find(|host| done.host.as_ref() == Some(&host.id)).expect("its host");
    host.inside().restores.layers[0].lacks_key = true;
    wait_for("the key", async || {
        let inside = host.inside();
        let has = !inside.restores.layers[0].lacks_key && inside.backups.keys.contains(&made.key);
        has.then_some(())
    })
    .await;
}

/// The controller was restored from an older state.
#[tokio::test]
async fn a_host_gets_the_key_again_though_the_record_of_the_restore_was_lost() {
    let tenants = Tenants::with_backups(&["data"]).await;
    let path = "/v1/tenants/acme/backup-key";
    let made: TenantBackupKey =
        tenants.ann.put(path, &SetBackupKey { key: None }).await.expect("a key");
    let ask = NewBackup { encrypted: true, ..of("data", TO) };
    let done = tenants.back_up(&tenants.amy, &ask).await;
    let ask = RestoreBackup { volume: volume("copy"), host: None, from: None, whole: false };
    let path = format!("/v1/backups/{}/restore", done.name);
    let _: ClusterVolume = tenants.amy.post(&path, &ask).await.expect("a copy");
    tenants.lab.cluster.records.remove_all("restores/").await.expect("lost");
    tenants.admin.delete(&format!("/v1/backups/{}?forget=true", done.name)).await.expect("lost");
    let mut hosts = [&tenants.lab.home, &tenants.lab.cloud].into_iter();
    let host = hosts.find(|host| done.host.as_ref() == Some(&host.id)).expect("its host");
    host.inside().restores.layers[0].lacks_key = true;
    wait_for("the key", async || (!host.inside().restores.layers[0].lacks_key).then_some(())).await;
    assert!(host.inside().backups.keys.iter().all(|key| *key == made.key));
    // A host that has nothing of the tenant may have been broken into.
    let other = [&tenants.lab.home, &tenants.lab.cloud].into_iter().find(|one| one.id != host.id);
    let other = other.expect("the other host");
    let mut layer = host.inside().restores.layers[0].clone();
    layer.lacks_key = true;
    other.inside().restores.layers.push(layer);
    host.inside().backups.keys.clear();
    host.inside().restores.layers[0].lacks_key = true;
    for round in ["one round", "another one"] {
        wait_for(round, async || (!host.inside().backups.keys.is_empty()).then_some(())).await;
        host.inside().backups.keys.clear();
        host.inside().restores.layers[0].lacks_key = true;
    }
    assert!(other.inside().backups.keys.is_empty());
    // Nor does a rented one get it, though disks of the tenant are there.
    let rented = Rental { host: host.id.clone(), ..rental("rent-1") };
    tenants.lab.cluster.rentals.put(&rented);
    host.inside().restores.layers[0].lacks_key = true;
    host.inside().backups.keys.clear();
    let asked = host.inside().restores.looked;
    wait_for("it to be asked", async || (host.inside().restores.looked >= asked + 2).then_some(()))
        .await;
    assert!(host.inside().backups.keys.is_empty());
}

#[tokio::test]
async fn an_admin_lists_a_tenant_s_target_with_the_tenant_s_key() {
    let tenants = Tenants::with_backups(&[]).await;
    let path = "/v1/tenants/acme/backup-key";
    let made: TenantBackupKey =
        tenants.ann.put(path, &SetBackupKey { key: None }).await.expect("a key");
    let look = async |by: &Client, to: &str, of: Option<&str>| {
        let host = Some(tenants.lab.home.id.clone());
        let ask = LookForBackups { at: at(to), host, tenant: of.map(tenant) };
        by.post::<Vec<FoundBackup>>("/v1/look-for-backups", &ask).await
    };
    look(&tenants.admin, TO, None).await.expect("a list");
    look(&tenants.admin, "/srv/admins", None).await.expect("a list");
    look(&tenants.admin, "/srv/admins", Some("acme")).await.expect("a list");
    // Above it there may be backups of anybody.
    look(&tenants.admin, "/srv", None).await.expect("a list");
    let used = tenants.lab.home.inside().backups.listed_with.clone();
    assert_eq!(used, [Some(made.key.clone()), None, Some(made.key), None]);
    is_kind(look(&tenants.admin, TO, Some("void")).await, ProblemKind::NotFound);
    is_kind(look(&tenants.bob, TO, Some("acme")).await, ProblemKind::Forbidden);
}

#[tokio::test]
async fn a_tenant_gets_no_target_where_backups_of_others_are() {
    let tenants = Tenants::up().await;
    for name in ["data", "more"] {
        let new = new_volume(name, 1 << 30);
        let _: ClusterVolume = tenants.ann.post("/v1/volumes", &new).await.expect("a volume");
    }
    let ask = NewBackup { volume: Some(volume("acme~data")), ..of("data", "/srv/all") };
    let of_admin = tenants.back_up(&tenants.admin, &ask).await;
    for overlaps in ["/srv/all", "/srv/all/acme", "/srv"] {
        let refused = is_kind(tenants.allow("acme", &[overlaps]).await, ProblemKind::Conflict);
        assert!(refused.why.contains(&format!("backup {}", of_admin.name)), "{refused}");
    }
    tenants.allow("acme", &[TO]).await.expect("nothing is there");
    tenants.back_up(&tenants.amy, &of("more", TO)).await;
    // Its own are no others', and what it has is not looked at again.
    tenants.allow("acme", &[TO, STORE]).await.expect("a second one");
    let refused = is_kind(tenants.allow("blue", &["/srv/all"]).await, ProblemKind::Conflict);
    assert!(refused.why.contains("/srv/all is a place of others"), "{refused}");
}

#[tokio::test]
async fn a_tenant_backs_up_and_restores_its_own_images_only() {
    let tenants = Tenants::with_backups(&[]).await;
    tenants.share_debian().await;
    let import = serde_json::json!({"name": "golden", "source": "upload:1"});
    let _: ClusterImage = tenants.ann.post("/v1/images", &import).await.expect("an image");
    let ask = |name: &str| NewBackup {
        volume: None,
        image: Some(ImageName::new(name).expect("a name")),
        ..of("any", TO)
    };
    let shared = tenants.amy.post::<Backup>("/v1/backups", &ask("debian")).await;
    let shared = is_kind(shared, ProblemKind::Forbidden);
    assert!(shared.why.contains("shared with all tenants"), "{shared}");
    is_kind(tenants.bob.post::<Backup>("/v1/backups", &ask("golden")).await, ProblemKind::NotFound);
    let done = tenants.back_up(&tenants.amy, &ask("golden")).await;
    assert_eq!(
        (done.state, done.of().to_string()),
        (BackupState::Completed, "image acme~golden".to_owned())
    );
    assert_eq!((listed(&tenants.ann).await, listed(&tenants.bob).await), (1, 0));
    let restore = async |by: &Client, name: &str| {
        let image = ImageName::new(name).expect("a name");
        let ask = RestoreImageBackup { image, host: None, from: None };
        by.post::<ClusterImage>(&format!("/v1/backups/{}/restore-image", done.name), &ask).await
    };
    is_kind(restore(&tenants.bob, "mine").await, ProblemKind::NotFound);
    is_kind(restore(&tenants.amy, "golden").await, ProblemKind::Conflict);
    let made = restore(&tenants.amy, "again").await.expect("an image");
    assert_eq!((made.name.as_str(), made.shared), ("acme~again", false));
    let records = &tenants.lab.cluster.records;
    level::raise(records, level::BACKUPS_OF_IMAGES - 1).await.expect("an older store");
    let by_admin = NewBackup { to: at("/srv/admins"), ..ask("debian") };
    is_kind(tenants.admin.post::<Backup>("/v1/backups", &by_admin).await, ProblemKind::Conflict);
    is_kind(restore(&tenants.admin, "other").await, ProblemKind::Conflict);
}

#[tokio::test]
async fn a_restore_of_an_image_counts_in_the_quota_while_it_is_under_way() {
    let tenants = Tenants::with_backups(&[]).await;
    let import = serde_json::json!({"name": "golden", "source": "upload:1"});
    let _: ClusterImage = tenants.ann.post("/v1/images", &import).await.expect("an image");
    let image = |name: &str| ImageName::new(name).expect("a name");
    let ask = NewBackup { volume: None, image: Some(image("golden")), ..of("any", TO) };
    let done = tenants.back_up(&tenants.amy, &ask).await;
    // The image and one more.
    let quota = Quota { volume_bytes: Some(2 << 30), ..Quota::default() };
    tenants.set_quota("acme", quota).await;
    for host in [&tenants.lab.home, &tenants.lab.cloud] {
        host.inside().restores.hangs = true;
    }
    let path = format!("/v1/backups/{}/restore-image", done.name);
    let ask = |name: &str| RestoreImageBackup { image: image(name), host: None, from: None };
    let first = ask("first");
    let first = tenants.amy.post::<ClusterImage>(&path, &first);
    let second = async {
        let key = image_key(&image("acme~first"));
        wait_for("the first one to have its name", async || {
            let records = &tenants.lab.cluster.records;
            records.read::<ImageRecord>(&key).await.expect("the store").map(drop)
        })
        .await;
        let asked = tenants.amy.post::<ClusterImage>(&path, &ask("second")).await;
        is_kind(asked, ProblemKind::NoSpace);
        for host in [&tenants.lab.home, &tenants.lab.cloud] {
            host.inside().restores.hangs = false;
        }
    };
    let (made, ()) = tokio::join!(first, second);
    assert_eq!(made.expect("it has room").name.as_str(), "acme~first");
}

#[tokio::test]
async fn a_schedule_of_a_member_makes_the_tenant_s_backups() {
    let tenants = Tenants::with_backups(&["data"]).await;
    let NewBackup { volume, to, .. } = of("data", TO);
    let (vm, image, keep, encrypted) = Default::default();
    let ask = NewBackupSchedule { volume, vm, image, to, every_s: 3600, keep, encrypted };
    let path = "/v1/backup-schedules";
    let set: BackupSchedule = tenants.amy.post(path, &ask).await.expect("a schedule");
    wait_for("its backup", async || (tenants.held_bytes().await == 4096).then_some(())).await;
    assert_eq!((listed(&tenants.amy).await, listed(&tenants.bob).await), (1, 0));
    let all = async |by: &Client| by.get::<Vec<BackupSchedule>>(path).await.expect("a list").len();
    assert_eq!((all(&tenants.ann).await, all(&tenants.bob).await), (1, 0));
    let its = format!("{path}/{}", set.name);
    is_kind(tenants.bob.delete(&its).await, ProblemKind::NotFound);
    tenants.ann.delete(&its).await.expect("ended");
}
