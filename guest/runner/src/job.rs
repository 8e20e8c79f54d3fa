//! The phases of the job, from the seed disk to the written outputs.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use perigee_model::DiskRole;
use perigee_model::guest::{GuestBody, Seed};

use crate::disks::{self, Mounted};
use crate::error::Error;
use crate::outbox::Outbox;
use crate::outputs::{self, Written};
use crate::{command, network, seed};

const JOB_DIRECTORY: &str = "/job";
const OUTPUT_DIRECTORY: &str = "/output";

pub fn run(outbox: &Arc<Outbox>) -> Result<Written, Error> {
    let seed = read_seed()?;
    std::fs::create_dir_all(OUTPUT_DIRECTORY).map_err(Error::io("make the output directory"))?;
    let mut mounted = Vec::new();
    for mount in &seed.mounts {
        mounted.push(disks::mount(mount)?);
        if mount.role == DiskRole::Inputs {
            // Nobody repairs this disk, and a command that reads all inputs must not find it.
            drop(std::fs::remove_dir(Path::new(&mount.path).join("lost+found")));
        }
    }
    if let Some(network) = &seed.network {
        network::set_up(network)?;
    }
    outbox.push(GuestBody::Started);

    let directory = Path::new(JOB_DIRECTORY);
    let code = command::run(&seed, directory, Path::new(OUTPUT_DIRECTORY), outbox)?;

    // The exit code is sent only when the data disks are clean, because the host may then detach them.
    for disk in mounted.iter().rev() {
        disks::unmount(disk)?;
    }
    outbox.push(GuestBody::Exited { code });
    write_outputs(&seed, &mounted, code)
}

fn read_seed() -> Result<Seed, Error> {
    let device = disks::find(DiskRole::Seed)?;
    let disk = File::open(device).map_err(Error::io("open the seed disk"))?;
    seed::read(BufReader::with_capacity(256 * 1024, disk), Path::new(JOB_DIRECTORY))
}

fn write_outputs(seed: &Seed, mounted: &[Mounted], code: i32) -> Result<Written, Error> {
    let paths: Vec<PathBuf> = if seed.outputs.is_empty() {
        vec![OUTPUT_DIRECTORY.into()]
    } else {
        seed.outputs.iter().map(|path| Path::new(JOB_DIRECTORY).join(path)).collect()
    };
    let needed: Vec<&Mounted> =
        mounted.iter().filter(|disk| paths.iter().any(|path| is_on(path, &disk.path))).collect();
    for disk in &needed {
        disks::mount_again_read_only(disk)?;
    }
    let device = disks::find(DiskRole::Output)?;
    outputs::write(&device, &paths, code == 0)
}

/// Whether files below `output` may be on the disk that is mounted at `mount`.
fn is_on(output: &Path, mount: &Path) -> bool {
    output.starts_with(mount) || mount.starts_with(output)
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
    }
}
