//! `report.html`: both systems on one page. A pure function of [`Results`].

use std::fmt::Write;

use perigee_lab::report::page::{self, figure, row};
use perigee_lab::report::plots::{Trace, traces};
use perigee_lab::report::svg::escape;

use crate::results::{Results, Run};

// Writing to a String cannot fail, so the results of `write!` below are ignored.

const PAPER: &str = "003 is Goiri, Julià and Guitart: \"Efficient data management support for virtualized service providers\".";

pub fn html(results: &Results) -> String {
    let mut page = page::start("Perigee: a web server moves and answers", "");
    page.push_str("<h1>A web server and an application server that move, and their clients</h1>\n");
    let _ = writeln!(page, "<p class=\"lead\">{}</p>", escape(&results.setting));
    page::goals(&mut page, &results.goals());
    page::papers(&mut page, PAPER, &results.paper);
    table(&mut page, results);
    for run in &results.runs {
        let title = format!("Replies with {}", run.system.name());
        replies(&mut page, run, &run.per_100_ms, (&title, 50));
        let title = format!("Replies of Tomcat's application with {}", run.system.name());
        replies(&mut page, run, &run.tomcat.per_100_ms, (&title, 10));
    }
    page::end(&mut page, &results.versions);
    page
}

fn table(page: &mut String, results: &Results) {
    page.push_str(
        "<h2>Figures</h2>\n<div class=\"scroll\"><table>\n<tr><th>system</th><th>moves</th><th>replies</th><th>failed</th>\
         <th>longest time without a reply, ms</th><th>longest pause, ms</th><th>Tomcat: replies</th><th>failed</th><th>longest time without a reply, ms</th>\
         <th>SSH goes on</th><th>its longest gap, ms</th><th>vm ssh goes on</th><th>its longest gap, ms</th>\
         <th>download, MiB</th><th>its longest gap, ms</th><th>segments sent again: clients</th><th>guest</th></tr>\n",
    );
    for run in &results.runs {
        let pause_ms =
            run.moves.iter().map(|moved| moved.sending.pause_ms).max().unwrap_or_default();
        let cells = [
            run.system.name().to_owned(),
            run.moves.len().to_string(),
            run.replies.to_string(),
            run.failed.to_string(),
            format!("{:.0}", run.longest_gap_ms),
            pause_ms.to_string(),
            run.tomcat.replies.to_string(),
            run.tomcat.failed.to_string(),
            format!("{:.0}", run.tomcat.longest_gap_ms),
            if run.ssh.goes_on { "yes" } else { "no" }.to_owned(),
            format!("{:.0}", run.ssh.longest_gap_ms),
            run.vm_ssh.as_ref().map_or("", |ssh| if ssh.goes_on { "yes" } else { "no" }).to_owned(),
            run.vm_ssh.as_ref().map(|ssh| format!("{:.0}", ssh.longest_gap_ms)).unwrap_or_default(),
            (run.download.bytes >> 20).to_string(),
            format!("{:.0}", run.download.longest_gap_ms),
            run.clients_resent.to_string(),
            run.guest_resent.to_string(),
        ];
        row(page, "", &cells);
    }
    page.push_str("</table></div>\n");
}

fn replies(page: &mut String, run: &Run, per_100_ms: &[u32], (title, per_s): (&str, u32)) {
    let points: Vec<(f64, f64)> = per_100_ms
        .iter()
        .enumerate()
        .filter_map(|(index, count)| {
            Some((f64::from(u32::try_from(index).ok()?) / 10.0, f64::from(*count)))
        })
        .collect();
    // A move stands as a box of the height of one reply.
    let mut moves = vec![(0.0, 0.0)];
    for moved in &run.moves {
        let ends = [
            (moved.begun_s, 0.0),
            (moved.begun_s, 1.0),
            (moved.ended_s, 1.0),
            (moved.ended_s, 0.0),
        ];
        moves.extend(ends);
    }
    let lines = [
        Trace { name: "replies".to_owned(), points },
        Trace { name: "the guest moves".to_owned(), points: moves },
    ];
    let asked =
        format!("Replies in each tenth of a second. The clients ask {per_s} times a second.");
    figure(page, title, &asked, &traces(&lines, ("seconds", "replies in 100 ms"), title));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paper::tests::run;

    #[test]
    fn the_page_stands_alone_and_names_what_is_missed() {
        let run = run(vec![5, 0, 6], 0);
        let page = html(&Results { runs: vec![run], ..Results::default() });
        for outside in ["<script", "http://", "https://", "<link", "url("] {
            assert!(!page.contains(outside), "{outside} is in the page");
        }
        assert!(page.contains("Missed: no request fails") && page.contains("1 of 101 in 1 moves"));
    }
}
