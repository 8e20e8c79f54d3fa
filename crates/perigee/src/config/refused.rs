//! What is wrong with arguments that stand in a file, in words that name its keys.

use std::path::Path;

use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use perigee_model::Problem;

use super::{Daemon, Setting, Value, key_of, keys};

/// Why a command can't run: its arguments are wrong, or what it reads to know them.
#[derive(Debug)]
pub enum Refused {
    /// The arguments, in the words of the parser of the command line.
    Usage(clap::Error),
    /// All else.
    Problem(Problem),
}

impl From<clap::Error> for Refused {
    fn from(error: clap::Error) -> Self {
        Self::Usage(error)
    }
}

impl From<Problem> for Refused {
    fn from(problem: Problem) -> Self {
        Self::Problem(problem)
    }
}

/// For settings that only a file has.
impl From<Refused> for Problem {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Problem(problem) => problem,
            Refused::Usage(error) => {
                let text = error.to_string();
                let first = text.lines().next().unwrap_or_default();
                let why = first.strip_prefix("error: ").unwrap_or(first);
                Self::invalid("can't read the settings", why)
            }
        }
    }
}

/// The key that is most like this one, and all that there are.
pub fn known_keys(command: &Command, key: &str) -> String {
    let parsed = command.clone().try_get_matches_from(["", &format!("--{key}")]);
    let like = parsed.err().and_then(|error| texts(&error, ContextKind::SuggestedArg).pop());
    let like = like.map(|flag| format!("is it `{}`? ", flag.trim_start_matches('-')));
    let all: Vec<&str> = keys(command).map(key_of).collect();
    format!("{}keys here: {}", like.unwrap_or_default(), all.join(", "))
}

/// What an error says of one kind.
fn texts(error: &clap::Error, kind: ContextKind) -> Vec<String> {
    match error.get(kind) {
        Some(ContextValue::String(text)) => vec![text.clone()],
        Some(ContextValue::Strings(texts)) => texts.clone(),
        _ => Vec::new(),
    }
}

/// The key of a flag as the parser shows it: `--listen <ADDRESS>`.
fn key_in(shown: &str) -> &str {
    let key = shown.trim_start_matches("--");
    key.split([' ', '=', '[', '<']).next().unwrap_or(key)
}

/// What is wrong with arguments of which some stand in this file.
pub fn in_file(error: clap::Error, file: &Path, settings: &[Setting]) -> Refused {
    let shown = texts(&error, ContextKind::InvalidArg);
    let in_file = |shown: &String| settings.iter().find(|one| one.key() == key_in(shown));
    match error.kind() {
        ErrorKind::MissingRequiredArgument => {
            let missing: Vec<&str> = shown.iter().map(|shown| key_in(shown)).collect();
            let missing = missing.join("`, `");
            let problem =
                Problem::invalid(file.display().to_string(), format!("`{missing}` is missing"));
            problem.next("add it, with its value; `perigee config show --defaults` shows what each key means").into()
        }
        ErrorKind::ArgumentConflict => {
            let others = texts(&error, ContextKind::PriorArg);
            let all = || shown.iter().chain(&others);
            let Some(at) = all().find_map(in_file).and_then(|one| one.values.first()) else {
                return error.into();
            };
            let names: Vec<String> = all()
                .map(|shown| match in_file(shown) {
                    Some(setting) => format!("`{}`", setting.key()),
                    None => format!("--{}", key_in(shown)),
                })
                .collect();
            let why = format!("{} can't be used together", names.join(" and "));
            Problem::invalid(at.at.clone(), why).next("leave one of them out").into()
        }
        ErrorKind::ValueValidation | ErrorKind::InvalidValue => {
            let Some(setting) = shown.iter().find_map(in_file) else { return error.into() };
            value(&error, setting).into()
        }
        _ => error.into(),
    }
}

/// What is wrong with a value of the file.
fn value(error: &clap::Error, setting: &Setting) -> Problem {
    let text = texts(error, ContextKind::InvalidValue).pop().unwrap_or_default();
    let wrong = |value: &&Value| value.text == text;
    let value = setting.values.iter().find(wrong).or(setting.values.first());
    let at = value.map_or_else(|| setting.key.clone(), |value| value.at.clone());
    let possible = texts(error, ContextKind::ValidValue);
    let why = match std::error::Error::source(error) {
        Some(why) => why.to_string(),
        None if text.is_empty() => "a value is missing".to_owned(),
        None => format!("{text:?} is not possible"),
    };
    let problem = Problem::invalid(at, why);
    match possible.is_empty() {
        true => problem,
        false => problem.next(format!("possible is: {}", possible.join(", "))),
    }
}

/// Tells whoever leaves out what is required that a file may say it.
pub fn without_file(mut error: clap::Error, daemon: Daemon) -> Refused {
    if error.kind() == ErrorKind::MissingRequiredArgument {
        let made = match daemon {
            Daemon::Controller => "`perigee controller init --listen ADDRESS` makes it",
            Daemon::Volume | Daemon::Agent => "`perigee host join` makes it",
        };
        let tip =
            format!("{} can say it too, if that file is there; {made}", daemon.file().display());
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    error.into()
}
