//! A replica at a rented host is kept as a snapshot while no host is rented there, and the next host ships only what has changed.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use perigee_http::Client;
use perigee_lab::Lab;
use perigee_model::job::{ClusterVolume, Link};
use perigee_model::kept::{KeptDisk, KeptState};
use perigee_model::rental::Rental;
use perigee_model::rental::states::RentalState;
use perigee_model::replica::Replica;
use serde_json::{Value, json};

use crate::failed;
use crate::patience::{Checked, until};

/// What is written before the first round.
const FIRST: &str = "write -P 7 0 64M";
/// What is written while no host is rented.
const LATER: &str = "write -P 9 128M 4M";
const LATER_BYTES: u64 = 4 << 20;

fn done(what: &str, output: &Output) -> Checked<String> {
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    // `qemu-io` ends with 0 even when its command failed; then it says so.
    if output.status.success() && !said.contains("failed") {
        return Ok(said);
    }
    Err(failed(format!("{what}: {output:?}")))
}

fn write(lab: &Lab, command: &str) -> Checked<String> {
    let socket = lab.dir().join("hosts/home1/volume.sock");
    let uri = format!("nbd+unix:///data?socket={}", socket.display());
    let mut qemu_io = Command::new("timeout");
    qemu_io.args(["120", "qemu-io", "-f", "raw", "-c", command, "-c", "flush", &uri]);
    done(command, &qemu_io.output().map_err(failed)?)
}

fn perigee(lab: &Lab, args: &[&str]) -> Checked<String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_perigee"));
    let output = command.args(args).env("PERIGEE_API", &lab.api).output();
    done(&args.join(" "), &output.map_err(failed)?)
}

async fn rental_in(client: &Client, id: &str, state: RentalState) -> Checked<Rental> {
    until(&format!("rental {id} to be {state}"), async || {
        let rental: Rental = client.get(&format!("/v1/rentals/{id}")).await?;
        Ok((rental.state == state).then_some(rental))
    })
    .await
}

async fn rent(client: &Client, id: &str) -> Checked<Rental> {
    let ask =
        json!({"id": id, "provider": "lab", "kind": "lab.small", "zone": "home", "site": "rented"});
    let _: Rental = client.post("/v1/rentals", &ask).await?;
    rental_in(client, id, RentalState::Joined).await
}

/// The replica, once it is at this host, has so many complete points, and nothing is written since.
async fn replica(client: &Client, host: &str, points: u32) -> Checked<Replica> {
    until(&format!("{points} points of the replica at {host}"), async || {
        let volume: ClusterVolume = client.get("/v1/volumes/data").await?;
        let found = volume.replicas.into_iter().find(|one| {
            let is_there = one.host.as_str() == host && one.kept.is_none();
            is_there && one.points >= points && one.behind_bytes == Some(0)
        });
        Ok(found)
    })
    .await
}

async fn kept(client: &Client, states: &[KeptState]) -> Checked<KeptDisk> {
    until(&format!("a kept disk that is {states:?}"), async || {
        let all: Vec<KeptDisk> = client.get("/v1/kept-disks").await?;
        Ok(all.into_iter().find(|one| states.contains(&one.state)))
    })
    .await
}

fn snapshots(lab: &Lab) -> Checked<usize> {
    let entries = std::fs::read_dir(lab.dir().join("rented")).map_err(failed)?;
    let names = entries.flatten().map(|entry| entry.file_name());
    Ok(names.filter(|name| name.to_string_lossy().starts_with("snap-")).count())
}

/// How many bytes each round of the replica has shipped, as the controller's log has it.
fn shipped(lab: &Lab, host: &str) -> Checked<Vec<u64>> {
    let log = std::fs::read_to_string(log(lab.dir())).map_err(failed)?;
    let of = format!("a round of the replica of volume data at {host} ships ");
    let rest = log.lines().filter_map(|line| line.split_once(&of)).map(|(_, rest)| rest);
    Ok(rest.filter_map(|rest| rest.split(' ').next()?.parse().ok()).collect())
}

fn log(lab: &Path) -> std::path::PathBuf {
    lab.join("ctl/controller.log")
}

pub async fn test(lab: Lab) -> Checked<()> {
    let client = lab.client(Duration::from_secs(60))?;
    // Each second of shipping is worth a dollar.
    perigee(&lab, &["rent", "mode", "--waiting-costs", "$3600/h"])?;
    let new =
        json!({"name": "data", "host": "home1", "size_bytes": 1_u64 << 30, "source": "empty"});
    until("the own host", async || client.post::<Value>("/v1/volumes", &new).await.map(Some))
        .await?;
    write(&lab, FIRST)?;
    rent(&client, "first").await?;
    let ask = json!({"to": "rented", "every_s": 10, "keep": 3});
    let _: Value = client.post("/v1/volumes/data/replicas", &ask).await?;
    replica(&client, "first", 1).await?;
    until("the link to be measured", async || {
        let links: Vec<Link> = client.get("/v1/links").await?;
        let ends = |link: &Link| [link.from.to_string(), link.to.to_string()];
        Ok(links.iter().any(|link| ends(link) == ["first", "home1"]).then_some(()))
    })
    .await?;
    let _: Value = client.post("/v1/rentals/first/end", &json!({})).await?;
    let disk = kept(&client, &[KeptState::Kept, KeptState::Gone]).await?;
    if disk.state != KeptState::Kept || disk.stored_bytes < 64 << 20 {
        return Err(failed(format!("{disk:?}")));
    }
    rental_in(&client, "first", RentalState::Gone).await?;
    let info = perigee(&lab, &["volume", "info", "data"])?;
    if !info.contains("kept as a snapshot at lab, $") || snapshots(&lab)? != 2 {
        return Err(failed(info));
    }
    perigee(&lab, &["rent", "kept"])?;
    write(&lab, LATER)?;
    rent(&client, "second").await?;
    replica(&client, "second", 2).await?;
    let rounds = [shipped(&lab, "first")?, shipped(&lab, "second")?];
    let is_little =
        |all: &Vec<u64>| !all.is_empty() && all.iter().all(|one| *one <= 2 * LATER_BYTES);
    if rounds[0].first().is_none_or(|bytes| *bytes < 64 << 20) || !is_little(&rounds[1]) {
        return Err(failed(format!("the rounds have shipped {rounds:?}")));
    }
    until("the end of the snapshot", async || Ok((snapshots(&lab)? == 0).then_some(()))).await
}
