//! Volumes, images and their copies: where each is, where it moves, and what hosts are told about it.

pub mod attach;
pub mod backups;
pub mod given_up;
pub mod images;
pub mod leave_site;
pub mod left_behind;
pub mod moves;
pub mod replicas;
pub mod unknown;
pub mod volumes;
