//! Snapshots of the disks of pools, in EBS.

use futures_util::future::BoxFuture;
use perigee_model::kept::{NewSnapshot, Snapshot, SnapshotPrice, SnapshotState};
use perigee_model::rental::{CLUSTER_TAG, RENTAL_TAG};

use super::answers::tag;
use super::client::{Again, Form};
use super::launch::POOL_DEVICE;
use super::{Ec2, PAGE};
use crate::provider::{CloudError, CloudErrorKind, Snapshots};
use crate::xml::Element;

/// The volume of an instance's pool.
fn volume<'a>(answer: &'a Element, instance: &str) -> Option<&'a str> {
    let reservations = answer.items("reservationSet");
    let mut instances = reservations.flat_map(|reservation| reservation.items("instancesSet"));
    let found = instances.find(|one| one.text("instanceId") == Some(instance))?;
    let mut disks = found.items("blockDeviceMapping");
    disks.find(|disk| disk.text("deviceName") == Some(POOL_DEVICE))?.text("ebs/volumeId")
}

/// A state that is not understood is no failure: such a snapshot may become complete, and is waited for no longer than others.
fn state(name: &str) -> SnapshotState {
    match name {
        "completed" => SnapshotState::Complete,
        "error" => SnapshotState::Failed,
        _ => SnapshotState::Pending,
    }
}

/// The snapshots of a page that have the cluster's tag. Should EC2 not understand the filter, nobody else's are deleted.
fn snapshots(page: &Element, cluster: &str) -> Vec<Snapshot> {
    let ours = page.items("snapshotSet").filter(|one| tag(one, CLUSTER_TAG) == Some(cluster));
    ours.filter_map(|one| {
        let full = one.text("fullSnapshotSizeInBytes").and_then(|bytes| bytes.parse().ok());
        Some(Snapshot {
            id: one.text("snapshotId")?.to_owned(),
            rental: tag(one, RENTAL_TAG).map(str::to_owned),
            state: state(one.text("status").unwrap_or_default()),
            stored_bytes: full.filter(|bytes| *bytes > 0),
        })
    })
    .collect()
}

impl Ec2 {
    async fn snapshot(&self, new: &NewSnapshot) -> Result<Snapshot, CloudError> {
        let what = format!("can't keep the disk of {} at {}", new.instance, self.name);
        let form = Form::new("DescribeInstances", "reservationSet");
        let form = form.with_list("InstanceId", [&new.instance]);
        let answer = self.client.ask(&what, &form, Again::Harmless).await?;
        let volume = volume(&answer, &new.instance).ok_or_else(|| {
            let why = format!("it has no disk {POOL_DEVICE} for its pool");
            CloudError::new(CloudErrorKind::Refused, format!("{what}: {why}"))
        })?;
        let form = Form::new("CreateSnapshot", "snapshotId")
            .with("VolumeId", volume)
            .with("Description", format!("replicas of rental {}", new.rental))
            .with("TagSpecification.1.ResourceType", "snapshot")
            .with("TagSpecification.1.Tag.1.Key", RENTAL_TAG)
            .with("TagSpecification.1.Tag.1.Value", &new.rental)
            .with("TagSpecification.1.Tag.2.Key", CLUSTER_TAG)
            .with("TagSpecification.1.Tag.2.Value", &new.cluster);
        let answer = self.client.ask(&what, &form, Again::MakesTwo).await?;
        let unclear = || CloudError::new(CloudErrorKind::Unclear, format!("{what}: it has no id"));
        Ok(Snapshot {
            id: answer.text("snapshotId").ok_or_else(unclear)?.to_owned(),
            rental: Some(new.rental.clone()),
            state: state(answer.text("status").unwrap_or_default()),
            stored_bytes: None,
        })
    }

    async fn snapshots_of(&self, cluster: &str) -> Result<Vec<Snapshot>, CloudError> {
        let what = format!("can't list the snapshots at {}", self.name);
        let form = Form::new("DescribeSnapshots", "snapshotSet")
            .with("MaxResults", PAGE)
            .with("Owner.1", "self")
            .filter(1, &format!("tag:{CLUSTER_TAG}"), [cluster]);
        let read = |page: &Element| Ok(snapshots(page, cluster));
        let mut all = self.client.pages(&what, &form, read).await?;
        // One may be on two pages when the list has changed meanwhile.
        all.sort_by(|one, other| one.id.cmp(&other.id));
        all.dedup_by(|one, other| one.id == other.id);
        Ok(all)
    }

    async fn delete_snapshot(&self, snapshot: &str) -> Result<(), CloudError> {
        let what = format!("can't delete the snapshot {snapshot} at {}", self.name);
        let form = Form::new("DeleteSnapshot", "return").with("SnapshotId", snapshot);
        match self.client.ask(&what, &form, Again::Harmless).await {
            Err(failed) if failed.code == "InvalidSnapshot.NotFound" => Ok(()),
            answer => Ok(answer.map(drop)?),
        }
    }
}

impl Snapshots for Ec2 {
    fn price(&self) -> SnapshotPrice {
        self.settings.snapshots
    }

    fn take<'a>(&'a self, new: &'a NewSnapshot) -> BoxFuture<'a, Result<Snapshot, CloudError>> {
        Box::pin(self.snapshot(new))
    }

    fn list<'a>(&'a self, cluster: &'a str) -> BoxFuture<'a, Result<Vec<Snapshot>, CloudError>> {
        Box::pin(self.snapshots_of(cluster))
    }

    fn delete<'a>(&'a self, snapshot: &'a str) -> BoxFuture<'a, Result<(), CloudError>> {
        Box::pin(self.delete_snapshot(snapshot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "<DescribeSnapshotsResponse><snapshotSet>
        <item><snapshotId>snap-1</snapshotId><status>completed</status><volumeSize>34</volumeSize>
          <fullSnapshotSizeInBytes>1048576</fullSnapshotSizeInBytes><tagSet>
          <item><key>perigee-cluster</key><value>c1</value></item><item><key>perigee-rental</key><value>r1</value></item></tagSet></item>
        <item><snapshotId>snap-2</snapshotId><status>recovering</status><tagSet>
          <item><key>perigee-cluster</key><value>c1</value></item></tagSet></item>
        <item><snapshotId>snap-3</snapshotId><status>completed</status><tagSet>
          <item><key>perigee-cluster</key><value>c2</value></item></tagSet></item>
        </snapshotSet></DescribeSnapshotsResponse>";

    #[test]
    fn snapshots_of_the_cluster_are_read() {
        let page = Element::parse(PAGE.as_bytes()).expect("a page");
        let all = snapshots(&page, "c1");
        let first = Snapshot {
            id: "snap-1".to_owned(),
            rental: Some("r1".to_owned()),
            state: SnapshotState::Complete,
            stored_bytes: Some(1 << 20),
        };
        let second = Snapshot {
            id: "snap-2".to_owned(),
            rental: None,
            state: SnapshotState::Pending,
            stored_bytes: None,
        };
        assert_eq!(all, [first, second]);
    }
}
