//! A server is killed while many clients upload. A file counts as acknowledged when its client has ended well.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use crate::clients::{Workspace, all_end, sftp_once};
use crate::results::{Door, Killed, Victim};
use crate::servers::{Servers, text};
use crate::{Sizes, is_interrupted};

/// Files of different lengths: in one piece, and in many.
const LENGTHS: [u64; 3] = [4096, 300_000, 5_000_000];
/// They upload at once.
const CLIENTS: usize = 64;
const LOAD_MAX: Duration = Duration::from_secs(600);

pub fn run(servers: &mut Servers, work: &Workspace, sizes: Sizes) -> Result<Vec<Killed>> {
    let mut hashes = BTreeMap::new();
    for bytes in LENGTHS {
        work.make(bytes)?;
        hashes.insert(bytes, Sha256::digest(fs::read(work.file(bytes))?));
    }
    let mut all = Vec::new();
    for (door, victim) in [
        (Door::PerigeeHttp, Victim::Controller),
        (Door::PerigeeWebdav, Victim::Controller),
        (Door::PerigeeSftp, Victim::Controller),
        (Door::PerigeeFtps, Victim::Controller),
        (Door::PerigeeFtps, Victim::Gateway),
    ] {
        servers.make_directory(door)?;
        let acknowledged = upload_until_killed(servers, work, (door, victim), sizes.acknowledged)?;
        servers.start_again(victim)?;
        let mut lost = 0;
        for (name, bytes) in &acknowledged {
            ensure!(!is_interrupted(), "it was interrupted");
            let url = format!("{}/{name}", servers.url(Door::PerigeeHttp));
            let got =
                Command::new("curl").args(["-sS", "-f", &url]).stdin(Stdio::null()).output()?;
            let is_there = got.status.success() && Sha256::digest(&got.stdout) == hashes[bytes];
            if !is_there {
                eprintln!("{door:?}: {name} was acknowledged, and is lost");
                lost += 1;
            }
        }
        eprintln!(
            "{door:?}: {} is killed under {CLIENTS} clients; {} acknowledged, {lost} lost",
            victim.name(),
            acknowledged.len()
        );
        all.push(Killed { door, victim, clients: CLIENTS, acknowledged: acknowledged.len(), lost });
        servers.clear(door)?;
    }
    Ok(all)
}

type Acknowledged = Vec<(String, u64)>;

fn upload_until_killed(
    servers: &mut Servers,
    work: &Workspace,
    (door, victim): (Door, Victim),
    enough: usize,
) -> Result<Acknowledged> {
    let acknowledged: Mutex<Acknowledged> = Mutex::default();
    let is_killed = AtomicBool::new(false);
    let lock = || acknowledged.lock().unwrap_or_else(PoisonError::into_inner);
    let one_client = |servers: &Servers, client: usize| {
        for number in 0.. {
            if is_killed.load(Ordering::Relaxed) || is_interrupted() {
                return;
            }
            let bytes = LENGTHS[(client + number) % LENGTHS.len()];
            let name = format!("bench/k{client}-{number}");
            // After the kill it fails.
            if upload(servers, work, door, &name, bytes).is_ok() {
                lock().push((name, bytes));
            }
        }
    };
    let shared: &Servers = servers;
    let pid = shared.pid(victim.door())?.to_string();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let one_client = &one_client;
        for client in 0..CLIENTS {
            scope.spawn(move || one_client(shared, client));
        }
        while lock().len() < enough && begun.elapsed() < LOAD_MAX && !is_interrupted() {
            std::thread::sleep(Duration::from_millis(20));
        }
        // By its id: the process is this one's child.
        let killed = crate::run("kill", &["-9", &pid]);
        is_killed.store(true, Ordering::Relaxed);
        killed
    })?;
    servers.ended(victim)?;
    let acknowledged = acknowledged.into_inner().unwrap_or_else(PoisonError::into_inner);
    ensure!(acknowledged.len() >= enough, "only {} uploads were acknowledged", acknowledged.len());
    Ok(acknowledged)
}

fn upload(servers: &Servers, work: &Workspace, door: Door, name: &str, bytes: u64) -> Result<()> {
    let file = work.file(bytes);
    if door == Door::PerigeeSftp {
        return all_end(vec![sftp_once(servers, door, &format!("put {} {name}\n", text(&file)?))?]);
    }
    let url = format!("{}/{name}", servers.url(door));
    let mut curl = Command::new("curl");
    curl.args(["-sS", "-f", "-K", "-", "-o", "/dev/null", "-T", text(&file)?, &url]);
    let mut child = curl.stdin(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    // The login is in no list of processes.
    let mut stdin = child.stdin.take().context("it has one")?;
    stdin.write_all(servers.curl_login(door).as_bytes())?;
    drop(stdin);
    all_end(vec![child])
}
