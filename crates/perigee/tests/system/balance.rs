//! A VM without a job whose data are at the other site.

use perigee_lab::balance::{VmAtEnd, make_image_of};
use perigee_model::balance::{SiteBalance, VmStanding};
use perigee_model::job::{MigrationState, Vm};

use super::persistent_vms::BOOT_PATIENCE;
use super::{Checked, System, ensure, host, until_within, with_system};

const MIB: u64 = 1 << 20;

/// Writes its volume block by block: each block is at the volume's home before the next one is written. Then it reads what it has written,
/// and waits a little, so that beside its data it does not want a CPU all the time.
const GUEST: &str = r#"#!/bin/bash
say() { echo "busy: $*" >/dev/console; }
volume=/dev/$(grep -lx data0 /sys/block/*/serial | cut -d/ -f4)
say begun
round=0
while :; do
    round=$((round + 1))
    at=$((round % 64 * 32))
    dd if=/dev/urandom of=/run/written bs=4k count=32 2>/dev/null
    dd if=/run/written of="$volume" bs=4k seek=$at oflag=direct,dsync conv=notrunc 2>/dev/null || say "broken: not written in round $round"
    dd if="$volume" bs=4k skip=$at count=32 iflag=direct 2>/dev/null | cmp -s - /run/written || say "broken in round $round"
    say "round $round"
    sleep 0.5
done
"#;

const VM: &str = "reads";

impl System {
    async fn reader(&self) -> Checked<(Vm, VmAtEnd)> {
        let vm = self.vm(VM).await?;
        let said = self.client.get_bytes(&format!("/v1/vms/{VM}/console")).await?;
        let guest = VmAtEnd::of(vm.id.clone(), vm.host.clone(), &String::from_utf8_lossy(&said));
        Ok((vm, guest))
    }

    async fn standing(&self) -> Checked<VmStanding> {
        self.get(&format!("/v1/vms/{VM}/balance")).await
    }

    /// Beside its data nothing of what it does goes over the network.
    async fn waits_for_no_network(&self) -> Checked<()> {
        until_within(BOOT_PATIENCE, "its disks to be at cloud1", async || {
            let (vm, _) = self.reader().await?;
            let far = vm.volumes.iter().find(|one| one.home != host("cloud1") || one.is_moving());
            ensure!(far.is_none(), "{far:?}");
            Ok(Some(()))
        })
        .await?;
        let (before, guest) = self.reader().await?;
        let (after, _) = until_within(BOOT_PATIENCE, "five more rounds", async || {
            Ok(Some(self.reader().await?).filter(|(_, now)| now.rounds >= guest.rounds + 5))
        })
        .await?;
        ensure!(
            after.io.writes > before.io.writes
                && after.io.network_busy_ns == before.io.network_busy_ns,
            "it has written and waited for the network: {before:?}, {after:?}"
        );
        Ok(())
    }
}

/// It does not matter how fast all of it is: each write takes 16 ms more at home1 than at cloud1.
#[test]
fn a_vm_without_a_job_goes_live_to_its_data_at_another_site_and_waits_for_the_network_no_more() {
    with_system(async |system| {
        let golden = std::env::var("PERIGEE_TEST_IMAGE").expect("with_system has it");
        let golden = std::path::Path::new(&golden).join("debian-pg.raw");
        let image = make_image_of(&golden, system.lab.dir(), GUEST).await?.display().to_string();
        system.does(&["image", "import", "reader", &image])?;
        system.volume("own", "cloud1", 64 * MIB).await?;
        let create = ["vm", "create", VM, "--image", "reader", "--memory", "200MiB"];
        let places = ["--host", "home1", "--volume", "own", "--network", "none"];
        system.does(&[&create[..], &places].concat())?;
        let advice = until_within(BOOT_PATIENCE, "the advice", async || {
            let sites: Vec<SiteBalance> = system.get("/v1/balance").await?;
            let mut all = sites.into_iter().flat_map(|site| site.vms);
            let of = all.find(|vm| vm.vm.as_str() == VM && vm.moves);
            ensure!(of.is_some(), "{:?}", system.standing().await?);
            Ok(of)
        })
        .await?;
        eprintln!("at {:.1} s: {}", system.begun.elapsed().as_secs_f64(), advice.reason);
        let said = &advice.reason;
        let right = advice.to == host("cloud1")
            && said.contains(" to the network to its data at cloud1, would have lost ")
            && said.contains("perigee site balance cloud on");
        ensure!(right, "{said}");
        ensure!(system.standing().await?.moves.is_empty(), "nothing is switched on");

        system.does(&["site", "balance", "home", "on"])?;
        system.does(&["site", "balance", "cloud", "on"])?;
        until_within(BOOT_PATIENCE, "the VM to go to its data", async || {
            let (vm, _) = system.reader().await?;
            ensure!(vm.host == Some(host("cloud1")), "{:?}", system.standing().await?);
            Ok(Some(()))
        })
        .await?;
        eprintln!("{}", system.does(&["vm", "explain", VM])?);
        system.waits_for_no_network().await?;
        let lost = until_within(BOOT_PATIENCE, "what it loses at cloud1", async || {
            let measured = system.standing().await?.figures.measured;
            Ok(measured.and_then(|of| of.data_lost.filter(|_| of.data_at.is_empty())))
        })
        .await?;
        ensure!(lost == 0.0, "{lost} of its time");
        let moves = system.standing().await?.moves;
        let right = moves.len() == 1
            && moves[0].state == MigrationState::Completed
            && moves[0].reason.starts_with("moves home1 → cloud1: has lost ");
        ensure!(right, "{moves:?}");
        let (_, guest) = system.reader().await?;
        ensure!(guest.begun == 1 && guest.broken.is_empty(), "{guest:?}");
        Ok(())
    });
}
