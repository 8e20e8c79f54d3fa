//! VMs that live without a job, as a person uses them: over the real CLI.

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use perigee_model::JobId;
use perigee_model::job::{ClusterImage, Job, JobState, Vm};
use perigee_model::persistent_vm::VmState;

use super::gangs::log_of;
use super::tenant_network::World;
use super::{Checked, System, ensure, host, until, until_within, with_system};

const MIB: u64 = 1 << 20;

/// A cloud image boots for a minute of CPU time under TCG, and the machine may have much else to do.
pub const BOOT_PATIENCE: Duration = Duration::from_secs(900);

/// What the golden image says on its console when it has come up without a job.
pub const UP: &str = "login:";

/// What UEFI firmware says when it starts the boot loader that it has found on the root disk.
const FIRMWARE: &str = "BdsDxe: starting";

/// What systemd says early in its second boot: the first one has stored the name on the root disk.
const BOOTS_AGAIN: &str = "Hostname set to <web>";

impl System {
    /// Runs a command that has to succeed.
    pub fn does(&self, args: &[&str]) -> Checked<String> {
        let begun = std::time::Instant::now();
        let output = self.perigee(args);
        if !args.contains(&"--log") {
            eprintln!(
                "{:.1} s, from {:.1} s on: {args:?}",
                begun.elapsed().as_secs_f64(),
                self.begun.elapsed().as_secs_f64()
            );
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "perigee {args:?}: {said}");
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    pub async fn console_says(&self, vm: &str, text: &str) -> Checked<()> {
        let what = format!("the console of {vm} to say {text:?}");
        // Not by the command line: a process for each look takes CPU time from the guest that boots.
        let path = format!("/v1/vms/{vm}/console");
        until_within(BOOT_PATIENCE, &what, async || {
            let said = self.client.get_bytes(&path).await?;
            Ok(String::from_utf8_lossy(&said).contains(text).then_some(()))
        })
        .await?;
        eprintln!("at {:.1} s: {what}", self.begun.elapsed().as_secs_f64());
        Ok(())
    }

    pub async fn vm(&self, name: &str) -> Checked<Vm> {
        self.get(&format!("/v1/vms/{name}")).await
    }

    /// Waits until a shell in the guest of `web` says this, and every command has succeeded. On a busy machine the guest agent may
    /// answer too late, so the script may be run again.
    pub async fn web_says(&self, script: &str, wanted: &str) -> Checked<()> {
        let what = format!("the guest to say {wanted:?} to {script:?}");
        until_within(BOOT_PATIENCE, &what, async || {
            let said = self.does(&["vm", "exec", "web", "--", "sh", "-ec", script])?;
            ensure!(said == wanted, "it says {said:?}");
            Ok(Some(()))
        })
        .await
    }
}

#[test]
fn a_vm_lives_without_a_job_and_keeps_its_disk() {
    with_system(async |system| {
        system.volume("data", "cloud1", 64 * MIB).await?;
        let create = ["vm", "create", "web", "--image", "debian", "--memory", "256MiB"];
        let places = ["--host", "home1", "--volume", "data", "--firmware", "uefi"];
        system.does(&[&create[..], &places].concat())?;
        system.console_says("web", UP).await?;
        let first = system.vm("web").await?;
        ensure!(first.status == VmState::Running && first.job.is_none(), "{first:?}");

        // It goes on at another site, with its root disk after it.
        system.does(&["vm", "move", "web", "cloud1", "--volumes", "follow"])?;
        let moved = system.vm("web").await?;
        ensure!(moved.host == Some(host("cloud1")), "{moved:?}");
        let follows = |name: &str| !name.ends_with("-cidata");
        let mut written = moved.volumes.iter().filter(|volume| follows(volume.volume.as_str()));
        ensure!(written.all(|volume| volume.home == host("cloud1")), "{moved:?}");

        // The golden image does not listen to its power button.
        system.does(&["vm", "stop", "web", "--force"])?;
        let off = system.vm("web").await?;
        ensure!(off.status == VmState::Stopped && off.host.is_none(), "{off:?}");
        let said = system.does(&["vm", "console", "web", "--log"])?;
        ensure!(said.contains(UP), "it said so before it moved: {said}");
        system.does(&["vm", "start", "web"])?;
        system.console_says("web", FIRMWARE).await?;
        let again = system.vm("web").await?;
        ensure!(again.host == Some(host("cloud1")), "it starts where it was moved to: {again:?}");

        // A guest may reboot, and its VM is the same afterwards.
        system.does(&["vm", "restart", "web", "--force"])?;
        let refused = system.perigee(&["vm", "delete", "web"]);
        ensure!(refused.status.code() == Some(5), "{refused:?}");
        system.does(&["vm", "delete", "web", "--force"])?;
        let unknown = system.perigee(&["vm", "info", "web"]);
        ensure!(unknown.status.code() == Some(4), "{unknown:?}");

        // The golden image's boot loader is not signed.
        let secure = ["--host", "home1", "--firmware", "uefi-secure"];
        system.does(&[&["vm", "create", "locked"], &create[3..], &secure].concat())?;
        system.console_says("locked", "Access Denied").await?;
        system.does(&["vm", "delete", "locked", "--force"]).map(drop)
    });
}

/// Says on the console its name, which user it has, and how large its root filesystem is.
const USER_DATA: &str = r#"#cloud-config
chpasswd: {expire: false, users: [{name: ann, password: secret, type: text}]}
write_files:
  - path: /var/lib/cloud/scripts/per-boot/says
    permissions: "0755"
    content: |
      #!/bin/sh
      said=$(
        echo "name: $(hostname)"
        echo "root: $(df --output=size -m / | tail -n 1 | tr -d ' ') MiB"
        echo "key: $(cat /home/ann/.ssh/authorized_keys)"
        echo "data: $(cat /srv/data/kept 2>&1)"
        echo said all
      )
      # The login on this line hangs up who has it open when it begins.
      for try in 1 2 3 4 5; do
        echo "$said" >/dev/ttyS0
        sleep 2
      done
"#;

/// `perigee vm console`, as a person at a terminal uses it.
struct Console {
    child: Child,
    said: std::sync::mpsc::Receiver<Vec<u8>>,
    text: String,
}

impl Console {
    fn attach(system: &System, vm: &str) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_perigee"));
        command.args(["vm", "console", vm]).env("PERIGEE_API", &system.lab.api);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the perigee binary runs");
        let mut stdout = child.stdout.take().expect("it was asked for");
        let (says, said) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = stdout.read(&mut buffer) {
                if says.send(buffer[..length].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self { child, said, text: String::new() }
    }

    fn types(&mut self, keys: &str) {
        let stdin = self.child.stdin.as_mut().expect("it was asked for");
        stdin.write_all(keys.as_bytes()).and_then(|()| stdin.flush()).expect("typed");
    }

    /// Answers what the guest asks until it shows its prompt. A busy guest gives a login up after a minute, and begins anew.
    async fn logs_in(&mut self) -> Checked<()> {
        let mut looks = 0;
        until_within(BOOT_PATIENCE, "the guest's prompt", async || {
            self.reads();
            looks += 1;
            let asked = self.text.trim_end_matches(' ');
            let keys = match asked {
                _ if asked.ends_with('$') => return Ok(Some(())),
                _ if asked.ends_with("login:") => "ann\n",
                _ if asked.ends_with("assword:") => "secret\n",
                // A guest that is booting loses keys.
                _ if looks % 100 == 1 => "\n",
                _ => return Err(self.has_said()),
            };
            self.text.push_str(keys);
            self.types(keys);
            Err(self.has_said())
        })
        .await
    }

    /// Gives a command until this is said: who types while the VM moves loses keys.
    async fn answers(&mut self, keys: &str, text: &str) -> Checked<()> {
        let mut looks = 0;
        until_within(BOOT_PATIENCE, &format!("{text:?} to be said"), async || {
            if looks % 100 == 0 {
                self.types(keys);
            }
            looks += 1;
            self.reads();
            if let Some(at) = self.text.find(text) {
                self.text.drain(..at + text.len());
                return Ok(Some(()));
            }
            Err(self.has_said())
        })
        .await
    }

    fn reads(&mut self) {
        while let Ok(said) = self.said.try_recv() {
            self.text.push_str(&String::from_utf8_lossy(&said));
        }
    }

    fn has_said(&self) -> perigee_model::Problem {
        perigee_model::Problem::internal("console", self.text.clone())
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        // It may have ended before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A job in a cloud image: there is no runner of ours in it.
const JOB: &str = "\
name: guest
image: cloud
memory: 512MiB
placement: {host: home2, move: never}
inputs: [words]
command: |
  test ! -e /usr/sbin/perigee-runner
  hostname
  wc -w <inputs/words >/output/count
  od -A n -t u1 /sys/firmware/efi/efivars/SecureBoot-* | xargs || true
  exit 3
";

/// Four bytes of attributes, and that Secure Boot is on (UEFI specification, 3.3 and 8.2).
const IS_SECURE: &str = "6 0 0 0 1";

async fn check_job(system: &System, id: &JobId, to: &str) -> Checked<()> {
    let job = until_within(BOOT_PATIENCE, "the end of the cloud image's job", async || {
        let job = system.job(id).await?;
        Ok(job.state.is_final().then_some(job))
    })
    .await?;
    let log = system.log(id).await?;
    ensure!(job.exit_code == Some(3), "{:?} {}; {log:?}", job.state, job.reason);
    ensure!(log.iter().any(|line| line == id.as_str()), "its host name is not in {log:?}");
    system.does(&["job", "output", id.as_str(), "--to", to])?;
    let count = std::fs::read_to_string(format!("{to}/output/count")).unwrap_or_default();
    ensure!(count.trim() == "3", "its output is {count:?}");
    Ok(())
}

/// What cloud-init has made of the network: the address, the way out, names, and the world.
fn check_network(system: &System) -> Checked<()> {
    let world = World::make(system)?;
    let greeting = format!("exec 3<>/dev/tcp/{}/7000; head -1 <&3", world.address);
    for (command, wanted) in [
        ("ip -4 -oneline address show", "10.7.0.2/24"),
        ("ip link show", "mtu 1370"),
        ("ip route show default", "default via 10.7.0.1"),
        ("getent ahosts web.perigee.internal", "10.7.0.2"),
        (&greeting, "welcome"),
    ] {
        let said = system.does(&["vm", "exec", "web", "--", "bash", "-c", command])?;
        ensure!(said.contains(wanted), "{command}: {wanted:?} is not in {said:?}");
    }
    Ok(())
}

/// Somebody else's client for WebSockets. The person who was at the console before is still logged in there.
fn check_websockets(system: &System) -> Checked<()> {
    let socket = system.lab.api.strip_prefix("unix:").expect("a socket");
    let typed = "echo eight times eight is $((8 * 8))";
    let mut client = Command::new("/usr/bin/python3");
    client.args(["-I", "-c", include_str!("websocket.py"), socket, typed, "is 64"]);
    let output = client.output().expect("python3; `make setup` installs it");
    ensure!(output.status.success() && output.stdout == b"binary RFB 003.008\n\n", "{output:?}");
    Ok(())
}

/// The disk of the second volume of `web`.
const SECOND: &str = "/dev/disk/by-id/virtio-data1";

/// Gives `web` a vCPU, a larger disk and a volume, and takes memory from it, while its guest runs.
async fn change_live(system: &System) -> Checked<()> {
    system.web_says("nproc", "1\n").await?;
    system.does(&["vm", "resize", "web", "--cpus", "2", "--disk", "7GiB"])?;
    // As often as it takes the guest to give it.
    until("the guest to give memory back", async || {
        let less = ["-f", "json", "vm", "resize", "web", "--memory", "448MiB"];
        let has: Vm = serde_json::from_str(&system.does(&less)?).expect("a VM");
        ensure!(has.reason.is_empty(), "{}", has.reason);
        Ok(Some(()))
    })
    .await?;
    system.volume("more", "home1", 32 * MIB).await?;
    system.does(&["vm", "attach", "web", "more"])?;
    system.web_says(&format!("test -b {SECOND}"), "").await?;
    let mount = format!("mountpoint -q /mnt || {{ mkfs.ext4 -qF {SECOND}; mount {SECOND} /mnt; }}");
    system.web_says(&format!("{mount}; echo kept >/mnt/kept; sync"), "").await?;
    check_live(system).await
}

/// Whether its guest has all of it.
async fn check_live(system: &System) -> Checked<()> {
    let size = "lsblk --bytes --nodeps --noheadings --output SIZE /dev/disk/by-id/virtio-root";
    let grown = "test $(df --output=size -m / | tail -n 1) -gt 6144";
    let kept = "echo 3 >/proc/sys/vm/drop_caches; cat /mnt/kept";
    system.web_says(&format!("nproc; {size}; {grown}; {kept}"), "2\n7516192768\nkept\n").await
}

/// Takes the volume from `web`. It keeps what was written, and can't be written when it comes again to be read.
async fn take_volume(system: &System) -> Checked<()> {
    system.web_says("if mountpoint -q /mnt; then umount /mnt; fi", "").await?;
    system.does(&["vm", "detach", "web", "more"])?;
    system.web_says("grep -hx 'data[0-9]' /sys/block/*/serial", "data0\n").await?;
    system.does(&["vm", "attach", "web", "more", "--read-only"])?;
    let mount = format!("mountpoint -q /mnt || mount -o ro {SECOND} /mnt");
    let read = format!("{mount}; cat /mnt/kept; blockdev --getro {SECOND}");
    system.web_says(&read, "kept\n1\n").await
}

/// Ctrl-C at `vm exec` ends what runs in the guest.
async fn program_ends_with_its_client(system: &System) -> Checked<()> {
    let mut client = Command::new(env!("CARGO_BIN_EXE_perigee"))
        .args(["vm", "exec", "web", "--", "sh", "-c", "sleep 98765; true"])
        .env("PERIGEE_API", &system.lab.api)
        .spawn()
        .expect("the perigee binary runs");
    let checked = interrupted_client_ends(system, &mut client).await;
    // It has ended already, unless a check has failed.
    let _ = client.kill();
    client.wait().expect("a process");
    checked
}

async fn interrupted_client_ends(system: &System, client: &mut Child) -> Checked<()> {
    let looks = "pgrep -x sleep -a | grep -c 98765 || true";
    system.web_says(looks, "1\n").await?;
    let pid = client.id().to_string();
    let interrupted = Command::new("kill").args(["-INT", &pid]).status().expect("kill runs");
    ensure!(interrupted.success(), "{interrupted}");
    let ended =
        until("the client to end", async || Ok(client.try_wait().expect("a process"))).await?;
    ensure!(ended.code() == Some(130), "{ended}");
    system.web_says(looks, "0\n").await
}

#[test]
fn a_cloud_image_is_configured_changed_moved_stopped_and_spoken_to() {
    let image = std::env::var("PERIGEE_TEST_CLOUD_IMAGE")
        .expect("PERIGEE_TEST_CLOUD_IMAGE names the cloud image; make test sets it");
    with_system(async |system| {
        system.volume("data", "home1", 64 * MIB).await?;
        let files = system.lab.dir().join("cloud-init");
        std::fs::create_dir_all(&files).expect("a directory");
        let (key, user_data) = (files.join("id.pub"), files.join("user-data"));
        std::fs::write(&key, "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKey ann@desk\n").expect("a key");
        std::fs::write(&user_data, USER_DATA).expect("user-data");
        let path = |file: &std::path::Path| file.display().to_string();
        let (key, user_data) = (path(&key), path(&user_data));

        system.does(&["image", "import", "cloud", &image])?;
        let job_file = files.join("job.yaml");
        let secure = format!("firmware: uefi-secure\n{JOB}");
        std::fs::write(&job_file, secure).expect("a job file");
        std::fs::write(files.join("words"), "one two three\n").expect("its input");
        // It boots while the VM does.
        let job = system.does(&["-f", "json", "job", "submit", &path(&job_file)])?;
        let job: Job = serde_json::from_str(&job).expect("a job");
        let create =
            ["vm", "create", "web", "--image", "cloud", "--memory", "512MiB", "--disk", "6GiB"];
        let options = ["--user", "ann", "--ssh-key", &key, "--user-data", &user_data, "--tpm"];
        let places = ["--site", "home", "--volume", "data:/srv/data", "--network", "blue", "--vnc"];
        system.does(&["network", "create", "blue", "--subnet", "10.7.0.0/24", "--nat"])?;
        system.does(&[&create[..], &options, &places].concat())?;
        system.console_says("web", "said all").await?;
        let said = system.does(&["vm", "console", "web", "--log"])?;
        for text in ["name: web", "key: ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKey"] {
            ensure!(said.contains(text), "{text:?} is not in {said}");
        }
        let root_mib = said.split("root: ").nth(1).and_then(|rest| rest.split(' ').next());
        let root_mib: u64 = root_mib.and_then(|mib| mib.parse().ok()).unwrap_or_default();
        ensure!(root_mib > 5000, "the root filesystem has not grown: {said}");

        let host_name = system.does(&["vm", "exec", "web", "--", "cat", "/etc/hostname"])?;
        ensure!(host_name == "web\n", "{host_name:?}");
        check_network(&system)?;
        // What the firmware has told the TPM of itself: not zeros, and only in the TPM's memory.
        let measured = ["vm", "exec", "web", "--", "cat", "/sys/class/tpm/tpm0/pcr-sha256/0"];
        let before = system.does(&measured)?;
        ensure!(before.trim().chars().any(|digit| digit != '0'), "{before:?}");
        let exits = system.perigee(&["vm", "exec", "web", "--", "sh", "-c", "echo no >&2; exit 7"]);
        ensure!(exits.status.code() == Some(7) && exits.stderr == b"no\n", "{exits:?}");
        program_ends_with_its_client(&system).await?;
        let (here, back) = (files.join("random"), files.join("random-back"));
        let random: Vec<u8> =
            (0..400_000_u32).map(|at| at.wrapping_mul(31).to_le_bytes()[1]).collect();
        std::fs::write(&here, &random).expect("a file");
        system.does(&["vm", "cp", &path(&here), "web:/root/"])?;
        system.does(&["vm", "cp", "web:/root/random", &path(&back)])?;
        ensure!(std::fs::read(&back).expect("it is back") == random, "it is as it was");
        let refused = system.perigee(&["vm", "cp", "web:/nothing/there", &path(&back)]);
        ensure!(refused.status.code() == Some(5), "{refused:?}");
        let saved = system.does(&["-f", "json", "vm", "snapshot", "web", "saved"])?;
        let saved: ClusterImage = serde_json::from_str(&saved).expect("an image");
        ensure!(saved.note.is_empty(), "{saved:?}");
        let images = system.does(&["image", "list"])?;
        ensure!(images.contains("saved"), "{images}");

        change_live(&system).await?;
        // A person at the console, who stays while the VM moves. A guest that boots for long gives its login there up.
        system.web_says("systemctl start serial-getty@ttyS0", "").await?;
        let mut console = Console::attach(&system, "web");
        console.logs_in().await?;
        console.answers("echo six times seven is $((6 * 7))\n", "is 42").await?;
        let second = system.perigee(&["vm", "console", "web"]);
        ensure!(second.status.code() == Some(5), "one at a time: {second:?}");
        system.does(&["vm", "move", "web", "cloud1"])?;
        let moved = system.vm("web").await?;
        ensure!(moved.host == Some(host("cloud1")), "{moved:?}");
        console.answers("echo seven times seven is $((7 * 7))\n", "is 49").await?;
        let after = system.does(&measured)?;
        ensure!(after == before, "the TPM has not moved: {before:?}, {after:?}");
        check_live(&system).await?;
        take_volume(&system).await?;
        console.types("\u{1d}");
        until("the console to be left", async || Ok(console.child.try_wait().expect("a process")))
            .await?;
        check_websockets(&system)?;

        // Its guest powers off when it is asked to, and boots from the same disk again.
        // On a busy machine it may need more than one try.
        until_within(BOOT_PATIENCE, "the guest to power off", async || {
            system.does(&["vm", "stop", "web"]).map(Some)
        })
        .await?;
        let off = system.vm("web").await?;
        ensure!(off.status == VmState::Stopped && off.reason.is_empty(), "{off:?}");
        system.does(&["vm", "resize", "web", "--memory", "640MiB", "--disk", "8GiB"])?;
        system.does(&["vm", "start", "web"])?;
        system.console_says("web", BOOTS_AGAIN).await?;
        let again = system.vm("web").await?;
        ensure!(again.memory_bytes == 640 * MIB, "{again:?}");
        check_job(&system, &job.id, &path(&files.join("out"))).await?;
        let log = system.log(&job.id).await?;
        ensure!(log.iter().any(|line| line == IS_SECURE), "Secure Boot is not on: {log:?}");
        system.does(&["vm", "delete", "web", "--force"]).map(drop)
    });
}

/// No part of this image is Debian's, systemd's or the GNU project's that Perigee could count on.
#[test]
#[ignore = "it boots for minutes under emulation; `make alpine` runs it"]
fn an_alpine_image_is_configured_and_runs_a_job() {
    let image = std::env::var("PERIGEE_TEST_ALPINE_IMAGE")
        .expect("PERIGEE_TEST_ALPINE_IMAGE names the image; make alpine sets it");
    with_system(async |system| {
        system.volume("data", "home1", 64 * MIB).await?;
        let files = system.lab.dir().join("cloud-init");
        std::fs::create_dir_all(&files).expect("a directory");
        let path = |name: &str| files.join(name).display().to_string();
        std::fs::write(path("id.pub"), "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKey ann@desk\n")
            .expect("a key");
        std::fs::write(path("job.yaml"), JOB).expect("a job file");
        std::fs::write(path("words"), "one two three\n").expect("its input");
        system.does(&["image", "import", "cloud", &image])?;
        let job = system.does(&["-f", "json", "job", "submit", &path("job.yaml")])?;
        let job: Job = serde_json::from_str(&job).expect("a job");
        system.does(&["network", "create", "blue", "--subnet", "10.7.0.0/24", "--nat"])?;
        let create =
            ["vm", "create", "web", "--image", "cloud", "--memory", "512MiB", "--disk", "3GiB"];
        let options = ["--site", "home", "--network", "blue", "--volume", "data"];
        let user = ["--user", "ann", "--ssh-key", &path("id.pub")];
        system.does(&[&create[..], &options, &user].concat())?;
        check_job(&system, &job.id, &path("out")).await?;
        system.console_says("web", "web login:").await?;
        until_within(BOOT_PATIENCE, "the end of cloud-init's work", async || {
            let status = ["vm", "exec", "web", "--", "cat", "/run/cloud-init/result.json"];
            Ok(system.perigee(&status).status.success().then_some(()))
        })
        .await?;
        for (command, wanted) in [
            (
                "test $(df -m / | tail -n 1 | tr -s ' ' | cut -d ' ' -f 2) -gt 2700 && echo grown",
                "grown",
            ),
            ("cat /home/ann/.ssh/authorized_keys", "ann@desk"),
            ("ls /dev/disk/by-id", "virtio-data0"),
            ("ip -4 address show", "10.7.0.2/24"),
            ("ip link show", "mtu 1370"),
            ("nslookup web.perigee.internal", "10.7.0.2"),
        ] {
            let said = system.does(&["vm", "exec", "web", "--", "sh", "-c", command])?;
            ensure!(said.contains(wanted), "{command}: {wanted:?} is not in {said:?}");
        }
        // Its login asks again when nobody is named.
        let mut console = Console::attach(&system, "web");
        console.answers("\n", "web login:").await?;
        console.types("\u{1d}");
        until("the console to be left", async || Ok(console.child.try_wait().expect("a process")))
            .await?;
        until_within(BOOT_PATIENCE, "the guest to power off", async || {
            system.does(&["vm", "stop", "web"]).map(Some)
        })
        .await?;
        system.does(&["vm", "delete", "web"]).map(drop)
    });
}

/// Rank 1 is there until rank 0 has logged in there, and its SSH server ends with its command.
const PAIR: &str = "\
name: pair
image: cloud
memory: 512MiB
count: 2
placement: {site: home, move: never}
command: |
  set -e
  echo rank $PERIGEE_RANK of $PERIGEE_COUNT is $(hostname)
  if [ $PERIGEE_RANK = 0 ]; then
    other=$(sed -n 2p $PERIGEE_HOSTS | cut -d ' ' -f 1)
    ssh $other 'echo $(hostname) is rank $PERIGEE_RANK' >/output/said
    ssh n1 touch /tmp/seen || true
  else
    until [ -e /tmp/seen ]; do sleep 1; done
  fi
";

#[test]
#[ignore = "it boots for minutes under emulation; `make alpine` runs it"]
fn an_alpine_image_runs_a_job_whose_vms_log_in_to_each_other() {
    let image = std::env::var("PERIGEE_TEST_ALPINE_IMAGE")
        .expect("PERIGEE_TEST_ALPINE_IMAGE names the image; make alpine sets it");
    with_system(async |system| {
        system.does(&["image", "import", "cloud", &image])?;
        let job = system.submit(PAIR).await?;
        let ended = until_within(BOOT_PATIENCE, "the end of the job", async || {
            let job = system.job(&job.id).await?;
            Ok(job.state.is_final().then_some(job))
        })
        .await?;
        for rank in 0..2 {
            let log = log_of(&system, job.id.as_str(), rank).await?;
            ensure!(ended.state == JobState::Succeeded, "{}; {rank}: {log:?}", ended.reason);
            let wanted = format!("rank {rank} of 2 is {}-n{rank}", job.id);
            ensure!(log.contains(&wanted), "{wanted:?} is not in {log:?}");
        }
        let to = system.lab.dir().join("outputs");
        system.does(&["job", "output", job.id.as_str(), "--to", &to.display().to_string()])?;
        let said = std::fs::read_to_string(to.join("rank-0/output/said")).unwrap_or_default();
        ensure!(said == format!("{}-n1 is rank 1\n", job.id), "{said:?}");
        Ok(())
    });
}

/// As Fedora has it. cloud-init of this image does not grow its root at boot: of a job the runner does, and of a VM cloud-init when the
/// disk becomes larger.
#[test]
#[ignore = "its image takes minutes to build; `make btrfs` runs it"]
fn a_root_on_btrfs_becomes_as_large_as_its_disk() {
    let image = std::env::var("PERIGEE_TEST_BTRFS_IMAGE")
        .expect("PERIGEE_TEST_BTRFS_IMAGE names the image; make btrfs sets it");
    with_system(async |system| {
        system.does(&["image", "import", "cloud", &image])?;
        let job = system
            .submit(
                "name: grows\nimage: cloud\nmemory: 512MiB\nroot: 6GiB\nplacement: {site: home}\n\
                 command: df --output=fstype,size -B1M / | tail -n 1",
            )
            .await?;
        let create =
            ["vm", "create", "web", "--image", "cloud", "--memory", "512MiB", "--disk", "6GiB"];
        system.does(&[&create[..], &["--site", "home"]].concat())?;
        let job = until_within(BOOT_PATIENCE, "the end of the job", async || {
            let job = system.job(&job.id).await?;
            Ok(job.state.is_final().then_some(job))
        })
        .await?;
        let log = system.log(&job.id).await?;
        ensure!(job.exit_code == Some(0), "{:?} {}; {log:?}", job.state, job.reason);
        let size = log.iter().find_map(|line| line.trim().strip_prefix("btrfs"));
        let root_mib = size.and_then(|mib| mib.trim().parse::<u64>().ok());
        ensure!(root_mib.is_some_and(|mib| mib > 5 << 10), "it has not grown: {log:?}");

        system.web_says("nproc", "1\n").await?;
        until_within(BOOT_PATIENCE, "the filesystem of the VM to grow", async || {
            let larger = ["-f", "json", "vm", "resize", "web", "--disk", "7GiB"];
            let has: Vm = serde_json::from_str(&system.does(&larger)?).expect("a VM");
            ensure!(has.reason.is_empty(), "{}", has.reason);
            Ok(Some(()))
        })
        .await?;
        system
            .web_says("test $(df --output=size -BM / | tail -n 1 | tr -d M) -gt 6144", "")
            .await?;
        system.does(&["vm", "delete", "web", "--force"]).map(drop)
    });
}
