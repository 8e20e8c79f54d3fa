//! Linux's own iSCSI initiator, in a QEMU guest: it is refused without the right proof, logs in to a
//! volume with CHAP both ways, makes a filesystem, runs fio with verification while the volume server is
//! killed and started again, and logs out. When the volume is deleted and made anew under its name, nothing that the
//! initiator still had for the old one reaches the new one.
//!
//! The guest is the golden image's kernel and open-iscsi with a first process of its own
//! (`initiator/init`), and this machine's fio. It reaches the server through QEMU's user network.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// How long any one thing may take on a busy machine before the test gives up. It is more than the guest gives each of its
/// steps, of which the longest, fio, waits for some 100 flushes of a disk that may be busy.
const PATIENCE: Duration = Duration::from_secs(600);
const VOLUME: &str = "data";
/// As `initiator/init` has it.
const CLIENT: &str =
    "iqn.2026-11.test:linux data chap=linux:correct-horse-1 mutual=perigee:battery-staple-1\n";

struct Server {
    pool: PathBuf,
    address: String,
    process: Option<Child>,
}

impl Server {
    fn clients(&self) -> PathBuf {
        self.pool.with_extension("clients")
    }

    fn start(&mut self) {
        let process = Command::new(env!("CARGO_BIN_EXE_perigee"))
            .args(["volume", "serve", "--insecure", "--iscsi", &self.address, "--pool"])
            .arg(&self.pool)
            .arg("--iscsi-clients")
            .arg(self.clients())
            .env("PERIGEE_LOG", "warn")
            .stdin(Stdio::null())
            .spawn()
            .expect("a volume server");
        self.process = Some(process);
    }

    /// As a power-off of the process: nothing is flushed.
    fn kill(&mut self) {
        let mut process = self.process.take().expect("a running server");
        process.kill().expect("a kill");
        process.wait().expect("its end");
    }

    /// Waits until the server answers.
    fn until_ready(&self) {
        let started = Instant::now();
        while !self.ask(&["list"]).status.success() {
            assert!(started.elapsed() < PATIENCE, "waited {PATIENCE:?} for the server");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Deletes the volume, and makes another one with its name. Meanwhile no initiator reaches the server.
    fn make_anew(&mut self, volume: &str) {
        let elsewhere = format!("127.0.0.1:{}", perigee_http::unused_port());
        let address = std::mem::replace(&mut self.address, elsewhere);
        self.start();
        self.until_ready();
        for verb in [&["delete", volume][..], &["create", volume, "--size", "256MiB"]] {
            let done = self.ask(verb);
            assert!(done.status.success(), "{done:?}");
        }
        self.kill();
        self.address = address;
        self.start();
    }

    fn ask(&self, verb: &[&str]) -> Output {
        let mut command = Command::new("timeout");
        command.arg("60").arg(env!("CARGO_BIN_EXE_perigee")).args(["--format", "json", "volume"]);
        command.args(verb).arg("--pool").arg(&self.pool).env("PERIGEE_LOG", "warn");
        command.output().expect("coreutils' timeout")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.process.is_some() {
            self.kill();
        }
    }
}

struct Guest {
    qemu: Child,
    console: PathBuf,
}

impl Guest {
    fn start(image: &Path, dir: &Path, portal: &str) -> Self {
        let console = dir.join("console");
        let target = format!("iqn.2026-11.org.perigee:{VOLUME}");
        let disk = |path: PathBuf, id: &str, how: &str| {
            format!("file={},if=none,id={id},format=raw,{how}", path.display())
        };
        let qemu = Command::new("qemu-system-x86_64")
            .args(["-machine", "q35", "-accel", "tcg", "-m", "512", "-smp", "1"])
            .args(["-nodefaults", "-display", "none", "-no-reboot"])
            .args(["-serial", &format!("file:{}", console.display())])
            .arg("-kernel")
            .arg(image.join("vmlinuz"))
            .arg("-initrd")
            .arg(dir.join("initrd"))
            .args(["-append", &format!("console=ttyS0 quiet portal={portal} volume={target}")])
            .args(["-drive", &disk(image.join("debian-pg.raw"), "image", "snapshot=on")])
            .args(["-device", "virtio-blk-pci,drive=image"])
            .args(["-drive", &disk(dir.join("fio.ext4"), "fio", "readonly=on")])
            .args(["-device", "virtio-blk-pci,drive=fio"])
            .args(["-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile="])
            .stdin(Stdio::null())
            .spawn()
            .expect("QEMU");
        Self { qemu, console }
    }

    fn said(&self) -> String {
        let bytes = std::fs::read(&self.console).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits until the guest has said that it has done something. If it does not, the server is asked too, for the message.
    fn until(&self, what: &str, server: &Server) {
        let started = Instant::now();
        loop {
            let said = self.said();
            if said.contains(&format!("initiator: {what}")) {
                return;
            }
            if said.contains("initiator: failed") {
                panic!("{said}\nthe server: {:?}", server.ask(&["info", VOLUME]));
            }
            if started.elapsed() >= PATIENCE {
                let answer = server.ask(&["info", VOLUME]);
                panic!("waited {PATIENCE:?} for {what:?}: {said}\nthe server: {answer:?}");
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.qemu.kill().expect("a kill");
        self.qemu.wait().expect("its end");
    }
}

fn build(image: &Path, dir: &Path) {
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/initiator/build");
    let output = Command::new(recipe).arg(image).arg(dir).output().expect("the recipe");
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn linux_s_initiator_does_not_notice_that_the_server_is_killed_and_notices_that_its_volume_is_another_one()
 {
    let image = std::env::var("PERIGEE_TEST_IMAGE")
        .expect("PERIGEE_TEST_IMAGE names the golden image's directory; make test sets it");
    let image = PathBuf::from(image);
    let dir = tempfile::tempdir().expect("a directory");
    build(&image, dir.path());
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], perigee_http::unused_port()));
    let pool = dir.path().join("pool");
    let mut server = Server { pool, address: address.to_string(), process: None };
    std::fs::write(server.clients(), CLIENT).expect("a file");
    let closed = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(server.clients(), closed).expect("a mode");
    server.start();
    server.until_ready();
    let created = server.ask(&["create", VOLUME, "--size", "256MiB"]);
    assert!(created.status.success(), "{created:?}");
    // The host's own address, as the guest sees it.
    let portal = format!("10.0.2.2:{}", address.port());
    let guest = Guest::start(&image, dir.path(), &portal);
    for proof in ["no proof", "a wrong secret", "a target without the secret"] {
        guest.until(&format!("refused: {proof}"), &server);
    }
    guest.until("mounted", &server);
    // fio writes for twenty seconds and more.
    for _ in 0..2 {
        std::thread::sleep(Duration::from_secs(3));
        assert!(!guest.said().contains("initiator: verified"), "fio is still at it");
        server.kill();
        std::thread::sleep(Duration::from_millis(500));
        server.start();
    }
    for step in ["verified", "unmounted", "checked", "logged out", "has dirty pages"] {
        guest.until(step, &server);
    }
    server.kill();
    guest.until("waits for the server", &server);
    server.make_anew(VOLUME);
    for step in [
        "refused: the old volume's pages",
        "refused: a write of the old session",
        "the new volume has nothing of the old one",
        "done",
    ] {
        guest.until(step, &server);
    }
    let info = server.ask(&["info", VOLUME]);
    let info: serde_json::Value = serde_json::from_slice(&info.stdout).expect("JSON");
    assert_eq!(info["sessions"], 0, "{info}");
}
