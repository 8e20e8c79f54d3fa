//! Nodes of Slurm that are VMs: Debian's slurmctld and munged, the programs that slurmctld calls, and real VMs.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use perigee_lab::{Definition, LabId};
use perigee_model::job::Vm;
use perigee_model::persistent_vm::VmState;

use super::network::operators_network;
use super::persistent_vms::BOOT_PATIENCE;
use super::{
    Checked, System, ensure, failed, host, succeeded, until, until_within, with_system,
    with_system_of,
};

/// Slurm's controller, with a munged of its own, in the network of the host home1.
struct Slurm {
    dir: tempfile::TempDir,
    namespace: String,
    munged: Child,
    slurmctld: Child,
}

impl Drop for Slurm {
    fn drop(&mut self) {
        ends(&mut self.slurmctld);
        ends(&mut self.munged);
    }
}

/// Asks a process to end, and sees to it.
fn ends(child: &mut Child) {
    // It may have ended before.
    let _ = Command::new("kill").arg(child.id().to_string()).stderr(Stdio::null()).status();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(20) {
        if matches!(child.try_wait(), Ok(Some(_))) {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let _ = child.kill();
    let _ = child.wait();
}

/// In the network of a host. The process keeps its id.
fn in_namespace(namespace: &str, program: &str) -> Command {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", namespace, program]).stdin(Stdio::null());
    command
}

/// What the nodes are, and when slurmctld calls for them.
struct Settings<'a> {
    /// The address at which nodes reach slurmctld.
    address: &'a str,
    suspend_time_s: u32,
    parameters: &'a str,
    /// Below `- prefix: cloud` in the configuration of `perigee slurm`.
    vm: &'a str,
}

impl Slurm {
    /// The nodes are cloud1 to cloud3.
    async fn start(system: &System, settings: &Settings<'_>) -> Checked<Self> {
        let dir = tempfile::Builder::new().prefix("perigee-slurm-").tempdir().map_err(failed)?;
        let at = dir.path();
        let namespace = system.lab.definition.host_namespace(&host("home1"));
        std::fs::create_dir(at.join("state")).map_err(failed)?;
        let key: Vec<u8> = (0..128).collect();
        std::fs::write(at.join("munge.key"), key).map_err(failed)?;
        restrict(&at.join("munge.key"), 0o600)?;
        // Nodes' munged are asked at the same path.
        restrict(at, 0o755)?;
        for verb in ["resume", "suspend", "resume-fail"] {
            let script = format!(
                "#!/bin/sh\nexec {} --api {} slurm {verb} --config {} \"$1\"\n",
                env!("CARGO_BIN_EXE_perigee"),
                system.lab.api,
                at.join("perigee.yaml").display()
            );
            std::fs::write(at.join(verb), script).map_err(failed)?;
            restrict(&at.join(verb), 0o755)?;
        }
        let config = format!(
            "cluster: test\nslurmctld: {}\nlog: {log}\nstate: {state}\ngrace: 1s\nnodes:\n  - prefix: cloud\n{}",
            settings.address,
            settings.vm.replace("@DIR@", &at.display().to_string()),
            log = at.join("log").display(),
            state = at.join("looks").display(),
        );
        std::fs::write(at.join("perigee.yaml"), config).map_err(failed)?;
        std::fs::write(at.join("slurm.conf"), conf(at, settings)?).map_err(failed)?;
        let munged = munged(at, &namespace)?;
        let slurmctld = slurmctld(at, &namespace)?;
        let slurm = Self { dir, namespace, munged, slurmctld };
        slurm.is_up().await?;
        Ok(slurm)
    }

    async fn is_up(&self) -> Checked<()> {
        let ping = || self.run(&["scontrol", "ping"]);
        until("slurmctld to answer", async || {
            let said = ping();
            ensure!(said.status.success(), "{said:?}; {}", self.file("slurmctld.log"));
            Ok(Some(()))
        })
        .await
    }

    fn file(&self, name: &str) -> String {
        std::fs::read_to_string(self.dir.path().join(name)).unwrap_or_default()
    }

    /// A command of Slurm, or `perigee slurm`, as slurmctld's machine has them.
    fn run(&self, words: &[&str]) -> Output {
        let mut command = in_namespace(&self.namespace, words[0]);
        command.args(&words[1..]).env("SLURM_CONF", self.dir.path().join("slurm.conf"));
        command.output().expect("ip runs; `make setup` installs Slurm")
    }

    fn does(&self, words: &[&str]) -> Checked<String> {
        let output = self.run(words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{words:?}: {said}");
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn perigee(&self, system: &System, words: &[&str]) -> Output {
        let config = self.dir.path().join("perigee.yaml").display().to_string();
        let mut all =
            vec![env!("CARGO_BIN_EXE_perigee"), "--api", &system.lab.api, "-f", "csv", "slurm"];
        all.extend_from_slice(words);
        all.extend_from_slice(&["--config", &config]);
        self.run(&all)
    }

    /// As `perigee slurm` prints it; and whether it has succeeded.
    fn says(&self, system: &System, words: &[&str]) -> (bool, String) {
        let output = self.perigee(system, words);
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&said).into_owned())
    }

    /// Waits until the state of a node has all of these words.
    async fn node_is(&self, node: &str, words: &[&str]) -> Checked<()> {
        until(&format!("node {node} to be {words:?}"), async || {
            let said = self.does(&["scontrol", "--oneliner", "show", "node", node])?;
            let state = said.split_once(" State=").and_then(|(_, rest)| rest.split(' ').next());
            let flags: Vec<&str> = state.unwrap_or_default().split('+').collect();
            ensure!(
                words.iter().all(|word| flags.contains(word)),
                "it is {flags:?}; {}",
                self.file("log")
            );
            Ok(Some(()))
        })
        .await
    }

    async fn has_logged(&self, text: &str) -> Checked<()> {
        until(&format!("the log to have {text:?}"), async || {
            let log = self.file("log");
            ensure!(log.contains(text), "it has {log}; {}", self.file("slurmctld.log"));
            Ok(Some(()))
        })
        .await
    }

    /// Replaces a line of slurm.conf.
    fn set(&self, key: &str, value: u32) -> Checked<()> {
        let begin = format!("{key}=");
        let conf = self.file("slurm.conf");
        let lines = conf.lines().map(|line| match line.starts_with(&begin) {
            true => format!("{begin}{value}\n"),
            false => format!("{line}\n"),
        });
        std::fs::write(self.dir.path().join("slurm.conf"), lines.collect::<String>())
            .map_err(failed)?;
        self.does(&["scontrol", "reconfigure"]).map(drop)
    }

    async fn restart(&mut self) -> Checked<()> {
        self.slurmctld = slurmctld(self.dir.path(), &self.namespace)?;
        self.is_up().await
    }

    fn submit(&self, script: &str) -> Checked<String> {
        let said = self.does(&["sbatch", "--parsable", "--output=/dev/null", "--wrap", script])?;
        Ok(said.trim().to_owned())
    }

    /// Waits until a job has ended, with this exit code.
    async fn job_ends(&self, job: &str, code: &str) -> Checked<()> {
        until_within(BOOT_PATIENCE, &format!("job {job} to end"), async || {
            let said = self.does(&["scontrol", "--oneliner", "show", "job", job])?;
            let has_ended = ["COMPLETED", "FAILED"]
                .iter()
                .any(|state| said.contains(&format!("JobState={state}")));
            if !has_ended {
                // The guest needs the CPU.
                tokio::time::sleep(Duration::from_secs(1)).await;
                return Err(failed(format!("{said}; {}", self.file("log"))));
            }
            Ok(Some(said))
        })
        .await
        .and_then(|said| {
            ensure!(said.contains(&format!(" ExitCode={code}:0 ")), "{said}");
            Ok(())
        })
    }
}

fn restrict(path: &Path, mode: u32) -> Checked<()> {
    let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
    std::fs::set_permissions(path, mode).map_err(failed)
}

/// The addresses of the nodes are none, until they register: in the network of a host nobody answers who has which name.
fn conf(dir: &Path, settings: &Settings<'_>) -> Checked<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").map_err(failed)?;
    let name = name.trim().split('.').next().unwrap_or_default();
    let Settings { address, suspend_time_s, parameters, .. } = settings;
    let dir = dir.display();
    Ok(format!(
        "ClusterName=test\nSlurmctldHost={name}({address})\nSlurmUser=root\n\
         AuthType=auth/munge\nAuthInfo=socket={dir}/munge.socket\n\
         StateSaveLocation={dir}/state\nSlurmctldPidFile={dir}/slurmctld.pid\n\
         SlurmdSpoolDir=/var/spool/slurmd\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n\
         SlurmctldParameters={parameters}power_save_interval=1,power_save_min_interval=0,enable_configless,idle_on_node_suspend\n\
         PrivateData=cloud\nReturnToService=2\nTreeWidth=65533\n\
         ResumeProgram={dir}/resume\nSuspendProgram={dir}/suspend\nResumeFailProgram={dir}/resume-fail\n\
         SuspendTime={suspend_time_s}\nSuspendTimeout=5\nResumeTimeout=1800\n\
         NodeName=cloud[1-3] NodeAddr=127.0.0.[11-13] CPUs=1 RealMemory=100 State=CLOUD\n\
         PartitionName=cloud Nodes=cloud[1-3] Default=YES State=UP\n"
    ))
}

fn log_file(dir: &Path, name: &str) -> Checked<std::fs::File> {
    let path: PathBuf = dir.join(name);
    std::fs::File::options().append(true).create(true).open(path).map_err(failed)
}

fn munged(dir: &Path, namespace: &str) -> Checked<Child> {
    let path = |name: &str| dir.join(name).display().to_string();
    let mut command = in_namespace(namespace, "munged");
    command.args(["--foreground", "--force", "--key-file", &path("munge.key")]);
    command.args(["--socket", &path("munge.socket"), "--pid-file", &path("munge.pid")]);
    command.args(["--log-file", &path("munge.log"), "--seed-file", &path("munge.seed")]);
    let log = log_file(dir, "munge.out")?;
    command.stderr(log.try_clone().map_err(failed)?).stdout(log);
    command.spawn().map_err(failed)
}

fn slurmctld(dir: &Path, namespace: &str) -> Checked<Child> {
    let mut command = in_namespace(namespace, "slurmctld");
    let log = log_file(dir, "slurmctld.log")?;
    command.args(["-D", "-f"]).arg(dir.join("slurm.conf"));
    command.stderr(log.try_clone().map_err(failed)?).stdout(log);
    command.spawn().map_err(failed)
}

impl System {
    fn tells(&self, what: &str) {
        eprintln!("at {:.1} s: {what}", self.begun.elapsed().as_secs_f64());
    }

    /// The VM of this name, if there is one.
    async fn vm_if_any(&self, name: &str) -> Checked<Option<Vm>> {
        // Not the VM alone: its guest would be asked for its addresses, and the golden image lets that wait.
        let all: Vec<Vm> = self.get("/v1/vms").await?;
        Ok(all.into_iter().find(|vm| vm.id.as_str() == name))
    }

    async fn has_no_vm(&self, name: &str) -> Checked<()> {
        until(&format!("VM {name} to be gone"), async || {
            let found = self.vm_if_any(name).await?;
            ensure!(found.is_none(), "{found:?}");
            Ok(Some(()))
        })
        .await
    }

    async fn vm_runs(&self, name: &str) -> Checked<Vm> {
        until(&format!("VM {name} to run"), async || {
            let found = self.vm_if_any(name).await?;
            Ok(found.filter(|vm| vm.status == VmState::Running))
        })
        .await
    }
}

/// A guest in which no slurmd runs.
const WITHOUT_SLURMD: Settings<'_> = Settings {
    address: "127.0.0.1",
    suspend_time_s: 3600,
    parameters: "cloud_reg_addrs,",
    vm: "    image: debian\n    memory: 256MiB\n    host: home1\n    network: none\n",
};

/// cloud1 never registers, so Slurm gives it up.
async fn is_given_up_and_used_again(system: &System, slurm: &Slurm) -> Checked<()> {
    let job = slurm.submit("true")?;
    let vm = system.vm_runs("cloud1").await?;
    ensure!(vm.labels.get("slurm") == Some("test"), "{vm:?}");
    slurm.has_logged("resume: cloud1 made").await?;
    system.tells("the node's VM runs");
    slurm.set("ResumeTimeout", 1)?;
    slurm.has_logged("resume-fail: cloud1 reset: ended: VM cloud1 was running").await?;
    ensure!(system.vm_if_any("cloud1").await?.is_none(), "resume-fail has not ended its VM");
    slurm.node_is("cloud1", &["IDLE", "POWERED_DOWN"]).await?;
    slurm.does(&["scancel", &job])?;
    slurm.set("ResumeTimeout", 1800)?;
    system.tells("a node that was not up in time is reset, and its VM is gone");

    slurm.does(&["scontrol", "update", "nodename=cloud1", "state=power_up"])?;
    system.vm_runs("cloud1").await?;
    slurm.does(&["scontrol", "update", "nodename=cloud1", "state=power_down_force"])?;
    slurm.has_logged("suspend: cloud1 ended").await?;
    system.has_no_vm("cloud1").await?;
    slurm.node_is("cloud1", &["IDLE", "POWERED_DOWN"]).await?;
    system.tells("the node was used again and suspended");
    Ok(())
}

/// A VM of the name of a node that somebody has made for something else.
async fn leaves_others_alone(system: &System, slurm: &Slurm) -> Checked<()> {
    system.does(&[
        "vm",
        "create",
        "cloud2",
        "--image",
        "debian",
        "--memory",
        "256MiB",
        "--stopped",
    ])?;
    for verb in ["suspend", "resume", "resume-fail"] {
        let (is_done, said) = slurm.says(system, &[verb, "cloud2"]);
        ensure!(!is_done && said.contains("no label slurm=test"), "{verb}: {said}");
    }
    system.tells("the VM of another one was left alone");
    Ok(())
}

/// A VM that Slurm will never ask for, because its node is powered down.
async fn is_found_by_reconcile(system: &System, slurm: &mut Slurm) -> Checked<()> {
    for wanted in ["cloud3,made,", "cloud3,there,"] {
        let (is_done, said) = slurm.says(system, &["resume", "cloud3"]);
        ensure!(is_done && said.contains(wanted), "{wanted}: {said}");
    }
    let (is_done, said) = slurm.says(system, &["reconcile"]);
    ensure!(is_done && said.contains("cloud3,waits,") && !said.contains("cloud2"), "{said}");

    system.tells("the VM of a node that is powered down is seen");
    // The grace period is over, and Slurm can't be asked.
    ends(&mut slurm.slurmctld);
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let (is_done, said) = slurm.says(system, &["reconcile"]);
    ensure!(!is_done && said.contains("can't ask Slurm"), "{said}");
    let stays = system.vm_if_any("cloud3").await?;
    ensure!(stays.is_some_and(|vm| vm.status == VmState::Running), "it was ended");

    system.tells("nothing was ended while slurmctld was away");
    slurm.restart().await?;
    let (is_done, said) = slurm.says(system, &["reconcile"]);
    ensure!(is_done && said.contains("cloud3,ended,"), "{said}");
    ensure!(system.vm_if_any("cloud3").await?.is_none(), "reconcile has not ended it");
    ensure!(system.vm_if_any("cloud2").await?.is_some(), "reconcile has ended what is no node");
    Ok(())
}

#[test]
fn nodes_of_slurm_come_and_go_with_their_vms_and_none_is_left() {
    with_system(async |system| {
        let mut slurm = Slurm::start(&system, &WITHOUT_SLURMD).await?;
        is_given_up_and_used_again(&system, &slurm).await?;
        leaves_others_alone(&system, &slurm).await?;
        is_found_by_reconcile(&system, &mut slurm).await
    });
}

/// What makes a cloud image with slurmd and munge a node.
const USER_DATA: &str = r#"#!/bin/sh
set -eu
base64 -d >/etc/munge/munge.key <<KEY
@KEY@
KEY
chown munge:munge /etc/munge/munge.key
chmod 400 /etc/munge/munge.key
mkdir -p @DIR@ /etc/systemd/system/slurmd.service.d
ln -s /run/munge/munge.socket.2 @DIR@/munge.socket
echo 'SLURMD_OPTIONS="--conf-server @SLURMCTLD@"' >/etc/default/slurmd
printf '[Unit]\nConditionPathExists=\n[Service]\nRestart=on-failure\nRestartSec=2\n' >/etc/systemd/system/slurmd.service.d/node.conf
systemctl daemon-reload
systemctl start --no-block munge slurmd
"#;

const WITH_SLURMD: Settings<'_> = Settings {
    address: "192.0.2.1",
    suspend_time_s: 5,
    parameters: "cloud_reg_addrs,",
    vm: "    image: cloud\n    memory: 512MiB\n    host: home1\n    network: bridge:br0\n    \
         volumes: ['data:ro']\n    user-data: @DIR@/user-data\n",
};

/// Addresses for the nodes, as the operator's network has them.
fn dhcp(namespace: &str, dir: &Path) -> Checked<Child> {
    let mut command = in_namespace(namespace, "dnsmasq");
    command.args(["--keep-in-foreground", "--conf-file=/dev/null", "--port=0", "--interface=br0"]);
    command.args(["--bind-interfaces", "--dhcp-range=192.0.2.100,192.0.2.150,1h", "--user=root"]);
    command.arg(format!("--dhcp-leasefile={}", dir.join("leases").display()));
    command.arg(format!("--pid-file={}", dir.join("dnsmasq.pid").display()));
    let log = log_file(dir, "dnsmasq.log")?;
    command.stderr(log.try_clone().map_err(failed)?).stdout(log);
    command.spawn().map_err(failed)
}

/// It ends with the first byte of the volume once somebody says that its VM has moved.
const JOB: &str = "until test -e /run/moved; do sleep 1; done; \
                   exit $(od -A n -t u1 -N 1 /dev/disk/by-id/virtio-data0)";

struct Dhcp(Child);

impl Drop for Dhcp {
    fn drop(&mut self) {
        ends(&mut self.0);
    }
}

async fn whole_story(system: &System, slurm: &Slurm) -> Checked<()> {
    let job = slurm.submit(JOB)?;
    until_within(BOOT_PATIENCE, "the node to register", async || {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let said = slurm.does(&["scontrol", "--oneliner", "show", "node", "cloud1"])?;
        let is_coming = ["POWER", "NOT_RESPONDING"].iter().any(|flag| said.contains(flag));
        let is_up = said.contains("State=ALLOCATED") && !is_coming;
        ensure!(is_up, "{said}; {}", slurm.file("slurmctld.log"));
        Ok(Some(()))
    })
    .await?;
    system.tells("the node has registered");
    system.does(&["vm", "move", "cloud1", "home2"])?;
    system.tells("the VM has moved");
    system.does(&["vm", "exec", "cloud1", "--", "touch", "/run/moved"])?;
    slurm.job_ends(&job, "42").await?;
    system.tells("the job has ended");
    slurm.has_logged("suspend: cloud1 ended").await?;
    system.has_no_vm("cloud1").await?;
    slurm.node_is("cloud1", &["IDLE", "POWERED_DOWN"]).await?;
    system.tells("the node is suspended, and its VM is gone");

    let job = slurm.submit("true")?;
    system.vm_runs("cloud1").await?;
    slurm.set("ResumeTimeout", 1)?;
    slurm.has_logged("resume-fail: cloud1 reset").await?;
    system.has_no_vm("cloud1").await?;
    slurm.node_is("cloud1", &["IDLE", "POWERED_DOWN"]).await?;
    system.tells("a node that was not up in time is reset, and its VM is gone");
    slurm.does(&["scancel", &job])?;
    slurm.set("ResumeTimeout", 1800)?;
    let job = slurm.submit("exit 7")?;
    slurm.job_ends(&job, "7").await?;
    system.tells("the node was used again");
    system.has_no_vm("cloud1").await
}

#[test]
#[ignore = "a guest boots twice in an image with slurmd: minutes under emulation; `make slurm` runs it"]
fn a_job_of_slurm_runs_in_a_vm_that_comes_for_it_moves_and_goes() {
    let mut definition = Definition::default_demo(LabId::random(), 16);
    definition.bridges.push("br0".to_owned());
    with_system_of(definition, async |system| {
        let image = std::env::var("PERIGEE_TEST_CLOUD_IMAGE")
            .expect("PERIGEE_TEST_CLOUD_IMAGE names the cloud image; make slurm sets it");
        system.does(&["image", "import", "cloud", &image])?;
        let namespace = operators_network(&system).await?;
        system.volume("data", "home1", 1 << 20).await?;
        let written = system.qemu_io("home1", "data", "write -P 42 0 4096");
        ensure!(succeeded(&written), "{written:?}");
        let slurm = Slurm::start(&system, &WITH_SLURMD).await?;
        let dir = slurm.dir.path();
        let key = std::fs::read(dir.join("munge.key")).map_err(failed)?;
        let data = USER_DATA.replace("@KEY@", &base64(&key));
        let data = data.replace("@DIR@", &dir.display().to_string());
        std::fs::write(dir.join("user-data"), data).map_err(failed)?;
        let _dhcp = Dhcp(dhcp(&namespace, dir)?);
        whole_story(&system, &slurm).await
    });
}

fn base64(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}
