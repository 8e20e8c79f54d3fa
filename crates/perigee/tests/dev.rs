//! `perigee dev`: the three daemons in one process, with a real guest.

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long any one thing may take on a busy machine before the test gives up.
const PATIENCE: Duration = Duration::from_secs(300);

struct Dev {
    dir: tempfile::TempDir,
    process: Child,
    /// Where files are served over SFTP.
    sftp: String,
}

impl Dev {
    /// Starts it, and waits until it says that it runs.
    fn start(image: &Path) -> Self {
        // QEMU's users pass through it.
        let passable = std::os::unix::fs::PermissionsExt::from_mode(0o711);
        let dir = tempfile::Builder::new().permissions(passable).tempdir().expect("a directory");
        let mut process = Command::new(env!("CARGO_BIN_EXE_perigee"))
            .args(["dev", "--probe-kernel"])
            .arg(image.join("vmlinuz"))
            .arg("--dir")
            .arg(dir.path().join("dev"))
            .env("PERIGEE_API", api(dir.path()))
            .stdout(Stdio::piped())
            .spawn()
            .expect("perigee runs");
        let (said, lines) = mpsc::channel();
        let output = BufReader::new(process.stdout.take().expect("its output"));
        // All is read: who prints to a pipe that nobody reads any more is ended.
        std::thread::spawn(move || output.lines().for_each(|line| drop(said.send(line))));
        let mut dev = Self { dir, process, sftp: String::new() };
        let line = || lines.recv_timeout(PATIENCE).expect("it goes on").expect("a line");
        let first = line();
        assert!(first.starts_with("perigee dev runs"), "{first}");
        let said = std::iter::repeat_with(line).find(|line| line.contains("sftp -P"));
        let said = said.unwrap_or_default();
        let words: Vec<&str> = said.split_whitespace().collect();
        let host = words[3].split_once('@').expect("USER@HOST").1;
        dev.sftp = format!("{host}:{}", words[2]);
        dev
    }

    fn perigee(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_perigee"));
        command.args(args).env("PERIGEE_API", api(self.dir.path())).current_dir(self.dir.path());
        command.output().expect("perigee runs")
    }

    fn ok(&self, args: &[&str]) -> String {
        let output = self.perigee(args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {said}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// As Ctrl-C does.
    fn interrupt(&mut self) {
        let pid = self.process.id().to_string();
        assert!(Command::new("kill").args(["-INT", &pid]).status().expect("kill runs").success());
        let ended = wait_for("its end", || self.process.try_wait().expect("its state"));
        assert!(ended.success(), "{ended}");
    }

    /// QEMUs whose command line names this directory.
    fn vms(&self) -> usize {
        let own = self.dir.path().to_string_lossy().into_owned();
        let processes = std::fs::read_dir("/proc").expect("the processes").flatten();
        let lines = processes.filter_map(|one| std::fs::read(one.path().join("cmdline")).ok());
        let lines = lines.map(|line| String::from_utf8_lossy(&line).into_owned());
        lines.filter(|line| line.starts_with("qemu-system") && line.contains(&own)).count()
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        if matches!(self.process.try_wait(), Ok(None)) {
            // Its jobs end with it; a kill would leave their VMs.
            let pid = self.process.id().to_string();
            drop(Command::new("kill").args(["-INT", &pid]).status());
            drop(self.process.wait());
        }
    }
}

fn api(dir: &Path) -> String {
    format!("unix:{}", dir.join("api.sock").display())
}

fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} for {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_newcomer_runs_a_job_and_nothing_runs_after_ctrl_c() {
    let image = std::env::var("PERIGEE_TEST_IMAGE")
        .expect("PERIGEE_TEST_IMAGE names the golden image's directory; make test sets it");
    let image = PathBuf::from(image);
    let mut dev = Dev::start(&image);
    let mut door = TcpStream::connect(&dev.sftp).expect("the SFTP door");
    let mut banner = [0; 8];
    door.read_exact(&mut banner).expect("its banner");
    assert_eq!(&banner, b"SSH-2.0-");
    let disk = image.join("debian-pg.raw").display().to_string();
    dev.ok(&["image", "import", "debian", &disk]);
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/hello.yaml");
    dev.ok(&["job", "submit", "--wait", example]);
    dev.ok(&["job", "output", "hello-0001"]);
    let answer = std::fs::read_to_string(dev.dir.path().join("hello-0001/output/hello.txt"));
    assert_eq!(answer.expect("the job's output"), "hello\n");
    let endless = dev.dir.path().join("endless.yaml");
    let text = "image: debian\ncommand: sleep 100000\nmemory: 256MiB\n";
    std::fs::write(&endless, text).expect("a file");
    dev.ok(&["job", "submit", &endless.display().to_string()]);
    wait_for("its VM", || (dev.vms() == 1).then_some(()));
    dev.ok(&["vm", "create", "web", "--image", "debian", "--memory", "256MiB"]);
    wait_for("the other VM", || (dev.vms() == 2).then_some(()));
    // A second one at the same socket would end the first one's jobs.
    let other = dev.dir.path().join("other").display().to_string();
    let refused = dev.perigee(&["dev", "--dir", &other]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("a controller answers at"), "{said}");
    assert_eq!(dev.vms(), 2);
    dev.interrupt();
    assert_eq!(dev.vms(), 0, "a VM goes on");
}

/// The client's own tests of what needs a guest.
#[test]
fn a_python_program_runs_a_job() {
    let image = std::env::var("PERIGEE_TEST_IMAGE")
        .expect("PERIGEE_TEST_IMAGE names the golden image's directory; make test sets it");
    let mut dev = Dev::start(Path::new(&image));
    let disk = Path::new(&image).join("debian-pg.raw").display().to_string();
    dev.ok(&["image", "import", "debian", &disk]);
    let client = concat!(env!("CARGO_MANIFEST_DIR"), "/../../clients/python");
    let mut tests = Command::new("python3");
    tests.args(["-m", "unittest", "--verbose", "tests/test_guest.py"]).current_dir(client);
    tests.env("PYTHONDONTWRITEBYTECODE", "1").env("PERIGEE_API", api(dev.dir.path()));
    let run = tests.output().expect("python3 runs");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    dev.interrupt();
}
