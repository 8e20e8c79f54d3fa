//! The iSCSI target, driven by the initiators people use: libiscsi's programs and QEMU's driver; and
//! by initiators that break every rule.

mod bad;
mod claims;
mod conformance;
mod edges;
mod full;
mod proofs;
mod wire;
