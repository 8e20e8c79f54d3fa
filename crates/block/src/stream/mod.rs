//! The parts that the block protocols share: listening, the driver of a connection, sockets, and their
//! input and output buffers.
//!
//! A connection reads everything that its socket has with one call, and sends many answers with one. It
//! holds buffers only while they contain something.

/// A longer request is not answered at once, because copying its data would delay others.
pub const AT_ONCE_BYTES_MAX: usize = 1 << 20;

pub mod accept;
pub mod buffers;
pub mod connection;
pub mod input;
pub mod output;
pub mod socket;
