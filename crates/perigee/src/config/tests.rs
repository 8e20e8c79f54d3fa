//! Files of daemons, through the command line that the program has.

use std::collections::BTreeMap;

use clap::{CommandFactory as _, FromArgMatches as _};

use super::*;
use crate::Cli;

/// A value for each flag is among these.
const VALUES: [&str; 14] = [
    "home1",
    "10.0.0.2:7001",
    "10.0.0.2",
    "7",
    "10m",
    "1GiB",
    "30000-30010",
    "1900000000-1900000010",
    "$20",
    "required",
    "s3://bucket/prefix",
    "https://10.0.0.1:7000",
    "unix:/run/a.sock",
    "info,perigee_volume=debug",
];

fn root() -> Command {
    Cli::command()
}

fn file(dir: &tempfile::TempDir, text: &str) -> PathBuf {
    let file = dir.path().join("daemon.yaml");
    std::fs::write(&file, text).expect("a file");
    file
}

/// What a daemon is told by a file with this text and these flags.
fn told(daemon: Daemon, text: &str, flags: &[&str]) -> Result<Told, Problem> {
    let dir = tempfile::tempdir().expect("a directory");
    let file = file(&dir, text);
    let words = daemon.words().map(OsString::from).into_iter();
    let words = [OsString::from("perigee")].into_iter().chain(words);
    let words = words.chain(["--config".into(), file.into_os_string()]);
    let words: Vec<OsString> = words.chain(flags.iter().map(OsString::from)).collect();
    let (matches, told) = arguments(root(), words).map_err(Problem::from)?;
    Cli::from_arg_matches(&matches).expect("what was parsed can be used");
    Ok(told.expect("it is a daemon"))
}

fn fails(daemon: Daemon, text: &str) -> Problem {
    told(daemon, text, &[]).map(|told| told.all()).expect_err(text)
}

fn counts(told: &Told, key: &str) -> Counts {
    let all = told.all().expect("a daemon");
    all.into_iter().find(|one| one.key == key).expect("it has this key")
}

const CONTROLLER: &str = "listen: [unix:/run/c.sock, 10.0.0.1:7000]\n";

/// A file with all these keys.
fn text(values: &BTreeMap<String, usize>, lists: &[String]) -> String {
    let line = |(key, index): (&String, &usize)| match lists.contains(key) {
        true => format!("{key}: ['{0}', '{0}']\n", VALUES[*index]),
        false => format!("{key}: '{}'\n", VALUES[*index]),
    };
    values.iter().map(line).collect()
}

#[test]
fn every_flag_of_every_daemon_can_stand_in_its_file() {
    for daemon in Daemon::ALL {
        let (root, mut values, mut lists) = (root(), BTreeMap::new(), Vec::new());
        for arg in keys(daemon.command(&root).expect("a command")).filter(|arg| !is_switch(arg)) {
            values.insert(key_of(arg).to_owned(), 0);
            lists.extend(is_list(arg).then(|| key_of(arg).to_owned()));
        }
        // The next value is tried for each key that refuses one.
        let read = loop {
            let problem = match told(daemon, &text(&values, &lists), &[]) {
                Ok(told) => break told,
                Err(problem) => problem,
            };
            let key = problem.what.rsplit_once(": ").map_or("", |(_, key)| key);
            let key = key.split('[').next().unwrap_or_default();
            let index = values.get_mut(key).unwrap_or_else(|| panic!("{daemon:?}: {problem}"));
            *index += 1;
            assert!(*index < VALUES.len(), "{daemon:?}: no value is known for {key}: {problem}");
        };
        for (key, index) in &values {
            let found = counts(&read, key);
            let wanted = vec![VALUES[*index]; if lists.contains(key) { 2 } else { 1 }];
            assert_eq!(found.values, wanted, "{daemon:?} {key}");
            assert!(found.from.contains("daemon.yaml:"), "{daemon:?}: {found:?}");
        }
    }
}

#[test]
fn a_switch_is_true_or_false() {
    let insecure =
        |text: &str| counts(&told(Daemon::Controller, text, &[]).expect(text), "insecure");
    assert_eq!(insecure(&format!("{CONTROLLER}insecure: true\n")).values, ["true"]);
    let off = insecure(&format!("{CONTROLLER}insecure: false\n"));
    assert_eq!(off.values, ["false"]);
    assert!(off.from.ends_with("daemon.yaml:2"), "{off:?}");
    let problem = fails(Daemon::Controller, &format!("{CONTROLLER}insecure: yes\n"));
    assert!(problem.what.ends_with("daemon.yaml:2: insecure"), "{problem}");
    assert!(problem.why.contains("neither true nor false"), "{problem}");
}

#[test]
fn an_unknown_key_is_named_with_its_line_and_the_key_that_is_like_it() {
    let problem = fails(Daemon::Controller, "# it listens\nlistn: 10.0.0.1:7000\n");
    assert!(problem.what.ends_with("daemon.yaml:2: listn"), "{problem}");
    assert!(problem.next.starts_with("is it `listen`? keys here: "), "{problem}");
    // These are no settings of the daemon.
    for key in ["api", "config", "help", "version", "format"] {
        let problem = fails(Daemon::Controller, &format!("{CONTROLLER}{key}: a\n"));
        assert!(problem.why.contains("no such key"), "{problem}");
    }
}

#[test]
fn a_wrong_value_is_named_with_its_line_and_key() {
    let text = "listen:\n  - unix:/run/c.sock\n  - everywhere\n";
    let problem = fails(Daemon::Controller, text);
    assert!(problem.what.ends_with("daemon.yaml:3: listen[1]"), "{problem}");
    assert!(problem.why.contains("everywhere"), "{problem}");
    let problem = fails(Daemon::Controller, &format!("{CONTROLLER}site: [a, b]\n"));
    assert!(problem.what.ends_with(": site") && problem.why.contains("not a list"), "{problem}");
    let problem = fails(Daemon::Volume, "pool: /srv/pool\nnbd: unix:/a\ntls: perhaps\n");
    assert!(problem.what.ends_with("daemon.yaml:3: tls"), "{problem}");
    assert!(problem.next.contains("required, optional"), "{problem}");
}

#[test]
fn what_is_missing_and_what_does_not_go_together_is_named_with_the_file() {
    let problem = fails(Daemon::Agent, "host: home1\nsite: home\n");
    assert!(problem.what.ends_with("daemon.yaml"), "{problem}");
    assert!(problem.why.contains("`listen`") && problem.why.contains("missing"), "{problem}");
    let problem =
        fails(Daemon::Controller, &format!("{CONTROLLER}name: a.example\ninsecure: true\n"));
    assert!(problem.why.contains("`name`") && problem.why.contains("`insecure`"), "{problem}");
    assert!(problem.what.contains("daemon.yaml:"), "{problem}");
}

#[test]
fn a_flag_wins_over_the_file_also_where_the_key_is_a_list() {
    let flags = ["--listen", "10.0.0.9:7000", "--site", "cloud"];
    let text = format!("{CONTROLLER}site: home\nkeep-outputs: 7d\n");
    let told = told(Daemon::Controller, &text, &flags).expect("both count");
    assert_eq!(counts(&told, "listen").values, ["10.0.0.9:7000"]);
    let site = counts(&told, "site");
    assert_eq!((site.values, site.from.as_str()), (vec!["cloud".to_owned()], "flag"));
    assert_eq!(counts(&told, "keep-outputs").values, ["7d"]);
    assert_eq!(counts(&told, "publish-ports").from, "default");
    assert_eq!(told.value::<u64>("keep_outputs"), Some(7 * 24 * 3600));
}

#[test]
fn a_file_that_says_nothing_is_no_error_of_its_own() {
    for text in ["", "# nothing\n\n"] {
        let told = told(Daemon::Controller, text, &["--listen", "10.0.0.1:7000"]);
        assert_eq!(counts(&told.expect("flags are enough"), "listen").from, "flag");
    }
}

#[test]
fn a_file_that_was_changed_says_which_keys_differ() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = file(&dir, CONTROLLER);
    let first = of_file(root(), Daemon::Controller, &path).expect("it is sound");
    file(&dir, &format!("{CONTROLLER}keep-outputs: 7d\nsite: home\n"));
    let second = first.again().expect("it is sound");
    assert_eq!(first.differing(&second), ["site", "keep-outputs"]);
    file(&dir, "listen: nowhere\n");
    second.again().expect_err("it is broken");
}

#[test]
fn an_example_has_every_key_and_says_nothing_until_it_is_changed() {
    for daemon in Daemon::ALL {
        let (root, example) = (root(), example(&root(), daemon).expect("an example"));
        let command = daemon.command(&root).expect("a command");
        assert!(parse(command, "example", &example).expect("it is sound").is_empty());
        for arg in keys(command) {
            let line = format!("#{}:", key_of(arg));
            assert!(example.lines().any(|found| found.starts_with(&line)), "{daemon:?} {line}");
        }
    }
}

#[test]
fn what_is_written_is_read_as_it_was_meant_and_left_alone_if_it_agrees() {
    let dir = tempfile::tempdir().expect("a directory");
    let values = ["unix:/run/c.sock", "[fd00::1]:7000", "10.0.0.1:7000"].map(str::to_owned);
    let file = dir.path().join("below/controller.yaml");
    let mut wanted = Wanted {
        daemon: Daemon::Controller,
        file: file.clone(),
        settings: vec![("listen", values.to_vec()), ("site", vec!["null".to_owned()])],
    };
    assert!(wanted.is_missing(&root()).expect("there is none"));
    wanted.write().expect("it is written");
    let told = of_file(root(), Daemon::Controller, &file).expect("it is sound");
    assert_eq!(counts(&told, "listen").values, values);
    assert_eq!(counts(&told, "site").values, ["null"]);
    assert!(!wanted.is_missing(&root()).expect("it agrees"));
    wanted.settings[1].1 = vec!["cloud".to_owned()];
    let problem = wanted.is_missing(&root()).expect_err("it says something else");
    assert!(problem.why.contains("`site` says null, and not cloud"), "{problem}");
}
