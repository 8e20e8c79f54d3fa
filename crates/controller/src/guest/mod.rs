//! What guests read and write: disks of seeds, of cloud-init and of firmware, and archives.

mod fat;
pub mod nocloud;
pub mod nvram;
pub mod tars;
pub mod user_data;
