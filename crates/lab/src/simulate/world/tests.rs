//! Jobs that compute, and links that are shared.

use super::*;
use crate::simulate::outcome::JobTimes;
use crate::simulate::scenario;

fn simulated(lines: &str, rule: Rule) -> Run {
    let text = format!("title: T\nabout: A\nhours: 1\nvms: 0\nlook: 1s\n{lines}");
    run(&scenario::parse(&text, "s.yaml").expect("a scenario"), rule, 1)
}

fn ends(run: &Run) -> Vec<f64> {
    run.jobs.iter().map(|job| job.ended_s.expect("it has ended")).collect()
}

fn is_near(times: &[f64], expected: &[f64]) {
    let near = |(one, other): (&f64, &f64)| (one - other).abs() < 0.01;
    assert!(times.len() == expected.len() && times.iter().zip(expected).all(near), "{times:?}");
}

#[test]
fn a_job_alone_boots_and_computes() {
    let run = simulated("jobs: [{at: 5s, cpus: 2, compute: 20s}]\nboot: 3s\n", Rule::None);
    let job = &run.jobs[0];
    is_near(&[job.started_s, job.running_s].map(Option::unwrap_or_default), &[5.0, 8.0]);
    is_near(&ends(&run), &[28.0]);
}

/// The world after 30 s, without any look.
fn after_30_s(scenario: &Scenario, rule: Rule) -> World<'_> {
    let mut world = World::new(scenario, rule, 1);
    world.fill();
    while let Some(Reverse((at_ms, event))) = world.events.pop() {
        if at_ms > 30_000 {
            break;
        }
        world.now_ms = at_ms;
        world.apply(event);
        world.follow();
    }
    world
}

#[test]
fn who_has_nothing_of_the_cluster_any_more_is_forgotten() {
    let jobs = "jobs: [{compute: 5s}, {compute: 5s}]\n";
    let text = format!("title: T\nabout: A\nhours: 1\nhosts: 2\nvms: 0\n{jobs}");
    let scenario = scenario::parse(&text, "s.yaml").expect("a scenario");
    let world = after_30_s(&scenario, Rule::None);
    assert!(world.run.ended == 2 && world.held.is_empty(), "{:?}", world.held);
}

#[test]
fn the_planner_knows_in_each_pass_what_is_at_the_hosts() {
    let jobs = "jobs: [{compute: 5s, reads: 1MiB}, {at: 20s, compute: 50m, reads: 1MiB}]\n";
    let text = format!("title: T\nabout: A\nhours: 1\nhosts: 2\nvms: 0\n{jobs}");
    let scenario = scenario::parse(&text, "s.yaml").expect("a scenario");
    let world = after_30_s(&scenario, Rule::Perigee);
    let cluster = world.cluster.as_ref().expect("the planner was asked");
    for host in &world.hosts {
        let known = cluster.hosts.iter().find(|known| known.id == host.id).expect("it is up");
        let there = (world.placed_vcpus(host), host.free_memory_bytes);
        assert_eq!((known.running_vcpus, known.memory_free_bytes), there, "{}", host.id);
    }
    let placed: u32 = world.hosts.iter().map(|host| world.placed_vcpus(host)).sum();
    assert_eq!(placed, 1, "the first job has ended");
}

#[test]
fn a_vm_that_has_ended_is_forgotten() {
    let lines = "vms: 2\njobs: [{compute: 10s}, {compute: 50m}]\n";
    let text = format!("title: T\nabout: A\nhours: 1\n{lines}");
    let scenario = scenario::parse(&text, "s.yaml").expect("a scenario");
    let world = after_30_s(&scenario, Rule::None);
    let there: Vec<usize> = world.vms.iter().map(|(number, _)| number).collect();
    assert_eq!(there, [0, 1, 3]);
}

#[test]
fn jobs_share_the_processors_of_their_host() {
    let jobs = "jobs: [{compute: 10s}, {compute: 10s}, {at: 5s, compute: 5s}]\n";
    let run = simulated(&format!("hosts: 2\ncpus: 1\novercommit: 2\n{jobs}"), Rule::None);
    // Each of the first two is alone at its host, until the third comes to the first one's.
    is_near(&ends(&run), &[15.0, 10.0, 15.0]);
}

#[test]
fn a_job_waits_until_another_one_has_booted_or_ended() {
    let jobs = "jobs: [{compute: 10s}, {compute: 10s}, {compute: 10s}, {compute: 10s}]\n";
    let lines = format!("hosts: 2\ncpus: 1\novercommit: 1\nboot: 2s\nstarts: 1\n{jobs}");
    let run = simulated(&lines, Rule::None);
    is_near(&ends(&run), &[12.0, 12.0, 24.0, 24.0]);
    let lines = format!("hosts: 2\ncpus: 4\novercommit: 1\nboot: 2s\nstarts: 1\n{jobs}");
    is_near(&ends(&simulated(&lines, Rule::None)), &[12.0, 12.0, 14.0, 14.0]);
}

#[test]
fn jobs_that_copy_from_one_host_share_its_card() {
    let job = "{compute: 10s, reads: 1000MiB}";
    let took = |count: usize| {
        let jobs = vec![job; count].join(", ");
        let lines = format!("hosts: 30\ncpus: 1\novercommit: 1\nlink: 100MiB\njobs: [{jobs}]\n");
        let run = simulated(&lines, Rule::None);
        ends(&run).into_iter().fold(0.0, f64::max)
    };
    // The data of a job alone take 10 s, if they are elsewhere. 30 jobs at 30 hosts ask some hosts for the data of several.
    assert!(took(1) <= 20.01 && took(30) > 25.0, "{} {}", took(1), took(30));
}

#[test]
fn a_job_starts_only_where_its_data_are_if_the_rule_says_so() {
    let job = "{compute: 10s, reads: 1GiB}";
    let jobs = [job; 12].join(", ");
    let lines = format!("hosts: 4\ncpus: 1\novercommit: 1\njobs: [{jobs}]\n");
    let local = simulated(&lines, Rule::DataLocal);
    assert!(local.network_s < 1e-9, "nothing is copied");
    let anywhere = simulated(&lines, Rule::None);
    assert!(anywhere.network_s > 1.0, "some jobs copy their data");
}

#[test]
fn the_planner_starts_a_job_at_its_data_if_copying_takes_longer() {
    let run = simulated("hosts: 4\njobs: [{compute: 10s, reads: 10GiB}]\n", Rule::Perigee);
    is_near(&ends(&run), &[10.0]);
}

#[test]
fn the_vms_of_a_parallel_job_start_and_end_together() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let line = |number: u32, processors: u32| {
        format!("{number} 0 0 100 {processors} -1 -1 -1 -1 -1 1 1 1 -1 -1 -1 -1 -1\n")
    };
    std::fs::write(file.path(), line(1, 16) + &line(2, 24)).expect("a log");
    let log = file.path().display();
    let run = simulated(&format!("hosts: 4\novercommit: 1\njobs: {{swf: {log}}}\n"), Rule::None);
    // 16 and 24 processors, of 32.
    is_near(&ends(&run), &[100.0, 200.0]);
    assert_eq!(run.ended, 2);
}

#[test]
fn a_job_whose_host_fails_begins_anew() {
    let jobs = ["{compute: 20m}"; 8].join(", ");
    let text = format!("title: T\nabout: A\nhours: 1\nvms: 0\nfailures: 3\njobs: [{jobs}]\n");
    let scenario = scenario::parse(&text, "s.yaml").expect("a scenario");
    let runs: Vec<Run> = (1..=10).map(|seed| run(&scenario, Rule::None, seed)).collect();
    assert!(runs.iter().any(|run| run.failed > 0));
    let took = runs.iter().flat_map(|run| &run.jobs).filter_map(JobTimes::took_s);
    let (in_time, late): (Vec<f64>, Vec<f64>) = took.partition(|took_s| *took_s < 1200.01);
    assert!(!in_time.is_empty() && !late.is_empty(), "{late:?}");
    assert!(late.iter().all(|took_s| *took_s > 1260.0), "they begin anew elsewhere: {late:?}");
}

#[test]
fn what_vms_read_makes_moves_longer_and_a_full_link_makes_them_lose() {
    let lines = "vms: 40\nsites: 2\nstart: half\nload: steady\nfar: 0.1\n";
    let with = |more: &str| {
        let text = format!("title: T\nabout: A\nhours: 1\n{lines}{more}");
        run(&scenario::parse(&text, "s.yaml").expect("a scenario"), Rule::None, 1)
    };
    let (none, little) = (with(""), with("reads: 1MiB\n"));
    assert!((none.network_s - little.network_s).abs() < 1e-6, "the links have room for all");
    let much = with("reads: 100MiB\nuplink: 100MiB\n");
    assert!(much.network_s > 2.0 * none.network_s, "{} {}", much.network_s, none.network_s);
}

#[test]
fn a_seed_gives_the_same_run_again_with_jobs_and_full_links() {
    let lines =
        "sites: 3\nfar: 0.2\nreads: 40MiB\nuplink: 60MiB\nfailures: 3\nload: noise\nstart: half\n";
    for jobs in ["{per-hour: 300, like: borg}", "{per-hour: 300, like: azure}"] {
        let text =
            format!("title: T\nabout: A\nhours: 1\nlook: 1m\nboot: 5s\n{lines}jobs: {jobs}\n");
        let scenario = scenario::parse(&text, "s.yaml").expect("a scenario");
        for rule in Rule::ALL {
            let once = || Run { decided_s: Vec::new(), ..run(&scenario, rule, 7) };
            assert_eq!(once(), once(), "{}", rule.word());
        }
    }
}
