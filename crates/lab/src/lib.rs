//! Sites and hosts on one machine: each host a network namespace with its own agent, volume server
//! and pool, one controller, and a WAN with delay between the sites; and the demo that runs in it.
//!
//! | question | file |
//! |---|---|
//! | what is a lab called, which addresses has it | `definition.rs` |
//! | how do packets get from host to host | `net.rs` |
//! | what is the WAN between the sites like | `wan/` |
//! | what may stand in a lab's definition file | `lab_file.rs` |
//! | who starts the daemons again | `supervisor.rs` |
//! | how does it come up, how does it go without a trace | `up.rs`, `down.rs` |
//! | where are its sockets and logs | `state.rs` |
//! | tables, queries and independent answers | `tpch/` |
//! | what does `make demo` do | `demo/` |
//! | how do machines without disks get their network | `diskless.rs` |
//! | what does `perigee lab run boot-storm` do | `storm/` |
//! | what does `perigee lab run soak` do | `soak/` |
//! | how is the report drawn | `report/` |
//! | how do long programs end when they are told to | `interrupt.rs` |

mod command;
pub mod definition;
pub mod demo;
pub mod diskless;
mod down;
mod images;
pub mod interrupt;
pub mod lab_file;
pub mod net;
mod netns;
mod process;
mod progress;
pub mod report;
pub mod soak;
mod state;
pub mod storm;
mod supervisor;
pub mod tpch;
mod up;
pub mod usage;
pub mod wan;

pub use definition::{Definition, LabId, Link, SiteDef};
pub use down::{down, down_all, remains};
pub use images::import_everywhere;
pub use progress::{Step, Steps};
pub use state::DEFAULT_BASE;
pub use supervisor::supervise;
pub use up::{Lab, LabSummary, Options, list, run, up, with_lab};
