//! `report.html`: the paper's tables and its figure 4, theirs beside ours. A pure function of [`Results`].

use std::fmt::Write;

use perigee_lab::measuring::median;
use perigee_lab::report::page::{self, TABLE_END, figure, ratio, row};
use perigee_lab::report::plots::{Trace, traces};

use crate::results::{Beside, FromInput, MIGRATED, Migrated, Other, Results, Task};

const HOSTS: [&str; 2] = ["A", "B"];

/// The paper's figures in seconds, with [local, remote] at each host.
const CREATION: [[f64; 2]; 2] = [[6.4, 13.5], [2.8, 5.3]];
const COPY: [[f64; 2]; 2] = [[4.1, 11.4], [11.3, 21.0]];
const ENCODE: [[f64; 2]; 2] = [[583.0, 584.0], [640.0, 640.0]];

// Writing to a String cannot fail, so the results of `write!` below are ignored.

fn s(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.1}"))
}

pub fn html(results: &Results) -> String {
    let mut page = page::start("Perigee: staging", "");
    let _ = writeln!(
        page,
        "<h1>Local and remote disks, and a VM that is migrated</h1>\n<p class=\"lead\">The experiments of Goiri, Julià and \
         Guitart (\"Efficient data management support for virtualized service providers\"), with Perigee. They had two \
         machines, Xen, NFS and mencoder; here are two network namespaces of one machine with {} CPUs, QEMU without KVM, a link of \
         1 Gbit/s, Perigee's own remote disks, and ffmpeg. Guests have one vCPU and 256 MiB. Medians where there are several rounds. Their \
         hosts A and B differ, ours do not.</p>",
        results.cpus
    );
    page::goals(&mut page, &results.goals);
    page::papers(
        &mut page,
        "003 is their paper. Relations are compared, since their machines are not at hand.",
        &results.paper,
    );
    creation(&mut page, results);
    tasks(&mut page, results);
    migrated(&mut page, results);
    inputs(&mut page, results);
    beside(&mut page, results);
    for one in &results.migrations {
        if one.round == 1 {
            plots(&mut page, one);
        }
    }
    rows(&mut page, results);
    page::end(&mut page, &results.versions);
    page
}

fn cells(cells: &[&str]) -> Vec<String> {
    cells.iter().map(|cell| (*cell).to_owned()).collect()
}

fn creation(page: &mut String, results: &Results) {
    page::table(
        page,
        "Creation of a VM, s",
        "Theirs: the disk image is made and a system installed in it. Ours: from the request to the first command of the job in the \
         VM. Its root disk is a clone of an image; remote: the host has nothing of the image yet, and reads it from the other host \
         while the VM boots.",
        &[
            "host",
            "local",
            "remote",
            "remote / local",
            "theirs, local",
            "theirs, remote",
            "remote / local",
        ],
    );
    for (host, [local, remote]) in CREATION.into_iter().enumerate() {
        let [ours, far] = [true, false].map(|is_local| results.creation_s(host, is_local));
        let (local, remote) = (Some(local), Some(remote));
        let texts = [
            HOSTS[host].to_owned(),
            s(ours),
            s(far),
            ratio(far, ours),
            s(local),
            s(remote),
            ratio(remote, local),
        ];
        row(page, "", &texts);
    }
    page.push_str(TABLE_END);
}

fn tasks(page: &mut String, results: &Results) {
    let text = format!(
        "Their table 2. The copy is of a file of {} MB, and ends when it is on the disk. The encoder makes MPEG-4 of {} frames ({} MiB of \
         Motion JPEG) that came out of the repository. Its result goes into the repository, and ffprobe counts its frames.",
        results.file_bytes / 1_000_000,
        results.frames,
        results.video_bytes >> 20
    );
    page::table(
        page,
        "A file copy and an encoder, s",
        &text,
        &[
            "task",
            "host",
            "local",
            "remote",
            "remote / local",
            "theirs, local",
            "theirs, remote",
            "remote / local",
        ],
    );
    for (task, theirs) in [(Task::Copy, COPY), (Task::Encode, ENCODE)] {
        for (host, [local, remote]) in theirs.into_iter().enumerate() {
            let [ours, far] = [true, false].map(|is_local| results.run_s(task, host, is_local));
            let (local, remote) = (Some(local), Some(remote));
            let mut texts = cells(&[task.name(), HOSTS[host]]);
            texts.extend([
                s(ours),
                s(far),
                ratio(far, ours),
                s(local),
                s(remote),
                ratio(remote, local),
            ]);
            row(page, "", &texts);
        }
    }
    page.push_str(TABLE_END);
}

fn migrated(page: &mut String, results: &Results) {
    page::table(
        page,
        "The encoder, migrated in the middle of its run, s",
        "Their table 3. Expected: the part that was done before the migration at the speed of the local disk, and the rest at the speed of \
         a remote disk at the other host.",
        &[
            "from",
            "run time",
            "expected",
            "run time / expected",
            "theirs",
            "theirs, expected",
            "run time / expected",
        ],
    );
    for (from, [theirs, expected]) in MIGRATED.into_iter().enumerate() {
        let (ours, own) = (results.migrated_s(from), results.expected_s(from));
        let (theirs, expected) = (Some(theirs), Some(expected));
        let texts = [
            format!("{} to {}", HOSTS[from], HOSTS[1 - from]),
            s(ours),
            s(own),
            format!("{:.3}", ours.zip(own).map_or(f64::NAN, |(run, expected)| run / expected)),
            s(theirs),
            s(expected),
            format!(
                "{:.3}",
                theirs.zip(expected).map_or(f64::NAN, |(run, expected)| run / expected)
            ),
        ];
        row(page, "", &texts);
    }
    page.push_str(TABLE_END);
}

fn inputs(page: &mut String, results: &Results) {
    page::table(
        page,
        "The encoder with the video as an input, s",
        "The job names the video in the repository. The first job has it staged at its host, and the second one finds it there.",
        &["job", "from the request to the first command", "encoder"],
    );
    for is_staged in [false, true] {
        let of = |figure: fn(&FromInput) -> f64| {
            let runs = results.inputs.iter().filter(|run| run.is_staged == is_staged);
            s(median(runs.map(figure)))
        };
        let job = if is_staged { "second" } else { "first" };
        row(page, "", &[job.to_owned(), of(|run| run.begun_s), of(|run| run.seconds)]);
    }
    page.push_str(TABLE_END);
}

fn beside(page: &mut String, results: &Results) {
    let text = format!(
        "A VM at host B reads a disk at host A over and over, past its page cache. After a while {} MB go over the same link: as the \
         inputs of another job, which is staged at host B, or over a plain TCP connection. Staging takes at most half of what the link was \
         measured to carry while VMs run there.",
        results.file_bytes / 1_000_000
    );
    page::table(
        page,
        "A VM that reads a remote disk, and what else is on the link",
        &text,
        &["beside it", "alone, MB/s", "beside, MB/s", "beside / alone", "the other took, s"],
    );
    for other in Other::ALL {
        let alone = results.beside(other, |one| one.alone_bytes_per_s);
        let both = results.beside(other, |one| one.beside_bytes_per_s);
        let name = match other {
            Other::Staging => "staging",
            Other::Copy => "a TCP connection",
        };
        let mb = |rate: Option<f64>| s(rate.map(|rate| rate / 1e6));
        let texts = [
            name.to_owned(),
            mb(alone),
            mb(both),
            ratio(both, alone),
            s(results.beside(other, |one| Some(one.other_s))),
        ];
        row(page, "", &texts);
    }
    page.push_str(TABLE_END);
}

/// Their figure 4.
fn plots(page: &mut String, one: &Migrated) {
    let (from, to) = (HOSTS[one.from], HOSTS[1 - one.from]);
    let line = |name: String, value: &dyn Fn(&crate::series::Point) -> f64| Trace {
        name,
        points: one.series.iter().map(|point| (point.at_s, value(point))).collect(),
    };
    let mut cpus = Vec::new();
    for host in [one.from, 1 - one.from] {
        cpus.push(line(format!("VM at {}", HOSTS[host]), &|point| point.vm_cpus[host]));
        cpus.push(line(format!("server at {}", HOSTS[host]), &|point| point.server_cpus[host]));
    }
    let caption = format!(
        "Asked for after {:.0} s, at the other host after {:.0} s; {} MiB of memory, and a pause of {} ms. This is their figure 4.",
        one.moved_at_s,
        one.there_at_s,
        one.memory_bytes >> 20,
        one.downtime_ms
    );
    let title = format!("The encoder migrated from {from} to {to}: CPU");
    figure(page, &title, &caption, &traces(&cpus, ("s", "CPUs"), &title));
    let title = format!("The encoder migrated from {from} to {to}: network");
    let bytes =
        [line("both directions".to_owned(), &|point| point.bytes_per_s / f64::from(1 << 20))];
    figure(
        page,
        &title,
        "All that the hosts send to each other.",
        &traces(&bytes, ("s", "MiB/s"), &title),
    );
}

fn rows(page: &mut String, results: &Results) {
    let columns = ["what", "round", "host", "disk", "s", "load"];
    page::table(
        page,
        "All runs",
        "Load: threads that ran or waited for a CPU in the minute before.",
        &columns,
    );
    let disk = |is_local| if is_local { "local" } else { "remote" };
    for c in &results.creations {
        let mut texts = cells(&["create", &c.round.to_string(), HOSTS[c.host], disk(c.is_local)]);
        texts.extend([format!("{:.1}", c.seconds), format!("{:.1}", c.load_1min)]);
        row(page, "", &texts);
    }
    for run in &results.runs {
        let round = run.round.to_string();
        let mut texts = cells(&[run.task.name(), &round, HOSTS[run.host], disk(run.is_local)]);
        texts.extend([format!("{:.1}", run.seconds), format!("{:.1}", run.load_1min)]);
        row(page, "", &texts);
    }
    for one in &results.migrations {
        let round = one.round.to_string();
        let mut texts = cells(&["encode, migrated", &round, HOSTS[one.from], "local, then remote"]);
        texts.extend([format!("{:.1}", one.seconds), format!("{:.1}", one.load_1min)]);
        row(page, "", &texts);
    }
    page.push_str(TABLE_END);
}

#[expect(clippy::print_stdout, reason = "the figures are what it is for")]
pub fn print(results: &Results) {
    println!("{:<18} {:>4} {:>8} {:>8}", "s", "host", "local", "remote");
    for (host, name) in HOSTS.into_iter().enumerate() {
        let [local, remote] = [true, false].map(|is_local| s(results.creation_s(host, is_local)));
        println!("{:<18} {name:>4} {local:>8} {remote:>8}", "create a VM");
        for task in [Task::Copy, Task::Encode] {
            let [local, remote] =
                [true, false].map(|is_local| s(results.run_s(task, host, is_local)));
            println!("{:<18} {name:>4} {local:>8} {remote:>8}", task.name());
        }
        let (run, expected) = (s(results.migrated_s(host)), s(results.expected_s(host)));
        println!("{:<18} {name:>4} {run:>8} (expected {expected})", "encode, migrated");
    }
    for other in Other::ALL {
        let [alone, both] =
            [|one: &Beside| one.alone_bytes_per_s, |one: &Beside| one.beside_bytes_per_s]
                .map(|figure| s(results.beside(other, figure).map(|rate| rate / 1e6)));
        println!("reads beside {other:?}: {both} MB/s, alone {alone}");
    }
    for goal in &results.goals {
        println!("{:?}: {}: {}", goal.met, goal.goal, goal.measured);
    }
}
