//! `perigee rent mode` and `perigee rent advise`: whether the cluster rents hosts by itself, and what it decides.

use perigee_http::Client;
use perigee_model::Problem;
use perigee_model::renting::{RentDecision, RentedFor, Renting, SetRenting};

use crate::output::{self, Column, Format};

const MODE: &[Column<Renting>] = &[
    ("mode", |r| output::word(&r.settings.mode)),
    ("waiting costs", |r| {
        let per_hour = r.settings.waiting_costs_per_hour;
        per_hour.map_or_else(
            || "nothing, where a job's file does not say it".to_owned(),
            |per_hour| format!("{}/h, where a job's file does not say it", per_hour.exact()),
        )
    }),
    ("most", |r| format!("{} hosts at once", r.settings.most)),
    ("budget left", |r| output::or_dash(r.budget_left.as_ref())),
    ("looked", |r| output::or_dash(r.looked_ms.map(output::time).as_ref())),
];

const DECISIONS: &[Column<RentDecision>] = &[
    ("at", |d| output::time(d.at_ms)),
    ("what", |d| output::word(&d.action)),
    ("done", |d| if d.done { "yes" } else { "no" }.to_owned()),
    ("rental", |d| output::or_dash(d.rental.as_ref())),
    ("provider", |d| d.provider.clone()),
    ("kind", |d| d.kind.clone()),
    ("zone", |d| d.zone.clone()),
    ("spot", |d| if d.spot { "yes" } else { "no" }.to_owned()),
    ("saves", |d| output::or_dash(d.rented_for.as_ref().map(|of| &of.saves))),
    ("costs", |d| output::or_dash(d.rented_for.as_ref().map(|of| &of.costs))),
    ("why", |d| d.why.clone()),
];

/// The jobs that are to run at a host, the first ones by their names.
pub fn jobs(of: &RentedFor) -> String {
    let names: Vec<&str> = of.jobs.iter().map(perigee_model::JobId::as_str).collect();
    let more = (of.jobs_count as usize).saturating_sub(names.len());
    match more {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

/// Prints what an admin has said, and sets it before if something is asked for.
///
/// # Errors
/// `Invalid` for more hosts than the limit allows.
pub async fn mode(client: &Client, ask: SetRenting, format: Format) -> Result<(), Problem> {
    let shown: Renting = if ask == SetRenting::default() {
        client.get("/v1/renting").await?
    } else {
        client.put("/v1/renting", &ask).await?
    };
    output::one(format, &shown, MODE)
}

/// Prints what the last look has decided, or would do, and the last decisions.
///
/// # Errors
/// If the controller does not answer.
pub async fn advise(client: &Client, format: Format) -> Result<(), Problem> {
    let shown: Renting = client.get("/v1/renting").await?;
    if format == Format::Json || format == Format::Yaml {
        return output::one(format, &shown, MODE);
    }
    output::list(format, &shown.decisions, DECISIONS)?;
    if !shown.nothing_because.is_empty() {
        output::note(&format!("rents nothing because {}", shown.nothing_because));
    }
    for unknown in &shown.not_known {
        output::note(&format!("not known: {unknown}"));
    }
    for start in &shown.starts {
        let taken = start.taken_back_every_s.map_or_else(String::new, |every_s| {
            format!("; spot hosts are taken back every {} in the mean", seconds(every_s))
        });
        output::note(&format!(
            "{} of {} starts in {}, in 9 of 10 cases in {} at most ({} starts){taken}",
            start.kind,
            start.provider,
            seconds(start.expected_s),
            seconds(start.high_s),
            start.starts
        ));
    }
    // CSV has one heading.
    if format == Format::Table && !shown.last.is_empty() {
        output::text("the last decisions:");
        output::list(format, &shown.last, DECISIONS)?;
    }
    Ok(())
}

fn seconds(seconds: f64) -> String {
    perigee_model::units::format_seconds(seconds)
}
