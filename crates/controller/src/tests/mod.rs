//! The drivers against hosts made of memory: what a job and a migration go through, also when the
//! controller stops in the middle or a host is away.

mod admissions;
mod amounts;
mod api;
mod backup;
mod backup_schedules;
mod balance;
mod balance_data;
mod collect;
mod confined;
mod contents;
mod copies;
mod drain;
mod enrol;
mod exec;
mod fake;
mod faults;
mod from_backup;
mod gangs;
mod gone;
mod image_backups;
mod images;
mod inputs;
mod job_files;
mod jobs;
mod kept;
mod links;
mod live;
mod load;
mod lost;
mod measuring;
mod migrations;
mod money;
mod networks;
mod once;
mod outputs;
mod parts;
mod persistent_vms;
mod queue;
mod quotas;
mod rentals;
mod replicas;
mod restoring;
mod rules;
mod staging;
mod sure;
mod tasks;
mod tenant_backups;
mod tenant_walk;
mod tenants;
mod term;
mod unknown;
mod upgrade;
mod volume_moves;
mod web;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use perigee_model::guest::GuestBody;
use perigee_model::job::{
    Access, DEFAULT_OWNER, Job, JobSpec, JobState, JobVolume, NewVolume, Restart, Start,
};
use perigee_model::vm::VmSpec;
use perigee_model::volume::VolumeSource;
use perigee_model::{HostId, ImageName, JobId, VmId, VmStart, VolumeName};

use crate::cluster::rentals::RentalTiming;
use crate::cluster::renter::RenterTiming;
use crate::cluster::{Cluster, Settings, Timing, Traffic};
use crate::hosts;
use crate::storage::volumes;
use crate::supervisor::Supervisor;
use fake::FakeHost;
pub use fake::vms::report_of as report;
pub use rentals::rental;

const TIMING: Timing = Timing {
    poll: Duration::from_millis(10),
    figures: Duration::from_millis(20),
    monitor: Duration::from_millis(50),
    load_mean: Duration::from_secs(1),
    links_again: Duration::from_millis(200),
    // A busy machine may let nobody run for a moment.
    host_deadline: Duration::from_secs(2),
    boot_deadline: Duration::from_secs(60),
    take_patience: Duration::from_secs(60),
    follow_patience: Duration::from_secs(1),
    shadow: Duration::ZERO,
    cancel_deadline: Duration::from_millis(50),
    // Some tests end VMs whose guests write no outputs, and wait for this. One that awaits outputs has `PATIENCE`.
    collect_deadline: Duration::from_secs(5),
    exec_unwatched: Duration::from_secs(3600),
    own_renewal: Duration::from_secs(3600),
    restored_min: Duration::ZERO,
    rentals: RentalTiming {
        compare: Duration::from_millis(40),
        hurry: Duration::from_millis(20),
        notices: Duration::from_millis(40),
        answer: Duration::from_millis(500),
        grace: Duration::from_secs(2),
        again: Duration::from_millis(50),
        join: PATIENCE,
        lease: Duration::from_secs(600),
    },
    renter: RenterTiming {
        look: Duration::from_millis(40),
        offers: Duration::from_millis(40),
        predicted: Duration::from_secs(1),
    },
};

/// Outputs that a guest does not write are lost at once.
const HASTY: Timing = Timing { collect_deadline: Duration::from_millis(50), ..TIMING };

/// A wait that succeeds ends at once, so this costs nothing; a busy machine may need it.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A cluster of a `home` site with host `home1` and a `cloud` site with host `cloud1`, where the
/// data volume `tpch` has its home.
struct Lab {
    dir: tempfile::TempDir,
    home: FakeHost,
    cloud: FakeHost,
    cluster: Arc<Cluster>,
    supervisor: Arc<Supervisor>,
}

impl Lab {
    async fn up() -> Self {
        Self::up_with(Settings::default()).await
    }

    async fn up_with(settings: Settings) -> Self {
        Self::up_in(tempfile::tempdir().expect("tempdir"), settings).await
    }

    async fn up_in(dir: tempfile::TempDir, settings: Settings) -> Self {
        let home = FakeHost::start("home1", "home").await;
        let cloud = FakeHost::start("cloud1", "cloud").await;
        let (state_dir, traffic) = (dir.path(), Traffic::Plain);
        let started = Supervisor::start_with(state_dir, TIMING, traffic, settings, None);
        let supervisor = started.await.expect("start");
        let cluster = Arc::clone(&supervisor.cluster);
        for host in [&home, &cloud] {
            hosts::register(&cluster, &host.id, host.addresses.clone()).await.expect("register");
        }
        let new = NewVolume {
            name: data_volume(),
            host: Some(cloud.id.clone()),
            size_bytes: Some(1 << 30),
            source: VolumeSource::Empty,
            leave_site: Default::default(),
        };
        volumes::create(&cluster, new).await.expect("create");
        Self { dir, home, cloud, cluster, supervisor }
    }

    /// Ends the controller where it is, and starts another one on the same state.
    async fn restart_controller(&mut self) {
        self.supervisor.stop().await;
        self.start_controller(TIMING).await;
    }

    async fn start_controller(&mut self, timing: Timing) {
        self.supervisor =
            Supervisor::start(self.dir.path(), timing, Traffic::Plain).await.expect("start again");
        self.cluster = Arc::clone(&self.supervisor.cluster);
    }

    async fn submit(&self, spec: JobSpec) -> JobId {
        crate::jobs::submit(&self.cluster, spec).await.expect("submit").id
    }

    async fn job(&self, id: &JobId) -> Job {
        crate::jobs::get(&self.cluster, id).await.expect("job")
    }

    async fn wait_for_state(&self, id: &JobId, state: JobState) -> Job {
        self.wait_for_job(id, &format!("{state:?}"), |job| job.state == state).await
    }

    async fn wait_for_job(&self, id: &JobId, what: &str, is: impl Fn(&Job) -> bool) -> Job {
        let begun = tokio::time::Instant::now();
        loop {
            let job = self.job(id).await;
            if is(&job) {
                return job;
            }
            let waited_s = PATIENCE.as_secs();
            assert!(begun.elapsed() < PATIENCE, "waited {waited_s} s for {what}: {job:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn wait_for_vm(&self, host: &FakeHost, vm: &VmId) {
        wait_for(&format!("VM {vm} at {}", host.id), async || {
            host.inside().vms.contains_key(vm).then_some(())
        })
        .await;
    }

    /// Nothing of a job is left: no VM, no attachment, no volume but the data.
    async fn wait_for_clean_hosts(&self) {
        wait_for("clean hosts", async || {
            let clean = [&self.home, &self.cloud].iter().all(|host| {
                let inside = host.inside();
                let own = inside.volumes.keys().filter(|name| **name != data_volume()).count();
                inside.vms.is_empty() && inside.attachments.is_empty() && own == 0
            });
            clean.then_some(())
        })
        .await;
    }
}

/// Asks until there is an answer; says what it waited for when there is none in time.
async fn wait_for<T, F: Future<Output = Option<T>>>(what: &str, ask: impl Fn() -> F) -> T {
    let wait = async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait)
        .await
        .unwrap_or_else(|_| panic!("waited {} s for {what}", PATIENCE.as_secs()))
}

/// As [`wait_for`], for what comes only while a request is under way: once that is over, nobody waits any longer.
async fn wait_while<T, R: std::fmt::Debug, F: Future<Output = Option<T>>>(
    asked: &mut tokio::task::JoinHandle<R>,
    what: &str,
    ask: impl Fn() -> F,
) -> T {
    tokio::select! {
        biased;
        answer = wait_for(what, ask) => answer,
        over = asked => panic!("waited for {what}, and the request is over: {over:?}"),
    }
}

fn data_volume() -> VolumeName {
    VolumeName::new("tpch").expect("name")
}

/// A VM without disks and network.
pub fn vm_spec() -> VmSpec {
    VmSpec {
        vm: VmId::new("q-0001").expect("name"),
        start: VmStart::default(),
        cpus: 1,
        memory_bytes: 256 << 20,
        disks: Vec::new(),
        arrives_by: None,
        arrives_from: None,
        arrives_compressed: false,
        arrives_tunnelled: false,
        locks_memory: false,
        hides_output: false,
        network: Default::default(),
        machine: Default::default(),
    }
}

/// A job that starts at `home1` and uses the data volume.
pub fn spec(access: Access) -> JobSpec {
    JobSpec {
        name: "q".into(),
        image: ImageName::new("debian").expect("name"),
        command: vec!["run".into()],
        env: Default::default(),
        cpus: 1,
        memory_bytes: 512 << 20,
        cpus_max: None,
        memory_max_bytes: None,
        root_bytes: None,
        output_bytes: 1 << 20,
        volumes: vec![JobVolume {
            volume: data_volume(),
            mount: "/data".into(),
            access,
            ranks: Vec::new(),
        }],
        outputs: vec!["/job/out".into()],
        outputs_to: None,
        keep_outputs_s: None,
        publish: Vec::new(),
        start: Start::Host(HostId::new("home1").expect("name")),
        may_migrate: false,
        writes: perigee_model::LeaveSite::Never,
        ranks: perigee_model::LeaveSite::Never,
        timeout_s: None,
        has_output_room: false,
        // Tests do not wait for guests that end late.
        stop_grace_s: 0,
        oom_kill: Default::default(),
        inputs: None,
        owner: DEFAULT_OWNER.to_owned(),
        priority: 0,
        restart: Restart::Never,
        network: Default::default(),
        count: 1,
        mpi: false,
        firmware: Default::default(),
        tpm: false,
        rules: Default::default(),
        money: Default::default(),
    }
}

/// A job that runs at `home1` and writes the data volume, whose home is `cloud1`.
async fn running(lab: &Lab) -> (JobId, VmId) {
    running_as(lab, spec(Access::Write)).await
}

/// A job like this that runs at `home1`.
async fn running_as(lab: &Lab, spec: JobSpec) -> (JobId, VmId) {
    let id = lab.submit(spec).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    lab.home.say(&vm, GuestBody::Started);
    lab.wait_for_state(&id, JobState::Running).await;
    (id, vm)
}

fn vm_of(job: &JobId) -> VmId {
    crate::records::vm_of(job)
}

/// The output that [`finish`] has left, as the repository has it.
fn answers(lab: &Lab, job: &JobId) -> Option<String> {
    let tree = lab.dir.path().join("data/tenants/default/tree");
    std::fs::read_to_string(tree.join(format!("jobs/{job}/output/answers"))).ok()
}

/// The guest ends its command well and leaves an output.
fn finish(host: &FakeHost, output_home: &FakeHost, vm: &VmId) {
    let volume = VolumeName::new(format!("{vm}-out")).expect("name");
    finish_with(host, output_home, vm, volume);
}

/// The same, and the output is in this volume.
fn finish_with(host: &FakeHost, output_home: &FakeHost, vm: &VmId, volume: VolumeName) {
    let output = crate::files::outputs::tests::tar_of(&[("output/answers", &b"the answers"[..])]);
    let sha256 = {
        use sha2::Digest;
        crate::hash::hex(&sha2::Sha256::digest(&output))
    };
    let output_bytes = output.len() as u64;
    output_home.inside().volumes.get_mut(&volume).expect("output volume").data = output;
    host.say(vm, GuestBody::exited(0));
    host.say(vm, GuestBody::Finished { output_bytes, output_sha256: sha256, lacks: None });
}
