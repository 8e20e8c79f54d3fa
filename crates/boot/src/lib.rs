//! Network boot: machines with PXE or iPXE firmware find their disks.
//!
//! ```text
//! firmware ──DHCP──> dnsmasq ──TFTP──> iPXE ──HTTP──> script ──iSCSI or NBD──> volume server
//!                      (iPXE firmware skips TFTP)        │
//!                                            asks the volume server for the
//!                                            disk of the card's address
//! ```
//!
//! | question | module |
//! |---|---|
//! | the configuration | `config` |
//! | dnsmasq's configuration, start and end | `dnsmasq` |
//! | which machines get an address | `cards` |
//! | the scripts for a machine's firmware | `script` |
//! | the HTTP server | `serve` |
//! | what is missing on the network | `check` |
//! | which DHCP servers answer | `dhcp` |
//! | Which scripts does the firmware of a machine without a disk get, and which machines get an address? | `dnsmasq.rs`, `script.rs`; addresses: `cards.rs` |
//! | How is a network checked before machines boot? | `check.rs` |
//!
//! The boot server keeps no state except for dnsmasq's leases: the volume server knows which client boots
//! what. After a crash the next start writes dnsmasq's configuration again and ends the old dnsmasq.

mod cards;
mod check;
mod config;
mod dhcp;
mod dnsmasq;
mod script;
mod serve;

pub use check::{Finding, check};
pub use config::{Config, Dhcp, Interface};
pub use serve::serve;
