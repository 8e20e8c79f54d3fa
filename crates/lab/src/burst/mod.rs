//! `make demo-burst`: a queue that is long for two small hosts of one's own, a budget, and the rule that rents hosts for the queue and gives
//! them back. Real daemons and guests; nobody is paid.
//!
//! | question | file |
//! |---|---|
//! | which hosts, machines, volumes and jobs are there | `stage.rs`; what a job does: `work.sh` |
//! | what is seen and said while the jobs run | `watch.rs` |
//! | how long would the own hosts alone need | `alone.rs` |
//! | what is in the results, and what is wrong | `outcome.rs` |
//! | what is on the page | `page.rs` |

mod alone;
mod outcome;
mod page;
mod stage;
mod watch;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use perigee_http::Client;
use perigee_model::auto_mode::AutoMode;
use perigee_model::job::Job;
use perigee_model::plan::Estimate;
use perigee_model::renting::{Renting, SetRenting};
use perigee_model::{HostId, Problem};

use crate::cluster::Cluster;
use crate::definition::LabId;
use crate::down::remains;
use crate::measuring::{QEMU, own_version, versions};
use crate::progress::Steps;
use crate::up::{self, Lab, with_lab};
use outcome::minutes;
pub use outcome::{Alone, Event, JobRow, Outcome, RentalRow};
use stage::{BUDGET, RENTED_MOST, Task, WAITING_PER_HOUR};
use watch::Watch;

/// For one question.
const ASK_MAX: Duration = Duration::from_secs(60);

/// The options of a run.
#[derive(Debug, Clone)]
pub struct Options {
    pub id: LabId,
    pub lab: up::Options,
    /// The golden image's directory.
    pub image: PathBuf,
    /// How many jobs the queue has.
    pub jobs: u32,
    /// For how long a job works on each part of its data, in s.
    pub part_s: u32,
    /// Directory for `report.html` and `results.json`.
    pub out: PathBuf,
}

/// Tells the story in a lab of its own, which is always removed afterwards, and writes `results.json` and `report.html`.
///
/// # Errors
/// The first step that failed. What is wrong with the result is in [`Outcome::faults`].
pub async fn burst(options: &Options, steps: &Steps) -> Result<Outcome, Problem> {
    let mut definition = stage::two_small_hosts(options.id.clone())?;
    definition.probe_kernel = Some(options.image.join("vmlinuz"));
    let mut outcome = with_lab(definition, &options.lab, steps, async |lab: Lab| {
        Story { lab: &lab, options, steps, client: lab.client(ASK_MAX)? }.tell().await
    })
    .await?;
    outcome.left_behind = remains(&options.lab.base, &options.id);
    write_results(&outcome, &options.out)?;
    Ok(outcome)
}

struct Story<'a> {
    lab: &'a Lab,
    options: &'a Options,
    steps: &'a Steps,
    client: Client,
}

impl Story<'_> {
    async fn tell(&self) -> Result<Outcome, Problem> {
        let cluster = Cluster::new(self.lab)?;
        let own_hosts: Vec<HostId> =
            self.lab.definition.hosts().map(|(_, host)| host.clone()).collect();
        self.prepare(&cluster).await?;
        let mut watch = Watch::new(&cluster, &self.client, self.steps, &own_hosts);
        let mut alone = None;
        let told = self.act(&cluster, &own_hosts, &mut watch, &mut alone).await;
        let took_s = watch.last_end_s();
        let (jobs, rentals, events) = watch.told();
        Ok(Outcome {
            versions: versions(own_version(), &[QEMU]),
            own_hosts,
            budget: BUDGET,
            waiting_per_hour: WAITING_PER_HOUR,
            rented_most: RENTED_MOST,
            alone,
            took_s,
            jobs,
            rentals,
            events,
            problems: told.err().iter().map(ToString::to_string).collect(),
            left_behind: Vec::new(),
        })
    }

    /// From the first jobs to the end of the last rental. What happened before an error is in `watch`.
    async fn act(
        &self,
        cluster: &Cluster,
        own_hosts: &[HostId],
        watch: &mut Watch<'_>,
        alone: &mut Option<Alone>,
    ) -> Result<(), Problem> {
        self.steps.say(
            "The first job of each kind runs at the own hosts: it shows how long its kind takes.",
        );
        for task in Task::ALL {
            let job = self.submit(cluster, task).await?;
            watch.follow(job, task, true);
        }
        watch.until_all_ended().await?;
        let predicted = self.predict(cluster).await?;
        watch.count_from_now();
        let mut queue = Vec::new();
        for task in stage::queue(self.options.jobs) {
            let job = self.submit(cluster, task).await?;
            queue.extend(predicted.get(&task).map(|estimate| (job.clone(), *estimate)));
            watch.follow(job, task, false);
        }
        let least = alone::alone(&queue, own_hosts, WAITING_PER_HOUR)?;
        *alone = Some(least);
        watch.say(format!(
            "{} jobs are in the queue. By their predictions the own hosts {} alone need at least {}, and all waiting costs at least {}.",
            queue.len(),
            words(own_hosts),
            minutes(least.seconds),
            least.waiting
        ));
        self.rent(watch).await?;
        watch.until_all_ended().await?;
        let took_s = watch.last_end_s();
        watch.say(format!("The last job of the queue has ended after {}.", minutes(took_s)));
        watch.until_all_given_back().await
    }

    /// The image at all hosts, the volumes at home, and the replica.
    async fn prepare(&self, cluster: &Cluster) -> Result<(), Problem> {
        let step = self.steps.begin("import the image, and make the volumes and a replica");
        cluster.import_image(&stage::image()?, &self.options.image.join("debian-pg.raw")).await?;
        for task in Task::ALL {
            stage::make_volume(self.lab, &self.client, task).await?;
        }
        cluster.replicate(&stage::volume(Task::Report)?, &stage::cloud()?).await?;
        cluster.probe_links().await?;
        step.done("");
        Ok(())
    }

    async fn submit(&self, cluster: &Cluster, task: Task) -> Result<Job, Problem> {
        cluster.submit(&task.job(self.options.part_s, WAITING_PER_HOUR)?).await
    }

    /// What a job of each kind would take now, at the own hosts.
    async fn predict(&self, cluster: &Cluster) -> Result<BTreeMap<Task, Estimate>, Problem> {
        let mut predicted = BTreeMap::new();
        for task in Task::ALL {
            let plan = cluster.plan(&task.job(self.options.part_s, WAITING_PER_HOUR)?).await?;
            let chosen = plan.chosen().ok_or_else(|| {
                let what = format!("can't predict the job {}", task.word());
                Problem::internal(what, "no way to run it is possible")
            })?;
            predicted.insert(task, chosen.total);
        }
        Ok(predicted)
    }

    /// As an admin does it.
    async fn rent(&self, watch: &mut Watch<'_>) -> Result<(), Problem> {
        let ask = SetRenting {
            mode: Some(AutoMode::On),
            waiting_costs_per_hour: Some(WAITING_PER_HOUR),
            most: Some(RENTED_MOST),
        };
        let _: Renting = self.client.put("/v1/renting", &ask).await?;
        watch.say(format!(
            "The admin says: perigee rent mode on --waiting-costs '{}/h' --most {RENTED_MOST}. The budget is {BUDGET}.",
            WAITING_PER_HOUR.exact()
        ));
        Ok(())
    }
}

fn words(hosts: &[HostId]) -> String {
    hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ")
}

fn write_results(outcome: &Outcome, out: &Path) -> Result<(), Problem> {
    let write = || -> std::io::Result<()> {
        std::fs::create_dir_all(out)?;
        std::fs::write(out.join("results.json"), serde_json::to_vec_pretty(outcome)?)?;
        std::fs::write(out.join("report.html"), page::html(outcome))
    };
    write().map_err(|e| Problem::internal(format!("can't write to {}", out.display()), e))
}
