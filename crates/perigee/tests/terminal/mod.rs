//! What guests and other users have written, as commands show it on a terminal. The controller is a few lines here.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::OpenOptionsExt as _;
use std::process::{Command, Stdio};

use nix::fcntl::OFlag;
use nix::pty::{grantpt, posix_openpt, ptsname_r, unlockpt};
use perigee_model::{Problem, job_file};
use serde_json::{Value, json};

use super::DEADLINE;

/// Sets the window's title, and clears the screen.
const ESCAPES: &str = "\u{1b}]0;title\u{7}\u{1b}[2J";
const SHOWN: &str = r"\x1b]0;title\x07\x1b[2J";

/// What a controller answers.
fn answer(path: &str) -> (u16, String) {
    let line = |seq: u64, stream: &str| {
        let line = format!("{stream} {ESCAPES}");
        json!({"seq": seq, "uptime_ms": 0, "stream": stream, "line": line, "arrived_ms": 1})
    };
    match path {
        "/v1/vms/web/console" => (200, format!("console {ESCAPES}")),
        "/v1/jobs/hello-0001" => (200, ended_job().to_string()),
        "/v1/jobs/hello-0001/log?after=0" => {
            (200, json!([line(1, "stdout"), line(2, "stderr")]).to_string())
        }
        "/v1/jobs/hello-0001/log?after=2" => (200, json!([]).to_string()),
        _ => {
            let problem = Problem::not_found(format!("problem {ESCAPES}"), "nobody made it");
            (404, serde_json::to_string(&problem).expect("JSON"))
        }
    }
}

fn ended_job() -> Value {
    let file = job_file::parse("image: debian\ncommand: \"true\"\n", "hello.yaml");
    let spec = file.expect("a job file").spec;
    json!({"id": "hello-0001", "spec": spec, "state": "succeeded", "submitted_ms": 1, "migrations": [],
        "reason": "", "waits": [], "left_out": 0, "members": []})
}

/// Serves until this process ends. Returns where.
fn controller() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a client");
            let lines = BufReader::new(stream.try_clone().expect("a descriptor")).lines();
            // None of these requests has a body.
            let head = lines.map(|line| line.expect("a line")).take_while(|line| !line.is_empty());
            let head: Vec<String> = head.collect();
            let path = head.first().and_then(|line| line.split(' ').nth(1)).expect("a request");
            let (status, body) = answer(path);
            let length = body.len();
            let answer = format!(
                "HTTP/1.1 {status} OK\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
            );
            stream.write_all(answer.as_bytes()).expect("it reads");
        }
    });
    url
}

/// All that a command writes, to a terminal.
fn on_a_terminal(args: &[&str]) -> String {
    let mut master =
        posix_openpt(OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC).expect("a pty");
    grantpt(&master).expect("it is ours");
    unlockpt(&master).expect("it opens");
    let mut open = File::options();
    open.read(true).write(true).custom_flags(nix::libc::O_NOCTTY);
    let terminal = open.open(ptsname_r(&master).expect("a name")).expect("a terminal");
    let home = tempfile::tempdir().expect("a directory");
    let mut command = Command::new("timeout");
    command.arg(DEADLINE.as_secs().to_string()).arg(env!("CARGO_BIN_EXE_perigee")).args(args);
    command.env("PERIGEE_API", controller()).env("HOME", home.path()).stdin(Stdio::null());
    command.stdout(terminal.try_clone().expect("a descriptor")).stderr(terminal);
    let mut child = command.spawn().expect("coreutils' timeout");
    drop(command);
    let mut shown = Vec::new();
    // Only the child has the terminal now: when it has ended and all is read, this fails.
    master.read_to_end(&mut shown).expect_err("nobody else has it");
    child.wait().expect("its end");
    String::from_utf8(shown).expect("a text")
}

#[test]
fn what_a_guest_or_another_user_has_written_reaches_a_terminal_without_control_characters() {
    for (args, expected) in [
        (&["vm", "console", "web", "--log"][..], &["console"][..]),
        (&["job", "log", "hello-0001"], &["stdout", "stderr"]),
        (&["vm", "info", "web"], &["problem"]),
    ] {
        let shown = on_a_terminal(args);
        for written in expected {
            assert!(shown.contains(&format!("{written} {SHOWN}")), "{args:?}: {shown:?}");
        }
        let is_harmless = |c: char| !c.is_control() || matches!(c, '\r' | '\n' | '\t');
        assert!(shown.chars().all(is_harmless), "{args:?}: {shown:?}");
    }
}
