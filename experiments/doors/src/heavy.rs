//! Clients that people have, each with one file that is larger than the server's memory, and with many small ones: the
//! server's memory stays what it was.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::clients::{Workspace, all_end, sftp_once};
use crate::results::{Door, Heavy};
use crate::servers::{Servers, text};
use crate::{Sizes, is_interrupted};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Client {
    Curl,
    CurlFtps,
    Sftp,
    Scp,
    Lftp,
    LftpFtps,
    Rclone,
    Perigee,
}

const CLIENTS: [Client; 8] = [
    Client::Curl,
    Client::CurlFtps,
    Client::Sftp,
    Client::Scp,
    Client::Lftp,
    Client::LftpFtps,
    Client::Rclone,
    Client::Perigee,
];

/// Files in each directory of the many.
const IN_DIRECTORY: usize = 1000;

impl Client {
    fn name(self) -> &'static str {
        match self {
            Self::Curl => "curl over HTTP",
            Self::CurlFtps => "curl over FTPS",
            Self::Sftp => "OpenSSH sftp",
            Self::Scp => "OpenSSH scp",
            Self::Lftp => "lftp over SFTP",
            Self::LftpFtps => "lftp over FTPS",
            Self::Rclone => "rclone over WebDAV",
            Self::Perigee => "perigee data",
        }
    }

    fn door(self) -> Door {
        match self {
            Self::Curl => Door::PerigeeHttp,
            Self::Sftp | Self::Scp | Self::Lftp => Door::PerigeeSftp,
            Self::CurlFtps | Self::LftpFtps => Door::PerigeeFtps,
            Self::Rclone => Door::PerigeeWebdav,
            Self::Perigee => Door::PerigeeCli,
        }
    }
}

/// What fails is a result too: the others are measured all the same.
pub fn run(servers: &Servers, work: &Workspace, sizes: Sizes, all: &mut Vec<Heavy>) -> Result<()> {
    work.make(sizes.huge_bytes)?;
    let (huge, got) = (work.file(sizes.huge_bytes), work.path().join("client/got"));
    let many = work.path().join("client/many");
    make_many(&many, sizes.many_files)?;
    let size = format!("{} MiB", sizes.huge_bytes >> 20);
    let count = sizes.many_files;
    for client in CLIENTS {
        servers.make_directory(client.door())?;
        for (what, sent, remote) in
            [(size.clone(), &huge, "bench/huge"), (format!("{count} files"), &many, "bench/many")]
        {
            ensure!(!is_interrupted(), "it was interrupted");
            let put = || send(servers, client, sent, remote);
            all.push(measure(servers, client, format!("put {what}"), put)?);
            let get = || fetch(servers, client, remote, sent, &got);
            let mut fetched = measure(servers, client, format!("get {what}"), get)?;
            if fetched.error.is_none()
                && crate::run("diff", &["-r", text(sent)?, text(&got)?]).is_err()
            {
                fetched.error = Some("what came back is not what was sent".to_owned());
            }
            all.push(fetched);
            if got.is_dir() {
                fs::remove_dir_all(&got)?;
            } else if got.exists() {
                fs::remove_file(&got)?;
            }
        }
        servers.clear(client.door())?;
    }
    Ok(())
}

fn measure(
    servers: &Servers,
    client: Client,
    work: String,
    act: impl Fn() -> Result<()>,
) -> Result<Heavy> {
    let pid = servers.pid(client.door())?;
    // Since Linux 4.0 this resets VmHWM.
    fs::write(format!("/proc/{pid}/clear_refs"), "5")?;
    let before_bytes = memory(pid, "VmRSS")?;
    let begun = Instant::now();
    let error = act().err().map(|error| format!("{error:#}"));
    let (seconds, peak_bytes) = (begun.elapsed().as_secs_f64(), memory(pid, "VmHWM")?);
    let client = client.name().to_owned();
    let (before, peak) = (before_bytes >> 20, peak_bytes >> 20);
    eprintln!(
        "{client}: {work}: {seconds:.1} s; {before} to {peak} MiB{}",
        match &error {
            Some(error) => format!("; it failed: {error}"),
            None => String::new(),
        }
    );
    Ok(Heavy { client, work, seconds, before_bytes, peak_bytes, error })
}

fn make_many(at: &Path, count: usize) -> Result<()> {
    for number in 0..count {
        // Not all in one directory.
        let directory = at.join(format!("d{}", number / IN_DIRECTORY));
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

/// Runs rclone once for each pair, at once, with this controller as `dav:`. One waits 10 ms between two requests, so many
/// small files are sent by several.
fn rclone(servers: &Servers, verb: &str, pairs: &[(String, String)]) -> Result<()> {
    let begin = |(from, to): &(String, String)| -> Result<Child> {
        let mut command = Command::new("rclone");
        command.args(["--config", "/dev/null", verb, from, to]).stdin(Stdio::null());
        command.env("RCLONE_CONFIG_DAV_TYPE", "webdav").env("RCLONE_CONFIG_DAV_VENDOR", "other");
        command.env("RCLONE_CONFIG_DAV_URL", servers.url(Door::PerigeeWebdav));
        command.spawn().context("can't run rclone")
    };
    all_end(pairs.iter().map(begin).collect::<Result<Vec<_>>>()?)
}

/// Connections of one lftp for many small files: it has only one request under way in each.
const LFTP_AT_ONCE: usize = 8;

fn lftp(servers: &Servers, client: Client, script: &str) -> Result<()> {
    let ssh = format!("ssh -a -x {}", servers.ssh_options(Door::PerigeeSftp).join(" "));
    let port = servers.sftp_port();
    let open = match client {
        Client::LftpFtps => servers.lftp_open(Door::PerigeeFtps),
        _ => format!("set sftp:connect-program \"{ssh}\"; open -u bench, sftp://127.0.0.1:{port}"),
    };
    let script = format!("set cmd:fail-exit yes; set net:max-retries 1; {open}; {script}; bye");
    let mut command = Command::new("lftp");
    command.args(["--norc", "-c", &script]).stdin(Stdio::null()).stdout(Stdio::null());
    all_end(vec![command.spawn().context("can't run lftp")?])
}

fn scp(servers: &Servers, from: &str, to: &str) -> Result<()> {
    let mut command = Command::new("scp");
    command.args(servers.ssh_options(Door::PerigeeSftp)).args(["-q", "-r", from, to]);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    all_end(vec![command.spawn().context("can't run scp")?])
}

/// curl has no directories: all files of one, over 50 connections. Over FTP it waits for a second with many of the files, as
/// [`crate::clients`] says, so 10,000 take some minutes.
fn curl_all(
    servers: &Servers,
    client: Client,
    lines: &[(String, String)],
    is_upload: bool,
) -> Result<()> {
    let mut config = servers.curl_login(client.door());
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
        "--ftp-method",
        "nocwd",
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

/// Sends a file, or a directory with all that is in it, which becomes `to`.
fn send(servers: &Servers, client: Client, from: &Path, to: &str) -> Result<()> {
    let (is_directory, local) = (from.is_dir(), text(from)?);
    match client {
        Client::Sftp => {
            // It becomes a directory of its own name.
            let above = to.rsplit_once('/').map_or(".", |(above, _)| above);
            let command = match is_directory {
                true => format!("cd {above}\nput -R {local}\n"),
                false => format!("put {local} {to}\n"),
            };
            all_end(vec![sftp_once(servers, client.door(), &command)?])
        }
        Client::Scp => scp(servers, local, &format!("127.0.0.1:{to}")),
        Client::Lftp | Client::LftpFtps if is_directory => {
            lftp(servers, client, &format!("mirror -R --parallel={LFTP_AT_ONCE} {local} {to}"))
        }
        Client::Lftp | Client::LftpFtps => lftp(servers, client, &format!("put {local} -o {to}")),
        Client::Rclone if is_directory => {
            let pair = |name: &String| (format!("{local}/{name}"), format!("dav:{to}/{name}"));
            rclone(servers, "copy", &names(from)?.iter().map(pair).collect::<Vec<_>>())
        }
        Client::Rclone => rclone(servers, "copyto", &[(local.to_owned(), format!("dav:{to}"))]),
        Client::Perigee => servers.perigee(&["data", "put", local, to]),
        Client::Curl | Client::CurlFtps => {
            curl_all(servers, client, &pairs(servers, client, from, from, to)?, true)
        }
    }
}

/// Fetches what came from `sent`.
fn fetch(servers: &Servers, client: Client, from: &str, sent: &Path, to: &Path) -> Result<()> {
    let (is_directory, local) = (sent.is_dir(), text(to)?);
    match client {
        Client::Sftp => {
            let option = if is_directory { "-R " } else { "" };
            let command = format!("get {option}{from} {local}\n");
            all_end(vec![sftp_once(servers, client.door(), &command)?])
        }
        Client::Scp => scp(servers, &format!("127.0.0.1:{from}"), local),
        Client::Lftp | Client::LftpFtps if is_directory => {
            lftp(servers, client, &format!("mirror --parallel={LFTP_AT_ONCE} {from} {local}"))
        }
        Client::Lftp | Client::LftpFtps => lftp(servers, client, &format!("get {from} -o {local}")),
        Client::Rclone if is_directory => {
            let pair = |name: &String| (format!("dav:{from}/{name}"), format!("{local}/{name}"));
            rclone(servers, "copy", &names(sent)?.iter().map(pair).collect::<Vec<_>>())
        }
        Client::Rclone => rclone(servers, "copyto", &[(format!("dav:{from}"), local.to_owned())]),
        Client::Perigee => servers.perigee(&["data", "get", from, local]),
        Client::Curl | Client::CurlFtps => {
            curl_all(servers, client, &pairs(servers, client, sent, to, from)?, false)
        }
    }
}

/// What is in a directory itself.
fn names(directory: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        names.push(text(Path::new(&entry?.file_name()))?.to_owned());
    }
    Ok(names)
}

/// The addresses below `remote` of a file or of all files of a directory, and their places below `local`.
fn pairs(
    servers: &Servers,
    client: Client,
    sent: &Path,
    local: &Path,
    remote: &str,
) -> Result<Vec<(String, String)>> {
    let url = servers.url(client.door());
    if !sent.is_dir() {
        return Ok(vec![(format!("{url}/{remote}"), text(local)?.to_owned())]);
    }
    let mut pairs = Vec::new();
    for name in below(sent)? {
        pairs.push((format!("{url}/{remote}/{name}"), text(&local.join(&name))?.to_owned()));
    }
    Ok(pairs)
}
