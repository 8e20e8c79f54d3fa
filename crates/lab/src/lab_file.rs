//! A lab's definition as people write it.
//!
//! ```yaml
//! sites:
//!   home: [home1, home2]      # the first site has the controller
//!   cloud: [cloud1]
//!   edge: [edge1]
//! links:                      # other pairs get the values of --rtt, --rate and --loss
//!   - between: [home, cloud]
//!     rtt: 16ms
//!     rate: 1Gbit
//!     loss: 0.1%
//!   - between: [cloud, edge]
//!     down: true
//! hosts:                      # other hosts run on all CPUs of the machine
//!   home1: {cpus: [0]}
//! rent:                       # what can be rented: `rent/offers.rs`
//!   quota: 4
//! ```

use std::path::Path;

use perigee_model::limits::DOCUMENT_BYTES;
use perigee_model::yaml::{Document, Field};
use perigee_model::{HostId, Problem, SiteId};

use crate::definition::{Definition, LabId, SiteDef, find_link};
use crate::rent::read_rent;
use crate::wan::{Change, LinkSettings, parse_loss, parse_rtt};

/// # Errors
/// The file cannot be read, or a field is wrong: then the problem names the line and the field.
pub fn read(path: &Path, id: LabId, settings: LinkSettings) -> Result<Definition, Problem> {
    let name = path.display().to_string();
    let what = || format!("can't read the lab's definition {name}");
    let length = std::fs::metadata(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Problem::not_found(what(), error)
            .next("put a command to run in the lab after `--`; the experiments are `balance`, `boot-storm`, `faults` and `soak`"),
        _ => Problem::invalid(what(), error),
    })?;
    DOCUMENT_BYTES.check(length.len()).map_err(|error| error.problem(what()))?;
    let text = std::fs::read_to_string(path).map_err(|error| Problem::invalid(what(), error))?;
    parse(&text, &name, id, settings)
}

/// Fields that the file leaves out are taken from `settings`.
fn parse(text: &str, name: &str, id: LabId, settings: LinkSettings) -> Result<Definition, Problem> {
    let document = Document::parse(name, text)?;
    let root = document.root();
    let [sites, links, hosts, rent] = root.fields(["sites", "links", "hosts", "rent"])?;
    let sites = sites.ok_or_else(|| {
        root.problem("the field \"sites\" is missing")
            .next("add a line `NAME: [HOST, …]` for each site below `sites:`")
    })?;
    let mut definition = Definition::new(id, read_sites(&sites)?, settings);
    // Before the links, so that a site that is named twice is reported as such.
    definition.check().map_err(|problem| sites.problem(problem.why))?;
    for link in links.map(|links| links.list()).transpose()?.unwrap_or_default() {
        read_link(&link, &mut definition)?;
    }
    if let Some(rent) = rent {
        definition.rent = read_rent(&rent)?;
        definition.check().map_err(|problem| rent.problem(problem.why))?;
    }
    if let Some(hosts) = hosts {
        read_hosts(&hosts, &mut definition)?;
        definition.check().map_err(|problem| hosts.problem(problem.why))?;
    }
    Ok(definition)
}

fn read_hosts(field: &Field<'_>, definition: &mut Definition) -> Result<(), Problem> {
    for (name, host) in field.entries()? {
        let name = HostId::new(name).map_err(|why| host.problem(why))?;
        let [cpus] = host.fields(["cpus"])?;
        if let Some(cpus) = cpus {
            let cpus =
                cpus.list()?.iter().map(|cpu| cpu.parse(read_cpu)).collect::<Result<_, _>>()?;
            definition.cpus.insert(name, cpus);
        }
    }
    Ok(())
}

fn read_cpu(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| format!("{text:?} is not the number of a CPU; the first CPU is 0"))
}

fn read_sites(field: &Field<'_>) -> Result<Vec<SiteDef>, Problem> {
    let mut sites = Vec::new();
    for (name, hosts) in field.entries()? {
        let name = SiteId::new(name).map_err(|why| hosts.problem(why))?;
        let hosts =
            hosts.list()?.iter().map(|host| host.parse(HostId::new)).collect::<Result<_, _>>()?;
        sites.push(SiteDef { name, hosts });
    }
    Ok(sites)
}

fn read_link(field: &Field<'_>, definition: &mut Definition) -> Result<(), Problem> {
    let [between, rtt, rate, loss, down] =
        field.fields(["between", "rtt", "rate", "loss", "down"])?;
    let between = between.ok_or_else(|| {
        field.problem("the field \"between\" is missing").next("add a line `between: [SITE, SITE]`")
    })?;
    let sites: Vec<SiteId> =
        between.list()?.iter().map(|site| site.parse(SiteId::new)).collect::<Result<_, _>>()?;
    let [one, other] = &sites[..] else {
        return Err(
            between.problem(format!("it names {} sites, but a link joins two", sites.len()))
        );
    };
    let index =
        find_link(&definition.links, one, other).map_err(|problem| between.problem(problem.why))?;
    let change = Change {
        rtt_us: rtt.map(|f| f.parse(parse_rtt)).transpose()?,
        rate: rate.map(|f| f.parse(str::parse)).transpose()?,
        loss_ppm: loss.map(|f| f.parse(parse_loss)).transpose()?,
        down: down.map(|f| f.parse(read_switch)).transpose()?,
    };
    let link = &mut definition.links[index];
    link.settings = change.of(link.settings);
    Ok(())
}

fn read_switch(text: &str) -> Result<bool, String> {
    text.parse().map_err(|_| format!("{text:?} is neither true nor false"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wan::Rate;

    const SITES: &str = "sites:\n  home: [home1, home2]\n  cloud: [cloud1]\n  edge: [edge1]\n";

    fn read(text: &str) -> Result<Definition, Problem> {
        parse(text, "three.yaml", LabId::random(), LinkSettings::of_rtt_us(16_000))
    }

    #[test]
    fn sites_hosts_and_links_are_read_and_the_rest_is_as_the_options_say() {
        let links = "links:\n  - {between: [cloud, home], rtt: 40ms, rate: 1Gbit, loss: 0.1%}\n  \
                     - between: [cloud, edge]\n    down: true\n";
        let lab = read(&format!("{SITES}{links}")).expect("a lab");
        let names: Vec<&str> = lab.hosts().map(|(_, host)| host.as_str()).collect();
        assert_eq!(names, ["home1", "home2", "cloud1", "edge1"]);
        let of = LinkSettings::of_rtt_us;
        let set: Vec<LinkSettings> = lab.links.iter().map(|link| link.settings).collect();
        let expected = [
            LinkSettings { rate: Rate(Some(1_000_000_000)), loss_ppm: 1000, ..of(40_000) },
            of(16_000),
            LinkSettings { down: true, ..of(16_000) },
        ];
        assert_eq!(set, expected);
        assert_eq!(read(SITES).expect("a lab").links.len(), 3);
    }

    #[test]
    fn hosts_run_on_the_cpus_that_the_file_names() {
        let [first, ..] = crate::process::own_cpus()[..] else { panic!("this test has no CPU") };
        let lab = read(&format!("{SITES}hosts:\n  home1: {{cpus: [{first}]}}\n")).expect("a lab");
        let lists: Vec<_> = lab.hosts().map(|(_, host)| lab.cpu_list(host)).collect();
        assert_eq!(lists, [Some(first.to_string()), None, None, None]);
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line_and_field() {
        let told = |text: &str, words: &[&str]| {
            let problem = read(text).expect_err(text).to_string();
            for word in words {
                assert!(problem.contains(word), "{text:?} gives {problem:?} without {word:?}");
            }
        };
        let link = |text: &str| format!("{SITES}links:\n  - {text}\n");
        told("links: []\n", &["three.yaml", "\"sites\" is missing"]);
        told("sites: [home]\n", &["three.yaml:1", "sites"]);
        told("sites:\n  home: []\n", &["every site needs a host"]);
        told("sites:\n  home: [one]\n  cloud: [one]\n", &["host one is named twice"]);
        told("sites:\n  home: [ctl]\n", &["uses that name"]);
        told("sites:\n  HOME: [one]\n", &["three.yaml:2", "HOME"]);
        told(&link("{rtt: 16ms}"), &["three.yaml:6", "between"]);
        told(&link("{between: [home]}"), &["three.yaml:6", "a link joins two"]);
        told(&link("{between: [home, moon]}"), &["three.yaml:6", "home-cloud"]);
        told(&link("{between: [home, home]}"), &["no such link"]);
        told(&link("{between: [home, edge], rtt: 16}"), &["three.yaml:6", "links[0].rtt", "16ms"]);
        told(&link("{between: [home, edge], rate: fast}"), &["links[0].rate", "1Gbit"]);
        told(&link("{between: [home, edge], loss: 2}"), &["links[0].loss", "0.1%"]);
        told(&link("{between: [home, edge], down: maybe}"), &["links[0].down", "true"]);
        told(&link("{between: [home, edge], delay: 16ms}"), &["delay"]);
        let host = |text: &str| format!("{SITES}hosts:\n  {text}\n");
        told(&host("home1: {cpus: [4711]}"), &["three.yaml:6", "hosts", "CPU 4711; the CPUs here"]);
        told(&host("home1: {cpus: []}"), &["hosts", "home1", "without a list it has all"]);
        told(&host("home1: {cpus: [first]}"), &["hosts.home1.cpus[0]", "first CPU is 0"]);
        told(&host("moon: {cpus: [0]}"), &["moon, which no site has"]);
        told(&host("home1: {memory: 1GiB}"), &["memory"]);
        told(&format!("{SITES}rent: {{quota: 1000}}\n"), &["three.yaml:5", "rent.quota", "40"]);
    }
}
