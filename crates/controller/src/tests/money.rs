//! Jobs at hosts that cost something: budgets, reservations, and what was spent.

use std::path::Path;
use std::time::Duration;

use perigee_model::budget::{MoneyRules, Spending};
use perigee_model::guest::GuestBody;
use perigee_model::job::{Access, Job, JobSpec, JobState, Restart, Start};
use perigee_model::money::{MICROS_MAX, Money};
use perigee_model::renting::SetRenting;
use perigee_model::tenant::Quota;
use perigee_model::{JobId, ProblemKind, TenantName};

use super::copies::wait_for_the_network;
use super::fake::FakeHost;
use super::queue::{finish_again, unreachable};
use super::{Lab, TIMING, finish, running_as, spec, vm_of, wait_for};
use crate::cluster::{Settings, Traffic};
use crate::supervisor::Supervisor;
use crate::{accounts, hosts, jobs, rentals};

/// $1 a second at the site `cloud`; the other site is the users' own.
pub(super) const PRICES: &str = "sites: {cloud: {machine: $3600/h, disk: $0.10/GiB-month, egress: $0.09/GiB, as-of: 2025-01-01, max-age: 3650d}}";

/// Each run costs $6, and some millionths for its disk.
const LEAST: &str = "sites: {cloud: {machine: $6/h, minimum: 1h, disk: $0.10/GiB-month, egress: $0.09/GiB, as-of: 2025-01-01, max-age: 3650d}}";

fn settings(dir: &Path) -> Settings {
    Settings { prices: Some(dir.join("prices.yaml")), ..Settings::default() }
}

async fn lab() -> Lab {
    lab_with(PRICES).await
}

pub(super) async fn lab_with(prices: &str) -> Lab {
    let dir = tempfile::tempdir().expect("tempdir");
    std::fs::write(dir.path().join("prices.yaml"), prices).expect("write");
    let settings = settings(dir.path());
    Lab::up_in(dir, settings).await
}

/// With a second host at the site that costs something.
async fn lab_with_two(prices: &str) -> (Lab, FakeHost) {
    let lab = lab_with(prices).await;
    let second = FakeHost::start("cloud2", "cloud").await;
    hosts::register(&lab.cluster, &second.id, second.addresses.clone()).await.expect("register");
    (lab, second)
}

impl Lab {
    async fn restart_with_prices(&mut self) {
        self.supervisor.stop().await;
        let settings = settings(self.dir.path());
        let started =
            Supervisor::start_with(self.dir.path(), TIMING, Traffic::Plain, settings, None);
        self.supervisor = started.await.expect("start again");
        self.cluster = std::sync::Arc::clone(&self.supervisor.cluster);
    }

    async fn set_budget(&self, budget_month: Option<Money>) {
        let quota = Quota { budget_month, ..Quota::default() };
        let tenant = TenantName::default();
        accounts::set_quota(&self.cluster, &tenant, quota).await.expect("a quota");
    }

    pub(super) fn spending(&self) -> Spending {
        self.cluster.ledger.spending(Some(&TenantName::default()))
    }

    async fn run_to_its_end(&self, id: &JobId) -> Job {
        let vm = vm_of(id);
        self.wait_for_vm(&self.cloud, &vm).await;
        self.cloud.say(&vm, GuestBody::Started);
        self.wait_for_state(id, JobState::Running).await;
        finish(&self.cloud, &self.cloud, &vm);
        self.wait_for_state(id, JobState::Succeeded).await
    }
}

/// A job that starts at the host that costs something, beside its data.
fn at_cloud(lab: &Lab) -> JobSpec {
    let start = Start::Host(lab.cloud.id.clone());
    JobSpec { start, root_bytes: Some(1 << 30), ..spec(Access::Read) }
}

/// A job without data that starts at the site that costs something, and anew if its host is lost.
fn starts_again() -> JobSpec {
    JobSpec {
        start: Start::Site("cloud".parse().expect("a name")),
        restart: Restart::OnHostFailure,
        timeout_s: Some(600),
        root_bytes: Some(1 << 30),
        volumes: Vec::new(),
        ..spec(Access::Read)
    }
}

/// The job's host, and the other one of the site.
async fn placed<'a>(lab: &'a Lab, second: &'a FakeHost, id: &JobId) -> [&'a FakeHost; 2] {
    let job = lab.wait_for_job(id, "its host", |job| job.host.is_some()).await;
    match job.host.as_ref() == Some(&lab.cloud.id) {
        true => [&lab.cloud, second],
        false => [second, &lab.cloud],
    }
}

async fn begins(lab: &Lab, host: &FakeHost, id: &JobId) {
    lab.wait_for_vm(host, &vm_of(id)).await;
    host.say(&vm_of(id), GuestBody::Started);
    lab.wait_for_state(id, JobState::Running).await;
}

fn dollars(n: u64) -> Money {
    Money::from_micros(n * 1_000_000)
}

#[tokio::test]
async fn a_job_over_the_month_s_budget_waits_with_its_reason_until_the_budget_is_raised() {
    let lab = lab().await;
    lab.set_budget(Some(dollars(1))).await;
    let id = lab.submit(at_cloud(&lab)).await;
    let says = "of the tenant's $1.00 for this month $0 are spent and $0 reserved";
    let waits = lab.wait_for_job(&id, "its reason", |job| job.reason.contains(says)).await;
    assert_eq!((waits.state, waits.cost), (JobState::Queued, None));
    assert_eq!(lab.spending(), Spending::default());
    lab.set_budget(Some(dollars(1_000_000))).await;
    lab.wait_for_vm(&lab.cloud, &vm_of(&id)).await;
    let cost = lab.job(&id).await.cost.expect("what is reserved");
    assert!(cost.predicted.high > dollars(1) && cost.spent.is_none(), "{cost:?}");
    let reserved = Spending { spent: Money::ZERO, reserved: cost.predicted.high };
    assert_eq!(lab.spending(), reserved);
    let ended = lab.run_to_its_end(&id).await;
    let spent = ended.cost.and_then(|cost| cost.spent).expect("what was spent");
    assert!(spent > Money::ZERO, "{ended:?}");
    assert_eq!(lab.spending(), Spending { spent, reserved: Money::ZERO });
    let score = async |wanted: bool| {
        crate::planning::score(&lab.cluster, |_| wanted, false).await.expect("a score").money
    };
    let is_in_range = (cost.predicted.low..=cost.predicted.high).contains(&spent);
    let money = score(true).await;
    assert_eq!((money.jobs, money.in_range), (1, u64::from(is_in_range)));
    assert!(money.median_error.is_some() && money.interval_score.is_some(), "{money:?}");
    assert_eq!(score(false).await.jobs, 0, "another tenant's");
}

#[tokio::test]
async fn a_job_over_its_own_budget_waits_and_one_at_the_user_s_own_host_costs_nothing() {
    let lab = lab().await;
    let rules = MoneyRules { budget: Some(dollars(1)), ..MoneyRules::default() };
    let id = lab.submit(JobSpec { money: rules, ..at_cloud(&lab) }).await;
    let says = "over the job's budget of $1.00";
    lab.wait_for_job(&id, "its reason", |job| job.reason.contains(says)).await;
    let own =
        JobSpec { volumes: Vec::new(), money: rules, name: "own".into(), ..spec(Access::Read) };
    let own = lab.submit(own).await;
    lab.wait_for_vm(&lab.home, &vm_of(&own)).await;
    let cost = lab.job(&own).await.cost.expect("a cost");
    assert_eq!(cost.predicted.high, Money::ZERO);
    assert_eq!(lab.job(&id).await.state, JobState::Queued);
}

/// The document of the API says that an amount has 64 bits with a sign, and larger ones were taken.
#[tokio::test]
async fn an_amount_that_the_api_has_no_number_for_is_refused_wherever_somebody_names_one() {
    let lab = lab().await;
    let most = Money::from_micros(MICROS_MAX);
    let asked = async |amount: Money| {
        let money = MoneyRules { budget: Some(amount), ..MoneyRules::default() };
        let job = jobs::submit(&lab.cluster, JobSpec { money, ..at_cloud(&lab) }).await.map(drop);
        let waiting_costs_per_hour = Some(amount);
        let money = MoneyRules { waiting_costs_per_hour, ..MoneyRules::default() };
        let waits = jobs::submit(&lab.cluster, JobSpec { money, ..at_cloud(&lab) }).await.map(drop);
        let quota = Quota { budget_month: Some(amount), ..Quota::default() };
        let tenant = accounts::set_quota(&lab.cluster, &TenantName::default(), quota).await;
        let ask = SetRenting { waiting_costs_per_hour, ..SetRenting::default() };
        let renting = rentals::set_renting(&lab.cluster, ask).await.map(drop);
        [job, waits, tenant, renting]
    };
    for taken in asked(most).await {
        taken.expect("it is within the limit");
    }
    for refused in asked(most.plus(Money::from_micros(1))).await {
        let problem = refused.expect_err("it is beyond the limit");
        assert_eq!(problem.kind, ProblemKind::Invalid, "{problem}");
        assert!(problem.why.contains("9223372036854775807"), "{problem}");
    }
}

/// The first write reserves, and the second one settles.
#[tokio::test]
async fn a_controller_that_is_killed_at_a_write_of_the_ledger_counts_each_job_once() {
    for write in [1, 2] {
        let mut lab = lab().await;
        let cut = lab.cluster.records.counts.cut_at("ledger/lines/", write);
        let id = lab.submit(at_cloud(&lab)).await;
        if write == 2 {
            let vm = vm_of(&id);
            lab.wait_for_vm(&lab.cloud, &vm).await;
            lab.cloud.say(&vm, GuestBody::Started);
            lab.wait_for_state(&id, JobState::Running).await;
            finish(&lab.cloud, &lab.cloud, &vm);
        }
        wait_for("the write", async || cut.is_reached().then_some(())).await;
        lab.restart_with_prices().await;
        let ended = match write {
            1 => lab.run_to_its_end(&id).await,
            _ => lab.wait_for_state(&id, JobState::Succeeded).await,
        };
        let spent = ended.cost.and_then(|cost| cost.spent).expect("what was spent");
        assert_eq!(lab.spending(), Spending { spent, reserved: Money::ZERO });
        let lines = lab.cluster.records.keys("ledger/lines/").await.expect("keys");
        assert_eq!(lines.len(), 2, "{lines:?}");
    }
}

/// Whoever else reserves does so in the same way, also for no tenant.
#[tokio::test]
async fn others_reserve_and_settle_too() {
    let lab = lab().await;
    lab.set_budget(Some(dollars(5))).await;
    let (cluster, tenant) = (&lab.cluster, Some(TenantName::default()));
    crate::ledger::reserve(cluster, "other/1", tenant.clone(), dollars(3)).await.expect("room");
    let second = crate::ledger::reserve(cluster, "other/2", tenant, dollars(3)).await;
    assert!(second.expect_err("no room").why.contains("$3.00 reserved"));
    crate::ledger::reserve(cluster, "other/2", None, dollars(3)).await.expect("nobody's budget");
    crate::ledger::settle(cluster, "other/1", dollars(2)).await.expect("settled");
    assert_eq!(lab.spending(), Spending { spent: dollars(2), reserved: Money::ZERO });
}

#[tokio::test]
async fn what_was_reserved_for_a_lost_run_does_not_keep_the_job_from_the_next_one() {
    let (lab, second) = lab_with_two(LEAST).await;
    lab.set_budget(Some(dollars(10))).await;
    // The first host can make no disk: the VM was not asked for when the host goes.
    for host in [&lab.cloud, &second] {
        host.inside().no_new_volumes = true;
    }
    let id = lab.submit(starts_again()).await;
    let [first, other] = placed(&lab, &second, &id).await;
    let high = lab.job(&id).await.cost.expect("what is reserved").predicted.high;
    assert!(high >= dollars(6) && high < dollars(7), "{high}");
    other.inside().no_new_volumes = false;
    unreachable(&lab, first).await;
    begins(&lab, other, &id).await;
    let high = lab.job(&id).await.cost.expect("what is reserved").predicted.high;
    assert_eq!(lab.spending(), Spending { spent: Money::ZERO, reserved: high });
    finish_again(other, &id);
    let ended = lab.wait_for_state(&id, JobState::Succeeded).await;
    let spent = ended.cost.and_then(|cost| cost.spent).expect("what was spent");
    assert_eq!(lab.spending(), Spending { spent, reserved: Money::ZERO });
}

#[tokio::test]
async fn each_run_of_a_job_is_settled_and_its_budget_is_for_all_of_them() {
    for budget in [10, 13] {
        let (lab, second) = lab_with_two(LEAST).await;
        let money = MoneyRules { budget: Some(dollars(budget)), ..MoneyRules::default() };
        let id = lab.submit(JobSpec { money, ..starts_again() }).await;
        let [first, other] = placed(&lab, &second, &id).await;
        begins(&lab, first, &id).await;
        unreachable(&lab, first).await;
        if budget == 10 {
            // The other host is free.
            let says = "that are left of the job's budget: it has cost $6.";
            let waits = lab.wait_for_job(&id, "its reason", |job| job.reason.contains(says)).await;
            let spent = waits.cost.and_then(|cost| cost.spent).expect("what was spent");
            assert_eq!(waits.state, JobState::Queued);
            assert_eq!(lab.spending(), Spending { spent, reserved: Money::ZERO });
            continue;
        }
        begins(&lab, other, &id).await;
        let cost = lab.job(&id).await.cost.expect("a cost");
        let spent = cost.spent.expect("what the first run has cost");
        assert!(spent >= dollars(6), "{cost:?}");
        assert_eq!(lab.spending(), Spending { spent, reserved: cost.predicted.high });
        finish_again(other, &id);
        let ended = lab.wait_for_state(&id, JobState::Succeeded).await;
        let spent = ended.cost.and_then(|cost| cost.spent).expect("what was spent");
        assert!(spent >= dollars(12), "{ended:?}");
        assert_eq!(lab.spending(), Spending { spent, reserved: Money::ZERO });
    }
}

#[tokio::test]
async fn a_job_goes_on_whose_controller_was_killed_between_the_ledger_and_the_job_s_record() {
    let mut lab = lab_with(LEAST).await;
    lab.set_budget(Some(dollars(1))).await;
    let id = lab.submit(starts_again()).await;
    let says = "of the tenant's $1.00 for this month $0 are spent and $0 reserved";
    lab.wait_for_job(&id, "its reason", |job| job.reason.contains(says)).await;
    let cut = lab.cluster.records.counts.cut_at(&format!("jobs/{id}"), 1);
    lab.set_budget(Some(dollars(10))).await;
    wait_for("the write", async || cut.is_reached().then_some(())).await;
    assert!(lab.spending().reserved >= dollars(6), "{:?}", lab.spending());
    lab.restart_with_prices().await;
    let ended = lab.run_to_its_end(&id).await;
    let spent = ended.cost.and_then(|cost| cost.spent).expect("what was spent");
    assert_eq!(lab.spending(), Spending { spent, reserved: Money::ZERO });
}

#[tokio::test]
async fn what_a_removed_host_costs_is_not_known_and_what_was_reserved_counts() {
    let lab = lab().await;
    let id = lab.submit(JobSpec { restart: Restart::Never, ..starts_again() }).await;
    begins(&lab, &lab.cloud, &id).await;
    unreachable(&lab, &lab.cloud).await;
    hosts::remove(&lab.cluster, &lab.cloud.id, true).await.expect("remove");
    let ended = lab.wait_for_state(&id, JobState::Failed).await;
    let cost = ended.cost.expect("a cost");
    assert_eq!(cost.spent, Some(cost.predicted.high));
    let spent = cost.predicted.high;
    assert_eq!(lab.spending(), Spending { spent, reserved: Money::ZERO });
}

#[tokio::test]
async fn a_run_costs_what_the_time_costs_that_has_passed_whatever_the_clock_says() {
    let lab = lab().await;
    let id = lab.submit(at_cloud(&lab)).await;
    begins(&lab, &lab.cloud, &id).await;
    lab.cluster.clock.pretend_passed(Duration::from_secs(3600));
    lab.cluster.clock.pretend_set(-3_600_000);
    finish(&lab.cloud, &lab.cloud, &vm_of(&id));
    let ended = lab.wait_for_state(&id, JobState::Succeeded).await;
    let spent = ended.cost.and_then(|cost| cost.spent).expect("what was spent");
    assert!(spent >= dollars(3600), "{ended:?}");
}

/// The moves of clones are forgotten before a job is settled.
#[tokio::test]
async fn a_clone_that_came_is_paid_for_also_if_the_controller_is_killed_at_the_job_s_end() {
    let mut lab = lab().await;
    let start = Start::Host(lab.home.id.clone());
    let (root_bytes, timeout_s) = (Some(1 << 30), Some(600));
    let far = JobSpec { may_migrate: true, root_bytes, timeout_s, start, ..spec(Access::Clone) };
    let (id, vm) = running_as(&lab, far).await;
    let placement = wait_for("its data to be there", async || {
        wait_for_the_network(&lab.home, &vm, 3);
        let record = jobs::record(&lab.cluster, &id).await.expect("a record");
        let placement = record.placement.filter(|_| record.moves == 1)?;
        let clone = placement.disks.iter().find(|disk| disk.role.is_data())?;
        let moved = lab.cluster.index.volume_move(&clone.volume)?;
        (clone.home == lab.home.id && moved.view.state.is_final()).then_some(placement)
    })
    .await;
    let cut = lab.cluster.records.counts.cut_at("ledger/lines/", 1);
    finish(&lab.home, &lab.home, &vm);
    wait_for("the job to be settled", async || cut.is_reached().then_some(())).await;
    let moves = lab.cluster.records.keys("volume_moves/").await.expect("keys");
    assert!(moves.is_empty(), "{moves:?}");
    lab.restart_with_prices().await;
    let ended = lab.wait_for_state(&id, JobState::Succeeded).await;
    let once = Money::from_micros(90_000).of(placement.traits.data_bytes[0], 1 << 30);
    assert!(once > Money::ZERO, "{placement:?}");
    assert_eq!(ended.cost.and_then(|cost| cost.spent), Some(once), "{:?}", ended.cost);
}
