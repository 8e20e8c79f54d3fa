//! The user to whom a controller's directory belongs. The package's unit runs the controller as the user `perigee`; root works on the files in
//! its directory as that user, so that the controller can use what root has made there.

use std::ffi::OsString;
use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open, openat};
use nix::sys::stat::Mode;
use nix::unistd::{Gid, Uid, User, fchown, fchownat, setegid, seteuid};
use perigee_model::Problem;

/// As whom the package's unit runs the controller.
const USER: &str = "perigee";
/// Where that controller listens for the commands of this machine.
pub const SOCKET: &str = "unix:/run/perigee/controller.sock";

/// Until it is dropped, this process acts as the user to whom a directory belongs, if it is root's process.
pub struct AsOwner {
    has_changed: bool,
}

impl AsOwner {
    /// # Errors
    /// If the user can't be changed.
    pub fn of(dir: &Path) -> Result<Self, Problem> {
        // Where there is no directory yet, root's is made.
        let owner = std::fs::metadata(dir).ok().filter(|meta| meta.uid() != 0);
        let Some(owner) = owner.filter(|_| Uid::effective().is_root()) else {
            return Ok(Self { has_changed: false });
        };
        let acting = Self { has_changed: true };
        let changed =
            setegid(Gid::from_raw(owner.gid())).and_then(|()| seteuid(Uid::from_raw(owner.uid())));
        changed.map_err(|e| {
            let what = format!("can't work in {} as its owner", dir.display());
            Problem::internal(what, e)
        })?;
        Ok(acting)
    }
}

impl Drop for AsOwner {
    fn drop(&mut self) {
        if !self.has_changed {
            return;
        }
        let root = seteuid(Uid::from_raw(0)).and_then(|()| setegid(Gid::from_raw(0)));
        if let Err(error) = root {
            tracing::error!("this command goes on as another user: {error}");
        }
    }
}

/// Makes the controller's directory, and gives it to the user of the package's unit, if there is this user. Only root can do that.
///
/// # Errors
/// If the directory can't be made or given away; `Conflict` while a controller of root uses it.
pub fn make_for_unit(state: &Path) -> Result<(), Problem> {
    if let Some(above) = state.parent() {
        make_passable(above)?;
    }
    let user = User::from_name(USER);
    let user = user.map_err(|e| Problem::internal(format!("can't look for the user {USER}"), e))?;
    let Some(user) = user.filter(|_| Uid::effective().is_root()) else { return Ok(()) };
    let what = || format!("can't give {} to the user {USER}", state.display());
    let failed = |e: std::io::Error| Problem::internal(what(), e);
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(state).map_err(failed)?;
    let is_used = File::open(state.join("lock")).is_ok_and(|lock| lock.try_lock().is_err());
    if !is_used {
        remove_left(Path::new(SOCKET.trim_start_matches("unix:"))).map_err(failed)?;
    }
    match std::fs::metadata(state).map_err(failed)?.uid() {
        0 => {}
        uid if uid == user.uid.as_raw() => return Ok(()),
        uid => {
            return Err(Problem::conflict(what(), format!("it belongs to user {uid}"))
                .next(format!("chown -R {USER}: {}", state.display())));
        }
    }
    if is_used {
        return Err(Problem::conflict(what(), "a controller that root has started uses it")
            .next("stop that controller, and run this command again"));
    }
    give(state, user.uid, user.gid).map_err(failed)
}

/// Gives what root has made in the controller's directory to whom the directory belongs, or to the user of the package's unit if it is root's.
///
/// # Errors
/// As for [`make_for_unit`].
pub fn give_for_unit(state: &Path) -> Result<(), Problem> {
    make_for_unit(state)?;
    if !Uid::effective().is_root() {
        return Ok(());
    }
    let given = std::fs::metadata(state)
        .and_then(|meta| give(state, Uid::from_raw(meta.uid()), Gid::from_raw(meta.gid())));
    given.map_err(|e| Problem::internal(format!("can't give {} to its owner", state.display()), e))
}

/// Removes a socket of root on which nobody listens. In a directory with the sticky bit, the user of the unit could not replace it.
fn remove_left(socket: &Path) -> std::io::Result<()> {
    let is_roots = std::fs::symlink_metadata(socket)
        .is_ok_and(|meta| meta.file_type().is_socket() && meta.uid() == 0);
    match UnixStream::connect(socket) {
        Err(error) if is_roots && error.kind() == ErrorKind::ConnectionRefused => {
            std::fs::remove_file(socket)
        }
        _ => Ok(()),
    }
}

const DIRECTORY: OFlag = OFlag::O_DIRECTORY.union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);

/// Gives a directory and all below it to a user. Links are not followed. The directory comes last: until then it is not the user's, and this can be
/// done again.
fn give(dir: &Path, uid: Uid, gid: Gid) -> std::io::Result<()> {
    let opened = open(dir, DIRECTORY, Mode::empty())?;
    give_below(&opened, uid, gid)?;
    Ok(fchown(opened, Some(uid), Some(gid))?)
}

fn give_below(dir: &OwnedFd, uid: Uid, gid: Gid) -> std::io::Result<()> {
    let listed = std::fs::read_dir(format!("/proc/self/fd/{}", dir.as_raw_fd()))?;
    // One open file for each directory on the way down is enough.
    let names: Result<Vec<OsString>, _> =
        listed.map(|entry| entry.map(|entry| entry.file_name())).collect();
    for name in names? {
        match openat(dir, name.as_os_str(), DIRECTORY, Mode::empty()) {
            Ok(below) => {
                give_below(&below, uid, gid)?;
                fchown(below, Some(uid), Some(gid))?;
            }
            // It is a file, or a link.
            Err(Errno::ENOTDIR | Errno::ELOOP) => {
                let link = AtFlags::AT_SYMLINK_NOFOLLOW;
                fchownat(dir, name.as_os_str(), Some(uid), Some(gid), link)?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Makes a directory that others pass through to their own files, as QEMU's users do. One that is there stays as it is.
///
/// # Errors
/// If it can't be made.
pub fn make_passable(dir: &Path) -> Result<(), Problem> {
    if dir.is_dir() {
        return Ok(());
    }
    let made = std::fs::create_dir_all(dir)
        .and_then(|()| std::fs::set_permissions(dir, PermissionsExt::from_mode(0o711)));
    made.map_err(|e| {
        let what = format!("can't make the directory {}", dir.display());
        match e.kind() {
            ErrorKind::PermissionDenied => {
                Problem::forbidden(what, e).next("run this command as root")
            }
            _ => Problem::internal(what, e),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{lchown, symlink};
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Nobody else gives files away.
    fn needs_root() {
        assert!(Uid::effective().is_root(), "run this test as root, as `make test` does");
    }

    #[test]
    fn what_is_given_is_all_below_a_directory_and_no_end_of_a_link() {
        needs_root();
        let dir = tempfile::tempdir().expect("a directory");
        let (state, outside) = (dir.path().join("state"), dir.path().join("outside"));
        std::fs::create_dir_all(state.join("a/b")).expect("directories");
        std::fs::create_dir(&outside).expect("a directory");
        std::fs::write(state.join("a/b/file"), "").expect("a file");
        std::fs::write(outside.join("file"), "").expect("a file");
        symlink(&outside, state.join("a/link")).expect("a link");
        let id = (Uid::from_raw(12345), Gid::from_raw(12346));
        give(&state, id.0, id.1).expect("root may");
        let owner = |path: &Path| {
            let meta = std::fs::symlink_metadata(path).expect("it is there");
            (meta.uid(), meta.gid())
        };
        for given in ["", "a", "a/b", "a/b/file", "a/link"] {
            assert_eq!(owner(&state.join(given)), (12345, 12346), "{given:?}");
        }
        for kept in [outside.clone(), outside.join("file")] {
            assert_eq!(owner(&kept).0, 0, "{kept:?}");
        }
        let link = dir.path().join("link");
        symlink(&outside, &link).expect("a link");
        give(&link, id.0, id.1).expect_err("it is a link");
        assert_eq!(owner(&outside).0, 0);
    }

    #[test]
    fn only_a_socket_on_which_nobody_listens_is_removed() {
        let dir = tempfile::tempdir().expect("a directory");
        let (socket, file) = (dir.path().join("socket"), dir.path().join("file"));
        std::fs::write(&file, "").expect("a file");
        let listener = UnixListener::bind(&socket).expect("a socket");
        remove_left(&socket).expect("nothing is done");
        remove_left(&file).expect("nothing is done");
        assert!(socket.exists() && file.exists());
        drop(listener);
        remove_left(&socket).expect("it is removed");
        assert_eq!(socket.exists(), !Uid::effective().is_root(), "only root's is");
    }

    #[test]
    fn what_root_makes_in_a_directory_of_another_user_belongs_to_that_user() {
        needs_root();
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o711)).expect("a mode");
        let state = dir.path().join("state");
        std::fs::create_dir(&state).expect("a directory");
        lchown(&state, Some(12345), Some(12345)).expect("root may");
        {
            let _owner = AsOwner::of(&state).expect("root may");
            std::fs::write(state.join("file"), "").expect("it is the owner");
        }
        let meta = std::fs::metadata(state.join("file")).expect("it is there");
        assert_eq!((meta.uid(), meta.gid()), (12345, 12345));
        std::fs::write(dir.path().join("root"), "").expect("it is root again");
    }
}
