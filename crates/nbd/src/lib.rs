//! The Network Block Device protocol: a server for
//! [`perigee_block::device::Device`]s, and a client that is one.
//!
//! One file per stage: [`wire`] turns bytes into frames and back and never does any I/O;
//! `server::negotiation` picks an export, `server::transmission` runs its requests;
//! `client::handshake` asks for an export, `client::link` keeps its requests alive across connections.
//!
//! Only the fixed newstyle handshake is spoken. Every length that comes from the other side is
//! checked before memory is allocated for it, and a frame that makes no sense ends the connection:
//! after it nobody knows where the next one begins.
//!
//! | question | file |
//! |---|---|
//! | Which NBD messages may a client send? | `wire/`, `server/` |
//! | Why does the reply to a read end with a chunk of its own? | `put_data_end` in `wire/answer.rs`; the test with QEMU: `tests/qemu.rs` |
//! | Which client sees which export? | `server/access.rs`; who may join a volume's writer: `epoch_of_session` in `volume/src/exports.rs` |
//! | How does a proxy survive its home's restart, and how do its several connections keep their order? | `client/link.rs` |

pub mod client;
mod of_files;
mod pem;
pub mod server;
pub mod wire;

/// Entries for the fuzz targets.
#[cfg(feature = "fuzzing")]
pub mod fuzzing {
    pub use super::client::fuzzing::client;
    pub use super::server::fuzzing::{handshake, transmission};
}

pub use client::{
    ClientTls, Durability, NbdDevice, Opened, PATIENCE_DEFAULT, Prepared, RemoteExport,
    RemoteTlsFiles,
};
pub use server::{ServerOptions, ServerTls, TlsFiles};

#[cfg(test)]
mod tests;
