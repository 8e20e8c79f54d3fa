//! `perigee price`

use clap::Subcommand;
use perigee_model::Problem;
use perigee_model::money::Money;
use perigee_model::prices::{KnownPrice, KnownPrices};
use perigee_model::units::{format_duration, format_time};

use crate::context::Context;
use crate::output::{self, Column, Format};
use crate::servers::controller_client;

/// `perigee price VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Show what hosts, disks and traffic cost, as of when, and what is not known and why. Hosts that are not named cost nothing
    #[command(visible_alias = "ls")]
    List,
}

const PRICES: &[Column<KnownPrice>] = &[
    ("place", place),
    ("machine", |p| amount(p.price.per_hour_micros, "h")),
    ("at least", |p| match p.price.minimum_s {
        0 => "-".to_owned(),
        minimum_s => format_duration(minimum_s.into()),
    }),
    ("egress", |p| amount(p.price.egress_per_gib_micros, "GiB")),
    ("disk", |p| amount(p.price.disk_per_gib_month_micros, "GiB-month")),
    ("source", |p| p.price.source.clone()),
    ("as of", |p| format_time(p.price.as_of_unix_s * 1000).chars().take(10).collect()),
    ("not known", |p| p.unknown.join("; ")),
];

fn place(price: &KnownPrice) -> String {
    match (&price.site, &price.host) {
        (Some(site), _) => format!("site {site}"),
        (None, Some(host)) => format!("host {host}"),
        (None, None) => "-".to_owned(),
    }
}

fn amount(micros: Option<std::num::NonZeroU64>, unit: &str) -> String {
    let shown = |micros: std::num::NonZeroU64| {
        let money = Money::from_micros(micros.get()).exact();
        format!("{money}/{unit}")
    };
    micros.map_or_else(|| "unknown".to_owned(), shown)
}

/// Asks the controller, and prints what it knows.
pub async fn run(verb: Verb, context: &Context) -> Result<(), Problem> {
    match verb {
        Verb::List => {
            let known: KnownPrices = controller_client(context)?.get("/v1/prices").await?;
            match context.format {
                Format::Json | Format::Yaml => return output::one(context.format, &known, &[]),
                Format::Csv => return output::list(context.format, &known.prices, PRICES),
                Format::Table => {}
            }
            if known.file.is_none() && known.prices.is_empty() {
                output::note(
                    "nothing costs anything: the controller was started without --prices, and no host is rented",
                );
                return Ok(());
            }
            output::list(context.format, &known.prices, PRICES)?;
            if !known.problem.is_empty() {
                output::note(&format!("the prices are those of before: {}", known.problem));
            }
            Ok(())
        }
    }
}
