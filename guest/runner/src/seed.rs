//! The seed disk: a tar stream with the job's description and its input files.

use std::io::Read;
use std::path::{Component, Path};

use perigee_model::guest::Seed;

use crate::error::Error;

const JOB_JSON_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// Reads `job.json` and unpacks `inputs/` below `directory`.
pub fn read(stream: impl Read, directory: &Path) -> Result<Seed, Error> {
    let mut archive = tar::Archive::new(stream);
    archive.set_preserve_permissions(true);
    archive.set_preserve_ownerships(true);
    let mut entries = archive.entries().map_err(Error::io("read the seed disk"))?;
    let first = entries
        .next()
        .ok_or_else(|| Error::Seed("it has no entries".to_owned()))?
        .map_err(Error::io("read the seed disk"))?;
    let seed = job(first)?;
    std::fs::create_dir_all(directory.join("inputs"))
        .map_err(Error::io("make the inputs directory"))?;
    for entry in entries {
        let mut entry = entry.map_err(Error::io("read the seed disk"))?;
        let path = entry.path().map_err(Error::io("read the name of an input"))?.into_owned();
        let name = path.display().to_string();
        if path.components().next() != Some(Component::Normal("inputs".as_ref())) {
            return Err(Error::Seed(format!("entry `{name}` is not below inputs/")));
        }
        let inside =
            entry.unpack_in(directory).map_err(Error::io(format!("unpack the input `{name}`")))?;
        if !inside {
            return Err(Error::Seed(format!("entry `{name}` leads out of the inputs")));
        }
    }
    Ok(seed)
}

fn job(entry: tar::Entry<'_, impl Read>) -> Result<Seed, Error> {
    let path = entry.path().map_err(Error::io("read the name of the first entry"))?.into_owned();
    if path != Path::new("job.json") {
        return Err(Error::Seed(format!(
            "its first entry is `{}`, not `job.json`",
            path.display()
        )));
    }
    if entry.size() > JOB_JSON_BYTES_MAX {
        return Err(Error::Seed(format!(
            "job.json has {} bytes, more than {JOB_JSON_BYTES_MAX}",
            entry.size()
        )));
    }
    let seed: Seed = serde_json::from_reader(entry)
        .map_err(|error| Error::Seed(format!("job.json: {error}")))?;
    if seed.command.is_empty() && !seed.collect {
        return Err(Error::Seed("job.json: the command is empty".to_owned()));
    }
    Ok(seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: &str = r#"{"job":"j1","command":["true"],"env":{},"mounts":[],"outputs":[],"timeout_s":null,
        "stop_grace_s":10,"collect":false}"#;

    fn stream(entries: &[(&str, &str)]) -> Vec<u8> {
        let mut tar = tar::Builder::new(Vec::new());
        for (name, content) in entries {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o640);
            header.set_uid(nix::unistd::getuid().as_raw().into());
            header.set_gid(nix::unistd::getgid().as_raw().into());
            // Not `append_data`: it refuses the bad names that a test needs.
            header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_cksum();
            tar.append(&header, content.as_bytes()).unwrap();
        }
        tar.into_inner().unwrap()
    }

    fn refusal(entries: &[(&str, &str)]) -> String {
        let directory = tempfile::tempdir().unwrap();
        read(&stream(entries)[..], directory.path()).unwrap_err().to_string()
    }

    #[test]
    fn inputs_are_unpacked_below_the_working_directory() {
        let directory = tempfile::tempdir().unwrap();
        let mut bytes = stream(&[("job.json", JOB), ("inputs/a.txt", "hello")]);
        bytes.extend_from_slice(&[0; 100_000]);
        let seed = read(&bytes[..], directory.path()).unwrap();
        assert_eq!(seed.command, ["true"]);
        let input = std::fs::read_to_string(directory.path().join("inputs/a.txt")).unwrap();
        assert_eq!(input, "hello");
    }

    #[test]
    fn an_empty_disk_is_no_seed() {
        let directory = tempfile::tempdir().unwrap();
        let error = read(&[0; 4096][..], directory.path()).unwrap_err();
        assert!(error.to_string().contains("no entries"), "{error}");
    }

    #[test]
    fn the_first_entry_must_be_the_job() {
        assert!(refusal(&[("inputs/a", "x"), ("job.json", JOB)]).contains("first entry"));
    }

    #[test]
    fn a_job_without_a_command_is_refused() {
        let job = JOB.replace("[\"true\"]", "[]");
        assert!(refusal(&[("job.json", &job)]).contains("command is empty"));
    }

    #[test]
    fn a_job_whose_outputs_are_only_collected_needs_no_command() {
        let job = JOB.replace("[\"true\"]", "[]").replace("\"collect\":false", "\"collect\":true");
        let directory = tempfile::tempdir().unwrap();
        let seed = read(&stream(&[("job.json", &job)])[..], directory.path()).unwrap();
        assert!(seed.collect && seed.command.is_empty());
    }

    #[test]
    fn an_entry_outside_the_inputs_is_refused() {
        assert!(refusal(&[("job.json", JOB), ("etc/passwd", "x")]).contains("not below inputs/"));
        assert!(refusal(&[("job.json", JOB), ("inputs/../../x", "x")]).contains("leads out"));
    }
}
