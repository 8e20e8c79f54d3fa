//! The user to whom a controller's directory belongs. The package's unit runs the controller as the user `perigee`; root works on the files in
//! its directory as that user, so that the controller can use what root has made there.

use std::fs::File;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt, lchown};
use std::path::Path;

use nix::unistd::{Gid, Uid, User, setegid, seteuid};
use perigee_model::Problem;

/// As whom the package's unit runs the controller.
const USER: &str = "perigee";

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
    match std::fs::metadata(state).map_err(failed)?.uid() {
        0 => {}
        uid if uid == user.uid.as_raw() => return Ok(()),
        uid => {
            return Err(Problem::conflict(what(), format!("it belongs to user {uid}"))
                .next(format!("chown -R {USER}: {}", state.display())));
        }
    }
    if let Ok(lock) = File::open(state.join("lock"))
        && lock.try_lock().is_err()
    {
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

/// Gives a directory and all below it to a user. Links are not followed.
fn give(dir: &Path, uid: Uid, gid: Gid) -> std::io::Result<()> {
    let mut todo = vec![dir.to_owned()];
    while let Some(path) = todo.pop() {
        lchown(&path, Some(uid.as_raw()), Some(gid.as_raw()))?;
        if std::fs::symlink_metadata(&path)?.is_dir() {
            for entry in std::fs::read_dir(&path)? {
                todo.push(entry?.path());
            }
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
            std::io::ErrorKind::PermissionDenied => {
                Problem::forbidden(what, e).next("run this command as root")
            }
            _ => Problem::internal(what, e),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_root_makes_in_a_directory_of_another_user_belongs_to_that_user() {
        if !Uid::effective().is_root() {
            return;
        }
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
