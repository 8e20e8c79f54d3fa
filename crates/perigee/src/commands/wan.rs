//! `perigee lab wan`

use std::time::Duration;

use clap::Subcommand;
use perigee_lab::wan::{
    self, Change, LinkReport, Rate, format_bits, format_loss, format_rtt, parse_loss, parse_rtt,
};
use perigee_lab::{Lab, LabId, Link, Steps};
use perigee_model::{Problem, SiteId};

use crate::arguments::BaseOption;
use crate::context::Context;
use crate::output::{self, Column};

/// `perigee lab wan VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Show the settings of each link, and measure it. This takes some seconds per link and loads it
    Show {
        #[command(flatten)]
        lab: LabOption,
    },
    /// Change the link between two sites of a running lab, and measure it afterwards
    Set {
        /// A site
        #[arg(value_name = "SITE")]
        one: SiteId,
        /// Another site
        #[arg(value_name = "SITE")]
        other: SiteId,
        #[command(flatten)]
        change: ChangeOptions,
        #[command(flatten)]
        lab: LabOption,
    },
}

/// What is changed of a link; at least one of them.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = true)]
pub struct ChangeOptions {
    /// Round-trip time: 16ms, 800us, 1s
    #[arg(long, value_name = "TIME", value_parser = parse_rtt)]
    rtt: Option<u64>,
    /// Bits per second in each direction: 100Mbit, 1Gbit, unlimited
    #[arg(long)]
    rate: Option<Rate>,
    /// Share of frames that is lost in each direction: 0.1%
    #[arg(long, value_name = "SHARE", value_parser = parse_loss)]
    loss: Option<u32>,
    /// Cut the link: no frames pass
    #[arg(long, conflicts_with = "up")]
    down: bool,
    /// Let frames pass again
    #[arg(long)]
    up: bool,
}

/// The lab that is meant.
#[derive(Debug, clap::Args)]
pub struct LabOption {
    /// The lab's id [default: the only lab on this machine]
    #[arg(long, env = "PERIGEE_LAB")]
    lab: Option<LabId>,
    #[command(flatten)]
    base: BaseOption,
}

impl LabOption {
    fn open(&self) -> Result<Lab, Problem> {
        const WHAT: &str = "can't choose a lab";
        let base = &self.base.base;
        let id = match &self.lab {
            Some(id) => id.clone(),
            None => match &perigee_lab::list(base)?[..] {
                [one] => one.id.clone(),
                [] => {
                    return Err(Problem::not_found(WHAT, "no lab runs on this machine")
                        .next("start one: perigee lab up"));
                }
                many => {
                    let ids: Vec<String> = many.iter().map(|lab| lab.id.to_string()).collect();
                    let why = format!("several labs run on this machine: {}", ids.join(", "));
                    return Err(Problem::invalid(WHAT, why).next("name one with --lab ID"));
                }
            },
        };
        Lab::open(base, &id)
    }
}

const LINKS: &[Column<LinkReport>] = &[
    ("link", |r| r.link.to_string()),
    ("rtt set", |r| format_rtt(r.link.settings.rtt_us)),
    ("measured", |r| {
        let rtt = r.measured.rtt_us.map(Duration::from_micros);
        rtt.map_or_else(|| "-".to_owned(), |rtt| format!("{:.2} ms", rtt.as_secs_f64() * 1e3))
    }),
    ("rate set", |r| r.link.settings.rate.to_string()),
    ("measured", |r| rate(r.measured.rate_bits_per_s[0])),
    ("back", |r| rate(r.measured.rate_bits_per_s[1])),
    ("loss set", |r| format_loss(r.link.settings.loss_ppm)),
    ("", |r| {
        let down = r.link.settings.down.then(|| "down".to_owned());
        down.into_iter().chain(r.differences.clone()).collect::<Vec<_>>().join("; ")
    }),
];

fn rate(bits_per_s: Option<u64>) -> String {
    bits_per_s.map_or_else(|| "-".to_owned(), format_bits)
}

/// Shows or changes the links of a running lab, and measures them.
pub async fn run(verb: Verb, context: &Context, steps: &Steps) -> Result<(), Problem> {
    let (lab, links) = match verb {
        Verb::Show { lab } => {
            let lab = lab.open()?;
            let links = lab.links()?;
            (lab, links)
        }
        Verb::Set { one, other, change, lab } => {
            let lab = lab.open()?;
            let change = Change {
                rtt_us: change.rtt,
                rate: change.rate,
                loss_ppm: change.loss,
                down: (change.down || change.up).then_some(change.down),
            };
            let link = wan::set(&lab, &one, &other, change).await?;
            (lab, vec![link])
        }
    };
    let reports = measured(lab, links, steps).await?;
    output::list(context.format, &reports, LINKS)
}

async fn measured(lab: Lab, links: Vec<Link>, steps: &Steps) -> Result<Vec<LinkReport>, Problem> {
    let step = steps.begin("measure the WAN");
    let reports = tokio::task::spawn_blocking(move || wan::report(&lab, &links))
        .await
        .map_err(|e| Problem::internal("can't measure the WAN", e))??;
    step.done(&format!("{} links", reports.len()));
    Ok(reports)
}
