//! What the clients do: curl for HTTP, WebDAV and FTP, OpenSSH's sftp, and the `perigee` command.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::Sizes;
use crate::is_interrupted;
use crate::results::{Door, LoadName};
use crate::servers::{Servers, text};

/// How long the clients of one transfer may take.
const TRANSFER_MAX: Duration = Duration::from_secs(1800);

/// A directory that goes with this.
pub struct Workspace(PathBuf);

impl Workspace {
    pub fn new(above: &Path) -> Result<Self> {
        let path =
            std::path::absolute(above)?.join(format!("perigee-doors-{}", std::process::id()));
        fs::create_dir_all(path.join("client"))?;
        Ok(Self(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// A file of random bytes, which all clients send.
    pub fn file(&self, bytes: u64) -> PathBuf {
        self.0.join("client").join(format!("file-{bytes}"))
    }

    /// What a client of the `perigee` command fetches goes to the disk.
    fn got(&self, client: usize) -> PathBuf {
        self.0.join("client").join(format!("got-{client}"))
    }

    /// The directory that such a client sends, if it sends several files.
    fn directory(&self, load: &Load) -> PathBuf {
        self.0.join("client").join(format!("directory-{}", load.each))
    }

    pub fn prepare(&self, load: &Load) -> Result<()> {
        self.make(load.file_bytes)?;
        if load.each > 1 {
            let directory = self.directory(load);
            fs::create_dir_all(&directory)?;
            for number in 0..load.each {
                fs::copy(self.file(load.file_bytes), directory.join(number.to_string()))?;
            }
        }
        Ok(())
    }

    /// Removes what was fetched.
    pub fn clear(&self, load: &Load) -> Result<()> {
        for got in (0..load.clients).map(|client| self.got(client)) {
            if got.is_dir() {
                fs::remove_dir_all(got)?;
            } else if got.exists() {
                fs::remove_file(got)?;
            }
        }
        Ok(())
    }

    pub fn make(&self, bytes: u64) -> Result<()> {
        let file = self.file(bytes);
        if file.exists() {
            return Ok(());
        }
        let mut random = fs::File::open("/dev/urandom")?;
        let mut to = fs::File::create(file)?;
        std::io::copy(&mut std::io::Read::take(&mut random, bytes), &mut to)?;
        Ok(())
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("can't remove {}: {error}", self.0.display());
        }
    }
}

/// What some clients do at once: each sends or fetches some files of one length.
pub struct Load {
    pub name: LoadName,
    pub clients: usize,
    pub each: usize,
    pub file_bytes: u64,
}

impl Load {
    pub fn all(sizes: Sizes) -> [Self; 3] {
        [
            Self { name: LoadName::OneLarge, clients: 1, each: 1, file_bytes: sizes.large_bytes },
            Self {
                name: LoadName::SixtyFour,
                clients: 64,
                each: 1,
                file_bytes: sizes.medium_bytes,
            },
            Self { name: LoadName::Small, clients: 8, each: sizes.small_files, file_bytes: 4096 },
        ]
    }

    pub fn files(&self) -> u64 {
        (self.clients * self.each) as u64
    }

    pub fn bytes(&self) -> u64 {
        self.files() * self.file_bytes
    }
}

/// Lets all clients of a load send or fetch their files, and waits for them.
pub fn transfer(
    servers: &Servers,
    work: &Workspace,
    door: Door,
    load: &Load,
    is_upload: bool,
) -> Result<()> {
    if is_upload {
        servers.make_directory(door)?;
    }
    let file = work.file(load.file_bytes);
    let mut clients = Vec::new();
    for client in 0..load.clients {
        let names: Vec<String> = (0..load.each).map(|n| format!("bench/c{client}-{n}")).collect();
        let batch = work.path().join("client").join(format!("batch-{client}"));
        clients.push(match door {
            Door::PerigeeSftp | Door::OpensshSftp => {
                sftp(servers, door, &batch, &names, &file, is_upload)?
            }
            Door::PerigeeCli => {
                let from = if load.each > 1 { work.directory(load) } else { file.clone() };
                let to = format!("bench/c{client}");
                let got = work.got(client);
                let arguments = match is_upload {
                    true => ["data", "put", text(&from)?, to.as_str()],
                    false => ["data", "get", to.as_str(), text(&got)?],
                };
                servers.command(&arguments).spawn().context("can't run perigee")?
            }
            Door::PerigeeFtps | Door::Vsftpd | Door::VsftpdFtps if load.each > 1 => {
                lftp(servers, door, &batch, &names, &file, is_upload)?
            }
            _ => curl(servers, door, &batch, &names, &file, is_upload)?,
        });
    }
    all_end(clients)
}

/// One curl sends or fetches all files over one connection.
fn curl(
    servers: &Servers,
    door: Door,
    batch: &Path,
    names: &[String],
    file: &Path,
    is_upload: bool,
) -> Result<Child> {
    let (url, login) = (servers.url(door), servers.curl_login(door));
    let mut config = format!("silent\nshow-error\nfail\n{login}");
    for name in names {
        // Writing to a String cannot fail.
        let _ = writeln!(config, "url = \"{url}/{name}\"");
        let _ = match is_upload {
            true => writeln!(config, "upload-file = \"{}\"\noutput = /dev/null", text(file)?),
            false => writeln!(config, "output = /dev/null"),
        };
    }
    fs::write(batch, config)?;
    let mut command = Command::new("curl");
    command.args(["--disable", "-K", text(batch)?]).stdin(Stdio::null());
    command.spawn().context("can't run curl")
}

/// The same with lftp. curl 7.88 waits for a second whenever the answer to EPSV is there before it looks for it, which
/// happens on the loopback interface only, and then measures nothing else.
fn lftp(
    servers: &Servers,
    door: Door,
    batch: &Path,
    names: &[String],
    file: &Path,
    is_upload: bool,
) -> Result<Child> {
    let mut commands = format!(
        "set cmd:fail-exit yes\nset net:max-retries 1\nset xfer:clobber yes\n{}\n",
        servers.lftp_open(door)
    );
    for name in names {
        let _ = match is_upload {
            true => writeln!(commands, "put {} -o {name}", text(file)?),
            false => writeln!(commands, "get {name} -o /dev/null"),
        };
    }
    fs::write(batch, commands)?;
    let mut command = Command::new("lftp");
    command.args(["--norc", "-f", text(batch)?]).stdin(Stdio::null()).stdout(Stdio::null());
    command.spawn().context("can't run lftp")
}

fn sftp(
    servers: &Servers,
    door: Door,
    batch: &Path,
    names: &[String],
    file: &Path,
    is_upload: bool,
) -> Result<Child> {
    let mut commands = String::new();
    for name in names {
        let _ = match is_upload {
            true => writeln!(commands, "put {} {name}", text(file)?),
            false => writeln!(commands, "get {name} /dev/null"),
        };
    }
    fs::write(batch, commands)?;
    sftp_with(servers, door, fs::File::open(batch)?.into())
}

/// OpenSSH's sftp with commands from somewhere.
pub fn sftp_with(servers: &Servers, door: Door, commands: Stdio) -> Result<Child> {
    let mut command = Command::new("sftp");
    command.args(servers.ssh_options(door)).args(["-q", "-b", "-", "127.0.0.1"]);
    // What it says of a server that is killed is no news.
    command.stdin(commands).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().context("can't run sftp")
}

/// Runs one sftp.
pub fn sftp_once(servers: &Servers, door: Door, commands: &str) -> Result<Child> {
    let mut child = sftp_with(servers, door, Stdio::piped())?;
    let mut stdin = child.stdin.take().context("it has one")?;
    stdin.write_all(commands.as_bytes())?;
    Ok(child)
}

/// Waits until all have ended well.
pub fn all_end(mut clients: Vec<Child>) -> Result<()> {
    let late = Instant::now() + TRANSFER_MAX;
    let mut ended = Ok(());
    for client in &mut clients {
        if let Err(error) = ends(client, late) {
            // The others are stopped too, by their ids.
            let _ = client.kill();
            let _ = client.wait();
            ended = Err(error);
        }
    }
    ended
}

fn ends(client: &mut Child, late: Instant) -> Result<()> {
    loop {
        if let Some(status) = client.try_wait()? {
            ensure!(status.success(), "a client failed: {status}");
            return Ok(());
        }
        if is_interrupted() {
            bail!("it was interrupted");
        }
        if Instant::now() > late {
            bail!("a client has not ended within {} s", TRANSFER_MAX.as_secs());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
