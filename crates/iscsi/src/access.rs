//! The access rules: which initiator may use which target, and how it authenticates. A target that an
//! initiator may not use is reported to it as missing.
//!
//! [`Clients`] is a source of these rules. There are two: the pool's catalog (`perigee client`), and a
//! small file. The file is read at each login, so a change takes effect at once:
//!
//! ```text
//! # initiator                      targets...      secrets
//! iqn.1993-08.org.debian:01:ab12   data home-*     chap=ab12:correct-horse mutual=perigee:battery-staple
//! iqn.2010-04.org.ipxe:*           boot-*
//! ```
//!
//! An initiator or a target may end in `*`, which matches any text. The first line with a matching
//! initiator counts. `chap` has the initiator's user and secret, `mutual` the target's. If the file has
//! secrets, only its owner may have access to it.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use futures_util::future::BoxFuture;
use perigee_model::Problem;

use super::chap::{Chap, Credentials, Secret};

/// The rights of one initiator.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Client {
    /// The names of its targets, without their common prefix. They may end in `*`.
    pub targets: Vec<String>,
    /// The CHAP credentials that it needs.
    pub chap: Option<Chap>,
}

impl Client {
    /// Access to all targets, without CHAP.
    pub fn unrestricted() -> Self {
        Self { targets: vec!["*".into()], chap: None }
    }

    /// Whether one of the client's patterns names this target, by its iSCSI name (`iqn.…`).
    pub fn may_use(&self, target: &str) -> bool {
        self.targets.iter().any(|pattern| matches(pattern, target))
    }
}

/// A source of access rules.
pub trait Clients: Send + Sync + 'static {
    /// The rights of an initiator at this moment. `None` means that it has none.
    ///
    /// # Errors
    /// When the rules can't be read. Then no initiator can log in.
    fn find<'a>(&'a self, initiator: &'a str) -> BoxFuture<'a, Result<Option<Client>, Problem>>;
}

/// A list in a file.
pub struct ClientFile {
    path: PathBuf,
}

impl ClientFile {
    /// # Errors
    /// When the file can't be read or has a wrong line.
    pub fn new(path: &Path) -> Result<Self, Problem> {
        let file = Self { path: path.to_owned() };
        file.read()?;
        Ok(file)
    }

    fn read(&self) -> Result<Vec<(String, Client)>, Problem> {
        let what = format!("can't use the list of iSCSI clients {}", self.path.display());
        let failed = |error: std::io::Error| Problem::invalid(&what, error);
        let mode = std::fs::metadata(&self.path).map_err(failed)?.mode();
        let text = std::fs::read_to_string(&self.path).map_err(failed)?;
        let lines = parse(&text).map_err(|line| {
            Problem::invalid(&what, format!("line {line} is wrong"))
                .next("a line is INITIATOR TARGET... [chap=USER:SECRET [mutual=USER:SECRET]]")
        })?;
        if mode & 0o077 != 0 && lines.iter().any(|(_, client)| client.chap.is_some()) {
            return Err(Problem::invalid(&what, "it has secrets, and others can read it")
                .next(format!("chmod 600 {}", self.path.display())));
        }
        Ok(lines)
    }
}

impl Clients for ClientFile {
    fn find<'a>(&'a self, initiator: &'a str) -> BoxFuture<'a, Result<Option<Client>, Problem>> {
        Box::pin(async move {
            let lines = self.read()?;
            let found = lines.into_iter().find(|(pattern, _)| matches(pattern, initiator));
            Ok(found.map(|(_, client)| client))
        })
    }
}

/// The error is the number of the line that is wrong.
fn parse(text: &str) -> Result<Vec<(String, Client)>, usize> {
    let mut clients = Vec::new();
    for (number, line) in (1_usize..).zip(text.lines()) {
        let mut words = line.split_whitespace().take_while(|word| !word.starts_with('#'));
        let Some(initiator) = words.next() else { continue };
        let client = client(words).ok_or(number)?;
        clients.push((initiator.to_lowercase(), client));
    }
    Ok(clients)
}

fn client<'a>(words: impl Iterator<Item = &'a str>) -> Option<Client> {
    let (mut targets, mut chap, mut mutual) = (Vec::new(), None, None);
    for word in words {
        match word.split_once('=') {
            Some(("chap", pair)) => chap = Some(credentials(pair)?),
            Some(("mutual", pair)) => mutual = Some(credentials(pair)?),
            Some(_) => return None,
            None => targets.push(word.to_owned()),
        }
    }
    // With the same secret on both sides, one side could use the other's response as its own.
    let reused = matches!((&chap, &mutual), (Some(a), Some(b)) if a.secret == b.secret);
    if targets.is_empty() || reused || mutual.is_some() && chap.is_none() {
        return None;
    }
    let chap = chap.map(|initiator| Chap { initiator, target: mutual });
    Some(Client { targets, chap })
}

fn credentials(pair: &str) -> Option<Credentials> {
    let (user, secret) = pair.split_once(':')?;
    let present = !user.is_empty() && !secret.is_empty();
    present.then(|| Credentials { user: user.into(), secret: Secret::new(secret) })
}

fn matches(pattern: &str, text: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(prefix) => text.starts_with(prefix),
        None => pattern == text,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const LIST: &str = "# who gets what
iqn.a   data home-*  chap=user:pass:word mutual=target:other  # two secrets

iqn.b*  public
";

    fn found(text: &str, initiator: &str) -> Option<Client> {
        let lines = parse(text).expect("a list");
        lines.into_iter().find(|(p, _)| matches(p, initiator)).map(|(_, client)| client)
    }

    #[test]
    fn the_first_line_that_fits_says_what_an_initiator_may_do() {
        let a = found(LIST, "iqn.a").expect("a client");
        assert!(a.may_use("data") && a.may_use("home-7") && !a.may_use("public"));
        let chap = a.chap.expect("secrets");
        assert_eq!(chap.initiator.user, "user");
        assert_eq!(chap.initiator.secret, Secret::new("pass:word"));
        assert_eq!(chap.target.expect("mutual").user, "target");
        let b = found(LIST, "iqn.b7").expect("a client");
        assert!(b.may_use("public") && !b.may_use("data") && b.chap.is_none());
        assert_eq!(found(LIST, "iqn.c"), None);
    }

    #[test]
    fn lines_that_make_no_sense_are_told() {
        for bad in [
            "iqn.a",
            "iqn.a chap=u:p",
            "iqn.a data chap=u",
            "iqn.a data chap=:p",
            "iqn.a data other=u:p",
            "iqn.a data mutual=u:p",
            "iqn.a data chap=u:same mutual=t:same",
        ] {
            assert_eq!(parse(&format!("# first\n{bad}\n")), Err(2), "{bad}");
        }
    }

    #[test]
    fn a_file_with_secrets_is_refused_while_others_can_read_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("clients");
        std::fs::write(&path, LIST).expect("a file");
        let mode = |mode| {
            let permissions = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(&path, permissions).expect("a mode");
        };
        mode(0o640);
        let refused = ClientFile::new(&path).err().expect("it is open to a group").to_string();
        assert!(refused.contains("chmod 600") && !refused.contains("pass:word"), "{refused}");
        mode(0o600);
        assert!(ClientFile::new(&path).is_ok());
        std::fs::write(&path, "iqn.b public\n").expect("a file");
        mode(0o644);
        assert!(ClientFile::new(&path).is_ok(), "it has no secrets");
    }
}
