//! The files of the daemons in `/etc/perigee`: each key is a flag of the daemon, with the same name and the same values.
//!
//! There is no list of keys but the command's flags: a file becomes arguments that stand behind the user's own, and the parser of the command line
//! checks all of them. A flag that the user gives, or that is in the environment, wins over the file. What is wrong with a value is said with
//! its file, line and key.

mod example;
mod refused;
#[cfg(test)]
mod tests;
mod write;

use std::ffi::OsString;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use perigee_model::limits::DOCUMENT_BYTES;
use perigee_model::yaml::{Document, Field};
use perigee_model::{Problem, ProblemKind};
use tracing_subscriber::filter::Targets;

pub use example::example;
pub use refused::Refused;
pub use write::{Wanted, absolute, make_directory};

/// The directory of the files.
pub const DIR: &str = "/etc/perigee";

/// Whoever names it wants no file, also not the one in [`DIR`].
const NO_FILE: &str = "/dev/null";

/// The id of the flag that names the file.
const CONFIG: &str = "config";

/// What every daemon takes.
#[derive(Debug, clap::Args)]
pub struct DaemonOptions {
    /// The file with these settings, one key for each flag [default: controller.yaml, volume.yaml or agent.yaml in /etc/perigee, if it is there; /dev/null: none]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// What is logged, as `info` or `info,perigee_volume=debug` [default: info]
    #[arg(long, env = "PERIGEE_LOG", value_name = "LEVELS")]
    pub log: Option<Targets>,
}

/// A daemon that has a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Daemon {
    /// `perigee controller run`
    Controller,
    /// `perigee volume serve`
    Volume,
    /// `perigee agent run`
    Agent,
}

impl Daemon {
    pub const ALL: [Self; 3] = [Self::Controller, Self::Volume, Self::Agent];

    pub fn name(self) -> &'static str {
        self.words()[0]
    }

    /// The command that runs it.
    pub fn words(self) -> [&'static str; 2] {
        match self {
            Self::Controller => ["controller", "run"],
            Self::Volume => ["volume", "serve"],
            Self::Agent => ["agent", "run"],
        }
    }

    /// The unit of systemd that runs it.
    pub fn unit(self) -> String {
        format!("perigee-{}.service", self.name())
    }

    /// Its file in this directory.
    pub fn file_in(self, dir: &Path) -> PathBuf {
        dir.join(format!("{}.yaml", self.name()))
    }

    /// The file that it reads if no other is named.
    pub fn file(self) -> PathBuf {
        self.file_in(Path::new(DIR))
    }

    /// The daemon to which a file belongs by its name.
    pub fn of_file(file: &Path) -> Option<Self> {
        let name = file.file_stem()?.to_str()?;
        Self::ALL.into_iter().find(|daemon| daemon.name() == name)
    }

    /// Its flags, in `root`, the whole command line.
    fn command(self, root: &Command) -> Result<&Command, Problem> {
        let [noun, verb] = self.words();
        let command = root.find_subcommand(noun).and_then(|noun| noun.find_subcommand(verb));
        command.ok_or_else(|| Problem::internal("can't read the settings", "no such command"))
    }
}

/// The flags that can stand in the file.
fn keys(command: &Command) -> impl Iterator<Item = &Arg> {
    command.get_arguments().filter(|arg| arg.get_long().is_some() && arg.get_id() != CONFIG)
}

fn key_of(arg: &Arg) -> &str {
    arg.get_long().unwrap_or_default()
}

fn is_switch(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::SetTrue)
}

fn is_list(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append)
}

/// A value as it stands in a file.
#[derive(Debug, Clone)]
struct Value {
    text: String,
    /// `FILE:LINE: KEY`
    at: String,
}

/// A key of a file with its values: one, or as many as the list has.
#[derive(Debug, Clone)]
pub struct Setting {
    key: String,
    values: Vec<Value>,
}

impl Value {
    fn of(arg: &Arg, field: &Field<'_>) -> Result<Self, Problem> {
        let text = field.text()?;
        if is_switch(arg) && !["true", "false"].contains(&text) {
            return Err(field.problem(format!("{text:?} is neither true nor false")));
        }
        Ok(Self { text: text.to_owned(), at: field.problem("").what })
    }
}

impl Setting {
    fn of(arg: &Arg, field: &Field<'_>) -> Result<Self, Problem> {
        let values = match is_list(arg) && field.is_list() {
            true => field.list()?.iter().map(|item| Value::of(arg, item)).collect::<Result<_, _>>(),
            false => Value::of(arg, field).map(|value| vec![value]),
        };
        Ok(Self { key: key_of(arg).to_owned(), values: values? })
    }

    /// The same as arguments.
    fn words(&self, arg: &Arg) -> Vec<OsString> {
        let Self { key, values } = self;
        let word = |value: &Value| match is_switch(arg) {
            true => (value.text == "true").then(|| format!("--{key}").into()),
            false => Some(format!("--{key}={}", value.text).into()),
        };
        values.iter().filter_map(word).collect()
    }

    /// What stands there, each value by itself.
    pub fn texts(&self) -> Vec<&str> {
        self.values.iter().map(|value| value.text.as_str()).collect()
    }

    pub fn key(&self) -> &str {
        &self.key
    }
}

/// The settings in a text, which `name` is called in errors.
fn parse(command: &Command, name: &str, text: &str) -> Result<Vec<Setting>, Problem> {
    let says_nothing = |line: &str| line.trim().is_empty() || line.trim().starts_with('#');
    if text.lines().all(says_nothing) {
        return Ok(Vec::new());
    }
    let document = Document::parse(name, text)?;
    let root = document.root();
    let mut settings = Vec::new();
    for (key, field) in root.entries()? {
        let Some(arg) = keys(command).find(|arg| key_of(arg) == key) else {
            return Err(root
                .name_problem(key, "there is no such key")
                .next(refused::known_keys(command, key)));
        };
        // A key that is left empty is one that is left out.
        if !field.is_null() {
            settings.push(Setting::of(arg, &field)?);
        }
    }
    Ok(settings)
}

fn read(command: &Command, file: &Path) -> Result<Vec<Setting>, Problem> {
    let can_not = |e: std::io::Error| {
        Problem::of_io(ProblemKind::Invalid, format!("can't read {}", file.display()), &e)
            .next("check that the file is there and that this user may read it, or name another one with --config")
    };
    // One byte more than is allowed, so that a longer file is refused and not cut.
    let most = u64::try_from(DOCUMENT_BYTES.max).unwrap_or(u64::MAX).saturating_add(1);
    let mut text = String::new();
    let opened = std::fs::File::open(file).map_err(can_not)?;
    opened.take(most).read_to_string(&mut text).map_err(can_not)?;
    parse(command, &file.display().to_string(), &text)
}

/// What a daemon is told by its file and its flags.
#[derive(Debug, Clone)]
pub struct Told {
    pub daemon: Daemon,
    /// The file that was read, if there is one.
    pub file: Option<PathBuf>,
    root: Command,
    words: Vec<OsString>,
    /// What counts of the file.
    settings: Vec<Setting>,
    /// The daemon's own arguments.
    own: ArgMatches,
}

/// What counts of one flag.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Counts {
    /// The name of the flag and of the key.
    pub key: String,
    /// Empty if it is not set.
    pub values: Vec<String>,
    /// `flag`, `default`, `not set`, the name of the variable, or file and line.
    pub from: String,
}

/// The arguments as they count, with those of the daemon's file if the command runs a daemon.
///
/// # Errors
/// What is wrong with an argument, or with the file.
pub fn arguments(
    root: Command,
    words: Vec<OsString>,
) -> Result<(ArgMatches, Option<Told>), Refused> {
    let Some((daemon, own)) = daemon_of(&root, &words) else {
        return Ok((root.try_get_matches_from(words)?, None));
    };
    let named = own.get_one::<PathBuf>(CONFIG).cloned();
    let file = named.or_else(|| Some(daemon.file()).filter(|file| is_there(file)));
    let file = file.filter(|file| file != Path::new(NO_FILE));
    let command = daemon.command(&root)?;
    let mut settings = match &file {
        Some(file) => read(command, file)?,
        None => Vec::new(),
    };
    let is_given = |key: &str| {
        let id = keys(command).find(|arg| key_of(arg) == key).map(|arg| arg.get_id().as_str());
        let from = id.and_then(|id| own.value_source(id));
        matches!(from, Some(ValueSource::CommandLine | ValueSource::EnvVariable))
    };
    settings.retain(|setting| !is_given(&setting.key));
    let mut all = words.clone();
    for setting in &settings {
        let arg = keys(command).find(|arg| key_of(arg) == setting.key);
        all.extend(arg.into_iter().flat_map(|arg| setting.words(arg)));
    }
    let matches = root.clone().try_get_matches_from(all);
    let matches = matches.map_err(|error| match &file {
        Some(file) => refused::in_file(error, file, &settings),
        None => refused::without_file(error, daemon),
    })?;
    let [noun, verb] = daemon.words();
    let own = matches.subcommand_matches(noun).and_then(|m| m.subcommand_matches(verb)).cloned();
    let own = own.ok_or_else(|| Problem::internal("can't read the settings", "no such command"))?;
    Ok((matches, Some(Told { daemon, file, root, words, settings, own })))
}

/// Other problems than that it is not there are said when it is read.
fn is_there(file: &Path) -> bool {
    !matches!(std::fs::metadata(file), Err(e) if e.kind() == std::io::ErrorKind::NotFound)
}

/// Which daemon is to run, and the flags that the user gives, as far as they can be parsed. What is wrong with them is said later.
fn daemon_of(root: &Command, words: &[OsString]) -> Option<(Daemon, ArgMatches)> {
    // Most commands run no daemon, and need not be parsed twice.
    let is_said = |word: &str| words.iter().any(|said| said == word);
    if !Daemon::ALL.iter().any(|daemon| daemon.words().into_iter().all(is_said)) {
        return None;
    }
    let matches = root.clone().ignore_errors(true).try_get_matches_from(words).ok()?;
    let (noun, below) = matches.subcommand()?;
    let (verb, own) = below.subcommand()?;
    let daemon = Daemon::ALL.into_iter().find(|daemon| daemon.words() == [noun, verb])?;
    Some((daemon, own.clone()))
}

/// What the daemon would be told by this file alone.
///
/// # Errors
/// What is wrong in the file.
pub fn of_file(root: Command, daemon: Daemon, file: &Path) -> Result<Told, Problem> {
    let [noun, verb] = daemon.words();
    let words = ["perigee", noun, verb, "--config"].map(OsString::from);
    let words = words.into_iter().chain([file.as_os_str().to_owned()]).collect();
    let (_, told) = arguments(root, words).map_err(Problem::from)?;
    told.ok_or_else(|| Problem::internal("can't read the settings", "no such command"))
}

impl Told {
    /// Reads the file again.
    ///
    /// # Errors
    /// What is wrong in the file now.
    pub fn again(&self) -> Result<Self, Problem> {
        let (_, told) = arguments(self.root.clone(), self.words.clone()).map_err(Problem::from)?;
        told.ok_or_else(|| Problem::internal("can't read the settings", "no such command"))
    }

    fn texts(&self, arg: &Arg) -> Vec<String> {
        let raw = self.own.get_raw(arg.get_id().as_str()).into_iter().flatten();
        raw.map(|text| text.to_string_lossy().into_owned()).collect()
    }

    /// The keys whose values differ.
    pub fn differing(&self, other: &Self) -> Vec<String> {
        let Ok(command) = self.daemon.command(&self.root) else { return Vec::new() };
        let differ = |arg: &&Arg| self.texts(arg) != other.texts(arg);
        keys(command).filter(differ).map(|arg| key_of(arg).to_owned()).collect()
    }

    /// What counts of the flag with this id.
    pub fn value<T: Clone + Send + Sync + 'static>(&self, id: &str) -> Option<T> {
        self.own.get_one(id).cloned()
    }

    /// What counts of each flag, and where it is from.
    ///
    /// # Errors
    /// Never: each daemon has its command.
    pub fn all(&self) -> Result<Vec<Counts>, Problem> {
        let counts = |arg: &Arg| {
            let key = key_of(arg).to_owned();
            let setting = self.settings.iter().find(|setting| setting.key == key);
            let at = setting.and_then(|setting| setting.values.first());
            let from = match (at, self.own.value_source(arg.get_id().as_str())) {
                // What is said elsewhere does not count of the file.
                (Some(value), _) => {
                    let at = value.at.rsplit_once(": ");
                    at.map_or_else(|| value.at.clone(), |(at, _)| at.to_owned())
                }
                (None, Some(ValueSource::CommandLine)) => "flag".to_owned(),
                (None, Some(ValueSource::EnvVariable)) => {
                    arg.get_env().unwrap_or_default().to_string_lossy().into_owned()
                }
                (None, Some(_)) => "default".to_owned(),
                (None, None) => "not set".to_owned(),
            };
            Counts { key, values: self.texts(arg), from }
        };
        Ok(keys(self.daemon.command(&self.root)?).map(counts).collect())
    }
}
