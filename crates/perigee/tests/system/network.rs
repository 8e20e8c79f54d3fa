//! Guests with network cards.

use perigee_model::job::{Host, JobState, MigrationState};

use super::{ensure, with_system};

/// The guest connects to the NBD port of another host all the time, whose server says `NBDMAGIC` first.
fn reaching_job(address: &str, port: &str) -> String {
    let script = format!(
        "seed=$(grep -lx seed /sys/block/*/serial | cut -d/ -f4)\n\
         reached=0\n\
         while [ \"$(dd if=/dev/$seed bs=512 count=1 iflag=direct 2>/dev/null | head -c 1)\" != S ]; do\n\
         \x20 said=$(timeout 10 bash -c 'exec 3<>/dev/tcp/{address}/{port}; head -c 8 <&3')\n\
         \x20 if [ \"$said\" = NBDMAGIC ]; then\n\
         \x20   reached=$((reached + 1))\n\
         \x20   echo \"$reached/1000000 reached\" > $PERIGEE_PROGRESS\n\
         \x20 fi\n\
         done\n\
         echo the end\n"
    );
    let script: String = script.lines().map(|line| format!("    {line}\n")).collect();
    format!(
        "name: reach\nimage: debian\nmemory: 200MiB\nnetwork: user\n\
         placement: {{host: home1, move: never}}\ncommand:\n  - /bin/bash\n  - -c\n  - |\n{script}"
    )
}

#[test]
fn a_guest_with_a_card_reaches_other_hosts_also_after_it_has_moved() {
    with_system(async |system| {
        let hosts: Vec<Host> = system.get("/v1/hosts").await?;
        let other = hosts.iter().find(|host| host.id.as_str() == "home2").expect("a host");
        let (address, port) = other.addresses.nbd_addr.split_once(':').expect("IP:PORT");
        let job = system.submit(&reaching_job(address, port)).await?;
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
        Ok(())
    });
}
