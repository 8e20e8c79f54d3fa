//! A page of figures in the text format of Prometheus, version 0.0.4
//! (<https://prometheus.io/docs/instrumenting/exposition_formats/>). All daemons write their pages with it.

use std::fmt::{Display, Write};

/// The `Content-Type` of a page.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// What a family of figures is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It only grows, and begins at 0 when its daemon or VM starts.
    Counter,
    /// It goes up and down.
    Gauge,
    /// Counts of durations by their length.
    Histogram,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// A page that is being written.
#[derive(Debug, Default)]
pub struct Page {
    text: String,
    family: &'static str,
}

impl Page {
    /// Begins a family. Its name ends with its unit, and with `_total` if it is a counter.
    pub fn family(&mut self, name: &'static str, kind: Kind, help: &str) {
        self.family = name;
        self.line(format_args!("# HELP {name} {help}\n# TYPE {name} {}", kind.name()));
    }

    /// A figure of the family that was begun last.
    pub fn figure(&mut self, labels: &[(&str, &dyn Display)], value: impl Display) {
        self.figure_of("", labels, value);
    }

    /// The same with a suffix to the family's name, as histograms have.
    pub fn figure_of(
        &mut self,
        suffix: &str,
        labels: &[(&str, &dyn Display)],
        value: impl Display,
    ) {
        let family = self.family;
        let mut between = "{";
        self.text.push_str(family);
        self.text.push_str(suffix);
        for (name, label) in labels {
            let label = escaped(&label.to_string());
            // Writing to a string can't fail.
            let _ = write!(self.text, "{between}{name}=\"{label}\"");
            between = ",";
        }
        if !labels.is_empty() {
            self.text.push('}');
        }
        self.line(format_args!(" {value}"));
    }

    /// A family of one figure.
    pub fn one(&mut self, name: &'static str, kind: Kind, help: &str, value: impl Display) {
        self.family(name, kind, help);
        self.figure(&[], value);
    }

    /// The whole page.
    #[must_use]
    pub fn into_text(self) -> String {
        self.text
    }

    fn line(&mut self, text: std::fmt::Arguments<'_>) {
        let _ = writeln!(self.text, "{text}");
    }
}

/// Backslashes, quotes and line ends in a label's value are escaped.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_has_its_help_its_kind_and_its_figures() {
        let mut page = Page::default();
        page.family("perigee_host_cpus", Kind::Gauge, "CPUs of a host.");
        page.figure(&[("host", &"home1"), ("site", &"home")], 2);
        page.one("perigee_jobs_placed_total", Kind::Counter, "Jobs.", 7_u64);
        assert_eq!(
            page.into_text(),
            "# HELP perigee_host_cpus CPUs of a host.\n# TYPE perigee_host_cpus gauge\n\
             perigee_host_cpus{host=\"home1\",site=\"home\"} 2\n\
             # HELP perigee_jobs_placed_total Jobs.\n# TYPE perigee_jobs_placed_total counter\n\
             perigee_jobs_placed_total 7\n"
        );
    }

    #[test]
    fn a_label_can_t_end_its_line() {
        let mut page = Page::default();
        page.family("perigee_x", Kind::Gauge, "X.");
        page.figure(&[("why", &"a \"b\"\n\\c")], 0.5);
        assert!(page.into_text().ends_with("perigee_x{why=\"a \\\"b\\\"\\n\\\\c\"} 0.5\n"));
    }
}
