//! What rented hosts cost the jobs there, and what plans say of hosts that could be rented.

use perigee_model::budget::Spending;
use perigee_model::guest::GuestBody;
use perigee_model::job::{Access, Job, JobSpec, JobState, Start};
use perigee_model::job_plan::JobPlan;
use perigee_model::read_ahead::PROXY_GENERATION;
use perigee_model::tenant::Quota;
use perigee_model::{JobId, SiteId, TenantName};
use perigee_planner::{PastRun, Traits};

use super::super::{finish, spec, vm_of};
use super::*;
use crate::cluster::history_cache::History;
use crate::planning::renting::{Kind, predict};
use crate::{accounts, jobs, planning};

/// A job without data that starts at the provider's site.
fn at_lab() -> JobSpec {
    let site = SiteId::new("lab").expect("a name");
    let start = Start::Site(site);
    JobSpec {
        start,
        root_bytes: Some(1 << 30),
        volumes: Vec::new(),
        timeout_s: Some(60),
        ..spec(Access::Read)
    }
}

fn anywhere() -> JobSpec {
    JobSpec { start: Start::Anywhere, ..at_lab() }
}

impl Rented {
    /// A rented host that takes jobs.
    async fn joined(&self, name: &str) -> FakeHost {
        self.rent(name).await;
        self.wait_for_state(name, RentalState::Starting).await;
        let host = self.join(name).await;
        self.wait_for_state(name, RentalState::Joined).await;
        host
    }

    async fn set_budget(&self, budget_month: Money) {
        let quota = Quota { budget_month: Some(budget_month), ..Quota::default() };
        accounts::set_quota(&self.cluster, &TenantName::default(), quota).await.expect("a quota");
    }

    async fn wait_for_job(&self, id: &JobId, what: &str, is: impl Fn(&Job) -> bool) -> Job {
        wait_for(what, async || {
            let job = jobs::get(&self.cluster, id).await.expect("the job");
            is(&job).then_some(job)
        })
        .await
    }

    fn spending(&self) -> Spending {
        self.cluster.ledger.spending(Some(&TenantName::default()))
    }

    async fn plan(&self, spec: &JobSpec) -> JobPlan {
        rentals::plan(&self.cluster, spec).await.expect("a plan")
    }

    /// With these prices in the controller's file.
    async fn up_with_prices(prices: &str) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("prices.yaml");
        std::fs::write(&file, prices).expect("write");
        let double = Double::default();
        let renting = Renting {
            providers: vec![Arc::new(double.clone())],
            budget: crate::Live::new(Some(BUDGET)),
        };
        let own_url = Some("https://127.0.0.1:7000".to_owned());
        let settings = Settings { own_url, renting, prices: Some(file), ..Settings::default() };
        let started = Supervisor::start_with(dir.path(), TIMING, Traffic::Plain, settings, None);
        let supervisor = started.await.expect("the controller starts");
        let cluster = Arc::clone(&supervisor.cluster);
        Self { dir, double, supervisor, cluster }
    }
}

#[tokio::test]
async fn a_job_at_a_rented_host_is_reserved_for_and_settled_by_the_rental_s_price() {
    let rented = Rented::up(TIMING).await;
    let host = rented.joined("rent-1").await;
    rented.set_budget(Money::from_micros(1)).await;
    let id = jobs::submit(&rented.cluster, at_lab()).await.expect("a job").id;
    let says = "of the tenant's $0.000001 for this month $0 are spent and $0 reserved";
    rented.wait_for_job(&id, "its reason", |job| job.reason.contains(says)).await;
    rented.set_budget(BUDGET).await;
    wait_for("the VM", async || host.inside().vms.contains_key(&vm_of(&id)).then_some(())).await;
    let cost = jobs::get(&rented.cluster, &id).await.expect("the job").cost.expect("a cost");
    // A dollar an hour, and a minute at least.
    assert!(cost.predicted.low >= Money::from_micros(1_000_000 / 60), "{cost:?}");
    assert_eq!(rented.spending(), Spending { spent: Money::ZERO, reserved: cost.predicted.high });
    host.say(&vm_of(&id), GuestBody::Started);
    rented.wait_for_job(&id, "it runs", |job| job.state == JobState::Running).await;
    finish(&host, &host, &vm_of(&id));
    let ended = rented.wait_for_job(&id, "its end", |job| job.state.is_final()).await;
    let spent = ended.cost.and_then(|cost| cost.spent).expect("what was spent");
    assert!(spent >= Money::from_micros(1_000_000 / 60), "{ended:?}");
    assert_eq!(rented.spending(), Spending { spent, reserved: Money::ZERO });
    // The host's own budget has the rental, and the tenant's the job.
    assert!(rented.get("rent-1").reserved > Money::from_micros(1_000_000));
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_rented_host_s_price_is_shown_with_its_rental_and_an_entry_of_the_file_wins() {
    let of_file = "hosts: {rent-2: {machine: $7/h, as-of: 2025-01-01, max-age: 3650d}}";
    let rented = Rented::up_with_prices(of_file).await;
    for name in ["rent-1", "rent-2"] {
        rented.joined(name).await;
    }
    let known = rented.cluster.prices.known(&rented.cluster.rentals, |_| None);
    let shown: Vec<(String, &str)> = known
        .prices
        .iter()
        .map(|one| (one.host.as_ref().expect("a host").to_string(), one.price.source.as_str()))
        .collect();
    assert_eq!(
        shown,
        [("rent-2".to_owned(), "prices.yaml"), ("rent-1".to_owned(), "rental rent-1")]
    );
    assert_eq!(known.prices[1].unknown, ["egress: the provider does not say it"]);
    let mut now = rented.cluster.prices.now(&rented.cluster.rentals).expect("prices");
    let site = SiteId::new("lab").expect("a name");
    let mut per_hour = |name: &str| {
        let price = now.of(&HostId::new(name).expect("a name"), &site).expect("a price");
        price.per_hour_micros.map(std::num::NonZeroU64::get)
    };
    assert_eq!((per_hour("rent-1"), per_hour("rent-2")), (Some(1_000_000), Some(7_000_000)));
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_plan_shows_what_could_be_rented_and_why_the_rest_is_not_considered() {
    let rented = Rented::up(TIMING).await;
    let plan = rented.plan(&anywhere()).await;
    assert!(plan.plan.options.is_empty(), "no host is there");
    let [one] = plan.rented.as_slice() else { panic!("{plan:?}") };
    assert_eq!((one.kind.as_str(), one.zone.as_str(), one.site.as_str()), ("m1", "a", "lab"));
    assert!(one.possible && one.cost.is_best_trade, "{one:?}");
    let machine = one.cost.items[0].cost.expect("known").expected;
    let seconds = Duration::from_secs_f64(one.ends().expected_s.ceil()).as_secs();
    assert!(machine >= Money::from_micros(seconds * 1_000_000 / 3600), "{one:?}");
    let not: Vec<(Option<&str>, &str)> =
        plan.not_considered.iter().map(|one| (one.kind.as_deref(), one.why.as_str())).collect();
    let old = (Some("old"), "price unknown: it is 31 days old, more than 30d");
    let unknown = (Some("unknown"), "price unknown: the provider does not say it");
    assert_eq!(not, [old, unknown]);
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_kind_that_was_started_before_starts_again_as_fast() {
    let rented = Rented::up(TIMING).await;
    let assumed = "assumed: no host of this kind was started yet";
    let before = rented.plan(&anywhere()).await;
    assert!(before.rented[0].reason.contains(assumed), "{before:?}");
    rented.joined("rent-1").await;
    let at_ms = |state| rented.get("rent-1").since_ms(state).expect("it was so");
    let took_ms = at_ms(RentalState::Joined) - at_ms(RentalState::Asked);
    let after = rented.plan(&anywhere()).await;
    let rent = &after.rented[0];
    assert!(!rent.reason.contains(assumed), "{rent:?}");
    // As the rule learns it: a second at least.
    let took_s = Duration::from_millis(took_ms).as_secs_f64().max(1.0);
    assert!((rent.wait.expected_s - took_s).abs() < 1e-9, "{rent:?} took {took_s} s");
    assert!((rent.wait.high_s - 2.0 * took_s).abs() < 1e-9, "one start says little: {rent:?}");
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_price_that_a_provider_said_long_ago_is_not_known() {
    let double = Double::default();
    double.inside().offered_days_ago = 40;
    let rented = Rented::up_with(TIMING, double).await;
    let problem = rentals::plan(&rented.cluster, &anywhere()).await.expect_err("nothing is there");
    assert_eq!(problem.kind, ProblemKind::Unavailable);
    rented.supervisor.stop().await;
    let rented = Rented::up(TIMING).await;
    rented.double.inside().offered_days_ago = 40;
    // While it is rented that counts.
    rented.double.inside().price_age_max_s = Some(90 * 86_400);
    rented.joined("rent-1").await;
    rented.double.inside().price_age_max_s = None;
    let too_old = async || {
        let plan = rented.plan(&anywhere()).await;
        // What it has said a moment before may count for a moment.
        plan.rented.is_empty().then_some(plan)
    };
    let plan = wait_for("a plan with what it says now", too_old).await;
    let why = &plan.not_considered[0].why;
    assert!(why.starts_with("price unknown: it is ") && why.ends_with("more than 30d"), "{why}");
    let cost = plan.plan.options[0].cost.as_ref().expect("a cost");
    assert_eq!(cost.total, None, "nor does it cost nothing where it was rented");
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_provider_s_own_age_counts_for_its_offers_and_for_its_hosts() {
    let double = Double::default();
    double.inside().offered_days_ago = 40;
    double.inside().price_age_max_s = Some(90 * 86_400);
    let rented = Rented::up_with(TIMING, double).await;
    rented.joined("rent-1").await;
    let plan = rented.plan(&anywhere()).await;
    assert!(plan.rented.iter().any(|one| one.possible), "{plan:?}");
    let cost = plan.plan.options[0].cost.as_ref().expect("a cost");
    assert!(cost.total.is_some(), "{cost:?}");
    let known = rented.cluster.prices.known(&rented.cluster.rentals, |_| None);
    assert!(known.prices[0].price.per_hour_micros.is_some(), "{known:?}");
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_provider_that_does_not_answer_is_named_and_its_late_answer_serves_the_next_plan() {
    let patient = RentalTiming { answer: PATIENCE, ..TIMING.rentals };
    let rented = Rented::up(Timing { rentals: patient, ..TIMING }).await;
    rented.joined("rent-1").await;
    rented.double.inside().hangs_offers = true;
    let late = async || {
        let asked = std::time::Instant::now();
        let plan = rented.plan(&anywhere()).await;
        assert!(asked.elapsed() < PATIENCE / 2, "{:?}", asked.elapsed());
        // What it has said a moment before may count for a moment.
        plan.rented.is_empty().then_some(plan)
    };
    let plan = wait_for("a plan without its answer", late).await;
    assert!(!plan.plan.options.is_empty(), "{plan:?}");
    let [one] = plan.not_considered.as_slice() else { panic!("{plan:?}") };
    assert_eq!((one.provider.as_str(), one.kind.as_ref()), ("lab", None));
    assert!(one.why.contains("has not answered for 3 s"), "{one:?}");
    rented.double.inside().hangs_offers = false;
    let answered = async || {
        let plan = rented.plan(&anywhere()).await;
        (!plan.rented.is_empty()).then_some(())
    };
    wait_for("the late answer", answered).await;
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_panic_while_a_provider_is_asked_is_said_and_it_is_asked_again() {
    let rented = Rented::up(TIMING).await;
    rented.joined("rent-1").await;
    rented.double.inside().panics_at_offers = true;
    let says = async || {
        let plan = rented.plan(&anywhere()).await;
        let not = plan.not_considered.iter().find(|one| one.kind.is_none())?;
        Some(not.why.clone())
    };
    let why = wait_for("a plan without its answer", says).await;
    assert_eq!(why, "the controller has failed to ask: as the test says");
    rented.double.inside().panics_at_offers = false;
    let answered = async || {
        let plan = rented.plan(&anywhere()).await;
        (!plan.rented.is_empty()).then_some(())
    };
    wait_for("its answer", answered).await;
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn more_kinds_of_waiting_jobs_than_a_plan_predicts_make_the_wait_unknown_and_the_limit_is_named()
 {
    let rented = Rented::up(TIMING).await;
    let host = rented.joined("rent-1").await;
    let free = crate::cluster::capacity(&rented.cluster.hosts.report(&host.id).expect("a report"));
    let all = JobSpec { memory_bytes: free.memory_bytes, ..anywhere() };
    let of_kind = |number: usize| JobSpec { command: vec![format!("run-{number}")], ..all.clone() };
    // One runs, and 33 wait.
    for number in 0..34 {
        jobs::submit(&rented.cluster, of_kind(number)).await.expect("a job");
    }
    let says = async || {
        let wait = rented.plan(&all).await.waits.pop()?;
        wait.why.contains("33 kinds of jobs").then_some(wait)
    };
    let wait = wait_for("33 jobs that wait", says).await;
    assert!(wait.wait.is_none() && wait.why.contains("a plan predicts 32 of them"), "{wait:?}");
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_plan_says_for_what_a_host_without_room_is_waited_for() {
    let rented = Rented::up(TIMING).await;
    let host = rented.joined("rent-1").await;
    let mut vm = new_vm("rent-1");
    vm.volumes.clear();
    let free = crate::cluster::capacity(&rented.cluster.hosts.report(&host.id).expect("a report"));
    vm.memory_bytes = free.memory_bytes;
    persistent::create(&rented.cluster, vm, "ann".to_owned()).await.expect("a VM");
    wait_for("the VM", async || (!host.inside().vms.is_empty()).then_some(())).await;
    let plan = rented.plan(&anywhere()).await;
    let [wait] = plan.waits.as_slice() else { panic!("{plan:?}") };
    assert_eq!((wait.host.as_str(), wait.wait), ("rent-1", None));
    assert!(wait.why.contains("a VM is there whose end is not known"), "{wait:?}");
    assert!(plan.ends(&plan.plan.options[0]).is_none(), "{plan:?}");
    assert!(!plan.plan.options[0].cost.as_ref().expect("a cost").is_best_trade, "{plan:?}");
    assert!(plan.rented[0].cost.is_best_trade, "{plan:?}");
    let mut next = new_vm("rent-1");
    next.name = "next".parse().expect("a name");
    next.volumes.clear();
    next.memory_bytes = free.memory_bytes;
    persistent::create(&rented.cluster, next, "ann".to_owned()).await.expect("a VM");
    let waits = async || (!rented.cluster.index.waiting().is_empty()).then_some(());
    wait_for("the next VM to wait", waits).await;
    let wait = rented.plan(&anywhere()).await.waits.remove(0);
    assert!(wait.wait.is_none() && wait.why.contains("or comes there first"), "{wait:?}");
    rented.supervisor.stop().await;
}

/// A run of 300 s.
fn past_run(traits: Traits) -> PastRun {
    PastRun {
        traits,
        host: HostId::new("rent-1").expect("a name"),
        moved: false,
        boot_s: 1.0,
        wall_s: 300.0,
        cpu_s: 290.0,
        run_delay_s: None,
        busy_s: 0.0,
        local_io_s: 0.0,
        network_s: 0.0,
        volumes: Vec::new(),
        replayed: None,
        distance_changed: false,
        proxy_generation: PROXY_GENERATION,
    }
}

#[tokio::test]
async fn a_host_s_jobs_and_those_that_wait_are_waited_for_as_long_as_they_are_predicted_to_take() {
    let rented = Rented::up(TIMING).await;
    let host = rented.joined("rent-1").await;
    let free = crate::cluster::capacity(&rented.cluster.hosts.report(&host.id).expect("a report"));
    let wanted = JobSpec { memory_bytes: free.memory_bytes, timeout_s: None, ..anywhere() };
    let traits = planning::prepare(&rented.cluster, &wanted).await.expect("facts").job.traits;
    let history = History { runs: vec![past_run(traits); 3], ..History::default() };
    let key = planning::history_key(&wanted);
    rented.cluster.history_cache.set_history(&key, Arc::new(history));
    let id = jobs::submit(&rented.cluster, wanted.clone()).await.expect("a job").id;
    wait_for("the VM", async || host.inside().vms.contains_key(&vm_of(&id)).then_some(())).await;
    let known = async || {
        let plan = rented.plan(&wanted).await;
        plan.waits[0].wait.is_some().then_some(plan)
    };
    let plan = wait_for("a wait that is known", known).await;
    let first = plan.waits[0].wait.expect("known");
    assert_eq!(plan.waits[0].why, "waits for those that run there");
    assert!(first.low_s > 0.0 && (150.0..400.0).contains(&first.expected_s), "{first:?}");
    let ends = plan.ends(&plan.plan.options[0]).expect("known");
    assert!(ends.expected_s > 450.0 && ends.high_s > ends.expected_s, "{ends:?}");
    let rent = &plan.rented[0];
    assert!(rent.cost.is_best_trade && rent.ends().expected_s < ends.expected_s, "{rent:?}");
    assert!(rent.reason.contains("sooner than beside at rent-1"), "{rent:?}");
    // One more waits.
    jobs::submit(&rented.cluster, wanted.clone()).await.expect("a job");
    let queued = async || {
        let wait = rented.plan(&wanted).await.waits.remove(0);
        (wait.why == "waits for 1 job, and for those that run there").then_some(wait)
    };
    let second = wait_for("the second one to wait", queued).await.wait.expect("known");
    assert!(second.expected_s > first.expected_s + 250.0, "{second:?} after {first:?}");
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn the_link_of_a_site_is_known_when_its_rented_host_is_gone() {
    let rented = Rented::up(TIMING).await;
    let own = FakeHost::start("home1", "home").await;
    hosts::register(&rented.cluster, &own.id, own.addresses.clone()).await.expect("it registers");
    let host = rented.joined("rent-1").await;
    let between = async || {
        rented.cluster.links.get(&host.id, &own.id)?;
        rented.cluster.links.get(&own.id, &host.id).map(drop)
    };
    wait_for("the link", between).await;
    rented.end("rent-1", false).await;
    rented.goes_down_with_instance(&host).await;
    rented.wait_for_state("rent-1", RentalState::Gone).await;
    assert_eq!(rented.cluster.links.get(&host.id, &own.id).map(drop), None);
    let sites = rented.cluster.links.of_sites();
    let name = |site: &str| SiteId::new(site).expect("a name");
    assert!(sites.iter().any(|(of, _)| *of == (name("lab"), name("home"))), "{sites:?}");
    let offer = double::offer("m1", "a", false);
    let kind = Kind { provider: "lab".to_owned(), offer, site: name("lab") };
    let (_, assumed) = predict(&rented.cluster, &[], &[kind]).await;
    assert!(assumed.is_empty(), "the rule that rents hosts knows it too: {assumed:?}");
    rented.supervisor.stop().await;
}
