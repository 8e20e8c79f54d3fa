//! As much of an iSCSI initiator as experiments need, written apart from the target's own code.

pub mod session;
pub mod wire;
