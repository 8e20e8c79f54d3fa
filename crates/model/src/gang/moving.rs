//! A move of a gang: all of its VMs move, or none.
//!
//! They move one after another, each with a live migration of its own. What is done next is decided here, by the move's record
//! and by what is seen of the members: [`next`] is a pure function, so each order of events can be walked.
//!
//! ```text
//! there ─> each VM that is not there is moved, one after another ─> all are there ─> over
//!    \ one is refused, fails or is called off
//!     back ─> the migration that is under way is called off; each VM that was moved is moved back ─> over
//! ```
//!
//! The room at both ends is kept until the move is over, so there is a way back. On the way back nothing is given up: a VM that
//! can't come back now is tried again, and the record says why it waits. Only a host that was removed from the cluster is not
//! waited for.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::HostId;
use crate::volume_move::VolumesOnMove;

/// The pause after a VM has not come back; doubled for each further time, up to [`PAUSE_MAX_MS`].
const PAUSE_FIRST_MS: u64 = 5_000;
/// The longest pause between two tries.
const PAUSE_MAX_MS: u64 = 5 * 60 * 1000;

/// A move of all VMs of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GangMove {
    /// Which of the job's moves it is, from 1 on.
    pub number: u32,
    /// The request that it carries out; `None`: the planner wants it.
    pub asked: Option<u64>,
    /// Why the VMs move.
    pub reason: String,
    /// Unix time.
    pub started_ms: u64,
    /// All VMs are there, or all are where they were; Unix time.
    pub ended_ms: Option<u64>,
    /// One for each VM, in the order of their ranks.
    pub legs: Vec<Leg>,
    /// Why the VMs go back, or did not move at all; empty: they do not.
    pub undone: String,
    /// Why a VM that is to go back can't do so now.
    pub trouble: String,
    /// Whether the disks of a VM come after it, and go back with it.
    #[serde(default)]
    pub volumes: VolumesOnMove,
}

/// What one VM of a job does when all of them move.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Leg {
    /// Where it was.
    pub from: HostId,
    /// Where it goes. A VM that is there already stays.
    pub to: HostId,
    /// The number of its last migration before the present direction was taken.
    pub after: u32,
}

impl GangMove {
    /// Whether its VMs move, or go back.
    pub fn is_open(&self) -> bool {
        self.ended_ms.is_none()
    }

    /// Whether its VMs go back, or have gone back.
    pub fn is_undone(&self) -> bool {
        !self.undone.is_empty()
    }

    /// Where a VM is to be in the end.
    pub fn goal<'a>(&self, leg: &'a Leg) -> &'a HostId {
        if self.is_undone() { &leg.from } else { &leg.to }
    }
}

/// What is seen of one member.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SeenVm {
    /// Where its VM is, as its job has recorded.
    pub at: Option<HostId>,
    /// Its VM does not move any more: its command has ended, or it is being taken down.
    pub is_over: bool,
    /// Where it was is not a host of the cluster any more.
    pub has_no_way_back: bool,
    /// A migration of it is under way, or its job has not recorded yet how it ended.
    pub is_moving: bool,
    /// Where that goes, while it can still be called off, and was not.
    pub moves_to: Option<HostId>,
    /// The host where its VM is does not answer, so nobody can say how a migration of it ends.
    pub is_silent: bool,
    /// Its migrations in this direction that have failed in a row, the last one's reason, and when that ended; or the last one
    /// that was refused.
    pub failed: Option<Failed>,
}

/// Of a VM's last migration in this direction.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Failed {
    /// Why.
    pub why: String,
    /// When, in the time that the controller has seen to pass.
    pub at_ms: u64,
    /// So many in a row.
    pub times: u32,
}

/// What is done next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// Nothing, until something of a member changes.
    Wait,
    /// The migration of this rank takes it away from where it is to be.
    CallOff(usize),
    /// Records, with the reason, that all go back.
    Undo(String),
    /// This rank is moved to its goal.
    Start(usize),
    /// This rank has not come back, for this reason. It is tried again after a pause.
    Pause(usize, String),
    /// All are where they are to be.
    End,
}

/// Decides it. `seen` is in the order of the ranks.
pub fn next(of: &GangMove, seen: &[SeenVm], now_ms: u64) -> Next {
    let each = || of.legs.iter().zip(seen).enumerate();
    let is_wrong =
        |leg: &Leg, vm: &SeenVm| vm.moves_to.as_ref().is_some_and(|to| to != of.goal(leg));
    if let Some((rank, _)) = each().find(|(_, (leg, vm))| !vm.is_over && is_wrong(leg, vm)) {
        return Next::CallOff(rank);
    }
    let mut moving = each().filter(|(_, (_, vm))| !vm.is_over && vm.is_moving).peekable();
    let is_any_moving = moving.peek().is_some();
    // On the way back nobody waits for one whose host is silent.
    if moving.any(|(_, (_, vm))| !(of.is_undone() && vm.is_silent)) {
        return Next::Wait;
    }
    let is_away = |leg: &Leg, vm: &SeenVm| {
        let stays = vm.is_over || vm.is_moving || (of.is_undone() && vm.has_no_way_back);
        !stays && vm.at.as_ref() != Some(of.goal(leg))
    };
    let mut paused = None;
    for (rank, (_, vm)) in each().filter(|(_, (leg, vm))| is_away(leg, vm)) {
        match &vm.failed {
            Some(failed) if !of.is_undone() => {
                return Next::Undo(format!("rank {rank} did not move: {}", failed.why));
            }
            Some(failed) if now_ms.saturating_sub(failed.at_ms) < pause_ms(failed.times) => {
                paused.get_or_insert((rank, failed.why.clone()));
            }
            _ => return Next::Start(rank),
        }
    }
    match paused {
        Some((rank, why)) => Next::Pause(rank, why),
        None if is_any_moving => Next::Wait,
        None => Next::End,
    }
}

fn pause_ms(times: u32) -> u64 {
    let doublings = times.saturating_sub(1).min(16);
    (PAUSE_FIRST_MS << doublings).min(PAUSE_MAX_MS)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn host(name: &str) -> HostId {
        HostId::new(name).unwrap()
    }

    fn move_of(count: usize) -> GangMove {
        let leg = |_| Leg { from: host("home"), to: host("cloud"), after: 0 };
        GangMove {
            number: 1,
            asked: None,
            reason: "talk".to_owned(),
            started_ms: 0,
            ended_ms: None,
            legs: (0..count).map(leg).collect(),
            undone: String::new(),
            trouble: String::new(),
            volumes: VolumesOnMove::Stay,
        }
    }

    fn at(name: &str) -> SeenVm {
        SeenVm { at: Some(host(name)), ..SeenVm::default() }
    }

    /// What can happen to the move and its members, as numbers, so that worlds that were seen are known again.
    #[derive(Debug, Clone, PartialEq, Eq, Hash)]
    struct World {
        undone: bool,
        /// Of each VM: whether it is there, whether it moves (and whether to there), how often that has failed in this direction.
        vms: Vec<(bool, Option<bool>, u32)>,
        over: Vec<bool>,
        /// The migration of this one was called off, and has not ended yet.
        called_off: Vec<bool>,
        /// The host of this one does not answer.
        silent: Vec<bool>,
        /// So many more failures may come.
        faults: u32,
        /// A person may still call it off.
        may_call_off: bool,
    }

    impl World {
        fn seen(&self) -> (GangMove, Vec<SeenVm>) {
            let name = |there: bool| host(if there { "cloud" } else { "home" });
            let mut of = move_of(self.vms.len());
            if self.undone {
                of.undone = "because".to_owned();
            }
            let vms = self.vms.iter().enumerate().map(|(rank, (there, moves, failures))| {
                let failed = Failed { why: "no".to_owned(), at_ms: 0, times: *failures };
                SeenVm {
                    at: Some(name(*there)),
                    is_over: self.over[rank],
                    is_moving: moves.is_some(),
                    moves_to: moves.filter(|_| !self.called_off[rank]).map(name),
                    is_silent: self.silent[rank],
                    failed: (*failures > 0).then_some(failed),
                    has_no_way_back: false,
                }
            });
            (of, vms.collect())
        }

        /// What may follow from here, whatever the order; the driver's own step is the first.
        fn next(&self) -> Vec<Self> {
            let (of, seen) = self.seen();
            let mut worlds = Vec::new();
            // Late enough for each pause to be over.
            match next(&of, &seen, u64::MAX / 2) {
                Next::Wait => {}
                Next::End => return Vec::new(),
                Next::Undo(_) => {
                    let mut world = self.clone();
                    world.undone = true;
                    world.vms.iter_mut().for_each(|vm| vm.2 = 0);
                    worlds.push(world);
                }
                Next::CallOff(rank) => {
                    assert!(!self.called_off[rank], "once is enough: {self:?}");
                    let mut world = self.clone();
                    world.called_off[rank] = true;
                    worlds.push(world);
                }
                Next::Start(rank) => {
                    let moves = |of: usize| self.vms[of].1.is_some();
                    let moving = (0..self.vms.len()).filter(|of| moves(*of));
                    let waited_for = moving.filter(|of| !(self.undone && self.silent[*of])).count();
                    assert_eq!(
                        (waited_for, moves(rank)),
                        (0, false),
                        "one after another: {self:?}"
                    );
                    let mut world = self.clone();
                    world.vms[rank].1 = Some(!self.undone);
                    worlds.push(world);
                    // It is refused: the driver undoes the move, or tries again later.
                    if self.faults > 0 {
                        let mut world = self.clone();
                        world.faults -= 1;
                        if self.undone {
                            world.vms[rank].2 += 1;
                        } else {
                            world.undone = true;
                            world.vms.iter_mut().for_each(|vm| vm.2 = 0);
                        }
                        worlds.push(world);
                    }
                }
                Next::Pause(..) => panic!("each pause is over: {self:?}"),
            }
            for rank in 0..self.vms.len() {
                if self.silent[rank] {
                    let mut world = self.clone();
                    world.silent[rank] = false;
                    worlds.push(world);
                } else if self.vms[rank].1.is_some() {
                    let mut world = self.clone();
                    world.ends(rank, true);
                    worlds.push(world);
                    if self.faults > 0 {
                        let mut world = self.clone();
                        world.faults -= 1;
                        world.silent[rank] = true;
                        worlds.push(world);
                    }
                    if self.faults > 0 || self.called_off[rank] {
                        let mut world = self.clone();
                        world.faults -= u32::from(!self.called_off[rank]);
                        world.ends(rank, false);
                        worlds.push(world);
                    }
                } else if self.faults > 0 && !self.over[rank] {
                    // Its command ends.
                    let mut world = self.clone();
                    world.faults -= 1;
                    world.over[rank] = true;
                    worlds.push(world);
                }
            }
            if self.may_call_off && !self.undone {
                let mut world = self.clone();
                (world.may_call_off, world.undone) = (false, true);
                world.vms.iter_mut().for_each(|vm| vm.2 = 0);
                worlds.push(world);
            }
            worlds
        }

        fn ends(&mut self, rank: usize, arrives: bool) {
            let Some(to) = self.vms[rank].1.take() else { return };
            self.called_off[rank] = false;
            match arrives {
                true => (self.vms[rank].0, self.vms[rank].2) = (to, 0),
                false if to != self.undone => self.vms[rank].2 += 1,
                // It was called off on its way to where it is not to be any more.
                false => {}
            }
        }
    }

    /// The states form no circle without a fault, because each fault is used up: so every walk ends.
    #[test]
    fn in_each_order_of_events_all_vms_are_there_or_none_is() {
        let first = World {
            undone: false,
            vms: vec![(false, None, 0); 3],
            over: vec![false; 3],
            called_off: vec![false; 3],
            silent: vec![false; 3],
            faults: 3,
            may_call_off: true,
        };
        let (mut open, mut known) = (vec![first.clone()], HashSet::from([first]));
        let (mut there, mut back) = (0, 0);
        while let Some(world) = open.pop() {
            let (of, seen) = world.seen();
            if next(&of, &seen, u64::MAX / 2) == Next::End {
                let goal = !world.undone;
                let mut vms = world.vms.iter().zip(&world.over);
                assert!(vms.all(|(vm, over)| *over || vm.0 == goal), "torn: {world:?}");
                if goal {
                    there += 1
                } else {
                    back += 1
                };
                continue;
            }
            let next = world.next();
            assert!(!next.is_empty(), "it stands still: {world:?}");
            open.extend(next.into_iter().filter(|world| known.insert(world.clone())));
        }
        assert!(there > 0 && back > 10 && known.len() > 500, "{there}, {back}, {}", known.len());
    }

    #[test]
    fn a_vm_that_can_t_come_back_is_tried_again_and_the_others_do_not_wait_for_it() {
        let undone = GangMove { undone: "no".to_owned(), ..move_of(2) };
        let failed = Failed { why: "host home is silent".to_owned(), at_ms: 1000, times: 1 };
        let stuck = SeenVm { failed: Some(failed), ..at("cloud") };
        assert_eq!(next(&undone, &[stuck.clone(), at("cloud")], 1001), Next::Start(1));
        let seen = [stuck.clone(), at("home")];
        let paused = Next::Pause(0, "host home is silent".to_owned());
        assert_eq!(next(&undone, &seen, 1001), paused);
        assert_eq!(next(&undone, &seen, 1000 + PAUSE_FIRST_MS), Next::Start(0));
        assert_eq!(pause_ms(u32::MAX), PAUSE_MAX_MS);
        // One is half way, and nobody knows: the others go back, and it is waited for in the end.
        let lost = SeenVm { is_moving: true, is_silent: true, ..at("home") };
        assert_eq!(next(&undone, &[lost.clone(), at("cloud")], 1001), Next::Start(1));
        assert_eq!(next(&undone, &[lost.clone(), at("home")], 1001), Next::Wait);
        assert_eq!(next(&move_of(2), &[lost, at("home")], 1001), Next::Wait);
        let stays = SeenVm { has_no_way_back: true, ..at("cloud") };
        assert_eq!(next(&undone, &[stays.clone(), at("home")], 1001), Next::End);
        assert_eq!(
            next(&move_of(2), &[stays, at("home")], 1001),
            Next::Start(1),
            "forward it counts for nothing"
        );
    }
}
