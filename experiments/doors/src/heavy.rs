//! Clients that people have, each with one file that is larger than the server's memory, and with many small ones: the
//! server's memory stays what it was.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::Sizes;
use crate::clients::{Workspace, all_end, sftp_once};
use crate::results::{Door, Heavy};
use crate::servers::{Servers, text};

const CLIENTS: [(&str, Door); 3] = [
    ("curl over HTTP", Door::PerigeeHttp),
    ("OpenSSH sftp", Door::PerigeeSftp),
    ("rclone over WebDAV", Door::PerigeeWebdav),
];

pub fn run(servers: &Servers, work: &Workspace, sizes: Sizes) -> Result<Vec<Heavy>> {
    work.make(sizes.huge_bytes)?;
    let (huge, got) = (work.file(sizes.huge_bytes), work.path().join("client/got"));
    let many = work.path().join("client/many");
    make_many(&many, sizes.many_files)?;
    let mut all = Vec::new();
    for (client, door) in CLIENTS {
        servers.make_directory(door)?;
        let mut measure = |what: String, act: &dyn Fn() -> Result<()>| -> Result<()> {
            let pid = servers.perigee_pid()?;
            // Since Linux 4.0 this resets VmHWM.
            fs::write(format!("/proc/{pid}/clear_refs"), "5")?;
            let before_bytes = memory(pid, "VmRSS")?;
            let begun = Instant::now();
            act().with_context(|| format!("{client}: {what}"))?;
            let (seconds, peak_bytes) = (begun.elapsed().as_secs_f64(), memory(pid, "VmHWM")?);
            eprintln!(
                "{client}: {what}: {seconds:.1} s; {} to {} MiB",
                before_bytes >> 20,
                peak_bytes >> 20
            );
            let (client, work) = (client.to_owned(), what);
            all.push(Heavy { client, work, seconds, before_bytes, peak_bytes });
            Ok(())
        };
        let size = format!("{} MiB", sizes.huge_bytes >> 20);
        measure(format!("put {size}"), &|| send(servers, door, &huge, "bench/huge"))?;
        measure(format!("get {size}"), &|| fetch(servers, door, "bench/huge", &got))?;
        crate::run("cmp", &[text(&huge)?, text(&got)?])?;
        fs::remove_file(&got)?;
        let count = sizes.many_files;
        measure(format!("put {count} files"), &|| send(servers, door, &many, "bench"))?;
        measure(format!("get {count} files"), &|| fetch(servers, door, "bench/many", &got))?;
        crate::run("diff", &["-r", text(&many)?, text(&got)?])?;
        fs::remove_dir_all(&got)?;
        servers.clear(door)?;
    }
    Ok(all)
}

fn make_many(at: &Path, count: usize) -> Result<()> {
    for number in 0..count {
        // Not all in one directory.
        let directory = at.join(format!("d{}", number / 1000));
        fs::create_dir_all(&directory)?;
        fs::write(
            directory.join(format!("f{number}")),
            format!("file {number}\n").repeat(number % 50),
        )?;
    }
    Ok(())
}

/// A line of `/proc/PID/status`.
fn memory(pid: u32, name: &str) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib = line.and_then(|line| line.split_whitespace().next()).context("no such line")?;
    Ok(kib.parse::<u64>()? << 10)
}

/// rclone with this controller as `dav:`.
fn rclone(servers: &Servers, arguments: &[&str]) -> Result<()> {
    let mut command = Command::new("rclone");
    command.args(["--config", "/dev/null"]).args(arguments).stdin(Stdio::null());
    command.env("RCLONE_CONFIG_DAV_TYPE", "webdav").env("RCLONE_CONFIG_DAV_VENDOR", "other");
    command.env("RCLONE_CONFIG_DAV_URL", servers.url(Door::PerigeeWebdav));
    all_end(vec![command.spawn().context("can't run rclone")?])
}

/// curl has no directories: all files of one, over some connections.
fn curl_all(lines: &[(String, String)], is_upload: bool) -> Result<()> {
    let mut config = String::new();
    for (url, file) in lines {
        let option = if is_upload { "upload-file" } else { "output" };
        config.push_str(&format!("url = \"{url}\"\n{option} = \"{file}\"\n"));
        if is_upload {
            config.push_str("output = /dev/null\n");
        }
    }
    let mut command = Command::new("curl");
    command.args([
        "--disable",
        "-sS",
        "-f",
        "--no-progress-meter",
        "--create-dirs",
        "--parallel",
        "-K",
        "-",
    ]);
    let mut child = command.stdin(Stdio::piped()).spawn().context("can't run curl")?;
    let mut stdin = child.stdin.take().context("it has one")?;
    std::io::Write::write_all(&mut stdin, config.as_bytes())?;
    drop(stdin);
    all_end(vec![child])
}

/// The files below a directory, from there.
fn below(directory: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let mut left = vec![directory.to_owned()];
    while let Some(at) = left.pop() {
        for entry in fs::read_dir(at)? {
            let path = entry?.path();
            match path.is_dir() {
                true => left.push(path),
                false => found.push(text(path.strip_prefix(directory)?)?.to_owned()),
            }
        }
    }
    Ok(found)
}

/// A file becomes `to`, and a directory goes below it.
fn send(servers: &Servers, door: Door, from: &Path, to: &str) -> Result<()> {
    let is_directory = from.is_dir();
    match door {
        Door::PerigeeSftp if is_directory => {
            all_end(vec![sftp_once(servers, door, &format!("cd {to}\nput -R {}\n", text(from)?))?])
        }
        Door::PerigeeSftp => {
            all_end(vec![sftp_once(servers, door, &format!("put {} {to}\n", text(from)?))?])
        }
        Door::PerigeeWebdav if is_directory => {
            rclone(servers, &["copy", text(from)?, &format!("dav:{to}/many")])
        }
        Door::PerigeeWebdav => rclone(servers, &["copyto", text(from)?, &format!("dav:{to}")]),
        _ => {
            let url = servers.url(door);
            let names = if is_directory { below(from)? } else { vec![String::new()] };
            let line = |name: &String| match is_directory {
                true => Ok((format!("{url}/{to}/many/{name}"), text(&from.join(name))?.to_owned())),
                false => Ok((format!("{url}/{to}"), text(from)?.to_owned())),
            };
            curl_all(&names.iter().map(line).collect::<Result<Vec<_>>>()?, true)
        }
    }
}

fn fetch(servers: &Servers, door: Door, from: &str, to: &Path) -> Result<()> {
    let is_directory = from.ends_with("many");
    match door {
        Door::PerigeeSftp => {
            let option = if is_directory { "-R " } else { "" };
            all_end(vec![sftp_once(servers, door, &format!("get {option}{from} {}\n", text(to)?))?])
        }
        Door::PerigeeWebdav => {
            let verb = if is_directory { "copy" } else { "copyto" };
            rclone(servers, &[verb, &format!("dav:{from}"), text(to)?])
        }
        _ => {
            let url = servers.url(door);
            let names =
                if is_directory { below(&to.with_file_name("many"))? } else { vec![String::new()] };
            ensure!(!names.is_empty(), "there are files");
            let line = |name: &String| match is_directory {
                true => Ok((format!("{url}/{from}/{name}"), text(&to.join(name))?.to_owned())),
                false => Ok((format!("{url}/{from}"), text(to)?.to_owned())),
            };
            curl_all(&names.iter().map(line).collect::<Result<Vec<_>>>()?, false)
        }
    }
}
