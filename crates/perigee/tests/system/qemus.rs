//! A VM with all of our devices moves between a host of Debian 12 with QEMU 7.2 and a host of Debian 13 with QEMU 10.0, and back.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use perigee_lab::{Definition, LabId};
use perigee_model::job::Vm;

use super::{Checked, System, ensure, host, with_system_and};

/// The daemons of the host `cloud1` in Debian 13: what they share with the other host is mounted there.
const PROGRAM: &str = r#"#!/bin/sh
set -eu
case "$*" in
*/hosts/cloud1/*) ;;
*) exec NEW "$@" ;;
esac
if [ "$1" != inside ]; then
  exec unshare --mount --propagation private "$0" inside "$@"
fi
shift
own=$(mktemp -d HERE/root-XXXXXX)
mount -t tmpfs none "$own"
mkdir "$own/upper" "$own/work" "$own/root"
# The root directory's mode is that of the upper one, and QEMU's user enters it.
chmod 755 "$own/upper"
mount -t overlay none -o "lowerdir=DEBIAN13,upperdir=$own/upper,workdir=$own/work" "$own/root"
for shared in /dev /proc /sys /run; do
  mount --rbind "$shared" "$own/root$shared"
done
for shared in /tmp /var/lib/perigee-lab /var/cache/perigee TARGET; do
  mkdir -p "$own/root$shared"
  mount --bind "$shared" "$own/root$shared"
done
# Not chroot: what runs in one may make no user namespaces, and passt makes one.
cd "$own/root"
mkdir -p before
pivot_root . before
umount -l /before
exec NEW "$@"
"#;

fn program(dir: &Path) -> PathBuf {
    let root = std::env::var("PERIGEE_TEST_DEBIAN13")
        .expect("PERIGEE_TEST_DEBIAN13 names the root of a Debian 13; make test-qemus sets it");
    let new = env!("CARGO_BIN_EXE_perigee");
    let target = Path::new(new).parent().expect("a directory").display().to_string();
    let script = PROGRAM
        .replace("DEBIAN13", &root)
        .replace("HERE", &dir.display().to_string())
        .replace("TARGET", &target)
        .replace("NEW", new);
    let program = dir.join("perigee");
    std::fs::write(&program, script).expect("write");
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).expect("a mode");
    program
}

/// What the guest sees of its devices, and of what it has stored and computes.
const LOOKS: &str = "\
    cat /sys/class/tpm/tpm0/pcr-sha256/0 /root/written.sum; \
    sha256sum -c --quiet /root/written.sum; \
    lspci -n 2>/dev/null | sha256sum; \
    kill -0 $(cat /run/counts.pid)";

/// Goes on as long as the VM was not started again.
const COUNTS: &str = "\
    test -e /run/counts.pid || { \
      setsid sh -c 'echo $$ >/run/counts.pid; while sleep 1; do date +%s >>/root/counts; done' >/dev/null 2>&1 </dev/null & \
      head -c 3000000 /dev/urandom >/root/written; sha256sum /root/written >/root/written.sum; sync; }; \
    sleep 2; test -s /root/counts";

impl System {
    /// The VM goes there, has all that it had, and writes on.
    async fn web_goes_to(&self, to: &str, looks: &str) -> Checked<()> {
        let said = self.does(&["vm", "move", "web", to])?;
        let moved: Vm = self.vm("web").await?;
        ensure!(moved.host == Some(host(to)), "{moved:?}");
        eprintln!("to {to}: {}", said.trim());
        self.web_says(LOOKS, looks).await?;
        let grows =
            "old=$(wc -l </root/counts); sleep 4; test $(wc -l </root/counts) -gt $old; sync";
        self.web_says(&format!("{grows}; echo 3 >/proc/sys/vm/drop_caches; ls / >/dev/null"), "")
            .await
    }

    /// There and back, twice.
    async fn web_travels(&self, from: &str, to: &str) -> Checked<()> {
        self.web_says(COUNTS, "").await?;
        let looks = self.does(&["vm", "exec", "web", "--", "sh", "-ec", LOOKS])?;
        for _ in 0..2 {
            self.web_goes_to(to, &looks).await?;
            self.web_goes_to(from, &looks).await?;
        }
        Ok(())
    }
}

#[test]
#[ignore = "the root of a Debian 13 has to be made first; `make test-qemus` runs it"]
fn a_vm_with_all_devices_moves_between_qemu_7_2_and_10_0() {
    let image = std::env::var("PERIGEE_TEST_CLOUD_IMAGE")
        .expect("PERIGEE_TEST_CLOUD_IMAGE names the cloud image; make test-qemus sets it");
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).expect("a mode");
    let definition = Definition::default_demo(LabId::random(), 2);
    with_system_and(definition, program(dir.path()), async |system| {
        system.volume("data", "home1", 64 << 20).await?;
        system.does(&["image", "import", "cloud", &image])?;
        let machine = ["--memory", "512MiB", "--firmware", "uefi-secure", "--tpm", "--vnc"];
        let create = ["vm", "create", "web", "--image", "cloud", "--volume", "data"];
        system.does(&[&create[..], &machine, &["--host", "home1"]].concat())?;
        system.console_says("web", "login:").await?;
        system.web_travels("home1", "cloud1").await?;
        // Its QEMU is now that of Debian 13 from its start on.
        system.does(&["vm", "move", "web", "cloud1"])?;
        system.does(&["vm", "stop", "web", "--force"])?;
        system.does(&["vm", "start", "web"])?;
        let again = system.vm("web").await?;
        ensure!(again.host == Some(host("cloud1")), "{again:?}");
        system.web_travels("cloud1", "home1").await
    });
}
