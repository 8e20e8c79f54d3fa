//! VMs in a network of their tenant, at two sites.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use perigee_lab::capture::Capture;
use perigee_lab::definition::CONTROLLER_PORT;
use perigee_lab::netns::within;
use perigee_model::Problem;
use perigee_model::job::{JobState, MigrationState};
use perigee_model::network::{ClusterNetwork, NewNetwork};

use super::{Checked, System, ensure, failed, host, with_system};

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
        system.stop_writer(&ask.id).await?;
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

/// The address is what a DHCP client gets that knows nothing else. Then it goes out over the gateway, and is asked from there.
const SERVE: &str = r#"cat > /tmp/got <<'END'
#!/bin/sh
[ "$1" = bound ] || exit 0
busybox ip address add "$ip/$mask" dev eth0
busybox ip link set eth0 mtu "$mtu"
busybox ip route add default via "$router"
echo "nameserver $dns" > /etc/resolv.conf
echo "dhcp $ip/$mask mtu $mtu router $router"
END
chmod +x /tmp/got
busybox ip address flush dev eth0
rm -f /etc/resolv.conf
busybox udhcpc -f -q -n -i eth0 -O mtu -s /tmp/got
busybox nslookup serve-0001.perigee.internal | grep -q 10.7.0.2 && echo "it finds its name"
timeout 60 bash -c 'exec 3<>/dev/tcp/WORLD/7000; head -1 <&3' | sed 's/^/outside says /'
timeout 5 bash -c 'exec 3<>/dev/tcp/CONTROLLER' 2>/dev/null || echo "the controller is not reached"
busybox nc -l -p 80 -e /bin/cat
echo "the end""#;

/// A machine that is no host of the cluster, at the site of the first host.
pub struct World {
    pub namespace: String,
    pub address: Ipv4Addr,
    /// The address of who has connected.
    greeted: Option<std::thread::JoinHandle<std::io::Result<std::net::IpAddr>>>,
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "delete", &self.namespace]).status();
    }
}

impl World {
    /// It says welcome to the first who connects to its port 7000.
    pub fn make(system: &System) -> Checked<Self> {
        let definition = &system.lab.definition;
        let host = definition.host_address(&host("home1")).expect("a host");
        let [a, b, c, _] = host.octets();
        let address = Ipv4Addr::new(a, b, c, 250);
        let site = definition.site_namespace(&"home".parse().expect("a name"));
        let own = format!("{}-world", definition.id);
        ip(&format!("netns add {own}"))?;
        ip(&format!("link add world0 netns {site} type veth peer name eth0 netns {own}"))?;
        ip(&format!("-n {site} link set world0 master br0 up"))?;
        ip(&format!("-n {own} address add {address}/24 dev eth0"))?;
        ip(&format!("-n {own} link set eth0 up"))?;
        let listener = within(&own, || TcpListener::bind((address, 7000)).map_err(failed))?;
        let greeted = std::thread::spawn(move || {
            let (mut stream, from) = listener.accept()?;
            stream.write_all(b"welcome\n")?;
            Ok(from.ip())
        });
        Ok(Self { namespace: own, address, greeted: Some(greeted) })
    }
}

pub fn ip(line: &str) -> Result<(), Problem> {
    let done = Command::new("ip").args(line.split(' ')).output();
    let done = done.map_err(|error| Problem::internal("run ip", error))?;
    ensure!(done.status.success(), "ip {line}: {}", String::from_utf8_lossy(&done.stderr));
    Ok(())
}

#[test]
fn a_guest_with_dhcp_reaches_the_world_and_is_reached_at_its_port_while_it_moves() {
    with_system(async |system| {
        let (name, subnet) =
            ("blue".parse().expect("a name"), "10.7.0.0/24".parse().expect("addresses"));
        let new = NewNetwork { name, subnet, nat: true };
        let _: ClusterNetwork = system.post("/v1/networks", &new).await?;
        let mut world = World::make(&system)?;
        let (own, address) = (world.namespace.clone(), world.address);
        let definition = &system.lab.definition;
        let at = definition.host_address(&host("home1")).expect("a host");
        let controller = format!("{}/{CONTROLLER_PORT}", definition.controller_address());
        let script =
            SERVE.replace("WORLD", &address.to_string()).replace("CONTROLLER", &controller);
        let file = job("serve", "home1", &script)
            .replace("network: blue\n", "network: blue\npublish: [\"30080:80\"]\n");
        let serve = system.submit(&file).await?;
        let deadline = Instant::now() + Duration::from_secs(300);
        loop {
            let log = system.log(&serve.id).await?;
            if log.iter().any(|line| line.contains("the controller is not reached")) {
                break;
            }
            ensure!(Instant::now() < deadline, "{log:?}");
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        let log = system.log(&serve.id).await?;
        for said in [
            "dhcp 10.7.0.2/",
            "mtu 1370 router 10.7.0.1",
            "it finds its name",
            "outside says welcome",
        ] {
            ensure!(log.iter().any(|line| line.contains(said)), "{said}: {log:?}");
        }
        let greeted = world.greeted.take().expect("it is asked once");
        let from = greeted.join().expect("no panic").map_err(failed)?;
        ensure!(from == at, "outside it has the address of the gateway's host, not {from}");
        // The guest's server may not listen yet.
        let mut stream = loop {
            let connect = || {
                let stream = TcpStream::connect((at, 30080)).map_err(failed)?;
                stream.set_read_timeout(Some(Duration::from_secs(120))).map_err(failed)?;
                Ok(stream)
            };
            match within(&own, connect) {
                Ok(stream) => break stream,
                Err(problem) => ensure!(Instant::now() < deadline, "{problem}"),
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        };
        let mut echoes = |text: &str| {
            let mut back = vec![0; text.len()];
            let done =
                stream.write_all(text.as_bytes()).and_then(|()| stream.read_exact(&mut back));
            done.map_err(failed)?;
            ensure!(back == text.as_bytes(), "{back:?}");
            Ok::<_, Problem>(())
        };
        echoes("before")?;
        for to in ["cloud1", "home2"] {
            let moving = system.job(&serve.id).await?;
            let migration = system.begin_move(&moving, to).await?;
            let ended = system.migration_ended(&serve.id, &migration).await?;
            ensure!(ended.state == MigrationState::Completed, "to {to}: {}", ended.error);
            echoes(to)?;
        }
        drop(stream);
        let ended = system.ended(&serve.id).await?;
        ensure!(ended.state == JobState::Succeeded, "{}", ended.reason);
        Ok(())
    });
}
