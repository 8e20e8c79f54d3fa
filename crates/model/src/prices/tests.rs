use super::*;

const FILE: &str = "\
max-age: 30d
sites:
  cloud:
    machine: $0.085/h
    minimum: 60s
    egress: $0.09/GiB
    disk: $0.08/GiB-month
    as-of: 2026-11-01
hosts:
  cloud3:
    machine: $0.34/h
    as-of: 2026-11-20
    max-age: 7d
  lonely:
    machine: $0/h
    as-of: 2026-11-20
";

fn host(name: &str) -> HostId {
    HostId::new(name).expect("a name")
}

fn site(name: &str) -> SiteId {
    SiteId::new(name).expect("a name")
}

fn on(day: &str) -> u64 {
    parse_date(day).expect("a day") + 3600
}

fn list() -> PriceList {
    PriceList::parse(FILE, "prices.yaml").expect("prices")
}

fn micros(of: Option<NonZeroU64>) -> Option<u64> {
    of.map(NonZeroU64::get)
}

#[test]
fn a_host_that_no_entry_names_costs_nothing() {
    assert_eq!(list().of(Some(&host("home1")), &site("home"), on("2026-11-21")), None);
    assert!(PriceList::default().is_empty() && !list().is_empty());
}

#[test]
fn a_site_s_price_counts_for_each_of_its_hosts_and_a_host_s_own_before_that() {
    let list = list();
    let price = list.of(Some(&host("cloud1")), &site("cloud"), on("2026-11-21")).expect("a price");
    assert_eq!(micros(price.per_hour_micros), Some(85_000));
    assert_eq!(micros(price.egress_per_gib_micros), Some(90_000));
    assert_eq!(micros(price.disk_per_gib_month_micros), Some(80_000));
    assert_eq!((price.minimum_s, price.as_of_unix_s), (60, on("2026-11-01") - 3600));
    let own = list.of(Some(&host("cloud3")), &site("cloud"), on("2026-11-21")).expect("a price");
    assert_eq!((micros(own.per_hour_micros), own.minimum_s), (Some(340_000), 60));
    assert_eq!(micros(own.egress_per_gib_micros), Some(90_000), "as its site");
}

#[test]
fn a_price_that_is_0_missing_or_too_old_is_not_known() {
    let list = list();
    let of = |name: &str, at: &str, day: &str| {
        list.of(Some(&host(name)), &site(at), on(day)).expect("an entry")
    };
    let lonely = of("lonely", "nowhere", "2026-11-21");
    assert_eq!((lonely.per_hour_micros, lonely.egress_per_gib_micros), (None, None));
    // As of the 20th, and 7 days from the end of that day on.
    assert!(of("cloud3", "cloud", "2026-11-27").per_hour_micros.is_some());
    let old = of("cloud3", "cloud", "2026-11-29");
    assert_eq!(old.per_hour_micros, None, "its site's price is another host's");
    assert!(old.egress_per_gib_micros.is_some());
    assert_eq!(of("cloud1", "cloud", "2026-12-30").per_hour_micros, None);
    assert_eq!(
        of("cloud1", "cloud", "2026-10-01").per_hour_micros,
        None,
        "a clock that was set back"
    );
}

#[test]
fn what_is_not_known_is_listed_with_its_reason() {
    let at = |host: &HostId| (host.as_str() == "cloud3").then(|| site("cloud"));
    let known = list().known(on("2026-11-29"), at);
    let why: Vec<_> = known
        .iter()
        .map(|one| {
            let place =
                one.site.as_ref().map(SiteId::as_str).or(one.host.as_ref().map(HostId::as_str));
            (place.unwrap_or_default(), one.unknown.join("; "))
        })
        .collect();
    assert_eq!(
        why,
        [
            ("cloud", String::new()),
            ("cloud3", "machine: it is 8 days old, more than 7d".to_owned()),
            (
                "lonely",
                "machine: the file says 0; egress: the file does not say it; disk: the file does not say it".to_owned()
            ),
        ]
    );
}

#[test]
fn an_error_names_line_and_field() {
    for (text, place, why) in [
        (
            "sites:\n  cloud:\n    machine: 0.085\n    as-of: 2026-11-29\n",
            "p.yaml:3: sites.cloud.machine",
            "write dollars for one h",
        ),
        (
            "sites:\n  cloud:\n    machine: $0.085/month\n    as-of: 2026-11-29\n",
            "p.yaml:3: sites.cloud.machine",
            "$0.25/h",
        ),
        (
            "sites:\n  cloud:\n    egress: -1/GiB\n    as-of: 2026-11-29\n",
            "p.yaml:3: sites.cloud.egress",
            "not an amount of money",
        ),
        (
            "sites:\n  cloud:\n    disk: $1/GiB\n    as-of: 2026-11-29\n",
            "p.yaml:3: sites.cloud.disk",
            "GiB-month",
        ),
        ("sites:\n  cloud:\n    as-of: yesterday\n", "p.yaml:3: sites.cloud.as-of", "2026-11-29"),
        ("hosts:\n  a:\n    machine: $1/h\n", "p.yaml", "as-of"),
        ("hosts:\n  a:\n    price: $1/h\n", "p.yaml:3: hosts.a.price", "no such field"),
        ("hosts:\n  A b:\n    as-of: 2026-11-29\n", "p.yaml", "not a name"),
        ("max-age: 30\n", "p.yaml:1: max-age", "30m or 30s"),
        (
            "sites:\n  a: {as-of: 2026-11-29, max-age: 1s}\n",
            "p.yaml:2: sites.a.max-age",
            "how old a price may be",
        ),
    ] {
        let problem = PriceList::parse(text, "p.yaml").expect_err(text);
        let said = format!("{}: {} {}", problem.what, problem.why, problem.next);
        assert!(said.contains(place) && said.contains(why), "{text}: {said}");
    }
}

#[test]
fn more_entries_than_the_limit_are_refused() {
    let mut text = "sites:\n".to_owned();
    (0..1001).for_each(|n| text.push_str(&format!("  s{n}: {{as-of: 2026-11-29}}\n")));
    let problem = PriceList::parse(&text, "p.yaml").expect_err("too many");
    assert!(problem.why.contains("number of entries with prices"), "{problem:?}");
}

proptest::proptest! {
    #[test]
    fn no_text_makes_the_parser_panic(text in "\\PC*", value in "[\\[\\]{}:,\"'&*!|>$/\\-? a-c0-9.\n]{0,40}") {
        let _ = PriceList::parse(&text, "p.yaml");
        let _ = PriceList::parse(&format!("sites:\n  a:\n    machine: {value}\n"), "p.yaml");
    }
}

#[test]
fn a_provider_s_price_that_is_missing_or_too_old_is_not_known() {
    const MONTH: u64 = 30 * DAY_S;
    let price = Price {
        per_hour_micros: NonZeroU64::new(85_000),
        minimum_s: 60,
        egress_per_gib_micros: None,
        disk_per_gib_month_micros: NonZeroU64::new(80_000),
        source: "ec2".to_owned(),
        as_of_unix_s: on("2026-11-01"),
    };
    let (counts, unknown) = of_provider(&price, on("2026-11-29"), MONTH);
    assert_eq!(counts, price);
    assert_eq!(unknown, ["egress: the provider does not say it"]);
    let (counts, unknown) = of_provider(&price, on("2027-01-01"), MONTH);
    let figures = [counts.per_hour_micros, counts.disk_per_gib_month_micros];
    assert_eq!((figures, counts.minimum_s), ([None, None], 60));
    assert_eq!(unknown[0], "machine: it is 61 days old, more than 30d");
    let of_offer = price.clone().as_known(on("2027-01-01"), MONTH);
    let (_, why) = of_provider(&of_offer, on("2027-01-01"), MONTH);
    assert_eq!(why, unknown, "also of an offer that says no figures any more");
    let (counts, _) = of_provider(&price, on("2026-11-29"), 7 * DAY_S);
    assert_eq!(counts.per_hour_micros, None);
    let (counts, unknown) = of_provider(&price, on("2026-10-01"), MONTH);
    assert_eq!(
        (counts.per_hour_micros, unknown[0].as_str()),
        (None, "machine: its time is not yet")
    );
}

#[test]
fn an_entry_of_a_host_or_of_its_site_is_for_the_host() {
    let covers = |of: &str, at: &str| list().covers(&host(of), &site(at));
    assert!(covers("any", "cloud") && covers("cloud3", "elsewhere") && !covers("any", "home"));
}
