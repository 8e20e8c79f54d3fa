//! What a job is given: files of its submitter, and files of the data repository.
//!
//! A list says where each comes from and what it becomes in the job. The list itself is a file of the tenant in the data
//! repository, `.inputs/SHA256`, and so is each of the submitter's own files. The names are the hashes of the contents:
//! what is there already is not sent again.

use serde::{Deserialize, Serialize};

use crate::Problem;
use crate::limits::{FILE_NAME_BYTES, INPUT_ENTRIES, INPUT_PATH_BYTES, OutOfLimits, PATH_NAMES};

/// The directory of a tenant's tree that has uploaded inputs and their lists, each under its SHA-256.
pub const UPLOADED_INPUTS: &str = ".inputs";

/// Where a job finds its inputs.
pub const INPUTS_MOUNT: &str = "/job/inputs";

/// What the name of an image of inputs begins with; 32 hexadecimal digits follow.
pub const INPUTS_IMAGE_PREFIX: &str = "inputs-";

/// Whether only the controller makes an image with this name (without its tenant).
pub fn is_inputs_image(name: &str) -> bool {
    name.strip_prefix(INPUTS_IMAGE_PREFIX).is_some_and(|digits| {
        digits.len() == 32 && digits.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    })
}

/// A job's inputs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputList {
    /// In any order.
    pub inputs: Vec<Input>,
}

/// A file or a directory that a job is given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Input {
    /// Its path below the directory of the inputs.
    pub to: String,
    /// Where it comes from.
    #[serde(flatten)]
    pub from: InputFrom,
}

/// Where an input comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InputFrom {
    /// A file of the submitter, which was uploaded.
    File(UploadedFile),
    /// An empty directory.
    Directory {},
    /// `repo://TENANT/PATH`: a file, or a directory with all that is in it.
    Repository(String),
}

/// A file in [`UPLOADED_INPUTS`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UploadedFile {
    /// Its name there, and the hash of its content.
    pub sha256: String,
    /// Its length.
    pub size_bytes: u64,
    /// Whether it may be run.
    #[serde(default)]
    pub executable: bool,
}

/// Why a job can't have an input there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadInputPath {
    /// It leaves the directory of the inputs, or is no path.
    #[error("{0:?} is not a path below the directory of the inputs")]
    Escapes(String),
    /// The filesystem of the inputs has a directory of this name.
    #[error("\"lost+found\" can't be the name of an input")]
    Taken,
    /// Too long, or too deep.
    #[error(transparent)]
    Limit(#[from] OutOfLimits),
}

/// A path below the directory of the inputs: names with one slash between them.
///
/// # Errors
/// [`BadInputPath`].
pub fn check_input_path(path: &str) -> Result<(), BadInputPath> {
    INPUT_PATH_BYTES.check(path.len())?;
    let escapes = || BadInputPath::Escapes(path.chars().take(80).collect());
    for name in path.split('/') {
        if matches!(name, "" | "." | "..") || name.contains('\0') {
            return Err(escapes());
        }
        FILE_NAME_BYTES.check(name.len())?;
    }
    PATH_NAMES.check(path.split('/').count())?;
    // A new filesystem has it already.
    if path.split('/').next() == Some("lost+found") {
        return Err(BadInputPath::Taken);
    }
    Ok(())
}

impl InputList {
    /// All that can be said of a list without the repository.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn check(&self) -> Result<(), Problem> {
        let what = "can't use the inputs of a job";
        INPUT_ENTRIES.check(self.inputs.len()).map_err(|error| error.problem(what))?;
        for input in &self.inputs {
            check_input_path(&input.to).map_err(|error| Problem::invalid(what, error))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read_as_it_was_written() {
        let file = UploadedFile { sha256: "a".repeat(64), size_bytes: 5, executable: true };
        let of = |to: &str, from| Input { to: to.to_owned(), from };
        let list = InputList {
            inputs: vec![
                of("run.sh", InputFrom::File(file)),
                of("empty", InputFrom::Directory {}),
                of("data", InputFrom::Repository("repo://physics/in".to_owned())),
            ],
        };
        let text = serde_json::to_string(&list).expect("JSON");
        assert!(text.contains(r#"{"to":"data","repository":"repo://physics/in"}"#), "{text}");
        assert!(text.contains(r#"{"to":"empty","directory":{}}"#), "{text}");
        assert_eq!(serde_json::from_str::<InputList>(&text).expect("a list"), list);
    }

    #[test]
    fn a_path_stays_below_the_directory_of_the_inputs() {
        for good in ["a", "a/b", "..a", "ü/ß", "a b", "a/lost+found"] {
            check_input_path(good).expect(good);
        }
        for bad in [
            "",
            "/a",
            "a/",
            "a//b",
            ".",
            "..",
            "a/../b",
            "./a",
            "a\0",
            "lost+found",
            "lost+found/a",
        ] {
            check_input_path(bad).expect_err(bad);
        }
        let long = "n".repeat(256);
        assert!(check_input_path(&long).expect_err("too long").to_string().contains("255"));
        check_input_path(&["d"; 65].join("/")).expect_err("too deep");
    }

    #[test]
    fn only_a_hash_makes_the_name_of_an_image_of_inputs() {
        assert!(is_inputs_image(&format!("inputs-{}", "0a".repeat(16))));
        for own in ["inputs", "inputs-2026", "inputs-0A"] {
            assert!(!is_inputs_image(own), "{own}");
        }
    }
}
