//! The parts of a host, its agent and its volume server: which of them answers, and since when one does not.
//!
//! A VM lives without its agent, and waits for its volume server. So a host is lost only when neither of the two answers, or
//! when the volume server answers and has not seen the VM for as long.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_model::job::HostState;
use perigee_model::volume::VmSocketSeen;
use perigee_model::waiting::{Waiting, WaitsFor};
use perigee_model::{HostId, VmId};

use super::hosts::{HostLink, Hosts};
use super::now_ms;

/// How many requests in a row a part has to miss before it counts as silent.
pub(super) const MISSED_MIN: u32 = 2;

/// An agent that was stopped in order is waited for as long as QEMU waits for its disks.
const STOPPED_MAX: Duration = Duration::from_secs(600);
/// What was under way when an agent said that it stops may arrive so much later.
const UNDER_WAY: Duration = Duration::from_secs(1);

/// When a part was heard of.
#[derive(Debug, Clone)]
pub struct Heard {
    /// The last answer or registration; at first the time when the controller started to wait.
    pub at: Instant,
    /// Requests since then that have failed.
    pub missed: u32,
    pub seen_ms: u64,
}

impl Heard {
    /// Starts to wait for a part that was last heard of at the Unix time `seen_ms`.
    pub fn new(seen_ms: u64) -> Self {
        Self { at: Instant::now(), missed: 0, seen_ms }
    }

    /// The part has answered just now.
    pub fn now(&mut self) {
        (self.at, self.missed, self.seen_ms) = (Instant::now(), 0, now_ms());
    }

    /// A request to the part has failed.
    pub fn missed(&mut self) {
        self.missed = self.missed.saturating_add(1);
    }

    /// A part is unreachable when it has been silent for the deadline although it was asked. The controller itself may
    /// have stood still meanwhile (a suspended machine, a paused VM): then no host was asked, or one request ran into it.
    pub fn state(&self, deadline: Duration) -> HostState {
        if self.at.elapsed() > deadline && self.is_silent() {
            HostState::Unreachable
        } else {
            HostState::Up
        }
    }

    /// Whether it does not answer just now.
    pub fn is_silent(&self) -> bool {
        self.missed >= MISSED_MIN
    }
}

/// What is known of a host's volume server.
#[derive(Debug)]
pub struct VolumeServer {
    pub heard: Heard,
    /// Since when it has answered each time.
    answers_since: Option<Instant>,
    /// The VMs whose QEMUs had connections to it, and when it has last said so.
    vms: BTreeMap<VmId, Instant>,
}

impl VolumeServer {
    /// A volume server that has not answered yet, and was last heard of at the Unix time `seen_ms`.
    pub fn new(seen_ms: u64) -> Self {
        Self { heard: Heard::new(seen_ms), answers_since: None, vms: BTreeMap::new() }
    }

    /// The volume server has answered with its VMs' sockets. A VM was seen there if one of them has a connection.
    pub fn heard(&mut self, sockets: &[VmSocketSeen]) {
        self.heard.now();
        self.answers_since.get_or_insert_with(Instant::now);
        self.vms.retain(|vm, _| sockets.iter().any(|seen| seen.socket.vm == *vm));
        for seen in sockets.iter().filter(|seen| seen.connections > 0) {
            self.vms.insert(seen.socket.vm.clone(), Instant::now());
        }
    }

    /// A request to the volume server has failed.
    pub fn missed(&mut self) {
        self.heard.missed();
        if self.heard.is_silent() {
            self.answers_since = None;
        }
    }

    /// Whether it has answered for as long as the deadline, and has not seen the VM in all that time. A QEMU needs a moment to
    /// connect again.
    fn misses(&self, vm: &VmId, deadline: Duration) -> bool {
        let for_long = self.answers_since.is_some_and(|since| since.elapsed() > deadline);
        for_long && self.vms.get(vm).is_none_or(|at| at.elapsed() > deadline)
    }
}

impl Hosts {
    /// The host's agent stops in order, and its VMs go on.
    pub fn stops(&self, id: &HostId) {
        if let Some(known) = self.lock().get_mut(id) {
            known.stopped = Some(Instant::now());
        }
    }

    /// What the volume server has said of the VMs; `None`: it does not answer.
    pub fn note_volume_server(&self, id: &HostId, sockets: Option<&[VmSocketSeen]>) {
        let mut hosts = self.lock();
        let Some(known) = hosts.get_mut(id) else { return };
        let was_silent = known.volume_server.heard.is_silent();
        match sockets {
            Some(sockets) => known.volume_server.heard(sockets),
            None => known.volume_server.missed(),
        }
        match (was_silent, known.volume_server.heard.is_silent()) {
            (false, true) => tracing::warn!("the volume server of host {id} does not answer"),
            (true, false) => tracing::info!("the volume server of host {id} is back"),
            _ => {}
        }
    }

    /// The hosts whose volume servers answer, whatever their agents do.
    pub fn serving(&self) -> Vec<Arc<HostLink>> {
        let hosts = self.lock();
        let serving = hosts.values().filter(|known| !known.volume_server.heard.is_silent());
        serving.map(|known| Arc::clone(&known.link)).collect()
    }

    /// The hosts all of whose parts answer: new work is given to them.
    pub fn able(&self) -> Vec<Arc<HostLink>> {
        let mut hosts = self.serving();
        hosts.retain(|host| self.state(&host.id) == HostState::Up);
        hosts
    }

    /// Whether the host is lost with this VM, as far as that can be seen from here.
    pub fn is_lost(&self, id: &HostId, vm: &VmId) -> bool {
        let hosts = self.lock();
        let Some(known) = hosts.get(id) else { return true };
        if known.state(self.deadline) == HostState::Up {
            return false;
        }
        let server = &known.volume_server;
        match server.heard.state(self.deadline) {
            HostState::Up => server.misses(vm, self.deadline),
            HostState::Unreachable => known.stopped.is_none_or(|at| at.elapsed() > STOPPED_MAX),
        }
    }

    /// The parts of the host that do not answer, and since when.
    pub fn waits(&self, id: &HostId) -> Vec<Waiting> {
        self.lock().get(id).map(|known| known.waits(id)).unwrap_or_default()
    }

    /// The volume server of the host, if it does not answer.
    pub fn waits_for_volume_server(&self, id: &HostId) -> Option<Waiting> {
        let is_server =
            |waiting: &Waiting| matches!(waiting.waits_for, WaitsFor::VolumeServer { .. });
        self.waits(id).into_iter().find(is_server)
    }

    /// What a VM waits for as its host has said it, with the homes' names in the place of their addresses.
    pub fn named_waits(&self, waits: &[Waiting]) -> Vec<Waiting> {
        let hosts = self.lock();
        let named = waits.iter().cloned().map(|mut waiting| {
            if let WaitsFor::Home { home, .. } = &mut waiting.waits_for {
                let of = hosts.iter().find(|(_, known)| known.link.addresses.nbd_addr == *home);
                *home = of.map_or_else(|| home.clone(), |(id, _)| id.to_string());
            }
            waiting
        });
        named.collect()
    }
}

impl super::hosts::HostEntry {
    /// The host's agent has answered just now. If it has said that it stops, that still holds for a moment: the answer
    /// may have been under way.
    pub fn is_heard(&mut self) {
        self.heard.now();
        self.trouble.clear();
        self.stopped = self.stopped.filter(|at| at.elapsed() < UNDER_WAY);
    }

    /// Whether its agent answers.
    pub fn state(&self, deadline: Duration) -> HostState {
        self.heard.state(deadline)
    }

    /// Which of the host's parts are waited for, and since when.
    pub fn waits(&self, id: &HostId) -> Vec<Waiting> {
        let mut waits = Vec::new();
        if self.heard.is_silent() {
            let host = id.clone();
            let waits_for = match self.stopped {
                Some(_) => WaitsFor::StoppedAgent { host },
                None => WaitsFor::Agent { host },
            };
            waits.push(Waiting { waits_for, since_ms: self.heard.seen_ms });
        }
        if self.volume_server.heard.is_silent() {
            let waits_for = WaitsFor::VolumeServer { host: id.clone() };
            waits.push(Waiting { waits_for, since_ms: self.volume_server.heard.seen_ms });
        }
        waits
    }
}
