//! The volume server: serves the layer store over NBD and iSCSI, and provides the API that controls it.
//!
//! | question | where |
//! |---|---|
//! | what is on the disk, and what survives a crash | [`perigee_store`] |
//! | the NBD protocol | [`perigee_nbd`] |
//! | the iSCSI protocol | [`perigee_iscsi`] |
//! | the types that these three share | [`perigee_block`] |
//! | which device an export name means | `exports` |
//! | sessions on volumes of other hosts | `proxies`; opened before their client comes: `ahead` |
//! | what such a session does with a request | `proxy` |
//! | what is fetched before it is asked for | `perigee_model::read_ahead` |
//! | what is kept of it in memory, and why that is right | `coherent`, `cache` |
//! | what becomes of them when the home gets another address | `repoint` |
//! | a volume leaves this server, or comes here, with open sessions | `handover`, `turns` |
//! | where a volume is that has left the home which is known here | `redirect` |
//! | how a session that is held gets its volume again | `reopen` |
//! | which site an asker is at, and what it may have | `sites` |
//! | which iSCSI initiators the pool knows | `iscsi_clients` |
//! | to whom their secrets were given | `boot_secrets` |
//! | which files an image may be made of | `sources` |
//! | how other hosts are reached | `remotes` |
//! | the control API | `control`, `observe` |
//! | what keeps this process's memory off the disks | `memory` |
//! | backups of volumes: shipped, read, restored | `backups` |
//! | how disks are measured | `measure` |
//! | figures for Prometheus | `metrics` |
//! | each VM's own NBD socket | `vm_sockets` |
//! | starting and stopping | `serve` |
//! | the control API without a server, for one command | `offline` |
//! | What does an export name mean; what is proxied? | `exports.rs` |
//! | Through which socket does a VM reach its disks, and who else can use it? | `vm_sockets.rs`, `nbd/src/server/vm_socket.rs`; who asks for it: `agent/src/vm/socket.rs` |
//! | Which files may an image be made of, and what reads them? | `sources.rs`, `store/src/images/qemu_img.rs` |
//! | How does a tree of files become an image, and what may it have? | `dir_images.rs`, `store/src/images/dir_images.rs` |
//! | How are other hosts reached, and encrypted? | `remotes.rs`, `nbd/src/client/tls.rs`, `nbd/src/server/tls.rs`; certificates of an operator's own, which change: `nbd/src/of_files.rs` |
//! | Why do requests at the old home wait only for two round trips? | `preconnected.rs`; how an export is opened in one: `nbd/src/client/handshake.rs` |
//! | How does a session or a client find a volume that has left its home? | `redirect.rs` |

#![warn(missing_docs)]

mod admissions;
mod ahead;
mod backups;
mod boot_secrets;
mod cache;
mod coherent;
mod control;
mod dir_images;
mod exports;
mod handover;
mod iscsi_clients;
mod measure;
mod metrics;
mod observe;
mod offline;
mod preconnected;
mod probe;
mod proxies;
mod proxy;
mod redirect;
mod remotes;
mod reopen;
mod replicas;
mod repoint;
mod serve;
mod shared_layers;
mod sites;
mod sources;
mod turns;
mod vm_sockets;

pub use offline::Offline;
pub use perigee_nbd::{RemoteTlsFiles, ServerOptions, ServerTls, TlsFiles};
pub use remotes::RemoteOptions;
pub use serve::{Config, IscsiOptions, serve, serve_until};
