//! Deletes a backup, and the layers that no other backup at the target needs. The controller lets nobody ship to the target meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use perigee_model::backup::DeleteBackup;
use perigee_model::{BackupName, LayerId, Problem, ProblemKind};
use perigee_store::Work;

use super::format::{LAYERS, MANIFESTS, index_key, layer_prefix, manifest_key};
use super::restore::Reading;
use super::stopped;
use super::target::Target;

/// Deletes the backup. One that was cut off is done again from the beginning. Returns how many bytes the target holds then, if these are to be counted and can be.
///
/// # Errors
/// `Unavailable` if the target fails, or the work was stopped; `Conflict` if another backup can't be read: then nobody knows which layers it needs, and all stay.
pub async fn delete(ask: &DeleteBackup, work: &Arc<Work>) -> Result<Option<u64>, Problem> {
    let target = Target::open(&ask.at, ask.key.as_ref()).await?;
    // It is none from now on. Its layers are nobody's, unless another one names them.
    target.delete(&manifest_key(&ask.backup)).await?;
    let needed = needed(&target, work).await?;
    let what = format!("can't delete backup {}", ask.backup);
    for layer in unneeded(&target, &needed, work).await? {
        work.step(0).map_err(|_| stopped(&what))?;
        // Without its index, a layer is not there.
        target.delete(&index_key(layer)).await?;
        for piece in target.names(&layer_prefix(layer)).await? {
            target.delete(&format!("{}/{piece}", layer_prefix(layer))).await?;
        }
        target.delete_directory(&layer_prefix(layer)).await?;
    }
    if !ask.counts {
        return Ok(None);
    }
    // The deletion is done, also if nobody knows what is left.
    let uncounted = |problem: &Problem| tracing::warn!(%problem, "a target is not counted");
    Ok(target.bytes().await.inspect_err(uncounted).ok())
}

/// The layers at the target that no backup needs: each before those on which it stands. So if a kill cuts this off, what the target has of a layer, it has of all
/// below.
async fn unneeded(
    target: &Target,
    needed: &BTreeSet<LayerId>,
    work: &Arc<Work>,
) -> Result<Vec<LayerId>, Problem> {
    let (reading, mut parents) = (Reading { target, work }, BTreeMap::new());
    for name in target.names(LAYERS).await? {
        let Ok(layer) = name.parse::<LayerId>() else { continue };
        if needed.contains(&layer) {
            continue;
        }
        parents.insert(layer, parent_of(&reading, layer).await?);
    }
    Ok(topmost_first(parents))
}

/// The layer on which this one stands at the target. Nothing can be said to stand on another layer through a damaged index.
async fn parent_of(reading: &Reading<'_>, layer: LayerId) -> Result<Option<LayerId>, Problem> {
    match reading.index_of(layer).await {
        Ok(index) => Ok(index.and_then(|index| index.parent)),
        Err(problem) if problem.kind == ProblemKind::Conflict => Ok(None),
        Err(problem) => Err(problem),
    }
}

fn topmost_first(mut parents: BTreeMap<LayerId, Option<LayerId>>) -> Vec<LayerId> {
    let mut stand_on = BTreeMap::<LayerId, usize>::new();
    for parent in parents.values().flatten() {
        *stand_on.entry(*parent).or_default() += 1;
    }
    let mut next: Vec<LayerId> =
        parents.keys().copied().filter(|layer| !stand_on.contains_key(layer)).collect();
    let mut ordered = Vec::new();
    while let Some(layer) = next.pop() {
        let Some(parent) = parents.remove(&layer) else { continue };
        ordered.push(layer);
        let Some(parent) = parent else { continue };
        if let Some(above) = stand_on.get_mut(&parent) {
            *above -= 1;
            if *above == 0 {
                next.push(parent);
            }
        }
    }
    // What stands on itself was made by nobody of us.
    ordered.extend(parents.into_keys());
    ordered
}

/// The layers of all backups at the target: those that manifests name, and those on which these stand by their indexes, which say what is
/// read. No layer is followed twice.
async fn needed(target: &Target, work: &Arc<Work>) -> Result<BTreeSet<LayerId>, Problem> {
    let reading = Reading { target, work };
    let (mut named, mut followed) = (BTreeSet::new(), BTreeSet::new());
    for name in target.names(MANIFESTS).await? {
        let Ok(name) = BackupName::new(name) else { continue };
        let manifest = match reading.manifest(&name).await {
            // It was just deleted.
            Err(problem) if problem.kind == ProblemKind::NotFound => continue,
            manifest => manifest?,
        };
        named.extend(manifest.layers.iter().map(|layer| layer.layer));
        let mut next = manifest.layers.first().map(|layer| layer.layer);
        while let Some(layer) = next.filter(|layer| followed.insert(*layer)) {
            next = parent_of(&reading, layer).await?;
        }
    }
    named.append(&mut followed);
    Ok(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_is_deleted_before_those_on_which_it_stands() {
        let layer = |n: u128| LayerId(uuid::Uuid::from_u128(n));
        // 5 and 1 stand on 3, which stands on 4, which stands on one that stays; 7 and 8 stand on each other.
        let parents =
            [(5, Some(3)), (1, Some(3)), (3, Some(4)), (4, Some(9)), (7, Some(8)), (8, Some(7))];
        let parents = parents.map(|(of, parent)| (layer(of), parent.map(layer)));
        let ordered = topmost_first(parents.into());
        let place = |n| ordered.iter().position(|one| *one == layer(n)).expect("it is deleted");
        assert_eq!(ordered.len(), 6);
        assert!(place(5) < place(3) && place(1) < place(3) && place(3) < place(4), "{ordered:?}");
    }
}
