//! `report.html`: how the controller's work grows, on one page. A pure function of [`Results`].

use std::fmt::Write;

use perigee_lab::report::page::{self, figure, row};
use perigee_lab::report::plots::{Trace, traces};

use crate::load::{Case, Results};

/// A title, a unit, and the figure of a case.
type Plot = (&'static str, &'static str, fn(&Case) -> f64);

// Writing to a String cannot fail, so the results of `write!` below are ignored.

pub fn html(results: &Results) -> String {
    let mut page = page::start("Perigee: a queue of many jobs", "");
    let _ = writeln!(
        page,
        "<h1>A queue of many jobs</h1>\n<p class=\"lead\">Small jobs of four owners are submitted at once to one controller. \
         Its hosts are test doubles on the real API, in another process, whose guests take {} ms from start to end; \
         each takes 3 jobs by its memory and starts 2 at once. Both processes share {} CPUs; it was a {} build, and the machine's load was {:.1} when it began.</p>",
        results.boot_ms, results.cpus, results.build, results.load_1min
    );
    table(&mut page, &results.cases);
    page.push_str("<h2>How it grows</h2>\n");
    let plots: [Plot; 4] = [
        ("Decisions, ms for each job placed", "ms", |case| case.decision_ms_per_job),
        ("Store operations for each job", "operations", |case| case.store_operations_per_job),
        ("The controller's CPU time for each job", "ms", |case| {
            case.controller_cpu_s * 1e3 / number(case.jobs)
        }),
        ("The controller's memory", "MiB", |case| case.controller_memory_mib),
    ];
    for (title, unit, value) in plots {
        let fewest = results.cases.iter().map(|case| case.jobs).min().unwrap_or(0);
        let most = results.cases.iter().map(|case| case.hosts).max().unwrap_or(0);
        let by_hosts = results.cases.iter().filter(|case| case.jobs == fewest);
        let by_jobs = results.cases.iter().filter(|case| case.hosts == most);
        let hosts = vec![Trace {
            name: format!("{fewest} jobs"),
            points: by_hosts.map(|case| (number(case.hosts), value(case))).collect(),
        }];
        let jobs = vec![Trace {
            name: format!("{most} hosts"),
            points: by_jobs.map(|case| (number(case.jobs), value(case))).collect(),
        }];
        figure(
            &mut page,
            title,
            "over the number of hosts",
            &traces(&hosts, ("hosts", unit), title),
        );
        figure(&mut page, title, "over the number of jobs", &traces(&jobs, ("jobs", unit), title));
    }
    page.push_str(page::END);
    page
}

#[expect(clippy::cast_precision_loss, reason = "some thousands")]
fn number(count: usize) -> f64 {
    count as f64
}

fn table(page: &mut String, cases: &[Case]) {
    page.push_str(
        "<table><tr><th>hosts</th><th>jobs</th><th>total s</th><th>submission s</th><th>decisions, ms a job</th>\
         <th>ms a pass</th><th>store operations a job</th><th>a second</th><th>controller CPU s</th><th>MiB</th>\
         <th>start on the idle cluster, ms</th></tr>\n",
    );
    for case in cases {
        let cells = [
            case.hosts.to_string(),
            case.jobs.to_string(),
            format!("{:.1}", case.total_s),
            format!("{:.1}", case.submit_s),
            format!("{:.2}", case.decision_ms_per_job),
            format!("{:.2}", case.decision_ms_per_pass),
            format!("{:.1}", case.store_operations_per_job),
            format!("{:.0}", case.store_operations_per_s),
            format!("{:.1}", case.controller_cpu_s),
            format!("{:.0}", case.controller_memory_mib),
            format!("{:.0}", case.idle_start_ms),
        ];
        row(page, "", &cells);
    }
    page.push_str("</table>\n");
}
