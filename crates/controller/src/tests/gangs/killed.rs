//! The controller of a gang is killed at its writes.

use perigee_model::HostId;
use perigee_model::job::MoveJob;

use super::moves::{Way, carry};
use super::*;
use crate::records::{JobIntent, job_intent_key};

/// What happens to a gang while its controller is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Story {
    Ends,
    Fails,
    IsCancelled,
    /// Its first host is lost, and does not come back.
    IsLost,
    /// All of its VMs move.
    Moves,
    /// They are to move, and one can't.
    MovesBack,
}

/// A guest that ends when it is asked to is not started again for its outputs, however busy the machine is.
const PATIENT: Timing = Timing { cancel_deadline: PATIENCE, collect_deadline: PATIENCE, ..TIMING };

/// The controller is killed instead of this write among those of the gang, and started again. Returns false if the gang
/// has ended with fewer writes.
async fn killed_at(write: u64, story: Story) -> bool {
    let mut lab = Lab::up().await;
    lab.supervisor.stop().await;
    lab.start_controller(PATIENT).await;
    let second = second_home(&lab).await;
    let cut = lab.cluster.records.counts.cut_at("g-0001", write);
    let restart = Restart::OnHostFailure;
    let start = match story {
        Story::Moves | Story::MovesBack => Start::Site("home".parse().expect("a name")),
        _ => Start::Anywhere,
    };
    let new = JobSpec { restart, memory_bytes: 400 << 20, start, ..gang(2) };
    let cluster = lab.cluster.clone();
    let submission = tokio::spawn(async move { jobs::submit(&cluster, new).await });
    let id = JobId::new("g-0001").expect("a name");
    let (mut is_cut, mut was_asked, mut has_moved) = (false, false, false);
    let mut lost = None;
    let begun = Instant::now();
    let job = loop {
        if !is_cut && cut.is_reached() {
            is_cut = true;
            submission.abort();
            lab.supervisor.stop().await;
            lab.start_controller(PATIENT).await;
            if jobs::get(&lab.cluster, &id).await.is_err() {
                // It was cut before anything was recorded.
                lab.supervisor.stop().await;
                return true;
            }
        }
        let hosts = [&lab.home, &lab.cloud, &second];
        let started = (0..2).map(|rank| starts(&hosts, &member(&id, rank))).max().unwrap_or(0);
        let does = |rank| match story {
            Story::Ends => Does::Ends(0),
            Story::Fails if rank == 1 => Does::Ends(3),
            Story::IsLost if started > 1 => Does::Ends(0),
            Story::Moves | Story::MovesBack if has_moved => Does::Ends(0),
            _ => Does::RunsOn,
        };
        play(&hosts, &does);
        carry(&hosts, &|rank, _: &HostId| match story {
            Story::MovesBack if rank == 1 => Way::Fails,
            _ => Way::Arrives,
        });
        if let Ok(job) = jobs::get(&lab.cluster, &id).await {
            if job.state.is_final() {
                break job;
            }
            let runs = all_run(&job);
            let moves = matches!(story, Story::Moves | Story::MovesBack);
            if moves && runs && !has_moved {
                match &job.gang_move {
                    None if was_asked && !is_cut => {}
                    None => {
                        was_asked = true;
                        // This may be what is cut, and is then asked for again.
                        let key = job_intent_key(&id);
                        let asked = lab.cluster.records.read::<JobIntent>(&key).await;
                        if asked.expect("a store").is_some_and(|asked| asked.move_gang.is_some()) {
                            continue;
                        }
                        let ask =
                            MoveJob { hosts: vec![lab.cloud.id.clone()], ..MoveJob::default() };
                        let (cluster, of) = (lab.cluster.clone(), id.clone());
                        let asked = tokio::spawn(async move {
                            jobs::ask_to_move(&cluster, &of, ask).await.ok();
                        });
                        if is_cut {
                            asked.await.expect("no panic");
                        }
                    }
                    Some(of) if !of.is_open() => {
                        has_moved = true;
                        let is_there = |one: &perigee_model::job::Member| {
                            one.host.as_ref() == Some(&lab.cloud.id)
                        };
                        let there = job.members.iter().filter(|one| is_there(one)).count();
                        let expected = if story == Story::Moves { 2 } else { 0 };
                        assert_eq!(there, expected, "{story:?} without write {write}: {job:?}");
                        assert_eq!(of.is_undone(), story == Story::MovesBack, "{of:?}");
                    }
                    Some(_) => {}
                }
            }
            if runs && story == Story::IsCancelled && (!was_asked || is_cut) {
                was_asked = true;
                // This may be what is cut, and is then asked for again.
                let cluster = lab.cluster.clone();
                let of = id.clone();
                tokio::spawn(async move {
                    jobs::intend(&cluster, &of, |intent| intent.cancel = true).await.ok();
                });
            }
            if runs && story == Story::IsLost && lost.is_none() {
                let host = job.members[0].host.clone();
                let host = hosts.into_iter().find(|of| Some(&of.id) == host.as_ref());
                let host = host.expect("its host");
                host.inside().down = true;
                lost = Some(host.id.clone());
            }
            let waited = begun.elapsed();
            assert!(waited < PATIENCE, "{story:?} without write {write}: {job:?}");
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let expected = match story {
        Story::Ends | Story::IsLost | Story::Moves | Story::MovesBack => JobState::Succeeded,
        Story::Fails => JobState::Failed,
        Story::IsCancelled => JobState::Cancelled,
    };
    assert_eq!(job.state, expected, "{story:?} without write {write}: {}", job.reason);
    let hosts = [&lab.home, &lab.cloud, &second];
    // The QEMU at a destination counts too.
    let runs = match story {
        Story::Ends | Story::Fails | Story::IsCancelled => [1, 1],
        Story::IsLost | Story::Moves => [2, 2],
        Story::MovesBack => [3, 2],
    };
    for (rank, runs) in (0..).zip(runs) {
        let started = starts(&hosts, &member(&id, rank));
        assert_eq!(started, runs, "{story:?} without write {write}: rank {rank}");
    }
    let there: Vec<&FakeHost> =
        hosts.into_iter().filter(|host| Some(&host.id) != lost.as_ref()).collect();
    wait_until_clean(&there).await;
    let own = networks::own_name(&id).expect("a name");
    networks::find(&lab.cluster, &own).await.expect_err("its network went with it");
    lab.supervisor.stop().await;
    is_cut
}

/// Tries one write of each three, another one in each run; all with `PERIGEE_EVERY_WRITE=1`, which takes some minutes.
async fn killed_at_writes(story: Story) {
    const AT_ONCE: usize = 4;
    let every = std::env::var_os("PERIGEE_EVERY_WRITE").map_or(3, |_| 1);
    let first = 1 + u64::from(std::process::id()) % every;
    let mut writes = (first..).step_by(usize::try_from(every).expect("it is small"));
    let mut tried = 0;
    loop {
        let tries = writes.by_ref().take(AT_ONCE).map(|write| killed_at(write, story));
        let were_cut = futures_util::future::join_all(tries).await;
        tried += were_cut.iter().filter(|was_cut| **was_cut).count();
        if were_cut.contains(&false) {
            break;
        }
    }
    assert!(tried > 5, "{story:?}: it was killed at {tried} writes only");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_at_any_write_of_a_gang_neither_loses_nor_doubles_a_member() {
    killed_at_writes(Story::Ends).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_at_any_write_of_a_gang_that_fails_ends_all_of_it() {
    killed_at_writes(Story::Fails).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_at_any_write_of_a_gang_that_is_cancelled_ends_all_of_it() {
    killed_at_writes(Story::IsCancelled).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_at_any_write_of_a_gang_that_is_lost_starts_it_again_once() {
    killed_at_writes(Story::IsLost).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_at_any_write_of_a_gang_that_moves_moves_all_of_it() {
    killed_at_writes(Story::Moves).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_at_any_write_of_a_gang_that_can_t_move_leaves_all_of_it() {
    killed_at_writes(Story::MovesBack).await;
}
