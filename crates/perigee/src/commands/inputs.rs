//! A job's inputs: the list of them, and its submitter's own files, which go to the data repository.
//!
//! A job file may come from somebody else. So it names only files below its own directory, with links resolved, unless
//! the user says otherwise. Files of the repository are named in the list as they are.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::{StreamExt, TryStreamExt, stream};
use nix::libc::O_NONBLOCK;

use perigee_http::certificate::hex;
use perigee_http::{Body, Client, Method};
use perigee_model::data::{FileAddress, FileEntry};
use perigee_model::inputs::{Input, InputFrom, InputList, UPLOADED_INPUTS, UploadedFile};
use perigee_model::job_file::{InputFile, InputSource};
use perigee_model::limits::INPUT_BYTES;
use perigee_model::{Problem, ProblemKind};
use sha2::{Digest, Sha256};

use crate::commands::data::put::{Source, put_opened};
use crate::commands::data::transfer::{AT_ONCE, hash, list};
use crate::output;

/// Links can lead in a circle.
const DEPTH_MAX: usize = 64;

/// Which files a job file may name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    BelowJobFile,
    Anywhere,
}

/// Sends what is not in the repository yet: the submitter's files, and the list of all inputs. Local paths are
/// relative to `base`, the job file's directory. Returns the list's name, which is its hash.
pub async fn upload(
    client: &Client,
    base: &Path,
    inputs: Vec<InputFile>,
    reach: Reach,
) -> Result<String, Problem> {
    let base = base.to_owned();
    let collected = tokio::task::spawn_blocking(move || collect(&base, &inputs, reach)).await;
    let (list, files) = collected.map_err(|e| Problem::internal("can't read the inputs", e))??;
    list.check()?;
    let text = serde_json::to_vec(&list)
        .map_err(|e| Problem::internal("can't write the list of inputs", e))?;
    let name = hex(&Sha256::digest(&text));
    let there = uploaded(client).await?;
    send(client, files.missing(&there), files.below).await?;
    if !there.contains(&name) {
        let url = address(&name).url();
        let _: FileEntry = client.send_body(Method::PUT, &url, Body::from(text)).await?;
    }
    Ok(name)
}

fn address(sha256: &str) -> FileAddress {
    FileAddress { tenant: None, path: format!("{UPLOADED_INPUTS}/{sha256}") }
}

/// What earlier jobs have uploaded.
async fn uploaded(client: &Client) -> Result<HashSet<String>, Problem> {
    let directory = FileAddress { tenant: None, path: UPLOADED_INPUTS.to_owned() };
    let entries = match list(client, &directory).await {
        Err(problem) if problem.kind == ProblemKind::NotFound => Vec::new(),
        entries => entries?,
    };
    let whole = entries.into_iter().filter(|entry| entry.sha256.as_ref() == Some(&entry.name));
    Ok(whole.map(|entry| entry.name).collect())
}

/// The submitter's files, by their hashes, and where they must be.
struct Files {
    by_hash: BTreeMap<String, (PathBuf, u64)>,
    below: Below,
}

impl Files {
    fn missing(&self, there: &HashSet<String>) -> Vec<(String, PathBuf, u64)> {
        let missing = self.by_hash.iter().filter(|(sha256, _)| !there.contains(*sha256));
        missing.map(|(sha256, (path, bytes))| (sha256.clone(), path.clone(), *bytes)).collect()
    }
}

async fn send(
    client: &Client,
    files: Vec<(String, PathBuf, u64)>,
    below: Below,
) -> Result<(), Problem> {
    let bar = output::progress_bar(
        &"inputs",
        "{binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}",
    );
    bar.set_length(files.iter().map(|(_, _, bytes)| bytes).sum());
    let (below, bar_of) = (&below, &bar);
    let sent = stream::iter(files).map(|(sha256, path, size_bytes)| async move {
        // It was closed meanwhile, because there may be many.
        let file = Arc::new(below.open(&path)?);
        let source = Source { path, to: address(&sha256), size_bytes };
        put_opened(client, &source, &file, &sha256, bar_of).await
    });
    let sent = sent.buffer_unordered(AT_ONCE).try_collect::<Vec<()>>().await;
    bar.finish_and_clear();
    sent.map(drop)
}

fn collect(base: &Path, inputs: &[InputFile], reach: Reach) -> Result<(InputList, Files), Problem> {
    let failed = |e: io::Error| Problem::internal("can't read the inputs", e);
    // The directory of a job file that is named without one is the empty path.
    let base = Path::new(".").join(base);
    let real = base.canonicalize().map_err(failed)?;
    let mut collecting = Collecting {
        list: InputList::default(),
        by_hash: BTreeMap::new(),
        bytes: 0,
        below: Below { base: real, reach },
    };
    for InputFile { from, to } in inputs {
        match from {
            InputSource::Local(from) => collecting.add(&base.join(from), to, 0)?,
            InputSource::Repository(address) => {
                let from = InputFrom::Repository(address.to_string());
                collecting.list.inputs.push(Input { to: to.clone(), from });
            }
        }
    }
    let Collecting { list, by_hash, below, .. } = collecting;
    Ok((list, Files { by_hash, below }))
}

/// Where files must be.
#[derive(Debug, Clone)]
struct Below {
    base: PathBuf,
    reach: Reach,
}

fn what(from: &Path) -> String {
    format!("can't use the input {}", from.display())
}

fn failed(from: &Path, error: &io::Error) -> Problem {
    match error.kind() {
        io::ErrorKind::NotFound => Problem::not_found(what(from), "there is no such file"),
        _ => Problem::invalid(what(from), error),
    }
    .next("paths in a job file are relative to the job file")
}

impl Below {
    fn check(&self, from: &Path, real: &Path) -> Result<(), Problem> {
        if self.reach == Reach::Anywhere || real.starts_with(&self.base) {
            return Ok(());
        }
        let why = format!("{} is not below the job file's directory", real.display());
        Err(Problem::invalid(what(from), why).next(
            "if you trust the job file, submit it with --inputs-from-anywhere; else move the file there",
        ))
    }

    /// Opens a file, if it is one that may be sent.
    fn open(&self, from: &Path) -> Result<File, Problem> {
        let failed = |e: io::Error| failed(from, &e);
        let real = from.canonicalize().map_err(failed)?;
        self.check(from, &real)?;
        // A pipe is opened at once, and then refused.
        let opened = File::options().read(true).custom_flags(O_NONBLOCK).open(&real);
        let file = opened.map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(Problem::invalid(what(from), "it is neither a file nor a directory"));
        }
        // Another user may have put a link in its place in the meantime.
        let opened = format!("/proc/self/fd/{}", file.as_raw_fd());
        self.check(from, &std::fs::read_link(opened).map_err(failed)?)?;
        Ok(file)
    }
}

struct Collecting {
    list: InputList,
    by_hash: BTreeMap<String, (PathBuf, u64)>,
    bytes: u64,
    below: Below,
}

impl Collecting {
    fn add(&mut self, from: &Path, to: &str, depth: usize) -> Result<(), Problem> {
        let failed = |e: io::Error| failed(from, &e);
        let real = from.canonicalize().map_err(failed)?;
        self.below.check(from, &real)?;
        if !real.is_dir() {
            return self.add_file(from, to);
        }
        if depth == DEPTH_MAX {
            let why = format!(
                "it has more than {DEPTH_MAX} directories in each other; do links form a circle?"
            );
            return Err(Problem::invalid(what(from), why));
        }
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&real).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            names.push(name.into_string().map_err(|name| {
                let why = format!("the name {name:?} in it is not UTF-8");
                Problem::invalid(what(from), why).next("give it another name")
            })?);
        }
        if names.is_empty() {
            self.list.inputs.push(Input { to: to.to_owned(), from: InputFrom::Directory {} });
        }
        names.sort();
        names
            .iter()
            .try_for_each(|name| self.add(&real.join(name), &format!("{to}/{name}"), depth + 1))
    }

    fn add_file(&mut self, from: &Path, to: &str) -> Result<(), Problem> {
        let failed = |e: io::Error| failed(from, &e);
        let file = self.below.open(from)?;
        let meta = file.metadata().map_err(failed)?;
        let (size_bytes, executable) = (meta.len(), meta.permissions().mode() & 0o100 != 0);
        self.bytes = INPUT_BYTES.check(self.bytes.saturating_add(size_bytes)).map_err(|error| {
            let next = "put large data on a volume, and name it in the job file";
            error.problem("can't use the inputs").next(next)
        })?;
        let sha256 = hash(&file).map_err(failed)?;
        self.by_hash.insert(sha256.clone(), (from.to_owned(), size_bytes));
        let from = InputFrom::File(UploadedFile { sha256, size_bytes, executable });
        self.list.inputs.push(Input { to: to.to_owned(), from });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn input(from: &str) -> InputFile {
        InputFile { from: InputSource::Local(from.into()), to: "in".into() }
    }

    fn names(base: &Path, from: &str, reach: Reach) -> Result<Vec<String>, Problem> {
        let (list, _) = collect(base, &[input(from)], reach)?;
        Ok(list.inputs.into_iter().map(|input| input.to).collect())
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
        std::fs::create_dir(base.join("data/empty")).expect("a directory");
        let found = names(&base, "data", Reach::BelowJobFile).expect("all is below");
        assert_eq!(found, ["in/a", "in/deep/inside", "in/empty"]);
        let absolute = dir.path().join("secret").display().to_string();
        for bad in ["../secret", "link", "trap", "data/../../secret", &absolute] {
            let refused = names(&base, bad, Reach::BelowJobFile).expect_err(bad);
            assert!(refused.next.contains("--inputs-from-anywhere"), "{bad}: {refused}");
        }
        assert_eq!(names(&base, "link", Reach::Anywhere).expect("it was allowed"), ["in"]);
        nix::unistd::mkfifo(&base.join("pipe"), nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        let refused = names(&base, "pipe", Reach::BelowJobFile).expect_err("a pipe");
        assert!(refused.why.contains("neither a file nor a directory"), "{refused}");
        symlink(".", base.join("data/circle")).expect("a link");
        let refused = names(&base, "data", Reach::BelowJobFile).expect_err("a circle");
        assert!(refused.why.contains("circle"), "{refused}");
    }

    #[test]
    fn equal_files_are_sent_once_and_what_is_there_is_not_sent() {
        let dir = tempfile::tempdir().expect("a directory");
        for (name, text) in [("a", "same"), ("b", "same"), ("c", "other")] {
            std::fs::write(dir.path().join(name), text).expect("a file");
        }
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(dir.path().join("b"), mode).expect("a mode");
        let (list, files) =
            collect(dir.path(), &[input(".")], Reach::BelowJobFile).expect("a list");
        let executable = list.inputs.iter().map(|input| match &input.from {
            InputFrom::File(file) => file.executable,
            _ => panic!("only files"),
        });
        assert_eq!(executable.collect::<Vec<_>>(), [false, true, false]);
        assert_eq!(files.missing(&HashSet::new()).len(), 2);
        let there = HashSet::from([hex(&Sha256::digest("same"))]);
        let missing = files.missing(&there);
        assert_eq!(missing.len(), 1);
        assert!(missing[0].1.ends_with("c"));
    }
}
