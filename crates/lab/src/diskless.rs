//! A network of machines without disks, on this one machine.
//!
//! ```text
//! pg-ID-boot: servers at 10.77.0.1 == br0 == tap1, tap2 … == QEMU: a network card with iPXE in its ROM
//! ```
//!
//! Everything runs in one namespace that carries the lab's id, so that [`crate::down()`] finds it.

use std::net::Ipv4Addr;
use std::path::Path;

use nix::unistd::Uid;
use perigee_model::Problem;
use tokio::process::Command;

use crate::command::run;
use crate::definition::LabId;
use crate::net::{add_namespace, in_namespace};

/// The servers' address, in a network with a 16-bit prefix.
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
/// The name of the bridge to which machines without disks are connected.
pub const BRIDGE: &str = "br0";
/// A Linux bridge has at most 1024 ports.
pub const MACHINES_MAX: u16 = 1000;
/// A DHCP range with enough addresses for all machines.
pub const RANGE: &str = "10.77.1.1-10.77.4.250";

/// The network namespace in which machines without disks boot.
#[derive(Debug, Clone)]
pub struct Network {
    pub namespace: String,
}

/// A machine's network card.
#[derive(Debug, Clone)]
pub struct Card {
    tap: String,
    pub mac: String,
}

impl Network {
    /// # Errors
    /// The step that failed. [`crate::down()`] removes what was made before.
    pub async fn create(id: &LabId) -> Result<Self, Problem> {
        if !Uid::effective().is_root() {
            let why = "only root can make network namespaces and cards";
            return Err(Problem::invalid("can't make a network", why).next("run it as root"));
        }
        let namespace = format!("{}boot", id.namespace_prefix());
        add_namespace(&namespace).await?;
        let address = format!("{ADDRESS}/16");
        for args in [
            &["link", "add", BRIDGE, "type", "bridge"][..],
            &["addr", "add", &address, "dev", BRIDGE],
            &["link", "set", BRIDGE, "up"],
        ] {
            run("ip", &[&["-n", &namespace], args].concat()).await?;
        }
        Ok(Self { namespace })
    }

    /// A command that runs in the network.
    pub fn command(&self, program: &Path) -> Command {
        in_namespace(&self.namespace, program)
    }

    /// Makes the network card with this number. Numbers start at 1.
    ///
    /// # Errors
    /// The step that failed.
    pub async fn plug(&self, number: u16) -> Result<Card, Problem> {
        let tap = format!("tap{number}");
        run("ip", &["-n", &self.namespace, "tuntap", "add", &tap, "mode", "tap"]).await?;
        run("ip", &["-n", &self.namespace, "link", "set", &tap, "master", BRIDGE, "up"]).await?;
        let [high, low] = number.to_be_bytes();
        Ok(Card { tap, mac: format!("52:54:00:77:{high:02x}:{low:02x}") })
    }

    /// The command line of a QEMU without a disk, whose firmware boots from the card. Its output goes to
    /// the file `console`; its input comes from whoever connects to the socket `keyboard`.
    pub fn machine(
        &self,
        card: &Card,
        memory_mib: u32,
        console: &Path,
        keyboard: &Path,
    ) -> Command {
        let mut command = self.command(Path::new("qemu-system-x86_64"));
        // Without graphics the firmware also uses the serial port.
        command.args(["-accel", "tcg", "-machine", "q35,graphics=off", "-cpu", "max"]);
        command.args(["-m", &memory_mib.to_string(), "-nodefaults", "-display", "none"]);
        command.args(["-no-reboot", "-serial", "chardev:console", "-chardev"]);
        command.arg(format!(
            "socket,id=console,server=on,wait=off,path={},logfile={}",
            keyboard.display(),
            console.display()
        ));
        command.arg("-netdev");
        command.arg(format!("tap,id=net,ifname={},script=no,downscript=no", card.tap));
        command.arg("-device");
        command.arg(format!("virtio-net-pci,netdev=net,mac={},bootindex=0", card.mac));
        command
    }
}
