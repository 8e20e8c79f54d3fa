//! `perigee lab run boot-storm`

use std::path::PathBuf;

use perigee_lab::storm::{self, MachineOutcome};
use perigee_lab::{LabId, Options, Steps};
use perigee_model::Problem;
use perigee_model::client::Over;

use crate::arguments::BaseOption;
use crate::commands::client::over;
use crate::output::{self, Column, Format};

/// What `perigee lab run boot-storm` takes.
#[derive(Debug, clap::Args)]
pub struct StormOptions {
    /// Number of VMs; each takes its memory, and some more for QEMU
    #[arg(long, value_name = "N", default_value_t = 8)]
    clients: u16,
    /// Protocol by which they reach their disks: `iscsi` or `nbd`
    #[arg(long, default_value = "iscsi", value_parser = over)]
    over: Over,
    /// Memory of each in MiB
    #[arg(long, value_name = "MIB", default_value_t = 256)]
    memory_mib: u32,
    /// The golden image: its file, or the directory that scripts/golden-image prints
    #[arg(long, value_name = "PATH")]
    image: PathBuf,
    /// Directory for report.html and results.json
    #[arg(long, default_value = "out/boot-storm", value_name = "DIR")]
    out: PathBuf,
    /// Record the requests in this file; an existing file is overwritten
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// The lab's id, four hexadecimal digits [default: random]
    #[arg(long)]
    id: Option<LabId>,
    #[command(flatten)]
    base: BaseOption,
}

const MACHINES: &[Column<MachineOutcome>] = &[
    ("machine", |m| m.name.clone()),
    ("up", |m| output::seconds(Some(m.up_s))),
    ("requests", |m| m.requests.to_string()),
    ("read", |m| output::bytes(m.read_bytes)),
    ("written", |m| output::bytes(m.written_bytes)),
];

/// A table and CSV have a line for each machine; JSON and YAML have all of results.json.
pub async fn run(ask: StormOptions, format: Format, steps: &Steps) -> Result<(), Problem> {
    let StormOptions { clients, over, memory_mib, image, out, trace, id, base } = ask;
    let Options { program, .. } = Options::new()?;
    let options = storm::Options {
        id: id.unwrap_or_else(LabId::random),
        base: base.base,
        program,
        image: storm::Image::find(&image, over)?,
        machines: clients,
        over,
        memory_mib,
        out,
        trace,
    };
    let outcome = storm::storm(&options, steps).await?;
    match format {
        Format::Table | Format::Csv => output::list(format, &outcome.machines, MACHINES)?,
        Format::Json | Format::Yaml => output::one(format, &outcome, &[])?,
    }
    if format == Format::Table {
        let totals = outcome.totals();
        let lines = totals.iter().map(|(name, value)| format!("{name:<24}  {value}"));
        let files = ["report.html", "results.json"].map(|name| options.out.join(name));
        let files = files.iter().map(|file| file.display().to_string());
        output::text(&format!("\n{}", lines.chain(files).collect::<Vec<_>>().join("\n")));
    }
    Ok(())
}
