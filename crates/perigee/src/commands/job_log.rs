//! Prints the lines of a job's log, and parts of lines as soon as they come.

use std::io::IsTerminal;

use perigee_model::guest::LogStream;
use perigee_model::job::LogLine;

use crate::output;

/// Prints to standard output and standard error what the job has written to its own. Into a file, each of them gets the same bytes.
pub struct Printer {
    /// The lines are those of several VMs: each has the rank of its VM before it, and each part of a line is one of its own.
    is_merged: bool,
    is_terminal: bool,
    /// Where a line was begun that has not ended.
    begun: Option<LogStream>,
}

impl Printer {
    /// `is_merged`: the lines come from several VMs, and each one is printed with the rank of its VM.
    pub fn new(is_merged: bool) -> Self {
        let is_terminal = std::io::stdout().is_terminal();
        Self { is_merged, is_terminal, begun: None }
    }

    /// Prints a line where the command has written it: standard output or standard error.
    pub fn print(&mut self, line: &LogLine) {
        let text = self.text_of(line);
        match line.stream {
            LogStream::Stdout => output::put(text.as_bytes()),
            LogStream::Stderr => output::put_note(&text),
        }
    }

    fn text_of(&mut self, line: &LogLine) -> String {
        if let (true, Some(rank)) = (self.is_merged, line.rank) {
            let more = if line.continues { "…" } else { "" };
            return format!("{rank}: {}{more}\n", line.line);
        }
        let mut text = line.line.clone();
        if self.is_terminal {
            // A program that begins the line anew writes over what was there. Nothing here obeys a guest so far.
            text = text.trim_end_matches('\r').replace('\r', "\n");
            if self.begun.is_some_and(|stream| stream != line.stream) {
                text.insert(0, '\n');
            }
        }
        self.begun = line.continues.then_some(line.stream);
        match line.continues {
            true if self.is_terminal && line.line.ends_with('\r') => text + "\n",
            true => text,
            false => text + "\n",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(stream: LogStream, text: &str, continues: bool) -> LogLine {
        LogLine {
            seq: 1,
            uptime_ms: 0,
            stream,
            line: text.to_owned(),
            continues,
            arrived_ms: 0,
            rank: None,
        }
    }

    fn shown(printer: &mut Printer, lines: &[LogLine]) -> String {
        lines.iter().map(|line| printer.text_of(line)).collect()
    }

    #[test]
    fn a_file_gets_the_bytes_that_the_job_has_written() {
        let parts = ["{\"a\": ", "1, ", "}"].map(|text| line(LogStream::Stdout, text, text != "}"));
        let mut file = Printer { is_merged: false, is_terminal: false, begun: None };
        assert_eq!(shown(&mut file, &parts), "{\"a\": 1, }\n");
        let bar = [line(LogStream::Stdout, "1 %\r2 %\r", true), line(LogStream::Stdout, "", false)];
        assert_eq!(shown(&mut file, &bar), "1 %\r2 %\r\n");
    }

    #[test]
    fn a_terminal_shows_each_state_of_a_progress_bar_and_no_two_streams_in_one_line() {
        let mut terminal = Printer { is_merged: false, is_terminal: true, begun: None };
        let all = [
            line(LogStream::Stdout, "1 %\r2 %\r", true),
            line(LogStream::Stdout, "3 %", true),
            line(LogStream::Stderr, "oh", false),
            line(LogStream::Stdout, " done", false),
        ];
        assert_eq!(shown(&mut terminal, &all), "1 %\n2 %\n3 %\noh\n done\n");
    }

    #[test]
    fn of_several_vms_each_part_is_a_line_with_its_rank() {
        let mut merged = Printer { is_merged: true, is_terminal: false, begun: None };
        let part = LogLine { rank: Some(1), ..line(LogStream::Stdout, "50 %", true) };
        let rest = LogLine { rank: Some(1), ..line(LogStream::Stdout, " 100 %", false) };
        assert_eq!(shown(&mut merged, &[part, rest]), "1: 50 %…\n1:  100 %\n");
    }
}
