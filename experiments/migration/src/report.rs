//! `report.html`: both systems on one page. A pure function of [`Results`].

use std::fmt::Write;

use perigee_lab::report::page::{self, figure, row};
use perigee_lab::report::phase_bars;
use perigee_lab::report::plots::{Bar, bars};
use perigee_lab::report::svg::escape;

use crate::guest::Guest;
use crate::results::{Comparison, Results, System};

// Writing to a String cannot fail, so the results of `write!` below are ignored.

pub fn html(results: &Results) -> String {
    let mut page = page::start("Perigee: live migration beside bare QEMU", "");
    page.push_str("<h1>Live migration beside bare QEMU</h1>\n");
    let _ = writeln!(page, "<p class=\"lead\">{}</p>", escape(&results.setting));
    let _ = writeln!(page, "<p>{}</p>", escape(&results.goals));
    for missed in results.comparisons.iter().flat_map(missed) {
        let _ = writeln!(page, "<p class=\"fault\">{}</p>", escape(&missed));
    }
    table(&mut page, results);
    for guest in Guest::ALL {
        plots(&mut page, results, guest);
    }
    phases(&mut page, results);
    page::end(&mut page, &results.versions);
    page
}

/// One sentence for each missed goal.
pub fn missed(compared: &Comparison) -> Vec<String> {
    let case = format!("{} at {} ms round trip", compared.guest.words(), compared.rtt_ms);
    let mut missed = Vec::new();
    if !compared.whole_goal_met {
        missed.push(format!(
            "Missed: {case}, Perigee's migration takes {:.2} times as long as bare QEMU's.",
            compared.whole_ratio
        ));
    }
    if !compared.pause_goal_met {
        missed.push(format!(
            "Missed: {case}, the guest stands still {:.0} ms longer than with bare QEMU.",
            compared.pause_longer_ms
        ));
    }
    missed
}

fn table(page: &mut String, results: &Results) {
    page.push_str(
        "<h2>Medians</h2>\n<div class=\"scroll\"><table>\n<tr><th>guest</th><th>RTT, ms</th><th>rounds</th>\
         <th>whole: bare, ms</th><th>Perigee, ms</th><th>ratio</th><th>QEMU's total: bare, ms</th>\
         <th>Perigee, ms</th><th>ratio</th><th>pause: bare, ms</th><th>Perigee, ms</th><th>longer, ms</th>\
         <th>sent: bare, MiB</th><th>Perigee, MiB</th></tr>\n",
    );
    for c in &results.comparisons {
        let cells = [
            c.guest.name().to_owned(),
            c.rtt_ms.to_string(),
            c.rounds.to_string(),
            format!("{:.0}", c.bare.whole_ms),
            format!("{:.0}", c.perigee.whole_ms),
            format!("{:.2}", c.whole_ratio),
            format!("{:.0}", c.bare.qemu_total_ms),
            format!("{:.0}", c.perigee.qemu_total_ms),
            format!("{:.2}", c.qemu_total_ratio),
            format!("{:.0}", c.bare.pause_ms),
            format!("{:.0}", c.perigee.pause_ms),
            format!("{:+.0}", c.pause_longer_ms),
            format!("{:.1}", c.bare.mib),
            format!("{:.1}", c.perigee.mib),
        ];
        row(page, "", &cells);
    }
    page.push_str("</table></div>\n");
}

fn plots(page: &mut String, results: &Results, guest: Guest) {
    let cases: Vec<&Comparison> = results.comparisons.iter().filter(|c| c.guest == guest).collect();
    if cases.is_empty() {
        return;
    }
    let of = |bare: fn(&Comparison) -> f64, perigee: fn(&Comparison) -> f64| -> Vec<Bar> {
        let bar = |name: &str, class, rtt_ms: u32, ms: f64| Bar {
            name: format!("{name}, {rtt_ms} ms round trip"),
            class,
            value: ms,
            label: format!("{ms:.0} ms"),
        };
        let pair = |c: &&Comparison| {
            [
                bar("bare QEMU", "peer", c.rtt_ms, bare(c)),
                bar("Perigee", "ours", c.rtt_ms, perigee(c)),
            ]
        };
        cases.iter().flat_map(pair).collect()
    };
    let _ = writeln!(page, "<h2>{}</h2>", escape(guest.words()));
    let whole = of(|c| c.bare.whole_ms, |c| c.perigee.whole_ms);
    let title = format!("The whole migration, {}", guest.name());
    figure(
        page,
        &title,
        "From asking until who asked knows that the guest is there; it includes starting the destination's QEMU.",
        &bars(&whole, "ms, median", &title),
    );
    let pause = of(|c| c.bare.pause_ms, |c| c.perigee.pause_ms);
    let title = format!("The pause, {}", guest.name());
    let caption = "The downtime that the source's QEMU tells, plus the time until Perigee's agent lets the guest run.";
    figure(page, &title, caption, &bars(&pause, "ms, median", &title));
}

/// For each case, the round of Perigee whose total time is nearest to the median.
fn phases(page: &mut String, results: &Results) {
    page.push_str("<h2>Where Perigee's time goes</h2>\n");
    for c in &results.comparisons {
        let distance = |ms: f64| (ms - c.perigee.whole_ms).abs();
        let typical = results
            .of(c.rtt_ms, c.guest, System::Perigee)
            .into_iter()
            .min_by(|a, b| distance(a.measured.whole_ms).total_cmp(&distance(b.measured.whole_ms)));
        let Some(phases) = typical.and_then(|m| m.measured.phases.as_ref()) else { continue };
        let title = format!("{}, {} ms round trip", c.guest.name(), c.rtt_ms);
        let caption = "The round nearest to the median. In the parts of the other colour the guest stands still.";
        figure(page, &title, caption, &bars(&phase_bars(phases), "ms", &title));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::results;

    #[test]
    fn the_page_stands_alone_and_names_what_is_missed() {
        let page = html(&results());
        for outside in ["<script", "http://", "https://", "<link", "url("] {
            assert!(!page.contains(outside), "{outside} is in the page");
        }
        assert!(page.contains("Missed: the guest is idle at 16 ms"), "{page}");
    }
}
