//! `perigee site balance`, `perigee cluster` and `perigee vm explain`: which VMs would lose less at another host, and whether they go there by themselves.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use perigee_http::Client;
use perigee_model::auto_mode::AutoMode;
use perigee_model::balance::{
    BalanceTarget, MoveTrial, Moved, SetBalance, SiteBalance, VmBalance, VmMeasured, VmStanding,
};
use perigee_model::units::format_seconds;
use perigee_model::{HostId, Problem, SiteId, VmId};

use crate::commands::asking::{self, INTERRUPTED, Said};
use crate::context::Context;
use crate::output::{self, Column, Format};
use crate::servers::controller_client;

const LOOK_EVERY: Duration = Duration::from_secs(1);

/// `perigee cluster VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Say which VMs would lose less at another host, and why they stay or move
    Advise,
    /// Say that again whenever it changes, until Ctrl-C
    Watch,
}

const ADVICE: &[Column<VmBalance>] = &[
    ("vm", |vm| vm.vm.to_string()),
    ("host", |vm| vm.host.to_string()),
    ("to", |vm| vm.to.to_string()),
    ("saves", |vm| output::seconds(Some(vm.saved_s))),
    ("needs", |vm| output::seconds(Some(vm.needed_s))),
    ("why", |vm| vm.reason.clone()),
];

const MODE: &[Column<SiteBalance>] = &[
    ("site", |s| s.site.to_string()),
    ("balance", |s| output::word(&s.mode)),
    ("looked", |s| s.looked_ms.map_or_else(|| "-".to_owned(), output::time)),
];

/// Prints the mode of a site, or sets it.
///
/// # Errors
/// `NotFound` for a site without a host.
pub async fn mode(site: SiteId, mode: Option<AutoMode>, context: &Context) -> Result<(), Problem> {
    let client = controller_client(context)?;
    let shown: SiteBalance = match mode {
        Some(mode) => {
            client.put(&format!("/v1/sites/{site}/balance"), &SetBalance { mode }).await?
        }
        None => {
            let sites: Vec<SiteBalance> = client.get("/v1/balance").await?;
            let known = sites.into_iter().find(|known| known.site == site);
            known.ok_or_else(|| unknown_site(&site))?
        }
    };
    output::one(context.format, &shown, MODE)
}

const STANDING: &[Column<VmStanding>] = &[
    ("vm", |vm| vm.vm.to_string()),
    ("host", |vm| output::or_dash(vm.host.as_ref())),
    ("next", |vm| vm.next.clone()),
    ("move", |vm| if vm.may_migrate { "auto" } else { "never" }.to_owned()),
    ("site", |vm| output::or_dash(vm.site.as_ref())),
    ("balance", |vm| vm.mode.as_ref().map_or_else(|| "-".to_owned(), output::word)),
    ("looked", |vm| vm.looked_ms.map_or_else(|| "-".to_owned(), output::time)),
    ("measured", |vm| vm.figures.measured.as_ref().map_or_else(|| "-".to_owned(), measured)),
    ("surcharge", surcharge),
    ("other hosts", |vm| vm.figures.targets.iter().map(target).collect::<Vec<_>>().join("\n")),
    ("moves", |vm| vm.moves.iter().map(moved).collect::<Vec<_>>().join("\n")),
    ("judged", |vm| {
        let trials = [&vm.figures.on_trial, &vm.figures.judged];
        trials.into_iter().flatten().map(trial).collect::<Vec<_>>().join("\n")
    }),
];

fn cpus(cpus: Option<f64>) -> String {
    cpus.map_or_else(|| "not known".to_owned(), |cpus| format!("{cpus:.2}"))
}

fn measured(of: &VmMeasured) -> String {
    let mut lines = vec![
        format!("{} CPUs used, {} wanted and not got", cpus(of.used_cpus), cpus(of.waited_cpus)),
        format!(
            "its host has {} CPUs, of which {} are wanted; {} other VMs are there",
            of.host_cpus,
            cpus(of.host_wanted_cpus),
            of.neighbours
        ),
    ];
    if let Some(stalled) = of.host_memory_stalled.filter(|stalled| *stalled > 0.0) {
        let stalled = output::percent(Some(stalled));
        lines.push(format!("its host is short of memory {stalled} of the time"));
    }
    if !of.data_at.is_empty() {
        let hosts = of.data_at.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let lost = output::percent(of.data_lost);
        lines.push(format!("its data are at {hosts}: {lost} of its time is lost to the network"));
    }
    lines.join("\n")
}

fn surcharge(vm: &VmStanding) -> String {
    let factor = vm.figures.price_factor;
    if factor < 1.05 {
        return "none".to_owned();
    }
    format!("after its last moves the next must save {factor:.1} times its cost")
}

fn target(of: &BalanceTarget) -> String {
    let BalanceTarget { host, saved_s, for_s, price_s, needed_s, why_not } = of;
    let mut line = format!("{host}: {} saved", format_seconds(*saved_s));
    if *for_s > 0.0 {
        line.push_str(&format!(" in {}", format_seconds(*for_s)));
    }
    if let Some((price_s, needed_s)) = price_s.zip(*needed_s) {
        let (price, needed) = (format_seconds(price_s), format_seconds(needed_s));
        line.push_str(&format!(", a move costs {price} and must save {needed}"));
    }
    if !why_not.is_empty() {
        line.push_str(&format!("; not possible: {why_not}"));
    }
    line
}

fn moved(of: &Moved) -> String {
    let Moved { at_ms, from, to, state, reason } = of;
    format!("{} {from} → {to} {}: {reason}", output::time(*at_ms), output::word(state))
}

fn trial(of: &MoveTrial) -> String {
    let (gained, price) = (format_seconds(of.gained_s), format_seconds(of.price_s));
    let when = if of.left_s > 0.0 {
        format!("so far, judged for {} more", format_seconds(of.left_s))
    } else {
        "in the end".to_owned()
    };
    format!("the move away from {} cost {price} and has saved {gained} {when}", of.from)
}

/// Prints where a VM stands.
///
/// # Errors
/// `NotFound`.
pub async fn explain(client: &Client, vm: &VmId, format: Format) -> Result<(), Problem> {
    let standing: VmStanding = client.get(&format!("/v1/vms/{vm}/balance")).await?;
    output::one(format, &standing, STANDING)
}

/// The problem of a site that has no host.
pub fn unknown_site(site: &SiteId) -> Problem {
    Problem::not_found(format!("site {site}"), "no host is there")
        .next("`perigee site list` shows the sites")
}

/// Prints what the controller's last look at the loads has shown.
pub async fn run(verb: Verb, context: &Context) -> Result<ExitCode, Problem> {
    let client = controller_client(context)?;
    match verb {
        Verb::Advise => {
            let sites: Vec<SiteBalance> = client.get("/v1/balance").await?;
            let vms: Vec<VmBalance> = sites.iter().flat_map(|site| site.vms.clone()).collect();
            output::list(context.format, &vms, ADVICE)?;
            for line in sites.iter().flat_map(remarks) {
                output::note(&line);
            }
            Ok(ExitCode::SUCCESS)
        }
        Verb::Watch => {
            let mut said = Told::default();
            let goes_on = "the controller goes on looking";
            let watching = async {
                loop {
                    let sites: Vec<SiteBalance> =
                        asking::get(&client, "/v1/balance", goes_on).await?;
                    said.new_lines(&sites).iter().for_each(|line| output::text(line));
                    tokio::time::sleep(LOOK_EVERY).await;
                }
            };
            tokio::select! {
                ended = watching => ended,
                _ = tokio::signal::ctrl_c() => Ok(ExitCode::from(INTERRUPTED)),
            }
        }
    }
}

/// What else is to be said of a site.
fn remarks(site: &SiteBalance) -> Vec<String> {
    let SiteBalance { site, mode, looked_ms, vms, not_known } = site;
    let mut remarks: Vec<String> = not_known
        .iter()
        .map(|one| format!("the load of host {} is not known: {}", one.host, one.why))
        .collect();
    let would_move = vms.iter().any(|vm| vm.moves);
    match (mode, looked_ms) {
        (AutoMode::Off, _) => remarks
            .push(format!("site {site} is not looked at: perigee site balance {site} advise")),
        (_, None) => remarks.push(format!("site {site} has not been looked at yet")),
        (AutoMode::Advise, Some(_)) if would_move => {
            remarks.push(format!("nothing moves by itself: perigee site balance {site} on"));
        }
        (_, Some(_)) => {}
    }
    remarks
}

/// What was said last of each VM and of each site.
#[derive(Default)]
struct Told {
    vms: BTreeMap<VmId, (Said, Option<(HostId, bool)>)>,
    sites: BTreeMap<SiteId, Said>,
}

impl Told {
    fn new_lines(&mut self, sites: &[SiteBalance]) -> Vec<String> {
        let mut lines = Vec::new();
        for site in sites {
            let at = site.looked_ms.map(|ms| format!("{}  ", output::time(ms))).unwrap_or_default();
            for vm in &site.vms {
                let (said, last) = self.vms.entry(vm.vm.clone()).or_default();
                let now = Some((vm.to.clone(), vm.moves));
                let is_other = *last != now;
                *last = now;
                if said.is_news(&vm.reason) || is_other {
                    lines.push(format!("{at}{} {}", vm.vm, vm.reason));
                }
            }
            let remarks = remarks(site).join("; ");
            if self.sites.entry(site.site.clone()).or_default().is_news(&remarks)
                && !remarks.is_empty()
            {
                lines.push(format!("{at}{remarks}"));
            }
        }
        let listed: Vec<&VmId> = sites.iter().flat_map(|site| &site.vms).map(|vm| &vm.vm).collect();
        self.vms.retain(|vm, _| listed.contains(&vm));
        lines
    }
}

#[cfg(test)]
mod tests {
    use perigee_model::balance::LoadNotKnown;

    use super::*;

    fn site(mode: AutoMode, moves: bool, reason: &str) -> SiteBalance {
        let host = |name: &str| HostId::new(name).expect("a name");
        SiteBalance {
            site: SiteId::new("home").expect("a name"),
            mode,
            looked_ms: Some(0),
            vms: vec![VmBalance {
                vm: VmId::new("web").expect("a name"),
                host: host("home1"),
                to: host("home2"),
                moves,
                saved_s: 1.0,
                needed_s: 2.0,
                reason: reason.to_owned(),
            }],
            not_known: vec![LoadNotKnown { host: host("home3"), why: "it is away".to_owned() }],
        }
    }

    #[test]
    fn what_only_has_other_figures_is_not_said_again() {
        let mut told = Told::default();
        let lines = |told: &mut Told, moves, reason| {
            told.new_lines(&[site(AutoMode::Advise, moves, reason)]).len()
        };
        assert_eq!(lines(&mut told, false, "stays at home1: saved 3 s"), 2);
        assert_eq!(lines(&mut told, false, "stays at home1: saved 4 s"), 0);
        assert_eq!(
            lines(&mut told, true, "moves home1: saved 9 s"),
            2,
            "and how it is switched on"
        );
    }

    #[test]
    fn advice_names_hosts_whose_load_is_not_known_and_how_it_is_followed() {
        let said = remarks(&site(AutoMode::Advise, true, "moves")).join("\n");
        assert!(said.contains("home3 is not known: it is away"), "{said}");
        assert!(said.contains("perigee site balance home on"), "{said}");
        let on = remarks(&site(AutoMode::On, true, "moves"));
        assert_eq!(on.len(), 1, "{on:?}");
    }
}
