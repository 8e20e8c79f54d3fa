//! Deletes a backup, and the layers that no other backup at the target needs. The controller lets nobody ship to the target meanwhile.

use std::collections::BTreeSet;
use std::sync::Arc;

use perigee_model::backup::DeleteBackup;
use perigee_model::{BackupName, LayerId, Problem, ProblemKind};
use perigee_store::Work;

use super::format::{LAYERS, MANIFESTS, index_key, layer_prefix, manifest_key};
use super::restore::Reading;
use super::stopped;
use super::target::Target;

/// Deletes the backup. One that was cut off is done again from the beginning.
///
/// # Errors
/// `Unavailable` if the target fails, or the work was stopped; `Conflict` if another backup can't be read: then nobody knows which layers it needs, and all stay.
pub async fn delete(ask: &DeleteBackup, work: &Arc<Work>) -> Result<(), Problem> {
    let target = Target::new(&ask.at)?;
    target.look().await?;
    // It is none from now on. Its layers are nobody's, unless another one names them.
    target.delete(&manifest_key(&ask.backup)).await?;
    let needed = needed(&target, work).await?;
    let what = format!("can't delete backup {}", ask.backup);
    for name in target.names(LAYERS).await? {
        let Ok(layer) = name.parse::<LayerId>() else { continue };
        if needed.contains(&layer) {
            continue;
        }
        work.step(0).map_err(|_| stopped(&what))?;
        // Without its index, a layer is not there.
        target.delete(&index_key(layer)).await?;
        for piece in target.names(&layer_prefix(layer)).await? {
            target.delete(&format!("{}/{piece}", layer_prefix(layer))).await?;
        }
        target.delete_directory(&layer_prefix(layer)).await?;
    }
    Ok(())
}

/// The layers of all backups at the target.
async fn needed(target: &Target, work: &Arc<Work>) -> Result<BTreeSet<LayerId>, Problem> {
    let (reading, mut needed) = (Reading { target, work }, BTreeSet::new());
    for name in target.names(MANIFESTS).await? {
        let Ok(name) = BackupName::new(name) else { continue };
        let manifest = match reading.manifest(&name).await {
            // It was just deleted.
            Err(problem) if problem.kind == ProblemKind::NotFound => continue,
            manifest => manifest?,
        };
        needed.extend(manifest.layers.iter().map(|layer| layer.layer));
        // The indexes say what is read. A damaged one may say less than the manifest, never more.
        if let Ok(indexes) = reading.indexes(&manifest).await {
            needed.extend(indexes.iter().map(|index| index.layer));
        }
    }
    Ok(needed)
}
