//! The servers, each with its own directory on the same disk. All end with this process, by their ids.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use perigee_http::unused_port;

use crate::results::Door;

/// How much data the controller may have in memory. The stacks of its threads count, of which little is ever touched:
/// 64 clients at once need 160 threads with 2 MiB each.
pub const MEMORY_BYTES: u64 = 1 << 30;

/// The FTPS gateway, from the workspace's directory.
const GATEWAY: &str = "gateways/ftps/perigee-ftps";
const START_MAX: Duration = Duration::from_secs(60);
const STOP_MAX: Duration = Duration::from_secs(10);

pub struct Servers {
    dir: PathBuf,
    program: PathBuf,
    perigee: Option<Child>,
    others: Vec<Child>,
    /// Of Perigee's HTTP and SFTP, nginx, vsftpd and OpenSSH, Perigee's FTPS, and vsftpd with TLS.
    ports: [u16; 7],
    /// Of the user in whose name FTPS is used.
    token: String,
    /// The process that serves it.
    gateway_pid: u32,
}

impl Drop for Servers {
    fn drop(&mut self) {
        if let Some(perigee) = &mut self.perigee
            && let Ok(Some(status)) = perigee.try_wait()
        {
            let log = fs::read_to_string(self.dir.join("perigee.log")).unwrap_or_default();
            eprintln!("perigee ended by itself: {status}\n{log}");
        }
        for mut child in self.others.drain(..).chain(self.perigee.take()) {
            // nginx ends its workers only if it is asked to end.
            let late = Instant::now() + STOP_MAX;
            let _ = crate::run("kill", &["-TERM", &child.id().to_string()]);
            while Instant::now() < late && matches!(child.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(20));
            }
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn program(name: &str) -> String {
    let in_sbin = format!("/usr/sbin/{name}");
    if Path::new(&in_sbin).exists() { in_sbin } else { name.to_owned() }
}

/// What the others say of their versions: on standard error, if anywhere.
pub fn versions() -> BTreeMap<String, String> {
    let mut versions = BTreeMap::new();
    for (name, arguments) in [("nginx", "-v"), ("vsftpd", "-v"), ("ssh", "-V")] {
        let said = Command::new(program(name)).arg(arguments).stdin(Stdio::null()).output();
        let Ok(said) = said else { continue };
        let text = [said.stdout, said.stderr].concat();
        let line = String::from_utf8_lossy(&text).lines().next().unwrap_or_default().to_owned();
        versions.insert(name.to_owned(), line);
    }
    versions
}

impl Servers {
    pub fn start(perigee: &Path, dir: &Path) -> Result<Self> {
        let ports = std::array::from_fn(|_| unused_port());
        let program = std::path::absolute(perigee)?;
        let mut servers = Self {
            dir: dir.to_owned(),
            program,
            perigee: None,
            others: Vec::new(),
            ports,
            token: String::new(),
            gateway_pid: 0,
        };
        for part in [
            "home",
            "perigee",
            "nginx/files",
            "nginx/temp",
            "vsftpd/files",
            "vsftpd/empty",
            "ssh/files",
        ] {
            fs::create_dir_all(dir.join(part))?;
        }
        servers.make_keys()?;
        servers.start_perigee()?;
        servers.let_user_in()?;
        for (name, arguments, port) in [
            servers.nginx()?,
            servers.vsftpd(false)?,
            servers.openssh()?,
            servers.vsftpd(true)?,
            servers.gateway()?,
        ] {
            let short = name.rsplit('/').next().unwrap_or(name);
            let log = fs::File::create(dir.join(format!("{short}.log")))?;
            let mut command = Command::new(self::program(name));
            command.args(&arguments).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
            servers.others.push(command.spawn().with_context(|| format!("can't start {name}"))?);
            listens(name, port)?;
        }
        servers.gateway_pid = servers.others.last().context("it runs")?.id();
        Ok(servers)
    }

    fn make_keys(&self) -> Result<()> {
        for name in ["user", "host"] {
            let file = self.dir.join("ssh").join(name);
            crate::run("ssh-keygen", &["-q", "-t", "ed25519", "-N", "", "-f", text(&file)?])?;
        }
        let (key, certificate) = (self.dir.join("tls.key"), self.dir.join("tls.pem"));
        let words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 \
                     -subj /CN=files -addext subjectAltName=IP:127.0.0.1";
        let mut make: Vec<&str> = words.split_whitespace().collect();
        make.extend(["-keyout", text(&key)?, "-out", text(&certificate)?]);
        crate::run("openssl", &make)
    }

    /// Starts it again, if it was killed.
    pub fn start_perigee(&mut self) -> Result<()> {
        let state = self.dir.join("perigee");
        let limit = format!("--data={MEMORY_BYTES}");
        let log =
            fs::File::options().create(true).append(true).open(self.dir.join("perigee.log"))?;
        let mut command = Command::new("prlimit");
        command.args([limit.as_str(), "--"]).arg(&self.program);
        command.args(["controller", "run", "--insecure", "--state", text(&state)?]);
        command.args([
            "--listen",
            &self.api(),
            "--listen",
            &format!("127.0.0.1:{}", self.ports[0]),
        ]);
        command.args(["--sftp", &format!("127.0.0.1:{}", self.ports[1])]);
        command.env("PERIGEE_LOG", "warn").env("HOME", self.dir.join("home"));
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.perigee = Some(command.spawn().context("can't start perigee")?);
        listens("perigee", self.ports[0])?;
        listens("perigee's SFTP", self.ports[1])
    }

    /// SIGKILL.
    pub fn kill_perigee(&mut self) -> Result<()> {
        let mut child = self.perigee.take().context("it runs")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    fn api(&self) -> String {
        format!("unix:{}", self.dir.join("api.sock").display())
    }

    /// The `perigee` command at this controller.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(arguments).env("PERIGEE_API", self.api()).env("HOME", self.dir.join("home"));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    }

    /// Runs it to its end.
    pub fn perigee(&self, arguments: &[&str]) -> Result<()> {
        let ended = self.command(arguments).status()?;
        ensure!(ended.success(), "perigee {}: {ended}", arguments.join(" "));
        Ok(())
    }

    fn let_user_in(&mut self) -> Result<()> {
        let key = self.dir.join("ssh/user.pub");
        let user = "default/bench";
        self.perigee(&["user", "add", user, "--role", "member"])?;
        self.perigee(&["user", "key", "add", "bench", text(&key)?, "--user", user])?;
        let mut make = self.command(&["token", "create", "--user", user]);
        let made = make.stdout(Stdio::piped()).output()?;
        ensure!(made.status.success(), "perigee token create: {}", made.status);
        self.token = String::from_utf8(made.stdout)?.trim().to_owned();
        Ok(())
    }

    fn gateway(&self) -> Result<(&'static str, Vec<String>, u16)> {
        let [http, .., ftps, _] = self.ports;
        let words = format!("--api http://127.0.0.1:{http} --listen 127.0.0.1:{ftps}");
        let mut arguments: Vec<String> = words.split(' ').map(str::to_owned).collect();
        let (key, certificate) = (self.dir.join("tls.key"), self.dir.join("tls.pem"));
        arguments
            .extend(["--key", text(&key)?, "--cert", text(&certificate)?].map(ToOwned::to_owned));
        Ok((GATEWAY, arguments, ftps))
    }

    fn nginx(&self) -> Result<(&'static str, Vec<String>, u16)> {
        let (at, port) = (self.dir.join("nginx"), self.ports[2]);
        let conf = format!(
            "daemon off; user root; worker_processes auto; pid {at}/pid; error_log {at}/error.log;\n\
             events {{ worker_connections 1024; }}\n\
             http {{\n  access_log off; sendfile on; client_max_body_size 0; client_body_temp_path {at}/temp;\n  \
             proxy_temp_path {at}/p; fastcgi_temp_path {at}/f; uwsgi_temp_path {at}/u; scgi_temp_path {at}/s;\n  \
             server {{\n    listen 127.0.0.1:{port}; root {at}/files;\n    \
             location / {{ dav_methods PUT DELETE MKCOL; create_full_put_path on; }}\n  }}\n}}\n",
            at = at.display()
        );
        let file = at.join("nginx.conf");
        fs::write(&file, conf)?;
        let arguments = ["-p", text(&at)?, "-c", text(&file)?].map(str::to_owned);
        Ok(("nginx", arguments.into(), port))
    }

    /// Anonymous users are one with a home that exists, and whose root directory is not its own.
    fn vsftpd(&self, with_tls: bool) -> Result<(&'static str, Vec<String>, u16)> {
        let at = self.dir.join("vsftpd");
        let (name, port) = match with_tls {
            true => ("tls.conf", self.ports[6]),
            false => ("plain.conf", self.ports[3]),
        };
        let tls = format!(
            "ssl_enable=YES\nallow_anon_ssl=YES\nforce_anon_logins_ssl=YES\nforce_anon_data_ssl=YES\n\
             require_ssl_reuse=NO\nssl_ciphers=HIGH\nrsa_cert_file={dir}/tls.pem\nrsa_private_key_file={dir}/tls.key\n",
            dir = self.dir.display()
        );
        let mut conf = format!(
            "listen=YES\nlisten_address=127.0.0.1\nlisten_port={port}\nbackground=NO\nlocal_enable=NO\n\
             anonymous_enable=YES\nno_anon_password=YES\nftp_username=daemon\nanon_root={at}/files\n\
             write_enable=YES\nanon_upload_enable=YES\nanon_mkdir_write_enable=YES\nanon_other_write_enable=YES\nanon_umask=022\n\
             anon_world_readable_only=NO\nseccomp_sandbox=NO\nsecure_chroot_dir={at}/empty\nmax_clients=0\nmax_per_ip=0\n\
             xferlog_enable=NO\nconnect_from_port_20=NO\n",
            at = at.display()
        );
        if with_tls {
            conf.push_str(&tls);
        }
        let file = at.join(name);
        fs::write(&file, conf)?;
        Ok(("vsftpd", vec![text(&file)?.to_owned()], port))
    }

    fn openssh(&self) -> Result<(&'static str, Vec<String>, u16)> {
        let (at, port) = (self.dir.join("ssh"), self.ports[4]);
        fs::create_dir_all("/run/sshd")?;
        let conf = format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {at}/host\nPidFile none\nAuthorizedKeysFile {at}/user.pub\n\
             StrictModes no\nPermitRootLogin yes\nUsePAM no\nPasswordAuthentication no\nMaxStartups 200:30:300\n\
             Subsystem sftp internal-sftp -d {at}/files\n",
            at = at.display()
        );
        let file = at.join("sshd.conf");
        fs::write(&file, conf)?;
        let arguments = ["-D", "-e", "-f", text(&file)?].map(str::to_owned);
        Ok(("sshd", arguments.into(), port))
    }

    /// What curl begins an address with.
    pub fn url(&self, door: Door) -> String {
        let [http, _, nginx, ftp, _, ftps, vsftpd_ftps] = self.ports;
        match door {
            Door::PerigeeHttp | Door::PerigeeSftp | Door::PerigeeCli => {
                format!("http://127.0.0.1:{http}/v1/data/default")
            }
            Door::PerigeeWebdav => format!("http://127.0.0.1:{http}/dav/default"),
            Door::NginxWebdav => format!("http://127.0.0.1:{nginx}"),
            Door::PerigeeFtps => format!("ftp://127.0.0.1:{ftps}"),
            Door::Vsftpd => format!("ftp://127.0.0.1:{ftp}"),
            Door::VsftpdFtps => format!("ftp://127.0.0.1:{vsftpd_ftps}"),
            Door::OpensshSftp => String::new(),
        }
    }

    /// What curl is to be told of a login, as lines of its configuration.
    pub fn curl_login(&self, door: Door) -> String {
        let tls = format!("ssl-reqd\ncacert = \"{}\"\n", self.certificate().display());
        match door {
            Door::PerigeeFtps => format!("{tls}user = \"bench:{}\"\n", self.token),
            // With TLS 1.3, vsftpd 3.0.3 now and then takes the end of an upload for a failure (426).
            Door::VsftpdFtps => format!("{tls}tls-max = 1.2\n"),
            _ => String::new(),
        }
    }

    /// The certificate of both FTPS servers.
    pub fn certificate(&self) -> PathBuf {
        self.dir.join("tls.pem")
    }

    /// What lftp is told to reach one of the doors for FTP.
    pub fn lftp_open(&self, door: Door) -> String {
        let user = match door {
            Door::PerigeeFtps => format!("bench,{}", self.token),
            _ => "anonymous,any".to_owned(),
        };
        let tls = match door {
            Door::Vsftpd => "set ftp:ssl-allow no".to_owned(),
            _ => format!(
                "set ftp:ssl-force yes; set ftp:ssl-protect-data yes; set ssl:ca-file {}",
                self.certificate().display()
            ),
        };
        // As with curl.
        let version = match door {
            Door::VsftpdFtps => "set ssl:priority NORMAL:-VERS-TLS1.3; ",
            _ => "",
        };
        format!("{version}{tls}; open -u {user} {}", self.url(door))
    }

    /// Where SFTP of Perigee listens.
    pub fn sftp_port(&self) -> u16 {
        self.ports[1]
    }

    /// What OpenSSH's sftp is to know of one of the two.
    pub fn ssh_options(&self, door: Door) -> Vec<String> {
        let [_, ours, _, _, theirs, ..] = self.ports;
        let (port, user) =
            if door == Door::PerigeeSftp { (ours, "bench") } else { (theirs, "root") };
        let at = self.dir.join("ssh");
        vec![
            format!("-oPort={port}"),
            format!("-oIdentityFile={}", at.join("user").display()),
            format!("-oUserKnownHostsFile={}", at.join("known").display()),
            "-oIdentitiesOnly=yes".to_owned(),
            "-oStrictHostKeyChecking=no".to_owned(),
            "-oLogLevel=ERROR".to_owned(),
            "-oBatchMode=yes".to_owned(),
            format!("-oUser={user}"),
        ]
    }

    /// Removes what was uploaded at a door.
    pub fn clear(&self, door: Door) -> Result<()> {
        let at = match door {
            Door::NginxWebdav => "nginx/files",
            Door::Vsftpd | Door::VsftpdFtps => "vsftpd/files",
            Door::OpensshSftp => "ssh/files",
            _ => return self.perigee(&["data", "delete", "bench", "--recursive"]),
        };
        let at = self.dir.join(at);
        for entry in fs::read_dir(at)? {
            let path = entry?.path();
            if path.is_dir() { fs::remove_dir_all(path)? } else { fs::remove_file(path)? }
        }
        Ok(())
    }

    /// Makes the directory that all files go to.
    pub fn make_directory(&self, door: Door) -> Result<()> {
        match door {
            Door::NginxWebdav => fs::create_dir_all(self.dir.join("nginx/files/bench"))?,
            Door::OpensshSftp => fs::create_dir_all(self.dir.join("ssh/files/bench"))?,
            Door::Vsftpd | Door::VsftpdFtps => {
                let at = self.dir.join("vsftpd/files/bench");
                fs::create_dir_all(&at)?;
                fs::set_permissions(at, fs::Permissions::from_mode(0o777))?;
            }
            _ => {
                let url = format!("{}/bench?directory", self.url(Door::PerigeeHttp));
                // It may be there.
                let _ = crate::run("curl", &["-sS", "-o", "/dev/null", "-X", "POST", &url]);
            }
        }
        Ok(())
    }

    /// The process that serves a door of Perigee.
    pub fn pid(&self, door: Door) -> Result<u32> {
        if door == Door::PerigeeFtps {
            return Ok(self.gateway_pid);
        }
        Ok(self.perigee.as_ref().context("it runs")?.id())
    }
}

pub fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path is not UTF-8")
}

fn listens(name: &str, port: u16) -> Result<()> {
    let late = Instant::now() + START_MAX;
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        ensure!(Instant::now() < late, "{name} does not listen within {} s", START_MAX.as_secs());
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}
