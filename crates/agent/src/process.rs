//! QEMU as a process: starts it so that it outlives the agent, finds it again, and reads its CPU time.
//!
//! A process is identified by its pid and its start time, so that a reused pid is never taken for QEMU.
//! After a restart QEMU is found by its command line, which names the VM's pid file. This also finds a QEMU
//! that was started just before the agent died. Other programs may name that file too, so only QEMU's
//! program, run by QEMU's user, counts.
//!
//! If `/proc` can't be read, for example because the agent has no file descriptors left, the state is not
//! known. This never counts as "the process has ended".

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl, open};
use nix::libc;
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::prctl::{set_dumpable, set_no_new_privs};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Gid, Pid, Uid, setgid, setgroups, setuid, write};
use perigee_http::memory::{self, LockedMemory};
use perigee_model::Problem;
use serde::{Deserialize, Serialize};

use crate::command::MEM_LOCK;
use crate::confinement::Sandbox;
use crate::load::VcpuTimes;
use crate::programs;

/// The unit of times in `/proc`, the same for every process on Linux.
pub const TICK_MS: u64 = 10;

/// The user and group of a QEMU process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QemuUser {
    pub uid: Uid,
    /// The user's own group, or that of `/dev/kvm` if KVM is used.
    pub gid: Gid,
}

/// A process, by its id and its start: another process that gets the id later is not taken for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    start_ticks: u64,
}

struct Stat {
    state: u8,
    cpu_ticks: u64,
    start_ticks: u64,
}

impl Stat {
    fn has_ended(&self) -> bool {
        matches!(self.state, b'Z' | b'X')
    }
}

/// The memory that a process has in RAM; `None` if that is not known (`VmRSS` in proc(5)).
pub fn memory_resident_bytes(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

/// Returns `Ok(None)` if the process does not exist.
fn read_stat(path: &str) -> std::io::Result<Option<Stat>> {
    match std::fs::read_to_string(path) {
        Ok(text) => match parse_stat(&text) {
            Some(stat) => Ok(Some(stat)),
            None => Err(std::io::Error::other(format!("{path} is not as expected"))),
        },
        Err(error) if is_no_process(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The entry of an ended process does not exist, or reading it fails with `ESRCH`.
fn is_no_process(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// The command's name may contain spaces and parentheses, so fields count from the last `)`.
fn parse_stat(text: &str) -> Option<Stat> {
    let (_, rest) = text.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split(' ').collect();
    let number = |at: usize| fields.get(at)?.trim_end().parse::<u64>().ok();
    Some(Stat {
        state: *fields.first()?.as_bytes().first()?,
        cpu_ticks: number(11)? + number(12)?,
        start_ticks: number(19)?,
    })
}

/// The properties by which a VM's QEMU is recognised.
#[derive(Debug, Clone, Copy)]
pub struct Looks<'a> {
    /// Its name, as it is found in `PATH`.
    pub program: &'a str,
    pub arguments: [&'a str; 2],
    pub uid: Uid,
}

impl Looks<'_> {
    /// # Errors
    /// If the process exists and its properties can't be read.
    fn fit(&self, dir: &Path) -> std::io::Result<bool> {
        let line = std::fs::read(dir.join("cmdline"))?;
        let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        if !words.windows(2).any(|pair| pair == self.arguments.map(str::as_bytes)) {
            return Ok(false);
        }
        if std::fs::metadata(dir)?.uid() != self.uid.as_raw() {
            return Ok(false);
        }
        let program = std::fs::read_link(dir.join("exe"))?;
        Ok(is_program(&program, self.program))
    }
}

/// The path of a program that was replaced while it ran ends in ` (deleted)`.
fn is_program(path: &Path, name: &str) -> bool {
    let text = path.to_string_lossy();
    let path = Path::new(text.strip_suffix(" (deleted)").unwrap_or(&text));
    let wanted = programs::which(name);
    Some(path) == wanted.as_deref() || path.file_name() == Some(OsStr::new(name))
}

impl Process {
    /// The process that has this id now; `None` if there is none.
    pub fn of_pid(pid: u32) -> Option<Self> {
        let stat = read_stat(&format!("/proc/{pid}/stat")).ok()??;
        Some(Self { pid, start_ticks: stat.start_ticks })
    }

    /// Finds the running process with these properties.
    ///
    /// # Errors
    /// If no process was found and not all processes could be examined.
    pub fn find(looks: Looks<'_>) -> std::io::Result<Option<Self>> {
        let mut not_known = None;
        for entry in std::fs::read_dir("/proc")? {
            let entry = entry?;
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            match looks.fit(&entry.path()) {
                Ok(true) => match read_stat(&format!("/proc/{pid}/stat")) {
                    Ok(Some(stat)) if !stat.has_ended() => {
                        return Ok(Some(Self { pid, start_ticks: stat.start_ticks }));
                    }
                    Ok(_) => {}
                    Err(error) => not_known = Some(error),
                },
                Ok(false) => {}
                Err(error) if is_no_process(&error) => {}
                Err(error) => not_known = Some(error),
            }
        }
        not_known.map_or(Ok(None), Err)
    }

    /// Whether the process is known to have ended. It is not known while `/proc` can't be read.
    pub fn has_ended(&self) -> bool {
        match read_stat(&format!("/proc/{}/stat", self.pid)) {
            Ok(Some(stat)) => stat.start_ticks != self.start_ticks || stat.has_ended(),
            Ok(None) => true,
            Err(error) => {
                tracing::warn!(pid = self.pid, %error, "can't find out whether a process is running");
                false
            }
        }
    }

    /// How long it runs, in ms; 0 if that is not known.
    pub fn uptime_ms(&self) -> u64 {
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap_or_default();
        let now_ms = uptime.split(' ').next().and_then(parse_seconds_ms).unwrap_or(0);
        now_ms.saturating_sub(self.start_ticks * TICK_MS)
    }

    /// CPU time of the threads that QEMU names `CPU N/…`.
    pub fn vcpu_ms(&self) -> u64 {
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{}/task", self.pid)) else { return 0 };
        let ticks = tasks.flatten().filter_map(|task| {
            let path = task.path();
            let name = std::fs::read_to_string(path.join("comm")).ok()?;
            name.starts_with("CPU ").then(|| read_stat(path.join("stat").to_str()?).ok()?)?
        });
        ticks.map(|stat| stat.cpu_ticks * TICK_MS).sum()
    }

    /// How long the same threads had a CPU, and how long they were ready to run and had none; `None` if that is not known.
    pub fn vcpu_times(&self) -> Option<VcpuTimes> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid)).ok()?;
        VcpuTimes::of_threads(tasks.flatten().filter_map(|task| {
            let path = task.path();
            let name = std::fs::read_to_string(path.join("comm")).ok()?;
            name.starts_with("CPU ").then_some(())?;
            // A thread that ended meanwhile says nothing; one that can't be read is not as expected.
            match std::fs::read_to_string(path.join("schedstat")) {
                Err(error) if is_no_process(&error) && !path.exists() => None,
                text => Some(text.unwrap_or_default()),
            }
        }))
    }

    /// The threads of its vCPUs.
    fn vcpu_threads(&self) -> std::io::Result<Vec<libc::id_t>> {
        let mut threads = Vec::new();
        for task in std::fs::read_dir(format!("/proc/{}/task", self.pid))? {
            let task = task?;
            // A thread may end meanwhile; those of vCPUs do not.
            let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            let id: Option<libc::id_t> =
                task.file_name().to_str().and_then(|name| name.parse().ok());
            threads.extend(id.filter(|_| name.starts_with("CPU ")));
        }
        Ok(threads)
    }

    /// While several VMs want the CPUs, so many vCPUs have the part of `least` ones from now on.
    ///
    /// Niceness decides (setpriority(2)). Where the kernel has autogroups it counts within a session, and QEMU leads one:
    /// then that of the session decides, and all sessions have the same part by default, however many threads they have (sched(7)).
    pub fn share_cpus(&self, least: u32, vcpus: u32) -> std::io::Result<()> {
        let (of_thread, of_session) = (niceness(least, vcpus), -niceness(1, least));
        let threads = if of_thread == 0 { Vec::new() } else { self.vcpu_threads()? };
        for thread in threads {
            // SAFETY: it takes numbers only.
            Errno::result(unsafe { libc::setpriority(libc::PRIO_PROCESS, thread, of_thread) })?;
        }
        if of_session == 0 {
            return Ok(());
        }
        match std::fs::write(format!("/proc/{}/autogroup", self.pid), of_session.to_string()) {
            // The kernel has none.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }

    /// Kills the process and waits until it has ended.
    pub async fn kill(&self) -> Result<(), Problem> {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
        while !self.has_ended() {
            let pid = Pid::from_raw(i32::try_from(self.pid).unwrap_or(i32::MAX));
            // An error means that it has already ended, which the next check finds.
            let _ = kill(pid, Signal::SIGKILL);
            if tokio::time::Instant::now() > deadline {
                return Err(Problem::internal(
                    format!("can't stop the process {}", self.pid),
                    "it has not ended 20 s after SIGKILL",
                ));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }
}

/// Each step of niceness takes a fifth of a thread's part of the CPUs (sched(7)), and there are so many.
const NICE_STEP: f64 = 1.25;
const NICE_MAX: f64 = 19.0;

/// With how much niceness so many threads together have the part of fewer ones.
fn niceness(least: u32, most: u32) -> i32 {
    let ratio = f64::from(most.max(1)) / f64::from(least.max(1));
    #[allow(clippy::cast_possible_truncation, reason = "it is clamped")]
    let steps = ratio.log(NICE_STEP).round().clamp(0.0, NICE_MAX) as i32;
    steps
}

/// `12.34` to 12340.
fn parse_seconds_ms(text: &str) -> Option<u64> {
    let (seconds, hundredths) = text.split_once('.')?;
    Some(seconds.parse::<u64>().ok()? * 1000 + hundredths.parse::<u64>().ok()? * 10)
}

/// A command that runs as QEMU's user in its own session.
pub fn detached(
    program: &str,
    arguments: &[String],
    user: Option<QemuUser>,
    locked_memory: LockedMemory,
) -> tokio::process::Command {
    let mut command = tokio::process::Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).current_dir("/");
    let ids = user.map(|user| (user.uid.as_raw(), user.gid.as_raw()));
    let by_right = ids.filter(|_| locked_memory == LockedMemory::ByRight);
    if let (Some((uid, gid)), None) = (ids, by_right) {
        command.uid(uid).gid(gid);
    }
    let prepare = move || {
        if let Some((uid, gid)) = by_right {
            memory::pass_lock_right(uid, gid)?;
        }
        nix::unistd::setsid()?;
        // The agent's threads come before the guests'. Only root could come before what it is itself.
        // SAFETY: it takes numbers only.
        let is_before = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) } < 0;
        if is_before {
            // SAFETY: it takes numbers only.
            Errno::result(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 0) })?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure only makes system calls that are async-signal-safe.
    unsafe { command.pre_exec(prepare) };
    command
}

/// QEMU gets this process's limits, and may then lock its memory; its core is not dumped.
fn allow_locked_memory() -> Result<LockedMemory, Problem> {
    let allowed = memory::dump_no_core().and_then(|()| memory::allow_locked_memory());
    allowed.map_err(|error| {
        let why = format!(
            "the VM has data that may not leave another site, so its memory must stay off this host's \
             disks, and the agent may not lock memory: {error}"
        );
        Problem::unsupported("can't start QEMU", why).next("run the agent as root, or without a limit of locked memory (`ulimit -l unlimited`)")
    })
}

/// How a process of ours ends, as soon as that is known.
pub type Exit = tokio::sync::oneshot::Receiver<ExitStatus>;

/// Starts QEMU with its stderr in a file, with this socket, which keeps its number, and in this sandbox. A separate task waits
/// for its exit status.
pub fn start(
    program: &str,
    arguments: &[String],
    user: Option<QemuUser>,
    log: &Path,
    socket: Option<BorrowedFd<'_>>,
    sandbox: Option<Sandbox>,
) -> Result<(Process, Exit), Problem> {
    // A QEMU that locks no memory needs no right for it.
    let locks = arguments.windows(2).any(|pair| pair == MEM_LOCK);
    let locked_memory = if locks { allow_locked_memory()? } else { LockedMemory::Unlimited };
    let command = detached(program, arguments, user, locked_memory);
    launch(program, command, socket, log, sandbox)
}

/// Which mounts a process sees.
#[derive(Debug, Clone, Copy)]
pub enum Mounts<'a> {
    /// Those of its host, and its own ones, which nobody else sees and which end with it. It may mount what the kernel lets any user mount.
    Own,
    /// What this process sees.
    Of(&'a Process),
}

/// Starts a program of a VM as [`start`] does, with such mounts. Only root can.
pub fn start_with_mounts(
    program: &str,
    arguments: &[String],
    user: QemuUser,
    mounts: Mounts<'_>,
    socket: Option<BorrowedFd<'_>>,
    log: &Path,
    sandbox: Option<Sandbox>,
) -> Result<(Process, Exit), Problem> {
    let fail = |e: std::io::Error| Problem::internal(format!("can't start {program}"), e);
    let mut command = detached(program, arguments, None, LockedMemory::Unlimited);
    match mounts {
        Mounts::Own => {
            let [uids, gids] = [user.uid.as_raw(), user.gid.as_raw()].map(|id| format!("0 {id} 1"));
            let enter = move || enter_own_mounts(user, &uids, &gids);
            // SAFETY: between fork and exec the closure only makes system calls that are async-signal-safe.
            unsafe { command.pre_exec(enter) };
        }
        Mounts::Of(process) => {
            let namespace = File::open(format!("/proc/{}/ns/mnt", process.pid)).map_err(fail)?;
            // Else it may be that of another process with its number.
            if process.has_ended() {
                return Err(fail(ErrorKind::NotFound.into()));
            }
            let enter = move || {
                setns(&namespace, CloneFlags::CLONE_NEWNS)?;
                Ok(become_user(user)?)
            };
            // SAFETY: between fork and exec the closure only makes system calls that are async-signal-safe.
            unsafe { command.pre_exec(enter) };
        }
    }
    // With mounts of its own it could be shown other programs than the host's, also those that are run with more rights.
    let give_up_rights = || Ok(set_no_new_privs()?);
    // SAFETY: between fork and exec the closure only makes system calls that are async-signal-safe.
    unsafe { command.pre_exec(give_up_rights) };
    launch(program, command, socket, log, sandbox)
}

fn become_user(user: QemuUser) -> nix::Result<()> {
    setgroups(&[])?;
    setgid(user.gid)?;
    setuid(user.uid)
}

/// The user is root in a user namespace of its own, which has no other users, and so may mount. At the host it has no rights. It is made
/// before root gives its rights up, because hosts may refuse that to all others.
fn enter_own_mounts(user: QemuUser, uids: &str, gids: &str) -> std::io::Result<()> {
    // `SECBIT_NO_SETUID_FIXUP` of capabilities(7).
    const KEEP_RIGHTS: libc::c_ulong = 1 << 2;
    // SAFETY: it takes a number only.
    Errno::result(unsafe { libc::prctl(libc::PR_SET_SECUREBITS, KEEP_RIGHTS) })?;
    become_user(user)?;
    // With it the rights that were kept until here end, and the bit too.
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS)?;
    // Else what is below /proc/self is root's.
    set_dumpable(true)?;
    let maps = [
        ("/proc/self/setgroups", "deny"),
        ("/proc/self/uid_map", uids),
        ("/proc/self/gid_map", gids),
    ];
    for (path, text) in maps {
        let file = open(path, OFlag::O_WRONLY | OFlag::O_CLOEXEC, Mode::empty())?;
        write(&file, text.as_bytes())?;
    }
    Ok(())
}

fn launch(
    program: &str,
    mut command: tokio::process::Command,
    socket: Option<BorrowedFd<'_>>,
    log: &Path,
    mut sandbox: Option<Sandbox>,
) -> Result<(Process, Exit), Problem> {
    let fail = |e: std::io::Error| Problem::internal(format!("can't start {program}"), e);
    let log: File =
        OpenOptions::new().create(true).append(true).mode(0o600).open(log).map_err(fail)?;
    if let Some(socket) = socket.map(|socket| socket.as_raw_fd()) {
        let keep = move || {
            // SAFETY: the caller has it open until the process is started.
            let socket = unsafe { BorrowedFd::borrow_raw(socket) };
            fcntl(socket, FcntlArg::F_SETFD(FdFlag::empty()))?;
            Ok(())
        };
        // SAFETY: between fork and exec the closure only makes system calls that are async-signal-safe.
        unsafe { command.pre_exec(keep) };
    }
    let enter = move || sandbox.take().map_or(Ok(()), Sandbox::enter);
    // SAFETY: between fork and exec the closure only makes system calls that are async-signal-safe.
    unsafe { command.pre_exec(enter) };
    let mut child = command.stderr(log).spawn().map_err(|e| {
        let what = format!("can't start {program}");
        match e.kind() {
            ErrorKind::NotFound | ErrorKind::PermissionDenied => Problem::unsupported(what, e),
            _ => Problem::internal(what, e),
        }
    })?;
    let process = child.id().and_then(Process::of_pid);
    let (ended, exit) = tokio::sync::oneshot::channel();
    tokio::spawn(async move {
        let status = child.wait().await;
        tracing::debug!(?status, "a process has ended");
        if let Ok(status) = status {
            // Nobody may be interested any more.
            let _ = ended.send(status);
        }
    });
    let process = process
        .ok_or_else(|| Problem::internal(format!("can't start {program}"), "it ended at once"))?;
    Ok((process, exit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stat_line_is_read_behind_a_name_with_spaces_and_parentheses() {
        let line = "4242 (CPU 0/(TCG) x) S 1 2 3 4 5 6 7 8 9 10 70 30 0 0 20 0 4 0 987654 1 2";
        let stat = parse_stat(line).unwrap();
        assert_eq!((stat.state, stat.cpu_ticks, stat.start_ticks), (b'S', 100, 987_654));
    }

    #[test]
    fn a_broken_stat_line_is_nothing() {
        for line in ["", "1 (x", "1 (x) S 1 2"] {
            assert!(parse_stat(line).is_none(), "{line:?}");
        }
    }

    #[test]
    fn a_pid_with_another_start_time_is_another_process() {
        let me = Process::of_pid(std::process::id()).unwrap();
        assert!(!me.has_ended());
        assert!(Process { start_ticks: me.start_ticks + 1, ..me }.has_ended());
    }

    fn looks<'a>(program: &'a str, mark: &'a str) -> Looks<'a> {
        Looks { program, arguments: ["-pidfile", mark], uid: Uid::effective() }
    }

    fn start_sleep(dir: &Path, program: &str, mark: &str) -> Process {
        let arguments = ["-c", "sleep 60; true", "-pidfile", mark].map(String::from);
        start(program, &arguments, None, &dir.join("log"), None, None).unwrap().0
    }

    #[test]
    fn many_threads_that_are_nice_have_the_part_of_fewer() {
        for (least, most) in [(1, 1), (1, 2), (1, 4), (3, 4), (2, 16), (1, 64)] {
            let part = f64::from(most) * NICE_STEP.powi(-niceness(least, most));
            assert!((part / f64::from(least) - 1.0).abs() < 0.13, "{least}..{most}: {part}");
        }
        assert_eq!((niceness(1, 255), niceness(0, 0)), (19, 0));
    }

    /// The niceness of a process and of its session.
    fn nice(process: &Process) -> (i32, Option<String>) {
        // SAFETY: it takes numbers only.
        let own = unsafe { libc::getpriority(libc::PRIO_PROCESS, process.pid) };
        let of_session = std::fs::read_to_string(format!("/proc/{}/autogroup", process.pid));
        let of_session =
            of_session.ok().and_then(|text| Some(text.rsplit_once(' ')?.1.trim().to_owned()));
        (own, of_session)
    }

    #[tokio::test]
    async fn a_vm_has_the_cpus_by_its_vcpus_and_not_the_agent_s_precedence() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        // SAFETY: it takes numbers only. Each test has a process of its own.
        Errno::result(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -10) }).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mark = dir.path().join("mark").display().to_string();
        let started = start_sleep(dir.path(), "bash", &mark);
        let (own, of_session) = nice(&started);
        assert_eq!((own, of_session.as_deref().unwrap_or("0")), (0, "0"));
        started.share_cpus(2, 4).unwrap();
        let (_, of_session) = nice(&started);
        started.kill().await.unwrap();
        // A quarter more three times is about twice as much.
        assert_eq!(of_session.as_deref().unwrap_or("-3"), "-3");
    }

    #[tokio::test]
    async fn a_process_is_found_by_its_arguments_and_killed() {
        let dir = tempfile::tempdir().unwrap();
        let mark = dir.path().join("mark").display().to_string();
        let started = start_sleep(dir.path(), "bash", &mark);
        let find = || Process::find(looks("bash", &mark)).unwrap();
        while find().is_none() {
            assert!(!started.has_ended());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let found = find();
        started.kill().await.unwrap();
        assert_eq!(found, Some(started));
        assert!(started.has_ended());
        assert_eq!(find(), None);
    }

    #[tokio::test]
    async fn another_program_that_names_the_pid_file_is_not_adopted() {
        let dir = tempfile::tempdir().unwrap();
        let mark = dir.path().join("mark").display().to_string();
        let editor = start_sleep(dir.path(), "bash", &mark);
        while Process::find(looks("bash", &mark)).unwrap().is_none() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let found = Process::find(looks("qemu-system-x86_64", &mark)).unwrap();
        let of_another =
            Process::find(Looks { uid: Uid::from_raw(4242), ..looks("bash", &mark) }).unwrap();
        editor.kill().await.unwrap();
        assert_eq!((found, of_another), (None, None));
    }

    /// In a process of its own, because the limit on descriptors applies to all threads.
    #[test]
    fn without_file_descriptors_nobody_says_that_qemu_is_gone() {
        if std::env::var_os("PERIGEE_NO_DESCRIPTORS").is_none() {
            let name = "process::tests::without_file_descriptors_nobody_says_that_qemu_is_gone";
            let status = std::process::Command::new("sh")
                .args(["-c", "ulimit -n 64; exec \"$0\" \"$@\""])
                .arg(std::env::current_exe().unwrap())
                .args(["--exact", name])
                .env("PERIGEE_NO_DESCRIPTORS", "1")
                .status();
            assert!(status.unwrap().success());
            return;
        }
        let me = Process::of_pid(std::process::id()).unwrap();
        let mut taken = Vec::new();
        while let Ok(file) = File::open("/dev/null") {
            taken.push(file);
        }
        let (ended, found) = (me.has_ended(), Process::find(looks("bash", "none")));
        taken.clear();
        assert!(!ended, "not known is not ended");
        assert!(found.is_err(), "not known is not none");
    }
}
