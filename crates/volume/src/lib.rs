//! Layers, volumes and their NBD exports: the volume server.
//!
//! | question | module |
//! |---|---|
//! | what is on the disk, and what survives a crash | [`store`] |
//! | what an NBD client may say and gets | [`nbd`] |
//! | what an iSCSI initiator may say and gets | [`iscsi`] |
//! | how frames come from and go to sockets, for every protocol | `stream` |
//! | which device an export name means; proxying to a volume's home | `exports` |
//! | how other hosts are reached | `remotes` |
//! | the control API | `control` |
//! | who uses which volume now | `logins` |
//! | where requests' time goes | `stats`, `trace`, `metrics` |
//! | starting and stopping | `serve` |
//! | the control API without a server, for one command | `offline` |

mod control;
pub mod device;
mod exports;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod iscsi;
mod logins;
mod metrics;
pub mod nbd;
mod observe;
mod offline;
mod probe;
mod recording;
mod remotes;
mod serve;
mod stats;
pub mod store;
mod stream;
mod trace;

pub use nbd::{RemoteTlsFiles, ServerOptions, TlsFiles};
pub use offline::Offline;
pub use remotes::RemoteOptions;
pub use serve::{Config, IscsiOptions, serve};
