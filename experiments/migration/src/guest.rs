//! The work of the guest while it is moved. It is the same for both systems, in the same golden image.

use perigee_model::DiskRole;
use perigee_model::guest::{Mount, Seed};
use serde::{Deserialize, Serialize};

/// The guest writes this to its serial console when its work has begun.
pub const READY: &str = "perigee-migration-bench: ready";

/// Where the data volume is mounted.
pub const MOUNT: &str = "/data";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Guest {
    /// It sleeps.
    Idle,
    /// It reads a file of its data volume repeatedly, without its page cache. The volume's home is the host
    /// that it is moved to, so until then it reads over the WAN.
    Reading,
    /// It changes 8 MiB of its memory about four times a second.
    Writing,
}

impl Guest {
    pub const ALL: [Self; 3] = [Self::Idle, Self::Reading, Self::Writing];

    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Reading => "reading",
            Self::Writing => "writing",
        }
    }

    pub fn words(self) -> &'static str {
        match self {
            Self::Idle => "the guest is idle",
            Self::Reading => "the guest reads over the WAN",
            Self::Writing => "the guest changes 32 MiB/s of its memory",
        }
    }

    pub fn command(self) -> Vec<String> {
        let work = match self {
            Self::Idle => "begun; sleep 1000000",
            Self::Reading => {
                "dd if=/dev/urandom of=/data/file bs=1M count=32; sync; begun\n\
                 while :; do dd if=/data/file of=/dev/null bs=64k iflag=direct; done"
            }
            Self::Writing => {
                "mkdir -p /dev/shm; mountpoint -q /dev/shm || mount -t tmpfs none /dev/shm\n\
                 for f in a b; do dd if=/dev/urandom of=/dev/shm/$f bs=1M count=8; done; begun\n\
                 while :; do for f in a b; do\n\
                 dd if=/dev/shm/$f of=/dev/shm/m bs=64k conv=notrunc; sleep 0.25; done; done"
            }
        };
        let script = format!("begun() {{ echo '{READY}' > /dev/console; }}\n{work} 2>/dev/null\n");
        vec!["/bin/sh".to_owned(), "-c".to_owned(), script]
    }

    /// The seed disk for a guest without Perigee that does the same work.
    pub fn seed(self) -> Seed {
        Seed {
            job: format!("bare-{}", self.name()),
            command: self.command(),
            env: Default::default(),
            mounts: vec![Mount {
                role: DiskRole::Data(0),
                path: MOUNT.to_owned(),
                read_only: false,
            }],
            outputs: Vec::new(),
            timeout_s: None,
            output_bytes: None,
            stop_grace_s: perigee_model::job::STOP_GRACE_S_DEFAULT,
            network: None,
            gang: None,
            collect: false,
        }
    }
}
