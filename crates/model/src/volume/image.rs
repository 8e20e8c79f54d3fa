//! Images and snapshots: their import, their copies from other hosts, and what is known of them.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ContentDigest;
use crate::{HostId, ImageName, LayerId, LeaveSite};

/// A named sealed layer with its chain: an imported image or a snapshot.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ImageInfo {
    /// Unique in the pool; images and snapshots share their names.
    pub name: ImageName,
    /// The topmost layer, the same at every host that has a copy.
    pub layer: LayerId,
    /// Size of the address space.
    pub size_bytes: u64,
    /// Bytes that are `data` in the whole chain, topmost layer first.
    pub allocated_bytes: u64,
    /// Layers from the top down.
    pub chain: Vec<LayerId>,
    /// Volumes and images that stand on it.
    pub children: u64,
    /// Where the rest comes from; `None` for an image that is complete.
    pub remote: Option<ImageSource>,
    /// What it shows; of one that is not complete, what it has to show. `None` if that is not known yet.
    pub content: Option<ContentDigest>,
    /// Whether it may leave its site.
    pub leave_site: LeaveSite,
    /// In the answer to an import: what its user is to know about it, for example that it is longer than its file. Otherwise empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
}

/// What became of an image that was deleted: its name is free.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeletedImage {
    /// The volumes and images that stand on its layer, for example `volume web-root`. The layer stays until it is merged
    /// into the only one that needs it, in the background.
    pub stands_on_it: Vec<String>,
}

impl ImageInfo {
    /// Whether nothing may be made of this copy of an image with this content: it is complete and shows something else, or what
    /// came from its source was not the content.
    pub fn is_bad(&self, wanted: Option<ContentDigest>) -> bool {
        match &self.remote {
            Some(remote) => remote.refused || remote.unclear,
            None => wanted.is_some_and(|wanted| self.content.is_some_and(|found| found != wanted)),
        }
    }
}

/// The export of another host that an image is a copy of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageSource {
    /// `HOST:PORT` of the other host's NBD server.
    pub nbd_addr: String,
    /// The export's name there, `image:NAME` or `layer:UUID`.
    pub export: String,
    /// Which blocks stay here.
    pub keep: Keep,
    /// Bytes that are not here. Some of them may turn out to be empty at the source; these are never
    /// fetched.
    pub missing_bytes: u64,
    /// Why the rest could not be copied in the background at the last try; `None` if it could. It is tried again.
    pub failed: Option<String>,
    /// What came from there is not the image's content. What had come was dropped, and the rest is not fetched in the
    /// background from there.
    pub refused: bool,
    /// What came is not the image's content, several times, and it is not known whose fault that is. What had come was
    /// dropped, and the rest is not fetched in the background from there.
    pub unclear: bool,
}

/// Which blocks a copy keeps of those that it reads from the other host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// None: for data that may not leave its site.
    Never,
    /// Those that clients read.
    Read,
    /// All: those that no client reads are fetched in the background.
    #[default]
    All,
}

/// A text that names no [`Keep`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not what a copy can keep: use never, read or all")]
pub struct BadKeep(String);

impl std::str::FromStr for Keep {
    type Err = BadKeep;

    fn from_str(text: &str) -> Result<Self, BadKeep> {
        match text {
            "never" => Ok(Self::Never),
            "read" => Ok(Self::Read),
            "all" => Ok(Self::All),
            _ => Err(BadKeep(text.chars().take(80).collect())),
        }
    }
}

impl std::fmt::Display for Keep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Never => "never",
            Self::Read => "read",
            Self::All => "all",
        })
    }
}

/// Makes an image that is a copy of a sealed layer of another host. It can be used at once: blocks that are
/// not here are read from there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CopyImage {
    /// `HOST:PORT`.
    pub nbd_addr: String,
    /// An export that no client writes. Default: the image of the same name.
    #[serde(default)]
    pub export: Option<String>,
    /// Which blocks stay here. Default: all.
    #[serde(default)]
    pub keep: Keep,
    /// The sealed layer that the export must be; another one is refused.
    #[serde(default)]
    pub layer: Option<LayerId>,
    /// What the copy has to show when it is complete; another content is refused. `None`: what comes is compared with the
    /// checksums of the other host only.
    #[serde(default)]
    pub content: Option<ContentDigest>,
}

/// A format of disk images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ImageFormat {
    /// The disk's bytes as they are.
    Raw,
    /// QEMU's.
    Qcow2,
    /// VMware's.
    Vmdk,
    /// Hyper-V's.
    Vhdx,
    /// Its predecessor, also Azure's and Xen's.
    Vhd,
    /// VirtualBox's.
    Vdi,
}

impl ImageFormat {
    const ALL: [Self; 6] = [Self::Raw, Self::Qcow2, Self::Vmdk, Self::Vhdx, Self::Vhd, Self::Vdi];

    /// As people name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
            Self::Vmdk => "vmdk",
            Self::Vhdx => "vhdx",
            Self::Vhd => "vhd",
            Self::Vdi => "vdi",
        }
    }

    /// As `qemu-img` names it.
    pub fn qemu_name(self) -> &'static str {
        match self {
            Self::Vhd => "vpc",
            other => other.name(),
        }
    }

    /// The format that `qemu-img` names so.
    pub fn of_qemu(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.qemu_name() == name)
    }
}

impl FromStr for ImageFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|format| format.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("{text:?} is none of the formats {names}")
        })
    }
}

/// What [`ImportImage::source`] begins with if the file was uploaded to the volume server.
pub const UPLOAD_PREFIX: &str = "upload:";

/// What [`ImportImage::source`] begins with if a tree of files was sent to the volume server. The image is a filesystem
/// with these files.
pub const TREE_PREFIX: &str = "tree:";

/// A file that was uploaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Upload {
    /// The host that has it. `None`: the volume server that answers.
    pub host: Option<HostId>,
    /// The source of an image that is made of it, at this host. It is removed when the import has ended, or after an
    /// hour without one.
    pub source: String,
    /// Its length.
    pub bytes: u64,
}

/// A disk image to take into the pool.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ImportImage {
    /// Unique in the pool.
    pub name: ImageName,
    /// What `qemu-img convert` reads: what an upload was answered with ([`Upload::source`]), or a path on the volume
    /// server's machine, below a directory that it was started with. The server's own user may name any path, and an
    /// `nbd://HOST:PORT/EXPORT` address. A file may not have a backing file.
    pub source: String,
    /// The source's format. `None`: `qemu-img` finds it out.
    #[serde(default)]
    pub format: Option<ImageFormat>,
    /// The UUID to give the layer: set when this is a copy of a sealed layer of another host.
    #[serde(default)]
    pub layer: Option<LayerId>,
    /// Whether it may leave its site.
    #[serde(default)]
    pub leave_site: LeaveSite,
}
