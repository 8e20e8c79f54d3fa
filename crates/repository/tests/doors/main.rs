//! The doors with the clients that people have: curl and cadaver. They are Debian packages (`make setup`).

mod http;
mod server;
