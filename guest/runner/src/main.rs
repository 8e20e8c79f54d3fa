//! The runner in the guest. It reads the job from the seed disk, runs it, reports to the host, writes the
//! outputs, and powers the guest off. `perigee_model::guest` is the contract with the host.
//!
//! It needs a kernel with devtmpfs, sysfs and version 2 cgroups, `mkfs.ext4` and `/bin/sh`. It needs no particular init, no udev,
//! no network and no login. The guest may be migrated at any moment, so nothing here depends on elapsed time or
//! on one persistent connection.
//!
//! | question | file |
//! |---|---|
//! | How do its guests find each other, and wait for all? | `gang.rs` |
//! | What does the runner in the guest do? | `main.rs` |

mod channel;
mod clock;
mod cloud_init;
mod command;
mod disks;
mod error;
mod gang;
mod globs;
mod host_name;
mod job;
mod lines;
mod network;
mod outbox;
mod outputs;
mod processes;
mod program;
mod progress;
mod seed;

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::reboot::{RebootMode, reboot};
use nix::time::{ClockId, clock_gettime};
use perigee_model::guest::GuestBody;

use crate::command::Wishes;
use crate::outbox::Outbox;

/// How long the runner waits until a host has stored the end of the job. Its agent may be away, and without the last messages the
/// job counts as failed.
const LAST_ACK_DEADLINE: Duration = Duration::from_secs(24 * 3600);

fn main() {
    let outbox = Arc::new(Outbox::new(uptime_ms));
    let wishes = Arc::new(Wishes::default());
    channel::start(Arc::clone(&outbox), Arc::clone(&wishes));
    let last = outbox.push(match job::run(&outbox, &wishes) {
        Ok(written) => GuestBody::Finished {
            output_bytes: written.bytes,
            output_sha256: written.sha256,
            lacks: written.lacks.map(|lacks| lines::shorten(&lacks)),
        },
        Err(error) => {
            let reason = lines::shorten(&error.to_string());
            console(&reason);
            GuestBody::Failed { reason }
        }
    });
    if !outbox.wait_acked(last, Instant::now() + LAST_ACK_DEADLINE) {
        console("no host stored the end of the job within its deadline");
    }
    nix::unistd::sync();
    // This returns only if the kernel refused. In the golden image systemd then powers off, because its only service has ended.
    let Err(error) = reboot(RebootMode::RB_POWER_OFF);
    console(&format!("power off: {error}"));
}

fn uptime_ms() -> u64 {
    clock_gettime(ClockId::CLOCK_BOOTTIME)
        .ok()
        .and_then(|since_boot| u64::try_from(Duration::from(since_boot).as_millis()).ok())
        .unwrap_or_default()
}

/// Writes to the serial console what can't be sent over the channel.
fn console(message: &str) {
    if let Ok(mut log) = std::fs::OpenOptions::new().write(true).open("/dev/kmsg") {
        // A failure here can't be reported anywhere.
        log.write_all(format!("<3>perigee-runner: {message}\n").as_bytes()).ok();
    }
}
