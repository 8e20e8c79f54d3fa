//! `perigee rent`

use clap::Subcommand;
use perigee_model::auto_mode::AutoMode;
use perigee_model::money::Money;
use perigee_model::prices::per_hour;
use perigee_model::rental::states::RentalState;
use perigee_model::rental::{EndRental, Offer, ProviderOffers, RentHost, Rental, RentalStep};
use perigee_model::renting::SetRenting;
use perigee_model::units::parse_duration;
use perigee_model::{Problem, RentalId, SiteId};
use serde::Serialize;

use crate::arguments::size;
use crate::commands::{kept, renting};
use crate::context::Context;
use crate::output::{self, Column, Format};
use crate::servers::controller_client;

/// `perigee rent VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Show what the providers offer, for how much, and what they have refused lately
    Offers,
    /// Rent a host. `perigee rent list` shows what becomes of it
    Host {
        /// The provider, as `perigee rent offers` shows it
        #[arg(long)]
        provider: String,
        /// The kind of machine
        #[arg(long)]
        kind: String,
        /// Where [default: where it is cheapest]
        #[arg(long)]
        zone: Option<String>,
        /// One that the provider may take back at any time
        #[arg(long)]
        spot: bool,
        /// The site that the host belongs to [default: as the provider's newest host in the zone, else the one with the zone's name if own hosts are there, else one with the provider's name]
        #[arg(long)]
        site: Option<SiteId>,
        /// Give it back after so long, as `2h` [default: when `perigee rent end` says so]
        #[arg(long = "for", value_name = "TIME", value_parser = parse_duration)]
        for_s: Option<u64>,
        /// The provider's name of the machine image [default: the one that the controller's file of providers names]
        #[arg(long)]
        image: Option<String>,
        /// The size of its disk [default: 50 GiB]
        #[arg(long, value_name = "SIZE", value_parser = size)]
        disk: Option<u64>,
        /// Where the host reaches the controller [default: the first name or address that the controller has]
        #[arg(long, value_name = "URL")]
        controller: Option<String>,
        /// The new rental's id. A command that is repeated with it rents nothing twice
        #[arg(long)]
        id: Option<RentalId>,
    },
    /// List rented hosts, with what was predicted and is reserved for them, and what they have cost
    #[command(visible_alias = "ls")]
    List {
        /// Also those that were given back in the last month
        #[arg(long)]
        all: bool,
    },
    /// List the disks of hosts that were given back and are kept at their providers, because replicas are there
    Kept {
        /// Also those that were kept in the last month, and those that were not worth it
        #[arg(long)]
        all: bool,
    },
    /// Give a host back: what it has leaves it first
    End {
        /// The rental, as `perigee rent list` shows it
        rental: RentalId,
        /// End it at once: its VMs end with it, and what only it has is lost
        #[arg(long)]
        now: bool,
    },
    /// Show whether the cluster rents hosts by itself, or set that
    Mode {
        /// off, advise (say what would be rented, and why) or on
        mode: Option<AutoMode>,
        /// What an hour of waiting costs a job whose file says nothing of money, as `$0.10/h`; `$0/h`: nothing
        #[arg(long, value_name = "PRICE", value_parser = per_hour)]
        waiting_costs: Option<Money>,
        /// How many hosts may be rented at once, with those that people rent
        #[arg(long, value_name = "NUMBER")]
        most: Option<u32>,
    },
    /// Say which hosts the cluster rents by itself or gives back, or would, and why
    Advise,
    /// Show how far a rental is, since when and why
    Explain {
        /// The rental, as `perigee rent list` shows it
        rental: RentalId,
    },
}

/// A row of what is offered.
#[derive(Debug, Serialize)]
struct Offered {
    provider: String,
    offer: Offer,
    refused: String,
}

const OFFERS: &[Column<Offered>] = &[
    ("provider", |o| o.provider.clone()),
    ("kind", |o| o.offer.kind.clone()),
    ("zone", |o| o.offer.zone.clone()),
    ("spot", |o| yes(o.offer.spot)),
    ("cpus", |o| o.offer.cpus.to_string()),
    ("memory", |o| output::bytes(o.offer.memory_bytes)),
    ("kvm", |o| output::or_dash(o.offer.kvm.map(yes).as_ref())),
    ("an hour", |o| output::or_dash(o.offer.price.machine(3600).as_ref())),
    ("refused lately", |o| o.refused.clone()),
];

const RENTALS: &[Column<Rental>] = &[
    ("rental", |r| r.id.to_string()),
    ("provider", |r| r.provider.clone()),
    ("kind", |r| r.offer.kind.clone()),
    ("zone", |r| r.offer.zone.clone()),
    ("site", |r| r.site.to_string()),
    ("state", |r| r.state.to_string()),
    ("predicted", |r| output::or_dash(r.predicted.as_ref())),
    ("reserved", |r| r.reserved.to_string()),
    ("spent", Rental::spent_in_words),
    ("why", |r| r.why.clone()),
];

/// The further lines of one rental.
const DETAILS: &[Column<Rental>] = &[
    ("host", |r| r.host.to_string()),
    ("asked for by", |r| r.by.clone()),
    ("spot", |r| yes(r.offer.spot)),
    ("instance", |r| output::or_dash(r.instance.as_ref())),
    ("address", |r| output::or_dash(r.address.as_ref())),
    ("an hour", |r| output::or_dash(r.offer.price.machine(3600).as_ref())),
    ("left its site", left),
    ("reserved until", |r| output::or_dash(r.reserved_until_ms.map(output::time).as_ref())),
    ("given back at", |r| output::or_dash(r.until_ms.map(output::time).as_ref())),
    ("taken back at", |r| output::or_dash(r.notice_ms.map(output::time).as_ref())),
    ("ends because", |r| output::or_dash(r.ends_because.as_ref())),
    ("requests", |r| r.asks.to_string()),
    ("rented because", |r| output::or_dash(r.rented_for.as_ref().map(|of| &of.why))),
    ("for jobs", |r| output::or_dash(r.rented_for.as_ref().map(renting::jobs).as_ref())),
    ("first job at", |r| output::or_dash(r.first_job_ms.map(output::time).as_ref())),
    ("steps", |r| r.steps.iter().map(step).collect::<Vec<_>>().join("\n")),
];

/// What has left its site, and what that costs.
fn left(rental: &Rental) -> String {
    let bytes = output::bytes(rental.left_bytes);
    match rental.egress() {
        Some(egress) => format!("{bytes}, {egress}"),
        None => format!("{bytes}; the offer has no price for that"),
    }
}

fn step(step: &RentalStep) -> String {
    let why = if step.why.is_empty() { String::new() } else { format!(": {}", step.why) };
    format!("{} {}{why}", output::time(step.at_ms), step.state)
}

fn yes(is: bool) -> String {
    if is { "yes" } else { "no" }.to_owned()
}

/// Asks the controller.
pub async fn run(verb: Verb, context: &Context) -> Result<(), Problem> {
    let client = controller_client(context)?;
    match verb {
        Verb::Offers => {
            let all: Vec<ProviderOffers> = client.get("/v1/providers").await?;
            offers(context.format, &all)
        }
        Verb::Host { provider, kind, zone, spot, site, for_s, image, disk, controller, id } => {
            let ask = RentHost {
                id,
                provider,
                kind,
                zone,
                spot,
                site,
                for_s,
                image,
                disk_bytes: disk,
                controller_url: controller,
            };
            let rental: Rental = client.create("/v1/rentals", &ask).await?;
            output::one(context.format, &rental, RENTALS)
        }
        Verb::List { all } => {
            let mut rentals: Vec<Rental> = client.get("/v1/rentals").await?;
            rentals.retain(|rental| all || rental.state != RentalState::Gone);
            output::list(context.format, &rentals, RENTALS)
        }
        Verb::Kept { all } => kept::list(&client, all, context.format).await,
        Verb::End { rental, now } => {
            let path = format!("/v1/rentals/{rental}/end");
            let rental: Rental = client.post(&path, &EndRental { now }).await?;
            output::one(context.format, &rental, RENTALS)
        }
        Verb::Mode { mode, waiting_costs, most } => {
            let ask = SetRenting { mode, waiting_costs_per_hour: waiting_costs, most };
            renting::mode(&client, ask, context.format).await
        }
        Verb::Advise => renting::advise(&client, context.format).await,
        Verb::Explain { rental } => {
            let rental: Rental = client.get(&format!("/v1/rentals/{rental}")).await?;
            output::one(context.format, &rental, &[RENTALS, DETAILS].concat())
        }
    }
}

/// One row for each offer. Who does not say what it offers is named.
fn offers(format: Format, all: &[ProviderOffers]) -> Result<(), Problem> {
    let mut rows = Vec::new();
    for provider in all {
        for offer in provider.offers.iter().flatten() {
            let refused = provider.refused.iter().find(|one| {
                (&one.kind, &one.zone, one.spot) == (&offer.kind, &offer.zone, offer.spot)
            });
            let refused = refused
                .map(|one| format!("{} {}", output::time(one.at_ms), one.why))
                .unwrap_or_default();
            let (provider, offer) = (provider.provider.clone(), offer.clone());
            rows.push(Offered { provider, offer, refused });
        }
        if !provider.problem.is_empty() {
            let (name, problem) = (&provider.provider, &provider.problem);
            output::note(&format!("provider {name} does not say what it offers: {problem}"));
        }
    }
    output::list(format, &rows, OFFERS)
}
