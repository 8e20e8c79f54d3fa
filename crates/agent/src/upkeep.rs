//! The endless tasks of the agent that keep what VMs need right while the VMs run, and look at them.
//!
//! | what is kept right | file |
//! |---|---|
//! | the NBD sockets at the volume server | `sockets.rs` |
//! | what is known of the VMs' last minute | `load.rs` |
//! | networks of tenants: bridges, tunnels, gateways, the packet filter | `networks.rs` |
//! | the packet filter of user networks, and of cards in bridges of the operator | `user_networks.rs` |
//! | the lease of a rented host | `lease.rs` |
//! | what is known of its provider's notices | `notices.rs` |
//!
//! Each task sees the VMs of this host and what the parts below it hold. No part below sees the list of VMs: it is given what it
//! needs of them.

pub mod lease;
pub mod load;
pub mod networks;
pub mod notices;
pub mod sockets;
pub mod user_networks;
