use super::*;
use crate::job::{Access, DEFAULT_OWNER, Restart, Start};
use crate::limits::{JOB_NUMBER, Limit, REFUSALS, RESTARTS};
use crate::network::{Protocol, Publish};
use crate::vm::{Disk, NetworkKind};
use crate::{Epoch, ImageName, MigrationId, NetworkName, VmId, VmStart};

fn volume_name(text: impl Into<String>) -> VolumeName {
    VolumeName::new(text).unwrap()
}

fn job() -> JobSpec {
    JobSpec {
        name: "scan".to_owned(),
        image: ImageName::new("debian").unwrap(),
        command: vec!["/bin/true".to_owned()],
        env: BTreeMap::new(),
        cpus: 1,
        memory_bytes: 512 << 20,
        cpus_max: None,
        memory_max_bytes: None,
        root_bytes: None,
        output_bytes: 1 << 30,
        volumes: Vec::new(),
        outputs: Vec::new(),
        outputs_to: None,
        keep_outputs_s: None,
        publish: Vec::new(),
        start: Start::Anywhere,
        may_migrate: true,
        writes: crate::LeaveSite::Never,
        ranks: crate::LeaveSite::Never,
        timeout_s: None,
        has_output_room: false,
        stop_grace_s: crate::job::STOP_GRACE_S_DEFAULT,
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

fn vm(disks: usize) -> VmSpec {
    let disk = |index: usize| Disk {
        role: match index {
            0 => DiskRole::Root,
            1 => DiskRole::Seed,
            2 => DiskRole::Output,
            _ => DiskRole::Data(u8::try_from(index - 3).unwrap()),
        },
        volume: volume_name(format!("v{index}")),
        epoch: Epoch(1),
        read_only: false,
    };
    VmSpec {
        vm: VmId::new("scan-0001").unwrap(),
        start: VmStart::default(),
        cpus: 1,
        memory_bytes: 512 << 20,
        disks: (0..disks).map(disk).collect(),
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

fn volume(index: usize) -> JobVolume {
    let (volume, mount) = (volume_name(format!("v{index}")), format!("/data{index}"));
    JobVolume { volume, mount, access: Access::Read, ranks: Vec::new() }
}

/// Both ends of a limit are taken, and what is beyond them is refused with the limit's range.
fn ends<T: TryFrom<i128>>(limit: &Limit, check: impl Fn(T) -> Result<(), Problem>) {
    for (number, is_possible) in
        [(limit.min - 1, false), (limit.min, true), (limit.max, true), (limit.max + 1, false)]
    {
        let Ok(value) = T::try_from(number) else { continue };
        match check(value) {
            Ok(()) => assert!(is_possible, "{limit}: {number} was taken"),
            Err(problem) => {
                assert!(!is_possible, "{limit}: {number} was refused: {problem}");
                assert!(problem.why.contains(&limit.range()), "{problem}");
            }
        }
    }
}

#[test]
fn a_job_and_its_vm_have_the_same_limits_of_cpus_and_memory() {
    ends(&CPUS, |cpus: u32| JobSpec { cpus, ..job() }.check());
    ends(&CPUS, |cpus: u32| VmSpec { cpus, ..vm(3) }.check());
    ends(&MEMORY_BYTES, |memory_bytes: u64| JobSpec { memory_bytes, ..job() }.check());
    ends(&MEMORY_BYTES, |memory_bytes: u64| VmSpec { memory_bytes, ..vm(3) }.check());
    let most = |most| JobSpec { memory_max_bytes: Some(most), ..job() }.check();
    most(job().memory_bytes + 1).expect("it is above the least");
    let refused = most(job().memory_bytes).expect_err("it is not above the least");
    assert!(refused.why.starts_with("memory: the most"), "{refused}");
    most((512 << 30) + 1).expect_err("it is too much");
}

#[test]
fn a_job_is_checked_at_each_of_its_limits() {
    ends(&JOB_DISK_BYTES, |bytes: u64| JobSpec { root_bytes: Some(bytes), ..job() }.check());
    ends(&JOB_DISK_BYTES, |output_bytes: u64| JobSpec { output_bytes, ..job() }.check());
    ends(&STOP_GRACE_S, |stop_grace_s: u64| JobSpec { stop_grace_s, ..job() }.check());
    ends(&TIMEOUT_S, |timeout_s: u64| JobSpec { timeout_s: Some(timeout_s), ..job() }.check());
    let publish = |count: usize| {
        let one = |port| Publish { outside: port, inside: 80, protocol: Protocol::Tcp };
        let ports = (1..).take(count).map(one).collect();
        let network = NetworkKind::Cluster(NetworkName::new("blue").expect("a name"));
        JobSpec { publish: ports, network, ..job() }
    };
    ends(&PUBLISHED, |count| publish(count).check());
    let nowhere = JobSpec { network: NetworkKind::User, ..publish(1) };
    assert!(nowhere.check().is_err());
    assert!(nowhere.check_vm("make it").is_err() && publish(1).check_vm("make it").is_ok());
    let twice =
        JobSpec { publish: [publish(2).publish, publish(1).publish].concat(), ..publish(1) };
    assert!(twice.check().is_err());
    ends(&KEEP_OUTPUTS_S, |keep_s: u64| JobSpec { keep_outputs_s: Some(keep_s), ..job() }.check());
    ends(&PRIORITY, |priority: i32| JobSpec { priority, ..job() }.check());
    ends(&JOB_NAME_BYTES, |length: usize| JobSpec { name: "n".repeat(length), ..job() }.check());
    ends(&OWNER_BYTES, |length: usize| JobSpec { owner: "o".repeat(length), ..job() }.check());
    ends(&JOB_VOLUMES, |count: usize| {
        JobSpec { volumes: (0..count).map(volume).collect(), ..job() }.check()
    });
    ends(&OUTPUTS, |count: usize| {
        JobSpec { outputs: vec!["/output".to_owned(); count], ..job() }.check()
    });
    ends(&ARGUMENT_BYTES, |length: usize| {
        let command = vec!["a".to_owned(), "b".repeat(length)];
        JobSpec { command, ..job() }.check()
    });
}

#[test]
fn a_path_is_as_long_as_linux_takes_it() {
    let path = |length: usize| format!("/{}", "p".repeat(length - 1));
    assert_eq!(check_guest_path(&path(4095)), Ok(()));
    let refused = check_guest_path(&path(4096)).unwrap_err();
    assert!(refused.to_string().contains(&PATH_BYTES.range()), "{refused}");
}

#[test]
fn command_and_environment_together_have_a_limit() {
    let with = |value_bytes: usize| {
        let command = vec!["c".repeat(131_000); 7];
        let variable = |name: &str| (name.to_owned(), "v".repeat(value_bytes));
        JobSpec { command, env: ["A", "B"].map(variable).into(), ..job() }.check()
    };
    // 7 words, and two variables of `A=` and a value, each with a zero byte at its end.
    let room = (1 << 20) - 7 * 131_001 - 2 * 3;
    assert_eq!(with(room / 2), Ok(()));
    let why = with(room / 2 + 1).unwrap_err().why;
    assert!(why.contains(&COMMAND_BYTES.range()), "{why}");
}

#[test]
fn the_longest_job_name_leaves_room_for_every_name_that_is_made_of_it() {
    let name = "n".repeat(usize::try_from(JOB_NAME_BYTES.max).unwrap());
    assert_eq!(check_job_name(&name), Ok(()));
    let job = JobId::new(format!("{name}-{}", JOB_NUMBER.max)).unwrap();
    let role = DiskRole::data(usize::try_from(JOB_VOLUMES.max).unwrap() - 1).unwrap();
    let restarts = RESTARTS.max + REFUSALS.max;
    for name in [format!("{job}-r{restarts}-{role}"), format!("{job}-m99999999")] {
        assert!(VolumeName::new(&name).is_ok() && MigrationId::new(&name).is_ok(), "{name}");
    }
}

/// A path with a space was two fields of the guest's fstab, and systemd in it went into its emergency mode.
#[test]
fn a_mount_in_fstab_is_one_field() {
    assert_eq!(check_fstab_mount("/srv/data-1.ä"), Ok(()));
    for path in ["/srv/my data", "/srv/a\tb", "/srv/a\n/b", "/srv/a\\040b", "/srv/\u{7f}"] {
        let refused = check_fstab_mount(path);
        assert!(matches!(refused, Err(BadSpec::FstabMount(_))), "{path:?}: {refused:?}");
    }
}

#[test]
fn what_no_guest_can_have_is_refused_with_its_field() {
    let why = |spec: JobSpec| spec.check().unwrap_err().why;
    let with_volume = |mount: &str| JobSpec {
        volumes: vec![JobVolume { mount: mount.to_owned(), ..volume(0) }],
        ..job()
    };
    assert!(why(JobSpec { name: "A b".to_owned(), ..job() }).starts_with("name: "));
    assert!(why(JobSpec { command: Vec::new(), ..job() }).contains("names no program"));
    assert!(why(JobSpec { command: vec!["a\0".to_owned()], ..job() }).contains("zero byte"));
    let env = BTreeMap::from([("1A".to_owned(), String::new())]);
    assert!(why(JobSpec { env, ..job() }).starts_with("env: \"1A\""));
    assert!(why(with_volume("data")).contains("not an absolute path"));
    assert!(why(with_volume("/")).contains("not an absolute path"));
    assert!(why(with_volume("/a/../b")).contains("not an absolute path"));
    assert!(why(with_volume("//proc/x")).contains("belongs to the VM's system"));
    let twice = JobSpec { volumes: vec![volume(0), volume(0)], ..job() };
    assert!(why(twice).contains("volume v0 is named twice"));
    let over = JobVolume { mount: "/data0/".to_owned(), ..volume(1) };
    assert!(why(JobSpec { volumes: vec![volume(0), over], ..job() }).contains("both be mounted"));
    assert!(why(JobSpec { owner: "a\nb".to_owned(), ..job() }).starts_with("owner: "));
}

#[test]
fn a_vm_boots_from_its_root_disk_and_has_each_disk_once() {
    ends(&VM_DISKS, |disks: usize| vm(disks).check());
    let mut seed_first = vm(2);
    seed_first.disks.swap(0, 1);
    assert_eq!(seed_first.judge(), Err(BadSpec::NotRoot(DiskRole::Seed)));
    let mut twice = vm(2);
    twice.disks[1].role = DiskRole::Root;
    assert_eq!(twice.judge(), Err(BadSpec::DiskTwice(DiskRole::Root)));
}
