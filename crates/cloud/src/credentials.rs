//! A pair of AWS keys. It is read anew for each call, so that a new pair in the file counts at once, and it is never shown.

use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::provider::{CloudError, CloudErrorKind};

/// A credentials file is a few lines.
const FILE_BYTES_MAX: u64 = 64 * 1024;
const ID: &str = "AWS_ACCESS_KEY_ID";
const SECRET: &str = "AWS_SECRET_ACCESS_KEY";
const TOKEN: &str = "AWS_SESSION_TOKEN";

/// Where the pair is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// In the environment of this process, as AWS's tools name the variables.
    Environment,
    /// In a file as AWS's tools write it, with a section `[default]`.
    File(PathBuf),
}

/// The pair.
#[derive(Clone)]
pub struct Credentials {
    id: String,
    secret: String,
    token: Option<String>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Credentials {
    /// A pair, and the token of its session if it has one.
    pub fn new(id: impl Into<String>, secret: impl Into<String>, token: Option<String>) -> Self {
        Self { id: id.into(), secret: secret.into(), token }
    }

    /// The name of the pair, which is no secret.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Its secret.
    pub fn secret(&self) -> &str {
        &self.secret
    }

    /// The token of its session.
    pub fn token(&self) -> Option<&str> {
        self.token.as_deref()
    }
}

impl Source {
    /// The pair as it is now. Reads a file of this machine.
    ///
    /// # Errors
    /// `NotAllowed` if there is none.
    pub fn read(&self) -> Result<Credentials, CloudError> {
        match self {
            Self::Environment => of(|name| std::env::var(name).ok()).ok_or_else(|| {
                lacking(format!(
                    "{ID} and {SECRET} are not set: set them for the controller, or name a file in providers.yaml \
                     (`credentials: FILE`)"
                ))
            }),
            Self::File(path) => {
                let text = text_of(path).map_err(lacking)?;
                of(|name| field(&text, name)).ok_or_else(|| {
                    lacking(format!(
                        "{} has no aws_access_key_id and aws_secret_access_key in a section [default]",
                        path.display()
                    ))
                })
            }
        }
    }
}

/// The text of a credentials file.
fn text_of(path: &Path) -> Result<String, String> {
    let shown = path.display();
    let failed = |error| format!("can't read {shown}: {error}");
    // A pipe is opened at once, and then refused.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = File::options().read(true).custom_flags(flags).open(path).map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(format!("{shown} is no file: name a credentials file in providers.yaml"));
    }
    let mut text = String::new();
    let length = file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(failed)?;
    if length as u64 > FILE_BYTES_MAX {
        return Err(format!(
            "{shown} has more than {FILE_BYTES_MAX} bytes and is no credentials file"
        ));
    }
    Ok(text)
}

fn lacking(why: String) -> CloudError {
    CloudError::new(CloudErrorKind::NotAllowed, format!("there are no credentials for EC2: {why}"))
}

fn of(value: impl Fn(&str) -> Option<String>) -> Option<Credentials> {
    // Else it could not stand in a header.
    let is_word = |text: &String| !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic());
    let value = |name| value(name).filter(is_word);
    Some(Credentials::new(value(ID)?, value(SECRET)?, value(TOKEN)))
}

/// The last value of a field in the section `[default]`.
fn field(text: &str, name: &str) -> Option<String> {
    let mut section = "default";
    let mut found = None;
    for line in text.lines().map(str::trim) {
        if let Some(named) = line.strip_prefix('[') {
            section = named.trim_end_matches(']').trim();
        } else if section == "default"
            && let Some((key, value)) = line.split_once('=')
            && key.trim().eq_ignore_ascii_case(name)
        {
            found = Some(value.trim().to_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode};

    use super::*;

    #[test]
    fn a_file_is_read_and_its_secret_is_not_shown() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let text = "# ours\n[other]\naws_access_key_id = no\n[default]\naws_access_key_id = id\n\
                    aws_secret_access_key=hidden+/=\naws_session_token = session\n";
        std::fs::write(file.path(), text).expect("it is written");
        let pair = Source::File(file.path().to_owned()).read().expect("a pair");
        assert_eq!((pair.id(), pair.secret(), pair.token()), ("id", "hidden+/=", Some("session")));
        let shown = format!("{pair:?}");
        assert!(shown.contains("id") && !shown.contains("hidden") && !shown.contains("session"));
    }

    #[test]
    fn what_is_no_file_or_too_long_is_not_read() {
        let dir = tempfile::tempdir().expect("a directory");
        let (pipe, long) = (dir.path().join("pipe"), dir.path().join("long"));
        rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).expect("a pipe");
        std::fs::write(&long, vec![b'#'; 64 * 1024 + 1]).expect("it is written");
        for (path, why) in [
            (pipe.as_path(), "is no file"),
            ("/dev/zero".as_ref(), "is no file"),
            (dir.path(), "is no file"),
            (long.as_path(), "more than 65536 bytes"),
        ] {
            let error = Source::File(path.to_owned()).read().expect_err("no pair");
            assert_eq!(error.kind, CloudErrorKind::NotAllowed);
            assert!(error.message.contains(why), "{error}");
        }
    }

    #[test]
    fn a_file_without_a_pair_is_said_to_be_one() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), "[default]\naws_access_key_id = id\n").expect("it is written");
        for (path, why) in [(file.path(), "aws_secret_access_key"), ("/nowhere".as_ref(), "read")] {
            let error = Source::File(path.to_owned()).read().expect_err("no pair");
            assert_eq!(error.kind, CloudErrorKind::NotAllowed);
            assert!(error.message.contains(why), "{error}");
        }
    }
}
