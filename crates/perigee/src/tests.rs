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
