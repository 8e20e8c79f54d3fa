//! A volume that comes from a backup and can be used at once.
//!
//! The volume's head stands on one new layer, a copy of own blocks ([`crate::layers::copy`]) whose source is the backup instead of another host. The layer's durable map
//! says from the beginning which blocks the backup has. So a missing block is fetched when it is read, the background fetches the rest, a kill or a power cut loses
//! nothing of what writers did, and a layer that lacks nothing is a sealed layer like any other.
//!
//! The source compares each byte with its checksum before it is given out. Blocks that are damaged there stay missing, and the others come.

use std::sync::Arc;

use perigee_model::backup::{BackupTarget, RestoringLayer};
use perigee_model::volume::{BLOCK_BYTES, Keep, VolumeInfo};
use perigee_model::{BackupName, LayerId, Problem};

use super::NewIncoming;
use crate::catalog::{LayerRow, RemoteRow, failed};
use crate::disk::blocks::BlockStates;
use crate::layers::remote::RemoteParent;
use crate::pool::Pool;
use crate::volume::io_problem;
use crate::work::Work;

impl Pool {
    /// Makes a volume over a new layer that gets its bytes from a backup from now on. The layer remembers whether the backups there are encrypted.
    ///
    /// # Errors
    /// A conflict when a name is taken, or the backup damaged; unsupported when the backup does not say what it has; what the target says.
    pub async fn restore_at_once(
        self: &Arc<Self>,
        new: NewIncoming,
        layer: LayerId,
        from: &BackupTarget,
        is_sealed: bool,
        backup: &BackupName,
    ) -> Result<VolumeInfo, Problem> {
        let what = format!("can't restore volume {}", new.name);
        let nbd_addr = if is_sealed { from.as_sealed_source() } else { from.as_source() };
        let export = backup.to_string();
        let device = (self.connect.connect)(nbd_addr.clone(), export.clone()).await?;
        let size_bytes = Self::layer_size(&what, device.size_bytes())?;
        if size_bytes != device.size_bytes() {
            return Err(Problem::conflict(what, "the backup ends within a block"));
        }
        let (keep, is_layer) = (Keep::All, device.layer());
        let row = RemoteRow { nbd_addr, export, size_bytes, keep, is_layer, own: true };
        let remote = RemoteParent::connected(row.clone(), &self.connect, device)
            .map_err(|why| Problem::conflict(&what, why))?;
        let states = remote.own_states().await.map_err(|error| io_problem(&what, &error))?;
        let name = new.name.clone();
        self.change(move |pool| {
            pool.check_incoming(&what, &new, layer)?;
            let row = LayerRow { remote: Some(row), ..LayerRow::new(layer, size_bytes, None) };
            let row = LayerRow { confined: new.leave_site.is_never(), ..row };
            pool.put_on_backup(&what, &new, &row, remote, &states)
        })
        .await?;
        self.volume_info(&name).await
    }

    fn put_on_backup(
        &self,
        what: &str,
        new: &NewIncoming,
        row: &LayerRow,
        remote: RemoteParent,
        states: &BlockStates,
    ) -> Result<(), Problem> {
        // All of it comes by itself, and the other volumes of the pool need space too.
        self.check_room(what, states.remote_bytes(), &Work::gentle())?;
        self.make_own_files(row.id, row.size_bytes, states).map_err(|error| {
            self.remove_layers(&[row.id]);
            io_problem(what, &error.into())
        })?;
        let added = self.catalog.add_volume_on(row, &new.over(row));
        added.map_err(|error| self.not_recorded(what, &[row.id], &error))?;
        if let Err(error) = self.open_new_copy(row, remote) {
            tracing::error!(%error, "can't open a layer that was just made");
        }
        self.to_fill.notify_one();
        Ok(())
    }

    /// The layers of this pool that still get bytes from a backup.
    ///
    /// # Errors
    /// When the catalog can't be read.
    pub async fn restoring(self: &Arc<Self>) -> Result<Vec<RestoringLayer>, Problem> {
        self.run(|pool| {
            let what = "can't list the layers that come from backups";
            let rows = pool.catalog.layers().map_err(failed(what))?;
            Ok(rows.into_iter().filter_map(|(row, _)| pool.restoring_layer(&row)).collect())
        })
        .await
    }

    fn restoring_layer(&self, row: &LayerRow) -> Option<RestoringLayer> {
        let remote = row.remote.as_ref()?;
        let from = remote.target()?;
        let copy = self.layer_copy(row.id);
        // As long as the catalog does not have it as complete, not all was compared, or made durable.
        let missing_bytes = copy.as_ref().map_or(row.size_bytes, |copy| copy.missing_bytes());
        let problem = copy.as_ref().map(|copy| copy.why_not_filled().unwrap_or_default());
        Some(RestoringLayer {
            layer: row.id,
            backup: remote.export.clone(),
            from,
            missing_bytes: missing_bytes.max(BLOCK_BYTES),
            problem: problem.unwrap_or_else(|| "its files can't be opened".to_owned()),
            is_damaged: copy.is_some_and(|copy| copy.is_source_damaged()),
            // The volume server says that.
            lacks_key: false,
        })
    }
}
