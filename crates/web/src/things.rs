//! VMs, volumes and hosts: their lists, and a page for each of them.

use perigee_model::VmId;
use perigee_model::drain::DrainFate;
use perigee_model::job::{ClusterVolume, Host, Migration, Sample, Vm, VmVolume};
use perigee_model::load::{HostPressure, Pressure};
use perigee_model::replica::Replica;
use perigee_model::units::{format_bytes, format_duration, format_rate};
use perigee_model::waiting::in_words;

use crate::curves;
use crate::document;
use crate::front::{self, Held, host_cpus, host_memory, host_pool, host_state};
use crate::job::migrations;
use crate::parts::{Cell, Machine, Page, Section, Tone};
use crate::trouble::vm_tone;
use crate::words::{
    DASH, ago, bytes, lasting, maybe_bytes, maybe_thing, or_dash, percent, short, thing, time,
    trouble_or_fine, word,
};

/// A VM's page.
pub fn vm(vm: &Vm, moves: &[Migration], samples: &[Sample], now_ms: u64) -> Page {
    let id = &vm.id;
    let mut state = Section::new("state", "Where it stands", "").facts(vec![
        ("status", Cell::status(word(&vm.status), vm_tone(vm))),
        ("why", Cell::text(&vm.reason)),
        ("host", maybe_thing("hosts", vm.host.as_ref())),
        ("job", vm.job.as_ref().map(|job| thing("jobs", job)).unwrap_or_default()),
        ("image", Cell::text(vm.image.as_ref().map(ToString::to_string).unwrap_or_default())),
        ("addresses", Cell::text(vm.addresses.join(", "))),
        ("its QEMU has run for", Cell::text(lasting(0, vm.uptime_ms))),
        ("run", Cell::text(vm.run)),
        ("made", Cell::text(if vm.made_ms == 0 { String::new() } else { time(vm.made_ms) })),
        (
            "moves by itself",
            Cell::text(
                vm.may_migrate.map(|may| if may { "yes" } else { "never" }).unwrap_or_default(),
            ),
        ),
        ("rules", Cell::text(&vm.rules)),
        ("labels", Cell::text(&vm.labels)),
        (
            "ends",
            Cell::text(vm.predicted_end.as_ref().map(ToString::to_string).unwrap_or_default()),
        ),
    ]);
    state = state.linked("Console", format!("/vms/{id}/console"));
    if vm.declared.as_ref().is_some_and(|declared| declared.hardware.vnc) {
        state = state.linked("Screen", format!("/vms/{id}/screen"));
    }
    if vm.job.is_none() {
        state = state
            .linked("Start …", format!("/vms/{id}/start"))
            .linked("Stop …", format!("/vms/{id}/stop"));
    }
    let mut sections = vec![state, vm_figures(vm)];
    let command = vm.job.as_ref().map(|job| format!("perigee job explain {job}"));
    sections.extend(curves::section(samples, command.unwrap_or_default()));
    sections.extend([vm_disks(&vm.volumes, now_ms), migrations(moves, None, now_ms)]);
    Page::new(format!("VM {id}"), format!("perigee vm info {id}"), sections)
}

/// The page of a VM's console.
pub fn console(id: &VmId) -> Page {
    let (socket, library) = (format!("/vms/{id}/console/attach"), document::terminal_path());
    let label = format!("The console of VM {id}");
    let command = format!("perigee vm console {id}");
    machine(id, ("Console", command), Machine { kind: "console", label, socket, library })
}

/// The page of a VM's screen.
pub fn screen(id: &VmId) -> Page {
    let (socket, library) = (format!("/vms/{id}/vnc"), document::viewer_path());
    let label = format!("The screen of VM {id}");
    let command = format!("perigee vm vnc {id}");
    machine(id, ("Screen", command), Machine { kind: "screen", label, socket, library })
}

fn machine(id: &VmId, (heading, command): (&str, String), machine: Machine) -> Page {
    let section =
        Section::new("of-machine", heading, "").linked(format!("VM {id}"), format!("/vms/{id}"));
    let section = Section { machine: Some(machine), ..section };
    Page::new(format!("{heading} of VM {id}"), command, vec![section])
}

fn vm_figures(vm: &Vm) -> Section {
    let load = vm.load.vcpus_1m;
    let io = &vm.io;
    let mean = |ns: u64, count: u64| match ns.checked_div(count) {
        Some(ns) => format!("{} requests, {} µs each", count, ns / 1000),
        None => String::new(),
    };
    let cpu = vm.cpu_time.as_ref().map(ToString::to_string);
    let memory = vm.memory.as_ref().map(ToString::to_string);
    let dirty = vm.load.dirty_bytes_per_s.map(format_rate).unwrap_or_default();
    Section::new("figures", "Figures", "").facts(vec![
        ("vCPUs", Cell::text(cpu.unwrap_or_else(|| vm.cpus.to_string()))),
        (
            "vCPUs that run",
            Cell::text(or_dash(load.map(|load| format!("{:.2}", load.running_vcpus))))
                .note("mean of the last minute"),
        ),
        (
            "waits for a CPU",
            percent(load.map(|load| load.run_delay_share()))
                .note("of the time in which it wants one"),
        ),
        ("memory", Cell::text(memory.unwrap_or_else(|| format_bytes(vm.memory_bytes)))),
        ("memory changes at", Cell::text(dirty)),
        ("read", Cell::text(format_bytes(io.read_bytes)).note(mean(io.read_ns, io.reads))),
        ("written", Cell::text(format_bytes(io.write_bytes)).note(mean(io.write_ns, io.writes))),
        (
            "over the network",
            Cell::text(format_bytes(io.network_bytes))
                .note(format!("{} saved by compression", format_bytes(io.network_saved_bytes))),
        ),
    ])
}

fn vm_disks(volumes: &[VmVolume], now_ms: u64) -> Section {
    let rows = volumes.iter().map(|one| {
        let moved = one.last_move.as_ref();
        let state =
            moved.map(|last| format!("{}, {}", word(&last.state), ago(last.started_ms, now_ms)));
        vec![
            thing("volumes", &one.volume),
            thing("hosts", &one.home),
            Cell::text(if one.is_moving() { "comes after its VM" } else { "" }),
            Cell::text(state.unwrap_or_default())
                .note(moved.map(|last| short(&last.problem)).unwrap_or_default()),
        ]
    });
    let heads = ["disk", "home", "on its way", "last move"];
    Section::new("disks", "Disks", "").table(
        &heads,
        rows.collect(),
        "Nothing is known of its disks.",
    )
}

/// Volumes in a table.
pub fn volumes<'a>(id: &str, all: impl Iterator<Item = &'a ClusterVolume>) -> Section {
    let heads = ["volume", "home", "#size", "#data", "used by", "leave site", "replicas", "state"];
    let rows = all.map(volume_row).collect();
    Section::new(id, "Volumes", "perigee volume list").table(&heads, rows, "There is none.")
}

fn volume_row(volume: &ClusterVolume) -> Vec<Cell> {
    let replicas =
        volume.replicas.iter().map(|one| one.site.to_string()).collect::<Vec<_>>().join(", ");
    vec![
        thing("volumes", &volume.name),
        thing("hosts", &volume.home),
        bytes(volume.size_bytes),
        bytes(volume.allocated_bytes),
        maybe_thing("jobs", volume.used_by.as_ref()),
        Cell::text(word(&volume.leave_site)),
        Cell::text(replicas),
        volume_state(volume),
    ]
}

fn volume_state(volume: &ClusterVolume) -> Cell {
    match &volume.moving {
        _ if !volume.waits.is_empty() => Cell::status("its home does not answer", Tone::Bad),
        Some(moved) => {
            Cell::status(format!("moves to {}", moved.to), Tone::Good).note(short(&moved.problem))
        }
        None => volume.restoring.as_ref().map_or_else(
            || Cell::text(DASH),
            |left| {
                let tone = if left.problem.is_empty() { Tone::Good } else { Tone::Bad };
                let bytes = format_bytes(left.missing_bytes);
                Cell::status(format!("{bytes} to come from backup {}", left.backup), tone)
                    .note(short(&left.problem))
            },
        ),
    }
}

/// A volume's page.
pub fn volume(volume: &ClusterVolume, now_ms: u64) -> Page {
    let name = &volume.name;
    let state = Section::new("state", "Where it stands", "").facts(vec![
        ("home", thing("hosts", &volume.home)),
        ("state", volume_state(volume).note(in_words(&volume.waits))),
        ("size", Cell::text(format_bytes(volume.size_bytes))),
        ("data in head and layers", Cell::text(format_bytes(volume.allocated_bytes))),
        ("writer epoch", Cell::text(volume.epoch)),
        ("used by", volume.used_by.as_ref().map(|job| thing("jobs", job)).unwrap_or_default()),
        ("leave site", Cell::text(word(&volume.leave_site))),
    ]);
    let mut sections = vec![state];
    if let Some(moved) = &volume.moving {
        sections.push(
            Section::new("move", "Its move", format!("perigee volume move {name} --cancel")).facts(
                vec![
                    ("from", thing("hosts", &moved.from)),
                    ("to", thing("hosts", &moved.to)),
                    ("state", Cell::status(word(&moved.state), Tone::Good)),
                    ("why", Cell::text(&moved.cause)),
                    ("to copy", maybe_bytes(moved.missing_bytes)),
                    (
                        "left",
                        Cell::text(
                            moved
                                .left_ms
                                .map(|ms| format_duration(ms.div_ceil(1000)))
                                .unwrap_or_default(),
                        ),
                    ),
                    ("began", Cell::text(ago(moved.started_ms, now_ms))),
                    ("problem", Cell::text(&moved.problem)),
                ],
            ),
        );
    }
    let rows = volume.replicas.iter().map(|replica| replica_row(replica, now_ms)).collect();
    let heads = [
        "site",
        "host",
        "every",
        "#points",
        "newest complete",
        "#written since",
        "#to ship",
        "problem",
    ];
    let replicas =
        Section::new("replicas", "Replicas", format!("perigee volume replicate {name} --to SITE"));
    sections.push(replicas.table(
        &heads,
        rows,
        "There is no replica: the volume is lost with its home.",
    ));
    Page::new(format!("Volume {name}"), format!("perigee volume info {name}"), sections)
}

fn replica_row(replica: &Replica, now_ms: u64) -> Vec<Cell> {
    let newest =
        replica.complete_ms.map_or_else(|| "none yet".to_owned(), |at_ms| ago(at_ms, now_ms));
    vec![
        Cell::text(&replica.site),
        thing("hosts", &replica.host),
        Cell::text(format_duration(replica.every_s)),
        Cell::number(replica.points),
        Cell::text(newest),
        maybe_bytes(replica.behind_bytes),
        maybe_bytes(replica.missing_bytes),
        trouble_or_fine(&replica.problem),
    ]
}

/// A host's page.
pub fn host(host: &Host, held: &Held, vms: &[Vm], now_ms: u64) -> Page {
    let id = &host.id;
    let measured = host.measurement.is_some();
    let mut state = Section::new("state", "Where it stands", "").facts(vec![
        ("state", host_state(host)),
        ("site", Cell::text(&host.addresses.site)),
        ("what does not answer", Cell::text(in_words(&host.waits))),
        ("last seen", Cell::text(ago(host.last_seen_ms, now_ms))),
        (
            "taken back",
            Cell::text(host.notice.as_ref().map(|notice| notice.in_words()).unwrap_or_default()),
        ),
        (
            "lease",
            Cell::text(host.lease.as_ref().map(|lease| lease.in_words()).unwrap_or_default()),
        ),
        ("vCPUs of VMs", host_cpus(host, held)),
        ("memory of VMs", host_memory(host)),
        ("volumes in its pool", host_pool(host, held)),
        ("VMs wait for a CPU", percent(host.vcpus_1m.map(|load| load.run_delay_share()))),
        ("its tasks wait", Cell::text(pressure(&host.pressure))),
        ("processor", Cell::text(&host.cpu_model)),
        ("accelerator", Cell::text(host.accelerator.map(|one| word(&one)).unwrap_or_default())),
        ("agent", Cell::text(&host.addresses.agent_url)),
        ("volume server", Cell::text(&host.addresses.volume_url)),
        (
            "measured",
            Cell::text(if measured {
                format!("perigee host measure {id} --show")
            } else {
                "never".to_owned()
            }),
        ),
    ]);
    state = match host.drain {
        Some(_) => state.linked("Call the drain off …", format!("/hosts/{id}/undrain")),
        None => state.linked("Drain …", format!("/hosts/{id}/drain")),
    };
    let mut sections = vec![state];
    if !host.warnings.is_empty() {
        let mut section = Section::new("warnings", "Warnings", "");
        section.texts.clone_from(&host.warnings);
        sections.push(section);
    }
    sections.extend(drain(host));
    sections.push(Section { heading: "VMs there".to_owned(), ..front::vms("vms", vms.iter()) });
    Page::new(format!("Host {id}"), format!("perigee host info {id}"), sections)
}

fn pressure(pressure: &HostPressure) -> String {
    let share = |of: Option<Pressure>| percent(of.map(|of| of.some.share_60s)).text;
    let (cpu, memory, io) = (share(pressure.cpu), share(pressure.memory), share(pressure.io));
    format!("for a CPU {cpu}, for memory {memory}, for a disk {io} of the last minute")
}

/// What is still at a host that is drained.
fn drain(host: &Host) -> Option<Section> {
    let drain = host.drain.as_ref()?;
    let rows = drain.left.iter().flatten().map(|step| {
        let tone = if step.fate == DrainFate::Stays { Tone::Bad } else { Tone::Plain };
        let to = step.to.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        vec![
            Cell::text(format!("{} {}", step.kind, step.name)),
            Cell::status(word(&step.fate), tone),
            Cell::text(to),
            Cell::number(step.takes_s.map_or_else(|| DASH.to_owned(), |s| format!("{s:.0} s"))),
            maybe_bytes(step.bytes),
            Cell::text(short(&step.why)),
        ]
    });
    let heads = ["what", "what becomes of it", "to", "#takes", "#sends", "why"];
    let section = Section::new("drain", "Its drain", format!("perigee host undrain {}", host.id));
    let empty =
        if drain.is_drained() { "Nothing is left." } else { "What is left is not known yet." };
    Some(section.table(&heads, rows.collect(), empty))
}
