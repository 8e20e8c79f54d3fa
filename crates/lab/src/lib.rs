//! Labs: several sites and hosts on one machine. Each host is a network namespace with its own agent,
//! volume server and pool. A lab has one controller, and a WAN with delay between the sites. The demo,
//! the soak and the boot storm run in labs.
//!
//! | question | file |
//! |---|---|
//! | which names and addresses does a lab have | `definition.rs` |
//! | how do packets get from host to host | `net.rs` |
//! | what is the WAN between the sites like | `wan/` |
//! | which fields has a lab's definition file | `lab_file.rs` |
//! | what restarts the daemons | `supervisor.rs` |
//! | how fast are the hosts' network cards | `cards.rs` |
//! | what does somebody see who listens in a network | `capture.rs` |
//! | how is a lab started and removed | `up.rs`, `down.rs` |
//! | where are its sockets and logs | `state.rs` |
//! | tables, queries and independent answers | `tpch/` |
//! | what does `make demo` do | `demo/` |
//! | how does a measurement run and move jobs | `cluster.rs` |
//! | what do the experiments share | `measuring.rs` |
//! | how are figures of papers judged beside ours | `paper.rs` |
//! | how does a QEMU run without Perigee | `bare/` |
//! | how do machines without disks get their network | `diskless.rs` |
//! | what does `perigee lab run boot-storm` do | `storm/` |
//! | what does `perigee lab run soak` do | `soak/` |
//! | what does `perigee lab run faults` do | `faults/` |
//! | what does `perigee lab run balance` do | `balance/` |
//! | what does `make demo-burst` do | `burst/` |
//! | what does `perigee lab simulate` do | `simulate/` |
//! | how can hosts be rented in a lab | `rent/` |
//! | how is the report drawn | `report/` |
//! | how do long programs clean up after a signal | `interrupt.rs` |
//! | How is the lab's network made? | `net.rs` |
//! | When does a frame arrive at another site, and what carries it? | `wan/wire.rs`, `wan/relay.rs`, `wan/netem.rs` |
//! | Which fields has a lab's definition file? | `lab_file.rs` |
//! | How is a lab removed completely? | `down.rs` |
//! | How do real machines without disks boot together in a lab? | `storm/mod.rs`, `diskless.rs` |
//! | What is broken in a soak, and what must still hold? | `soak/mod.rs`, `soak/breaks.rs` |
//! | What does `make faults` test: which fault comes in which phase, and what must hold afterwards? | `faults/table.rs`, `faults/mod.rs` |
//! | What does `make demo` do? | `demo/mod.rs` |
//! | How do experiments run and move jobs in a lab, and run a QEMU without Perigee? | `cluster.rs`, `bare/mod.rs` |

pub mod balance;
pub mod bare;
pub mod burst;
pub mod capture;
pub mod cards;
pub mod cluster;
mod command;
pub mod definition;
pub mod demo;
pub mod diskless;
mod down;
pub mod faults;
mod images;
pub mod interrupt;
pub mod lab_file;
pub mod measuring;
pub mod net;
pub mod netns;
pub mod paper;
mod process;
mod progress;
mod random;
pub mod rent;
pub mod report;
pub mod simulate;
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
pub use process::own_cpus;
pub use progress::{Step, Steps};
pub use state::DEFAULT_BASE;
pub use supervisor::supervise;
pub use up::{Lab, LabSummary, Options, list, run, up, with_lab};
