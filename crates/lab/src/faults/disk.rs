//! A disk of its own for each host's pool: a file with ext4, which can run full and which can fail.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::libc;
use nix::sys::signal::Signal;
use perigee_model::{HostId, Problem};

use super::ground::LOOK_EVERY;
use crate::command::run;
use crate::process::{Process, wait_until};
use crate::up::Lab;

const SIZE: &str = "8G";
/// How much of a full disk stays free.
const ROOM_BYTES: u64 = 2 << 20;
const END_MAX: Duration = Duration::from_secs(20);
/// ext4's `EXT4_IOC_SHUTDOWN`.
const SHUTDOWN: libc::c_ulong = 0x8004_587d;
/// Its argument: all that was written before gets to the disk first.
static AFTER_A_SYNC: u32 = 0;

/// Puts every pool on a disk of its own. The pools must be empty.
pub async fn give_each_pool_a_disk(lab: &Lab) -> Result<(), Problem> {
    let hosts: Vec<HostId> = lab.definition.hosts().map(|(_, host)| host.clone()).collect();
    for host in &hosts {
        let image = image(lab, host).display().to_string();
        run("truncate", &["--size", SIZE, &image]).await?;
        run("mkfs.ext4", &["-q", "-m", "0", &image]).await?;
        without_server(lab, host, async || mount(lab, host).await).await?;
    }
    Ok(())
}

/// Fills the filesystem of a host's pool, apart from a little that the server needs for its own files.
pub async fn fill(lab: &Lab, host: &HostId) -> Result<(), Problem> {
    let what = || format!("can't fill the pool of {host}");
    let space = nix::sys::statvfs::statvfs(&pool(lab, host))
        .map_err(|error| Problem::internal(what(), error))?;
    let free_bytes = space.blocks_available() * space.fragment_size();
    let bytes = free_bytes.saturating_sub(ROOM_BYTES).to_string();
    run("fallocate", &["--length", &bytes, &ballast(lab, host).to_string_lossy()]).await.map(drop)
}

/// Undoes [`fill`].
pub fn make_room(lab: &Lab, host: &HostId) -> Result<(), Problem> {
    std::fs::remove_file(ballast(lab, host))
        .map_err(|error| Problem::internal(format!("can't empty the pool of {host}"), error))
}

/// Makes every access to the pool's files an I/O error from now on.
pub fn fail(lab: &Lab, host: &HostId) -> Result<(), Problem> {
    let what = || format!("can't let the disk of {host} fail");
    let dir = File::open(pool(lab, host)).map_err(|error| Problem::internal(what(), error))?;
    // SAFETY: the ioctl reads a number of 32 bits, which is static.
    let done = unsafe { libc::ioctl(dir.as_raw_fd(), SHUTDOWN, &raw const AFTER_A_SYNC) };
    nix::errno::Errno::result(done).map(drop).map_err(|errno| Problem::internal(what(), errno))
}

/// Makes the disk work again, and starts the volume server anew.
pub async fn heal(lab: &Lab, host: &HostId) -> Result<(), Problem> {
    without_server(lab, host, async || {
        unmount(lab, host).await?;
        mount(lab, host).await
    })
    .await
}

/// A killed program has files open until its last thread has ended.
async fn unmount(lab: &Lab, host: &HostId) -> Result<(), Problem> {
    let pool = pool(lab, host);
    let end = Instant::now() + END_MAX;
    loop {
        match run("umount", &[&pool.to_string_lossy()]).await {
            Err(_) if Instant::now() < end => tokio::time::sleep(LOOK_EVERY).await,
            done => return done.map(drop),
        }
    }
}

async fn mount(lab: &Lab, host: &HostId) -> Result<(), Problem> {
    let (image, pool) = (image(lab, host), pool(lab, host));
    run("mount", &["-o", "loop", &image.to_string_lossy(), &pool.to_string_lossy()]).await.map(drop)
}

/// Kills the volume server, and has it started again when the work is done.
async fn without_server(
    lab: &Lab,
    host: &HostId,
    work: impl AsyncFnOnce() -> Result<(), Problem>,
) -> Result<(), Problem> {
    let supervisor = lab.lab_dir().supervisor();
    let tell = |signal| supervisor.map_or(Ok(()), |process: Process| process.signal(signal));
    tell(Signal::SIGSTOP)?;
    let stopped = async {
        if let Some(server) = lab.host_pid(host, "volume").ok().and_then(Process::of) {
            server.signal(Signal::SIGKILL)?;
            if !wait_until(END_MAX, || !server.alive()).await {
                let why = format!("it did not end within {} s", END_MAX.as_secs());
                return Err(Problem::internal(
                    format!("can't kill the volume server of {host}"),
                    why,
                ));
            }
        }
        work().await
    };
    let done = stopped.await;
    tell(Signal::SIGCONT)?;
    done
}

fn image(lab: &Lab, host: &HostId) -> PathBuf {
    lab.dir().join(format!("{host}.ext4"))
}

fn pool(lab: &Lab, host: &HostId) -> PathBuf {
    lab.lab_dir().host(host).join("pool")
}

fn ballast(lab: &Lab, host: &HostId) -> PathBuf {
    pool(lab, host).join("ballast")
}
