//! What was measured, and what follows from it.

use std::collections::BTreeMap;

use perigee_lab::measuring::{Goal, median};
use serde::{Deserialize, Serialize};

/// A server, and the protocol that it is asked in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Door {
    PerigeeHttp,
    PerigeeWebdav,
    PerigeeSftp,
    PerigeeCli,
    PerigeeFtps,
    PerigeeHttpTls,
    PerigeeWebdavTls,
    NginxWebdav,
    NginxWebdavTls,
    Vsftpd,
    VsftpdFtps,
    OpensshSftp,
}

impl Door {
    pub const ALL: [Self; 12] = [
        Self::PerigeeHttp,
        Self::NginxWebdav,
        Self::PerigeeSftp,
        Self::OpensshSftp,
        Self::PerigeeWebdav,
        Self::Vsftpd,
        Self::PerigeeCli,
        Self::PerigeeFtps,
        Self::VsftpdFtps,
        Self::PerigeeHttpTls,
        Self::NginxWebdavTls,
        Self::PerigeeWebdavTls,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::PerigeeHttp => "perigee HTTP",
            Self::PerigeeWebdav => "perigee WebDAV",
            Self::PerigeeSftp => "perigee SFTP",
            Self::PerigeeCli => "perigee CLI",
            Self::PerigeeFtps => "perigee FTPS",
            Self::PerigeeHttpTls => "perigee HTTP, TLS",
            Self::PerigeeWebdavTls => "perigee WebDAV, TLS",
            Self::NginxWebdav => "nginx WebDAV",
            Self::NginxWebdavTls => "nginx WebDAV, TLS",
            Self::Vsftpd => "vsftpd FTP",
            Self::VsftpdFtps => "vsftpd FTPS",
            Self::OpensshSftp => "OpenSSH SFTP",
        }
    }

    pub fn is_perigee(self) -> bool {
        !matches!(
            self,
            Self::NginxWebdav
                | Self::NginxWebdavTls
                | Self::Vsftpd
                | Self::VsftpdFtps
                | Self::OpensshSftp
        )
    }

    /// Whether it encrypts with TLS, so that it is compared with others that do; `None` over SSH.
    pub fn has_tls(self) -> Option<bool> {
        match self {
            Self::PerigeeHttp
            | Self::PerigeeWebdav
            | Self::PerigeeCli
            | Self::NginxWebdav
            | Self::Vsftpd => Some(false),
            Self::PerigeeFtps
            | Self::PerigeeHttpTls
            | Self::PerigeeWebdavTls
            | Self::NginxWebdavTls
            | Self::VsftpdFtps => Some(true),
            Self::PerigeeSftp | Self::OpensshSftp => None,
        }
    }

    /// Whether it is served by the controller that speaks TLS.
    pub fn is_perigee_tls(self) -> bool {
        matches!(self, Self::PerigeeHttpTls | Self::PerigeeWebdavTls)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoadName {
    OneLarge,
    SixtyFour,
    Small,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct What {
    pub load: LoadName,
    pub is_upload: bool,
}

impl What {
    pub fn name(self) -> String {
        let load = match self.load {
            LoadName::OneLarge => "one large file",
            LoadName::SixtyFour => "64 clients at once",
            LoadName::Small => "small files, 8 clients",
        };
        format!("{} {load}", if self.is_upload { "put" } else { "get" })
    }
}

/// One transfer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Measurement {
    pub door: Door,
    pub what: What,
    pub round: u32,
    pub bytes: u64,
    pub files: u64,
    /// Until the last client had its answer.
    pub seconds: f64,
    /// Until then, and until the disk had all of it.
    pub durable_s: f64,
    /// The machine's load, which other processes may have caused.
    pub load_1min: f64,
}

/// The medians of one work at one door.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    pub door: Door,
    pub what: What,
    pub mib_per_s: f64,
    pub files_per_s: f64,
    /// As the first, with the time of a `sync` after the transfer.
    pub durable_mib_per_s: f64,
    pub durable_files_per_s: f64,
}

/// A client that sends much, and what memory the server needed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Heavy {
    pub client: String,
    pub work: String,
    pub seconds: f64,
    /// The server's resident memory before, and the most of it meanwhile (`VmRSS`, and `VmHWM` after a reset).
    pub before_bytes: u64,
    pub peak_bytes: u64,
    /// Why it failed, or what came back was not what was sent.
    pub error: Option<String>,
}

/// Which process is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Victim {
    Controller,
    /// Of FTPS.
    Gateway,
}

impl Victim {
    pub fn name(self) -> &'static str {
        match self {
            Self::Controller => "the controller",
            Self::Gateway => "the FTPS gateway",
        }
    }

    /// The door that it serves itself.
    pub fn door(self) -> Door {
        match self {
            Self::Controller => Door::PerigeeHttp,
            Self::Gateway => Door::PerigeeFtps,
        }
    }
}

/// What became of files whose upload was acknowledged when a server was killed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Killed {
    pub door: Door,
    pub victim: Victim,
    pub clients: usize,
    pub acknowledged: usize,
    pub lost: usize,
}

/// What the sums over a file's content cost on one CPU: an upload computes both, and a download the CRC.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Summing {
    pub sha256_s_per_gib: f64,
    pub crc64_s_per_gib: f64,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Results {
    pub versions: BTreeMap<String, String>,
    pub cpus: usize,
    pub is_quick: bool,
    #[serde(default)]
    pub summing: Option<Summing>,
    pub goals: Vec<Goal>,
    pub killed: Vec<Killed>,
    pub heavy: Vec<Heavy>,
    pub measurements: Vec<Measurement>,
}

#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn number(count: u64) -> f64 {
    count as f64
}

impl Results {
    pub fn medians(&self) -> Vec<Row> {
        let mut kinds: Vec<_> = self.measurements.iter().map(|m| (m.what, m.door)).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let of_kind = |(what, door)| {
            let of = |figure: fn(&Measurement) -> f64| {
                let all = self.measurements.iter().filter(|m| (m.what, m.door) == (what, door));
                median(all.map(figure))
            };
            let mib = f64::from(1 << 20);
            Some(Row {
                door,
                what,
                mib_per_s: of(|m| number(m.bytes) / m.seconds)? / mib,
                files_per_s: of(|m| number(m.files) / m.seconds)?,
                durable_mib_per_s: of(|m| number(m.bytes) / m.durable_s)? / mib,
                durable_files_per_s: of(|m| number(m.files) / m.durable_s)?,
            })
        };
        kinds.into_iter().filter_map(of_kind).collect()
    }

    /// Sets the goals.
    pub fn judge(&mut self) {
        let rows = self.medians();
        let best_by = |what: What, has_tls: bool, is_own: bool, by: fn(&Row) -> f64| {
            let of = rows.iter().filter(|row| row.what == what && row.door.is_perigee() == is_own);
            of.filter(|row| row.door.has_tls() == Some(has_tls))
                .max_by(|a, b| by(a).total_cmp(&by(b)))
        };
        let mut goals = Vec::new();
        let loads = [LoadName::OneLarge, LoadName::SixtyFour];
        for (load, has_tls) in loads.into_iter().flat_map(|load| [(load, true), (load, false)]) {
            for is_upload in [true, false] {
                let what = What { load, is_upload };
                let best = |is_own| best_by(what, has_tls, is_own, |row| row.mib_per_s);
                // The others answer before the disk has the file.
                let with_sync = |is_own| {
                    let row = best_by(what, has_tls, is_own, |row| row.durable_mib_per_s)?;
                    Some(format!("{} {:.0}", row.door.name(), row.durable_mib_per_s))
                };
                let (Some(own), Some(peer)) = (best(true), best(false)) else {
                    continue;
                };
                goals.push(Goal {
                    goal: format!(
                        "{}, {} TLS: not slower in bytes than the best of the others",
                        what.name(),
                        if has_tls { "with" } else { "without" }
                    ),
                    met: (!self.is_quick).then_some(own.mib_per_s >= peer.mib_per_s),
                    measured: format!(
                        "{} {:.0} MiB/s, {} {:.0} MiB/s{}",
                        own.door.name(),
                        own.mib_per_s,
                        peer.door.name(),
                        peer.mib_per_s,
                        match (with_sync(true), with_sync(false)) {
                            (Some(own), Some(peer)) if is_upload =>
                                format!("; until it is on the disk {own}, {peer}"),
                            _ => String::new(),
                        }
                    ),
                });
            }
        }
        let acknowledged: usize = self.killed.iter().map(|killed| killed.acknowledged).sum();
        let lost: usize = self.killed.iter().map(|killed| killed.lost).sum();
        goals.push(Goal {
            goal: "nothing acknowledged is lost when a server is killed".to_owned(),
            met: (!self.killed.is_empty()).then_some(lost == 0),
            measured: format!("{lost} of {acknowledged} files"),
        });
        let grown = self.heavy.iter().map(|h| h.peak_bytes.saturating_sub(h.before_bytes)).max();
        goals.push(Goal {
            goal: "the server's memory stays flat".to_owned(),
            met: grown.map(|grown| grown < 64 << 20),
            measured: format!("it grew by at most {} MiB", grown.unwrap_or_default() >> 20),
        });
        let failed = self.heavy.iter().filter(|heavy| heavy.error.is_some()).count();
        goals.push(Goal {
            goal: "each client sends and fetches a file larger than the server's memory, and many small files"
                .to_owned(),
            met: (!self.heavy.is_empty()).then_some(failed == 0),
            measured: format!("{failed} of {} transfers failed", self.heavy.len()),
        });
        self.goals = goals;
    }
}
