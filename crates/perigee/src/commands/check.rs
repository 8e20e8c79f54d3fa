//! `perigee volume check` and `perigee image check`: print the faults and set the exit code.

use std::process::ExitCode;

use perigee_model::Problem;
use perigee_model::volume::{CheckReport, CheckScope, Fault};

use crate::context::Context;
use crate::output::{self, Column, Format};
use crate::servers::{PoolOption, pool_server};

const FAULTS: &[Column<Fault>] = &[
    ("fault", |f| output::word(&f.kind)),
    ("layer", |f| output::or_dash(f.layer.as_ref())),
    ("bytes", |f| {
        f.range.map_or_else(
            || "-".to_owned(),
            |range| format!("{}+{}", range.offset, range.length_bytes),
        )
    }),
    ("used by", used_by),
    ("what", |f| f.what.clone()),
];

fn used_by(fault: &Fault) -> String {
    let unnamed = fault.users - fault.used_by.len() as u64;
    match (&fault.used_by[..], unnamed) {
        ([], _) => "-".to_owned(),
        (named, 0) => named.join(", "),
        (named, more) => format!("{} and {more} more", named.join(", ")),
    }
}

/// Exit code 0: no faults; 1: faults.
pub async fn run(
    scope: CheckScope,
    pool: PoolOption,
    context: &Context,
) -> Result<ExitCode, Problem> {
    let Some(pool) = pool.pool else {
        return Err(
            Problem::invalid("can't check", "no pool is named").next("name one with --pool DIR")
        );
    };
    let server = pool_server(&pool).await?;
    let report: CheckReport =
        output::with_progress(|tell| server.post_long("/v1/check", &scope, tell)).await?;
    match context.format {
        Format::Table => print(&report)?,
        Format::Csv => output::list(context.format, &report.faults, FAULTS)?,
        Format::Json | Format::Yaml => output::one(context.format, &report, &[])?,
    }
    Ok(if report.faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print(report: &CheckReport) -> Result<(), Problem> {
    if !report.faults.is_empty() {
        output::list(Format::Table, &report.faults, FAULTS)?;
        output::text("");
    }
    for name in &report.leftovers {
        output::text(&format!("the file {name} is not needed; the next volume server removes it"));
    }
    for layer in &report.without_checksums {
        output::text(&format!("layer {layer} has no checksums yet; a volume server computes them"));
    }
    let found = match report.faults.len() {
        0 => "sound".to_owned(),
        1 => "1 fault".to_owned(),
        faults => format!("{faults} faults"),
    };
    let compared = output::bytes(report.compared_bytes);
    output::text(&format!("{found}: {} layers, {compared} compared", report.layers));
    Ok(())
}
