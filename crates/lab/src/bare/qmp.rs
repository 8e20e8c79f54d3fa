//! A client of QEMU's monitor for scripts: one command at a time, and waiting for an event.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use perigee_model::Problem;
use serde_json::{Value, json};

const DEADLINE: Duration = Duration::from_secs(180);
const RETRY: Duration = Duration::from_millis(5);

/// A connection to QEMU's monitor. It carries out one command at a time, and keeps the events that come meanwhile.
pub struct Qmp {
    writer: UnixStream,
    reader: BufReader<UnixStream>,
    /// Events that arrived while a command was answered.
    events: Vec<Value>,
}

impl Qmp {
    /// Waits until QEMU has made its socket.
    ///
    /// # Errors
    /// `Unavailable` when there is none within 180 s.
    pub fn connect(path: &Path) -> Result<Self, Problem> {
        let no_qemu =
            |e| Problem::unavailable(format!("can't reach QEMU at {}", path.display()), e);
        let deadline = Instant::now() + DEADLINE;
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > deadline => return Err(no_qemu(error)),
                Err(_) => std::thread::sleep(RETRY),
            }
        };
        stream.set_read_timeout(Some(DEADLINE)).map_err(no_qemu)?;
        let reader = BufReader::new(stream.try_clone().map_err(no_qemu)?);
        let mut qmp = Self { writer: stream, reader, events: Vec::new() };
        qmp.line("the greeting")?;
        qmp.execute("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    fn line(&mut self, what: &str) -> Result<Value, Problem> {
        let failed = |why: &dyn std::fmt::Display| {
            Problem::internal(format!("can't get QEMU's answer to {what}"), why)
        };
        let mut line = String::new();
        if self.reader.read_line(&mut line).map_err(|e| failed(&e))? == 0 {
            return Err(failed(&"it closed its monitor"));
        }
        serde_json::from_str(&line).map_err(|e| failed(&e))
    }

    /// # Errors
    /// QEMU refuses the command, or does not answer within 180 s.
    pub fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value, Problem> {
        let mut line = json!({"execute": command, "arguments": arguments}).to_string();
        line.push('\n');
        self.writer
            .write_all(line.as_bytes())
            .map_err(|e| Problem::internal(format!("can't send {command} to QEMU"), e))?;
        loop {
            let mut answer = self.line(command)?;
            if answer.get("event").is_some() {
                self.events.push(answer);
            } else if let Some(error) = answer.get("error") {
                return Err(Problem::internal(format!("QEMU can't do {command}"), error));
            } else if answer.get("return").is_some() {
                return Ok(answer["return"].take());
            }
        }
    }

    /// Waits for the next event for which `wanted` gives something.
    ///
    /// # Errors
    /// Those of `wanted`, or no event came for 180 s.
    pub fn event<T>(
        &mut self,
        mut wanted: impl FnMut(&Value) -> Result<Option<T>, Problem>,
    ) -> Result<T, Problem> {
        loop {
            let event = if self.events.is_empty() {
                self.line("a wait for an event")?
            } else {
                self.events.remove(0)
            };
            if let Some(found) = wanted(&event)? {
                return Ok(found);
            }
        }
    }

    /// Waits until the migration has reached a state, `completed` for example.
    ///
    /// # Errors
    /// The migration failed or was cancelled.
    pub fn migration(&mut self, state: &str) -> Result<(), Problem> {
        let reached = self.event(|event| match event["data"]["status"].as_str() {
            _ if event["event"] != "MIGRATION" => Ok(None),
            Some(now) if now == state => Ok(Some(Ok(()))),
            Some(end @ ("failed" | "cancelled" | "completed")) => Ok(Some(Err(end.to_owned()))),
            _ => Ok(None),
        })?;
        let Err(end) = reached else { return Ok(()) };
        let why = self.execute("query-migrate", &json!({}))?;
        let why = why["error-desc"].as_str().unwrap_or("QEMU does not say why");
        Err(Problem::internal("can't migrate by QEMU alone", format!("it {end}: {why}")))
    }
}

/// The time of an event, in microseconds of the machine's clock.
pub fn event_us(event: &Value) -> u64 {
    let at = &event["timestamp"];
    at["seconds"].as_u64().unwrap_or(0) * 1_000_000 + at["microseconds"].as_u64().unwrap_or(0)
}
