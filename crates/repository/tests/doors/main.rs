//! The doors with the clients that people have: curl, OpenSSH, lftp, rclone, sshfs and litmus. They are Debian packages (`make setup`).

mod clients;
mod dav;
mod each_door;
mod ftps;
mod http;
mod mounted;
mod relay;
mod s3;
mod server;
mod sftp;
mod store;
