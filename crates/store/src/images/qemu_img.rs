//! Runs `qemu-img` and the programs that make filesystems, which read foreign bytes, so that a fault in them reaches
//! little: without a network, with limits of memory, CPU time, file size and output, and with the files that it is given and no other.
//! Each import has a user that nobody else has ([`users`]), so that one that was taken over reaches no other one, and
//! nothing of it is left when it ends.
//!
//! A file reaches it as an open descriptor. It opens `/proc/self/fd/N`, for which the kernel asks whether its user may
//! read the file itself, but not whether it may enter the directories above it.

mod users;

use std::ffi::{CStr, OsStr, OsString};
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_no_new_privs;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::stat::Mode;
use nix::unistd::{Gid, Uid, setgid, setgroups, setuid};
use perigee_model::Problem;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{ChildStdout, Command};

use crate::images::progress::{Footprint, Silence, no_progress, no_room, stopped};
pub use crate::images::qemu_img::users::RunUser;
use crate::images::qemu_img::users::UPLOADED;
use crate::work::Work;

const MEMORY_BYTES_MAX: u64 = 4 << 30;
const OUTPUT_BYTES_MAX: u64 = 1 << 20;
/// Processes and threads of one run. `qemu-img` has up to 70.
const PROCESSES_MAX: u64 = 128;
/// An import leaves so much of the disk free, for what clients write; on a small disk, this part of it.
const RESERVE_BYTES_MAX: u64 = 256 << 20;
const RESERVE_PART: u64 = 32;
/// How long the end of one that was killed may take.
const GONE_MAX: Duration = Duration::from_secs(5);
/// How often somebody looks whether it makes progress or is to be stopped.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// The path of a program's input: it is given as the program's file 0.
pub const INPUT: &str = "/proc/self/fd/0";
/// The path of a program's output: it is given as the program's file 1.
pub const OUTPUT: &str = "/proc/self/fd/1";

/// What is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    QemuImg,
    Mke2fs,
    E2fsck,
}

impl Program {
    fn name(self) -> &'static str {
        match self {
            Self::QemuImg => "qemu-img",
            Self::Mke2fs => "mke2fs",
            Self::E2fsck => "e2fsck",
        }
    }

    fn package(self) -> &'static str {
        match self {
            Self::QemuImg => "qemu-utils",
            Self::Mke2fs | Self::E2fsck => "e2fsprogs",
        }
    }
}

/// One run.
pub struct Run<'a> {
    /// What it is for, for errors.
    pub what: &'a str,
    /// Who runs it.
    pub user: &'a RunUser,
    pub program: Program,
    /// Where it begins; default: in the root directory.
    pub directory: Option<&'a Path>,
    pub arguments: &'a [&'a str],
    /// The file [`INPUT`], if it has one.
    pub input: Option<&'a File>,
    /// The file [`OUTPUT`], and the most bytes that it may get.
    pub output: Option<(&'a File, u64)>,
    /// A file that it reads and writes, as [`INPUT`], and the most bytes that it may get.
    pub edits: Option<(&'a File, u64)>,
    /// Only for an `nbd://` address, whose bytes are not parsed.
    pub has_network: bool,
    pub cpu_s_max: u64,
    pub silence_max: Duration,
}

/// What it said.
pub struct Said<T = Vec<u8>> {
    program: Program,
    pub status: ExitStatus,
    /// What was made of its output.
    pub stdout: T,
    stderr: Vec<u8>,
}

impl<T> Said<T> {
    /// Why it failed. The files are named as its caller knows them.
    pub fn reason(&self) -> String {
        use std::os::unix::process::ExitStatusExt;
        let text = String::from_utf8_lossy(&self.stderr);
        let name = self.program.name();
        match self.status.signal() {
            Some(nix::libc::SIGXCPU | nix::libc::SIGKILL) => {
                format!("{name} used more CPU time than such an image may need, and was stopped")
            }
            Some(nix::libc::SIGXFSZ) => {
                format!("{name} wanted to write more than the image's size, and was stopped")
            }
            Some(signal) => format!("{name} was killed by signal {signal}"),
            None => {
                let said = text.trim().trim_start_matches(name).trim_start_matches(": ");
                let said =
                    said.replace(&format!("'{INPUT}'"), "the file").replace(INPUT, "the file");
                format!("{name}: {}", said.replace(OUTPUT, "the image"))
            }
        }
    }
}

/// Makes a file that was uploaded one that an import may read.
pub fn give(file: &File) -> io::Result<()> {
    if !Uid::effective().is_root() {
        return Ok(());
    }
    std::os::unix::fs::fchown(file, Some(UPLOADED), Some(UPLOADED))
}

/// To be called while a file grows.
///
/// # Errors
/// `StorageFull` when its disk has no more room for what is not a client's own.
pub fn check_room(file: &File) -> io::Result<()> {
    let disk = rustix::fs::fstatvfs(file)?;
    let reserve_bytes = RESERVE_BYTES_MAX.min(disk.f_blocks * disk.f_frsize / RESERVE_PART);
    if disk.f_bavail * disk.f_frsize < reserve_bytes {
        return Err(io::ErrorKind::StorageFull.into());
    }
    Ok(())
}

/// Takes it back.
pub fn take_back(file: &File) -> io::Result<()> {
    file.set_permissions(Permissions::from_mode(0o600))?;
    let own = Uid::effective();
    if own.is_root() { std::os::unix::fs::fchown(file, Some(0), Some(0)) } else { Ok(()) }
}

impl RunUser {
    /// Makes a file its own.
    pub fn give(&self, file: &File) -> io::Result<()> {
        match self.uid() {
            Some(uid) => std::os::unix::fs::fchown(file, Some(uid), Some(uid)),
            None => Ok(()),
        }
    }

    /// Whether it may read this file. One that was uploaded becomes its own.
    pub fn may_read(&self, file: &File) -> io::Result<bool> {
        let meta = file.metadata()?;
        if self.uid().is_some() && users::is_for_imports(meta.uid()) && meta.mode() & 0o400 != 0 {
            return self.give(file).map(|()| true);
        }
        Ok(self.uid().is_none() || meta.mode() & 0o004 != 0)
    }
}

impl Run<'_> {
    /// Runs it until it ends, the import is stopped, or there was no progress for too long. `writes` is the path of
    /// its output, which shows the progress.
    pub async fn run(self, writes: Option<&Path>, work: &Work) -> Result<Said, Problem> {
        self.run_reading(writes, work, bounded).await
    }

    /// As [`Self::run`]. `read` takes what it says while it runs, so that it need not be in memory as a whole.
    pub async fn run_reading<T, F: Future<Output = io::Result<T>>>(
        self,
        writes: Option<&Path>,
        work: &Work,
        read: impl FnOnce(Option<ChildStdout>) -> F,
    ) -> Result<Said<T>, Problem> {
        self.check_room()?;
        let mut process =
            self.command().and_then(|mut c| c.spawn()).map_err(|error| self.cannot_run(error))?;
        let pid = process.id();
        // Also when nobody waits for it any more: nothing that it has started goes on.
        let end = users::End::of(self.user, pid);
        let (stdout, stderr) = (process.stdout.take(), process.stderr.take());
        let running = &mut process;
        let mut ended = Box::pin(async {
            let (stdout, stderr) = tokio::try_join!(read(stdout), bounded(stderr))?;
            let status = running.wait().await?;
            Ok::<_, io::Error>(Said { program: self.program, status, stdout, stderr })
        });
        let mut silence = Silence::new(Instant::now());
        let given_up = loop {
            match tokio::time::timeout(LOOK_EVERY, &mut ended).await {
                Ok(Err(error)) if error.kind() == io::ErrorKind::FileTooLarge => {
                    let why = {
                        let name = self.program.name();
                        format!("{name} said more than {OUTPUT_BYTES_MAX} bytes about it")
                    };
                    break Problem::invalid(self.what, why);
                }
                Ok(ended) => return ended.map_err(|error| self.cannot_run(error)),
                Err(_) => {}
            }
            if let Err(problem) = self.check_room() {
                break problem;
            }
            let now = Footprint::of(pid, writes);
            if work.step(silence.newly_written(&now)).is_err() {
                break stopped(self.what);
            }
            if silence.after(now, Instant::now()) > self.silence_max {
                break no_progress(self.what, self.silence_max);
            }
        };
        // It keeps the space of its file until it is gone.
        drop((end, ended));
        if process.id().is_some() && tokio::time::timeout(GONE_MAX, process.wait()).await.is_err() {
            tracing::warn!(
                seconds = GONE_MAX.as_secs(),
                "a program that was killed is still there"
            );
        }
        Err(given_up)
    }

    fn cannot_run(&self, error: io::Error) -> Problem {
        let name = self.program.name();
        let why = format!("can't run {name} as a user of its own without network: {error}");
        let problem = Problem::internal(self.what, why);
        match error.kind() {
            io::ErrorKind::NotFound => {
                problem.next(format!("install the package {}", self.program.package()))
            }
            _ => problem.next(
                "the volume server needs the rights of root for this, also in a container, or a kernel that gives \
                 each user user namespaces",
            ),
        }
    }

    /// Whether the filesystem of the file that it writes still has room.
    fn check_room(&self) -> Result<(), Problem> {
        match self.output.or(self.edits).map(|(file, _)| check_room(file)) {
            None | Some(Ok(())) => Ok(()),
            Some(Err(error)) if error.kind() == io::ErrorKind::StorageFull => {
                Err(no_room(self.what))
            }
            Some(Err(error)) => Err(Problem::internal(self.what, error)),
        }
    }

    fn command(&self) -> io::Result<Command> {
        let mut command = Command::new(self.program.name());
        let directory = self.directory.unwrap_or(Path::new("/"));
        command.args(self.arguments).current_dir(directory).kill_on_drop(true).env_clear();
        command.process_group(0);
        command.env("PATH", search_path(std::env::var_os("PATH").as_deref()));
        command.stdin(match self.input.or(self.edits.map(|(file, _)| file)) {
            Some(file) => Stdio::from(file.try_clone()?),
            None => Stdio::null(),
        });
        command.stdout(match self.output {
            Some((file, _)) => Stdio::from(file.try_clone()?),
            None => Stdio::piped(),
        });
        command.stderr(Stdio::piped());
        let (network, cpu_s_max) = (self.has_network, self.cpu_s_max);
        let file_bytes_max = self.output.or(self.edits).map_or(0, |(_, bytes)| bytes);
        let uid = self.user.uid();
        let is_background = self.program != Program::QemuImg;
        // Files of this process's user are root's in a filesystem that is made.
        let own = [Uid::effective().as_raw(), Gid::effective().as_raw()];
        let maps = own.map(|id| format!("0 {id} 1"));
        let confine = move || {
            if is_background {
                lower_priority();
            }
            confine(uid, network, &maps)?;
            let limits = [
                (Resource::RLIMIT_AS, MEMORY_BYTES_MAX),
                (Resource::RLIMIT_CPU, cpu_s_max),
                (Resource::RLIMIT_FSIZE, file_bytes_max),
                (Resource::RLIMIT_CORE, 0),
                (Resource::RLIMIT_NOFILE, 64),
            ];
            limits.into_iter().try_for_each(|(of, max)| setrlimit(of, max, max))?;
            if uid.is_some() {
                // Without a user of its own, what the server's user runs would count too.
                setrlimit(Resource::RLIMIT_NPROC, PROCESSES_MAX, PROCESSES_MAX)?;
            }
            Ok(())
        };
        // SAFETY: between fork and exec the closure only makes system calls that are async-signal-safe.
        unsafe { command.pre_exec(confine) };
        Ok(command)
    }
}

/// Where programs are looked for: in the absolute directories of the server's own path, and where the programs for
/// filesystems are. An empty or relative part would mean the directory where the program begins, which may be a tenant's.
fn search_path(own: Option<&OsStr>) -> OsString {
    let own: Vec<PathBuf> = own.map(|own| std::env::split_paths(own).collect()).unwrap_or_default();
    let usual = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from);
    let absolute = own.into_iter().filter(|dir| dir.is_absolute()).chain(usual);
    // What was split at colons has none.
    std::env::join_paths(absolute).unwrap_or_else(|_| "/usr/sbin:/usr/bin:/sbin:/bin".into())
}

/// Gives up all rights. A process that is not root has few, and gets a network namespace within a user namespace of its own.
fn confine(uid: Option<u32>, network: bool, maps: &[String; 2]) -> io::Result<()> {
    if let Some(uid) = uid {
        if !network {
            unshare(CloneFlags::CLONE_NEWNET)?;
        }
        setgroups(&[])?;
        setgid(Gid::from_raw(uid))?;
        setuid(Uid::from_raw(uid))?;
    } else if !network {
        unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET)?;
        write_map(c"/proc/self/setgroups", "deny");
        write_map(c"/proc/self/uid_map", &maps[0]);
        write_map(c"/proc/self/gid_map", &maps[1]);
    }
    Ok(set_no_new_privs()?)
}

/// Without it, files have the owner `nobody`, which harms nobody.
fn write_map(path: &CStr, text: &str) {
    let opened = nix::fcntl::open(path, OFlag::O_WRONLY | OFlag::O_CLOEXEC, Mode::empty());
    if let Ok(file) = opened {
        let _ = nix::unistd::write(&file, text.as_bytes());
    }
}

/// Lets VMs and their volumes have the CPU and the disk first. For the calling thread.
pub fn lower_priority() {
    const IOPRIO_WHO_PROCESS: nix::libc::c_int = 1;
    /// The lowest of those that still get their turn: class 2, level 7 (ioprio_set(2)).
    const BEST_EFFORT_LAST: nix::libc::c_int = (2 << 13) | 7;
    // SAFETY: both calls take numbers only, and are async-signal-safe.
    unsafe {
        nix::libc::setpriority(nix::libc::PRIO_PROCESS, 0, 10);
        nix::libc::syscall(nix::libc::SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, BEST_EFFORT_LAST);
    }
}

/// All that comes, unless it is too much.
async fn bounded(from: Option<impl AsyncRead + Unpin>) -> io::Result<Vec<u8>> {
    let mut all = Vec::new();
    if let Some(from) = from {
        from.take(OUTPUT_BYTES_MAX + 1).read_to_end(&mut all).await?;
    }
    if all.len() as u64 > OUTPUT_BYTES_MAX {
        Err(io::ErrorKind::FileTooLarge.into())
    } else {
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An input of a job that is called `mke2fs` was run, because an empty part of a path means the working directory.
    #[test]
    fn programs_are_looked_for_in_no_directory_that_the_path_does_not_name_whole() {
        for own in [None, Some(""), Some(":"), Some("relative:."), Some("::/opt/bin:..:")] {
            let path = search_path(own.map(OsStr::new));
            let parts: Vec<PathBuf> = std::env::split_paths(&path).collect();
            assert!(parts.iter().all(|part| part.is_absolute()), "{own:?}: {path:?}");
            assert!(parts.contains(&PathBuf::from("/usr/sbin")), "{path:?}");
        }
        let path = search_path(Some(OsStr::new("::/opt/bin:..:")));
        assert!(std::env::split_paths(&path).any(|part| part == Path::new("/opt/bin")), "{path:?}");
    }
}
