//! Printing: one value or a list, as a table, JSON, YAML or CSV.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use indicatif::{ProgressBar, ProgressStyle};
use perigee_model::Problem;
use perigee_model::volume::Progress;
use serde::Serialize;

use crate::terminal;

/// How results are printed. JSON and YAML have every field; tables and CSV have chosen columns with units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    Table,
    Json,
    Yaml,
    Csv,
}

/// A column: its heading, and the function that formats its cell of a row.
pub type Column<T> = (&'static str, fn(&T) -> String);

/// Prints rows. JSON and YAML have every field; a table and CSV have only the columns, and a table one line for each row.
pub fn list<T: Serialize>(
    format: Format,
    rows: &[T],
    columns: &[Column<T>],
) -> Result<(), Problem> {
    match format {
        Format::Json => print_json(&rows),
        Format::Yaml => print_yaml(&rows),
        Format::Table => {
            print_table(rows, columns);
            Ok(())
        }
        Format::Csv => print_csv(rows, columns),
    }
}

/// Prints one value. The table has a line for each line of each field.
pub fn one<T: Serialize>(format: Format, value: &T, fields: &[Column<T>]) -> Result<(), Problem> {
    match format {
        Format::Json => print_json(value),
        Format::Yaml => print_yaml(value),
        Format::Table => {
            let width = fields.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
            for (name, show) in fields {
                for (number, line) in show(value).lines().enumerate() {
                    let name = if number == 0 { name } else { "" };
                    text(&format!("{name:width$}  {line}"));
                }
            }
            Ok(())
        }
        Format::Csv => print_csv(std::slice::from_ref(value), fields),
    }
}

/// Prints text and a newline.
pub fn text(text: &str) {
    put(format!("{text}\n").as_bytes());
}

/// Prints a line to standard error. It does not matter whether anybody reads it.
pub fn note(text: &str) {
    drop(writeln!(io::stderr(), "{}", terminal::for_stderr(text)));
}

/// Prints to standard error without an end of the line.
pub fn put_note(text: &str) {
    drop(write!(io::stderr(), "{}", terminal::for_stderr(text)));
}

/// Whether the program has more to do than to print.
static HAS_MORE_TO_DO: AtomicBool = AtomicBool::new(false);

/// From now on the program does not end because nobody reads what it prints: it has VMs, which it ends itself.
pub fn outlive_reader() {
    HAS_MORE_TO_DO.store(true, Ordering::Relaxed);
}

/// Writes to standard output; what a terminal would obey is made harmless. If the reader has closed the pipe, as `head` does, the program exits without a
/// message, unless it has more to do.
pub fn put(bytes: &[u8]) {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(&terminal::for_stdout(bytes)).and_then(|()| stdout.flush());
    let Err(error) = written else { return };
    let is_closed = error.kind() == io::ErrorKind::BrokenPipe;
    if !is_closed {
        note(&format!("perigee: write to standard output: {error}"));
    }
    if let Some(code) = exit_code(is_closed, HAS_MORE_TO_DO.load(Ordering::Relaxed)) {
        std::process::exit(code);
    }
}

/// With which code the program exits that can't print.
fn exit_code(is_closed: bool, has_more_to_do: bool) -> Option<i32> {
    match (has_more_to_do, is_closed) {
        (true, _) => None,
        (false, true) => Some(128 + 13), // as a shell reports SIGPIPE
        (false, false) => Some(1),
    }
}

/// Pretty, with a line feed at the end.
pub fn print_json<T: Serialize>(value: &T) -> Result<(), Problem> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|e| Problem::internal("can't print JSON", e))?;
    self::text(&text);
    Ok(())
}

fn print_yaml<T: Serialize>(value: &T) -> Result<(), Problem> {
    let text =
        serde_saphyr::to_string(value).map_err(|e| Problem::internal("can't print YAML", e))?;
    put(text.as_bytes());
    Ok(())
}

fn print_table<T>(rows: &[T], columns: &[Column<T>]) {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header(columns.iter().map(|(head, _)| head.to_uppercase()));
    for row in rows {
        table.add_row(columns.iter().map(|(_, show)| one_line(show(row))));
    }
    for line in table.to_string().lines() {
        text(line.trim_end());
    }
}

/// The first line of a text, with a sign if there is more.
fn one_line(text: String) -> String {
    match text.split_once('\n') {
        Some((first, _)) => format!("{} …", first.trim_end()),
        None => text,
    }
}

fn print_csv<T>(rows: &[T], columns: &[Column<T>]) -> Result<(), Problem> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    let problem = |e: csv::Error| Problem::internal("can't print CSV", e);
    writer.write_record(columns.iter().map(|(head, _)| *head)).map_err(problem)?;
    for row in rows {
        writer.write_record(columns.iter().map(|(_, show)| show(row))).map_err(problem)?;
    }
    put(&writer.into_inner().map_err(|e| Problem::internal("can't print CSV", e))?);
    Ok(())
}

/// A progress bar on stderr, which is hidden if that is not a terminal. `fields` follow the bar.
pub fn progress_bar(prefix: &impl ToString, fields: &str) -> ProgressBar {
    let bar = if io::stderr().is_terminal() { ProgressBar::new(0) } else { ProgressBar::hidden() };
    let template = format!("{{prefix}} [{{elapsed}}] {{bar:30}} {fields}");
    if let Ok(style) = ProgressStyle::with_template(&template) {
        bar.set_style(style);
    }
    bar.set_prefix(prefix.to_string());
    bar
}

/// Runs long work and shows its progress on a terminal, in a line that is removed at the end.
pub async fn with_progress<T, F>(work: impl FnOnce(Tell) -> F) -> T
where
    F: Future<Output = T>,
{
    let bar = ProgressBar::new(0);
    if let Ok(style) =
        ProgressStyle::with_template("{bar:40} {binary_bytes} of {binary_total_bytes}  {elapsed}")
    {
        bar.set_style(style);
    }
    let shown = bar.clone();
    let result = work(Box::new(move |progress: Progress| {
        shown.set_length(progress.total_bytes.max(progress.done_bytes));
        shown.set_position(progress.done_bytes);
    }))
    .await;
    bar.finish_and_clear();
    result
}

type Tell = Box<dyn FnMut(Progress) + Send>;

/// `1.5 GiB`; exact below 1 KiB.
pub fn bytes(bytes: u64) -> String {
    perigee_model::units::format_bytes(bytes)
}

/// A Unix time, in UTC.
pub fn time(unix_ms: u64) -> String {
    perigee_model::units::format_time(unix_ms)
}

/// `12.3 s`, or an empty text.
pub fn seconds(seconds: Option<f64>) -> String {
    seconds.map_or_else(String::new, |s| format!("{s:.1} s"))
}

/// A share of the time in percent; a dash if it is not known.
pub fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{:.0} %", share * 100.0))
}

/// A value's name as in JSON, in lower snake case.
pub fn word<T: Serialize>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(text)) => text,
        Ok(other) => other.to_string(),
        Err(error) => error.to_string(),
    }
}

/// The value, or `-` if there is none.
pub fn or_dash<T: std::fmt::Display>(value: Option<&T>) -> String {
    value.map_or_else(|| "-".to_owned(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_has_vms_does_not_exit_because_nobody_reads_what_it_prints() {
        assert_eq!(exit_code(true, false), Some(141));
        assert_eq!(exit_code(true, true), None);
    }

    #[test]
    fn a_row_has_one_line() {
        assert_eq!(one_line("it has failed: \nand why\nin full".to_owned()), "it has failed: …");
        assert_eq!(one_line("it has failed".to_owned()), "it has failed");
    }
}
