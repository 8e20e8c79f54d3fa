//! The doors with the clients that people have: curl, OpenSSH and lftp. They are Debian packages (`make setup`).

mod http;
mod server;
mod sftp;
mod store;
