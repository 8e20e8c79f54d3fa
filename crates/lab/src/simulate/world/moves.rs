//! How VMs move.
//!
//! A move takes what the planner predicts, times a random factor, if nothing else is on its way. What it sends shares the links with all
//! else, so it takes longer if something is.

use perigee_planner::MoveCost;
use perigee_planner::balance::COPYING_CPUS;

use super::World;
use super::flows::Owner;
use super::work::Work;

/// A VM that returns so soon to the host it has left went to and fro.
const BACK_S: u64 = 1800;
/// A move takes so much of what was predicted, at least and at most.
const TAKES: (f64, f64) = (0.7, 1.6);

impl World<'_> {
    /// Whether the VM has booted and copied its data.
    pub(super) fn may_move(&self, vm: usize) -> bool {
        self.vms[vm].work.as_ref().is_none_or(Work::has_booted)
    }

    /// What a move costs, by the planner.
    pub(super) fn cost(&self, vm: usize, from: usize, to: usize) -> &MoveCost {
        let [from, to] = [from, to].map(|host| &self.hosts[host].site);
        self.prices[&self.vms[vm].size.memory_bytes].of_move(from, to)
    }

    pub(super) fn begin_move(&mut self, vm: usize, to: usize) {
        let Some(from) = self.vms[vm].host else { return };
        let size = self.vms[vm].size;
        if !self.may_move(vm) {
            self.run.refused += 1;
            return;
        }
        let is_busy = self.hosts[from].in_a_move || self.hosts[to].in_a_move;
        if from == to || is_busy || self.vms[vm].moving_to.is_some() || !self.has_room(to, size) {
            self.run.refused += 1;
            return;
        }
        let cost = self.cost(vm, from, to).clone();
        let times = TAKES.0 + (TAKES.1 - TAKES.0) * self.luck.share();
        self.run.moves += 1;
        self.run.moving_s += self.vms[vm].wanted * cost.job_s * times;
        self.hosts[to].free_memory_bytes -= size.memory_bytes;
        self.hosts[to].free_vcpus -= size.cpus;
        for host in [from, to] {
            self.settle(host);
            self.hosts[host].copying += COPYING_CPUS;
            self.hosts[host].in_a_move = true;
        }
        self.vms[vm].moving_to = Some(to);
        let takes_s = std::time::Duration::from_secs_f64(cost.total_s * times).as_secs() + 1;
        let rate = self.alone(from, to);
        let flow = self.send(Owner::Move(vm), (from, to), rate, Some(takes_s as f64 * rate));
        self.vms[vm].moves_over = Some(flow);
    }

    /// Ends the VM's move, if there is one, and returns its hosts. The room at the target is free again.
    fn end_move(&mut self, vm: usize) -> Option<(usize, usize)> {
        let to = self.vms[vm].moving_to.take()?;
        let from = self.vms[vm].host?;
        self.vms[vm].move_turn += 1;
        if let Some(flow) = self.vms[vm].moves_over.take() {
            self.network.end(flow);
        }
        for host in [from, to] {
            self.settle(host);
            self.hosts[host].copying -= COPYING_CPUS;
            self.hosts[host].in_a_move = false;
        }
        self.release(to, self.vms[vm].size);
        Some((from, to))
    }

    pub(super) fn give_up_move(&mut self, vm: usize) {
        if self.end_move(vm).is_some() {
            self.run.given_up += 1;
        }
    }

    pub(super) fn moved(&mut self, vm: usize) {
        let Some((from, to)) = self.end_move(vm) else { return };
        let now_s = self.now_s();
        let since_s = self.vms[vm].moved_s.map(|moved_s| now_s - moved_s);
        if self.vms[vm].left == Some(to) && since_s.is_some_and(|since_s| since_s < BACK_S) {
            self.run.back += 1;
        }
        (self.vms[vm].left, self.vms[vm].moved_s) = (Some(from), Some(now_s));
        self.hunted = to;
        self.take(vm);
        self.put(vm, to);
    }
}
