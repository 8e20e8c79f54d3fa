//! The figures of this host and its VMs, for Prometheus.

use std::fmt::Display;

use perigee_http::certificate::now_ms;
use perigee_http::terms::Terms;
use perigee_model::VmId;
use perigee_model::exposition::{Kind, Page};
use perigee_model::load::{HostPressure, StalledTime};
use perigee_model::vm::{HostReport, VmReport, VmStatus};

use crate::process::{TICK_MS, memory_resident_bytes};

/// What proc(5) says of the host.
#[derive(Debug, Default)]
pub struct Proc {
    stat: String,
    net_dev: String,
    diskstats: String,
}

impl Proc {
    /// What can't be read is left out of the page.
    pub fn read() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        Self {
            stat: read("/proc/stat"),
            net_dev: read("/proc/self/net/dev"),
            diskstats: read("/proc/diskstats"),
        }
    }
}

/// The page of `GET /metrics`. `is_made` says which devices are made for VMs: their bytes are also those of the host's other devices, and their
/// names change with each network. `cards` are the names of the VMs' cards at this host, in the VMs' order.
pub fn page(
    (host, is_made): (&HostReport, impl Fn(&str) -> bool),
    proc: &Proc,
    vms: &[VmReport],
    cards: &[Option<String>],
) -> Page {
    let mut page = Page::default();
    write_host(&mut page, host, proc);
    write_network(&mut page, proc, is_made);
    write_vms(&mut page, vms);
    let cards = vms.iter().map(|vm| &vm.spec.vm).zip(cards);
    write_cards(&mut page, proc, cards);
    page
}

/// Which controller commands this host.
pub fn write_terms(page: &mut Page, terms: &Terms) {
    let help = "The number of the controller's start that commands here; 0 if it is not known.";
    page.one("perigee_host_controller_term", Kind::Gauge, help, terms.number());
    let help = "Requests of controllers that do not command here any more.";
    let refused = terms.refused_total();
    page.one("perigee_host_refused_controller_requests_total", Kind::Counter, help, refused);
}

fn write_host(page: &mut Page, host: &HostReport, proc: &Proc) {
    let gauge = Kind::Gauge;
    let help = "Tasks that run or wait, mean of a minute.";
    write_known(page, "perigee_host_load1", help, host.load_1min);
    let help = "CPUs in use of those that the agent may use, mean of the last minute.";
    write_known(page, "perigee_host_cpus_used", help, host.cpus_used_1m);
    let help = "The machine's memory.";
    page.one("perigee_host_memory_size_bytes", gauge, help, host.memory_bytes);
    let help = "What can be used of it without swapping.";
    write_known(page, "perigee_host_memory_available_bytes", help, host.memory_available_bytes);
    write_pressure(page, &host.pressure);
    page.family("perigee_host_cpu_seconds_total", Kind::Counter, "CPU time of all CPUs by mode.");
    for (mode, seconds) in cpu_seconds(&proc.stat) {
        page.figure(&[("mode", &mode)], seconds);
    }
    let disks = disk_bytes(&proc.diskstats);
    page.family("perigee_host_disk_read_bytes_total", Kind::Counter, "Bytes read from disks.");
    disks.iter().for_each(|(device, read, _)| page.figure(&[("device", device)], read));
    page.family("perigee_host_disk_written_bytes_total", Kind::Counter, "Bytes written to disks.");
    disks.iter().for_each(|(device, _, written)| page.figure(&[("device", device)], written));
}

/// A gauge of the host; none if it is not known.
fn write_known(page: &mut Page, name: &'static str, help: &str, figure: Option<impl Display>) {
    if let Some(figure) = figure {
        page.one(name, Kind::Gauge, help, figure);
    }
}

/// A resource that the kernel says nothing of has no figure.
fn write_pressure(page: &mut Page, pressure: &HostPressure) {
    let resources = [("cpu", pressure.cpu), ("memory", pressure.memory), ("io", pressure.io)];
    let known = resources.map(|(resource, pressure)| Some((resource, pressure?)));
    let seconds = |time: StalledTime| float(time.total_us) / 1e6;
    let help = "Time in which at least one task of the host waited for the resource.";
    page.family("perigee_host_pressure_waiting_seconds_total", Kind::Counter, help);
    for (resource, pressure) in known.iter().flatten() {
        page.figure(&[("resource", resource)], seconds(pressure.some));
    }
    let help =
        "Time in which all tasks of the host that had something to do waited for the resource.";
    page.family("perigee_host_pressure_stalled_seconds_total", Kind::Counter, help);
    for (resource, pressure) in known.iter().flatten() {
        if let Some(full) = pressure.full {
            page.figure(&[("resource", resource)], seconds(full));
        }
    }
}

fn write_network(page: &mut Page, proc: &Proc, is_made: impl Fn(&str) -> bool) {
    let mut devices = network_bytes(&proc.net_dev);
    devices.retain(|(device, ..)| !is_made(device));
    page.family("perigee_host_network_receive_bytes_total", Kind::Counter, "Bytes received.");
    devices.iter().for_each(|(device, received, _)| page.figure(&[("device", device)], received));
    page.family("perigee_host_network_transmit_bytes_total", Kind::Counter, "Bytes sent.");
    devices.iter().for_each(|(device, _, sent)| page.figure(&[("device", device)], sent));
}

/// A family of figures of VMs, and its value for one of them.
type VmFigure = (&'static str, Kind, &'static str, fn(&VmReport) -> Option<f64>);

const VM_FIGURES: [VmFigure; 7] = [
    ("perigee_vm_running", Kind::Gauge, "1 while the guest runs here.", |vm| {
        Some(f64::from(u8::from(vm.status == VmStatus::Running)))
    }),
    ("perigee_vm_vcpus", Kind::Gauge, "Virtual CPUs.", |vm| Some(f64::from(vm.spec.cpus))),
    ("perigee_vm_memory_size_bytes", Kind::Gauge, "Memory that the guest has.", |vm| {
        Some(float(vm.load.memory.map_or(vm.spec.memory_bytes, |memory| memory.has_bytes)))
    }),
    (
        "perigee_vm_memory_resident_bytes",
        Kind::Gauge,
        "Memory that its QEMU takes of the host.",
        |vm| memory_resident_bytes(vm.qemu_pid).map(float),
    ),
    (
        "perigee_vm_memory_changed_bytes_per_second",
        Kind::Gauge,
        "How fast its guest changes its memory, by a sample of a second each minute.",
        |vm| vm.load.dirty_bytes_per_s.map(float),
    ),
    ("perigee_vm_vcpu_seconds_total", Kind::Counter, "CPU time of its vCPUs.", |vm| {
        Some(float(vm.vcpu_ms) / 1e3)
    }),
    (
        "perigee_vm_run_delay_seconds_total",
        Kind::Counter,
        "Time that its vCPUs were ready to run and had no CPU, all vCPUs together.",
        |vm| vm.load.run_delay_ms.map(|ms| float(ms) / 1e3),
    ),
];

fn write_vms(page: &mut Page, vms: &[VmReport]) {
    for (name, kind, help, value) in VM_FIGURES {
        page.family(name, kind, help);
        for vm in vms {
            if let Some(value) = value(vm) {
                page.figure(&[("vm", &vm.spec.vm)], value);
            }
        }
    }
    let (name, help) = (
        "perigee_vm_waiting_seconds",
        "How long the VM has waited for what its disks need, or for QEMU.",
    );
    page.family(name, Kind::Gauge, help);
    for vm in vms {
        for waiting in &vm.waits {
            let seconds = float(now_ms().saturating_sub(waiting.since_ms)) / 1e3;
            page.figure(&[("vm", &vm.spec.vm), ("for", &waiting.waits_for.word())], seconds);
        }
    }
    page.family(
        "perigee_vm_sent_bytes_total",
        Kind::Counter,
        "Bytes that a VM of a job has sent to another one of it.",
    );
    for vm in vms {
        for sent in &vm.sent {
            page.figure(&[("vm", &vm.spec.vm), ("to", &sent.to)], sent.bytes);
        }
    }
    page.family(
        "perigee_vm_storage_traffic_bytes_total",
        Kind::Counter,
        "Bytes of its disks' requests.",
    );
    for vm in vms {
        for (disk, io) in vm.spec.disks.iter().zip(&vm.io) {
            for (kind, bytes) in [("read", io.read_bytes), ("write", io.write_bytes)] {
                page.figure(&[("vm", &vm.spec.vm), ("drive", &disk.role), ("kind", &kind)], bytes);
            }
        }
    }
    page.family("perigee_vm_storage_requests_total", Kind::Counter, "Requests of its disks.");
    for vm in vms {
        for (disk, io) in vm.spec.disks.iter().zip(&vm.io) {
            for (kind, requests) in
                [("read", io.reads), ("write", io.writes), ("flush", io.flushes)]
            {
                page.figure(
                    &[("vm", &vm.spec.vm), ("drive", &disk.role), ("kind", &kind)],
                    requests,
                );
            }
        }
    }
}

/// What a host sends through a VM's card, the VM receives. A card in a user network is no device of the host, and is counted by nobody.
fn write_cards<'a>(
    page: &mut Page,
    proc: &Proc,
    cards: impl Iterator<Item = (&'a VmId, &'a Option<String>)>,
) {
    let devices = network_bytes(&proc.net_dev);
    let counted: Vec<_> = cards
        .filter_map(|(vm, card)| {
            let card = card.as_deref()?;
            Some((vm, devices.iter().find(|(device, ..)| *device == card)?))
        })
        .collect();
    let help = "Bytes that its network card has received at this host.";
    page.family("perigee_vm_network_receive_bytes_total", Kind::Counter, help);
    counted.iter().for_each(|(vm, (.., sent))| page.figure(&[("vm", vm)], sent));
    let help = "Bytes that its network card has sent at this host.";
    page.family("perigee_vm_network_transmit_bytes_total", Kind::Counter, help);
    counted.iter().for_each(|(vm, (_, received, _))| page.figure(&[("vm", vm)], received));
}

#[expect(clippy::cast_precision_loss, reason = "53 bits are enough for a figure")]
fn float(value: u64) -> f64 {
    value as f64
}

/// The first line of /proc/stat: the times of all CPUs together, in ticks.
fn cpu_seconds(stat: &str) -> Vec<(&'static str, f64)> {
    const MODES: [&str; 8] =
        ["user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal"];
    let all = stat.lines().find_map(|line| line.strip_prefix("cpu ")).unwrap_or_default();
    let ticks = all.split_whitespace().filter_map(|word| word.parse::<u64>().ok());
    MODES.into_iter().zip(ticks.map(|ticks| float(ticks * TICK_MS) / 1e3)).collect()
}

/// Of each line in /proc/net/dev the device, and the bytes that it has received and sent. Loopback is left out.
fn network_bytes(net_dev: &str) -> Vec<(&str, u64, u64)> {
    let lines = net_dev.lines().filter_map(|line| {
        let (device, figures) = line.split_once(':')?;
        let figures: Vec<u64> = figures.split_whitespace().flat_map(str::parse).collect();
        Some((device.trim(), *figures.first()?, *figures.get(8)?))
    });
    lines.filter(|(device, ..)| *device != "lo").collect()
}

/// Of each disk in /proc/diskstats the bytes read and written. Partitions are left out: they are their disks' too. So is what
/// is made of files or memory.
fn disk_bytes(diskstats: &str) -> Vec<(&str, u64, u64)> {
    const SECTOR_BYTES: u64 = 512;
    let mut disks: Vec<(&str, u64, u64)> = Vec::new();
    for line in diskstats.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let sectors = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok());
        let (Some(device), Some(read), Some(written)) = (words.get(2), sectors(5), sectors(9))
        else {
            continue;
        };
        let is_made = ["loop", "ram", "zram"].iter().any(|kind| device.starts_with(kind));
        let is_part = disks.iter().any(|(disk, ..)| {
            device
                .strip_prefix(disk)
                .is_some_and(|rest| rest.trim_start_matches('p').parse::<u32>().is_ok())
        });
        if !is_made && !is_part {
            let bytes = |sectors: u64| sectors.saturating_mul(SECTOR_BYTES);
            disks.push((device, bytes(read), bytes(written)));
        }
    }
    disks
}

#[cfg(test)]
mod tests {
    use perigee_model::load::Pressure;

    use super::*;

    #[test]
    fn the_times_of_all_cpus_are_in_seconds() {
        let stat = "cpu  100 0 50 1000 7 0 3 0 0 0\ncpu0 1 2 3\n";
        let seconds = cpu_seconds(stat);
        assert_eq!(seconds[0], ("user", 1.0));
        assert_eq!(seconds[3], ("idle", 10.0));
        assert_eq!(seconds.len(), 8);
    }

    #[test]
    fn pressure_that_is_not_known_has_no_figure() {
        let some = StalledTime { total_us: 1_500_000, ..StalledTime::default() };
        let cpu = Some(Pressure { some, full: None });
        let mut page = Page::default();
        write_pressure(&mut page, &HostPressure { cpu, ..HostPressure::default() });
        let text = page.into_text();
        assert!(text.contains("pressure_waiting_seconds_total{resource=\"cpu\"} 1.5\n"), "{text}");
        assert!(!text.contains("stalled_seconds_total{") && !text.contains("memory"), "{text}");
    }

    #[test]
    fn devices_of_the_network_are_there_without_loopback() {
        let text = "Inter-|   Receive  |  Transmit\n face |bytes packets\n\
            lo: 5 1 0 0 0 0 0 0 5 1 0 0 0 0 0 0\n  eth0: 70 1 0 0 0 0 0 0 90 1 0 0 0 0 0 0\n";
        assert_eq!(network_bytes(text), [("eth0", 70, 90)]);
    }

    #[test]
    fn devices_that_come_and_go_with_vms_are_none_of_the_hosts_figures() {
        let net_dev = "eth0: 70 1 0 0 0 0 0 0 90 1 0 0 0 0 0 0\n\
            pt1: 7 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0\n";
        let proc = Proc { net_dev: net_dev.to_owned(), ..Proc::default() };
        let mut page = Page::default();
        write_network(&mut page, &proc, |device| device.starts_with("pt"));
        let text = page.into_text();
        assert!(text.contains("receive_bytes_total{device=\"eth0\"} 70\n"), "{text}");
        assert!(!text.contains("pt1"), "its name is another one in each network: {text}");
    }

    #[test]
    fn a_vm_has_received_what_the_host_has_sent_through_its_card() {
        let proc = Proc {
            net_dev: "pt1: 70 1 0 0 0 0 0 0 90 1 0 0 0 0 0 0\n".to_owned(),
            ..Proc::default()
        };
        let vms = ["web", "user", "gone"].map(|name| VmId::new(name).expect("a name"));
        let cards = [Some("pt1".to_owned()), None, Some("pt2".to_owned())];
        let mut page = Page::default();
        write_cards(&mut page, &proc, vms.iter().zip(&cards));
        let text = page.into_text();
        assert!(text.contains("receive_bytes_total{vm=\"web\"} 90\n"), "{text}");
        assert!(text.contains("transmit_bytes_total{vm=\"web\"} 70\n"), "{text}");
        assert!(!text.contains("user") && !text.contains("gone"), "not known is not 0: {text}");
    }

    #[test]
    fn disks_are_there_without_their_partitions_and_without_what_is_made_of_files() {
        let text = "254 0 vda 1 0 8 0 1 0 16 0 0 0 0\n254 1 vda1 1 0 8 0 1 0 16 0 0 0 0\n\
            7 0 loop0 1 0 8 0 1 0 16 0 0 0 0\n259 0 nvme0n1 1 0 2 0 1 0 4 0 0 0 0\n\
            259 1 nvme0n1p1 1 0 2 0 1 0 4 0 0 0 0\n";
        assert_eq!(disk_bytes(text), [("vda", 4096, 8192), ("nvme0n1", 1024, 2048)]);
    }
}
