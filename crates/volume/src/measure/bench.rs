//! Runs `qemu-img bench`: QEMU's own client of files, NBD and iSCSI sends requests, and says how long they took.
//!
//! It counts requests and not time. So a figure begins with few requests, and goes on with more until they take long enough.

use std::fs::File;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use perigee_model::Problem;
use tokio::process::Command;

const MIB: u64 = 1 << 20;
const SMALL: u64 = 4096;
/// The flushes of sequential writes have so many requests between them.
const FLUSH_EVERY: u64 = 16;
/// A run may take so many times as long as was wanted, and then [`PATIENCE`].
const SLOWER_MAX: u32 = 4;
/// For starts, logins and what a busy disk makes of a few requests.
const PATIENCE: Duration = Duration::from_secs(60);
/// A run that took this part of the wanted time is long enough.
const ENOUGH: f64 = 0.7;
/// From one run to the next there are at most so many times as many requests.
const GROWTH_MAX: f64 = 32.0;

/// What is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    Read,
    Write,
    RandomRead,
    RandomWrite,
}

impl Pattern {
    fn is_random(self) -> bool {
        matches!(self, Self::RandomRead | Self::RandomWrite)
    }

    fn request_bytes(self) -> u64 {
        if self.is_random() { SMALL } else { MIB }
    }

    /// The requests of the first run.
    fn first(self) -> u64 {
        if self.is_random() { 32 } else { 8 }
    }
}

/// Where it is sent.
#[derive(Debug)]
pub enum Target {
    /// A file that is open here and has no name.
    File(File),
    Nbd {
        socket: PathBuf,
        export: String,
    },
    Iscsi {
        portal: String,
        target: String,
        initiator: String,
    },
}

impl Target {
    /// A file is the program's file 0.
    fn options(&self) -> String {
        match self {
            Self::File(_) => "file.driver=file,file.filename=/proc/self/fd/0".to_owned(),
            Self::Nbd { socket, export } => format!(
                "file.driver=nbd,file.server.type=unix,file.server.path={},file.export={}",
                escaped(&socket.to_string_lossy()),
                escaped(export)
            ),
            Self::Iscsi { portal, target, initiator } => format!(
                "file.driver=iscsi,file.transport=tcp,file.portal={},file.target={},file.lun=0,file.initiator-name={}",
                escaped(portal),
                escaped(target),
                escaped(initiator)
            ),
        }
    }
}

/// A comma would end the value.
fn escaped(text: &str) -> String {
    text.replace(',', ",,")
}

/// A part of a disk. Its ends are whole MiB.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    pub offset_bytes: u64,
    pub size_bytes: u64,
}

/// One figure.
pub struct Bench<'a> {
    /// What it is for, for errors.
    pub what: &'a str,
    pub target: &'a Target,
    pub part: Part,
    /// The page cache is passed by.
    pub direct: bool,
    /// What was read once may be in memory, so it is not read again.
    pub once: bool,
    pub length: Duration,
}

/// Requests, and the seconds that they took.
type Ran = (u64, f64);

impl Bench<'_> {
    /// Requests per second.
    ///
    /// # Errors
    /// If `qemu-img` is missing, can't reach the disk, or takes much longer than was wanted.
    pub async fn per_s(&self, pattern: Pattern) -> Result<f64, Problem> {
        let all = self.part.size_bytes / pattern.request_bytes();
        let (mut begun, mut last, mut best) = (0, None, None);
        loop {
            let left = if self.once { all - begun } else { u64::MAX };
            let Some(count) = next_count(pattern, last, self.length.as_secs_f64(), left) else {
                break;
            };
            let seconds = self.run(pattern, begun % all, count).await?;
            begun += count;
            last = Some((count, seconds));
            best = longest(best, (count, seconds));
        }
        let (count, seconds) = best
            .ok_or_else(|| Problem::internal(self.what, "the disk is smaller than one request"))?;
        #[expect(clippy::cast_precision_loss, reason = "a rate is not that precise")]
        Ok(count as f64 / seconds)
    }

    async fn run(&self, pattern: Pattern, first: u64, count: u64) -> Result<f64, Problem> {
        let mut command = Command::new("qemu-img");
        command.args(self.arguments(pattern, first, count));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        command.stdin(match self.target {
            Target::File(file) => file
                .try_clone()
                .map(Stdio::from)
                .map_err(|error| Problem::internal(self.what, error))?,
            Target::Nbd { .. } | Target::Iscsi { .. } => Stdio::null(),
        });
        let limit = self.length * SLOWER_MAX + PATIENCE;
        let Ok(ended) = tokio::time::timeout(limit, command.output()).await else {
            let why = format!("{count} requests took longer than {} s", limit.as_secs());
            return Err(Problem::unavailable(self.what, why));
        };
        let said = ended.map_err(|error| {
            Problem::unsupported(self.what, format!("can't run qemu-img: {error}"))
                .next("install the package qemu-utils")
        })?;
        let text = String::from_utf8_lossy(&said.stdout);
        match seconds_of(&text) {
            Some(seconds) if said.status.success() => Ok(seconds),
            _ => Err(self.failed(&String::from_utf8_lossy(&said.stderr))),
        }
    }

    fn failed(&self, said: &str) -> Problem {
        let why = said.trim().lines().next_back().unwrap_or("it said nothing").to_owned();
        if said.contains("Unknown driver") {
            return Problem::unsupported(self.what, why)
                .next("install the package qemu-block-extra");
        }
        Problem::unavailable(self.what, why)
    }

    fn arguments(&self, pattern: Pattern, first: u64, count: u64) -> Vec<String> {
        let (request, Part { offset_bytes, size_bytes }) = (pattern.request_bytes(), self.part);
        let all = size_bytes / request;
        let (in_flight, step) = match pattern {
            Pattern::Read | Pattern::Write => (4, 1),
            Pattern::RandomRead | Pattern::RandomWrite => (1, stride(all)),
        };
        let mut arguments: Vec<String> = ["bench", "--image-opts"].map(Into::into).into();
        let mut option =
            |name: &str, value: u64| arguments.extend([name.into(), value.to_string()]);
        option("-c", count);
        option("-d", in_flight);
        option("-s", request);
        option("-S", step * request);
        // A product of two numbers of requests of at most 256 MiB.
        option("-o", first * step % all * request);
        arguments.extend(["-t".into(), if self.direct { "none" } else { "writeback" }.into()]);
        let flush_every = match pattern {
            Pattern::Read | Pattern::RandomRead => None,
            Pattern::Write => Some(FLUSH_EVERY),
            Pattern::RandomWrite => Some(1),
        };
        if let Some(requests) = flush_every {
            // Zeros might be no data for a disk.
            arguments.extend(["-w".into(), "--pattern=90".into()]);
            arguments.push(format!("--flush-interval={requests}"));
        }
        let disk = self.target.options();
        arguments.push(format!("driver=raw,offset={offset_bytes},size={size_bytes},{disk}"));
        arguments
    }
}

/// How many requests come next: `None` if the last ones took long enough, or nothing is left.
fn next_count(pattern: Pattern, last: Option<Ran>, length_s: f64, left: u64) -> Option<u64> {
    let wanted = match last {
        None => pattern.first(),
        Some((_, seconds)) if seconds >= ENOUGH * length_s => return None,
        Some((count, seconds)) => {
            let times = (length_s / seconds.max(1e-6)).clamp(1.0, GROWTH_MAX);
            #[expect(
                clippy::cast_precision_loss,
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "some 32 times a small number"
            )]
            let wanted = (count as f64 * times).ceil() as u64;
            wanted
        }
    };
    Some(wanted.min(left)).filter(|count| *count > 0)
}

/// The run that tells the most.
fn longest(best: Option<Ran>, ran: Ran) -> Option<Ran> {
    Some(best.filter(|best| best.1 >= ran.1).unwrap_or(ran))
}

/// The distance between two requests that follow each other, in requests: some three fifths of all, so that they are far apart, and
/// coprime with all, so that each place comes once.
fn stride(all: u64) -> u64 {
    let near = (all * 618 / 1000) | 1;
    (near..).step_by(2).find(|stride| coprime(*stride, all)).unwrap_or(1)
}

fn coprime(mut a: u64, mut b: u64) -> bool {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a == 1
}

/// The time in what `qemu-img bench` says; seconds, more than 0.
fn seconds_of(text: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix("Run completed in "))?;
    let seconds: f64 = line.strip_suffix(" seconds.")?.parse().ok()?;
    // It says milliseconds.
    (seconds.is_finite() && seconds >= 0.0).then(|| seconds.max(0.001))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_what_qemu_img_says() {
        let said = "Sending 64 write requests, 1048576 bytes each, 8 in parallel (starting at offset 0, step size 1048576)\n\
            Sending flush every 16 requests\nRun completed in 0.366 seconds.\n";
        assert_eq!(seconds_of(said), Some(0.366));
        assert_eq!(seconds_of("Run completed in 0.000 seconds.\n"), Some(0.001));
        for bad in [
            "",
            "Failed request: I/O error",
            "Run completed in NaN seconds.",
            "Run completed in -1 seconds.",
        ] {
            assert_eq!(seconds_of(bad), None, "{bad}");
        }
    }

    #[test]
    fn runs_grow_until_they_take_long_enough_or_nothing_is_left() {
        let next = |last, left| next_count(Pattern::Read, last, 10.0, left);
        assert_eq!(next(None, u64::MAX), Some(8));
        assert_eq!(next(None, 3), Some(3));
        assert_eq!(next(Some((8, 1.0)), u64::MAX), Some(80));
        assert_eq!(next(Some((8, 0.001)), u64::MAX), Some(256), "at most 32 times as many");
        assert_eq!(next(Some((8, 0.001)), 100), Some(100));
        assert_eq!(next(Some((8, 7.0)), u64::MAX), None, "long enough");
        assert_eq!(next(Some((8, 1.0)), 0), None, "nothing is left");
        assert_eq!(longest(None, (8, 1.0)), Some((8, 1.0)));
        assert_eq!(longest(Some((80, 5.0)), (2, 0.1)), Some((80, 5.0)), "a short rest tells less");
    }

    #[test]
    fn random_requests_come_to_each_place_once() {
        for all in [1, 2, 64, 4096, 4352, 65_536] {
            let step = stride(all);
            let mut places: Vec<u64> = (0..all).map(|n| n * step % all).collect();
            places.sort_unstable();
            assert!(places.iter().copied().eq(0..all), "{all}: {step}");
        }
    }

    #[test]
    fn a_name_can_add_no_option() {
        let target = Target::Nbd { socket: "/a,b".into(), export: "v@1,file.export=w".to_owned() };
        let options = target.options();
        assert!(
            options.contains("path=/a,,b,") && options.ends_with("v@1,,file.export=w"),
            "{options}"
        );
    }
}
