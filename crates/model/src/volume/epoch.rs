//! Writer epochs, and what a migration asks of all its volumes in one request.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Epoch, VolumeName};

/// An epoch that was never issued before. No session may write with it until the volume is raised to it.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
pub struct EpochIssued {
    /// No other request is ever answered with this number.
    pub epoch: Epoch,
}

/// A compare-and-swap of the writer's epoch. It is refused with a conflict unless the volume's epoch is `from`
/// (or already `to`, so that a repeated call succeeds) and `to` was issued. A change to an older epoch
/// invalidates `from`: a late raise to it is refused. When the answer is sent, all writes with the old epoch
/// have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub struct EpochChange {
    /// The epoch that the volume has now.
    pub from: Epoch,
    /// The epoch to change to.
    pub to: Epoch,
}

/// Changes the epochs of several volumes in one request; a migration does this in its pause. All changes are
/// tried, each as an [`EpochChange`]. A repeated call succeeds.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct EpochChanges {
    /// At most [`crate::limits::BATCH_VOLUMES`].
    pub changes: Vec<VolumeEpochChange>,
}

/// One volume's part of [`EpochChanges`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeEpochChange {
    /// A volume whose home is this server.
    pub volume: VolumeName,
    /// The change, flat beside the name in JSON.
    #[serde(flatten)]
    pub change: EpochChange,
}

/// Flushes volumes whose home is this server.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct FlushVolumes {
    /// At most [`crate::limits::BATCH_VOLUMES`].
    pub volumes: Vec<VolumeName>,
}

/// Opens sessions on attached volumes for a client that is about to connect, one after the other. A session
/// that fails to open here is opened when the client connects.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct OpenAhead {
    /// The names of exports that the client will open; at most [`crate::limits::BATCH_VOLUMES`].
    pub exports: Vec<String>,
}
