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
    /// The demo's queries in two VMs, each with a database of its own: a clone.
    GangTpch,
    /// A file is read in two VMs; the second one reads twice as much of it.
    GangScan,
    /// Two VMs read at random, and send each other what they have read after each of some rounds.
    GangTalk,
}

impl Workload {
    pub const ALL: [Self; 10] = [
        Self::Tpch,
        Self::Scan,
        Self::Think,
        Self::Depth8,
        Self::Mix,
        Self::Writer,
        Self::Merge,
        Self::GangTpch,
        Self::GangScan,
        Self::GangTalk,
    ];

    /// How many VMs it has.
    pub fn vms(self) -> u32 {
        if self.is_gang() { 2 } else { 1 }
    }

    pub fn is_gang(self) -> bool {
        matches!(self, Self::GangTpch | Self::GangScan | Self::GangTalk)
    }

    /// Whether it asks the database.
    pub fn is_tpch(self) -> bool {
        matches!(self, Self::Tpch | Self::GangTpch)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Tpch => "tpch",
            Self::Scan => "scan",
            Self::Think => "think",
            Self::Depth8 => "depth8",
            Self::Mix => "mix",
            Self::Writer => "writer",
            Self::Merge => "merge",
            Self::GangTpch => "gang-tpch",
            Self::GangScan => "gang-scan",
            Self::GangTalk => "gang-talk",
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
            Self::GangTpch => "2 VMs: TPC-H queries",
            Self::GangScan => "2 VMs: scans of different length",
            Self::GangTalk => "2 VMs: random reads, and talk",
        }
    }

    /// The rules of the prediction were never tried on it.
    pub fn is_held_out(self) -> bool {
        self == Self::Merge
    }

    fn script(self) -> &'static str {
        match self {
            Self::Tpch | Self::GangTpch => "sh inputs/query.sh",
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
            Self::GangScan => {
                "dd if=/data/scan of=/dev/null bs=1M count=$((80 * (PERIGEE_RANK + 1))) status=none"
            }
            Self::GangTalk => {
                "perl -MIO::Socket::INET -e 'my ($first) = map { (split)[0] } do { open H, \"<\", $ENV{PERIGEE_HOSTS} or die; <H> }; \
                 open F, \"<\", \"/data/scan\" or die; srand 7 + $ENV{PERIGEE_RANK}; my $s; \
                 if ($ENV{PERIGEE_RANK}) { for (1..600) { $s = IO::Socket::INET->new(PeerAddr => $first, PeerPort => 7007) and last; select undef, undef, undef, 0.2 } } \
                 else { $s = IO::Socket::INET->new(LocalPort => 7007, Listen => 1, ReuseAddr => 1)->accept } $s or die; \
                 for (1..20) { my ($all, $b, $back) = (\"\", \"\", \"\"); \
                 for (1..16) { sysseek F, 65536 * int(rand 3000), 0; sysread F, $b, 65536; $all .= $b } \
                 if ($ENV{PERIGEE_RANK}) { print $s $all; $s->flush; read($s, $back, length $all) == length $all or die } \
                 else { read($s, $back, length $all) == length $all or die; print $s $all; $s->flush } }'"
            }
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
