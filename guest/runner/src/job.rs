//! The phases of the job, from the seed disk to the written outputs.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use perigee_model::DiskRole;
use perigee_model::guest::{CommandEnd, GuestBody, LogStream, Seed};

use crate::command::Wishes;
use crate::disks;
use crate::error::Error;
use crate::outbox::Outbox;
use crate::outputs::{self, Written};
use crate::processes::JobCgroup;
use crate::{cloud_init, command, console, gang, globs, host_name, network, seed};

const JOB_DIRECTORY: &str = "/job";
const OUTPUT_DIRECTORY: &str = "/output";

/// The whole life of a job in its VM: seed, disks, inputs, command, outputs.
///
/// # Errors
/// If the command could not be run. That it failed is no error.
pub fn run(outbox: &Arc<Outbox>, wishes: &Arc<Wishes>) -> Result<Written, Error> {
    cloud_init::wait()?;
    let seed = read_seed()?;
    if seed.collect {
        return collect(&seed, outbox);
    }
    if let Err(error) = host_name::set(&seed.job) {
        console(&format!("the guest has not its job's name: {error}"));
    }
    std::fs::create_dir_all(OUTPUT_DIRECTORY).map_err(Error::io("make the output directory"))?;
    if let Err(error) = disks::grow_root() {
        let line = format!("perigee: the root filesystem is as small as in the image: {error}");
        outbox.push(GuestBody::log(LogStream::Stderr, line));
    }
    if let Some(line) = seed.output_bytes.and_then(disks::lacks_room_for_outputs) {
        outbox.push(GuestBody::log(LogStream::Stderr, line));
    }
    let mut mounted = Vec::new();
    for mount in &seed.mounts {
        mounted.push(disks::mount(mount)?);
        if mount.role == DiskRole::Inputs {
            // Nobody repairs this disk, and a command that reads all inputs must not find it.
            drop(std::fs::remove_dir(Path::new(&mount.path).join("lost+found")));
        }
    }
    if let Some(network) = &seed.network {
        match network::set_up(network) {
            Err(why) if network.optional => eprintln!("perigee-runner: {why}"),
            set_up => set_up?,
        }
    }
    let cgroup = JobCgroup::create()?;
    if let Some(gang) = &seed.gang {
        let say = |line| {
            outbox.push(GuestBody::log(LogStream::Stderr, line));
        };
        gang::set_up(gang, &cgroup, say)?;
        outbox.push(GuestBody::Ready);
        wishes.wait_for_begin();
    }
    outbox.push(GuestBody::Started);

    let directory = Path::new(JOB_DIRECTORY);
    let has_command = seed.gang.as_ref().is_none_or(|gang| !gang.mpi || gang.rank == 0);
    let (code, end) = if has_command {
        command::run(&seed, &cgroup, directory, Path::new(OUTPUT_DIRECTORY), outbox, wishes)?
    } else {
        wishes.wait_until_asked();
        cgroup.end_all(Duration::from_secs(seed.stop_grace_s))?;
        (0, CommandEnd::default())
    };

    // The exit code is sent only when the data disks are clean, because the host may then detach them.
    for disk in mounted.iter().rev() {
        disks::unmount(disk)?;
    }
    outbox.push(GuestBody::Exited { code, end });
    for disk in mounted.iter().filter(|disk| is_needed(&seed, &disk.path)) {
        disks::mount_again_read_only(disk)?;
    }
    write_outputs(&seed, outbox)
}

/// Only writes the outputs: the VM ended before it had done that. Its kernel has recovered the root filesystem, and recovers
/// the others when they are mounted. One that can't be mounted is left out and said.
fn collect(seed: &Seed, outbox: &Arc<Outbox>) -> Result<Written, Error> {
    let mut missing = Vec::new();
    for mount in seed.mounts.iter().filter(|mount| is_needed(seed, Path::new(&mount.path))) {
        if let Err(error) = disks::mount_read_only(mount) {
            missing.push(error.to_string());
        }
    }
    let written = write_outputs(seed, outbox)?;
    let lacks = missing.into_iter().chain(written.lacks).collect::<Vec<_>>().join("; ");
    Ok(Written { lacks: (!lacks.is_empty()).then_some(lacks), ..written })
}

fn read_seed() -> Result<Seed, Error> {
    let device = disks::find(DiskRole::Seed)?;
    let disk = File::open(device).map_err(Error::io("open the seed disk"))?;
    seed::read(BufReader::with_capacity(256 * 1024, disk), Path::new(JOB_DIRECTORY))
}

fn patterns(seed: &Seed) -> Vec<&str> {
    match &seed.outputs[..] {
        [] => vec![OUTPUT_DIRECTORY],
        patterns => patterns.iter().map(String::as_str).collect(),
    }
}

/// Whether outputs may be on the disk that is mounted there.
fn is_needed(seed: &Seed, mount: &Path) -> bool {
    patterns(seed).iter().any(|path| is_on(&Path::new(JOB_DIRECTORY).join(path), mount))
}

fn write_outputs(seed: &Seed, outbox: &Arc<Outbox>) -> Result<Written, Error> {
    let job = Path::new(JOB_DIRECTORY);
    let (mut paths, mut unread) = (Vec::new(), BTreeMap::new());
    for pattern in patterns(seed) {
        let found = globs::expand(job, pattern);
        if found.paths.is_empty() {
            let line = format!("perigee: no file matches the output {pattern}");
            outbox.push(GuestBody::log(LogStream::Stderr, line));
        }
        paths.extend(found.paths);
        for (path, why) in found.unread {
            let why = format!("it can't be searched for the output {pattern}: {why}");
            unread.entry(path).or_insert(why);
        }
    }
    // What is below a path that is written is told with that path.
    unread.retain(|path, _| !paths.iter().any(|written| path.starts_with(written)));
    let device = disks::find(DiskRole::Output)?;
    outputs::write(&device, &globs::without_nested(paths), &unread, &mut |left_out| {
        outbox.push_when_room(GuestBody::LeftOut(left_out));
    })
}

/// Whether files below `output` may be on the disk that is mounted at `mount`. Of a pattern, only what is before its first
/// wildcard says so.
fn is_on(output: &Path, mount: &Path) -> bool {
    let is_plain =
        |part: &Component<'_>| !part.as_os_str().to_string_lossy().contains(['*', '?', '[', '\\']);
    let plain: PathBuf = output.components().take_while(is_plain).collect();
    output.starts_with(mount) || plain.starts_with(mount) || mount.starts_with(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_output_needs_the_disks_below_and_above_it() {
        assert!(is_on(Path::new("/data/result"), Path::new("/data")));
        assert!(is_on(Path::new("/data"), Path::new("/data/inner")));
        assert!(!is_on(Path::new("/output"), Path::new("/data")));
        assert!(!is_on(Path::new("/data2"), Path::new("/data")));
        assert!(is_on(Path::new("/*/result"), Path::new("/data")));
        assert!(is_on(Path::new("/data/*.csv"), Path::new("/data")));
        assert!(!is_on(Path::new("/output/*.csv"), Path::new("/data")));
    }
}
