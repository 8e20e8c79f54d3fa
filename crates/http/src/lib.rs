//! HTTP/JSON between Perigee's processes: the client, the listener, TLS, and the answer for errors.
//!
//! An address is `http://HOST:PORT`, `https://HOST:PORT` or `unix:PATH`. Every wrong request answers with a
//! [`perigee_model::Problem`] in JSON and its HTTP status. The client returns the same `Problem`.
//!
//! Over TLS both sides show a certificate of the cluster's authority ([`identity`]). A handler learns from [`Peer`] who
//! asks. [`guard::restrict`] refuses what the sender may not ask for, and [`terms::obey`] a controller that does not command any more.
//!
//! Each top-level module is a room, and a room imports only from the floors below its own (`scripts/check-floors`):
//!
//! ```text
//! floors, from the ground up:
//! files, ours, seldom, clock, memory, notify
//! certificate, reply, daemon
//! authority, trust, peer, slots, browsers
//! grants, verify
//! identity
//! network
//! claim, guard
//! connections
//! tunnel, websocket
//! client, server
//! terms, upload
//! fuzzing
//! ```
//!
//! | question | file |
//! |---|---|
//! | How do the bytes of a console, a screen and port 22 get to a client? | as a WebSocket from the controller: `websocket.rs`; to the controller: `tunnel.rs` |
//! | Which of the daemons' files can other users read? | none: `daemon.rs`; tested by `perigee/tests/walk/mod.rs` |
//! | How does a daemon tell systemd that it answers, and that it lives? | `notify.rs` |
//! | Could another user have put something else in a daemon's directory? | `ours.rs` |
//! | Which user is at the other end of a daemon's unix socket? | `Peer::of_plain` in `peer.rs` |
//! | Which requests of a browser are refused? | `guard.rs` |
//! | What may somebody cause as often as he likes without filling a log? | `seldom.rs` |
//! | How long may a client of the HTTP APIs be silent, and how many may there be? | `connections.rs`, `connections/places.rs` (for NBD and iSCSI too) |
//! | What becomes of a request that a web page makes its reader's browser send? | `guard.rs` |
//! | Which addresses may come from another host, and how long may an answer be? | `network.rs`, `client/answer.rs` |
//! | Who gets the operator's own certificate, and who the cluster's? | `browsers.rs` |
//! | What is in a certificate of the cluster, and which ones count? | `certificate.rs`, `authority.rs`, `trust.rs`, `verify.rs` |

#![warn(missing_docs)]

pub mod authority;
mod browsers;
pub mod certificate;
mod claim;
mod client;
pub mod clock;
mod connections;
mod daemon;
mod files;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod grants;
pub mod guard;
pub mod identity;
pub mod memory;
mod network;
pub mod notify;
pub mod ours;
mod peer;
mod reply;
mod seldom;
mod server;
mod slots;
pub mod terms;
#[cfg(test)]
mod tests;
pub mod trust;
mod tunnel;
mod upload;
mod verify;
pub mod websocket;

pub use authority::Authority;
pub use axum::body::Body;
pub use axum::http::Method;
pub use browsers::BrowserCertificate;
pub use certificate::{Certified, PeerIdentity};
pub use claim::{Claim, Refusal};
pub use client::{Client, NOTICE_HEADER, Response};
pub use clock::Clock;
pub use connections::places::{ConnectionPlace, Places};
pub use daemon::{prepare_daemon, private_directory, stopped};
pub use files::{read_private, write_private};
pub use grants::NoGrant;
pub use identity::Identity;
pub use network::{Network, authority_of};
pub use peer::{ClientAddress, Peer};
pub use reply::{Failure, Json, Reply};
pub use seldom::Seldom;
pub use server::{
    BOOT_ID, Bound, Listen, bind, bind_unix, boot_id, cannot_listen, serve, unused_port,
};
pub use slots::Slots;
pub use tunnel::{Begun, Tunnel, accept};
pub use verify::Expected;

/// The body of a request that sends a file.
pub fn file_body(file: tokio::fs::File) -> Body {
    Body::from_stream(tokio_util::io::ReaderStream::new(file))
}
