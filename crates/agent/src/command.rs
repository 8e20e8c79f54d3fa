//! Builds QEMU's command line from the VM's spec, its paths and the accelerator. All functions are pure.
//!
//! Both sides of a migration must build the same machine. So the machine type carries its version, the order of
//! the devices is fixed, and only paths and the accelerator depend on the host. Under TCG the CPU is `max`,
//! which is the same everywhere for one version of QEMU. Under KVM a job's VM has `host`, which has all features of the
//! host, so it can move only between hosts with the same kind of CPU; a VM that lives without a job has
//! [`PERSISTENT_CPU`], or the one that was asked for. QEMU does not start with one that its host does not have.

use std::os::fd::RawFd;
use std::path::Path;

use perigee_model::DiskRole;
use perigee_model::guest::PORT_NAME;
use perigee_model::vm::{Accelerator, Cpu, Disk, Firmware, VmNetwork, VmSpec};
use serde_json::json;

use crate::files::VmDir;

/// The program that runs VMs.
pub const QEMU: &str = "qemu-system-x86_64";

const MACHINE: &str = "pc-q35-7.2,usb=off,vmport=off";
const MIB: u64 = 1 << 20;

/// What x86-64-v2 asks for, and AES: Intel's and AMD's processors have had it since 2011. QEMU 7.2 has no name for it.
pub const PERSISTENT_CPU: &str = "qemu64,+aes,+cx16,+pni,+popcnt,+sse4.1,+sse4.2,+ssse3,enforce=on";

/// QEMU locks all of its memory, so that none of it is swapped. If it can't, it does not start.
pub const MEM_LOCK: [&str; 2] = ["-overcommit", "mem-lock=on"];
/// The last output of a console that is not written to a file.
const CONSOLE_BYTES: u32 = 64 << 10;

/// UEFI firmware with 4 MiB of flash. Both sides of a migration have it in memory that is sent.
const OVMF: &str = "/usr/share/OVMF/OVMF_CODE_4M.fd";
/// The same with Secure Boot.
const OVMF_SECURE: &str = "/usr/share/OVMF/OVMF_CODE_4M.secboot.fd";

/// The firmware's code, which all VMs of a host share. (Debian's package ovmf.) QEMU itself has the BIOS.
pub fn firmware_file(firmware: Firmware) -> Option<&'static str> {
    match firmware {
        Firmware::Bios => None,
        Firmware::Uefi => Some(OVMF),
        Firmware::UefiSecure => Some(OVMF_SECURE),
    }
}

/// Only the firmware itself, in system management mode, changes its variables: else the guest could turn Secure Boot off. That mode
/// does not survive a sleep in which only memory has power.
const SECURE: [&str; 4] =
    ["-global", "driver=cfi.pflash01,property=secure,value=on", "-global", "ICH9-LPC.disable_s3=1"];

/// How long a request waits for a volume server that does not answer before the guest is paused.
const RECONNECT_DELAY_S: u32 = 600;
/// How long a start waits for the volume server.
const OPEN_TIMEOUT_S: u32 = 10;

/// Without `la57` a guest under TCG uses page tables with four levels instead of five. Without `erms` it does not copy and clear
/// memory by `rep movsb` and `rep stosb`, of which TCG carries out one byte at a time.
/// `fsrm`, which QEMU 10.0 has too, is off with `erms`: Linux takes the one for the other, and stands still early in its boot with `fsrm` alone.
pub fn accelerator_arguments(accelerator: Accelerator) -> [&'static str; 4] {
    match accelerator {
        Accelerator::Kvm => ["-accel", "kvm", "-cpu", "host"],
        Accelerator::Tcg => {
            ["-accel", "tcg,thread=multi,tb-size=256", "-cpu", "max,la57=off,erms=off,fsrm=off"]
        }
    }
}

/// Returns the `-m` argument.
///
/// Under TCG the guest gets 8 KiB less than requested, so that its size is no multiple of 256 KiB (64 pages).
/// For a size that is such a multiple, QEMU before 9.0 reads the dirty bits of 64 pages at once, and does not
/// report to TCG's TLB that they were cleared. Later writes to these pages are then not noticed, so the guest
/// arrives with old contents in them and hangs or misbehaves. See `cpu_physical_memory_sync_dirty_bitmap` in
/// QEMU 7.2's `include/exec/ram_addr.h`. The change "physmem: Fix migration dirty bitmap coherency with TCG
/// memory access" fixed it in 9.0. Both sides must have the same size, so it does not depend on QEMU's version.
fn memory(memory_bytes: u64, accelerator: Accelerator) -> String {
    let mib = memory_bytes.div_ceil(MIB);
    match accelerator {
        Accelerator::Kvm => format!("{mib}M"),
        Accelerator::Tcg => format!("{}K", mib * 1024 - 8),
    }
}

/// The arguments by which a VM's QEMU is recognized among all processes.
pub fn mark(dir: &VmDir) -> [String; 2] {
    ["-pidfile".to_owned(), dir.pid().display().to_string()]
}

/// The arguments of a VM's QEMU. Both ends of a migration make the same ones, apart from the last three of the end where the VM arrives.
/// `cable` is QEMU's end of the cable to the VM's network, if it has a card.
pub fn arguments(
    spec: &VmSpec,
    dir: &VmDir,
    volume_socket: &Path,
    accelerator: Accelerator,
    cable: Option<RawFd>,
) -> Vec<String> {
    let mut line = Line(Vec::new());
    line.add(&["-name", &format!("guest={},debug-threads=on", spec.vm)]);
    line.add(&["-nodefaults", "-no-user-config", "-display", "none", "-vga", "none"]);
    line.machine(spec);
    line.cpus_and_memory(spec, accelerator);
    line.add(&[
        "-sandbox",
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
    ]);
    line.add(&mark(dir).each_ref().map(String::as_str));
    line.power(spec);
    line.monitor_and_console(spec, dir);
    line.ports(spec.machine.ports);
    line.disks(spec, volume_socket);
    line.channels_and_balloon(spec, dir);
    line.add(&["-object", "rng-builtin,id=rng", "-device", "virtio-rng-pci,rng=rng"]);
    if let Some(cable) = cable {
        line.card(&spec.network, cable);
    }
    if spec.machine.hardware.vnc {
        line.screen(dir);
    }
    if spec.tpm().is_some() {
        line.add(&["-chardev", &format!("socket,id=tpm,path={}", escape(&dir.tpm()))]);
        line.add(&["-tpmdev", "emulator,id=tpm,chardev=tpm", "-device", "tpm-crb,tpmdev=tpm"]);
    }
    if spec.arrives_by.is_some() {
        // It arrives stopped. The agent first records that it has arrived, and then lets it run.
        line.add(&["-S", "-incoming", "defer"]);
    }
    line.0
}

/// A command line of QEMU in the making. The order of the devices is part of the machine that a guest sees.
struct Line(Vec<String>);

impl Line {
    fn add(&mut self, words: &[&str]) {
        self.0.extend(words.iter().map(ToString::to_string));
    }

    fn machine(&mut self, spec: &VmSpec) {
        let dump = if spec.locks_memory { ",dump-guest-core=off" } else { "" };
        let flash = match spec.machine.firmware {
            Firmware::Bios => "",
            Firmware::Uefi => ",pflash0=firmware,pflash1=nvram",
            Firmware::UefiSecure => ",pflash0=firmware,pflash1=nvram,smm=on",
        };
        self.add(&["-machine", &format!("{MACHINE}{dump}{flash}")]);
        if let Some(file) = firmware_file(spec.machine.firmware) {
            self.add(&["-blockdev", &firmware_node(file)]);
        }
        if spec.machine.firmware == Firmware::UefiSecure {
            self.add(&SECURE);
        }
        if spec.locks_memory {
            self.add(&MEM_LOCK);
        }
    }

    fn cpus_and_memory(&mut self, spec: &VmSpec, accelerator: Accelerator) {
        let [accel, kind, cpu, of_host] = accelerator_arguments(accelerator);
        let model = match &spec.machine.hardware.cpu {
            Cpu::Model(model) => format!("{model},enforce=on"),
            Cpu::Common if spec.machine.persistent && accelerator == Accelerator::Kvm => {
                PERSISTENT_CPU.into()
            }
            Cpu::Common | Cpu::Host => of_host.to_owned(),
        };
        self.add(&[accel, kind, cpu, &model]);
        let max = spec.machine.cpus_max.max(spec.cpus);
        let cpus = match spec.machine.cpus_max {
            0 => spec.cpus.to_string(),
            _ => format!("cpus={},sockets={max},cores=1,threads=1,maxcpus={max}", spec.cpus),
        };
        self.add(&["-m", &memory(spec.memory_bytes, accelerator), "-smp", &cpus]);
    }

    /// What becomes of a guest that powers off, reboots or panics.
    fn power(&mut self, spec: &VmSpec) {
        // A guest that powers off stays until the VM is deleted, so that it can be examined. A job's guest that reboots
        // or panics also ends, because its job would otherwise run twice.
        let reboot = if spec.machine.persistent { "reset" } else { "shutdown" };
        self.add(&["-action", &format!("shutdown=pause,reboot={reboot},panic=pause")]);
        self.add(&["-device", "pvpanic"]);
        self.add(&["-boot", "strict=on"]);
    }

    fn monitor_and_console(&mut self, spec: &VmSpec, dir: &VmDir) {
        self.add(&[
            "-chardev",
            &socket("monitor", &dir.qmp()),
            "-mon",
            "chardev=monitor,mode=control",
        ]);
        let file = escape(&dir.console());
        // A guest may print what it has read.
        let console = match spec.locks_memory {
            true => format!("ringbuf,id=console,size={CONSOLE_BYTES}"),
            false => format!("{},logfile={file},logappend=on", socket("console", &dir.tty())),
        };
        self.add(&["-chardev", &console, "-serial", "chardev:console"]);
    }

    /// For volumes that come and go.
    fn ports(&mut self, count: u8) {
        for port in 0..count {
            // In one slot of the root bus. A guest's disks need no ports of the old kind, of which there are few.
            let first = if port == 0 { ",multifunction=on" } else { "" };
            let at = format!("chassis={},slot={port},addr={PORTS_SLOT}.{port}{first}", port + 1);
            let device = format!("pcie-root-port,id=port{port},bus=pcie.0,{at},io-reserve=0");
            self.add(&["-device", &device]);
        }
    }

    fn disks(&mut self, spec: &VmSpec, volume_socket: &Path) {
        // The state of a TPM is its own program's ([`crate::vm::tpm`]).
        let own = spec.disks.iter().enumerate().filter(|(_, disk)| disk.role != DiskRole::Tpm);
        for (index, disk) in own {
            self.add(&["-blockdev", &block_node(disk, volume_socket)]);
            if disk.role.is_disk_of_guest() {
                self.add(&["-device", &block_device(spec, disk, index).to_string()]);
            }
        }
    }

    /// The serial ports over which the guest talks with the agent, a balloon, and the watchdog that only some VMs have.
    fn channels_and_balloon(&mut self, spec: &VmSpec, dir: &VmDir) {
        let port = |number: u32, chardev: &str, name: &str| {
            format!("virtserialport,bus=channel.0,nr={number},chardev={chardev},name={name}")
        };
        self.add(&["-device", "virtio-serial-pci,id=channel"]);
        self.add(&["-chardev", &socket("job", &dir.job())]);
        self.add(&["-device", &port(1, "job", PORT_NAME)]);
        if spec.machine.persistent {
            self.add(&["-chardev", &socket("agent", &dir.guest_agent())]);
        }
        // A guest that uses it gives its free memory back to the host.
        let keeps = spec.locks_memory || spec.machine.keeps_free_memory;
        let reporting = if keeps { "" } else { ",free-page-reporting=on" };
        // Of a VM whose memory may be made smaller, the guest takes some back before it ends a program.
        let is_given_back = spec.machine.cpus_max > 0 || spec.machine.memory_least_bytes.is_some();
        let back = if is_given_back { ",deflate-on-oom=on" } else { "" };
        self.add(&["-device", &format!("virtio-balloon-pci,id=balloon{reporting}{back}")]);
        if spec.machine.persistent {
            // It resets a guest that has switched it on and hangs.
            self.add(&["-device", "i6300esb,id=watchdog"]);
            self.add(&["-device", &port(2, "agent", "org.qemu.guest_agent.0")]);
        }
    }

    fn card(&mut self, network: &VmNetwork, cable: RawFd) {
        let tap = format!("tap,id=network,fd={cable},vhost=off");
        let (netdev, own) = match network {
            VmNetwork::None | VmNetwork::User => (
                format!("stream,id=network,server=on,addr.type=fd,addr.str={cable}"),
                String::new(),
            ),
            VmNetwork::Cluster(card) => (tap, format!(",mac={},host_mtu={}", card.mac(), card.mtu)),
            VmNetwork::Bridge(card) => (tap, format!(",mac={}", card.mac())),
        };
        // Nothing boots from the network, so the card needs no ROM.
        let device = format!("virtio-net-pci,netdev=network,id=card,romfile={own}");
        self.add(&["-netdev", &netdev, "-device", &device]);
    }

    fn screen(&mut self, dir: &VmDir) {
        self.add(&["-device", "VGA,id=screen", "-vnc", &format!("unix:{}", escape(&dir.vnc()))]);
        // A tablet says where the pointer is, so that the viewer's and the guest's are at one place. The keyboard is q35's own.
        self.add(&["-device", "qemu-xhci,id=usb", "-device", "usb-tablet,bus=usb.0,id=pointer"]);
    }
}

fn socket(id: &str, path: &Path) -> String {
    format!("socket,id={id},path={},server=on,wait=off", escape(path))
}

/// In QEMU's options a comma ends a value unless it is doubled.
fn escape(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

/// The export that QEMU opens for a disk.
pub fn export(disk: &Disk) -> String {
    format!("{}@{}", disk.volume, disk.epoch)
}

fn block_node(disk: &Disk, volume_socket: &Path) -> String {
    block_node_as(&disk.role.to_string(), disk, volume_socket).to_string()
}

/// The arguments of `blockdev-add` for a disk.
pub fn block_node_as(name: &str, disk: &Disk, volume_socket: &Path) -> serde_json::Value {
    json!({
        "driver": "nbd",
        "node-name": name,
        "server": {"type": "unix", "path": volume_socket.display().to_string()},
        "export": export(disk),
        "reconnect-delay": RECONNECT_DELAY_S,
        "open-timeout": OPEN_TIMEOUT_S,
        "read-only": disk.read_only,
        "discard": "unmap",
    })
}

fn firmware_node(file: &str) -> String {
    json!({"driver": "file", "node-name": "firmware", "filename": file, "read-only": true})
        .to_string()
}

/// The slot of the ports for volumes that come and go: after all that QEMU puts into the first free ones.
const PORTS_SLOT: &str = "0x1c";

/// Of a VM that may get vCPUs. By default QEMU gives a disk as many queues as the VM has vCPUs when it starts, and the destination of a
/// migration has to give it the same number.
const QUEUES: u32 = 4;

/// The argument of `-blockdev` for a disk of a VM. `index` is the disk's place among the VM's disks, from 0 on.
pub fn block_device(spec: &VmSpec, disk: &Disk, index: usize) -> serde_json::Value {
    let mut device = json!({
        "driver": "virtio-blk-pci",
        "id": format!("disk-{}", disk.role),
        "drive": disk.role,
        "serial": disk.role,
        "bootindex": index + 1,
        "rerror": "stop",
        "werror": "stop",
        // The geometry that every disk of more than 8 GiB reports. Without it QEMU reads each disk's first
        // sector before it answers, which is a network round trip for a remote disk. Today's guests ignore the
        // geometry.
        "cyls": 16383,
        "heads": 16,
        "secs": 63,
    });
    if let Some(port) = spec.machine.port_of(disk.role) {
        device["bus"] = json!(format!("port{port}"));
    }
    if spec.machine.cpus_max > 0 {
        device["num-queues"] = json!(QUEUES.min(spec.machine.cpus_max));
    }
    device
}

#[cfg(test)]
mod tests {
    use perigee_model::vm::{Hardware, Machine};
    use perigee_model::{Epoch, VmId, VolumeName};

    use super::*;

    fn spec() -> VmSpec {
        let disk = |role: DiskRole, epoch, read_only| Disk {
            role,
            volume: VolumeName::new(format!("job-1.{role}")).unwrap(),
            epoch: Epoch(epoch),
            read_only,
        };
        VmSpec {
            vm: VmId::new("job-1").unwrap(),
            start: perigee_model::VmStart::default(),
            cpus: 2,
            memory_bytes: 384 * MIB,
            disks: vec![disk(DiskRole::Root, 1, false), disk(DiskRole::Data(0), 7, true)],
            arrives_by: None,
            arrives_from: None,
            arrives_compressed: false,
            arrives_tunnelled: false,
            locks_memory: false,
            hides_output: false,
            network: Default::default(),
            machine: Default::default(),
        }
    }

    fn line(spec: &VmSpec, state: &str) -> Vec<String> {
        let dir = VmDir::new(Path::new(state), &spec.vm);
        arguments(spec, &dir, Path::new("/run/v.sock"), Accelerator::Tcg, None)
    }

    #[test]
    fn a_disk_is_opened_with_its_epoch_and_the_first_one_boots() {
        let text = line(&spec(), "/s").join(" ");
        assert!(text.contains(r#""export":"job-1.root@1""#), "{text}");
        assert!(text.contains(r#""export":"job-1.data0@7""#), "{text}");
        assert!(text.contains(r#""bootindex":1,"cyls":16383,"drive":"root""#), "{text}");
    }

    #[test]
    fn the_destination_builds_the_same_machine() {
        let migration = perigee_model::MigrationId::new("m-1").unwrap();
        let incoming = VmSpec { arrives_by: Some(migration), ..spec() };
        let mut there = line(&incoming, "/s");
        assert_eq!(there.split_off(there.len() - 3), ["-S", "-incoming", "defer"]);
        assert_eq!(there, line(&spec(), "/s"));
    }

    /// With a multiple of 64 pages, TCG of QEMU 7.2 loses writes in a migration.
    #[test]
    fn under_tcg_memory_is_no_multiple_of_64_pages() {
        let memory = memory(384 * MIB, Accelerator::Tcg);
        let kib: u64 = memory.strip_suffix('K').unwrap().parse().unwrap();
        assert_eq!(kib, 384 * 1024 - 8);
        assert_ne!(kib % (64 * 4), 0);
    }

    #[test]
    fn under_tcg_a_guest_is_not_told_to_copy_memory_byte_by_byte() {
        let text = line(&spec(), "/s").join(" ");
        assert!(text.contains("-cpu max,la57=off,erms=off,fsrm=off"), "{text}");
    }

    #[test]
    fn a_vm_with_data_of_another_site_leaves_none_of_it_on_a_disk() {
        let locked = line(&VmSpec { locks_memory: true, ..spec() }, "/s").join(" ");
        for part in ["-overcommit mem-lock=on", "dump-guest-core=off", "ringbuf,id=console"] {
            assert!(locked.contains(part), "{locked}");
        }
        assert!(!locked.contains("console.log"), "{locked}");
        assert!(!line(&spec(), "/s").join(" ").contains("mem-lock"));
    }

    /// It moves between hosts where its memory is locked and others.
    #[test]
    fn a_guest_that_keeps_its_free_memory_sees_the_same_balloon_whether_its_memory_is_locked() {
        let balloon = |locks_memory, keeps_free_memory| {
            let machine = Machine { keeps_free_memory, ..Machine::default() };
            let line = line(&VmSpec { locks_memory, machine, ..spec() }, "/s");
            line.into_iter().find(|word| word.starts_with("virtio-balloon")).expect("a balloon")
        };
        assert_eq!(balloon(true, true), balloon(false, true));
        assert_eq!(balloon(true, false), balloon(false, true));
        assert_ne!(balloon(false, false), balloon(false, true));
    }

    #[test]
    fn every_vm_has_a_balloon() {
        let persistent =
            VmSpec { machine: Machine { persistent: true, ..Machine::default() }, ..spec() };
        for spec in [spec(), persistent] {
            let device = "virtio-balloon-pci,id=balloon,free-page-reporting=on".to_owned();
            assert!(line(&spec, "/s").contains(&device));
        }
        let memory_least_bytes = Some(128 * MIB);
        let lent =
            VmSpec { machine: Machine { memory_least_bytes, ..Machine::default() }, ..spec() };
        let text = line(&lent, "/s").join(" ");
        assert!(text.contains("free-page-reporting=on,deflate-on-oom=on"), "{text}");
    }

    #[test]
    fn only_a_guest_without_a_job_may_reboot() {
        let persistent =
            VmSpec { machine: Machine { persistent: true, ..Machine::default() }, ..spec() };
        assert!(line(&persistent, "/s").join(" ").contains("reboot=reset"));
        assert!(line(&spec(), "/s").join(" ").contains("reboot=shutdown"));
    }

    #[test]
    fn uefi_has_its_variables_in_a_volume_that_is_no_disk() {
        let nvram = Disk {
            role: DiskRole::Nvram,
            volume: VolumeName::new("web-nvram").unwrap(),
            epoch: Epoch(3),
            read_only: false,
        };
        let machine = Machine { firmware: Firmware::Uefi, ..Machine::default() };
        let disks = spec().disks.into_iter().chain([nvram]).collect();
        let text = line(&VmSpec { machine, disks, ..spec() }, "/s").join(" ");
        for part in ["pflash0=firmware,pflash1=nvram", OVMF, "\"export\":\"web-nvram@3\""] {
            assert!(text.contains(part), "{text}");
        }
        assert!(!text.contains("disk-nvram"), "{text}");
    }

    #[test]
    fn with_secure_boot_only_the_firmware_changes_its_variables() {
        let machine = Machine { firmware: Firmware::UefiSecure, ..Machine::default() };
        let text = line(&VmSpec { machine, ..spec() }, "/s").join(" ");
        for part in ["pflash1=nvram,smm=on", OVMF_SECURE, "property=secure,value=on"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_tpm_is_reached_by_a_socket_and_its_state_is_no_disk_of_qemu() {
        let tpm = Disk {
            role: DiskRole::Tpm,
            volume: VolumeName::new("web-tpm").unwrap(),
            epoch: Epoch(3),
            read_only: false,
        };
        let disks = spec().disks.into_iter().chain([tpm]).collect();
        let mut with = line(&VmSpec { disks, ..spec() }, "/s");
        assert!(!with.join(" ").contains("web-tpm"), "{with:?}");
        let own = with.split_off(with.len() - 6);
        assert_eq!(own[1], "socket,id=tpm,path=/s/vms/job-1/run/tpm.sock");
        assert_eq!(
            own[2..],
            ["-tpmdev", "emulator,id=tpm,chardev=tpm", "-device", "tpm-crb,tpmdev=tpm"]
        );
        assert_eq!(with, line(&spec(), "/s"), "all else is as without one");
    }

    #[test]
    fn under_kvm_a_vm_that_lasts_has_a_cpu_that_other_hosts_have_too() {
        let persistent =
            VmSpec { machine: Machine { persistent: true, ..Machine::default() }, ..spec() };
        let kvm = |spec: &VmSpec| {
            let dir = VmDir::new(Path::new("/s"), &spec.vm);
            arguments(spec, &dir, Path::new("/v"), Accelerator::Kvm, None).join(" ")
        };
        assert!(kvm(&persistent).contains(PERSISTENT_CPU));
        assert!(kvm(&spec()).contains("-cpu host"));
        let with = |cpu: Cpu| {
            let hardware = Hardware { cpu, ..Hardware::default() };
            VmSpec { machine: Machine { hardware, ..persistent.machine.clone() }, ..spec() }
        };
        assert!(kvm(&with(Cpu::Host)).contains("-cpu host"));
        let named = with("EPYC-Rome".parse().unwrap());
        assert!(kvm(&named).contains("-cpu EPYC-Rome,enforce=on"));
        assert!(line(&named, "/s").join(" ").contains("-cpu EPYC-Rome,enforce=on"));
        assert!(
            line(&persistent, "/s").join(" ").contains("-cpu max"),
            "TCG's is the same everywhere"
        );
    }

    #[test]
    fn a_screen_is_reached_by_a_socket_in_the_vm_s_own_directory_and_by_no_port() {
        let hardware = Hardware { vnc: true, ..Hardware::default() };
        let machine = Machine { hardware, ..Machine::default() };
        let text = line(&VmSpec { machine, ..spec() }, "/s").join(" ");
        assert!(text.contains("-vnc unix:/s/vms/job-1/run/vnc.sock"), "{text}");
        assert!(!line(&spec(), "/s").join(" ").contains("-vnc"));
    }

    #[test]
    fn a_comma_in_a_path_stays_in_the_path() {
        let text = line(&spec(), "/s,server=off").join(" ");
        assert!(text.contains("path=/s,,server=off/vms/job-1/run/qmp.sock"), "{text}");
    }

    #[test]
    fn the_mark_is_two_arguments_that_stand_together() {
        let dir = VmDir::new(Path::new("/s"), &spec().vm);
        assert!(line(&spec(), "/s").windows(2).any(|pair| pair == mark(&dir)));
    }
}
