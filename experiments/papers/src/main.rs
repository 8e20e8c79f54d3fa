//! Each figure and table of five papers beside ours: `report.html` and `results.json`, of what the experiments beside this one have measured
//! and judged. This program measures and judges nothing itself.
//!
//! | question | file |
//! |---|---|
//! | which figures and tables do the papers have, and who repeats them | `list.rs` |
//! | what do the experiments' results say of them | `collect.rs` |
//! | how is the page made | `report.rs` |

mod collect;
mod list;
mod report;

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Parser;

use collect::Results;

#[derive(Parser)]
struct Arguments {
    /// The directory with the experiments' own directories
    #[arg(long, default_value = "experiments")]
    experiments: PathBuf,
    /// The directory for results.json and report.html. The page's links work in a directory beside the experiments'
    #[arg(long, default_value = "experiments/papers")]
    out: PathBuf,
    /// The same: there is nothing to measure
    #[arg(long)]
    quick: bool,
}

fn main() -> Result<()> {
    let Arguments { experiments, out, quick: _ } = Arguments::parse();
    let results = Results::collect(&experiments)?;
    std::fs::create_dir_all(&out).with_context(|| format!("can't make {}", out.display()))?;
    for (name, content) in [
        ("results.json", serde_json::to_string_pretty(&results)? + "\n"),
        ("report.html", report::html(&results)),
    ] {
        let path = out.join(name);
        std::fs::write(&path, content)
            .with_context(|| format!("can't write {}", path.display()))?;
    }
    print(&results);
    Ok(())
}

#[expect(clippy::print_stdout, reason = "the counts are what it is for")]
fn print(results: &Results) {
    for paper in &results.papers {
        let counts = paper.counts();
        let words = counts.iter().map(|(outcome, count)| format!("{count} {}", outcome.words()));
        println!("{}: {}", paper.paper.number, words.collect::<Vec<_>>().join(", "));
    }
}
