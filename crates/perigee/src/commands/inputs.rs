//! A job's input files: packed where the job is submitted, and sent to the controller.
//!
//! A job file may come from somebody else. So it names only files below its own directory, with links resolved, unless
//! the user says otherwise.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::libc::O_NONBLOCK;

use perigee_http::{Client, Method, file_body};
use perigee_model::Problem;
use perigee_model::job::Bundle;
use perigee_model::job_file::InputFile;

/// Links can lead in a circle.
const DEPTH_MAX: usize = 64;

/// Which files a job file may name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    BelowJobFile,
    Anywhere,
}

/// Packs the inputs and uploads them. Their paths are relative to `base`, the job file's directory. Returns the
/// bundle's id.
pub async fn upload(
    client: &Client,
    base: &Path,
    inputs: Vec<InputFile>,
    reach: Reach,
) -> Result<String, Problem> {
    let base = base.to_owned();
    let packed = tokio::task::spawn_blocking(move || pack(&base, &inputs, reach))
        .await
        .map_err(|e| Problem::internal("can't pack the inputs", e))??;
    let file = tokio::fs::File::from_std(packed);
    let bundle: Bundle = client.send_body(Method::POST, "/v1/bundles", file_body(file)).await?;
    Ok(bundle.sha256)
}

fn pack(base: &Path, inputs: &[InputFile], reach: Reach) -> Result<File, Problem> {
    let failed = |e: io::Error| Problem::internal("can't pack the inputs", e);
    let scratch = tempfile::tempfile().map_err(failed)?;
    // The directory of a job file that is named without one is the empty path.
    let base = Path::new(".").join(base);
    let real = base.canonicalize().map_err(failed)?;
    let mut packing = Packing { tar: tar::Builder::new(scratch), base: real, reach };
    for input in inputs {
        packing.add(&base.join(&input.from), Path::new(&input.to), 0)?;
    }
    let mut file = packing.tar.into_inner().map_err(failed)?;
    io::Seek::rewind(&mut file).map_err(failed)?;
    Ok(file)
}

struct Packing {
    tar: tar::Builder<File>,
    base: PathBuf,
    reach: Reach,
}

impl Packing {
    fn check_reach(&self, what: impl Fn() -> String, real: &Path) -> Result<(), Problem> {
        if self.reach == Reach::Anywhere || real.starts_with(&self.base) {
            return Ok(());
        }
        let why = format!("{} is not below the job file's directory", real.display());
        Err(Problem::invalid(what(), why).next(
            "if you trust the job file, submit it with --inputs-from-anywhere; else move the file there",
        ))
    }

    fn add(&mut self, from: &Path, to: &Path, depth: usize) -> Result<(), Problem> {
        let what = || format!("can't pack the input {}", from.display());
        let failed = |e: io::Error| {
            match e.kind() {
                io::ErrorKind::NotFound => Problem::not_found(what(), "there is no such file"),
                _ => Problem::invalid(what(), e),
            }
            .next("paths in a job file are relative to the job file")
        };
        let real = from.canonicalize().map_err(failed)?;
        self.check_reach(what, &real)?;
        if !real.is_dir() {
            // A pipe is opened at once, and then refused.
            let opened = File::options().read(true).custom_flags(O_NONBLOCK).open(&real);
            let mut file = opened.map_err(failed)?;
            if !file.metadata().map_err(failed)?.is_file() {
                return Err(Problem::invalid(what(), "it is neither a file nor a directory"));
            }
            // Another user may have put a link in its place in the meantime.
            let opened = format!("/proc/self/fd/{}", file.as_raw_fd());
            self.check_reach(what, &std::fs::read_link(opened).map_err(failed)?)?;
            return self.tar.append_file(to, &mut file).map_err(failed);
        }
        if depth == DEPTH_MAX {
            let why = format!(
                "it has more than {DEPTH_MAX} directories in each other; do links form a circle?"
            );
            return Err(Problem::invalid(what(), why));
        }
        self.tar.append_dir(to, &real).map_err(failed)?;
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&real).map_err(failed)? {
            names.push(entry.map_err(failed)?.file_name());
        }
        names.sort();
        names.iter().try_for_each(|name| self.add(&real.join(name), &to.join(name), depth + 1))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn input(from: &str) -> InputFile {
        InputFile { from: from.into(), to: "in".into() }
    }

    fn names(packed: File) -> Vec<String> {
        let mut tar = tar::Archive::new(packed);
        let entries = tar.entries().expect("a tar");
        let name =
            |entry: tar::Entry<'_, File>| entry.path().expect("a path").display().to_string();
        entries
            .map(|entry| name(entry.expect("an entry")).trim_end_matches('/').to_owned())
            .collect()
    }

    #[test]
    fn a_job_file_reads_nothing_outside_of_its_directory() {
        let dir = tempfile::tempdir().expect("a directory");
        let base = dir.path().join("job");
        std::fs::create_dir_all(base.join("data/deep")).expect("directories");
        std::fs::write(dir.path().join("secret"), "key").expect("a file");
        std::fs::write(base.join("data/a"), "1").expect("a file");
        symlink("../a", base.join("data/deep/inside")).expect("a link");
        symlink(dir.path().join("secret"), base.join("link")).expect("a link");
        std::fs::create_dir(base.join("trap")).expect("a directory");
        symlink(dir.path(), base.join("trap/out")).expect("a link");
        let packed = pack(&base, &[input("data")], Reach::BelowJobFile).expect("all is below");
        assert_eq!(names(packed), ["in", "in/a", "in/deep", "in/deep/inside"]);
        let absolute = dir.path().join("secret").display().to_string();
        for bad in ["../secret", "link", "trap", "data/../../secret", &absolute] {
            let refused = pack(&base, &[input(bad)], Reach::BelowJobFile).expect_err(bad);
            assert!(refused.next.contains("--inputs-from-anywhere"), "{bad}: {refused}");
        }
        assert_eq!(
            names(pack(&base, &[input("link")], Reach::Anywhere).expect("it was allowed")),
            ["in"]
        );
        nix::unistd::mkfifo(&base.join("pipe"), nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        let refused = pack(&base, &[input("pipe")], Reach::BelowJobFile).expect_err("a pipe");
        assert!(refused.why.contains("neither a file nor a directory"), "{refused}");
        symlink(".", base.join("data/circle")).expect("a link");
        let refused = pack(&base, &[input("data")], Reach::BelowJobFile).expect_err("a circle");
        assert!(refused.why.contains("circle"), "{refused}");
    }
}
