//! The volume server as a process, driven by the programs people use: QEMU's tools, libnbd's, fio.

mod backups;
mod cold;
mod confined;
mod copies;
mod doors;
mod epochs;
mod faults;
mod grants;
mod handover;
mod image_backups;
mod iscsi;
mod kills;
mod oracles;
mod proxy;
mod replicas;
mod restoring;
#[path = "../../../repository/tests/doors/s3.rs"]
mod s3;
mod sealed_backups;
mod server;
mod small;
mod tools;
