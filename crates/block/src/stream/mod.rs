//! What the block protocols share below their frames: listening, the driver of a
//! connection, sockets, and buffers towards and from them.
//!
//! A connection reads whatever its socket has with one call, and sends many answers with one. It
//! holds memory only while something is in it.

/// A longer request is not answered at once: copying it would keep others waiting.
pub const AT_ONCE_BYTES_MAX: usize = 1 << 20;

pub mod accept;
pub mod buffers;
pub mod connection;
pub mod input;
pub mod output;
pub mod socket;
