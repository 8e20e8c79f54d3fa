//! Guests with network cards.

use perigee_lab::definition::{Definition, LabId};
use perigee_model::HostId;
use perigee_model::job::{Host, JobState, MigrationState};

use super::{ensure, with_system_of};

/// The guest connects to the NBD ports of two hosts all the time, whose servers say `NBDMAGIC` first. It is let to the first one.
fn reaching_job([allowed, other]: [&str; 2]) -> String {
    let script = format!(
        "seed=$(grep -lx seed /sys/block/*/serial | cut -d/ -f4)\n\
         reached=0\n\
         says() {{ timeout 10 bash -c \"exec 3<>/dev/tcp/$1; head -c 8 <&3\"; }}\n\
         while [ \"$(dd if=/dev/$seed bs=512 count=1 iflag=direct 2>/dev/null | head -c 1)\" != S ]; do\n\
         \x20 if [ \"$(says {allowed})\" = NBDMAGIC ]; then\n\
         \x20   reached=$((reached + 1))\n\
         \x20   echo \"$reached/1000000 reached\" > $PERIGEE_PROGRESS\n\
         \x20 fi\n\
         \x20 if [ \"$(says {other})\" = NBDMAGIC ]; then echo it reaches another host; fi\n\
         done\n\
         echo the end\n"
    );
    let script: String = script.lines().map(|line| format!("    {line}\n")).collect();
    // It says nothing of a card.
    format!(
        "name: reach\nimage: debian\nmemory: 200MiB\n\
         placement: {{host: home1, move: never}}\ncommand:\n  - /bin/bash\n  - -c\n  - |\n{script}"
    )
}

#[test]
fn a_guest_has_a_card_and_reaches_only_the_hosts_that_it_may_also_after_it_has_moved() {
    let mut definition = Definition::default_demo(LabId::random(), 16);
    let home2 = HostId::new("home2").expect("a name");
    definition.guests_reach.extend(definition.host_address(&home2).map(|ip| ip.to_string()));
    with_system_of(definition, async |system| {
        let hosts: Vec<Host> = system.get("/v1/hosts").await?;
        let port = |name: &str| {
            let host = hosts.iter().find(|host| host.id.as_str() == name).expect("a host");
            host.addresses.nbd_addr.replace(':', "/")
        };
        let job = system.submit(&reaching_job([&port("home2"), &port("cloud1")])).await?;
        system.progresses(&job.id, 2).await?;
        let job = system.job(&job.id).await?;
        for to in ["cloud1", "home1"] {
            let migration = system.begin_move(&job, to).await?;
            let ended = system.migration_ended(&job.id, &migration).await?;
            ensure!(ended.state == MigrationState::Completed, "to {to}: {}", ended.error);
            system.progresses(&job.id, 2).await?;
        }
        system.stop_writer(&job, "home1").await?;
        let ended = system.ended(&job.id).await?;
        let log = system.log(&job.id).await?;
        ensure!(ended.state == JobState::Succeeded, "{} {log:?}", ended.reason);
        ensure!(log.iter().any(|line| line == "the end"), "{log:?}");
        ensure!(!log.iter().any(|line| line.contains("another host")), "{log:?}");
        Ok(())
    });
}
