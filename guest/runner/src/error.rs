//! Why the runner failed. The user reads the text as the reason of the job's failure.

use std::io;

use perigee_model::DiskRole;
use perigee_model::guest::SEED_REFUSED;

/// Why the runner can't do its work. A controller recognizes a refused seed by its first words.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("this VM has no disk with serial `{0}`")]
    NoDisk(DiskRole),
    #[error("cannot {doing}: {source}")]
    Io { doing: String, source: io::Error },
    #[error("{SEED_REFUSED}: {0}")]
    Seed(String),
    #[error("cannot make a filesystem on disk `{role}`: {detail}")]
    Format { role: DiskRole, detail: String },
    #[error("{name}: {detail}")]
    Grow { name: String, detail: String },
    #[error("it is not in the last partition of its disk")]
    RootNotLast,
    #[error("it is {0}, and only ext4, xfs and btrfs can be grown here")]
    RootKind(String),
    #[error("disk `{0}` is empty, so there is nothing to mount read-only")]
    EmptyReadOnly(DiskRole),
    #[error(
        "the filesystem on {disk} can't be mounted at {path} to read from it: it was not unmounted, and its journal has to be \
         replayed, which takes writing; use `access: clone` for that volume"
    )]
    WantsRecovery { disk: String, path: String },
    #[error("mount path `{0}` must be absolute and not the root directory")]
    MountPath(String),
    #[error("cloud-init has not configured the guest's disks and network within {0} s")]
    CloudInit(u64),
    #[error("can't set up the network card: {0}")]
    Network(String),
    #[error("its image has no SSH server, which `mpi: true` needs: install openssh-server in it")]
    NoSshServer,
    #[error("can't use the SSH server for the other VMs of the job: {0}")]
    SshServer(String),
    #[error("can't stop all processes of the job within {0} s")]
    Stragglers(u64),
}

impl Error {
    /// For `map_err`: `doing` says what was being done.
    pub fn io<E: Into<io::Error>>(doing: impl Into<String>) -> impl FnOnce(E) -> Self {
        let doing = doing.into();
        move |source| Self::Io { doing, source: source.into() }
    }
}
