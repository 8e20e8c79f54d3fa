//! `perigee volume trace`

use perigee_http::Client;
use perigee_model::volume::TracedRequest;
use perigee_model::{Problem, VolumeName};

use crate::output::{self, Format};

/// Prints each request of a volume as it ends.
pub async fn run(
    client: &Client,
    volume: &VolumeName,
    seconds: u64,
    format: Format,
) -> Result<(), Problem> {
    let path = format!("/v1/volumes/{volume}/trace?seconds={seconds}");
    let mut failed = Ok(());
    let printed = client.get_lines(&path, |request: TracedRequest| {
        let text = match format {
            Format::Table => line(&request),
            _ => serde_json::to_string(&request).unwrap_or_else(|e| {
                failed = Err(Problem::internal("print a request", e));
                String::new()
            }),
        };
        output::put(format!("{text}\n").as_bytes());
    });
    printed.await?;
    failed
}

fn line(request: &TracedRequest) -> String {
    let TracedRequest { ended_us, command, offset, length_bytes, at_once, total_ns, .. } = request;
    let mut text = format!(
        "{}.{:06} {command:<6} {offset:>14} +{length_bytes:<8} {:>10}",
        ended_us / 1_000_000,
        ended_us % 1_000_000,
        us(*total_ns),
    );
    if *at_once {
        text.push_str(" at once");
    }
    for stage in &request.stages {
        text.push_str(&format!(" {}={}", stage.stage, us(stage.ns)));
    }
    if let Some(error) = &request.error {
        text.push_str(&format!(" error: {error}"));
    }
    text
}

/// Nanoseconds as microseconds with one decimal.
fn us(ns: u64) -> String {
    format!("{}.{}us", ns / 1000, ns % 1000 / 100)
}

#[cfg(test)]
mod tests {
    use perigee_model::volume::StageTime;

    use super::*;

    #[test]
    fn a_line_has_the_request_its_time_and_its_stages() {
        let request = TracedRequest {
            ended_us: 1_000_000_000_000_007,
            command: "read".into(),
            offset: 4096,
            length_bytes: 512,
            at_once: true,
            total_ns: 5_250,
            stages: vec![StageTime { stage: "head_read".into(), ns: 3_000 }],
            error: None,
        };
        let words: Vec<String> = line(&request).split_whitespace().map(str::to_owned).collect();
        let want =
            ["1000000000.000007", "read", "4096", "+512", "5.2us", "at", "once", "head_read=3.0us"];
        assert_eq!(words, want);
    }
}
