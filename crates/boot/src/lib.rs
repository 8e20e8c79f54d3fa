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
//! | where things are on the network | `config` |
//! | what dnsmasq is told, and how it ends with us | `dnsmasq` |
//! | what a machine's firmware is told to do | `script` |
//! | the HTTP server, and who it asks | `serve` |
//! | what is missing on the network | `check` |
//! | which DHCP servers answer | `dhcp` |
//!
//! Nothing here is kept: who boots what is the volume server's business. After a crash the next start
//! writes dnsmasq's configuration anew and ends what is left of the old one; only the leases stay.

mod check;
mod config;
mod dhcp;
mod dnsmasq;
mod script;
mod serve;

pub use check::{Finding, check};
pub use config::{Config, Dhcp, Interface};
pub use serve::serve;
