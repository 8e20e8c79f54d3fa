//! `report.html`: each figure and table of the papers, theirs beside ours. A pure function of [`Results`].

use std::collections::BTreeSet;
use std::fmt::Write;

use perigee_lab::paper::Verdict;
use perigee_lab::report::page::{self, TABLE_END, row};
use perigee_lab::report::svg::escape;

use crate::collect::{Judgement, Outcome, PaperRows, Results, Row};
use crate::list::{Kind, Paper};

// Writing to a String cannot fail, so the results of `write!` below are ignored.

const LEAD: &str = "Each figure and table of five papers, and what this repository's experiments have found instead. The experiments judge, by their \
     measurements; this page collects what they say. The papers' texts name relations and few values, and their plots are not at hand as numbers, so \
     relations are compared. Their machines are not at hand either: ours is one machine without KVM, whose hosts are network namespaces.";

pub fn html(results: &Results) -> String {
    let mut page = page::start("Perigee: the papers beside ours", "");
    let _ =
        writeln!(page, "<h1>The papers' figures beside ours</h1>\n<p class=\"lead\">{LEAD}</p>");
    counts(&mut page, results);
    for PaperRows { paper, rows } in &results.papers {
        let title = format!("{} {}", paper.number, paper.authors);
        let columns = ["figure", "shows", "theirs", "ours"];
        page::table(&mut page, &title, &escape(paper.title), &columns);
        for row in rows {
            figure(&mut page, results, paper, row);
        }
        page.push_str(TABLE_END);
    }
    page::end(&mut page, &results.runs);
    page
}

fn counts(page: &mut String, results: &Results) {
    let counts: Vec<_> = results.papers.iter().map(PaperRows::counts).collect();
    let outcomes: BTreeSet<Outcome> = counts.iter().flat_map(|of| of.keys().copied()).collect();
    let names = outcomes.iter().map(|outcome| outcome.words());
    let columns: Vec<&str> = std::iter::once("paper").chain(names).collect();
    let text = "Figures, tables and sections. “In part”: of several judgements some agree.";
    page::table(page, "Counts", text, &columns);
    for (paper, counts) in results.papers.iter().zip(&counts) {
        let of = |outcome: &Outcome| counts.get(outcome).copied().unwrap_or_default().to_string();
        let name = format!("{} {}", paper.paper.number, paper.paper.authors);
        let cells: Vec<String> = std::iter::once(name).chain(outcomes.iter().map(of)).collect();
        row(page, "", &cells);
    }
    page.push_str(TABLE_END);
}

/// The place of a figure in the page.
fn anchor(key: &str) -> String {
    key.replace(". ", "-").replace([' ', '.'], "-")
}

fn figure(page: &mut String, results: &Results, paper: &Paper, row: &Row) {
    let mut ours = String::new();
    let (words, mut theirs) = (row.outcome.words(), "");
    match row.item.kind {
        Kind::Drawing(file) => {
            let _ = write!(ours, "A drawing; here: <a href=\"../../{file}\">{file}</a>.");
        }
        Kind::Setting(of) => {
            let _ = write!(ours, "Machines and settings; ours: {}.", report_of(results, of));
        }
        Kind::Same { theirs: said, as_of } => {
            theirs = said;
            let to = anchor(as_of);
            let _ = write!(
                ours,
                "<b>{words}</b>: as <a href=\"#{to}\">{as_of}</a>, which is the same."
            );
        }
        Kind::Measured { theirs: said, .. } => {
            theirs = said;
            if row.judgements.len() != 1 {
                let _ = write!(ours, "<b>{words}</b>");
            }
            ours.push_str("<ul>");
            row.judgements.iter().for_each(|one| judgement(&mut ours, results, one));
            ours.push_str("</ul>");
        }
    }
    let _ = writeln!(
        page,
        "<tr id=\"{}\"><td>{}</td><td class=\"text\">{}</td><td class=\"text\">{}</td><td class=\"text\">{ours}</td></tr>",
        anchor(&format!("{} {}", paper.number, row.item.number)),
        escape(row.item.number),
        escape(row.item.shows),
        escape(theirs)
    );
}

/// The experiment's name as a link to its report, with the commit that it measured.
fn report_of(results: &Results, experiment: &str) -> String {
    let commit = results.runs.get(experiment).and_then(|version| version.rsplit("commit ").next());
    let commit = commit.map_or_else(String::new, |commit| format!(", commit {}", escape(commit)));
    format!("<a href=\"../{experiment}/report.html\">{experiment}</a>{commit}")
}

fn judgement(page: &mut String, results: &Results, one: &Judgement) {
    let class = if one.verdict == Verdict::DoesNotAgree { " class=\"fault\"" } else { "" };
    let of = if one.of.is_empty() { String::new() } else { format!("{}: ", escape(&one.of)) };
    let mut texts = vec![format!("<b{class}>{}</b>.", one.verdict.words())];
    texts.extend([&one.ours].into_iter().filter(|ours| !ours.is_empty()).map(|ours| escape(ours)));
    texts.extend(one.why.as_deref().map(|why| format!("Why: {}", escape(why))));
    let earlier = if one.is_of_earlier_program {
        "; by an earlier program of this experiment, and not measured by the present one"
    } else {
        ""
    };
    let run = report_of(results, one.experiment);
    let _ = write!(
        page,
        "<li>{of}{} <span class=\"soft\">({run}{earlier})</span></li>",
        texts.join(" ")
    );
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Each tag is closed, in the order in which they were opened.
    fn assert_well_formed(page: &str) {
        let mut open: Vec<&str> = Vec::new();
        for tag in page.split('<').skip(1) {
            let name = tag.split([' ', '>', '\n']).next().expect("a name");
            match name.strip_prefix('/') {
                Some(name) => assert_eq!(open.pop(), Some(name), "before {tag:?}"),
                None if ["!doctype", "meta"].contains(&name) => {}
                None => open.push(name),
            }
        }
        assert_eq!(open, Vec::<&str>::new(), "they are not closed");
    }

    #[test]
    fn the_page_is_well_formed_stands_alone_and_has_each_link_s_end() {
        let experiments = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let results = Results::collect(&experiments).expect("results");
        let page = html(&results);
        assert_well_formed(&page);
        assert!(page.ends_with(page::END));
        for outside in ["<script", "http://", "https://", "<link", "url("] {
            assert!(!page.contains(outside), "{outside} is in the page");
        }
        for to in page.split("href=\"").skip(1).filter_map(|it| it.split('"').next()) {
            let is_there = match to.strip_prefix('#') {
                Some(place) => page.contains(&format!("<tr id=\"{place}\">")),
                None => experiments.join("papers").join(to).is_file(),
            };
            assert!(is_there, "{to}");
        }
    }

    #[test]
    fn a_figure_that_no_run_has_is_not_measured() {
        let results = Results::collect(Path::new("/there/is/nothing")).expect("results");
        let page = html(&results);
        assert_well_formed(&page);
        assert!(page.contains("<b>not measured</b>."));
    }
}
