//! What is measured: the job's work, and the way in which it gets to its data.

use serde::{Deserialize, Serialize};

/// The guest writes this to its console when the work begins.
pub const BEGUN: &str = "perigee-placement: begun";
/// And this when it is done, with the content of the file `result`.
pub const DONE: &str = "perigee-placement: done";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// The demo's TPC-H queries in PostgreSQL, each with a cold page cache.
    Tpch,
    /// A file is read from start to end, twice, each time with a cold page cache.
    Scan,
}

impl Work {
    pub const ALL: [Self; 2] = [Self::Tpch, Self::Scan];

    pub fn name(self) -> &'static str {
        match self {
            Self::Tpch => "tpch",
            Self::Scan => "scan",
        }
    }

    /// The shell script in the guest, without the marks on its console.
    fn script(self) -> &'static str {
        match self {
            // A database that was stopped in an orderly way needs no recovery when the next run starts it.
            Self::Tpch => {
                "sed -i 's/-m immediate/-m fast/' inputs/query.sh\n\
                 sh inputs/query.sh\n\
                 sha256sum <\"$PERIGEE_OUTPUT/answers.txt\" | cut -c1-16 >\"$PERIGEE_OUTPUT/result\"\n"
            }
            Self::Scan => {
                "now() { cut -d' ' -f1 /proc/uptime; }\n\
                 for pass in 1 2; do\n\
                 echo 3 >/proc/sys/vm/drop_caches; from=$(now); cat /data/scan >/dev/null; to=$(now)\n\
                 printf '%s %s ' \"$from\" \"$to\" >>\"$PERIGEE_OUTPUT/result\"; done\n"
            }
        }
    }

    pub fn command(self) -> Vec<String> {
        let script = format!(
            "set -eu\necho '{BEGUN}' >/dev/console\n{}echo \"{DONE} $(cat \"$PERIGEE_OUTPUT/result\")\" >/dev/console\n",
            self.script()
        );
        vec!["sh".to_owned(), "-c".to_owned(), script]
    }
}

/// How the job gets to its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// The VM is beside its data.
    Local,
    /// QEMU's iSCSI initiator, over the WAN, to Perigee's target.
    Iscsi,
    /// QEMU's NBD client, over the WAN, to qemu-nbd.
    Nbd,
    /// Through the volume server of the VM's host.
    Remote,
    /// The same job again on the same volume at the same host.
    Again,
    /// The data volume moves to the VM's host while the job runs.
    Copy,
    /// A replica of the data is at the VM's host when the job starts.
    Replica,
    /// The VM moves to its data as soon as the job runs; its own disks stay.
    Stay,
    /// The VM moves to its data as soon as the job runs, and its own disks come after it.
    Follow,
}

impl Way {
    pub const ALL: [Self; 9] = [
        Self::Local,
        Self::Iscsi,
        Self::Nbd,
        Self::Remote,
        Self::Again,
        Self::Copy,
        Self::Replica,
        Self::Stay,
        Self::Follow,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Iscsi => "iscsi",
            Self::Nbd => "nbd",
            Self::Remote => "remote",
            Self::Again => "again",
            Self::Copy => "copy",
            Self::Replica => "replica",
            Self::Stay => "stay",
            Self::Follow => "follow",
        }
    }

    /// As a figure's legend names it.
    pub fn words(self) -> &'static str {
        match self {
            Self::Local => "beside its data",
            Self::Iscsi => "plain iSCSI",
            Self::Nbd => "plain NBD",
            Self::Remote => "remote",
            Self::Again => "remote, again",
            Self::Copy => "copy",
            Self::Replica => "replica",
            Self::Stay => "migrate, stay",
            Self::Follow => "migrate, follow",
        }
    }

    /// Whether this way is measured with this work. A scan ends before anything has moved.
    pub fn is_measured_with(self, work: Work) -> bool {
        match work {
            Work::Tpch => true,
            Work::Scan => {
                matches!(self, Self::Local | Self::Iscsi | Self::Nbd | Self::Remote)
            }
        }
    }

    pub fn is_without_perigee(self) -> bool {
        matches!(self, Self::Iscsi | Self::Nbd)
    }
}
