//! Guests with network cards.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Stdio;
use std::time::Duration;

use perigee_lab::definition::{Definition, LabId};
use perigee_lab::netns::within;
use perigee_model::job::{Host, Job, JobState, MigrationState};
use perigee_model::network::{ClusterNetwork, NewNetwork};
use perigee_model::{HostId, Problem};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::tenant_network::ip;
use super::{Checked, System, ensure, failed, host, until, with_system_of};

/// The guest connects to the NBD ports of two hosts all the time, whose servers say `NBDMAGIC` first. It is let to the first one.
/// Both have the same time to answer: if that were too short, it would not get on.
fn reaching_job([allowed, other]: [&str; 2]) -> String {
    let script = format!(
        "seed=$(grep -lx seed /sys/block/*/serial | cut -d/ -f4)\n\
         reached=0\n\
         says() {{ timeout 5 bash -c \"exec 3<>/dev/tcp/$1; head -c 8 <&3\"; }}\n\
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

/// In a bridge of the operator. It sends back what comes over one connection.
const BRIDGED: &str = r#"name: bridged
image: debian
memory: 200MiB
network: bridge:br0
placement: {host: home1, move: never}
command:
  - /bin/bash
  - -c
  - |
    modprobe virtio_net
    busybox ip link set eth0 up
    busybox ip address add 192.0.2.7/24 dev eth0
    busybox nc -l -p 80 -e /bin/cat
    echo "the end"
"#;

/// A network that the hosts at home have beside the cluster's: a bridge at each, and a cable between them.
pub async fn operators_network(system: &System) -> Checked<String> {
    let at = ["home1", "home2"].map(|name| system.lab.definition.host_namespace(&host(name)));
    for (number, namespace) in (1..).zip(&at) {
        ip(&format!("-n {namespace} link add br0 type bridge"))?;
        ip(&format!("-n {namespace} address add 192.0.2.{number}/24 dev br0"))?;
        ip(&format!("-n {namespace} link set br0 up"))?;
    }
    let [one, other] = &at;
    ip(&format!("link add lan0 netns {one} type veth peer name lan0 netns {other}"))?;
    for namespace in &at {
        ip(&format!("-n {namespace} link set lan0 master br0 up"))?;
    }
    until("the hosts to say which of them has no such bridge", async || {
        let hosts: Vec<Host> = system.get("/v1/hosts").await?;
        let lacks = |host: &&Host| host.warnings.iter().any(|text| text.contains("bridge br0"));
        let lack: Vec<&str> = hosts.iter().filter(lacks).map(|host| host.id.as_str()).collect();
        Ok((lack == ["cloud1"]).then_some(()))
    })
    .await?;
    Ok(one.clone())
}

/// A connection from a host's own address in the bridge goes on, without a frame of the guest's that nobody has asked for.
async fn moves_in_its_bridge(system: &System, job: &Job, namespace: &str) -> Checked<()> {
    let connect = || {
        let address = ([192, 0, 2, 7], 80).into();
        let stream = TcpStream::connect_timeout(&address, Duration::from_secs(5));
        let stream = stream.map_err(failed)?;
        stream.set_read_timeout(Some(Duration::from_secs(120))).map_err(failed)?;
        Ok(stream)
    };
    let mut stream =
        until("the guest in the bridge", async || within(namespace, connect).map(Some)).await?;
    let mut echoes = |text: &str| {
        let mut back = vec![0; text.len()];
        let done = stream.write_all(text.as_bytes()).and_then(|()| stream.read_exact(&mut back));
        done.map_err(failed)?;
        ensure!(back == text.as_bytes(), "{back:?}");
        Ok::<_, Problem>(())
    };
    echoes("before")?;
    let moving = system.job(&job.id).await?;
    let vm = moving.vm.clone().expect("it runs");
    let refused = system.perigee(&["vm", "move", vm.as_str(), "cloud1"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    ensure!(!refused.status.success() && said.contains("br0"), "cloud1 has no bridge: {said}");
    let migration = system.begin_move(&moving, "home2").await?;
    let ended = system.migration_ended(&job.id, &migration).await?;
    ensure!(ended.state == MigrationState::Completed, "to home2: {}", ended.error);
    echoes("after")?;
    drop(stream);
    let ended = system.ended(&job.id).await?;
    ensure!(ended.state == JobState::Succeeded, "{}", ended.reason);
    Ok(())
}

/// Kills what connects the only VM at a host that has a card in a user network.
fn kill_passt(namespace: &str) -> Checked<()> {
    let script = format!(
        "for pid in $(ip netns pids {namespace}); do \
         case $(cat /proc/$pid/comm) in passt*) kill -9 $pid && echo killed;; esac; done"
    );
    let output = std::process::Command::new("sh").args(["-c", &script]).output().map_err(failed)?;
    ensure!(output.stdout == b"killed\n", "{output:?}");
    Ok(())
}

#[test]
fn a_guest_has_a_card_and_reaches_only_the_hosts_that_it_may_also_after_it_has_moved() {
    let mut definition = Definition::default_demo(LabId::random(), 16);
    let home2 = HostId::new("home2").expect("a name");
    definition.guests_reach.extend(definition.host_address(&home2).map(|ip| ip.to_string()));
    definition.bridges.push("br0".to_owned());
    with_system_of(definition, async |system| {
        let lan = operators_network(&system).await?;
        let bridged = system.submit(BRIDGED).await?;
        let hosts: Vec<Host> = system.get("/v1/hosts").await?;
        let port = |name: &str| {
            let host = hosts.iter().find(|host| host.id.as_str() == name).expect("a host");
            host.addresses.nbd_addr.replace(':', "/")
        };
        let job = system.submit(&reaching_job([&port("home2"), &port("cloud1")])).await?;
        system.progresses(&job.id, 2).await?;
        moves_in_its_bridge(&system, &bridged, &lan).await?;
        let job = system.job(&job.id).await?;
        for to in ["cloud1", "home1"] {
            let migration = system.begin_move(&job, to).await?;
            let ended = system.migration_ended(&job.id, &migration).await?;
            ensure!(ended.state == MigrationState::Completed, "to {to}: {}", ended.error);
            system.progresses(&job.id, 2).await?;
        }
        kill_passt(&system.lab.definition.host_namespace(&host("home1")))?;
        system.progresses(&job.id, 2).await?;
        system.stop_writer(&job.id).await?;
        let ended = system.ended(&job.id).await?;
        let log = system.log(&job.id).await?;
        ensure!(ended.state == JobState::Succeeded, "{} {log:?}", ended.reason);
        ensure!(log.iter().any(|line| line == "the end"), "{log:?}");
        ensure!(!log.iter().any(|line| line.contains("another host")), "{log:?}");
        Ok(())
    });
}

/// Sends back what comes to its port 22, connection after connection, until its seed begins with an S.
const SERVE: &str = r#"seed=$(grep -lx seed /sys/block/*/serial | cut -d/ -f4)
(while busybox nc -l -p 22 -e /bin/cat; do :; done) &
count=0
while [ "$(dd if=/dev/$seed bs=512 count=1 iflag=direct 2>/dev/null | head -c 1)" != S ]; do
  count=$((count + 1))
  echo "$count/1000000 served" > $PERIGEE_PROGRESS
  sleep 1
done"#;

/// What `ssh` would send and get.
async fn says(system: &System, vm: &str, text: &str) -> Checked<String> {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_perigee"));
    command.args(["vm", "ssh-tunnel", vm]).env("PERIGEE_API", &system.lab.api);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut running = command.spawn().map_err(failed)?;
    let mut input = running.stdin.take().expect("it was asked for");
    let mut output = running.stdout.take().expect("it was asked for");
    let mut errors = running.stderr.take().expect("it was asked for");
    input.write_all(text.as_bytes()).await.map_err(failed)?;
    let mut got = vec![0; text.len()];
    let read = tokio::time::timeout(Duration::from_secs(60), output.read_exact(&mut got)).await;
    if !matches!(read, Ok(Ok(_))) {
        running.start_kill().map_err(failed)?;
        let mut said = String::new();
        errors.read_to_string(&mut said).await.map_err(failed)?;
        return Ok(said);
    }
    // The end of the input ends the connection, and the program with it.
    drop(input);
    let ended = tokio::time::timeout(Duration::from_secs(60), running.wait()).await;
    ensure!(matches!(ended, Ok(Ok(status)) if status.success()), "{ended:?}");
    Ok(String::from_utf8_lossy(&got).into_owned())
}

#[test]
fn port_22_of_a_guest_is_reached_through_the_controller_also_after_it_has_moved() {
    with_system_of(Definition::default_demo(LabId::random(), 16), async |system| {
        let new = NewNetwork {
            name: "blue".parse().expect("a name"),
            subnet: "10.7.0.0/24".parse().expect("addresses"),
            nat: false,
        };
        let _: ClusterNetwork = system.post("/v1/networks", &new).await?;
        let script: String = SERVE.lines().map(|line| format!("    {line}\n")).collect();
        let mut jobs = Vec::new();
        for (name, network, host) in
            [("own", "default", "home1"), ("in-blue", "blue", "home2"), ("alone", "none", "home1")]
        {
            let file = format!(
                "name: {name}\nimage: debian\nmemory: 200MiB\nnetwork: {network}\n\
                 placement: {{host: {host}, move: never}}\ncommand:\n  - /bin/bash\n  - -c\n  - |\n{script}"
            );
            jobs.push(system.submit(&file).await?);
        }
        for job in &jobs {
            system.progresses(&job.id, 2).await?;
        }
        let [own, blue, alone] = &jobs[..] else { unreachable!("three") };
        for round in 0..2 {
            for job in [own, blue] {
                let text = format!("hello {} {round}\n", job.id);
                let said = says(&system, job.id.as_str(), &text).await?;
                ensure!(said == text, "{said:?}");
            }
            if round == 0 {
                for job in [own, blue] {
                    let moving = system.job(&job.id).await?;
                    let migration = system.begin_move(&moving, "cloud1").await?;
                    let ended = system.migration_ended(&job.id, &migration).await?;
                    ensure!(ended.state == MigrationState::Completed, "{}", ended.error);
                }
            }
        }
        let said = says(&system, alone.id.as_str(), "hello").await?;
        ensure!(said.contains("no network card"), "{said:?}");
        Ok(())
    });
}
