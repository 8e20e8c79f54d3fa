//! A running server.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::Result;
use perigee_model::volume::VolumeSource;

use super::fixtures::{Fixtures, GOLDEN};
use super::{Disk, Server, Transport};
use crate::control::Control;
use crate::load::Address;
use crate::process::{Process, open_files};

/// Serves one disk at one address until it is stopped or dropped.
pub struct Started {
    pub process: Process,
    pub address: Address,
    pub export: String,
    /// A volume or file that is removed when the server stops. Files with many small extents are removed with
    /// the scratch directory instead, because freeing them takes a minute if the filesystem discards each
    /// extent.
    temporary: Option<Temporary>,
}

enum Temporary {
    Volume(String),
    File(PathBuf),
}

impl Started {
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// All files of this server that may be in the page cache.
    pub fn files(&self, fixtures: &Fixtures) -> Vec<PathBuf> {
        let mut files = open_files(self.id());
        let layers = std::fs::read_dir(fixtures.path("pool").join("layers"));
        files.extend(layers.into_iter().flatten().flatten().map(|entry| entry.path()));
        files.push(fixtures.base());
        files
    }

    pub fn control(&self, fixtures: &Fixtures, pool: &str) -> Result<Control> {
        Control::new(&fixtures.path(pool))
    }

    pub fn stop(self, fixtures: &Fixtures) -> Result<()> {
        if let Some(Temporary::Volume(volume)) = &self.temporary {
            self.control(fixtures, "pool")?.delete(volume)?;
        }
        self.process.stop()?;
        if let Some(Temporary::File(path)) = &self.temporary {
            std::fs::remove_file(path)?;
        }
        Ok(())
    }
}

fn free_address(transport: Transport, socket: PathBuf) -> Result<Address> {
    Ok(match transport {
        Transport::Unix => {
            if socket.exists() {
                std::fs::remove_file(&socket)?;
            }
            Address::Unix(socket)
        }
        Transport::Tcp => {
            let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
            Address::Tcp(TcpListener::bind(any)?.local_addr()?)
        }
    })
}

fn listens(address: &Address) -> bool {
    match address {
        Address::Unix(path) => UnixStream::connect(path).is_ok(),
        Address::Tcp(address) => std::net::TcpStream::connect(address).is_ok(),
    }
}

impl Fixtures {
    /// Starts a server for a disk, on one CPU if `cpu` is given.
    pub fn start(
        &self,
        server: Server,
        disk: Disk,
        transport: Transport,
        cpu: Option<usize>,
    ) -> Result<Started> {
        match server {
            Server::Perigee => self.start_perigee(disk, transport, cpu),
            _ => self.start_peer(server, disk, transport, cpu),
        }
    }

    /// Starts the volume server on one of the pools, without choosing a disk.
    pub fn start_pool(
        &self,
        pool: &str,
        transport: Transport,
        cpu: Option<usize>,
    ) -> Result<Started> {
        let address = free_address(transport, self.path(&format!("{pool}.sock")))?;
        let dir = self.path(pool);
        // A killed server leaves its socket behind, which must not count as the new server being ready.
        let _not_there = std::fs::remove_file(dir.join("control.sock"));
        let nbd = address.to_string();
        let arguments = ["volume", "serve", "--insecure", "--pool", &text(&dir), "--nbd", &nbd];
        let arguments = arguments.map(String::from);
        let log = self.path(&format!("{pool}.log"));
        let mut process = Process::start(&text(&self.perigee), &arguments, cpu, &log)?;
        let control = Control::new(&dir)?;
        process.wait_until("its control API", || control.answers())?;
        Ok(Started { process, address, export: String::new(), temporary: None })
    }

    fn start_perigee(
        &self,
        disk: Disk,
        transport: Transport,
        cpu: Option<usize>,
    ) -> Result<Started> {
        let mut started = self.start_pool("pool", transport, cpu)?;
        started.export = Self::volume(disk);
        let size_bytes = match disk {
            Disk::Mixed | Disk::Runs | Disk::Chain(_) => return Ok(started),
            Disk::Fresh => None,
            Disk::Large(bytes) => Some(bytes),
        };
        let image = VolumeSource::Image(GOLDEN.parse()?);
        started.control(self, "pool")?.create(&started.export, image, size_bytes)?;
        if disk == Disk::Fresh {
            started.temporary = Some(Temporary::Volume(started.export.clone()));
        }
        Ok(started)
    }

    /// Starts one of QEMU's servers on an existing overlay, with a socket beside it.
    pub fn start_overlay(&self, server: Server, overlay: &Path) -> Result<Started> {
        let address = free_address(Transport::Unix, overlay.with_extension("sock"))?;
        let (program, arguments) = self.command(server, overlay, &address)?;
        let log = overlay.with_extension("log");
        let mut process = Process::start(&program, &arguments, None, &log)?;
        process.wait_until("its socket", || listens(&address))?;
        Ok(Started { process, address, export: "disk".into(), temporary: None })
    }

    fn start_peer(
        &self,
        server: Server,
        disk: Disk,
        transport: Transport,
        cpu: Option<usize>,
    ) -> Result<Started> {
        let address = free_address(transport, self.path("peer.sock"))?;
        let (mut file, mut temporary) = (self.overlay(disk, server.extended_l2()), None);
        let new_bytes = match disk {
            Disk::Fresh => Some(self.image_bytes),
            Disk::Large(bytes) => Some(bytes),
            Disk::Mixed | Disk::Runs | Disk::Chain(_) => None,
        };
        let is_overlay = Server::keeps_metadata(&server.name());
        if !is_overlay {
            file = self.base();
        } else if let Some(bytes) = new_bytes {
            self.make_overlay(&file, (&self.base(), "raw"), bytes, server.extended_l2())?;
            temporary = (disk == Disk::Fresh).then(|| Temporary::File(file.clone()));
        }
        let (program, arguments) = self.command(server, &file, &address)?;
        let mut process = Process::start(&program, &arguments, cpu, &self.path("peer.log"))?;
        process.wait_until("its socket", || listens(&address))?;
        let started = Started { process, address, export: "disk".into(), temporary };
        if server == Server::NbdkitCow && new_bytes.is_none() {
            self.fill(disk, &started.address, &started.export)?;
        }
        Ok(started)
    }

    fn command(
        &self,
        server: Server,
        file: &Path,
        address: &Address,
    ) -> Result<(String, Vec<String>)> {
        let file = text(file);
        let listen = |unix: &str, host: &str, port: &str| match address {
            Address::Unix(path) => vec![unix.to_owned(), text(path)],
            Address::Tcp(address) => {
                [host, "127.0.0.1", port, &address.port().to_string()].map(String::from).into()
            }
        };
        let words = |text: &str| text.split(' ').map(String::from).collect::<Vec<_>>();
        Ok(match server {
            Server::QemuNbd { aio, .. } => {
                let mut arguments = words("-t -e 0 -f qcow2 -x disk --cache=writeback");
                arguments.push(format!("--aio={}", aio.word()));
                arguments.extend(listen("-k", "-b", "-p"));
                arguments.push(file);
                ("qemu-nbd".into(), arguments)
            }
            Server::StorageDaemon { aio, .. } => {
                let aio = aio.word();
                let blockdev = format!(
                    "driver=qcow2,node-name=disk,file.driver=file,file.filename={file},file.aio={aio},\
                     backing.driver=raw,backing.file.driver=file,backing.file.filename={},backing.file.aio={aio}",
                    text(&self.base())
                );
                let listen = match address {
                    Address::Unix(path) => format!("addr.type=unix,addr.path={}", text(path)),
                    Address::Tcp(address) => {
                        format!("addr.type=inet,addr.host=127.0.0.1,addr.port={}", address.port())
                    }
                };
                let export = "type=nbd,id=export,node-name=disk,name=disk,writable=on";
                let arguments =
                    ["--blockdev", &blockdev, "--nbd-server", &listen, "--export", export];
                ("qemu-storage-daemon".into(), arguments.map(String::from).into())
            }
            Server::NbdkitFile | Server::NbdkitCow => {
                let mut arguments = words("-f -e disk");
                arguments.extend(listen("-U", "-i", "-p"));
                arguments.push(
                    if server == Server::NbdkitCow { "--filter=cow" } else { "-r" }.to_owned(),
                );
                arguments.extend(["file".into(), file]);
                ("nbdkit".into(), arguments)
            }
            Server::Echo => {
                let program = text(&std::env::current_exe()?);
                (program, vec!["echo".into(), address.to_string()])
            }
            Server::Perigee => unreachable!("it is started on a pool"),
        })
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}
