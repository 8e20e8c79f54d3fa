//! The report of a storm, one page. It is a pure function of [`Outcome`].

use std::fmt::Write;

use perigee_model::units::format_bytes;

use super::outcome::{Outcome, Second};
use crate::report::page::{self, figure, row};
use crate::report::plots::{Bar, Trace, bars, traces};
use crate::report::svg::escape;

// Writing to a String cannot fail, so the results of `write!` below are ignored.

/// One page without anything from elsewhere.
pub fn html(outcome: &Outcome) -> String {
    let mut page = page::start("Perigee: machines without disks boot together", "");
    let _ = writeln!(
        page,
        "<h1>Machines without disks boot together</h1>\n<p class=\"lead\">{} QEMU guests of {} MiB, which have nothing \
         but a network card with iPXE, boot over {} from clones of one image. The last is up after {:.1} s.</p>",
        outcome.machines.len(),
        outcome.memory_mib,
        outcome.over,
        outcome.last_up_s
    );
    totals(&mut page, outcome);
    let title = "Time until each machine is up";
    let bar = |machine: &super::MachineOutcome| Bar {
        name: machine.name.clone(),
        class: "ours",
        value: machine.up_s,
        label: format!("{:.1}", machine.up_s),
    };
    let up: Vec<Bar> = outcome.machines.iter().map(bar).collect();
    let caption =
        "From the start of the first machine until the guest reports on its console that it is up.";
    figure(&mut page, title, caption, &bars(&up, "seconds", title));
    let line = |name: &str, value: fn(&Second) -> f64| {
        let points = outcome.seconds.iter().map(|s| (f64::from(s.at_s), value(s))).collect();
        [Trace { name: name.to_owned(), points }]
    };
    let title = "Requests of all machines";
    let requests = line("requests", |second| f64::from(second.requests));
    let caption = "Counted by the volume server.";
    figure(&mut page, title, caption, &traces(&requests, ("seconds", "requests a second"), title));
    let title = "Mean response time";
    let response = line("mean", |second| second.mean_response_ms);
    let caption = "Measured in the volume server, for the requests of each second.";
    figure(&mut page, title, caption, &traces(&response, ("seconds", "milliseconds"), title));
    machines(&mut page, outcome);
    let versions: Vec<String> =
        outcome.versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
    let _ = writeln!(page, "<p class=\"soft\">Versions: {}</p>", escape(&versions.join("; ")));
    page.push_str(page::END);
    page
}

fn totals(page: &mut String, outcome: &Outcome) {
    page.push_str("<div class=\"scroll\"><table>\n");
    for (name, value) in outcome.totals() {
        row(page, "", &[name.to_owned(), value]);
    }
    page.push_str("</table></div>\n");
}

fn machines(page: &mut String, outcome: &Outcome) {
    page.push_str(
        "<h2>Machines</h2>\n<div class=\"scroll\"><table>\n<tr><th>machine</th><th>up s</th><th>requests</th>\
         <th>read</th><th>written</th></tr>\n",
    );
    for machine in &outcome.machines {
        let cells = [
            machine.name.clone(),
            format!("{:.1}", machine.up_s),
            machine.requests.to_string(),
            format_bytes(machine.read_bytes),
            format_bytes(machine.written_bytes),
        ];
        row(page, "", &cells);
    }
    page.push_str("</table></div>\n");
}

impl Outcome {
    /// The totals of the storm, with their names.
    pub fn totals(&self) -> [(&'static str, String); 8] {
        [
            ("last machine up", format!("{:.1} s", self.last_up_s)),
            ("read of the image", format_bytes(self.source_read_bytes)),
            ("distinct blocks of it", format_bytes(self.source_distinct_bytes)),
            ("read from the disk", format_bytes(self.device_read_bytes)),
            (
                "reads that waited",
                format!("{} of {}", self.reads_waited, self.reads_at_once + self.reads_waited),
            ),
            ("CPU of the volume server", format!("{:.2} s", self.server_cpu_s)),
            ("its peak memory", format_bytes(self.server_memory_peak_bytes)),
            ("page cache of the pool", format_bytes(self.page_cache_bytes)),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::super::outcome::tests::two_machines;
    use super::*;

    #[test]
    fn the_page_stands_alone_and_has_every_machine() {
        let page = html(&two_machines());
        for outside in ["<script", "http://", "https://", "<link", "url("] {
            assert!(!page.contains(outside), "{outside} is in the page");
        }
        assert!(page.contains("<td>m1</td>") && page.contains("<td>m2</td>"));
        assert_eq!(page.matches("<svg").count(), 3);
    }
}
