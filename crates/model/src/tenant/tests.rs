//! Whose a name is, and what users of tenants mean.

use proptest::prelude::*;

use super::*;
use crate::VolumeName;

fn tenant(name: &str) -> TenantName {
    TenantName::new(name).expect("a name")
}

#[test]
fn a_short_name_is_one_of_the_user_s_own_tenant() {
    assert_eq!(tenant("acme").meant("data"), "acme~data");
    assert_eq!(tenant("acme").meant("acme~data"), "acme~data");
    assert_eq!(TenantName::default().meant("data"), "data");
    assert_eq!(TenantName::default().meant("default~data"), "data");
    assert_eq!(TenantName::meant_by_admin("acme~data"), "acme~data");
    assert_eq!(TenantName::meant_by_admin("default~data"), "data");
    assert_eq!((tenant_of("data"), tenant_of("acme~data")), ("default", "acme"));
}

proptest! {
    /// Whatever a user writes, it is a name of its own tenant; and if it names what is another's, it is nobody's.
    #[test]
    fn no_text_reaches_another_tenant_s_things(
        own in "(default|acme|blue)",
        text in "(default|acme|blue|a)(~(default|acme|blue|a)){0,3}",
    ) {
        let own = tenant(&own);
        let meant = own.meant(&text);
        let named: Result<VolumeName, _> = VolumeName::new(&meant);
        prop_assert!(own.owns(&meant), "{meant}");
        if text.contains(SEPARATOR) && !own.owns(&text) {
            prop_assert!(named.is_err() || is_nobodys(&meant), "{text} is {meant}");
            prop_assert!(new_name::<VolumeName>(meant).is_err());
        }
    }

    #[test]
    fn a_name_that_can_be_made_is_meant_by_its_short_form(
        own in "(default|acme|blue)",
        name in "[a-z0-9][a-z0-9._-]{0,20}",
    ) {
        let own = tenant(&own);
        let full: VolumeName = new_name(own.meant(&name)).expect("a name");
        prop_assert_eq!(own.meant(full.as_str()), full.as_str());
        prop_assert_eq!(tenant_of(full.as_str()), own.as_str());
    }
}

#[test]
fn a_quota_that_was_stored_before_files_were_counted_is_read() {
    let old =
        r#"{"vms": 2, "cpus": null, "memory_bytes": null, "volume_bytes": null, "file_bytes": 5}"#;
    let quota: Quota = serde_json::from_str(old).expect("a quota");
    assert_eq!(quota, Quota { vms: Some(2), file_bytes: Some(5), ..Quota::default() });
}

#[test]
fn a_quota_says_what_is_lacking() {
    let one = Running { vms: 1, cpus: 2, memory_bytes: 1 << 30 };
    let quota = Quota { vms: Some(2), cpus: Some(3), memory_bytes: None, ..Quota::default() };
    assert_eq!(quota.lacks(Running::default(), one), None);
    let why = quota.lacks(one, one).expect("4 vCPUs are too many");
    assert_eq!(why, "it needs 2 of the tenant's 3 vCPUs, and 2 are in use");
    let quota = Quota { memory_bytes: Some(1 << 30), ..Quota::default() };
    let why = quota.lacks(one, one).expect("no memory");
    assert!(why.contains("1 GiB of the tenant's 1 GiB of memory"), "{why}");
    assert_eq!(Quota::default().lacks(one, one), None);
}

#[test]
fn a_shared_image_is_looked_for_where_the_own_tenant_has_none() {
    let image = |name: &str| ImageName::new(name).expect("a name");
    assert_eq!(shared_image(&image("acme~debian")), Some(image("debian")));
    assert_eq!(shared_image(&image("debian")), None);
    assert_eq!(shared_image(&image("acme~blue~debian")), None);
}

#[test]
fn an_ssh_key_is_kept_without_its_comment() {
    let name = UserName::new("laptop").expect("a name");
    let key = SshKey::new(name.clone(), "ssh-ed25519 AAAAC3Nza ann@laptop\n").expect("a key");
    assert_eq!(key.key, "ssh-ed25519 AAAAC3Nza");
    for bad in
        ["", "ssh-ed25519", "ssh-dss AAAA", "ssh-ed25519 BBBB", "ssh-rsa AAAA", "ssh-ed25519 AAAA!"]
    {
        assert_eq!(SshKey::new(name.clone(), bad), Err(BadSshKey::Other), "{bad:?}");
    }
    let private = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blb\n";
    let refused = SshKey::new(name, private).expect_err("a private key");
    assert_eq!(refused, BadSshKey::Secret(crate::secret::Secret::PrivateKey));
    assert!(!refused.to_string().contains("b3Blb"));
}
