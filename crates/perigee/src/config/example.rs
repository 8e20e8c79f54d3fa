//! A file with each key as a comment: what it means, and its default.

use clap::{Arg, Command};
use perigee_model::Problem;

use super::write::quoted;
use super::{Daemon, is_list, is_switch, key_of, keys};

/// The longest line of a comment.
const WIDTH: usize = 100;

/// The whole example for a daemon.
///
/// # Errors
/// Never: each daemon has its command.
pub fn example(root: &Command, daemon: Daemon) -> Result<String, Problem> {
    let (file, words) = (daemon.file(), daemon.words().join(" "));
    let mut lines = comment(&format!(
        "{}, the settings of `perigee {words}`. Each key is the flag of the same name, and a flag that is given wins. \
         `perigee config check` looks at this file, `systemctl restart {}` has it count.",
        file.display(),
        daemon.unit()
    ));
    for arg in keys(daemon.command(root)?) {
        lines.push(String::new());
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let needed = if arg.is_required_set() { ". It must be set" } else { "" };
        lines.extend(comment(&format!("{help}{needed}")));
        lines.extend(key(arg));
    }
    lines.push(String::new());
    Ok(lines.join("\n"))
}

/// A key as it would stand in the file, as a comment.
fn key(arg: &Arg) -> Vec<String> {
    let key = key_of(arg);
    let defaults: Vec<String> =
        arg.get_default_values().iter().map(|value| quoted(&value.to_string_lossy())).collect();
    let name = arg.get_value_names().and_then(|names| names.first());
    let name = name.map_or_else(|| key.to_uppercase(), ToString::to_string);
    match defaults.first() {
        _ if is_switch(arg) => vec![format!("#{key}: false")],
        Some(default) => vec![format!("#{key}: {default}")],
        None if is_list(arg) => vec![format!("#{key}:"), format!("#  - {}", quoted(&name))],
        None => vec![format!("#{key}: {}", quoted(&name))],
    }
}

/// Lines of comment with these words.
fn comment(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.len() + word.len() < WIDTH => *line += &format!(" {word}"),
            _ => lines.push(format!("# {word}")),
        }
    }
    lines
}
