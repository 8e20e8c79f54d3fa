//! The storm's volume server and boot server, in its network.

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use perigee_http::Client;
use perigee_model::client::{Binding, ClientInfo, Lifetime, NewClient, Over, Service};
use perigee_model::volume::{StartTrace, TraceSummary};
use perigee_model::{ImageName, JobId, Problem};
use tokio::process::Child;

use super::{Options, last_lines};
use crate::command::{cannot_start, run, run_within};
use crate::diskless::{ADDRESS, BRIDGE, Network, RANGE};
use crate::process::wait_until;
use crate::usage::Usage;

const IMPORT_MAX: Duration = Duration::from_secs(600);
const READY_MAX: Duration = Duration::from_secs(60);
const ANSWER_MAX: Duration = Duration::from_secs(60);
const IMAGE: &str = "golden";
/// The kernel's arguments for machines with their root over NBD. The others' are in the image.
const APPEND: &str =
    "console=ttyS0 quiet loglevel=4 mitigations=off audit=0 cryptomgr.notests panic=5";

/// The volume server and the boot service of a storm, in the machines' network.
pub struct Servers {
    network: Network,
    program: PathBuf,
    dir: PathBuf,
    kernel: Option<[PathBuf; 2]>,
    image: ImageName,
    control: Client,
    running: Vec<(&'static str, Child)>,
}

impl Servers {
    /// Makes a pool with the image, and drops both from the page cache.
    ///
    /// # Errors
    /// `perigee image import` fails or takes longer than ten minutes.
    pub async fn prepare(
        options: &Options,
        network: &Network,
        dir: &Path,
    ) -> Result<Self, Problem> {
        let pool = dir.join("pool");
        let (program, pool_text) = (options.program.to_string_lossy(), pool.to_string_lossy());
        let image = &options.image;
        let disk = image.disk.to_string_lossy();
        run(&program, &["pool", "create", "--pool", &pool_text]).await?;
        let import = ["image", "import", IMAGE, &disk, "--pool", &pool_text];
        run_within(IMPORT_MAX, &program, &import).await?;
        forget(&pool)?;
        let over_nbd = options.over == Over::Nbd;
        Ok(Self {
            network: network.clone(),
            program: options.program.clone(),
            dir: dir.to_owned(),
            kernel: over_nbd.then(|| [image.kernel.clone(), image.initrd.clone()]),
            image: ImageName::new(IMAGE).map_err(|error| Problem::internal(IMAGE, error))?,
            control: Client::new(
                &format!("unix:{}", pool.join("control.sock").display()),
                ANSWER_MAX,
            )?,
            running: Vec::new(),
        })
    }

    fn pool(&self) -> PathBuf {
        self.dir.join("pool")
    }

    /// # Errors
    /// It is not ready within a minute. The problem shows the end of its log.
    pub async fn start_volume_server(&mut self) -> Result<(), Problem> {
        let (nbd, iscsi) = (format!("{ADDRESS}:10809"), format!("{ADDRESS}:3260"));
        self.spawn("volume", &["serve", "--insecure", "--nbd", &nbd, "--iscsi", &iscsi])?;
        let socket = self.pool().join("control.sock");
        self.ready("volume", || UnixStream::connect(&socket).is_ok()).await
    }

    /// To be called when all machines are clients, so that none waits for its address.
    ///
    /// # Errors
    /// As [`Self::start_volume_server`].
    pub async fn start_boot_server(&mut self) -> Result<(), Problem> {
        let kernel =
            self.kernel.take().map(|files| files.map(|f| f.to_string_lossy().into_owned()));
        let mut args = vec!["serve", "--interface", BRIDGE, "--range", RANGE, "--append", APPEND];
        if let Some([kernel, initrd]) = &kernel {
            args.extend(["--kernel", kernel, "--initrd", initrd]);
        }
        self.spawn("boot", &args)?;
        // The firmware repeats its requests if nothing answers at first.
        let dnsmasq = self.pool().join("boot/dnsmasq.pid");
        self.ready("boot", || fs::read(&dnsmasq).is_ok_and(|id| !id.is_empty())).await
    }

    fn spawn(&mut self, name: &'static str, args: &[&str]) -> Result<(), Problem> {
        let log = self.log(name);
        let file = File::create(&log)
            .map_err(|error| Problem::internal(format!("can't make {}", log.display()), error))?;
        let mut command = self.network.command(&self.program);
        command.arg(name).args(args).arg("--pool").arg(self.pool());
        command.env("PERIGEE_LOG", "info").stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
        let child = command.kill_on_drop(true).spawn().map_err(|e| cannot_start("nsenter", &e))?;
        self.running.push((name, child));
        Ok(())
    }

    fn log(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.log"))
    }

    async fn ready(&mut self, name: &str, is_ready: impl Fn() -> bool) -> Result<(), Problem> {
        let mut ended = Ok(());
        let waited = wait_until(READY_MAX, || {
            ended = self.check();
            ended.is_err() || is_ready()
        });
        if waited.await { ended } else { Err(self.fault(name, "it was not ready within a minute")) }
    }

    fn fault(&self, name: &str, why: &str) -> Problem {
        let said = fs::read_to_string(self.log(name)).unwrap_or_default();
        Problem::unavailable(format!("can't run `perigee {name} serve`"), why)
            .next(format!("the end of its log:\n{}", last_lines(&said)))
    }

    /// # Errors
    /// A server has ended.
    pub fn check(&mut self) -> Result<(), Problem> {
        let ended = self.running.iter_mut().find_map(|(name, child)| {
            let status = child.try_wait().ok().flatten()?;
            Some((*name, format!("it ended with {status}")))
        });
        ended.map_or(Ok(()), |(name, why)| Err(self.fault(name, &why)))
    }

    /// Adds a client that boots a fresh clone of the image.
    ///
    /// # Errors
    /// The volume server refuses.
    pub async fn bind(&self, name: &str, mac: &str, over: Over) -> Result<(), Problem> {
        let what = || format!("can't add the client {name}");
        let new = NewClient {
            name: name.parse().map_err(|error| Problem::internal(what(), error))?,
            mac: Some(mac.parse().map_err(|error| Problem::internal(what(), error))?),
            initiator: None,
            chap: None,
            target_chap: None,
        };
        let _added: ClientInfo = self.control.post("/v1/clients", &new).await?;
        let service = Service::Image { image: self.image.clone(), lifetime: Lifetime::Ephemeral };
        let binding = Binding { service, over };
        let path = format!("/v1/clients/{name}/binding");
        self.control.put(&path, &binding).await.map(|_bound: ClientInfo| ())
    }

    /// # Errors
    /// The volume server refuses.
    pub async fn start_trace(&self) -> Result<(), Problem> {
        let name = JobId::new("storm").map_err(|e| Problem::internal("can't name a trace", e))?;
        self.control.post("/v1/trace/start", &StartTrace { name }).await
    }

    /// Returns the file with the trace.
    ///
    /// # Errors
    /// The volume server refuses; `Internal` when requests are missing from the trace.
    pub async fn stop_trace(&self) -> Result<PathBuf, Problem> {
        let summary: TraceSummary = self.control.post("/v1/trace/stop", &()).await?;
        if summary.lost > 0 {
            let why = format!("{} requests came faster than they could be written", summary.lost);
            return Err(Problem::internal("can't record the storm", why));
        }
        Ok(summary.file)
    }

    /// # Errors
    /// The volume server has ended.
    pub fn volume_usage(&self) -> Result<Usage, Problem> {
        let volume = self.running.iter().find(|(name, _)| *name == "volume");
        let id = volume.and_then(|(_, child)| child.id());
        id.map_or_else(|| Err(self.fault("volume", "it ended")), Usage::of)
    }

    /// How much of the pool is in the page cache.
    ///
    /// # Errors
    /// util-linux's fincore fails.
    pub async fn page_cache_bytes(&self) -> Result<u64, Problem> {
        let files = files_below(&self.pool())?;
        let mut args = vec!["--bytes", "--noheadings", "--raw", "--output", "RES"];
        let names: Vec<_> = files.iter().map(|file| file.to_string_lossy().into_owned()).collect();
        args.extend(names.iter().map(String::as_str));
        let said = run("fincore", &args).await?;
        Ok(said.lines().filter_map(|line| line.trim().parse::<u64>().ok()).sum())
    }
}

fn files_below(dir: &Path) -> Result<Vec<PathBuf>, Problem> {
    let fail = |error| Problem::internal(format!("can't list {}", dir.display()), error);
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        let kind = entry.file_type().map_err(fail)?;
        if kind.is_dir() {
            files.extend(files_below(&entry.path())?);
        } else if kind.is_file() {
            files.push(entry.path());
        }
    }
    Ok(files)
}

/// Writes the pool's files to the disk and drops them from the page cache.
fn forget(pool: &Path) -> Result<(), Problem> {
    for path in files_below(pool)? {
        let forgotten = File::open(&path).and_then(|file| {
            file.sync_all()?;
            Ok(posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?)
        });
        forgotten
            .map_err(|error| Problem::internal(format!("can't sync {}", path.display()), error))?;
    }
    Ok(())
}
