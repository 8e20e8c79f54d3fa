//! VMs in a network of their tenant, at two sites.

use perigee_lab::capture::Capture;
use perigee_model::job::{JobState, MigrationState};
use perigee_model::network::{ClusterNetwork, NewNetwork};

use super::{ensure, with_system};

/// The guest puts it together, so no job file has it.
const MARKER: &str = "network-marker-4711";

fn job(name: &str, host: &str, script: &str) -> String {
    let script: String = script.lines().map(|line| format!("    {line}\n")).collect();
    format!(
        "name: {name}\nimage: debian\nmemory: 200MiB\nnetwork: blue\n\
         placement: {{host: {host}, move: never}}\ncommand:\n  - /bin/bash\n  - -c\n  - |\n{script}"
    )
}

/// Sends back what comes over one connection.
const ECHO: &str = "busybox nc -l -p 8000 -e /bin/cat\necho the end";

/// One connection for its whole life, to a VM that it knows by name, until its seed begins with an S.
const ASK: &str = r#"seed=$(grep -lx seed /sys/block/*/serial | cut -d/ -f4)
until exec 3<>/dev/tcp/echo-0001/8000; do sleep 1; done 2> /dev/null
count=0
while [ "$(dd if=/dev/$seed bs=512 count=1 iflag=direct 2>/dev/null | head -c 1)" != S ]; do
  count=$((count + 1))
  echo "network-marker-$((4700 + 11)) $count" >&3
  read -t 120 -r word back <&3
  [ "$back" = "$count" ] || { echo "lost at $count: $word $back"; exit 1; }
  echo "$count/1000000 answered" > $PERIGEE_PROGRESS
done
echo the end"#;

#[test]
fn a_connection_in_a_tenant_s_network_goes_on_when_its_vms_move() {
    with_system(async |system| {
        let name = "blue".parse().expect("a name");
        let subnet = "10.7.0.0/24".parse().expect("addresses");
        let new = NewNetwork { name, subnet, nat: false };
        let _: ClusterNetwork = system.post("/v1/networks", &new).await?;
        let echo = system.submit(&job("echo", "home1", ECHO)).await?;
        let ask = system.submit(&job("ask", "cloud1", ASK)).await?;
        system.progresses(&ask.id, 2).await?;
        let site = "cloud".parse().expect("a name");
        let site = system.lab.definition.site_namespace(&site);
        let way = Capture::begin(&site, &[MARKER])?;
        for (id, to) in [(&echo.id, "home2"), (&ask.id, "home1"), (&echo.id, "cloud1")] {
            let moving = system.job(id).await?;
            let migration = system.begin_move(&moving, to).await?;
            let ended = system.migration_ended(id, &migration).await?;
            ensure!(ended.state == MigrationState::Completed, "{id} to {to}: {}", ended.error);
            system.progresses(&ask.id, 3).await?;
        }
        let seen = way.end()?;
        ensure!(seen.frames > 0 && seen.found == [0], "it can be read on its way: {seen:?}");
        let network: ClusterNetwork = system.get("/v1/networks/blue").await?;
        ensure!(network.vms.len() == 2 && network.gateway_host.is_some(), "{network:?}");
        system.stop_writer(&ask, "cloud1").await?;
        let ended = system.ended(&ask.id).await?;
        let log = system.log(&ask.id).await?;
        ensure!(ended.state == JobState::Succeeded, "{} {log:?}", ended.reason);
        let ended = system.ended(&echo.id).await?;
        ensure!(ended.state == JobState::Succeeded, "{}", ended.reason);
        let deleted = system.perigee(&["network", "delete", "blue"]);
        ensure!(deleted.status.success(), "{}", String::from_utf8_lossy(&deleted.stderr));
        Ok(())
    });
}
