//! Random operations, with crashes in between, against a map of paths.

use std::collections::BTreeMap;
use std::path::Path;

use proptest::prelude::*;
use tempfile::tempdir;

use super::{get, path, put, space};
use crate::path::DataPath;
use crate::upload::{Begin, Upload};

#[derive(Debug, Clone)]
enum Step {
    Put(String, Vec<u8>),
    /// An upload that is cut, by the client or by a kill of the server.
    Cut(String, Vec<u8>, bool),
    Delete(String),
    MakeDirectory(String),
    RemoveDirectory(String),
    Rename(String, String, bool),
    /// The server is killed and starts again.
    Restart,
}

fn a_path() -> impl Strategy<Value = String> {
    prop::collection::vec(prop::sample::select(vec!["a", "b", "ü"]), 1..4)
        .prop_map(|names| names.join("/"))
}

fn a_step() -> impl Strategy<Value = Step> {
    let content = || prop::collection::vec(any::<u8>(), 0..40);
    prop_oneof![
        4 => (a_path(), content()).prop_map(|(p, c)| Step::Put(p, c)),
        1 => (a_path(), content(), any::<bool>()).prop_map(|(p, c, k)| Step::Cut(p, c, k)),
        2 => a_path().prop_map(Step::Delete),
        3 => a_path().prop_map(Step::MakeDirectory),
        1 => a_path().prop_map(Step::RemoveDirectory),
        3 => (a_path(), a_path(), any::<bool>()).prop_map(|(a, b, r)| Step::Rename(a, b, r)),
        1 => Just(Step::Restart),
    ]
}

/// Paths, with a file's content or `None` for a directory.
type Model = BTreeMap<String, Option<Vec<u8>>>;

fn is_directory(model: &Model, path: &str) -> bool {
    path.is_empty() || matches!(model.get(path), Some(None))
}

fn above(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(above, _)| above)
}

fn has_below(model: &Model, path: &str) -> bool {
    model.keys().any(|key| key.starts_with(&format!("{path}/")))
}

/// Whether the step is to succeed; then it is done.
fn expect(model: &mut Model, step: &Step) -> bool {
    match step {
        Step::Put(path, content) => {
            let fits = is_directory(model, above(path)) && !is_directory(model, path);
            if fits {
                model.insert(path.clone(), Some(content.clone()));
            }
            fits
        }
        Step::Delete(path) => {
            let is_file = matches!(model.get(path), Some(Some(_)));
            if is_file {
                model.remove(path);
            }
            is_file
        }
        Step::MakeDirectory(path) => {
            let fits = is_directory(model, above(path)) && !model.contains_key(path);
            if fits {
                model.insert(path.clone(), None);
            }
            fits
        }
        Step::RemoveDirectory(path) => {
            let fits = is_directory(model, path) && !has_below(model, path);
            if fits {
                model.remove(path);
            }
            fits
        }
        Step::Rename(from, to, replace) => expect_rename(model, from, to, *replace),
        Step::Cut(..) | Step::Restart => true,
    }
}

fn expect_rename(model: &mut Model, from: &str, to: &str, replace: bool) -> bool {
    let Some(moved) = model.get(from).cloned() else { return false };
    if !is_directory(model, above(to)) {
        return false;
    }
    if from == to {
        return true;
    }
    let replaces = replace && moved.is_some() && matches!(model.get(to), Some(Some(_)));
    if to.starts_with(&format!("{from}/")) || (model.contains_key(to) && !replaces) {
        return false;
    }
    let prefix = format!("{from}/");
    let below: Vec<String> = model.keys().filter(|k| k.starts_with(&prefix)).cloned().collect();
    for key in below {
        let value = model.remove(&key).flatten();
        model.insert(format!("{to}/{}", &key[prefix.len()..]), value);
    }
    model.remove(from);
    model.insert(to.to_owned(), moved);
    true
}

fn act(directory: &Path, step: &Step, open: &mut std::sync::Arc<crate::space::Space>) -> bool {
    match step {
        Step::Put(to, content) => put(open, to, content).is_ok(),
        Step::Cut(to, content, is_kill) => {
            if let Ok(mut upload) = Upload::begin(open, &path(to), Begin::Empty) {
                upload.write(0, content).expect("it has room");
                if *is_kill {
                    std::mem::forget(upload);
                    *open = space(directory);
                }
            }
            true
        }
        Step::Delete(path_) => open.remove_file(&path(path_)).is_ok(),
        Step::MakeDirectory(path_) => open.make_directory(&path(path_)).is_ok(),
        Step::RemoveDirectory(path_) => open.remove_directory(&path(path_)).is_ok(),
        Step::Rename(from, to, replace) => open.rename(&path(from), &path(to), *replace).is_ok(),
        Step::Restart => {
            *open = space(directory);
            true
        }
    }
}

fn found(space: &crate::space::Space, directory: &DataPath, into: &mut Model) {
    for entry in space.list(directory, None, 100).expect("a list").entries {
        let path = directory.join(&entry.name).expect("a path");
        if entry.is_directory() {
            into.insert(path.to_string(), None);
            found(space, &path, into);
        } else {
            let content = get(space, &path.to_string()).expect("the content");
            assert_eq!(content.len() as u64, entry.size_bytes);
            into.insert(path.to_string(), Some(content));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn the_tree_is_what_a_map_would_be(steps in prop::collection::vec(a_step(), 1..40)) {
        let dir = tempdir().expect("a directory");
        let mut open = space(dir.path());
        let mut model = Model::new();
        for step in &steps {
            let expected = expect(&mut model, step);
            prop_assert_eq!(act(dir.path(), step, &mut open), expected, "{:?} in {:?}", step, model);
        }
        let mut tree = Model::new();
        found(&open, &path(""), &mut tree);
        prop_assert_eq!(&tree, &model);
        let before = open.usage.used();
        drop(open);
        prop_assert_eq!(space(dir.path()).usage.used(), before, "what is counted is what is there");
    }
}
