//! Snapshots of a program: the verbs `snapshot`, `snapshots` and `delete-snapshot`, which a program need not know.

use std::collections::HashSet;

use futures_util::future::BoxFuture;
use perigee_model::kept::{NewSnapshot, Snapshot, SnapshotPrice};
use serde::Deserialize;
use serde_json::json;

use super::answer::{Done, few, word};
use super::{Program, no_sense};
use crate::provider::{CloudError, Snapshots};

/// The answer to `snapshot`.
#[derive(Debug, Deserialize)]
struct SnapshotAnswer {
    snapshot: Snapshot,
}

/// The answer to `snapshots`.
#[derive(Debug, Deserialize)]
struct SnapshotsAnswer {
    snapshots: Vec<Listed>,
}

/// A snapshot in a list, with its tag [`perigee_model::rental::CLUSTER_TAG`].
#[derive(Debug, Deserialize)]
struct Listed {
    cluster: String,
    #[serde(flatten)]
    snapshot: Snapshot,
}

fn snapshot(snapshot: &Snapshot) -> Result<(), String> {
    word("id", &snapshot.id)?;
    snapshot.rental.as_deref().map_or(Ok(()), |rental| word("rental", rental))
}

impl SnapshotAnswer {
    fn checked(self, new: &NewSnapshot) -> Result<Snapshot, String> {
        snapshot(&self.snapshot)?;
        match &self.snapshot.rental {
            Some(rental) if *rental == new.rental => Ok(self.snapshot),
            _ => Err(format!("its snapshot is not the one of the rental {}", new.rental)),
        }
    }
}

impl SnapshotsAnswer {
    /// The snapshots, all of which are of this cluster: those that nobody owns are deleted.
    fn checked(self, of: &str) -> Result<Vec<Snapshot>, String> {
        few(&self.snapshots)?;
        let mut seen = HashSet::new();
        for Listed { cluster, snapshot: listed } in &self.snapshots {
            snapshot(listed)?;
            if cluster != of {
                return Err(format!("it lists the snapshot {} of another cluster", listed.id));
            }
            if !seen.insert(&listed.id) {
                return Err(format!("it lists the snapshot {} twice", listed.id));
            }
        }
        Ok(self.snapshots.into_iter().map(|listed| listed.snapshot).collect())
    }
}

impl Snapshots for Program {
    fn price(&self) -> SnapshotPrice {
        self.snapshots
    }

    fn take<'a>(&'a self, new: &'a NewSnapshot) -> BoxFuture<'a, Result<Snapshot, CloudError>> {
        Box::pin(async {
            let what = format!("can't keep the disk of {} at {}", new.instance, self.name);
            let answer: SnapshotAnswer = self.call("snapshot", &what, new, "").await?;
            answer.checked(new).map_err(|why| no_sense(&what, why))
        })
    }

    fn list<'a>(&'a self, cluster: &'a str) -> BoxFuture<'a, Result<Vec<Snapshot>, CloudError>> {
        Box::pin(async move {
            let what = format!("can't list the snapshots at {}", self.name);
            let input = json!({"cluster": cluster});
            let answer: SnapshotsAnswer = self.call("snapshots", &what, &input, "").await?;
            answer.checked(cluster).map_err(|why| no_sense(&what, why))
        })
    }

    fn delete<'a>(&'a self, snapshot: &'a str) -> BoxFuture<'a, Result<(), CloudError>> {
        Box::pin(async move {
            let what = format!("can't delete the snapshot {snapshot} at {}", self.name);
            let input = json!({"snapshot": snapshot});
            let _: Done = self.call("delete-snapshot", &what, &input, "").await?;
            Ok(())
        })
    }
}
