//! What a job is given, file by file: the content of an image of inputs, and its name.

use std::collections::BTreeMap;

use bytes::Bytes;
use perigee_model::inputs::{INPUTS_IMAGE_PREFIX, check_input_path};
use perigee_model::limits::{INPUT_BYTES, INPUT_FILES};
use perigee_model::{ImageName, Problem, TenantName};
use perigee_repository::Location;
use sha2::{Digest, Sha256};

use crate::guest::tars;

/// Changes when the same files become another image.
const VERSION: &str = "perigee inputs 1\n";

const WHAT: &str = "can't use the inputs of a job";

/// What is at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    Directory,
    File(FileOf),
}

/// A file, and where it is in the repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileOf {
    pub size_bytes: u64,
    pub sha256: String,
    pub executable: bool,
    pub at: Location,
}

/// All entries by their paths. No file is above another entry.
#[derive(Debug, Default)]
pub struct Manifest {
    entries: BTreeMap<String, Entry>,
    bytes: u64,
}

impl Manifest {
    /// # Errors
    /// `Invalid` if the path is none, is taken, or if it is too much.
    pub fn add(&mut self, to: String, entry: Entry) -> Result<(), Problem> {
        check_input_path(&to).map_err(|error| Problem::invalid(WHAT, error))?;
        if let Entry::File(file) = &entry {
            let bytes = INPUT_BYTES.check(self.bytes.saturating_add(file.size_bytes));
            self.bytes = bytes.map_err(|error| {
                error.problem(WHAT).next("put large data on a volume, and name it in the job file")
            })?;
        }
        match self.entries.get(&to) {
            // Two directories become one.
            Some(Entry::Directory) if entry == Entry::Directory => return Ok(()),
            Some(_) => return Err(two_at(&to)),
            None => {}
        }
        INPUT_FILES
            .check(self.entries.len() + 1)
            .map_err(|error| error.problem(WHAT).next("pack them into an archive"))?;
        self.entries.insert(to, entry);
        Ok(())
    }

    /// To be called when all was added.
    ///
    /// # Errors
    /// `Invalid` if a file is above something else.
    pub fn check(&self) -> Result<(), Problem> {
        for path in self.entries.keys() {
            let above = path.match_indices('/').map(|(end, _)| &path[..end]);
            for above in above {
                if matches!(self.entries.get(above), Some(Entry::File(_))) {
                    return Err(two_at(above));
                }
            }
        }
        Ok(())
    }

    /// The files' lengths together.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How many files and directories there are.
    pub fn count(&self) -> u64 {
        self.entries.len() as u64
    }

    /// The name of the image with these files.
    ///
    /// # Errors
    /// Never: a tenant's name leaves room for it.
    pub fn image(&self, tenant: &TenantName) -> Result<ImageName, Problem> {
        let mut hasher = Sha256::new();
        hasher.update(VERSION);
        for (path, entry) in &self.entries {
            // A path has no zero byte.
            hasher.update(path);
            match entry {
                Entry::Directory => hasher.update("\0d\n"),
                Entry::File(file) => {
                    let kind = if file.executable { 'x' } else { 'f' };
                    hasher.update(format!("\0{kind}{} {}\n", file.size_bytes, file.sha256));
                }
            }
        }
        let digest = crate::hash::hex(&hasher.finalize());
        let name = tenant.full(&format!("{INPUTS_IMAGE_PREFIX}{}", &digest[..32]));
        ImageName::new(name).map_err(|error| Problem::internal(WHAT, error))
    }

    /// The entries in the order of their paths, as parts of a tar: the headers before an entry's content, and the entry.
    pub fn into_parts(self) -> impl Iterator<Item = Result<(Bytes, Entry), Problem>> {
        self.entries.into_iter().map(|(path, entry)| {
            let headers = headers(&path, &entry)
                .map_err(|error| Problem::internal(format!("{WHAT}: {path}"), error))?;
            Ok((headers, entry))
        })
    }
}

fn two_at(path: &str) -> Problem {
    Problem::invalid(WHAT, format!("two inputs can't both become {path:?}"))
        .next("give one of them another name with `to`")
}

/// What stands before an entry's content in a tar.
fn headers(path: &str, entry: &Entry) -> std::io::Result<Bytes> {
    let (is_directory, mode, size_bytes) = match entry {
        Entry::Directory => (true, 0o755, 0),
        Entry::File(file) => (false, if file.executable { 0o755 } else { 0o644 }, file.size_bytes),
    };
    tars::headers(path, &tars::Entry { is_directory, mode, modified_s: 0, size_bytes })
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use proptest::prelude::*;

    use super::*;
    use crate::guest::tars::{end, padding};

    fn file(text: &str, executable: bool) -> Entry {
        Entry::File(FileOf {
            size_bytes: text.len() as u64,
            sha256: crate::hash::hex(&Sha256::digest(text)),
            executable,
            at: Location::Top,
        })
    }

    fn manifest(entries: &[(&str, Entry)]) -> Result<Manifest, Problem> {
        let mut manifest = Manifest::default();
        for (path, entry) in entries {
            manifest.add((*path).to_owned(), entry.clone())?;
        }
        manifest.check()?;
        Ok(manifest)
    }

    fn name(entries: &[(&str, Entry)]) -> ImageName {
        let manifest = manifest(entries).expect("a manifest");
        manifest.image(&TenantName::default()).expect("a name")
    }

    #[test]
    fn the_name_of_the_image_stands_for_all_that_is_in_it() {
        let a = file("a", false);
        let one = name(&[("x", a.clone()), ("y", file("b", false))]);
        assert_eq!(one, name(&[("y", file("b", false)), ("x", a.clone())]), "in any order");
        for other in [
            vec![("x", a.clone())],
            vec![("x", a.clone()), ("z", file("b", false))],
            vec![("x", a.clone()), ("y", file("c", false))],
            vec![("x", a.clone()), ("y", file("b", true))],
            vec![("x", a.clone()), ("y", file("b", false)), ("d", Entry::Directory)],
        ] {
            assert_ne!(name(&other), one, "{other:?}");
        }
        assert!(perigee_model::inputs::is_inputs_image(one.as_str()), "{one}");
        let long = TenantName::new("t".repeat(16)).expect("a name");
        let of_tenant = manifest(&[("x", a)]).expect("a manifest").image(&long).expect("a name");
        assert!(long.owns(of_tenant.as_str()));
    }

    #[test]
    fn two_inputs_never_have_one_path() {
        let a = file("a", false);
        for bad in [
            [("x", a.clone()), ("x", a.clone())],
            [("x", a.clone()), ("x/y", a.clone())],
            [("x/y/z", a.clone()), ("x", a.clone())],
            [("x", a.clone()), ("x", Entry::Directory)],
            [("../x", a.clone()), ("y", a.clone())],
        ] {
            assert!(manifest(&bad).is_err(), "{bad:?}");
        }
        manifest(&[("d", Entry::Directory), ("d", Entry::Directory), ("d/x", a)]).expect("both");
    }

    #[test]
    fn too_much_is_refused_with_the_limit() {
        let mut huge = Manifest::default();
        let of = |size_bytes| {
            Entry::File(FileOf {
                size_bytes,
                sha256: String::new(),
                executable: false,
                at: Location::Top,
            })
        };
        huge.add("a".to_owned(), of(60 << 30)).expect("it fits");
        let problem = huge.add("b".to_owned(), of(5 << 30)).expect_err("too large");
        assert!(problem.why.contains("64 GiB"), "{problem}");
        assert!(huge.add("c".to_owned(), of(u64::MAX)).is_err());
    }

    proptest! {
        #[test]
        fn the_parts_are_a_tar_of_the_entries(
            files in prop::collection::btree_map("[a-z]{1,90}(/ü{1,60}){0,4}\\.f", (".{0,600}", any::<bool>()), 0..8)
        ) {
            let mut made = Manifest::default();
            for (path, (text, executable)) in &files {
                made.add(path.clone(), file(text, *executable))?;
            }
            let mut tar = Vec::new();
            let texts: Vec<&String> = files.values().map(|(text, _)| text).collect();
            for (part, text) in made.into_parts().zip(texts) {
                let (headers, entry) = part.expect("headers");
                let Entry::File(file) = entry else { panic!("only files") };
                tar.extend_from_slice(&headers);
                tar.extend_from_slice(text.as_bytes());
                tar.extend_from_slice(&padding(file.size_bytes));
            }
            tar.extend_from_slice(&end());
            let mut found = BTreeMap::new();
            for entry in tar::Archive::new(&tar[..]).entries().expect("entries") {
                let mut entry = entry.expect("an entry");
                let path = entry.path().expect("a path").to_str().expect("text").to_owned();
                let executable = entry.header().mode().expect("a mode") & 0o100 != 0;
                let mut text = String::new();
                entry.read_to_string(&mut text).expect("text");
                found.insert(path, (text, executable));
            }
            prop_assert_eq!(found, files);
        }
    }
}
