//! `perigee lab run balance`: busy VMs at one host, an idle host beside it, and the balancer.
//!
//! The lab has one site with two hosts, each on a CPU of its own. Its VMs have no job, want a CPU for a share of the time, and check what
//! they write to their disks. They are all made at the first host. Then balancing is switched on, and the controller is killed as soon as
//! the first move is decided. The run is over when the balancer has looked several times at loads that are known, and moved nothing.
//!
//! | question | file |
//! |---|---|
//! | what does a guest do | `guest.sh`; how it comes into an image: `guest.rs` |
//! | when does the rule predict a move | `watch.rs` |
//! | what is in the results, and what is wrong | `outcome.rs` |

mod guest;
mod outcome;
mod watch;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use perigee_http::Client;
use perigee_http::certificate::now_ms;
use perigee_model::auto_mode::AutoMode;
use perigee_model::balance::{SetBalance, SiteBalance};
use perigee_model::job::{Migration, MigrationState, Start, Vm};
use perigee_model::load::VcpuUse;
use perigee_model::vm::NetworkKind;
use perigee_model::{HostId, ImageName, Problem, SiteId, VmId};

use crate::cluster::Cluster;
use crate::definition::{Definition, LabId, SiteDef};
use crate::faults::{kill, until};
use crate::measuring::{QEMU, load_1min, own_version, versions};
use crate::process::own_cpus;
use crate::progress::{Step, Steps};
use crate::up::{self, Lab, with_lab};
use crate::wan::LinkSettings;
pub use guest::{make_image, make_image_of};
pub use outcome::{Measured, Move, Outcome, VmAtEnd};
use watch::Looks;

const VM_MEMORY_BYTES: u64 = 192 << 20;
const ASK_MAX: Duration = Duration::from_secs(30);
/// For all guests, which share a CPU.
const BOOT_MAX: Duration = Duration::from_secs(900);
/// Beside other busy programs the second host may have no CPU to spare for a long time.
const FIRST_MOVE_MAX: Duration = Duration::from_secs(900);
const CALM_MAX: Duration = Duration::from_secs(900);
const ROUND_MAX: Duration = Duration::from_secs(300);
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The options of a run.
#[derive(Debug, Clone)]
pub struct Options {
    pub id: LabId,
    pub lab: up::Options,
    /// The golden image's directory.
    pub image: PathBuf,
    /// How many VMs; each has a vCPU.
    pub vms: u32,
    /// For how much of the time each VM wants a CPU, 1 to 100.
    pub busy_percent: u64,
    /// For how long the run delay is measured, before and after.
    pub measure: Duration,
    /// The run is over after so many looks of the balancer, one after the other, at loads that are known and without a move.
    pub calm_looks: usize,
    /// Directory for `results.json`.
    pub out: PathBuf,
}

/// One site with two hosts, each on one of the first two CPUs that this process may use.
///
/// # Errors
/// `Unavailable` on a machine with one CPU.
pub fn two_hosts(id: LabId) -> Result<Definition, Problem> {
    let [first, second, ..] = own_cpus()[..] else {
        let why = "each of its two hosts needs a CPU of its own, and there is only one";
        return Err(Problem::unavailable("can't balance", why));
    };
    let name =
        |text: &str| HostId::new(text).map_err(|why| Problem::internal("can't name a host", why));
    let hosts = [name("home1")?, name("home2")?];
    let site = SiteDef { name: home()?, hosts: hosts.to_vec() };
    let mut definition = Definition::new(id, vec![site], LinkSettings::of_rtt_us(0));
    definition.cpus = hosts.into_iter().zip([vec![first], vec![second]]).collect();
    Ok(definition)
}

fn home() -> Result<SiteId, Problem> {
    SiteId::new("home").map_err(|why| Problem::internal("can't name a site", why))
}

/// Runs it in a lab of its own, which is always removed afterwards, and writes `results.json`.
///
/// # Errors
/// The run could not be made, or nothing moved in time. What is wrong otherwise is in [`Outcome::faults`].
pub async fn balance(options: &Options, steps: &Steps) -> Result<Outcome, Problem> {
    let mut definition = two_hosts(options.id.clone())?;
    definition.probe_kernel = Some(options.image.join("vmlinuz"));
    let outcome = with_lab(definition, &options.lab, steps, async |lab: Lab| {
        Run::new(&lab, options)?.all(steps).await
    })
    .await?;
    let path = options.out.join("results.json");
    let write = || -> std::io::Result<()> {
        std::fs::create_dir_all(&options.out)?;
        std::fs::write(&path, serde_json::to_vec_pretty(&outcome)?)
    };
    write().map_err(|e| Problem::internal(format!("can't write {}", path.display()), e))?;
    Ok(outcome)
}

struct Run<'a> {
    lab: &'a Lab,
    options: &'a Options,
    client: Client,
    site: SiteId,
    vms: Vec<VmId>,
}

/// What has become of the VMs until they were calm.
struct Watched {
    moves: Vec<Move>,
    killed_at_s: f64,
}

impl<'a> Run<'a> {
    fn new(lab: &'a Lab, options: &'a Options) -> Result<Self, Problem> {
        let named = |number| {
            let name = VmId::new(format!("busy{number}"));
            name.map_err(|why| Problem::internal("can't name a VM", why))
        };
        let vms = (1..=options.vms).map(named).collect::<Result<_, _>>()?;
        Ok(Self { lab, options, client: lab.client(ASK_MAX)?, site: home()?, vms })
    }

    async fn all(&self, steps: &Steps) -> Result<Outcome, Problem> {
        self.set(AutoMode::Off).await?;
        self.boot(steps).await?;
        let load = load_1min()?;
        let step = steps.begin("measure the run delay");
        let before = self.measure().await?;
        step.done(&format!("{:.2} s per second", before.run_delay()));
        let mut step = steps.begin("balance");
        let Watched { moves, killed_at_s } = self.watch(&mut step).await?;
        step.done(&format!("{} moves", moves.len()));
        // So that nothing moves while it is measured.
        self.set(AutoMode::Off).await?;
        let step = steps.begin("measure the run delay again");
        let after = self.measure().await?;
        step.done(&format!("{:.2} s per second", after.run_delay()));
        let mut outcome = Outcome {
            versions: versions(own_version(), &[QEMU]),
            busy_percent: self.options.busy_percent,
            load_1min: load,
            before,
            after,
            moves,
            killed_at_s,
            ..Outcome::default()
        };
        self.end(&mut outcome, steps).await?;
        outcome.judge();
        Ok(outcome)
    }

    async fn set(&self, mode: AutoMode) -> Result<SiteBalance, Problem> {
        let path = format!("/v1/sites/{}/balance", self.site);
        self.client.put(&path, &SetBalance { mode }).await
    }

    /// Makes the VMs at the first host, and returns when all guests have begun.
    async fn boot(&self, steps: &Steps) -> Result<(), Problem> {
        let step = steps.begin("import the image");
        let golden = self.options.image.join("debian-pg.raw");
        let file = guest::make_image(&golden, self.lab.dir(), self.options.busy_percent).await?;
        let image =
            ImageName::new("busy").map_err(|e| Problem::internal("can't name the image", e))?;
        Cluster::new(self.lab)?.import_image(&image, &file).await?;
        step.done("");
        let mut step = steps.begin("boot");
        let at = self.lab.definition.hosts().map(|(_, host)| host.clone()).next();
        for name in &self.vms {
            // Of a `NewVm` all that is not as by default.
            let new = serde_json::json!({
                "name": name,
                "image": image,
                "cpus": 1,
                "memory_bytes": VM_MEMORY_BYTES,
                "network": NetworkKind::None,
                "start": at.clone().map_or(Start::Anywhere, Start::Host),
            });
            let _: Vm = self.client.post("/v1/vms", &new).await?;
        }
        until("the guests to begin", BOOT_MAX, async || {
            let mut begun = 0;
            for vm in &self.vms {
                begun += usize::from(self.at_end(vm).await?.begun > 0);
            }
            step.at(&format!("{begun} of {}", self.vms.len()));
            Ok((begun == self.vms.len()).then_some(()))
        })
        .await?;
        step.done("");
        Ok(())
    }

    async fn vm(&self, vm: &VmId) -> Result<Vm, Problem> {
        self.client.get(&format!("/v1/vms/{vm}")).await
    }

    async fn at_end(&self, vm: &VmId) -> Result<VmAtEnd, Problem> {
        let host = self.vm(vm).await?.host;
        let said = self.client.get_bytes(&format!("/v1/vms/{vm}/console")).await?;
        Ok(VmAtEnd::of(vm.clone(), host, &String::from_utf8_lossy(&said)))
    }

    /// What the VMs do with their hosts' CPUs now: as counted since their QEMUs were started, at two times.
    async fn measure(&self) -> Result<Measured, Problem> {
        let begin = self.counted().await?;
        tokio::time::sleep(self.options.measure).await;
        let end = self.counted().await?;
        let mut measured = Measured { seconds: 0.0, hosts: BTreeMap::new() };
        for ((first, last), vm) in begin.iter().zip(&end).zip(&self.vms) {
            let what = || format!("can't measure the run delay of {vm}");
            let missing = || Problem::internal(what(), "its host does not tell it");
            let passed_ms = last.uptime_ms.saturating_sub(first.uptime_ms);
            let host = last.host.as_ref().filter(|host| first.host.as_ref() == Some(host));
            let Some(host) = host.filter(|_| passed_ms > 0) else {
                return Err(Problem::internal(what(), "it has moved meanwhile"));
            };
            let waited = last.load.run_delay_ms.zip(first.load.run_delay_ms);
            let waited_ms =
                waited.map(|(last, first)| last.saturating_sub(first)).ok_or_else(missing)?;
            let ran_ms = last.vcpu_ms.saturating_sub(first.vcpu_ms);
            let of_vm = VcpuUse {
                running_vcpus: ran_ms as f64 / passed_ms as f64,
                waiting_vcpus: waited_ms as f64 / passed_ms as f64,
            };
            let here = measured.hosts.entry(host.clone()).or_default();
            *here = here.plus(of_vm);
            measured.seconds = measured.seconds.max(passed_ms as f64 / 1000.0);
        }
        Ok(measured)
    }

    async fn counted(&self) -> Result<Vec<Vm>, Problem> {
        let mut counted = Vec::new();
        for vm in &self.vms {
            counted.push(self.vm(vm).await?);
        }
        Ok(counted)
    }

    /// Switches balancing on, and returns when nothing moves any more. The controller is killed when the first move is decided.
    async fn watch(&self, step: &mut Step) -> Result<Watched, Problem> {
        self.set(AutoMode::On).await?;
        let (began, began_ms) = (Instant::now(), now_ms());
        let mut looks = Looks::default();
        until("a VM to move", FIRST_MOVE_MAX, async || {
            self.look(&mut looks, step).await?;
            Ok(looks.shows_a_move().then_some(()))
        })
        .await?;
        let killed_at_s = began.elapsed().as_secs_f64();
        kill(self.lab, None, "controller").await?;
        until("no VM to move any more", CALM_MAX, async || {
            // Seldom, because it takes time of the same CPUs.
            tokio::time::sleep(LOOK_EVERY).await;
            self.look(&mut looks, step).await?;
            let is_calm = looks.calm() >= self.options.calm_looks;
            let is_over = is_calm && self.moves().await?.iter().all(|one| one.state.is_final());
            Ok(is_over.then_some(()))
        })
        .await?;
        let mut moves = Vec::new();
        let mut free_ms = 0;
        for migration in self.moves().await? {
            let predicted_ms = looks.predicted_ms(&migration.vm, free_ms, migration.started_ms);
            let predicted_at_s = predicted_ms.map(|ms| ms.saturating_sub(began_ms) as f64 / 1000.0);
            free_ms = migration.ended_ms.unwrap_or(free_ms);
            moves.push(Move::of(migration, began_ms, predicted_at_s));
        }
        Ok(Watched { moves, killed_at_s })
    }

    /// Notes what the balancer shows.
    async fn look(&self, looks: &mut Looks, step: &mut Step) -> Result<(), Problem> {
        let sites: Vec<SiteBalance> = self.client.get("/v1/balance").await?;
        for site in sites.into_iter().filter(|site| site.site == self.site) {
            if let Some(look) = looks.add(site) {
                let shown = &look.balance;
                let unknown =
                    shown.not_known.first().map(|one| format!("{}: {}", one.host, one.why));
                let first = shown.vms.first().map(|one| format!("{} {}", one.vm, one.reason));
                step.at(&unknown.or(first).unwrap_or_else(|| "nothing would be saved".to_owned()));
            }
        }
        Ok(())
    }

    /// All moves so far, in their order.
    async fn moves(&self) -> Result<Vec<Migration>, Problem> {
        let mut moves: Vec<Migration> = Vec::new();
        for vm in &self.vms {
            let of_vm: Vec<Migration> =
                self.client.get(&format!("/v1/vms/{vm}/migrations")).await?;
            moves.extend(of_vm);
        }
        moves.sort_by_key(|one| one.started_ms);
        Ok(moves)
    }

    /// Waits until the volumes are where their VMs are and each guest has gone on, and notes what the guests have said.
    async fn end(&self, outcome: &mut Outcome, steps: &Steps) -> Result<(), Problem> {
        let step = steps.begin("look at the guests and their disks");
        let cluster = Cluster::new(self.lab)?;
        let completed = outcome.moves.iter().filter(|one| one.state == MigrationState::Completed);
        let at: BTreeMap<&VmId, &HostId> = completed.map(|one| (&one.vm, &one.to)).collect();
        for (vm, to) in at {
            cluster.volumes_followed(vm, to).await?;
        }
        for vm in &self.vms {
            let before = self.at_end(vm).await?.rounds;
            // The round that was under way may have begun elsewhere.
            let what = format!("the guest of {vm} to go on");
            let gone_on = until(&what, ROUND_MAX, async || {
                let now = self.at_end(vm).await?;
                Ok((now.rounds > before + 1).then_some(now))
            });
            outcome.vms.push(gone_on.await?);
        }
        step.done("");
        Ok(())
    }
}
