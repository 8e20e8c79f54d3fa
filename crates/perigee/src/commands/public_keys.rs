//! Reads files with public SSH keys. A private key that is named by mistake never leaves this machine.

use std::io::Read as _;
use std::path::Path;

use perigee_model::Problem;
use perigee_model::secret::Secret;

/// Longer than any file of public keys.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The keys of a public key file, one of each line, without comments and empty lines.
///
/// # Errors
/// `NotFound`, or `Invalid` when it has no key, or something that nobody else may know.
pub fn read(file: &Path) -> Result<Vec<String>, Problem> {
    let what = || format!("can't use {} as public keys", file.display());
    let mut bytes = Vec::new();
    std::fs::File::open(file)
        .and_then(|file| file.take(FILE_BYTES_MAX).read_to_end(&mut bytes))
        .map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => Problem::not_found(what(), "there is no such file"),
            _ => Problem::invalid(what(), e),
        })?;
    let text = String::from_utf8_lossy(&bytes);
    if let Some(secret) = Secret::of(&text) {
        let why = format!("it is {secret}, and nothing of it was sent");
        return Err(Problem::invalid(what(), why).next(instead(file)));
    }
    if text.contains("BEGIN SSH2 PUBLIC KEY") {
        let next = format!("write it as OpenSSH does: ssh-keygen -i -f {}", file.display());
        return Err(Problem::invalid(what(), "it is in the format of SSH2").next(next));
    }
    let lines = text.lines().map(str::trim);
    let keys: Vec<String> = lines
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(str::to_owned)
        .collect();
    match keys.is_empty() {
        true => Err(Problem::invalid(what(), "it has no key")),
        false => Ok(keys),
    }
}

/// What to name instead of a private key.
fn instead(file: &Path) -> String {
    let public = format!("{}.pub", file.display());
    match Path::new(&public).exists() {
        true => format!("name its public half: {public}"),
        false => format!("make its public half: ssh-keygen -y -f {} > {public}", file.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_private_key_is_refused_before_anything_is_sent_and_its_public_half_is_named() {
        let dir = tempfile::tempdir().expect("a directory");
        let private = dir.path().join("id_ed25519");
        let body = "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtzc2gtZW";
        let text = format!("-----BEGIN OPENSSH PRIVATE KEY-----\n{body}\n");
        std::fs::write(&private, text).expect("a key");
        let problem = read(&private).expect_err("it is private");
        assert!(problem.next.starts_with("make its public half"), "{problem}");
        let public = dir.path().join("id_ed25519.pub");
        std::fs::write(&public, "# mine\n\nssh-ed25519 AAAAC3 ann\n").expect("a key");
        let problem = read(&private).expect_err("it is private");
        assert!(problem.next.ends_with("id_ed25519.pub"), "{problem}");
        assert!(!problem.to_string().contains("b3Blb"), "{problem}");
        assert_eq!(read(&public), Ok(vec!["ssh-ed25519 AAAAC3 ann".to_owned()]));
    }
}
