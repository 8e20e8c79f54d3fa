//! The hosts for the test of the pages in a browser (scripts/test-pages): of a controller with TLS, which runs elsewhere and may be
//! started anew.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use perigee_http::identity::{Identity, Strangers};
use perigee_http::{Client, Network, PeerIdentity};
use perigee_model::guest::{GuestBody, LogStream};
use perigee_model::load::VcpuUse;
use perigee_model::{HostId, VmId};

use crate::fake::FakeHost;
use crate::guests::{EMPTY, LOOK};

/// Guests of jobs with such a name say a line so often.
const TALKS: &str = "talks";
const LINE_EVERY: Duration = Duration::from_secs(1);

/// Registers the hosts, of which the last one does not answer, and simulates their guests until the process is stopped.
pub async fn hosts(state: &Path, api: &str, count: usize) -> Result<()> {
    let authority = perigee_controller::authority(state)?;
    let client = Client::new(api, Duration::from_secs(60))?;
    let mut hosts = Vec::new();
    for number in 1..=count {
        let id = format!("host{number:02}");
        let to = PeerIdentity::Host(HostId::new(&id)?);
        let credentials = authority.credentials(&to, &[IpAddr::V4(Ipv4Addr::LOCALHOST)])?;
        let network = Network::Tls(Identity::new(&credentials, Strangers::Refused)?);
        let site = format!("site{}", (number - 1) / 8 + 1);
        let host = FakeHost::start_in(&id, &site, &network).await;
        set_figures(&host, number, count)?;
        let path = format!("/v1/hosts/{id}");
        client.put::<serde_json::Value>(&path, &host.addresses).await.context(id)?;
        hosts.push(host);
    }
    eprintln!("{count} hosts are registered");
    live(&hosts).await
}

fn set_figures(host: &FakeHost, number: usize, count: usize) -> Result<()> {
    let part = u32::try_from(number)?;
    let mut inside = host.inside();
    inside.is_large = true;
    inside.cpus_used_1m = Some(f64::from(part) * 0.7);
    inside.pool_free_bytes = Some((1 << 40) - (u64::from(part) << 34));
    inside.down = number == count;
    Ok(())
}

/// A guest begins its job, and goes on until the job is cancelled.
async fn live(hosts: &[FakeHost]) -> Result<()> {
    let mut begun: BTreeMap<VmId, Instant> = BTreeMap::new();
    let mut lines: BTreeMap<VmId, u64> = BTreeMap::new();
    let mut over: BTreeSet<VmId> = BTreeSet::new();
    loop {
        for host in hosts {
            let vms: Vec<VmId> = host.inside().vms.keys().cloned().collect();
            for vm in vms {
                if !begun.contains_key(&vm) {
                    begin(host, &vm);
                    begun.insert(vm.clone(), Instant::now());
                }
                if host.inside().ended_commands.contains(&vm) && over.insert(vm.clone()) {
                    end(host, &vm);
                }
                let said = lines.entry(vm.clone()).or_default();
                let is_due = begun[&vm].elapsed() >= LINE_EVERY * u32::try_from(*said)?;
                if vm.as_str().contains(TALKS) && is_due && !over.contains(&vm) {
                    *said += 1;
                    say(host, &vm, GuestBody::log(LogStream::Stdout, format!("line {said}")));
                }
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Unless the VM was removed just now.
fn say(host: &FakeHost, vm: &VmId, body: GuestBody) {
    if host.inside().vms.contains_key(vm) {
        host.say(vm, body);
    }
}

fn begin(host: &FakeHost, vm: &VmId) {
    if let Some(vm) = host.inside().vms.get_mut(vm) {
        let used = VcpuUse { running_vcpus: 0.4, waiting_vcpus: 0.0 };
        vm.report.load.vcpus_1m = Some(used);
    }
    say(host, vm, GuestBody::Started);
}

fn end(host: &FakeHost, vm: &VmId) {
    say(host, vm, GuestBody::exited(143));
    let output_sha256 = EMPTY.to_owned();
    say(host, vm, GuestBody::Finished { output_bytes: 0, output_sha256, lacks: None });
}
