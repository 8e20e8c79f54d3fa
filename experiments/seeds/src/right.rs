//! The data of HPA, PFP and BLAST, and what they have to find in it: what one process finds that shares nothing with them.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::bench::SUPPORT;
use crate::results::Work;

/// Two of the data's files.
const DATABASE: &str = "database.fa";
const QUERIES: &str = "queries.fa";

/// The output of a program of `experiments/workloads`.
pub fn python(workloads: &Path, line: &[&str]) -> Result<String> {
    let mut command = Command::new("python3");
    command.current_dir(workloads).args(line).env("PYTHONDONTWRITEBYTECODE", "1");
    let output = command.stdin(Stdio::null()).output().context("can't start python3")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{} failed: {said}", line[0]);
    Ok(String::from_utf8(output.stdout)?)
}

/// Where a program finds its transactions. HPA and PFP have a copy each, so that neither finds in a cache what the other one has read.
fn transactions(work: Work) -> String {
    format!("transactions-{}", work.name())
}

/// Writes the data into this directory, and returns the size of the transactions.
pub fn make_data(
    workloads: &Path,
    transaction_count: u32,
    sequence_count: u32,
    to: &Path,
) -> Result<u64> {
    std::fs::create_dir_all(to)?;
    let count = transaction_count.to_string();
    let size = ["--transactions", &count, "--items", "150", "--length", "8"];
    let made = python(workloads, &[&["quest.py"][..], &size].concat())?;
    for work in [Work::Hpa, Work::Pfp] {
        std::fs::write(to.join(transactions(work)), &made)?;
    }
    let [database, queries] = [DATABASE, QUERIES].map(|file| to.join(file).display().to_string());
    let count = sequence_count.to_string();
    python(workloads, &["sequences.py", "--sequences", &count, &database, &queries])?;
    Ok(made.len() as u64)
}

/// What is to be found in the data.
#[derive(Debug)]
pub struct Right {
    pub itemsets: String,
    hits: String,
}

impl Right {
    /// # Errors
    /// A reference fails, or finds nothing, which would prove nothing.
    pub fn find(workloads: &Path, data: &Path) -> Result<Self> {
        let path = |file: &str| data.join(file).display().to_string();
        let line = ["reference.py", &path(&transactions(Work::Hpa)), "--support", SUPPORT];
        let itemsets = python(workloads, &line)?;
        let hits = python(workloads, &["blast_reference.py", &path(DATABASE), &path(QUERIES)])?;
        ensure!(!itemsets.is_empty() && !hits.is_empty(), "the references find nothing");
        Ok(Self { itemsets, hits })
    }

    /// Whether HPA, PFP or BLAST has found just that.
    pub fn check(&self, work: Work, found: &str) -> Result<()> {
        let is_right = match work {
            Work::Hpa | Work::Pfp => found == self.itemsets,
            // blastn has its own order.
            Work::Blast => sorted(found) == sorted(&self.hits),
            Work::Tpch => false,
        };
        ensure!(is_right, "{} has not found what one process finds", work.words());
        Ok(())
    }
}

fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::write_programs;
    use crate::domain0;

    #[test]
    fn the_parallel_programs_find_what_one_process_finds_and_anything_else_is_noticed() {
        let workloads = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../workloads"));
        let scratch = tempfile::tempdir().expect("a directory");
        let [programs, data] = ["programs", "data"].map(|dir| scratch.path().join(dir));
        write_programs(workloads, &programs).expect("the programs");
        make_data(workloads, 1500, 100, &data).expect("the data");
        let right = Right::find(workloads, &data).expect("what is right");
        let most = right.itemsets.lines().map(|line| line.split(' ').count() - 1).max();
        assert!(most >= Some(4), "Apriori has too few passes: {most:?} items at most");

        let from = domain0::From { programs: &programs, mining: &data, tables: &data };
        let works = [Work::Hpa, Work::Pfp, Work::Blast];
        let measured = domain0::measure(from, &works).expect("the programs run");
        assert_eq!(measured.len(), works.len());
        for (work, measured) in measured {
            let found = measured.found;
            right.check(work, &found).expect("it is right");
            let (first, rest) = found.split_once('\n').expect("lines");
            for (wrong, what) in [
                (rest.to_owned(), "one is missing"),
                (format!("{found}{first}\n"), "one is there twice"),
                (found.replacen(first, &format!("{first}1"), 1), "one is another one"),
            ] {
                let error = right.check(work, &wrong).expect_err(what);
                assert!(error.to_string().starts_with(work.words()), "{error}");
            }
        }
    }
}
