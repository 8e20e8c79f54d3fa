//! The credentials that AWS's tools would use: the environment, the file `~/.aws/credentials`, and what the machine has.

use std::path::{Path, PathBuf};

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use perigee_model::Problem;

const KEYS: [(&str, AmazonS3ConfigKey); 4] = [
    ("aws_access_key_id", AmazonS3ConfigKey::AccessKeyId),
    ("aws_secret_access_key", AmazonS3ConfigKey::SecretAccessKey),
    ("aws_session_token", AmazonS3ConfigKey::Token),
    ("region", AmazonS3ConfigKey::Region),
];

/// # Errors
/// If there is a file with credentials that can't be read, or if the given one does not exist.
pub fn found(given: Option<&Path>) -> Result<AmazonS3Builder, Problem> {
    let mut builder = AmazonS3Builder::from_env();
    if given.is_none() && builder.get_config_value(&AmazonS3ConfigKey::AccessKeyId).is_some() {
        return Ok(builder);
    }
    let Some(file) = given.map(Path::to_owned).or_else(file) else { return Ok(builder) };
    let text = match std::fs::read_to_string(&file) {
        Ok(text) => text,
        Err(error) if given.is_none() && error.kind() == std::io::ErrorKind::NotFound => {
            return Ok(builder);
        }
        Err(error) => {
            let what = format!("can't read the credentials in {}", file.display());
            return Err(Problem::invalid(what, error));
        }
    };
    let profile = std::env::var("AWS_PROFILE").unwrap_or_else(|_| "default".to_owned());
    for (name, value) in of_profile(&text, &profile) {
        if let Some((_, key)) = KEYS.iter().find(|(known, _)| *known == name) {
            builder = builder.with_config(*key, value);
        }
    }
    Ok(builder)
}

fn file() -> Option<PathBuf> {
    let named = std::env::var_os("AWS_SHARED_CREDENTIALS_FILE").map(PathBuf::from);
    named.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".aws/credentials")))
}

/// The lines `name = value` below `[profile]`.
fn of_profile<'a>(text: &'a str, profile: &str) -> Vec<(&'a str, &'a str)> {
    let mut found = Vec::new();
    let mut is_in = false;
    for line in text.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            is_in = section.trim() == profile;
        } else if let Some((name, value)) = line.split_once('=').filter(|_| is_in) {
            found.push((name.trim(), value.trim()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::of_profile;

    #[test]
    fn a_profile_is_found_in_the_file() {
        let text = "# mine\n[default]\naws_access_key_id = A\n\n[other]\naws_access_key_id=B\nregion = x\n";
        assert_eq!(of_profile(text, "default"), [("aws_access_key_id", "A")]);
        assert_eq!(of_profile(text, "other"), [("aws_access_key_id", "B"), ("region", "x")]);
        assert!(of_profile(text, "none").is_empty());
    }
}
