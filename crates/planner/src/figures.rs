//! The measurements and assumptions behind a plan, in plain words, each once.

use perigee_model::units::{format_bytes, format_rate};

use crate::facts::LinkFacts;

#[derive(Debug, Default)]
pub(crate) struct Figures(Vec<String>);

impl Figures {
    pub(crate) fn measured(&mut self, text: String) {
        if !self.0.contains(&text) {
            self.0.push(text);
        }
    }

    /// Adds an assumption that replaces a missing measurement.
    pub(crate) fn assumed(&mut self, text: &str) {
        self.measured(format!("assumed: {text}"));
    }

    pub(crate) fn link(&mut self, link: &LinkFacts, probe_request_bytes: u64) {
        let (from, to) = (&link.from, &link.to);
        let rtt_ms = link.probe.rtt_ms;
        self.measured(format!("RTT {from}-{to} {rtt_ms:.1} ms"));
        let rate = format_rate(link.probe.rate_bytes_per_s);
        self.measured(format!("rate {to} to {from} {rate}"));
        if let Some(blocks) = link.blocks {
            self.measured(format!(
                "a read of {} at {from} from {to} takes {} us",
                format_bytes(probe_request_bytes),
                blocks.latency_median_us
            ));
        }
    }

    pub(crate) fn into_vec(self) -> Vec<String> {
        self.0
    }
}
