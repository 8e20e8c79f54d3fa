//! `providers.yaml`: who has machines for rent, by the names that users know the providers by.
//! `docs/providers.md` has an example with all fields, which the tests read.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use perigee_model::kept::SnapshotPrice;
use perigee_model::money::{Money, PRICE_AGE_S_DEFAULT};
use perigee_model::prices::read_price_age;
use perigee_model::units::{parse_date, parse_duration};
use perigee_model::yaml::{Document, Field};
use perigee_model::{Problem, SiteId};

use crate::credentials::Source;
use crate::ec2::{Ec2, Settings};
use crate::program::{Program, TIMEOUT};
use crate::provider::Provider;

const NAME: &str = "providers.yaml";
/// Providers in a file.
const PROVIDERS_MAX: usize = 32;
/// Kinds of a provider: EC2 takes at most 200 values in a filter.
const KINDS_MAX: usize = 100;
/// Seconds that one call of a program may take.
const TIMEOUT_S: std::ops::RangeInclusive<u64> = 1..=3600;

/// Why `providers.yaml` can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadProviders(pub Problem);

/// The providers that the text of a `providers.yaml` has, in the order of their names. Asks no provider, and reads no other file.
///
/// # Errors
/// If the text is no such file; the error names line and field.
pub fn providers(file: &str) -> Result<Vec<Arc<dyn Provider>>, BadProviders> {
    read(file).map_err(BadProviders)
}

fn read(text: &str) -> Result<Vec<Arc<dyn Provider>>, Problem> {
    let document = Document::parse(NAME, text)?;
    let root = document.root();
    let mut entries = if root.is_null() { Vec::new() } else { root.entries()? };
    if entries.len() > PROVIDERS_MAX {
        let count = entries.len();
        return Err(
            root.problem(format!("{count} providers; at most {PROVIDERS_MAX} are possible"))
        );
    }
    entries.sort_by_key(|(name, _)| *name);
    entries.iter().map(|(name, field)| provider(name, field)).collect()
}

fn provider(name: &str, field: &Field<'_>) -> Result<Arc<dyn Provider>, Problem> {
    // A site of its hosts may have the same name.
    SiteId::new(name).map_err(|why| field.problem(why))?;
    let [ec2, program, environment, timeout, max_age, snapshots] =
        field.fields(["ec2", "program", "environment", "timeout", "max-age", "snapshots"])?;
    let max_age_s = max_age.as_ref().map_or(Ok(PRICE_AGE_S_DEFAULT), read_price_age)?;
    let snapshots = snapshots
        .as_ref()
        .map_or(Ok(SnapshotPrice::default()), |field| snapshot_price(field, max_age_s))?;
    match (ec2, program) {
        (Some(ec2), None) => match environment.or(timeout) {
            Some(other) => Err(other.problem("only a program has this field")),
            None => {
                let settings =
                    Settings { price_age_max_s: max_age_s, snapshots, ..settings(&ec2)? };
                let made = Ec2::new(name, settings).map_err(|why| ec2.problem(why))?;
                Ok(Arc::new(made))
            }
        },
        (None, Some(program)) => {
            let command = texts(&program)?;
            if !command.first().is_some_and(|file| file.starts_with('/')) {
                return Err(
                    program.problem("the program's file is wanted first, as in [/usr/lib/…]")
                );
            }
            let timeout = timeout.as_ref().map_or(Ok(TIMEOUT), read_timeout)?;
            let environment = environment.as_ref().map_or(Ok(Vec::new()), texts)?;
            let (name, price_age_max_s) = (name.to_owned(), max_age_s);
            Ok(Arc::new(Program {
                name,
                command,
                environment,
                timeout,
                price_age_max_s,
                snapshots,
            }))
        }
        _ => Err(field.problem("a provider has one of the fields `ec2` and `program`")),
    }
}

fn read_timeout(field: &Field<'_>) -> Result<Duration, Problem> {
    let seconds = field.parse(parse_duration)?;
    if !TIMEOUT_S.contains(&seconds) {
        return Err(field.problem("a call may take 1 s to 1 h"));
    }
    Ok(Duration::from_secs(seconds))
}

fn settings(ec2: &Field<'_>) -> Result<Settings, Problem> {
    let [
        region,
        kinds,
        prices,
        egress,
        disk,
        as_of,
        image,
        zones,
        subnets,
        groups,
        keys,
        root_device,
        endpoint,
    ] = ec2.fields([
        "region",
        "kinds",
        "prices",
        "egress",
        "disk",
        "as-of",
        "image",
        "zones",
        "subnets",
        "security-groups",
        "credentials",
        "root-device",
        "endpoint",
    ])?;
    let region = region.ok_or_else(|| ec2.problem("the field `region` is missing"))?;
    let kinds = kinds.ok_or_else(|| ec2.problem("the field `kinds` is missing"))?;
    let text = |field: Option<&Field<'_>>| field.map(|f| f.text().map(str::to_owned)).transpose();
    let mut read = Settings::new(region.parse(word)?);
    read.kinds = texts(&kinds)?;
    if !(1..=KINDS_MAX).contains(&read.kinds.len()) {
        return Err(kinds.problem(format!("1 to {KINDS_MAX} kinds are wanted")));
    }
    if let Some(prices) = &prices {
        read.prices = hourly(prices, &read.kinds)?;
    }
    read.egress_per_gib_micros = egress.as_ref().map_or(Ok(None), |f| price(f, "/GiB"))?;
    read.disk_per_gib_month_micros = disk.as_ref().map_or(Ok(None), |f| price(f, "/GiB-month"))?;
    read.as_of_unix_s = match (&as_of, prices.or(egress).or(disk)) {
        (Some(field), _) => field.parse(parse_date)?,
        (None, Some(priced)) => {
            return Err(priced.problem("`as-of` is missing: nobody knows how old the price is"));
        }
        (None, None) => 0,
    };
    read.image = text(image.as_ref())?;
    read.zones = zones.as_ref().map_or(Ok(BTreeSet::new()), |zones| {
        Ok::<_, Problem>(texts(zones)?.into_iter().collect())
    })?;
    if let Some(subnets) = &subnets {
        let entries = subnets.entries()?.into_iter();
        let entries =
            entries.map(|(zone, subnet)| Ok((zone.to_owned(), subnet.text()?.to_owned())));
        read.subnets = entries.collect::<Result<_, Problem>>()?;
    }
    read.security_groups = groups.as_ref().map_or(Ok(Vec::new()), texts)?;
    read.credentials = match text(keys.as_ref())? {
        Some(file) => Source::File(PathBuf::from(file)),
        None => Source::Environment,
    };
    read.root_device = text(root_device.as_ref())?;
    read.endpoint = text(endpoint.as_ref())?;
    Ok(read)
}

/// The price of an hour of each kind. One that is 0 is not known.
fn hourly(prices: &Field<'_>, kinds: &[String]) -> Result<BTreeMap<String, NonZeroU64>, Problem> {
    let mut read = BTreeMap::new();
    for (kind, field) in prices.entries()? {
        if !kinds.iter().any(|known| known == kind) {
            return Err(field.problem("`kinds` does not have this kind"));
        }
        if let Some(price) = price(&field, "/h")? {
            read.insert(kind.to_owned(), price);
        }
    }
    Ok(read)
}

/// A price with its unit, in millionths of a dollar.
fn price(field: &Field<'_>, unit: &str) -> Result<Option<NonZeroU64>, Problem> {
    let text = field.text()?;
    let amount = text.trim().strip_suffix(unit).ok_or_else(|| {
        field.problem(format!("a price with its unit is wanted, as in $0.42{unit}"))
    })?;
    let amount = amount.parse::<Money>().map_err(|why| field.problem(why))?;
    Ok(NonZeroU64::new(amount.micros))
}

/// What a snapshot costs. Without the field none is made.
fn snapshot_price(field: &Field<'_>, age_max_s: u64) -> Result<SnapshotPrice, Problem> {
    let [said, as_of] = field.fields(["price", "as-of"])?;
    let said = said.ok_or_else(|| field.problem("the field `price` is missing"))?;
    let as_of = as_of
        .ok_or_else(|| field.problem("`as-of` is missing: nobody knows how old the price is"))?;
    Ok(SnapshotPrice {
        per_gib_month_micros: price(&said, "/GiB-month")?,
        as_of_unix_s: as_of.parse(parse_date)?,
        age_max_s,
    })
}

/// A part of a host's name.
fn word(text: &str) -> Result<&str, &'static str> {
    let is_word = text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    if is_word && (1..=40).contains(&text.len()) {
        Ok(text)
    } else {
        Err("a region is wanted, as in eu-central-1")
    }
}

fn texts(field: &Field<'_>) -> Result<Vec<String>, Problem> {
    field.list()?.iter().map(|item| Ok(item.text()?.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example that users read.
    fn example() -> String {
        let page = include_str!("../../../docs/providers.md");
        let (_, example) = page.split_once("```yaml\n").expect("an example");
        example.split_once("```").expect("its end").0.to_owned()
    }

    fn ec2_of(text: &str) -> Result<Settings, Problem> {
        let document = Document::parse(NAME, text)?;
        let [amazon, _] = document.root().fields(["amazon", "hetzner"])?;
        let [ec2, ..] = amazon.expect("it is there").fields(["ec2", "max-age", "snapshots"])?;
        settings(&ec2.expect("it is there"))
    }

    #[test]
    fn the_example_is_read() {
        let all = providers(&example()).expect("providers");
        assert_eq!(all.iter().map(|one| one.name()).collect::<Vec<_>>(), ["amazon", "hetzner"]);
        let ages: Vec<_> = all.iter().map(|one| one.price_age_max_s() / 86_400).collect();
        assert_eq!(ages, [90, 30]);
        let price = all[0].snapshots().expect("a price").price();
        assert_eq!(price.per_gib_month_micros.map(u64::from), Some(54_000));
        assert_eq!(price.age_max_s, 90 * 86_400);
        let none = all[1].snapshots().expect("a program").price();
        assert_eq!(none.per_gib_month_micros, None);
        let ec2 = ec2_of(&example()).expect("settings");
        assert_eq!(ec2.prices["c8i.2xlarge"].get(), 420_000);
        assert_eq!(ec2.egress_per_gib_micros.map(u64::from), Some(90_000));
        assert_eq!(ec2.disk_per_gib_month_micros.map(u64::from), Some(95_200));
        assert_eq!(ec2.as_of_unix_s, 1_795_910_400);
        assert_eq!(ec2.credentials, Source::File("/etc/perigee/controller-aws".into()));
        for empty in ["", "{}"] {
            assert!(providers(empty).expect("none").is_empty());
        }
    }

    #[test]
    fn a_price_of_0_is_not_known() {
        let free = example().replace("$0.42/h", "$0/h").replace("$0.09/GiB", "0.0/GiB");
        let ec2 = ec2_of(&free).expect("settings");
        assert!(ec2.prices.is_empty() && ec2.egress_per_gib_micros.is_none());
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (from, to, why) in [
            ("region: eu-central-1", "region: evil.example/x", "region"),
            ("    region: eu-central-1\n", "", "`region` is missing"),
            ("as-of: 2026-11-29", "as-of: 2026-02-30", "as-of"),
            ("    as-of: 2026-11-29", "    #", "how old"),
            ("$0.42/h", "$0.42", "$0.42/h"),
            ("{c8i.2xlarge: $0.42/h}", "{c8i.large: $0.42/h}", "c8i.large"),
            ("kinds: [c8i.2xlarge, m5.metal]", "kinds: []", "1 to 100"),
            ("timeout: 2m", "timeout: 2h", "1 h"),
            ("$0.054/GiB-month, as-of: 2026-11-29", "$0.054/GiB-month", "how old"),
            ("$0.054/GiB-month", "$0.054/GiB", "/GiB-month"),
            ("max-age: 90d", "max-age: 1m", "how old a price may be"),
            ("timeout: 2m", "ec2: {region: a, kinds: [b]}", "one of the fields"),
            ("[/usr/lib/perigee/providers/libcloud,", "[libcloud,", "/usr/lib"),
            ("hetzner:", "Hetz_!:", "not a name"),
            ("    image:", "    color:", "no such field"),
            ("https://ec2.example.com", "ftp://ec2.example.com", "https://HOST"),
        ] {
            let text = example();
            assert!(text.contains(from), "{from}");
            let error = providers(&text.replace(from, to)).err().expect(to).to_string();
            assert!(error.starts_with("providers.yaml:") && error.contains(why), "{to}: {error}");
        }
    }
}
