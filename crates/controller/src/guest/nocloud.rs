//! What cloud-init reads in a VM without a job: the disk of its data source NoCloud.
//!
//! The disk has the label `cidata` and four files. What Perigee wants of the guest is in `meta-data`, `network-config` and
//! `vendor-data`; `user-data` is the user's own, and cloud-init prefers it to `vendor-data`. Maps are written as JSON,
//! which is YAML too.

use std::net::Ipv4Addr;

use perigee_model::guest::USER_NETWORK;
use perigee_model::network::DOMAIN;
use perigee_model::persistent_vm::CloudInit;
use perigee_model::vm::VmNetwork;
use serde_json::{Value, json};

use crate::guest::fat::{Fat, filesystem};

/// cloud-init looks for a filesystem with this label.
const LABEL: &str = "cidata";

/// QEMU's default for the first card of a VM; each VM has a network of its own.
const CARD: &str = "52:54:00:12:34:56";

/// A disk of the VM that is to be mounted.
#[derive(Debug, Clone)]
pub struct Mounted {
    /// Its serial number.
    pub serial: String,
    pub path: String,
    pub read_only: bool,
}

/// The disk. `instance` is the same for every start of one VM: cloud-init configures each instance once.
///
/// # Errors
/// If it does not fit.
pub fn disk(
    instance: &str,
    host_name: &str,
    network: &VmNetwork,
    mounts: &[Mounted],
    wanted: &CloudInit,
) -> Result<Fat, String> {
    let user_data = wanted.user_data.as_deref().unwrap_or("#cloud-config\n{}\n");
    filesystem(
        LABEL,
        &[
            ("meta-data", meta_data(instance, host_name, wanted).to_string().as_bytes()),
            ("user-data", user_data.as_bytes()),
            ("vendor-data", cloud_config(&vendor_data(mounts, wanted, network)).as_bytes()),
            ("network-config", network_config(network).to_string().as_bytes()),
        ],
    )
}

/// Installs the runner and starts it, with what the golden image gives it (`perigee-runner.service` there). Any POSIX shell runs this,
/// and no init is asked for anything. cloud-init does this at each boot and goes on with its work, for which the runner waits.
const START_RUNNER: &str = "\
set -e
[ ! -e /usr/sbin/perigee-runner ] || exit 0
dir=/var/lib/perigee
mkdir -p $dir/disk
for serial in /sys/block/*/serial; do
  [ \"$(cat $serial)\" != cidata ] || disk=${serial%/serial}
done
mount -t vfat -o ro /dev/${disk##*/} $dir/disk
cp $dir/disk/runner $dir/runner
umount $dir/disk
chmod 755 $dir/runner
echo -900 >/proc/self/oom_score_adj
ulimit -n 65536
setsid $dir/runner </dev/null >/dev/null 2>&1 &
";

/// The disk of a job's VM whose image has no runner.
///
/// # Errors
/// If it does not fit.
pub fn job_disk(
    instance: &str,
    host_name: &str,
    network: &VmNetwork,
    runner: &[u8],
) -> Result<Fat, String> {
    let nobody = CloudInit::default();
    let mut user_data = resolvers(network);
    user_data["bootcmd"] = json!([["sh", "-c", START_RUNNER]]);
    let user_data = cloud_config(&user_data);
    filesystem(
        LABEL,
        &[
            ("meta-data", meta_data(instance, host_name, &nobody).to_string().as_bytes()),
            ("user-data", user_data.as_bytes()),
            ("network-config", network_config(network).to_string().as_bytes()),
            ("runner", runner),
        ],
    )
}

fn cloud_config(config: &Value) -> String {
    format!("#cloud-config\n{config}\n")
}

/// The keys are for the image's default user, for example `debian` or `ubuntu`.
fn meta_data(instance: &str, host_name: &str, wanted: &CloudInit) -> Value {
    json!({
        "instance-id": instance,
        "local-hostname": host_name,
        "public-keys": wanted.ssh_keys,
    })
}

fn vendor_data(mounts: &[Mounted], wanted: &CloudInit, network: &VmNetwork) -> Value {
    let mut config = resolvers(network);
    if let Some(user) = &wanted.user {
        config["user"] = json!({"name": user});
    }
    let mounts = mounts.iter().map(|mount| {
        let options = if mount.read_only { "ro,nofail" } else { "defaults,nofail" };
        let device = format!("/dev/disk/by-id/virtio-{}", mount.serial);
        json!([device, mount.path, "auto", options, "0", "2"])
    });
    let mounts: Vec<Value> = mounts.collect();
    if !mounts.is_empty() {
        config["mounts"] = Value::Array(mounts);
    }
    config
}

/// Where Alpine's cloud-init takes the resolvers from: ifupdown there does nothing with those of the network's configuration. That
/// of Debian and Ubuntu does not read this.
fn resolvers(network: &VmNetwork) -> Value {
    let resolvers = match network {
        VmNetwork::None | VmNetwork::Bridge(_) => return json!({}),
        VmNetwork::Cluster(card) => {
            json!({"nameservers": [card.subnet.gateway()], "searchdomains": [DOMAIN]})
        }
        VmNetwork::User => json!({"nameservers": [USER_NETWORK.dns]}),
    };
    json!({"manage_resolv_conf": true, "resolv_conf": resolvers})
}

/// Without a card there is nothing to configure. systemd's wait-online waits for a network all the same: it needs an interface with
/// carrier and an address. A bridge without ports, which netplan could make, is not enough for it (tried with systemd 252).
fn network_config(network: &VmNetwork) -> Value {
    let ethernets = match network {
        VmNetwork::None => json!({}),
        VmNetwork::Bridge(card) => json!({"card": {
            "match": {"macaddress": card.mac().to_string()},
            "dhcp4": true,
            "optional": true,
        }}),
        // Its addresses need no answer of the gateway, so the guest boots while that is away.
        VmNetwork::Cluster(card) => json!({"card": {
            "match": {"macaddress": card.mac().to_string()},
            "addresses": [format!("{}/{}", card.address, card.subnet.prefix_bits())],
            "routes": default_route(card.subnet.gateway()),
            "mtu": card.mtu,
            "nameservers": {"addresses": [card.subnet.gateway()], "search": [DOMAIN]},
        }}),
        VmNetwork::User => {
            let of = USER_NETWORK;
            json!({"card": {
                "match": {"macaddress": CARD},
                "addresses": [format!("{}/{}", of.address, of.prefix_bits)],
                "routes": default_route(of.gateway),
                "nameservers": {"addresses": [of.dns]},
                // The guest boots without it.
                "optional": true,
            }})
        }
    };
    json!({"version": 2, "ethernets": ethernets})
}

fn default_route(gateway: Ipv4Addr) -> Value {
    json!([{"to": "0.0.0.0/0", "via": gateway}])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_host_name_are_in_the_meta_data_and_nothing_of_the_user_is_changed() {
        let wanted = CloudInit {
            user: Some("ann".to_owned()),
            ssh_keys: vec!["ssh-ed25519 AAAA ann".to_owned()],
            user_data: Some("#cloud-config\nruncmd: [\"echo 'hi'\"]\n".to_owned()),
        };
        let mount = Mounted { serial: "data0".into(), path: "/data".into(), read_only: true };
        let meta = meta_data("web-1", "web", &wanted);
        assert_eq!(meta["public-keys"][0], "ssh-ed25519 AAAA ann");
        assert_eq!(meta["local-hostname"], "web");
        let vendor = vendor_data(std::slice::from_ref(&mount), &wanted, &VmNetwork::User);
        assert_eq!(vendor["user"]["name"], "ann");
        assert_eq!(vendor["mounts"][0][0], "/dev/disk/by-id/virtio-data0");
        assert_eq!(vendor["mounts"][0][3], "ro,nofail");
        assert_eq!(vendor["resolv_conf"]["nameservers"][0], "10.0.2.3");
        let made = disk("web-1", "web", &VmNetwork::None, &[mount], &wanted).expect("it fits");
        let text = String::from_utf8_lossy(&made.bytes);
        assert!(text.contains("runcmd: [\"echo 'hi'\"]\n"));
    }

    #[test]
    fn a_job_whose_image_has_no_runner_gets_it_from_its_disk() {
        let made = job_disk("q-1", "q-0001", &VmNetwork::None, b"\x7fELF").expect("it fits");
        let text = String::from_utf8_lossy(&made.bytes);
        assert!(text.contains("\x7fELF") && text.contains("setsid"));
        let checked = std::process::Command::new("sh").args(["-n", "-c", START_RUNNER]).status();
        assert!(checked.expect("a shell").success());
    }

    #[test]
    fn a_vm_without_a_card_has_no_network_to_configure() {
        assert_eq!(network_config(&VmNetwork::None)["ethernets"], json!({}));
        let card = &network_config(&VmNetwork::User)["ethernets"]["card"];
        assert_eq!(
            (&card["addresses"][0], &card["routes"][0]["via"]),
            (&json!("10.0.2.15/24"), &json!("10.0.2.2"))
        );
    }

    #[test]
    fn a_card_in_a_tenants_network_is_found_by_its_hardware_address() {
        let subnet = "10.7.0.0/24".parse().expect("addresses");
        let network = perigee_model::NetworkName::new("acme~blue").expect("a name");
        let address = std::net::Ipv4Addr::new(10, 7, 0, 9);
        let card = perigee_model::network::Card { network, vni: 3, subnet, address, mtu: 1370 };
        let config = &network_config(&VmNetwork::Cluster(card))["ethernets"]["card"];
        assert_eq!(config["match"]["macaddress"], "02:50:00:03:00:09");
        assert_eq!(
            (&config["mtu"], &config["routes"][0]["via"]),
            (&json!(1370), &json!("10.7.0.1"))
        );
    }
}
