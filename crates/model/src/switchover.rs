//! The switchover of a live migration: who may run the VM, and who may write its volumes.
//!
//! Pure functions, and the code that runs: the agents at both ends, the volumes' homes and the
//! controller call them, and the tests here walk them with messages lost, doubled and late and
//! with crashes at every step.
//!
//! The source's agent stores a [`Switchover`]:
//!
//! ```text
//! source ─note─> noted ─raise─> raising ─let go─> let_go ─ran─> destination
//!    ^             │ QEMU stopped  │ QEMU stopped    │ did not run
//!    ├─────────────┘  sending      v  sending        v
//!    └────────flipped back──── returning <───────────┘
//! ```
//!
//! - `source`: every epoch is the source's; it may run the VM, and nobody else may.
//! - `noted`: it is stored that the switch comes, so that nothing has to be stored in the pause.
//!   Nothing was raised. An agent that is back and finds QEMU still copying is here again.
//! - `raising`: raises were sent. QEMU was not told to send the last state, so the destination
//!   can never run the VM. On disk `noted` and `raising` are `let_go`: one write for all three.
//! - `let_go`: the destination may have the last state. Its agent knows whether it ran; and where an
//!   epoch was not raised, which its home knows, QEMU was never told to send the last state.
//! - `returning`: the destination never runs the VM. The epochs go back, then the source runs.
//! - `destination`: the VM is there for good.
//!
//! The destination's QEMU starts stopped (`-S`). When the state has arrived, its agent first
//! stores that the VM runs there ([`Arrival`]) and then lets it run. So "did not run" is known,
//! also after a crash; an agent that has no record of the VM says that it does not know.

mod destination;
mod home;
mod judge;
mod orders;
mod source;
#[cfg(test)]
mod walk;

pub use destination::{Arrival, ArrivalStep, Fate, fate, on_arrival};
pub use home::{EpochRefused, WriterEpochs};
pub use judge::{Seen, SeenVm, Verdict, judge};
pub use orders::{NotBegun, NotCancelled, OnCancel, may_begin, on_cancel};
pub use source::{Outgoing, QemuRequest, Sending, Step, Switchover, SwitchoverEvent};
