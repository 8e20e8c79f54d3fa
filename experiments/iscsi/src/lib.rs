//! The parts of an iSCSI initiator that experiments need. It shares no code with the target.

pub mod session;
pub mod wire;
