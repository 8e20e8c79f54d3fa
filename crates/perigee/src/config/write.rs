//! Files that `controller init` and `host join` make.

use std::fs::{DirBuilder, File};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use clap::Command;
use perigee_model::{Problem, ProblemKind};

use super::{Daemon, read};

/// What a daemon's file is to say.
#[derive(Debug, Clone)]
pub struct Wanted {
    pub daemon: Daemon,
    pub file: PathBuf,
    /// Keys and their values, in the order of the file. A key with several values is a list.
    pub settings: Vec<(&'static str, Vec<String>)>,
}

/// A value as YAML that is read as this text.
pub fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "./_-@+:".contains(c);
    let begins = text.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '/');
    let is_null = text.eq_ignore_ascii_case("null");
    match begins && text.chars().all(is_plain) && !text.ends_with(':') && !is_null {
        true => text.to_owned(),
        // A text of JSON is one of YAML too.
        false => serde_json::Value::from(text).to_string(),
    }
}

/// The text of a file with these settings.
fn text_of(wanted: &Wanted) -> String {
    let (name, words) = (wanted.daemon.name(), wanted.daemon.words().join(" "));
    let mut text = format!(
        "# The settings of `perigee {words}`: each key is the flag of the same name.\n# All keys: perigee config show --defaults {name}\n"
    );
    for (key, values) in &wanted.settings {
        match &values[..] {
            [one] => text += &format!("{key}: {}\n", quoted(one)),
            several => {
                text += &format!("{key}:\n");
                several.iter().for_each(|value| text += &format!("  - {}\n", quoted(value)));
            }
        }
    }
    text
}

impl Wanted {
    /// Whether the file has to be written: it is not there.
    ///
    /// # Errors
    /// `Conflict` if it is there and says something else; what is wrong in it.
    pub fn is_missing(&self, root: &Command) -> Result<bool, Problem> {
        if matches!(std::fs::metadata(&self.file), Err(e) if e.kind() == ErrorKind::NotFound) {
            return Ok(true);
        }
        let there = read(self.daemon.command(root)?, &self.file)?;
        let mut differ = Vec::new();
        for (key, wanted) in &self.settings {
            let found = there.iter().find(|setting| setting.key() == *key);
            let found = found.map(super::Setting::texts).unwrap_or_default();
            // More than is wanted is the operator's business.
            if !wanted.iter().all(|value| found.contains(&value.as_str())) {
                let found = if found.is_empty() { "nothing".to_owned() } else { found.join(", ") };
                differ.push(format!("`{key}` says {found}, and not {}", wanted.join(", ")));
            }
        }
        if differ.is_empty() {
            return Ok(false);
        }
        let file = self.file.display();
        Err(Problem::conflict(
            format!("can't use {file}, which is there already"),
            differ.join("; "),
        )
        .next(format!("change the file, or move it away: mv {file} {file}.old")))
    }

    /// Writes the file.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn write(&self) -> Result<(), Problem> {
        keep_public(&self.file, &text_of(self))
    }
}

/// A path for such a file, whose daemon runs in another directory than the user.
///
/// # Errors
/// If there is no such path.
pub fn absolute(text: &str) -> Result<PathBuf, String> {
    std::path::absolute(text).map_err(|error| error.to_string())
}

/// Makes the directory of such files, which every user may read. One that is there stays as it is.
///
/// # Errors
/// If it can't be made.
pub fn make_directory(dir: &Path) -> Result<(), Problem> {
    DirBuilder::new().recursive(true).mode(0o755).create(dir).map_err(|e| {
        let what = format!("can't make the directory {}", dir.display());
        can_not(what, &e)
    })
}

fn can_not(what: String, error: &std::io::Error) -> Problem {
    match error.kind() {
        ErrorKind::PermissionDenied => {
            Problem::forbidden(what, error).next("run this command as root")
        }
        _ => Problem::of_io(ProblemKind::Internal, what, error),
    }
}

/// Writes a file that every user may read, and makes its directory if that is not there. It is the old or the new one at any time.
///
/// # Errors
/// When it can't be written.
fn keep_public(path: &Path, text: &str) -> Result<(), Problem> {
    if let Some(dir) = path.parent() {
        make_directory(dir)?;
    }
    let part = path.with_extension(format!("new-{}", std::process::id()));
    let write = || -> std::io::Result<()> {
        let mut file = File::create(&part)?;
        file.set_permissions(PermissionsExt::from_mode(0o644))?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&part, path)?;
        path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
    };
    write().map_err(|e| can_not(format!("can't write {}", path.display()), &e))
}
