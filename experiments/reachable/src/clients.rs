//! The clients: hey for the replies, OpenSSH and `perigee vm ssh` for sessions, and curl for a download.
//!
//! hey is started again and again for a short time: for each run it is known how many requests it has made, so those without a
//! reply are known too. What it tells of each reply has its time.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use perigee_lab::Lab;
use perigee_lab::netns::within;
use perigee_model::{Problem, VmId};

use crate::ground::{Ground, Target};
use crate::guest::{LARGE, PAGE};
use crate::results::{Load, Moved, Run, Stream, System, longest_gap_ms, per_100_ms};

/// Requests of one run of hey, and its workers: for nginx's page, and for Tomcat's.
const OF_NGINX: (u32, u32) = (250, 10);
const OF_TOMCAT: (u32, u32) = (50, 2);
/// Requests of a worker in a second.
const PER_S: u32 = 5;
/// A request without a reply for so long has failed.
const PATIENCE_S: u32 = 20;
/// The guest's processor, which is emulated, has time left for all other clients. At this rate the file lasts for half an hour.
const DOWNLOAD_BYTES_PER_S: &str = "500000";
/// A client of which nothing more comes for so long does not go on.
const GOES_ON_MAX: Duration = Duration::from_secs(30);
const PIECE_BYTES: usize = 64 << 10;
/// What a session prints.
const LINES: &str = "while sleep 0.1; do echo line; done";

pub struct Clients {
    begun: Instant,
    stop: Arc<AtomicBool>,
    nginx: JoinHandle<Result<(Vec<f64>, u32)>>,
    tomcat: JoinHandle<Result<(Vec<f64>, u32)>>,
    ssh: Session,
    vm_ssh: Option<Session>,
    download: Session,
    retransmits: Retransmits,
}

/// A client that reads something for all of its time.
struct Session {
    child: Child,
    /// So many bytes have come until now.
    bytes: Arc<AtomicU64>,
    /// When something came.
    reader: JoinHandle<Vec<f64>>,
}

/// TCP's segments that were sent again: by the clients, and by the guest.
struct Retransmits {
    namespace: String,
    clients: u64,
    ssh: Vec<String>,
    guest: u64,
}

impl Clients {
    /// `ours`: where `perigee vm ssh` finds the VM.
    pub fn begin(
        ground: &Ground,
        target: Target,
        dir: &Path,
        ours: Option<(&Lab, &Path, &VmId)>,
    ) -> Result<Self> {
        let url = |file: &str| format!("http://{}:{}/{file}", target.address, target.http);
        let ssh: Vec<String> =
            ["-p", &target.ssh.to_string(), "-i", &ground.key.display().to_string()]
                .into_iter()
                .chain(["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"])
                .chain(["-o", "LogLevel=ERROR", "-o", "ConnectTimeout=60"])
                .map(str::to_owned)
                .chain([format!("root@{}", target.address)])
                .collect();
        let retransmits = Retransmits::begin(ground, ssh.clone())?;
        let begun = Instant::now();
        let stop = Arc::new(AtomicBool::new(false));
        let load_of = |url: String, size| {
            let stop = Arc::clone(&stop);
            let hey = ground.client("hey");
            let program: Vec<String> = std::iter::once(hey.get_program())
                .chain(hey.get_args())
                .map(|word| word.to_string_lossy().into_owned())
                .collect();
            std::thread::spawn(move || load(&program, &url, size, begun, &stop))
        };
        let nginx = load_of(url(PAGE), OF_NGINX);
        let tomcat = load_of(format!("http://{}:{}/", target.address, target.tomcat), OF_TOMCAT);
        let mut session = ground.client("ssh");
        session.args(&ssh).arg(LINES);
        let mut download = ground.client("curl");
        download.args(["-sS", "-f", "-N", "--limit-rate", DOWNLOAD_BYTES_PER_S, &url(LARGE)]);
        let log = |name: &str| std::fs::File::create(dir.join(name)).context("a log");
        let vm_ssh = ours.map(|(lab, program, vm)| {
            let mut session = std::process::Command::new(program);
            session.env("HOME", dir).stdin(Stdio::null());
            session.args(["--api", &lab.api, "vm", "ssh", "-l", "root", "-i"]).arg(&ground.key);
            session.args([vm.as_str(), LINES]);
            Session::begin(session.stderr(log("vm-ssh.log")?).stdout(Stdio::piped()), begun)
        });
        let vm_ssh = vm_ssh.transpose()?;
        let ssh = Session::begin(session.stderr(log("ssh.log")?).stdout(Stdio::piped()), begun)?;
        let download =
            Session::begin(download.stderr(log("curl.log")?).stdout(Stdio::piped()), begun)?;
        Ok(Self { begun, stop, nginx, tomcat, ssh, vm_ssh, download, retransmits })
    }

    pub fn end(mut self, system: System, moves: Vec<Moved>) -> Result<Run> {
        // The load goes on meanwhile.
        let ssh_goes_on = self.ssh.goes_on()?;
        let vm_ssh_goes_on = match &mut self.vm_ssh {
            Some(session) => session.goes_on()?,
            None => false,
        };
        let download_goes_on = self.download.goes_on()?;
        let whole_s = self.begun.elapsed().as_secs_f64();
        self.stop.store(true, Ordering::Relaxed);
        let got = |load: JoinHandle<Result<(Vec<f64>, u32)>>| {
            let load = load.join().map_err(|_| anyhow::anyhow!("the load's thread has ended"))?;
            let (mut replies, failed) = load?;
            replies.sort_by(f64::total_cmp);
            anyhow::Ok((replies, failed))
        };
        let (replies, failed) = got(self.nginx)?;
        let (of_tomcat, tomcat_failed) = got(self.tomcat)?;
        let tomcat = Load {
            replies: of_tomcat.len(),
            failed: tomcat_failed,
            longest_gap_ms: longest_gap_ms(&of_tomcat),
            per_100_ms: per_100_ms(&of_tomcat, whole_s),
        };
        let stream = |goes_on, (times, bytes): (Vec<f64>, u64)| Stream {
            goes_on,
            longest_gap_ms: longest_gap_ms(&times),
            bytes,
        };
        let ssh = stream(ssh_goes_on, self.ssh.end()?);
        let vm_ssh = self.vm_ssh.map(Session::end).transpose()?;
        let vm_ssh = vm_ssh.map(|read| stream(vm_ssh_goes_on, read));
        let download = stream(download_goes_on, self.download.end()?);
        let [clients_resent, guest_resent] = self.retransmits.end()?;
        Ok(Run {
            system,
            replies: replies.len(),
            failed,
            longest_gap_ms: longest_gap_ms(&replies),
            per_100_ms: per_100_ms(&replies, whole_s),
            tomcat,
            ssh,
            vm_ssh,
            download,
            clients_resent,
            guest_resent,
            moves,
        })
    }
}

/// Returns when replies came, and how many requests had none.
fn load(
    program: &[String],
    url: &str,
    (requests, workers): (u32, u32),
    begun: Instant,
    stop: &AtomicBool,
) -> Result<(Vec<f64>, u32)> {
    let (mut replies, mut failed) = (Vec::new(), 0);
    while !stop.load(Ordering::Relaxed) {
        let at_s = begun.elapsed().as_secs_f64();
        let mut hey = std::process::Command::new(&program[0]);
        hey.args(&program[1..]).args(["-n", &requests.to_string(), "-c", &workers.to_string()]);
        hey.args(["-q", &PER_S.to_string(), "-t", &PATIENCE_S.to_string()]);
        hey.args(["-disable-keepalive", "-o", "csv", url]);
        let done = hey.stdin(Stdio::null()).output().context("can't run hey")?;
        let said = String::from_utf8_lossy(&done.stderr);
        ensure!(done.status.success(), "hey failed: {said}");
        let here = replies_of(&String::from_utf8_lossy(&done.stdout), at_s)?;
        failed += requests.saturating_sub(u32::try_from(here.len())?);
        replies.extend(here);
    }
    Ok((replies, failed))
}

/// A line has the seconds to the reply first, and at its end the status and when the request was made.
fn replies_of(csv: &str, at_s: f64) -> Result<Vec<f64>> {
    let mut replies = Vec::new();
    for line in csv.lines().skip(1).filter(|line| !line.is_empty()) {
        let fields: Vec<&str> = line.split(',').collect();
        let [took, .., status, offset] = fields[..] else {
            anyhow::bail!("hey says what can't be read: {line}")
        };
        if status == "200" {
            replies.push(at_s + offset.parse::<f64>()? + took.parse::<f64>()?);
        }
    }
    Ok(replies)
}

impl Session {
    fn begin(command: &mut std::process::Command, begun: Instant) -> Result<Self> {
        let mut child = command.spawn().context("can't start a client")?;
        let out = child.stdout.take().context("it was asked for")?;
        let bytes = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&bytes);
        let reader = std::thread::spawn(move || {
            let mut times = Vec::new();
            let mut out = BufReader::with_capacity(PIECE_BYTES, out);
            while let Ok(piece) = out.fill_buf() {
                let length = piece.len();
                if length == 0 {
                    break;
                }
                times.push(begun.elapsed().as_secs_f64());
                counted.fetch_add(length as u64, Ordering::Relaxed);
                out.consume(length);
            }
            times
        });
        Ok(Self { child, bytes, reader })
    }

    /// Whether more comes. A client may run on though its connection leads nowhere any more.
    fn goes_on(&mut self) -> Result<bool> {
        let (before, asked) = (self.bytes.load(Ordering::Relaxed), Instant::now());
        while self.child.try_wait()?.is_none() && asked.elapsed() < GOES_ON_MAX {
            if self.bytes.load(Ordering::Relaxed) > before {
                return Ok(true);
            }
            sleep(Duration::from_millis(20));
        }
        Ok(false)
    }

    /// When something came, and how many bytes in all.
    fn end(mut self) -> Result<(Vec<f64>, u64)> {
        self.child.kill()?;
        self.child.wait()?;
        let times = self.reader.join();
        let times = times.map_err(|_| anyhow::anyhow!("a client's thread has ended"))?;
        Ok((times, self.bytes.load(Ordering::Relaxed)))
    }
}

impl Retransmits {
    fn begin(ground: &Ground, ssh: Vec<String>) -> Result<Self> {
        let mut all = Self { namespace: ground.clients.clone(), clients: 0, ssh, guest: 0 };
        [all.clients, all.guest] = all.now()?;
        Ok(all)
    }

    fn now(&self) -> Result<[u64; 2]> {
        let read = || {
            std::fs::read_to_string("/proc/thread-self/net/snmp")
                .map_err(|error| Problem::internal("can't read TCP's figures", error))
        };
        let own = within(&self.namespace, read)?;
        let mut ssh = std::process::Command::new("nsenter");
        ssh.arg(format!("--net=/run/netns/{}", self.namespace)).args(["--", "ssh"]);
        let mut ssh = ssh
            .args(&self.ssh)
            .arg("cat /proc/net/snmp")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut text = String::new();
        ssh.stdout.take().context("it was asked for")?.read_to_string(&mut text)?;
        ensure!(ssh.wait()?.success(), "the guest does not answer over SSH");
        Ok([resent(&own)?, resent(&text)?])
    }

    fn end(self) -> Result<[u64; 2]> {
        let [clients, guest] = self.now()?;
        Ok([clients.saturating_sub(self.clients), guest.saturating_sub(self.guest)])
    }
}

/// The figures have a line of names and a line of numbers.
fn resent(snmp: &str) -> Result<u64> {
    let mut lines = snmp.lines().filter_map(|line| line.strip_prefix("Tcp:"));
    let (names, numbers) = (lines.next(), lines.next());
    let (names, numbers) = names.zip(numbers).context("TCP's figures")?;
    let mut pairs = names.split_whitespace().zip(numbers.split_whitespace());
    let (_, number) = pairs.find(|(name, _)| *name == "RetransSegs").context("RetransSegs")?;
    Ok(number.parse()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Until now a session counted as going on for as long as its program ran.
    #[test]
    fn a_session_of_which_nothing_comes_any_more_does_not_go_on() {
        let session = |script: &str| {
            let mut shell = std::process::Command::new("sh");
            Session::begin(shell.args(["-c", script]).stdout(Stdio::piped()), Instant::now())
        };
        let mut lasts = session("while sleep 0.1; do echo line; done").expect("it begins");
        assert!(lasts.goes_on().expect("it is known"));
        let (times, bytes) = lasts.end().expect("it ends");
        assert!(!times.is_empty() && bytes >= 5);
        let mut ended = session("echo line").expect("it begins");
        ended.child.wait().expect("it ends by itself");
        while !ended.reader.is_finished() {
            sleep(Duration::from_millis(5));
        }
        assert!(!ended.goes_on().expect("it is known"));
    }

    #[test]
    fn heys_lines_are_read() {
        let csv = "response-time,DNS+dialup,DNS,Request-write,Response-delay,Response-read,status-code,offset\n\
                   0.0100,0.0022,0.0000,0.0000,0.0005,0.0000,200,1.5000\n0.2,0,0,0,0,0,503,1.6\n";
        assert_eq!(replies_of(csv, 10.0).expect("lines"), [11.51]);
        assert!(replies_of("a\nb\n", 0.0).is_err());
    }

    #[test]
    fn segments_sent_again_are_found_by_name() {
        let text = "Ip: A\nIp: 1\nTcp: InSegs RetransSegs InErrs\nTcp: 5 7 0\n";
        assert_eq!(resent(text).expect("a number"), 7);
    }
}
