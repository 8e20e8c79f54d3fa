//! What is said of all commands together.

use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory as _};

use crate::Cli;

/// The pages are kept in `PERIGEE_MAN_DIR`, if there is such a variable: `scripts/package` takes them from there.
#[test]
fn each_command_has_a_manual_page() {
    let scratch = tempfile::tempdir().expect("a directory");
    let kept = std::env::var_os("PERIGEE_MAN_DIR").map(PathBuf::from);
    let dir = kept.as_deref().unwrap_or(scratch.path());
    clap_mangen::generate_to(Cli::command(), dir).expect("the pages");
    look_at_page(&Cli::command(), "perigee", dir);
}

/// A page names its command, and says what the command does.
fn look_at_page(command: &Command, name: &str, dir: &Path) {
    let path = dir.join(format!("{name}.1"));
    let page = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("no page {name}: {e}"));
    let names = name.replace('-', "\\-");
    assert!(page.contains(&format!("{names} \\- ")), "{name} does not say what it does:\n{page}");
    for verb in command.get_subcommands().filter(|verb| !verb.is_hide_set()) {
        look_at_page(verb, &format!("{name}-{}", verb.get_name()), dir);
    }
}

/// The command lines in a line of source, with `a` for each value that is filled in.
fn shown_commands(line: &str) -> Vec<String> {
    if line.trim_start().starts_with("//") {
        return Vec::new();
    }
    let command = |rest: &str| {
        let words = rest.split(['"', ';', ',', '`', ')']).next().unwrap_or_default();
        let is_value = |word: &str| word.contains('{') || word == word.to_uppercase();
        let words = words.split_whitespace().map(|word| if is_value(word) { "a" } else { word });
        format!("perigee {}", words.collect::<Vec<_>>().join(" "))
    };
    line.split("perigee ").skip(1).map(command).collect()
}

/// Whoever copies a command line from a page gets no refusal of its form.
#[test]
fn each_command_line_that_a_page_shows_can_be_typed() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut shown = Vec::new();
    for dir in ["web/src", "controller/src/web"] {
        for file in std::fs::read_dir(crates.join(dir)).expect("the sources of the pages") {
            let path = file.expect("a file").path();
            if path.ends_with("tests.rs") {
                continue;
            }
            let source = std::fs::read_to_string(path).expect("a source");
            shown.extend(source.lines().flat_map(shown_commands));
        }
    }
    assert!(shown.contains(&"perigee rent explain a".to_owned()), "{shown:?}");
    for line in shown {
        let parsed = Cli::command().try_get_matches_from(line.split(' '));
        let wrong = parsed.err().filter(|e| e.kind() != clap::error::ErrorKind::ValueValidation);
        assert!(wrong.is_none(), "{line}: {}", wrong.map(|e| e.to_string()).unwrap_or_default());
    }
}
