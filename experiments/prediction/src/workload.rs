//! The jobs that are predicted.

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Workload {
    /// The demo's TPC-H queries in PostgreSQL.
    Tpch,
    /// A file is read from start to end.
    Scan,
    /// Single random reads, with some milliseconds of thinking after each.
    Think,
    /// Random reads by eight processes at once.
    Depth8,
    /// Random pieces are read, and a checksum of each is computed several times.
    Mix,
    /// Small synchronous writes, and one long buffered one.
    Writer,
    /// Two sorted files are merged into a third.
    Merge,
}

impl Workload {
    pub const ALL: [Self; 7] =
        [Self::Tpch, Self::Scan, Self::Think, Self::Depth8, Self::Mix, Self::Writer, Self::Merge];

    pub fn name(self) -> &'static str {
        match self {
            Self::Tpch => "tpch",
            Self::Scan => "scan",
            Self::Think => "think",
            Self::Depth8 => "depth8",
            Self::Mix => "mix",
            Self::Writer => "writer",
            Self::Merge => "merge",
        }
    }

    pub fn words(self) -> &'static str {
        match self {
            Self::Tpch => "TPC-H queries",
            Self::Scan => "scan",
            Self::Think => "random reads, thinking",
            Self::Depth8 => "random reads, depth 8",
            Self::Mix => "CPU and I/O",
            Self::Writer => "writer",
            Self::Merge => "merge (held out)",
        }
    }

    /// The rules of the prediction were never tried on it.
    pub fn is_held_out(self) -> bool {
        self == Self::Merge
    }

    fn script(self) -> &'static str {
        match self {
            Self::Tpch => "sh inputs/query.sh",
            Self::Scan => "cat /data/scan >/dev/null",
            Self::Think => {
                "perl -e 'open F, \"<\", \"/data/scan\" or die; srand 7; for (1..300) { \
                 sysseek F, 4096 * int(rand 49152), 0; sysread F, $b, 4096; select undef, undef, undef, 0.005 }'"
            }
            Self::Depth8 => {
                "perl -e 'for $n (1..8) { next if fork; open F, \"<\", \"/data/scan\" or die; srand $n; \
                 for (1..300) { sysseek F, 4096 * int(rand 49152), 0; sysread F, $b, 4096 } exit }; \
                 1 while wait > 0'"
            }
            Self::Mix => {
                "perl -MDigest::SHA=sha256 -e 'open F, \"<\", \"/data/scan\" or die; srand 7; for (1..150) { \
                 sysseek F, 65536 * int(rand 3000), 0; sysread F, $b, 65536; sha256($b) for 1..12 }'"
            }
            Self::Writer => {
                "dd if=/data/scan of=/data/sync bs=16k count=100 oflag=dsync status=none\n\
                 dd if=/data/scan of=/data/out bs=1M count=48 conv=fsync status=none"
            }
            Self::Merge => "LC_ALL=C sort -m -o /data/merged /data/a /data/b && sync",
        }
    }

    /// The command, which carries the round trip at which its history was learned: the controller keeps one
    /// history for each command.
    pub fn command(self, learned_at_ms: u32) -> Vec<String> {
        let script = format!("# learns at {learned_at_ms} ms\nset -eu\n{}\n", self.script());
        vec!["sh".to_owned(), "-c".to_owned(), script]
    }
}

/// Writes the files that the workloads read.
pub fn files_script(scan_mib: u64, sorted_mib: u64) -> String {
    format!(
        "set -eu\ndd if=/dev/urandom of=/data/scan bs=1M count={scan_mib} status=none\n\
         for f in a b; do head -c {raw}M /dev/urandom | base64 -w 63 | LC_ALL=C sort >/data/$f; done\nsync\n",
        raw = sorted_mib * 3 / 4
    )
}
