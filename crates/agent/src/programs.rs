//! The programs that VMs need at a host beside QEMU: where they are, and what VMs lack without them.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::unistd::Uid;

/// The program that is a VM's TPM.
pub const SWTPM: &str = "swtpm";
/// The program that shows a volume as a file.
pub const STORAGE_DAEMON: &str = "qemu-storage-daemon";
const FUSE: &str = "/dev/fuse";
/// As many of them may be made.
const NAMESPACES: &str = "/proc/sys/user/max_user_namespaces";

/// The file of a program, with links followed.
pub fn which(name: &str) -> Option<PathBuf> {
    let dirs = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&dirs).map(|dir| dir.join(name)).find(|path| path.is_file());
    found?.canonicalize().ok()
}

/// The file name of this program, also if another version has replaced the file meanwhile.
pub fn own_name() -> std::io::Result<String> {
    let path = std::env::current_exe()?.display().to_string();
    let path = Path::new(path.strip_suffix(" (deleted)").unwrap_or(&path));
    let name = path.file_name().ok_or(std::io::ErrorKind::NotFound)?;
    Ok(name.to_string_lossy().into_owned())
}

/// Why VMs at this host can't have a TPM; `None` if they can.
pub fn no_tpm() -> Option<String> {
    if !Uid::effective().is_root() {
        return Some("the agent is not root".to_owned());
    }
    let programs = [(SWTPM, "swtpm"), (STORAGE_DAEMON, "qemu-system-common")];
    if let Some((program, package)) =
        programs.into_iter().find(|(program, _)| which(program).is_none())
    {
        return Some(format!("{program} is not installed (package {package})"));
    }
    if std::fs::read_to_string(NAMESPACES).is_ok_and(|most| most.trim() == "0") {
        return Some("user namespaces are off (sysctl user.max_user_namespaces)".to_owned());
    }
    match std::fs::metadata(FUSE) {
        Ok(meta) if meta.mode() & 0o006 == 0o006 => None,
        Ok(_) => Some(format!("{FUSE} is closed to the users of VMs (chmod 0666 {FUSE})")),
        Err(error) => Some(format!("{FUSE} can't be used: {error} (modprobe fuse)")),
    }
}
