//! Jobs at hosts that cost something: budgets, reservations, and what was spent.

use std::path::Path;

use perigee_model::budget::{MoneyRules, Spending};
use perigee_model::guest::GuestBody;
use perigee_model::job::{Access, Job, JobSpec, JobState, Start};
use perigee_model::money::Money;
use perigee_model::tenant::Quota;
use perigee_model::{JobId, TenantName};

use super::{Lab, TIMING, finish, spec, vm_of};
use crate::accounts;
use crate::cluster::{Settings, Traffic};
use crate::supervisor::Supervisor;

/// $1 a second at the site `cloud`; the other site is the users' own.
const PRICES: &str = "sites: {cloud: {machine: $3600/h, disk: $0.10/GiB-month, egress: $0.09/GiB, as-of: 2025-01-01, max-age: 3650d}}";

fn settings(dir: &Path) -> Settings {
    Settings { prices: Some(dir.join("prices.yaml")), ..Settings::default() }
}

async fn lab() -> Lab {
    let dir = tempfile::tempdir().expect("tempdir");
    std::fs::write(dir.path().join("prices.yaml"), PRICES).expect("write");
    let settings = settings(dir.path());
    Lab::up_in(dir, settings).await
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

    fn spending(&self) -> Spending {
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
        super::wait_for("the write", async || cut.is_reached().then_some(())).await;
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

/// Rented hosts are reserved for in the same way, also for no tenant.
#[tokio::test]
async fn others_reserve_and_settle_too() {
    let lab = lab().await;
    lab.set_budget(Some(dollars(5))).await;
    let (cluster, tenant) = (&lab.cluster, Some(TenantName::default()));
    crate::ledger::reserve(cluster, "rental/1", tenant.clone(), dollars(3)).await.expect("room");
    let second = crate::ledger::reserve(cluster, "rental/2", tenant, dollars(3)).await;
    assert!(second.expect_err("no room").why.contains("$3.00 reserved"));
    crate::ledger::reserve(cluster, "rental/2", None, dollars(3)).await.expect("nobody's budget");
    crate::ledger::settle(cluster, "rental/1", dollars(2)).await.expect("settled");
    assert_eq!(lab.spending(), Spending { spent: dollars(2), reserved: Money::ZERO });
}
