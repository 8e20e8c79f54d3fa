//! The data of HPA, PFP and BLAST, and what they have to find in it: what one process finds that shares nothing with them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::bench::{STEPS, STREAMS, SUPPORT};
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
    /// What SQLite answers to the power test's steps, and after them to each stream's.
    power: String,
    streams: Vec<String>,
    workloads: PathBuf,
    scratch: PathBuf,
}

impl Right {
    /// # Errors
    /// A reference fails, or finds nothing, which would prove nothing.
    pub fn find(workloads: &Path, data: &Path, scratch: &Path) -> Result<Self> {
        let path = |file: &str| data.join(file).display().to_string();
        let of = transactions(Work::Hpa);
        let line = ["reference.py", &path(&of), "--support", SUPPORT];
        let itemsets = python(workloads, &line)?;
        let hits = python(workloads, &["blast_reference.py", &path(DATABASE), &path(QUERIES)])?;
        ensure!(!itemsets.is_empty() && !hits.is_empty(), "the references find nothing");
        let (workloads, scratch) = (workloads.to_owned(), scratch.to_owned());
        let (power, streams) = (String::new(), Vec::new());
        Ok(Self { itemsets, hits, power, streams, workloads, scratch })
    }

    /// Also asks SQLite for the answers over TPC-H's tables in a directory.
    ///
    /// # Errors
    /// SQLite does not answer all.
    pub fn with_answers(mut self, tables: &Path) -> Result<Self> {
        let tables = tables.display().to_string();
        let mut line = vec!["tpch/reference.py", "answers", &tables];
        line.extend(STEPS.split(' '));
        line.extend(STREAMS.iter().flat_map(|stream| stream.split(' ')));
        (self.power, self.streams) = parts(&python(&self.workloads, &line)?)?;
        Ok(self)
    }

    /// Whether HPA, PFP or BLAST has found just that.
    ///
    /// # Errors
    /// It has not.
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

    /// Whether PostgreSQL answers the power test as SQLite does.
    ///
    /// # Errors
    /// It does not.
    pub fn check_power(&self, answers: &str) -> Result<()> {
        self.compare(&self.power, answers)
    }

    /// The same of a stream of the throughput test.
    ///
    /// # Errors
    /// It does not.
    pub fn check_stream(&self, number: usize, answers: &str) -> Result<()> {
        self.compare(self.streams.get(number).context("no such stream")?, answers)
    }

    fn compare(&self, right: &str, got: &str) -> Result<()> {
        let [right_path, got_path] = ["right", "got"].map(|name| self.scratch.join(name));
        std::fs::write(&right_path, right)?;
        std::fs::write(&got_path, got)?;
        let [right, got] = [right_path, got_path].map(|path| path.display().to_string());
        python(&self.workloads, &["tpch/reference.py", "compare", &right, &got]).map(drop)
    }
}

/// The answers to the power test's steps, and those to each stream's.
fn parts(answers: &str) -> Result<(String, Vec<String>)> {
    let mut each: Vec<String> = Vec::new();
    for line in answers.split_inclusive('\n') {
        match (line.starts_with("-- "), each.last_mut()) {
            (true, _) => each.push(line.to_owned()),
            (false, Some(last)) => last.push_str(line),
            (false, None) => {}
        }
    }
    let counts: Vec<usize> = STREAMS.iter().map(|stream| stream.split(' ').count()).collect();
    let steps = STEPS.split(' ').count();
    let wanted = steps + counts.iter().sum::<usize>();
    ensure!(each.len() == wanted, "{} answers of {wanted}", each.len());
    let mut rest = each.split_off(steps).into_iter();
    let streams = counts.into_iter().map(|count| rest.by_ref().take(count).collect()).collect();
    Ok((each.concat(), streams))
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
        let [programs, data] = ["programs", "mining-near"].map(|dir| scratch.path().join(dir));
        write_programs(workloads, &programs).expect("the programs");
        make_data(workloads, 1500, 100, &data).expect("the data");
        let right = Right::find(workloads, &data, scratch.path()).expect("what is right");
        let most = right.itemsets.lines().map(|line| line.split(' ').count() - 1).max();
        assert!(most >= Some(4), "Apriori has too few passes: {most:?} items at most");

        let from = domain0::From { programs: &programs, mining: scratch.path(), databases: &[] };
        let works = [Work::Hpa, Work::Pfp, Work::Blast];
        let words: Vec<String> = works.iter().map(|work| format!("{}:near", work.name())).collect();
        let outputs = domain0::measure(from, &words.join(" ")).expect("the programs run");
        for work in works {
            let of = format!("{}-near-found", work.name());
            let (_, found) = outputs.iter().find(|(name, _)| *name == of).expect("its output");
            right.check(work, found).expect("it is right");
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

    #[test]
    fn the_answers_of_the_streams_come_after_those_of_the_power_test() {
        let all = "-- refresh-1\n1\n-- 14\n2\n-- refresh-2\n4\n-- 6\n5\n6\n-- 12\n";
        let (power, streams) = parts(all).expect("answers");
        assert_eq!(power, "-- refresh-1\n1\n-- 14\n2\n-- refresh-2\n4\n");
        assert_eq!(streams, ["-- 6\n5\n6\n", "-- 12\n"]);
        parts("-- refresh-1\n1\n").expect_err("most are missing");
    }
}
