//! To whom the CHAP secrets of machines without disks were given.
//!
//! A machine's firmware gets its secret from the boot server, and proves who it is only by its network card's address,
//! which others can use. So a secret is given once for each boot that is expected: not while the machine is running, and
//! not again before somebody has logged in with it. Whoever steals it and does not use it keeps the machine from booting,
//! and is noticed. A restart of the server forgets what it has given.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use perigee_block::locking::lock;
use perigee_model::{ClientName, Problem, VolumeName};

/// Firmware may ask several times until it is connected to its disk.
const SAME_BOOT: Duration = Duration::from_secs(120);

#[derive(Debug)]
struct Given {
    volume: VolumeName,
    to: Option<IpAddr>,
    at: Instant,
    /// Somebody has opened the volume since.
    used: bool,
}

/// There are never more entries than clients of the pool.
#[derive(Debug, Default)]
pub struct BootSecrets {
    given: Mutex<BTreeMap<ClientName, Given>>,
    turn: tokio::sync::Mutex<()>,
}

impl BootSecrets {
    /// To be held from a check until the secret is given, so that two machines that ask at the same time don't both get
    /// it.
    pub async fn turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.turn.lock().await
    }

    /// # Errors
    /// `Unavailable` if the client's secret is not to be given now. Firmware then asks again.
    pub fn check(
        &self,
        client: &ClientName,
        open_sessions: usize,
        asker: Option<IpAddr>,
    ) -> Result<(), Problem> {
        self.check_at(client, open_sessions, asker, Instant::now())
    }

    fn check_at(
        &self,
        client: &ClientName,
        open_sessions: usize,
        asker: Option<IpAddr>,
        now: Instant,
    ) -> Result<(), Problem> {
        let what = format!("can't give client {client} its CHAP secret");
        if open_sessions > 0 {
            let why = format!("it is running: its disk has {open_sessions} sessions");
            return Err(Problem::unavailable(what, why).next(
                "wait until they have ended, at most half a minute after the machine was reset",
            ));
        }
        let given = lock(&self.given);
        let Some(last) = given.get(client).filter(|last| !last.used) else { return Ok(()) };
        let age = now.saturating_duration_since(last.at);
        if asker.is_some() && asker == last.to && age <= SAME_BOOT {
            return Ok(());
        }
        let to = last.to.map_or_else(|| "somebody".to_owned(), |to| to.to_string());
        let why =
            format!("{to} got it {} s ago, and nobody has logged in with it since", age.as_secs());
        Err(Problem::unavailable(what, why).next(format!(
            "if that was another machine, give the client another secret; if not, expect its boot again with \
             `perigee client bind {client}`"
        )))
    }

    /// To be called when a client was given its secret.
    pub fn given(&self, client: ClientName, volume: VolumeName, to: Option<IpAddr>) {
        lock(&self.given).insert(client, Given { volume, to, at: Instant::now(), used: false });
    }

    /// To be called when somebody has logged in to a volume.
    pub fn logged_in(&self, volume: &VolumeName) {
        for given in lock(&self.given).values_mut().filter(|given| given.volume == *volume) {
            given.used = true;
        }
    }

    /// To be called when a client's next boot is expected, or when it is no client any more.
    pub fn expect(&self, client: &ClientName) {
        lock(&self.given).remove(client);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_given_once_for_each_boot_that_is_expected() {
        let secrets = BootSecrets::default();
        let web: ClientName = "web".parse().expect("a name");
        let volume: VolumeName = "web.debian".parse().expect("a name");
        let [own, other] = ["10.0.0.7", "10.0.0.8"].map(|ip| Some(ip.parse().expect("an address")));
        secrets.check(&web, 0, own).expect("the first boot");
        secrets.given(web.clone(), volume.clone(), own);
        secrets.check(&web, 0, own).expect("its firmware asks again");
        let guessed = secrets.check(&web, 0, other).expect_err("another machine with this card");
        assert!(guessed.why.starts_with("10.0.0.7 got it"), "{guessed}");
        secrets.check(&web, 0, None).expect_err("nobody knows who asks");
        let late = Instant::now() + SAME_BOOT * 2;
        secrets.check_at(&web, 0, own, late).expect_err("that is another boot");
        secrets.logged_in(&volume);
        let running = secrets.check(&web, 1, own).expect_err("it is running");
        assert!(running.why.contains("it is running"), "{running}");
        secrets.check(&web, 0, own).expect("it has ended, and boots anew");
        secrets.given(web.clone(), volume, other);
        secrets.check_at(&web, 0, own, late).expect_err("somebody was first");
        secrets.expect(&web);
        secrets.check_at(&web, 0, own, late).expect("it was bound again");
    }
}
