//! Whether the command's program can be started, and if not, why: the kernel and a shell say of a script whose interpreter is
//! missing that the script is not there.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// Where programs are looked for, unless the job's environment says otherwise.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// As shells report them.
const NOT_FOUND: i32 = 127;
const NOT_EXECUTABLE: i32 = 126;

/// Linux reads no more of a script's first line.
const FIRST_LINE_BYTES_MAX: u64 = 256;

const SHELLS: [&str; 5] = ["sh", "bash", "dash", "ash", "zsh"];

/// What the person who submitted the job is told.
#[derive(Debug, PartialEq, Eq)]
pub enum Finding {
    /// It starts.
    Fine,
    /// It starts, and something may be wrong with it.
    Doubt(String),
    /// It can't be started; the command ends with this code.
    Wrong(i32, String),
}

/// Looks at the program as the kernel will.
pub fn look(command: &[String], env: &BTreeMap<String, String>, directory: &Path) -> Finding {
    let Some(program) = command.first() else { return Finding::Fine };
    let search = env.get("PATH").map_or(PATH, String::as_str);
    let Some(path) = find(program, search, directory) else {
        let place = match program.contains('/') {
            true => String::new(),
            false => format!(": it is in none of the directories of PATH ({search})"),
        };
        return Finding::Wrong(NOT_FOUND, format!("there is no program {program}{place}"));
    };
    if path.is_dir() {
        return Finding::Wrong(NOT_EXECUTABLE, format!("{program} is a directory"));
    }
    if !is_executable(&path) {
        let next = format!(
            "make it executable (chmod +x), or name its interpreter: command: [/bin/sh, {program}]"
        );
        return Finding::Wrong(NOT_EXECUTABLE, format!("{program} is not executable; {next}"));
    }
    let first = first_line(&path);
    if let Some(interpreter) = first.strip_prefix("#!") {
        if first.ends_with('\r') {
            return Finding::Wrong(NOT_FOUND, windows(program));
        }
        let interpreter = interpreter.split_whitespace().next().unwrap_or_default();
        if !directory.join(interpreter).exists() {
            let why =
                format!("{program} is to be run by {interpreter}, which is not in this image");
            return Finding::Wrong(NOT_FOUND, why);
        }
    }
    let is_shell = path.file_name().is_some_and(|name| SHELLS.iter().any(|shell| name == *shell));
    match command.get(1).filter(|script| is_shell && !script.starts_with('-')) {
        Some(script) if first_line(&directory.join(script)).ends_with('\r') => {
            Finding::Doubt(windows(script))
        }
        _ => Finding::Fine,
    }
}

fn windows(script: &str) -> String {
    format!(
        "{script} has the line ends of Windows (CR LF), and the CR is taken for a part of each line; \
         convert it: sed -i 's/\\r$//' FILE"
    )
}

/// As a shell looks for it.
fn find(program: &str, search: &str, directory: &Path) -> Option<PathBuf> {
    if program.contains('/') {
        return Some(directory.join(program)).filter(|path| path.exists());
    }
    let places = search.split(':').map(|place| directory.join(place).join(program));
    let mut found = places.filter(|path| path.is_file());
    let first = found.next()?;
    if is_executable(&first) {
        return Some(first);
    }
    found.find(|path| is_executable(path)).or(Some(first))
}

fn is_executable(path: &Path) -> bool {
    path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// The first line without its LF; empty if there is none, or if it is no text.
fn first_line(path: &Path) -> String {
    let mut begin = Vec::new();
    // A FIFO would wait for a writer.
    if !path.is_file() {
        return String::new();
    }
    let read =
        File::open(path).and_then(|file| file.take(FIRST_LINE_BYTES_MAX).read_to_end(&mut begin));
    match (read, begin.iter().position(|byte| *byte == b'\n')) {
        (Ok(_), Some(end)) => String::from_utf8(begin[..end].to_vec()).unwrap_or_default(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory() -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a directory");
        for (name, text, mode) in [
            ("good", "#!/bin/sh\necho\n", 0o755),
            ("windows", "#!/bin/sh\r\necho\r\n", 0o755),
            ("plain", "echo\n", 0o644),
            ("python", "#!/opt/none/python\n", 0o755),
        ] {
            let path = dir.path().join(name);
            std::fs::write(&path, text).expect("a file");
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))
                .expect("its mode");
        }
        dir
    }

    fn at(dir: &Path, command: &[&str]) -> Finding {
        let command: Vec<String> = command.iter().map(|word| (*word).to_owned()).collect();
        look(&command, &BTreeMap::new(), dir)
    }

    #[test]
    fn a_program_that_cannot_start_is_named_with_the_reason() {
        let dir = directory();
        let wrong = |command: &[&str], code: i32, part: &str| match at(dir.path(), command) {
            Finding::Wrong(found, why) => {
                assert!(found == code && why.contains(part), "{command:?}: {found} {why}");
            }
            other => panic!("{command:?}: {other:?}"),
        };
        wrong(&["no-such-program"], 127, "there is no program no-such-program: it is in none");
        wrong(&["./missing"], 127, "there is no program ./missing");
        wrong(&["./windows"], 127, "line ends of Windows");
        wrong(&["./plain"], 126, "chmod +x");
        wrong(&["./python"], 127, "run by /opt/none/python");
        wrong(&["/"], 126, "directory");
        assert_eq!(at(dir.path(), &["./good"]), Finding::Fine);
        assert_eq!(at(dir.path(), &["/bin/sh", "-c", "x"]), Finding::Fine);
        assert_eq!(at(dir.path(), &["sh", "good"]), Finding::Fine);
    }

    #[test]
    fn a_script_with_line_ends_of_windows_is_told_of_also_where_a_shell_is_named() {
        let dir = directory();
        assert!(matches!(at(dir.path(), &["sh", "windows"]), Finding::Doubt(_)));
    }

    #[test]
    fn programs_are_looked_for_in_the_jobs_own_path() {
        let dir = directory();
        let own = dir.path().display().to_string();
        let env = BTreeMap::from([("PATH".to_owned(), own)]);
        assert_eq!(look(&["good".to_owned()], &env, Path::new("/")), Finding::Fine);
    }
}
