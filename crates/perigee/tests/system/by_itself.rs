//! The cluster rents a host by itself for jobs that wait, runs one there, and gives the host back.

use std::time::Duration;

use perigee_lab::{Definition, LabId, SiteDef, own_cpus};
use perigee_model::HostId;
use perigee_model::job::{Job, JobState};
use perigee_model::money::Money;
use perigee_model::rental::Rental;
use perigee_model::rental::states::RentalState;
use perigee_model::renting::{RENTED_BY_RULE, Renting};

use super::{Checked, System, ensure, failed, host, until_within, with_system_of};

/// As many as the own host, which has room for one of them at a time, needs some quarter of an hour for: a request that fails at first is made
/// again after five minutes.
const JOBS: usize = 100;

/// A machine that boots and a job's guest that boots, without KVM and beside other tests.
const PATIENCE: Duration = Duration::from_secs(900);

/// One own host with one CPU, and machines like that for $20 an hour: so long as a start takes, twice that it stays idle.
fn definition() -> Definition {
    let one_site = SiteDef { name: "home".parse().expect("a name"), hosts: vec![host("home1")] };
    let settings = perigee_lab::wan::LinkSettings::of_rtt_us(0);
    let mut definition = Definition::new(LabId::random(), vec![one_site], settings);
    let own = own_cpus().into_iter().next().expect("this test has a CPU");
    definition.cpus = [(host("home1"), vec![own])].into();
    definition.rent.boot_s = 1;
    definition.rent.kinds.truncate(1);
    for kind in &mut definition.rent.kinds {
        (kind.price, kind.spot_price) = (Money::from_micros(20_000_000), None);
        kind.memory_bytes = 4 << 30;
    }
    definition
}

impl System {
    async fn rental_in(&self, state: RentalState) -> Checked<Rental> {
        self.rental(&format!("that is {state}"), |rental| rental.state == state).await
    }

    async fn rental(&self, what: &str, is_it: impl Fn(&Rental) -> bool) -> Checked<Rental> {
        // What was said of the queue, in its order.
        let mut said: Vec<String> = Vec::new();
        let what = format!("a rental {what}");
        let found = until_within(PATIENCE, &what, async || {
            let all: Vec<Rental> = self.get("/v1/rentals").await?;
            if let Some(rental) = all.iter().find(|rental| is_it(rental)) {
                return Ok(Some(rental.clone()));
            }
            let shown: Renting = self.get("/v1/renting").await?;
            let states: Vec<RentalState> = all.iter().map(|rental| rental.state).collect();
            let jobs: Vec<Job> = self.get("/v1/jobs").await?;
            let waiting = jobs.iter().filter(|job| !job.state.is_final());
            let mut waits: Vec<&str> = waiting.map(|job| job.reason.as_str()).collect();
            waits.sort_unstable();
            waits.dedup();
            let ended = jobs.iter().filter(|job| job.state.is_final()).count();
            let why = format!(
                "rentals {states:?}, {ended} jobs have ended, the others: {waits:?}; {} {:?}",
                shown.nothing_because, shown.not_known
            );
            if said.last() != Some(&why) {
                said.push(why);
            }
            Ok(None)
        });
        let found = found.await;
        found.map_err(|problem| failed(format!("{problem}: {}", said.join("\n"))))
    }

    async fn ends_at(&self, rented: &HostId) -> Checked<Job> {
        until_within(PATIENCE, "a job's end at the rented host", async || {
            let jobs: Vec<Job> = self.get("/v1/jobs").await?;
            let is_done =
                |job: &Job| job.state == JobState::Succeeded && job.host.as_ref() == Some(rented);
            let failed = jobs.iter().find(|job| job.state == JobState::Failed);
            ensure!(failed.is_none(), "{failed:?}");
            Ok(jobs.into_iter().find(is_done))
        })
        .await
    }
}

#[test]
fn jobs_that_wait_have_a_host_rented_run_there_and_the_host_is_given_back() {
    with_system_of(definition(), async |system| {
        let set = system.perigee(&["rent", "mode", "on", "--most", "1"]);
        ensure!(set.status.success(), "{set:?}");
        for _ in 0..JOBS {
            system
                .submit(
                    "name: wait\nimage: debian\nmemory: 256MiB\ncpus: 3\ntimeout: 10m\n\
                     waiting-costs: $20/h\nplacement: {move: never}\ncommand: sleep 1",
                )
                .await?;
        }
        // It may have joined before anybody looks.
        let rented = system.rental("by the rule", |rental| rental.rented_for.is_some()).await?;
        ensure!(rented.by == RENTED_BY_RULE, "{rented:?}");
        let explained = system.perigee(&["rent", "explain", rented.id.as_str()]);
        let said = String::from_utf8_lossy(&explained.stdout).into_owned();
        ensure!(said.contains("of the queue go there"), "{said}");
        let joined = system.rental_in(RentalState::Joined).await?;
        let job = system.ends_at(&joined.host).await?;
        eprintln!("job {} ran at {}", job.id, joined.host);
        let jobs: Vec<Job> = system.get("/v1/jobs").await?;
        for job in jobs.iter().filter(|job| !job.state.is_final()) {
            let path = format!("/v1/jobs/{}/cancel", job.id);
            // It may end just before.
            system.post::<serde_json::Value>(&path, &serde_json::json!({})).await.ok();
        }
        let gone = system.rental_in(RentalState::Gone).await?;
        let why = gone.ends_because.clone().unwrap_or_default();
        ensure!(why.starts_with(RENTED_BY_RULE) && why.contains("idle for"), "{gone:?}");
        ensure!(gone.first_job_ms.is_some() && gone.spent > Some(Money::ZERO), "{gone:?}");
        let all: Vec<Rental> = system.get("/v1/rentals").await?;
        ensure!(all.len() == 1, "one need has one host: {all:?}");
        Ok(())
    });
}
