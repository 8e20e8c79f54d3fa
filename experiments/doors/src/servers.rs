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

use crate::results::{Door, Victim};

/// How much data the controller may have in memory, and how much the FTPS gateway. The stacks of their threads count, of which
/// little is ever touched: with 64 clients at once, 160 threads with 2 MiB each, and 64 with 8 MiB.
pub const MEMORY_BYTES: u64 = 1 << 30;

/// The FTPS gateway, from the workspace's directory.
const GATEWAY: &str = "gateways/ftps/perigee-ftps";
const START_MAX: Duration = Duration::from_secs(60);
const STOP_MAX: Duration = Duration::from_secs(10);

pub struct Servers {
    dir: PathBuf,
    program: PathBuf,
    perigee: Option<Child>,
    /// It serves FTPS.
    gateway: Option<Child>,
    others: Vec<Child>,
    /// Of Perigee's HTTP and SFTP, nginx, vsftpd and OpenSSH, Perigee's FTPS, and vsftpd, Perigee's HTTP and nginx with TLS.
    ports: [u16; 9],
    /// Of the user in whose name FTPS is used.
    token: String,
    /// Of the user in whose name HTTP with TLS is used.
    tls_token: String,
}

impl Drop for Servers {
    fn drop(&mut self) {
        if let Some(perigee) = &mut self.perigee
            && let Ok(Some(status)) = perigee.try_wait()
        {
            let log = fs::read_to_string(self.dir.join("perigee.log")).unwrap_or_default();
            eprintln!("perigee ended by itself: {status}\n{log}");
        }
        let ours = self.gateway.take().into_iter().chain(self.perigee.take());
        for mut child in self.others.drain(..).chain(ours) {
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

/// The versions of the others, as they say them on standard error. vsftpd says nothing there, so its package is asked.
pub fn versions() -> BTreeMap<String, String> {
    let mut versions = BTreeMap::new();
    let vsftpd = ("dpkg-query".to_owned(), &["-W", "-f", "vsftpd ${Version}", "vsftpd"][..]);
    for (name, (program, arguments)) in [
        ("nginx", (program("nginx"), &["-v"][..])),
        ("vsftpd", vsftpd),
        ("ssh", (program("ssh"), &["-V"][..])),
    ] {
        let said = Command::new(program).args(arguments).stdin(Stdio::null()).output();
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
            gateway: None,
            others: Vec::new(),
            ports,
            token: String::new(),
            tls_token: String::new(),
        };
        for part in [
            "home",
            "perigee",
            "perigee-tls",
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
        servers.token = servers.user_token(false)?;
        servers.start_perigee_tls()?;
        servers.tls_token = servers.user_token(true)?;
        servers.start_gateway()?;
        for (name, arguments, port) in
            [servers.nginx()?, servers.vsftpd(false)?, servers.openssh()?, servers.vsftpd(true)?]
        {
            let log = fs::File::create(dir.join(format!("{name}.log")))?;
            let mut command = Command::new(self::program(name));
            command.args(&arguments).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
            servers.others.push(command.spawn().with_context(|| format!("can't start {name}"))?);
            listens(name, port)?;
        }
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
    fn start_perigee(&mut self) -> Result<()> {
        let state = self.dir.join("perigee");
        let mut command = self.limited(&self.program, "perigee.log")?;
        command.args(["controller", "run", "--insecure", "--state", text(&state)?]);
        command.args([
            "--listen",
            &self.api(false),
            "--listen",
            &format!("127.0.0.1:{}", self.ports[0]),
        ]);
        command.args(["--sftp", &format!("127.0.0.1:{}", self.ports[1])]);
        command.env("PERIGEE_LOG", "warn").env("HOME", self.dir.join("home"));
        self.perigee = Some(command.spawn().context("can't start perigee")?);
        listens("perigee", self.ports[0])?;
        listens("perigee's SFTP", self.ports[1])
    }

    /// A program with a limit of its memory, which it is replaced by: the process keeps its id.
    fn limited(&self, program: &Path, log: &str) -> Result<Command> {
        let log = fs::File::options().create(true).append(true).open(self.dir.join(log))?;
        let mut command = Command::new("prlimit");
        command.args([&format!("--data={MEMORY_BYTES}"), "--"]).arg(program);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Ok(command)
    }

    /// Starts what was killed again.
    pub fn start_again(&mut self, victim: Victim) -> Result<()> {
        match victim {
            Victim::Controller => self.start_perigee(),
            Victim::Gateway => self.start_gateway(),
        }
    }

    /// Waits until what was killed has ended.
    pub fn ended(&mut self, victim: Victim) -> Result<()> {
        let child = match victim {
            Victim::Controller => self.perigee.take(),
            Victim::Gateway => self.gateway.take(),
        };
        let mut child = child.context("it runs")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    fn api(&self, is_tls: bool) -> String {
        let socket = if is_tls { "tls.sock" } else { "api.sock" };
        format!("unix:{}", self.dir.join(socket).display())
    }

    fn command_at(&self, is_tls: bool, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        let api = self.api(is_tls);
        command.args(arguments).env("PERIGEE_API", api).env("HOME", self.dir.join("home"));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    }

    /// The `perigee` command at the controller without TLS.
    pub fn command(&self, arguments: &[&str]) -> Command {
        self.command_at(false, arguments)
    }

    /// Runs it to its end.
    pub fn perigee(&self, arguments: &[&str]) -> Result<()> {
        ended_well(self.command(arguments), arguments)
    }

    /// Makes the user in whose name clients come, and a token.
    fn user_token(&self, is_tls: bool) -> Result<String> {
        let key = self.dir.join("ssh/user.pub");
        let user = "default/bench";
        for arguments in [
            &["user", "add", user, "--role", "member"][..],
            &["user", "key", "add", "bench", text(&key)?, "--user", user],
        ] {
            ended_well(self.command_at(is_tls, arguments), arguments)?;
        }
        let mut make = self.command_at(is_tls, &["token", "create", "--user", user]);
        let made = make.stdout(Stdio::piped()).output()?;
        ensure!(made.status.success(), "perigee token create: {}", made.status);
        Ok(String::from_utf8(made.stdout)?.trim().to_owned())
    }

    /// A second controller, with a state of its own: one speaks TLS at all its ports, or at none.
    fn start_perigee_tls(&mut self) -> Result<()> {
        let port = self.ports[7];
        let mut command = self.limited(&self.program, "perigee-tls.log")?;
        command.args(["controller", "run", "--state"]).arg(self.dir.join("perigee-tls"));
        command.args(["--listen", &self.api(true), "--listen", &format!("127.0.0.1:{port}")]);
        command.env("PERIGEE_LOG", "warn").env("HOME", self.dir.join("home"));
        self.others.push(command.spawn().context("can't start perigee with TLS")?);
        listens("perigee with TLS", port)
    }

    /// Starts it again, if it was killed.
    fn start_gateway(&mut self) -> Result<()> {
        let [http, .., ftps, _, _, _] = self.ports;
        let mut command = self.limited(Path::new(GATEWAY), "perigee-ftps.log")?;
        command.args(["--api", &format!("http://127.0.0.1:{http}")]);
        command.args(["--listen", &format!("127.0.0.1:{ftps}")]);
        command.arg("--key").arg(self.dir.join("tls.key")).arg("--cert").arg(self.certificate());
        self.gateway = Some(command.spawn().context("can't start the FTPS gateway")?);
        listens("the FTPS gateway", ftps)
    }

    fn nginx(&self) -> Result<(&'static str, Vec<String>, u16)> {
        let (at, port, tls_port) = (self.dir.join("nginx"), self.ports[2], self.ports[8]);
        let conf = format!(
            "daemon off; user root; worker_processes auto; pid {at}/pid; error_log {at}/error.log;\n\
             events {{ worker_connections 1024; }}\n\
             http {{\n  access_log off; sendfile on; client_max_body_size 0; client_body_temp_path {at}/temp;\n  \
             proxy_temp_path {at}/p; fastcgi_temp_path {at}/f; uwsgi_temp_path {at}/u; scgi_temp_path {at}/s;\n  \
             server {{\n    listen 127.0.0.1:{port}; listen 127.0.0.1:{tls_port} ssl; root {at}/files;\n    \
             ssl_certificate {dir}/tls.pem; ssl_certificate_key {dir}/tls.key;\n    \
             location / {{ dav_methods PUT DELETE MKCOL; create_full_put_path on; }}\n  }}\n}}\n",
            at = at.display(),
            dir = self.dir.display()
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
        let [http, _, nginx, ftp, _, ftps, vsftpd_ftps, http_tls, nginx_tls] = self.ports;
        match door {
            Door::PerigeeHttp | Door::PerigeeSftp | Door::PerigeeCli => {
                format!("http://127.0.0.1:{http}/v1/data/default")
            }
            Door::PerigeeWebdav => format!("http://127.0.0.1:{http}/dav/default"),
            Door::PerigeeHttpTls => format!("https://127.0.0.1:{http_tls}/v1/data/default"),
            Door::PerigeeWebdavTls => format!("https://127.0.0.1:{http_tls}/dav/default"),
            Door::NginxWebdav => format!("http://127.0.0.1:{nginx}"),
            Door::NginxWebdavTls => format!("https://127.0.0.1:{nginx_tls}"),
            Door::PerigeeFtps => format!("ftp://127.0.0.1:{ftps}"),
            Door::Vsftpd => format!("ftp://127.0.0.1:{ftp}"),
            Door::VsftpdFtps => format!("ftp://127.0.0.1:{vsftpd_ftps}"),
            Door::OpensshSftp => String::new(),
        }
    }

    /// What curl is to be told of a login, as lines of its configuration.
    pub fn curl_login(&self, door: Door) -> String {
        let ca = |file: PathBuf| format!("cacert = \"{}\"\n", file.display());
        let tls = format!("ssl-reqd\n{}", ca(self.certificate()));
        match door {
            Door::PerigeeHttpTls | Door::PerigeeWebdavTls => format!(
                "{}header = \"Authorization: Bearer {}\"\n",
                ca(self.dir.join("perigee-tls/authority/ca.pem")),
                self.tls_token
            ),
            Door::NginxWebdavTls => ca(self.certificate()),
            Door::PerigeeFtps => format!("{tls}user = \"bench:{}\"\n", self.token),
            // With TLS 1.3, vsftpd 3.0.3 now and then takes the end of an upload for a failure (426).
            Door::VsftpdFtps => format!("{tls}tls-max = 1.2\n"),
            _ => String::new(),
        }
    }

    /// The certificate of both FTPS servers, and of nginx.
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
            Door::NginxWebdav | Door::NginxWebdavTls => "nginx/files",
            Door::Vsftpd | Door::VsftpdFtps => "vsftpd/files",
            Door::OpensshSftp => "ssh/files",
            _ => {
                let delete = ["data", "delete", "bench", "--recursive"];
                return ended_well(self.command_at(door.is_perigee_tls(), &delete), &delete);
            }
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
            Door::NginxWebdav | Door::NginxWebdavTls => {
                fs::create_dir_all(self.dir.join("nginx/files/bench"))?;
            }
            Door::OpensshSftp => fs::create_dir_all(self.dir.join("ssh/files/bench"))?,
            Door::Vsftpd | Door::VsftpdFtps => {
                let at = self.dir.join("vsftpd/files/bench");
                fs::create_dir_all(&at)?;
                fs::set_permissions(at, fs::Permissions::from_mode(0o777))?;
            }
            _ => {
                let api = self.api(door.is_perigee_tls());
                let socket = api.trim_start_matches("unix:");
                let url = "http://localhost/v1/data/default/bench?directory";
                let make = ["-sS", "-o", "/dev/null", "-X", "POST", "--unix-socket", socket, url];
                // It may be there.
                let _ = crate::run("curl", &make);
            }
        }
        Ok(())
    }

    /// The process that serves a door of Perigee.
    pub fn pid(&self, door: Door) -> Result<u32> {
        let process = if door == Door::PerigeeFtps { &self.gateway } else { &self.perigee };
        Ok(process.as_ref().context("it runs")?.id())
    }
}

fn ended_well(mut command: Command, arguments: &[&str]) -> Result<()> {
    let ended = command.status()?;
    ensure!(ended.success(), "perigee {}: {ended}", arguments.join(" "));
    Ok(())
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
