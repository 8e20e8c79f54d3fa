//! What QEMU may open besides what its user and its filter of system calls allow: with Landlock, where the kernel has it.
//!
//! A guest that has taken over its QEMU finds no files of the host but those that QEMU itself needs, also none that every user
//! may read. The sockets to which QEMU connects are not covered: each VM has its own, and they look who comes.
//!
//! An administrator may run the agent in an AppArmor profile besides, and QEMU then runs in it too.

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreated,
    RulesetCreatedAttr, RulesetError, Scope, path_beneath_rules,
};
use perigee_model::Problem;

use crate::command::QEMU;
use crate::files::VmDir;
use crate::programs::which;

/// What is known of Landlock here. Of this, an older kernel does what it can.
const LANDLOCK: ABI = ABI::V6;

/// Programs, libraries and QEMU's firmware.
const PROGRAMS: [&str; 4] = ["/usr", "/lib", "/lib64", "/nix/store"];
/// How libraries are found, how GnuTLS and OpenSSL are set up, and how many processors there are.
const SETTINGS: [&str; 8] = [
    "/etc/ld.so.cache",
    "/etc/ssl/openssl.cnf",
    "/etc/pki/tls/openssl.cnf",
    "/etc/gnutls",
    "/etc/crypto-policies",
    "/sys/devices/system/cpu",
    "/sys/devices/system/node",
    "/sys/kernel/mm/transparent_hugepage",
];
const DEVICES: [&str; 4] = ["/dev/kvm", "/dev/null", "/dev/zero", "/dev/urandom"];

/// Rules for a process that is not started yet.
pub struct Sandbox(RulesetCreated);

impl Sandbox {
    /// The rules for this VM's QEMU.
    ///
    /// # Errors
    /// If the VM's directories are not there yet; if the kernel has Landlock and does not take the rules. A kernel without
    /// Landlock is no error: [`missing`] says so.
    pub fn of_qemu(dir: &VmDir) -> Result<Self, Problem> {
        Self::new(QEMU, &dir.root(), &dir.run())
    }

    /// `program` reads below `reads`, and reads, makes and removes files and sockets below `writes`.
    ///
    /// # Errors
    /// If one of these two directories can't be opened; if the kernel refuses the rules.
    pub fn new(program: &str, reads: &Path, writes: &Path) -> Result<Self, Problem> {
        let what = || format!("can't confine {program} with Landlock");
        // The library passes over what is not there, and then the program could open nothing.
        let own = |path: &Path| {
            PathFd::new(path)
                .map_err(|error| Problem::internal(what(), format!("{}: {error}", path.display())))
        };
        let (reads, writes) = (own(reads)?, own(writes)?);
        Self::of(program, reads, writes).map_err(|error| Problem::internal(what(), error))
    }

    fn of(program: &str, reads: PathFd, writes: PathFd) -> Result<Self, RulesetError> {
        let files = AccessFs::ReadFile | AccessFs::ReadDir;
        let own = files
            | AccessFs::WriteFile
            | AccessFs::Truncate
            | AccessFs::RemoveFile
            | AccessFs::MakeReg
            | AccessFs::MakeSock;
        let devices = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
        let programs = PROGRAMS.map(PathBuf::from).into_iter().chain(installed(program));
        let rules = nothing()?
            .add_rules(path_beneath_rules(programs, AccessFs::from_read(LANDLOCK)))?
            .add_rules(path_beneath_rules(SETTINGS, files))?
            .add_rules(path_beneath_rules(DEVICES, devices))?
            .add_rule(PathBeneath::new(reads, files))?
            .add_rule(PathBeneath::new(writes, own))?;
        Ok(Self(rules))
    }

    /// Applies the rules to this thread, and to all that it starts, for ever. It makes system calls only.
    ///
    /// # Errors
    /// If the kernel refuses them.
    pub fn enter(self) -> std::io::Result<()> {
        match self.0.restrict_self() {
            Ok(_) => Ok(()),
            Err(_) => Err(std::io::ErrorKind::PermissionDenied.into()),
        }
    }
}

/// Rules that allow no file, no abstract socket of other programs, and no signals to them.
fn nothing() -> Result<RulesetCreated, RulesetError> {
    let all: BitFlags<Scope> = Scope::from_all(LANDLOCK);
    Ruleset::default().handle_access(AccessFs::from_all(LANDLOCK))?.scope(all)?.create()
}

/// What a program that is not installed below `/usr` has beside its own file: libraries and firmware.
const INSTALLED: [&str; 9] = [
    "lib",
    "lib64",
    "libexec",
    "share/qemu",
    "share/seabios",
    "share/ipxe",
    "share/OVMF",
    "share/edk2",
    // Of a tree in which QEMU was built, where the program is in `build`.
    "pc-bios",
];

/// The program's own file, and what belongs to it where it is not installed below `/usr`. Nothing else of that place is
/// the program's: it may be somebody's home directory. A link counts as what it leads to, too.
fn installed(program: &str) -> Vec<PathBuf> {
    let found = which(program).into_iter();
    let mut all = Vec::new();
    for path in found.flat_map(|path| [path.canonicalize().ok(), Some(path)]).flatten() {
        let dir = path.parent();
        if let Some(prefix) = dir.and_then(Path::parent) {
            all.extend(INSTALLED.map(|part| prefix.join(part)));
        }
        all.extend(dir.map(|dir| dir.join("qemu-bundle")));
        all.push(path);
    }
    all
}

/// In plain words, for `perigee host info`, if the kernel does not confine QEMU so.
pub fn missing() -> Option<String> {
    let why = match nothing().map(Option::<std::os::fd::OwnedFd>::from) {
        Ok(Some(_)) => return None,
        Ok(None) => "the kernel has no Landlock, or it is off (`lsm=` at boot)".to_owned(),
        Err(error) => error.to_string(),
    };
    Some(format!("QEMU may read what every user of this host may read: {why}"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::process::start;

    use super::*;

    /// What the program said after it ended.
    async fn run(program: &str, arguments: &[String], sandbox: Option<Sandbox>) -> String {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let (process, exit) = start(program, arguments, None, &log, None, sandbox).unwrap();
        if tokio::time::timeout(Duration::from_secs(60), exit).await.is_err() {
            process.kill().await.unwrap();
        }
        std::fs::read_to_string(log).unwrap()
    }

    /// Without Landlock there is nothing to test. Where the kernel says that it has it, or the variable does, it must be there.
    fn has_landlock() -> bool {
        let missing = missing();
        let modules = std::fs::read_to_string("/sys/kernel/security/lsm").unwrap_or_default();
        let is_wanted = modules.trim().split(',').any(|module| module == "landlock")
            || std::env::var_os("PERIGEE_TEST_LANDLOCK").is_some();
        assert!(!is_wanted || missing.is_none(), "{missing:?}");
        missing.is_none()
    }

    #[tokio::test]
    async fn a_confined_program_reads_and_writes_its_own_files_only() {
        let dir = tempfile::tempdir().unwrap();
        let (vm, run_dir, other) =
            (dir.path().join("vm"), dir.path().join("vm/run"), dir.path().join("other"));
        std::fs::create_dir_all(&run_dir).unwrap();
        std::fs::write(vm.join("key"), "key\n").unwrap();
        std::fs::write(&other, "other\n").unwrap();
        let script = "cd /; for f in \"$1/key\" \"$2\" /etc/passwd; do echo $(<$f); done >&2; \
                      echo new > \"$1/run/file\"; echo new > \"$1/key\"; echo new > \"$2\"";
        let (vm_text, other_text) = (vm.display().to_string(), other.display().to_string());
        let arguments = ["-c", script, "sh", &vm_text, &other_text].map(ToOwned::to_owned);
        let sandbox = Sandbox::new("bash", &vm, &run_dir).unwrap();
        let said = run("bash", &arguments, Some(sandbox)).await;
        if !has_landlock() {
            return;
        }
        assert!(said.contains("key\n"), "{said}");
        assert_eq!(said.matches("Permission denied").count(), 4, "{said}");
        assert_eq!(std::fs::read_to_string(run_dir.join("file")).unwrap(), "new\n");
        assert_eq!(std::fs::read_to_string(other).unwrap(), "other\n");
    }

    #[test]
    fn a_program_is_not_confined_to_directories_that_are_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let absent = dir.path().join("run");
        for (reads, writes) in [(dir.path(), &*absent), (&*absent, dir.path())] {
            let refused = Sandbox::new("bash", reads, writes).err().expect("a problem");
            assert!(refused.why.contains("run"), "{refused}");
        }
    }

    #[tokio::test]
    async fn a_program_in_a_home_directory_opens_only_what_belongs_to_it() {
        let home = tempfile::tempdir().unwrap();
        let [bin, share, run_dir] = ["bin", "share", "run"].map(|name| home.path().join(name));
        let keys = share.join("keyrings");
        for dir in [&bin, &share.join("qemu"), &keys, &run_dir] {
            std::fs::create_dir_all(dir).unwrap();
        }
        std::fs::write(keys.join("login"), "password\n").unwrap();
        let program = bin.join("shell");
        std::fs::copy(which("bash").unwrap(), &program).unwrap();
        let own = share.join("qemu/firmware");
        std::fs::write(&own, "firmware\n").unwrap();
        std::fs::write(home.path().join("diary"), "diary\n").unwrap();
        std::fs::write(bin.join("other"), "other\n").unwrap();
        let script = "cd /; for f in share/qemu/firmware diary bin/other share/keyrings/login; do echo $(<$1/$f); done >&2";
        let arguments = ["-c", script, "sh", &home.path().display().to_string()];
        let arguments = arguments.map(ToOwned::to_owned);
        // An absolute path is found as it is.
        let program = program.display().to_string();
        let sandbox = Sandbox::new(&program, &run_dir, &run_dir).unwrap();
        let said = run(&program, &arguments, Some(sandbox)).await;
        assert!(said.contains("firmware\n"), "{said}");
        assert_eq!(said.contains("diary\n"), !has_landlock(), "{said}");
        assert_eq!(said.contains("other\n"), !has_landlock(), "{said}");
        assert_eq!(said.contains("password\n"), !has_landlock(), "{said}");
    }

    #[tokio::test]
    async fn a_confined_qemu_starts_and_opens_no_file_that_every_user_may_read() {
        let dir = tempfile::tempdir().unwrap();
        let vm = VmDir::new(dir.path(), &perigee_model::VmId::new("a").unwrap());
        std::fs::create_dir_all(vm.run()).unwrap();
        let arguments = |file: &str| {
            let drive = format!("driver=file,node-name=a,read-only=on,filename={file}");
            let fixed = ["-display", "none", "-M", "none", "-nodefaults", "-blockdev", &drive];
            let socket = format!("unix:{},server=on,wait=off", vm.qmp().display());
            let rest = ["-pidfile", &vm.pid().display().to_string(), "-qmp", &socket]
                .map(ToOwned::to_owned);
            fixed.map(ToOwned::to_owned).into_iter().chain(rest).collect::<Vec<_>>()
        };
        let closed =
            run(QEMU, &arguments("/etc/passwd"), Some(Sandbox::of_qemu(&vm).unwrap())).await;
        assert_eq!(closed.contains("Permission denied"), has_landlock(), "{closed}");

        // With a file of its own it starts, and listens.
        std::fs::write(vm.root().join("own"), [0; 512]).unwrap();
        let own = vm.root().join("own").display().to_string();
        let log = dir.path().join("log");
        let sandbox = Some(Sandbox::of_qemu(&vm).unwrap());
        let (process, _exit) = start(QEMU, &arguments(&own), None, &log, None, sandbox).unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while !vm.qmp().exists() && !process.has_ended() {
            assert!(std::time::Instant::now() < deadline, "QEMU made no socket within 60 s");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let said = std::fs::read_to_string(log).unwrap();
        assert!(vm.qmp().exists(), "{said}");
        process.kill().await.unwrap();
    }
}
