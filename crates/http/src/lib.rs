//! HTTP/JSON between Perigee's processes: one client, one way to listen, one error answer.
//!
//! An address is `http://HOST:PORT` or `unix:PATH`. Every wrong request answers with a
//! [`perigee_model::Problem`] in JSON and its HTTP status; the client gives that same `Problem` back.

mod client;
mod connections;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod server;

pub use client::Client;
pub use reqwest::{Body, Method};
pub use server::{
    Failure, Json, Listen, Reply, allow_many_files, bind_unix, cannot_listen, serve, unused_port,
};
