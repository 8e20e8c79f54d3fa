//! Rented hosts and money; tenants and what they may use.

use perigee_model::kept::KeptDisk;
use perigee_model::money::Money;
use perigee_model::prices::KnownPrices;
use perigee_model::rental::Rental;
use perigee_model::rental::states::RentalState;
use perigee_model::renting::Renting;
use perigee_model::tenant::Tenant;
use perigee_model::units::format_bytes;

use crate::parts::{Bar, Cell, Page, Section, Tone};
use crate::words::{DASH, ago, bytes, or_dash, page_of, short, thing, time, trouble_or_fine, word};

/// So many rentals are listed, the newest ones.
const RENTALS: usize = 200;

/// Rented hosts, what they cost, and what the cluster would rent.
pub fn rentals(
    all: &[Rental],
    kept: &[KeptDisk],
    renting: &Renting,
    prices: &KnownPrices,
    now_ms: u64,
) -> Page {
    let mut newest: Vec<&Rental> = all.iter().collect();
    newest.sort_by_key(|rental| (rental.state.is_over(), std::cmp::Reverse(rental.begun_ms())));
    let rows = newest.iter().take(RENTALS).map(|rental| rental_row(rental, now_ms)).collect();
    let heads =
        ["rental", "state", "host", "kind", "provider", "#reserved", "#spent", "until", "why"];
    let mut list = Section::new("rentals", "Rented hosts", "perigee rent list").table(
        &heads,
        rows,
        "No host is rented.",
    );
    if all.len() > RENTALS {
        list.texts.push(format!("The newest {RENTALS} of {} are shown.", all.len()));
    }
    let mut sections = vec![list, by_itself(renting, now_ms)];
    if !kept.is_empty() {
        sections.push(kept_disks(kept, now_ms));
    }
    sections.push(of_prices(prices));
    Page::new("Rented hosts and money", "perigee rent list", sections)
}

fn rental_tone(rental: &Rental) -> Tone {
    match rental.state {
        RentalState::Joined => Tone::Good,
        RentalState::Gone => Tone::Muted,
        _ if !rental.why.is_empty() => Tone::Warn,
        _ => Tone::Plain,
    }
}

fn rental_row(rental: &Rental, now_ms: u64) -> Vec<Cell> {
    let offer = &rental.offer;
    let spot = if offer.spot { ", spot" } else { "" };
    let until = rental.until_ms.map_or_else(|| "somebody says so".to_owned(), time);
    vec![
        thing("rentals", &rental.id),
        Cell::status(word(&rental.state), rental_tone(rental)).note(ago(rental.begun_ms(), now_ms)),
        thing("hosts", &rental.host).note(rental.site.to_string()),
        Cell::text(short(&offer.kind)).note(format!("{}{spot}", short(&offer.zone))),
        Cell::text(short(&rental.provider)),
        Cell::number(rental.reserved),
        Cell::number(rental.spent_in_words()),
        Cell::text(until),
        Cell::text(short(&rental.why)),
    ]
}

/// A rented host's page.
pub fn rental(rental: &Rental, now_ms: u64) -> Page {
    let id = &rental.id;
    let offer = &rental.offer;
    let at = |at_ms: Option<u64>| {
        at_ms.map_or_else(String::new, |ms| format!("{} ({})", ago(ms, now_ms), time(ms)))
    };
    let state = Section::new("state", "Where it stands", "").facts(vec![
        ("state", Cell::status(word(&rental.state), rental_tone(rental))),
        ("why", Cell::text(&rental.why)),
        ("is to end because", Cell::text(rental.ends_because.clone().unwrap_or_default())),
        (
            "refused",
            Cell::text(
                rental.refused.as_ref().map(|refused| refused.why.clone()).unwrap_or_default(),
            ),
        ),
        ("host", thing("hosts", &rental.host)),
        ("site", Cell::text(&rental.site)),
        ("provider", Cell::text(&rental.provider)),
        (
            "kind",
            Cell::text(&offer.kind).note(format!(
                "{} vCPUs, {}",
                offer.cpus,
                format_bytes(offer.memory_bytes)
            )),
        ),
        ("zone", Cell::text(&offer.zone)),
        ("spot", Cell::text(if offer.spot { "yes" } else { "no" })),
        ("instance", Cell::text(rental.instance.clone().unwrap_or_default())),
        ("rented by", Cell::text(&rental.by)),
        (
            "rented for",
            Cell::text(
                rental.rented_for.as_ref().map(|rented| rented.why.clone()).unwrap_or_default(),
            ),
        ),
        ("given back", Cell::text(at(rental.until_ms))),
        ("taken back", Cell::text(at(rental.notice_ms))),
        ("joined", Cell::text(at(rental.joined_ms))),
        (
            "predicted to cost",
            Cell::text(rental.predicted.map(|range| range.to_string()).unwrap_or_default()),
        ),
        ("reserved", Cell::text(rental.reserved)),
        ("spent", Cell::text(rental.spent_in_words())),
        ("has left its site", Cell::text(format_bytes(rental.left_bytes))),
    ]);
    let rows = rental.steps.iter().rev().map(|step| {
        vec![
            Cell::text(word(&step.state)),
            Cell::text(time(step.at_ms)),
            Cell::text(short(&step.why)),
        ]
    });
    let steps = Section::new("steps", "What became of it", "").table(
        &["state", "since", "why"],
        rows.collect(),
        "",
    );
    Page::new(format!("Rental {id}"), "perigee rent list", vec![state, steps])
}

fn by_itself(renting: &Renting, now_ms: u64) -> Section {
    let settings = &renting.settings;
    let looked = renting.looked_ms.map_or_else(|| "not yet".to_owned(), |ms| ago(ms, now_ms));
    let rows = renting.decisions.iter().map(|one| {
        vec![
            Cell::text(word(&one.action)).note(if one.done { "done" } else { "would be done" }),
            Cell::text(short(&one.kind)).note(short(&one.zone)),
            Cell::text(short(&one.provider)),
            Cell::text(short(&one.why)),
        ]
    });
    let section =
        Section::new("renting", "What the cluster rents by itself", "perigee rent advise");
    section
        .facts(vec![
            ("mode", Cell::text(word(&settings.mode))),
            ("at most", Cell::text(settings.most).note("hosts at once")),
            (
                "an hour of waiting costs",
                Cell::text(or_dash(settings.waiting_costs_per_hour.as_ref().map(Money::to_string))),
            ),
            ("left of the budget", Cell::text(or_dash(renting.budget_left))),
            ("last look", Cell::text(looked)),
            ("nothing is rented because", Cell::text(&renting.nothing_because)),
            ("not known", Cell::text(renting.not_known.join("; "))),
        ])
        .table(
            &["decision", "kind", "provider", "why"],
            rows.collect(),
            "The last look has decided nothing.",
        )
}

fn kept_disks(all: &[KeptDisk], now_ms: u64) -> Section {
    let rows = all.iter().map(|one| {
        let volumes = one.volumes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        vec![
            thing("rentals", &one.id),
            Cell::text(word(&one.state)).note(ago(one.wanted_ms, now_ms)),
            Cell::text(short(&volumes)),
            bytes(one.disk_bytes),
            Cell::number(or_dash(one.spent)),
            Cell::text(short(&one.why)),
        ]
    });
    let heads = ["disk of", "state", "replicas of", "#size", "#spent", "why"];
    Section::new("kept", "Disks that are kept", "perigee rent kept").table(
        &heads,
        rows.collect(),
        "",
    )
}

fn of_prices(prices: &KnownPrices) -> Section {
    let rows = prices.prices.iter().map(|one| {
        let place = one
            .host
            .as_ref()
            .map(ToString::to_string)
            .or(one.site.as_ref().map(ToString::to_string));
        let money = |micros: Option<std::num::NonZeroU64>| {
            Cell::number(or_dash(micros.map(|micros| Money::from_micros(micros.get()).exact())))
        };
        vec![
            Cell::text(place.unwrap_or_else(|| DASH.to_owned())),
            money(one.price.per_hour_micros),
            money(one.price.disk_per_gib_month_micros),
            money(one.price.egress_per_gib_micros),
            Cell::text(short(&one.price.source)),
            trouble_or_fine(&one.unknown.join("; ")),
        ]
    });
    let heads = [
        "host or site",
        "#an hour",
        "#disk, GiB a month",
        "#leaves the site, GiB",
        "who says so",
        "not known",
    ];
    let empty = "No host has a price: nothing costs anything.";
    let mut section =
        Section::new("prices", "Prices", "perigee price list").table(&heads, rows.collect(), empty);
    if !prices.problem.is_empty() {
        section.texts.push(format!("The file of prices can't be used: {}", prices.problem));
    }
    section
}

/// Tenants, with what they may use and what they use.
pub fn tenants<'a>(all: impl Iterator<Item = &'a Tenant>) -> Section {
    let heads = [
        "tenant",
        "#users",
        "#VMs",
        "#vCPUs",
        "#memory",
        "#volumes",
        "#files",
        "#backups",
        "#money this month",
    ];
    let rows = all.map(|tenant| {
        let mut row = vec![
            Cell::link(&tenant.name, page_of("tenants", &tenant.name)),
            Cell::number(tenant.users),
        ];
        row.extend(shares(tenant).into_iter().map(|(_, cell)| cell));
        row
    });
    let section = Section::new("tenants", "Tenants", "perigee tenant list");
    section.table(&heads, rows.collect(), "There is none.")
}

/// What is used of each quota.
fn shares(tenant: &Tenant) -> Vec<(&'static str, Cell)> {
    let (quota, running) = (&tenant.quota, &tenant.running);
    let share = |used: u64, most: Option<u64>, say: fn(u64) -> String| {
        let Some(most) = most else { return Cell::number(say(used)).note("no limit") };
        let bar = Bar::of(None, Some(used as f64), most as f64);
        Cell::number(format!("{} of {}", say(used), say(most))).bar(bar)
    };
    let plain: fn(u64) -> String = |number| number.to_string();
    let money: fn(u64) -> String = |micros| Money::from_micros(micros).to_string();
    vec![
        ("VMs", share(u64::from(running.vms), quota.vms.map(u64::from), plain)),
        ("vCPUs", share(u64::from(running.cpus), quota.cpus.map(u64::from), plain)),
        ("memory", share(running.memory_bytes, quota.memory_bytes, format_bytes)),
        ("volumes", share(tenant.volume_bytes, quota.volume_bytes, format_bytes)),
        ("files", share(tenant.file_bytes, quota.file_bytes, format_bytes)),
        ("backups", share(tenant.backup_bytes, quota.backup_bytes, format_bytes)),
        (
            "money this month",
            share(
                tenant.spending.taken().micros,
                quota.budget_month.map(|most| most.micros),
                money,
            ),
        ),
    ]
}

/// A tenant's page.
pub fn tenant(tenant: &Tenant) -> Page {
    let name = &tenant.name;
    let mut facts = shares(tenant);
    facts.push(("number of files", Cell::text(tenant.files)));
    facts.push(("users", Cell::text(tenant.users)));
    facts.push(("spent this month", Cell::text(tenant.spending.spent)));
    facts.push(("reserved", Cell::text(tenant.spending.reserved)));
    let section = Section::new("quota", "What it uses of what it may use", "").facts(facts);
    Page::new(format!("Tenant {name}"), format!("perigee tenant info {name}"), vec![section])
}
