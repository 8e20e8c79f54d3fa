//! The layers on which a volume stands that comes from another host, where they could not be made before
//! ([`crate::copies::incoming_layers`]).

use perigee_model::home::DepartedLayer;
use perigee_model::volume::Keep;
use perigee_model::{LayerId, Problem};

use crate::catalog::{LayerRow, RemoteRow};
use crate::pool::Pool;

impl Pool {
    /// The rows of the layers that this pool lacks, from the bottom up, and the layer on which the volume's
    /// new head stands. `chain` is the old home's, topmost layer first; its server is at `from_nbd_addr`.
    ///
    /// If the topmost layer is here, nothing is lacking. Otherwise one copy of it has all that it shows.
    ///
    /// # Errors
    /// A conflict when a volume of this pool writes that layer, or it has another size here: the caller clears the
    /// files of the rows.
    pub(crate) fn parent_rows(
        &self,
        what: &str,
        from_nbd_addr: &str,
        chain: &[DepartedLayer],
    ) -> Result<(Vec<LayerRow>, Option<LayerId>), Problem> {
        let Some(top) = chain.first() else { return Ok((Vec::new(), None)) };
        if self.has_staged(what, top)? {
            return Ok((Vec::new(), Some(top.layer)));
        }
        let size_bytes = Self::layer_size(what, top.size_bytes)?;
        let remote = RemoteRow {
            nbd_addr: from_nbd_addr.to_owned(),
            export: format!("{}{}", perigee_block::exports::LAYER_PREFIX, top.layer),
            size_bytes: top.size_bytes,
            keep: Keep::All,
            is_layer: Some(top.layer),
            own: false,
        };
        let confined = chain.iter().any(|layer| layer.leave_site.is_never());
        let new = LayerRow { id: top.layer, confined, ..LayerRow::new_head(size_bytes, None) };
        Ok((vec![LayerRow { remote: Some(remote), ..new }], Some(top.layer)))
    }
}
