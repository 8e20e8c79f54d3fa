//! The cluster rents hosts by itself, gives them back, and says why.

use std::collections::BTreeSet;

use perigee_model::auto_mode::AutoMode;
use perigee_model::budget::MoneyRules;
use perigee_model::drain::DrainHost;
use perigee_model::guest::GuestBody;
use perigee_model::job::{Access, JobSpec, JobState, Start};
use perigee_model::rental::EndedBy;
use perigee_model::renting::{
    RENTED_BY_RULE, RentAction, RentDecision, Renting as Shown, SetRenting,
};
use perigee_model::{JobId, VmId};
use perigee_planner::rent::Refusal;

use super::super::queue::unreachable;
use super::super::{Lab, finish, spec};
use super::*;

/// An own host has room for one of them at a time.
const JOBS: usize = 24;

/// A lab with one own host, and a provider.
struct ByItself {
    lab: Lab,
    double: Double,
}

fn settings(double: &Double, budget: Money) -> Settings {
    let renting = Renting {
        providers: vec![Arc::new(double.clone())],
        budget: crate::Live::new(Some(budget)),
    };
    let own_url = Some("https://127.0.0.1:7000".to_owned());
    Settings { own_url, renting, ..Settings::default() }
}

/// A job that fills an own host.
fn large(per_hour: Option<u64>) -> JobSpec {
    let waiting_costs_per_hour = per_hour.map(|dollars| Money::from_micros(dollars * 1_000_000));
    JobSpec {
        start: Start::Anywhere,
        memory_bytes: 900 << 20,
        timeout_s: Some(600),
        volumes: Vec::new(),
        money: MoneyRules { waiting_costs_per_hour, ..MoneyRules::default() },
        ..spec(Access::Read)
    }
}

impl ByItself {
    async fn up(budget: Money) -> Self {
        let double = Double::default();
        let lab = Lab::up_with(settings(&double, budget)).await;
        unreachable(&lab, &lab.cloud).await;
        double.inside().cluster = Arc::downgrade(&lab.cluster);
        Self { lab, double }
    }

    async fn set(&self, mode: AutoMode, most: u32) {
        let (mode, most) = (Some(mode), Some(most));
        let ask = SetRenting { mode, most, ..SetRenting::default() };
        rentals::set_renting(&self.lab.cluster, ask).await.expect("it is set");
    }

    async fn submit(&self, per_hour: Option<u64>) -> Vec<JobId> {
        let mut jobs = Vec::new();
        for _ in 0..JOBS {
            jobs.push(self.lab.submit(large(per_hour)).await);
        }
        jobs
    }

    fn shown(&self) -> Shown {
        self.lab.cluster.renter.shown()
    }

    fn all(&self) -> Vec<Rental> {
        self.lab.cluster.rentals.all()
    }

    /// The controller is killed, and started again.
    async fn restart(&mut self, budget: Money) {
        self.restart_with(budget, TIMING).await;
    }

    async fn restart_with(&mut self, budget: Money, timing: Timing) {
        self.lab.supervisor.stop().await;
        let settings = settings(&self.double, budget);
        let dir = self.lab.dir.path();
        let started = Supervisor::start_with(dir, timing, Traffic::Plain, settings, None);
        self.lab.supervisor = started.await.expect("it starts again");
        self.lab.cluster = Arc::clone(&self.lab.supervisor.cluster);
        self.double.inside().cluster = Arc::downgrade(&self.lab.cluster);
    }

    /// So many more looks.
    async fn looks(&self, more: u64) {
        let rounds = || {
            let all = self.lab.cluster.tasks.all();
            let task = all.into_iter().find(|task| task.name == "the renting of hosts");
            task.map_or(0, |task| task.rounds)
        };
        let until = rounds() + more;
        wait_for("looks", async || (rounds() >= until).then_some(())).await;
    }

    /// The first rental that is so.
    async fn rental(&self, what: &str, is: impl Fn(&Rental) -> bool) -> Rental {
        wait_for(what, async || self.all().into_iter().find(|rental| is(rental))).await
    }

    async fn joins(&self, rental: &Rental) -> FakeHost {
        let host = FakeHost::start(rental.host.as_str(), rental.site.as_str()).await;
        let registered = hosts::register(&self.lab.cluster, &host.id, host.addresses.clone());
        registered.await.expect("it registers");
        host
    }

    /// Each VM runs to its end as soon as it is there. Returns those that were at the rented host.
    async fn run_all(&self, rented: &FakeHost, jobs: &[JobId]) -> Vec<VmId> {
        let (mut ended, mut there): (Vec<VmId>, Vec<VmId>) = (Vec::new(), Vec::new());
        let begun = std::time::Instant::now();
        loop {
            for host in [rented, &self.lab.home] {
                let vms: Vec<VmId> = host.inside().vms.keys().cloned().collect();
                for vm in vms.into_iter().filter(|vm| !ended.contains(vm)).collect::<Vec<_>>() {
                    host.say(&vm, GuestBody::Started);
                    finish(host, host, &vm);
                    there.extend((host.id == rented.id).then(|| vm.clone()));
                    ended.push(vm);
                }
            }
            let mut is_over = true;
            for job in jobs {
                is_over &= self.lab.job(job).await.state == JobState::Succeeded;
            }
            if is_over {
                return there;
            }
            assert!(begun.elapsed() < PATIENCE, "the jobs do not end: {:?}", self.shown());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

fn is_given_back(rental: &Rental) -> bool {
    let why = rental.ends_because.clone().unwrap_or_default();
    why.starts_with(RENTED_BY_RULE) && why.contains("idle for")
}

fn rents(shown: &Shown) -> Vec<&RentDecision> {
    shown.decisions.iter().filter(|one| one.action == RentAction::Rent).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_is_rented_for_jobs_that_wait_runs_them_and_is_given_back_when_it_is_idle() {
    let rented = ByItself::up(BUDGET).await;
    rented.set(AutoMode::On, 1).await;
    let jobs = rented.submit(Some(100)).await;
    let starting = |rental: &Rental| rental.state == RentalState::Starting;
    let rental = rented.rental("a rented host that starts", starting).await;
    assert_eq!(rental.by, RENTED_BY_RULE);
    let rented_for = rental.rented_for.clone().expect("it says for which jobs");
    assert!(rented_for.jobs.iter().all(|job| jobs.contains(job)), "{rented_for:?}");
    assert!(rented_for.saves > rented_for.costs && rented_for.why.contains('$'), "{rented_for:?}");
    // The starting host counts as room.
    rented.looks(5).await;
    let host = rented.joins(&rental).await;
    let there = rented.run_all(&host, &jobs).await;
    assert!(!there.is_empty(), "no job ran at the rented host");
    rented.looks(2).await;
    let joined = rented.rental("it to stay for a while", |one| one.id == rental.id).await;
    assert_eq!((joined.state, joined.ends_because), (RentalState::Joined, None));
    assert!(joined.first_job_ms.is_some(), "its start is learned");
    let planned_at = async |start: Start| {
        let spec = JobSpec { start, ..large(None) };
        let plan = rentals::plan(&rented.lab.cluster, &spec).await.expect("a plan");
        let options = plan.plan.options.into_iter();
        options.map(|option| option.start).collect::<BTreeSet<HostId>>()
    };
    let own = [rented.lab.home.id.clone()].into();
    assert_eq!(planned_at(Start::Anywhere).await, own, "the rented one is for those that wait");
    let named = planned_at(Start::Host(host.id.clone())).await;
    assert!(named.contains(&host.id), "its file names it: {named:?}");
    rented.lab.cluster.clock.pretend_passed(Duration::from_secs(3600));
    let back = rented.rental("it to be given back", is_given_back).await;
    assert_eq!(back.id, rental.id);
    wait_for("its instance to end", async || rented.double.alive().is_empty().then_some(())).await;
    host.inside().down = true;
    rented.rental("the end", |one| one.state == RentalState::Gone).await;
    assert_eq!((rented.double.made(), rented.all().len()), (1, 1), "it was asked for once");
    let shown = rented.shown();
    let kept: Vec<RentAction> = shown.last.iter().map(|one| one.action).collect();
    assert_eq!(kept, [RentAction::Rent, RentAction::GiveBack], "{shown:?}");
    assert_eq!((shown.starts.len(), shown.starts[0].kind.as_str()), (1, "m1"), "{shown:?}");
    let wrong = rented.double.inside().wrong.clone();
    assert!(wrong.is_empty(), "{wrong:?}");
    rented.lab.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn advice_says_what_would_be_rented_and_rents_nothing() {
    let rented = ByItself::up(BUDGET).await;
    assert_eq!(rented.shown().settings.mode, AutoMode::Advise, "nobody has said anything");
    rented.submit(Some(100)).await;
    let advised = async || Some(rented.shown()).filter(|shown| !rents(shown).is_empty());
    let shown = wait_for("advice", advised).await;
    let would = rents(&shown)[0];
    assert!(!would.done && would.rental.is_none() && would.kind == "m1", "{would:?}");
    rented.looks(5).await;
    assert!(rented.all().is_empty() && rented.double.inside().asked.is_empty());
    rented.set(AutoMode::Off, 4).await;
    let off = async || Some(rented.shown()).filter(|shown| shown.decisions.is_empty());
    assert_eq!(wait_for("silence", off).await.nothing_because, "the mode is off");
    rented.lab.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_for_which_waiting_costs_nothing_rent_nothing_until_an_admin_prices_their_waiting() {
    let rented = ByItself::up(BUDGET).await;
    rented.set(AutoMode::On, 1).await;
    rented.submit(None).await;
    let says = async || {
        let shown = rented.shown();
        shown.nothing_because.contains("waiting costs none of them anything").then_some(())
    };
    wait_for("the reason", says).await;
    assert!(rented.all().is_empty());
    let waiting_costs_per_hour = Some(Money::from_micros(100_000_000));
    let ask = SetRenting { waiting_costs_per_hour, ..SetRenting::default() };
    rentals::set_renting(&rented.lab.cluster, ask).await.expect("it is set");
    rented.rental("a host", |rental| rental.rented_for.is_some()).await;
    rented.lab.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_enough_of_the_budget_nothing_is_rented_and_that_is_said() {
    let rented = ByItself::up(Money::from_micros(2_000)).await;
    rented.set(AutoMode::On, 4).await;
    rented.submit(Some(100)).await;
    let says = async || rented.shown().nothing_because.contains("of the budget").then_some(());
    wait_for("the reason", says).await;
    rented.looks(5).await;
    assert!(rented.all().is_empty() && rented.double.inside().asked.is_empty());
    rented.lab.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_refused_is_rented_elsewhere() {
    let rented = ByItself::up(BUDGET).await;
    rented.double.inside().does = [Does::Refuses(CloudErrorKind::NoCapacity)].into();
    rented.set(AutoMode::On, 1).await;
    rented.submit(Some(100)).await;
    let refused = rented.rental("a refusal", |rental| rental.refused.is_some()).await;
    let starts = |rental: &Rental| rental.state == RentalState::Starting;
    let other = rented.rental("another one", starts).await;
    let place = |rental: &Rental| (rental.offer.zone.clone(), rental.offer.spot);
    assert_ne!(place(&refused), place(&other));
    rented.lab.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_a_quota_is_used_up_no_other_kind_or_zone_that_counts_in_it_is_asked_for() {
    let rented = ByItself::up(BUDGET).await;
    rented.double.inside().quota = Some("standard".to_owned());
    rented.double.inside().does = [Does::Refuses(CloudErrorKind::Quota); 3].into();
    rented.set(AutoMode::On, 1).await;
    rented.submit(Some(100)).await;
    let asked = || {
        let asked = rented.double.inside().asked.clone();
        asked.into_iter().map(|new| (new.zone, new.spot)).collect::<BTreeSet<_>>()
    };
    // Spot hosts have a quota of their own.
    wait_for("two requests", async || (asked().len() == 2).then_some(())).await;
    rented.looks(5).await;
    let both: BTreeSet<(String, bool)> = [false, true].map(|spot| ("a".to_owned(), spot)).into();
    assert_eq!(asked(), both);
    assert_eq!(rented.double.inside().asked.len(), 2);
    rented.lab.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_provider_that_does_not_answer_gives_nothing_back_and_a_person_s_host_stays() {
    let rented = ByItself::up(BUDGET).await;
    rented.set(AutoMode::On, 4).await;
    rentals::rent(&rented.lab.cluster, ask("rent-ann"), "ann".to_owned()).await.expect("a rental");
    let anns = rented.rental("it to start", |one| one.state == RentalState::Starting).await;
    let host = rented.joins(&anns).await;
    rented.rental("it to join", |one| one.state == RentalState::Joined).await;
    rented.double.inside().hides_offers = true;
    let not_known = async || (!rented.shown().not_known.is_empty()).then_some(());
    wait_for("that the offers are not known", not_known).await;
    rented.lab.cluster.clock.pretend_passed(Duration::from_secs(7200));
    rented.looks(10).await;
    let still = rented.rental("it", |one| one.id == anns.id).await;
    assert_eq!((still.state, still.ends_because), (RentalState::Joined, None));
    assert!(rented.shown().decisions.is_empty(), "{:?}", rented.shown());
    // A job that says nothing of money runs there as at an own host.
    let start = Start::Site(anns.site.clone());
    let job = rented.lab.submit(JobSpec { start, ..large(None) }).await;
    let runs = rented.lab.wait_for_job(&job, "a host", |job| job.host.is_some()).await;
    assert_eq!(runs.host, Some(host.id.clone()));
    rented.lab.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_person_ends_what_the_rule_has_rented_and_the_rule_rents_none_at_once() {
    let rented = ByItself::up(BUDGET).await;
    rented.set(AutoMode::On, 1).await;
    rented.submit(Some(100)).await;
    let rental = rented.rental("a host", |one| one.state == RentalState::Starting).await;
    let (by, now) = ("ann".to_owned(), EndRental::default());
    rentals::end(&rented.lab.cluster, &rental.id, by, now).await.expect("it ends");
    let gone = rented.rental("its end", |one| one.state == RentalState::Gone).await;
    assert_eq!(gone.ends_because.as_deref(), Some("ann gave it back"));
    rented.looks(5).await;
    let place = |rental: &Rental| (rental.offer.zone.clone(), rental.offer.spot);
    let again = rented.all().iter().filter(|one| place(one) == place(&rental)).count();
    assert_eq!(again, 1, "the same was rented again at once: {:?}", rented.all());
    rented.lab.supervisor.stop().await;
}

/// A host of the rule at which all jobs have ended.
async fn idle() -> (ByItself, Rental, FakeHost) {
    let rented = ByItself::up(BUDGET).await;
    rented.set(AutoMode::On, 1).await;
    let jobs = rented.submit(Some(100)).await;
    let starting = |rental: &Rental| rental.state == RentalState::Starting;
    let rental = rented.rental("a rented host that starts", starting).await;
    let host = rented.joins(&rental).await;
    rented.run_all(&host, &jobs).await;
    (rented, rental, host)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_provider_that_hangs_holds_up_no_look_and_an_idle_host_is_given_back_meanwhile() {
    let (mut rented, rental, host) = idle().await;
    let patient = RentalTiming { answer: 10 * PATIENCE, ..TIMING.rentals };
    rented.double.inside().hangs_offers = true;
    rented.restart_with(BUDGET, Timing { rentals: patient, ..TIMING }).await;
    let late = async || {
        let not_known = rented.shown().not_known;
        not_known.iter().any(|why| why.contains("has not answered for 3 s")).then_some(())
    };
    wait_for("that the offers are not known", late).await;
    rented.looks(1).await;
    rented.lab.cluster.clock.pretend_passed(Duration::from_secs(3600));
    let back = rented.rental("it to be given back", is_given_back).await;
    assert_eq!((back.id, back.ended_by), (rental.id, Some(EndedBy::Rule)));
    drop(host);
    rented.lab.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_is_full_when_a_host_is_to_be_given_back_keeps_the_host_only_until_there_is_room()
 {
    let (rented, rental, _host) = idle().await;
    let other = rusqlite::Connection::open(rented.lab.dir.path().join("state.db")).expect("open");
    other.busy_timeout(PATIENCE).expect("patience");
    let full =
        "CREATE TRIGGER full_1 BEFORE INSERT ON entries WHEN NEW.key LIKE 'intents/rentals/%'
                BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END;";
    other.execute_batch(full).expect("the disk fills up");
    rented.lab.cluster.clock.pretend_passed(Duration::from_secs(3600));
    let says = async || {
        let all = rented.lab.cluster.tasks.all();
        let task = all.into_iter().find(|task| task.name == "the renting of hosts")?;
        task.problem.contains("full").then_some(())
    };
    wait_for("the problem", says).await;
    assert_eq!(rented.lab.cluster.rentals.get(&rental.id).expect("it").ends_because, None);
    other.execute_batch("DROP TRIGGER full_1").expect("there is room again");
    let back = rented.rental("it to be given back", is_given_back).await;
    assert_eq!(back.id, rental.id);
    rented.lab.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rented_host_that_a_person_drains_is_no_room_and_is_given_back() {
    let (rented, rental, host) = idle().await;
    let drain = DrainHost { dry_run: false };
    let by = "ann".to_owned();
    crate::drain::drain(&rented.lab.cluster, &host.id, by, drain).await.expect("it is drained");
    rented.looks(2).await;
    let basis = rented.lab.cluster.renter.basis();
    let snapshot = crate::planning::renting::snapshot(&rented.lab.cluster, &basis);
    // It costs money, also while it does not answer.
    let there = snapshot.hosts.iter().find(|one| one.host == host.id).expect("it counts");
    assert_eq!((there.cpus, there.ready_in_s), (0, 0.0), "{there:?}");
    rented.lab.cluster.clock.pretend_passed(Duration::from_secs(3600));
    let back = rented.rental("it to be given back", is_given_back).await;
    assert_eq!(back.id, rental.id);
    rented.lab.supervisor.stop().await;
}

/// The rule knew nothing of that, and kept the host for jobs that never came.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rented_host_that_can_start_none_of_the_waiting_jobs_is_not_kept_for_them() {
    let rented = ByItself::up(BUDGET).await;
    rented.set(AutoMode::On, 1).await;
    rented.submit(Some(100)).await;
    let starting = |rental: &Rental| rental.state == RentalState::Starting;
    let rental = rented.rental("a rented host that starts", starting).await;
    let host = FakeHost::start(rental.host.as_str(), rental.site.as_str()).await;
    host.inside().starts_no_vm = true;
    let registered = hosts::register(&rented.lab.cluster, &host.id, host.addresses.clone());
    registered.await.expect("it registers");
    let renter = &rented.lab.cluster.renter;
    let all_refused = async || {
        let (wait, refused) = (renter.for_room(), renter.refused_jobs());
        (!wait.is_empty() && wait.iter().all(|job| refused.contains(job))).then_some(())
    };
    wait_for("all jobs that wait to be refused there", all_refused).await;
    rented.lab.cluster.clock.pretend_passed(Duration::from_secs(3600));
    let back = rented.rental("it to be given back", is_given_back).await;
    assert_eq!((back.id, back.first_job_ms), (rental.id, None));
    rented.lab.supervisor.stop().await;
}

/// The jobs end elsewhere before the host comes, and then the same jobs wait again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_at_which_no_job_has_run_is_not_rented_again_at_once() {
    let rented = ByItself::up(BUDGET).await;
    rented.set(AutoMode::On, 1).await;
    let jobs = rented.submit(Some(100)).await;
    let starting = |rental: &Rental| rental.state == RentalState::Starting;
    let rental = rented.rental("a rented host that starts", starting).await;
    for job in &jobs {
        crate::jobs::intend(&rented.lab.cluster, job, |intent| intent.cancel = true)
            .await
            .expect("it is cancelled");
    }
    let _host = rented.joins(&rental).await;
    let joined = |one: &Rental| {
        one.id == rental.id && one.state == RentalState::Joined && one.found.is_some()
    };
    rented.rental("it to join, and to show what it is", joined).await;
    rented.lab.cluster.clock.pretend_passed(Duration::from_secs(3600));
    rented.rental("it to be given back", is_given_back).await;
    let refused = async || {
        let basis = rented.lab.cluster.renter.basis();
        let there = |one: &Refusal| one.kind == "lab/m1" && one.zone == rental.offer.zone;
        basis.rest.refusals.iter().find(|one| there(one)).cloned()
    };
    let refused = wait_for("that to be remembered", refused).await;
    assert_eq!(refused.times, 1, "{refused:?}");
    rented.lab.supervisor.stop().await;
}

/// The controller is killed instead of this write, and started again. Returns false if there were fewer writes.
async fn killed_at(of: &str, write: u64) -> bool {
    let mut rented = ByItself::up(BUDGET).await;
    // Nothing that writes is waited for after the cut: there it hangs.
    rented.set(AutoMode::Off, 1).await;
    rented.submit(Some(100)).await;
    let cut = rented.lab.cluster.records.counts.cut_at(of, write);
    rented.set(AutoMode::On, 1).await;
    let starts = |rental: &Rental| rental.state == RentalState::Starting;
    let is_there = async || (cut.is_reached() || rented.all().iter().any(starts)).then_some(());
    wait_for("a host, or the cut", is_there).await;
    let is_cut = cut.is_reached();
    if is_cut {
        rented.restart(BUDGET).await;
    }
    rented.rental("a host that starts", starts).await;
    rented.looks(5).await;
    assert_eq!(rented.double.alive().len(), 1, "{of} without write {write}: {:?}", rented.all());
    assert_eq!(rented.double.made(), 1, "{of} without write {write}");
    let wrong = rented.double.inside().wrong.clone();
    assert!(wrong.is_empty(), "{of} without write {write}: {wrong:?}");
    rented.lab.supervisor.stop().await;
    is_cut
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_while_it_rents_rents_one_host_for_one_need() {
    for (of, least) in [("rentals/", 2), ("renting/decisions", 1)] {
        let mut writes = 0;
        while killed_at(of, writes + 1).await {
            writes += 1;
        }
        assert!(writes >= least, "{of}: it was killed at {writes} writes only");
    }
}
