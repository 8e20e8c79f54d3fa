//! The doors with the clients that people have: curl, OpenSSH, lftp and rclone. They are Debian packages (`make setup`).

mod clients;
mod each_door;
mod ftps;
mod http;
mod relay;
mod server;
mod sftp;
mod store;
