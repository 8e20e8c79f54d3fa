//! A client of QEMU's monitor for scripts: one command at a time, and waiting for an event.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

const DEADLINE: Duration = Duration::from_secs(180);
const RETRY: Duration = Duration::from_millis(5);

pub struct Qmp {
    writer: UnixStream,
    reader: BufReader<UnixStream>,
    /// Events that arrived while a command was answered.
    events: Vec<Value>,
}

impl Qmp {
    /// Waits until QEMU has made its socket.
    pub fn connect(path: &Path) -> Result<Self> {
        let deadline = Instant::now() + DEADLINE;
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > deadline => {
                    return Err(error).with_context(|| format!("no QEMU at {}", path.display()));
                }
                Err(_) => std::thread::sleep(RETRY),
            }
        };
        stream.set_read_timeout(Some(DEADLINE))?;
        let reader = BufReader::new(stream.try_clone()?);
        let mut qmp = Self { writer: stream, reader, events: Vec::new() };
        qmp.line().context("QEMU's greeting")?;
        qmp.execute("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.reader.read_line(&mut line)? == 0 {
            bail!("QEMU closed its monitor");
        }
        Ok(serde_json::from_str(&line)?)
    }

    pub fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let mut line = json!({"execute": command, "arguments": arguments}).to_string();
        line.push('\n');
        self.writer.write_all(line.as_bytes())?;
        loop {
            let mut answer = self.line().with_context(|| command.to_owned())?;
            if answer.get("event").is_some() {
                self.events.push(answer);
            } else if let Some(error) = answer.get("error") {
                bail!("{command}: {error}");
            } else if answer.get("return").is_some() {
                return Ok(answer["return"].take());
            }
        }
    }

    /// Waits until the migration has reached a final state.
    pub fn migration_ended(&mut self) -> Result<()> {
        loop {
            let event = if self.events.is_empty() { self.line()? } else { self.events.remove(0) };
            if event["event"] != "MIGRATION" {
                continue;
            }
            match event["data"]["status"].as_str() {
                Some("completed") => return Ok(()),
                Some(end @ ("failed" | "cancelled")) => bail!("the migration {end}"),
                _ => {}
            }
        }
    }
}
