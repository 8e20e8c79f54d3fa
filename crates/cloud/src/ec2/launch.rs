//! The request that makes an instance.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use perigee_model::kept::ROOT_DISK_BYTES;
use perigee_model::rental::{CLUSTER_TAG, NewInstance, RENTAL_TAG};

use super::Settings;
use super::client::Form;

/// Bytes of user data that EC2 takes, before base64: "Instance user data" in AWS's EC2 user guide.
const USER_DATA_BYTES_MAX: usize = 16 * 1024;
/// Bytes of an idempotency token that EC2 takes: `ClientToken` of `RunInstances`.
const TOKEN_BYTES_MAX: usize = 64;

/// The name of a pool's disk. Nitro machines show it under another one.
pub const POOL_DEVICE: &str = "/dev/sdf";

/// Why EC2 would not take it; `None` if it may.
pub fn refused(new: &NewInstance) -> Option<String> {
    let (token, data) = (new.rental.len(), new.user_data.len());
    if token == 0 || token > TOKEN_BYTES_MAX || !new.rental.is_ascii() {
        return Some(format!("its rental's id has to have 1 to {TOKEN_BYTES_MAX} letters"));
    }
    (data > USER_DATA_BYTES_MAX).then(|| {
        format!("its user data have {data} bytes, and EC2 takes at most {USER_DATA_BYTES_MAX}")
    })
}

/// The request for one instance whose root disk has this name.
pub fn form(
    new: &NewInstance,
    image: &str,
    root_device: Option<&str>,
    settings: &Settings,
) -> Form {
    let mut form = Form::new("RunInstances", "instancesSet")
        .with("ClientToken", &new.rental)
        .with("MinCount", 1)
        .with("MaxCount", 1)
        .with("ImageId", image)
        .with("InstanceType", &new.kind)
        .with("Placement.AvailabilityZone", &new.zone)
        // An instance that powers itself off is gone, so that a lost controller costs minutes.
        .with("InstanceInitiatedShutdownBehavior", "terminate")
        .with("UserData", STANDARD.encode(&new.user_data))
        // The user data have a join token: no guest behind the host's NAT gets them.
        .with("MetadataOptions.HttpTokens", "required")
        .with("MetadataOptions.HttpPutResponseHopLimit", 1);
    if new.kvm && !is_metal(&new.kind) {
        form = form.with("CpuOptions.NestedVirtualization", "enabled");
    }
    if let Some(root_device) = root_device {
        let bytes = new.pool.as_ref().map_or(new.disk_bytes, |_| ROOT_DISK_BYTES);
        form = disk(form, 1, (root_device, bytes));
    }
    if let Some(pool) = &new.pool {
        form = disk(form, 2, (POOL_DEVICE, pool.bytes));
        if let Some(snapshot) = &pool.snapshot {
            form = form.with("BlockDeviceMapping.2.Ebs.SnapshotId", snapshot);
        }
    }
    if let Some(subnet) = settings.subnets.get(&new.zone) {
        form = form.with("SubnetId", subnet);
    }
    form = form.with_list("SecurityGroupId", &settings.security_groups);
    let mut tagged = vec!["instance", "volume"];
    if new.spot {
        form = form
            .with("InstanceMarketOptions.MarketType", "spot")
            .with("InstanceMarketOptions.SpotOptions.SpotInstanceType", "one-time")
            .with("InstanceMarketOptions.SpotOptions.InstanceInterruptionBehavior", "terminate");
        if let Some(micros) = new.max_per_hour_micros {
            let dollars = format!("{}.{:06}", micros.get() / 1_000_000, micros.get() % 1_000_000);
            form = form.with("InstanceMarketOptions.SpotOptions.MaxPrice", dollars);
        }
        // By this tag the notices of a cluster are found.
        tagged.push("spot-instances-request");
    }
    (1..).zip(tagged).fold(form, |form, (number, what)| tags(form, number, what, new))
}

fn disk(form: Form, number: usize, (device, bytes): (&str, u64)) -> Form {
    let at = format!("BlockDeviceMapping.{number}");
    form.with(&format!("{at}.DeviceName"), device)
        .with(&format!("{at}.Ebs.VolumeSize"), bytes.div_ceil(1 << 30))
        .with(&format!("{at}.Ebs.VolumeType"), "gp3")
        .with(&format!("{at}.Ebs.DeleteOnTermination"), true)
}

fn tags(form: Form, number: usize, what: &str, new: &NewInstance) -> Form {
    let at = format!("TagSpecification.{number}");
    form.with(&format!("{at}.ResourceType"), what)
        .with(&format!("{at}.Tag.1.Key"), RENTAL_TAG)
        .with(&format!("{at}.Tag.1.Value"), &new.rental)
        .with(&format!("{at}.Tag.2.Key"), CLUSTER_TAG)
        .with(&format!("{at}.Tag.2.Value"), &new.cluster)
}

/// Is it a whole machine? Its hypervisor is ours then, and it has nothing to nest.
fn is_metal(kind: &str) -> bool {
    kind.split('.').nth(1).is_some_and(|size| size.starts_with("metal"))
}
