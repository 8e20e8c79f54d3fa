//! HTTP/JSON between Perigee's processes: the client, the listener, and the answer for errors.
//!
//! An address is `http://HOST:PORT` or `unix:PATH`. Every wrong request answers with a
//! [`perigee_model::Problem`] in JSON and its HTTP status. The client returns the same `Problem`.

#![warn(missing_docs)]

mod client;
mod connections;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod memory;
mod server;

pub use client::Client;
pub use connections::ClientAddress;
pub use reqwest::{Body, Method};
pub use server::{
    BOOT_ID, Failure, Json, Listen, Reply, allow_many_files, bind_unix, boot_id, cannot_listen,
    serve, unused_port,
};
