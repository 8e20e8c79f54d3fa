//! Walks every world that a job's VM can come into: it is started, moves, loses its host and begins anew, and
//! ends. Every message that was ever decided may come at any time, as often as it likes, also long after the
//! controller has stopped waiting for it. Agents crash in the middle of each request, and their disks refuse
//! writes. What the agents decide, [`Starts`] decides.

use std::collections::HashMap;

use super::*;

const HOSTS: usize = 2;
const RUNS: u32 = 2;
const MIGRATIONS: u32 = 2;

fn start(run: u32, migration: u32) -> VmStart {
    VmStart { submitted_ms: 0, run, migration }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Message {
    Start(VmStart),
    Delete(VmStart),
}

/// What the controller's store says.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Controller {
    run: u32,
    /// Migrations that were ever begun.
    migrations: u32,
    /// Where the VM is, or is to be started.
    at: usize,
    /// The start that is there, once its agent has answered.
    started: Option<VmStart>,
    open_move: Option<Move>,
    /// Deletes that no agent has answered yet.
    cleanups: Vec<(usize, VmStart)>,
    has_ended: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Move {
    to: usize,
    /// The destination's agent has answered that it waits.
    is_prepared: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    controller: Controller,
    agents: [Starts; HOSTS],
    /// Deletes up to this one were answered.
    answered: [Option<VmStart>; HOSTS],
    /// Every message that the controller has decided to send.
    sent: Vec<(usize, Message)>,
}

impl World {
    fn new() -> Self {
        let controller = Controller {
            run: 0,
            migrations: 0,
            at: 0,
            started: None,
            open_move: None,
            cleanups: Vec::new(),
            has_ended: false,
        };
        let mut world = Self {
            controller,
            agents: [Starts::default(); HOSTS],
            answered: [None; HOSTS],
            sent: Vec::new(),
        };
        world.send(0, Message::Start(start(0, 0)));
        world
    }

    fn send(&mut self, host: usize, message: Message) {
        let sent = (host, message);
        if !self.sent.contains(&sent) {
            self.sent.push(sent);
            self.sent.sort();
        }
    }

    fn hand_over(&mut self, host: usize, up_to: VmStart) {
        self.send(host, Message::Delete(up_to));
        self.controller.cleanups.push((host, up_to));
        self.controller.cleanups.sort();
        self.controller.cleanups.dedup();
    }

    /// The starts that must be there.
    fn wanted(&self) -> Vec<(usize, VmStart)> {
        let Controller { run, migrations, at, started, open_move, .. } = self.controller;
        let prepared = open_move.filter(|open| open.is_prepared);
        let comes = prepared.map(|open| (open.to, start(run, migrations)));
        started.map(|started| (at, started)).into_iter().chain(comes).collect()
    }

    /// Every way in which an agent may take a message; `true` with those in which it has answered "done".
    fn deliver(&self, host: usize, message: Message) -> Vec<(Self, bool)> {
        match message {
            Message::Start(asked) => self.start(host, asked),
            Message::Delete(asked) => self.delete(host, asked),
        }
    }

    fn start(&self, host: usize, asked: VmStart) -> Vec<(Self, bool)> {
        match self.agents[host].on_start(asked) {
            Err(_) => vec![(self.clone(), false)],
            Ok(OnStart::Same) => vec![(self.clone(), true)],
            Ok(OnStart::Begin) => {
                let mut begun = self.clone();
                begun.agents[host].here = Some(asked);
                // QEMU may also fail to start.
                vec![(begun, true), (self.clone(), false)]
            }
            Ok(OnStart::EndFirst(older)) => {
                let mut all = Vec::new();
                for (ended, is_done) in self.delete(host, older) {
                    if is_done {
                        all.extend(ended.start(host, asked));
                    }
                    all.push((ended, false));
                }
                all
            }
        }
    }

    /// The agent stores what is ended, ends QEMU, and answers.
    fn delete(&self, host: usize, asked: VmStart) -> Vec<(Self, bool)> {
        let (act, ended) = self.agents[host].on_delete(asked);
        let (mut stored, mut done, mut unstored) = (self.clone(), self.clone(), self.clone());
        stored.agents[host].ended = Some(ended);
        done.agents[host].ended = Some(ended);
        if act == OnDelete::End {
            // On a full disk QEMU is ended all the same, which makes room; the agent does not answer.
            done.agents[host].here = None;
            unstored.agents[host].here = None;
        }
        vec![(stored, false), (done, true), (unstored, false)]
    }

    fn late(&self) -> Vec<Self> {
        let late = self.sent.iter().flat_map(|(host, message)| self.deliver(*host, *message));
        late.map(|(world, _)| world).collect()
    }

    /// What the controller may do now.
    fn next(&self) -> Vec<Self> {
        let mut all = self.clean();
        let Controller { run, at, started, open_move, has_ended, .. } = self.controller;
        if has_ended {
            return all;
        }
        match (started, open_move) {
            (None, _) => all.extend(self.ask_for(at, start(run, 0), |world, start| {
                world.controller.started = Some(start);
            })),
            (Some(_), None) => all.extend(self.begin_move()),
            (Some(_), Some(open)) => all.extend(self.go_on_with_move(open)),
        }
        if open_move.is_none() {
            let mut ends = self.clone();
            ends.hand_over(at, start(run, 0).whole_run());
            (ends.controller.started, ends.controller.has_ended) = (None, true);
            all.push(ends);
            all.extend(self.begin_anew());
        }
        all
    }

    fn ask_for(
        &self,
        host: usize,
        start: VmStart,
        answered: impl Fn(&mut Self, VmStart),
    ) -> Vec<Self> {
        assert!(self.agents[host].on_start(start).is_ok(), "a wanted start is refused: {self:?}");
        let mut all = Vec::new();
        for (mut world, is_done) in self.start(host, start) {
            if is_done {
                assert_eq!(world.agents[host].here, Some(start), "{world:?}");
                answered(&mut world, start);
            }
            all.push(world);
        }
        all
    }

    fn begin_move(&self) -> Option<Self> {
        let Controller { run, migrations, at, .. } = self.controller;
        let to = (at + 1) % HOSTS;
        let is_left = self.controller.cleanups.iter().any(|(host, _)| *host == to);
        if migrations == MIGRATIONS || is_left {
            return None;
        }
        let mut world = self.clone();
        world.controller.migrations += 1;
        world.controller.open_move = Some(Move { to, is_prepared: false });
        world.send(to, Message::Start(start(run, migrations + 1)));
        Some(world)
    }

    fn go_on_with_move(&self, open: Move) -> Vec<Self> {
        let Controller { run, migrations, at, .. } = self.controller;
        let moved = start(run, migrations);
        let mut all = Vec::new();
        let mut aborted = self.clone();
        aborted.hand_over(open.to, moved);
        aborted.controller.open_move = None;
        all.push(aborted);
        if !open.is_prepared {
            all.extend(self.ask_for(open.to, moved, |world, _| {
                world.controller.open_move = Some(Move { is_prepared: true, ..open });
            }));
            return all;
        }
        let mut completed = self.clone();
        completed.hand_over(at, moved);
        let controller = &mut completed.controller;
        (controller.at, controller.started, controller.open_move) = (open.to, Some(moved), None);
        all.push(completed);
        all
    }

    /// The host is gone: the job begins anew, at the other host or at this one.
    fn begin_anew(&self) -> Vec<Self> {
        let Controller { run, at, .. } = self.controller;
        if run + 1 == RUNS {
            return Vec::new();
        }
        let at_host = |host| {
            let mut world = self.clone();
            world.hand_over(at, start(run, 0).whole_run());
            let controller = &mut world.controller;
            (controller.run, controller.at, controller.started) = (run + 1, host, None);
            world.send(host, Message::Start(start(run + 1, 0)));
            world
        };
        (0..HOSTS).map(at_host).collect()
    }

    fn clean(&self) -> Vec<Self> {
        let mut all = Vec::new();
        for (host, up_to) in &self.controller.cleanups {
            for (mut world, is_done) in self.delete(*host, *up_to) {
                if is_done {
                    world.controller.cleanups.retain(|cleanup| cleanup != &(*host, *up_to));
                    world.answered[*host] = world.answered[*host].max(Some(*up_to));
                }
                all.push(world);
            }
        }
        all
    }
}

fn check(world: &World, before: Option<&World>) {
    for (host, wanted) in world.wanted() {
        let was_there = before.is_none_or(|before| before.agents[host].here == Some(wanted));
        let is_there = world.agents[host].here == Some(wanted);
        assert!(is_there || !was_there, "a good VM was ended: {before:?} -> {world:?}");
    }
    for (agent, answered) in world.agents.iter().zip(world.answered) {
        assert!(
            agent.here.is_none() || agent.here > answered,
            "a stale start runs after its delete was answered: {before:?} -> {world:?}"
        );
    }
    if world.controller.has_ended && world.controller.cleanups.is_empty() {
        assert!(world.agents.iter().all(|agent| agent.here.is_none()), "a VM is left: {world:?}");
    }
}

#[test]
fn no_good_vm_is_ended_and_no_stale_start_runs_however_late_a_message_comes() {
    let mut worlds = vec![World::new()];
    let mut numbers: HashMap<World, usize> = HashMap::from([(World::new(), 0)]);
    let mut before: Vec<Vec<usize>> = vec![Vec::new()];
    let mut at = 0;
    while at < worlds.len() {
        let world = worlds[at].clone();
        let (late, next) = (world.late(), world.next());
        let with_kind =
            late.into_iter().map(|w| (w, false)).chain(next.into_iter().map(|w| (w, true)));
        for (after, may_be_waited_for) in with_kind {
            check(&after, Some(&world));
            let number = *numbers.entry(after.clone()).or_insert(worlds.len());
            if number == worlds.len() {
                worlds.push(after);
                before.push(Vec::new());
            }
            if may_be_waited_for {
                before[number].push(at);
            }
        }
        at += 1;
    }
    assert!(worlds.len() > 1000, "{} worlds are not the walk", worlds.len());
    // From every world the job can end, and everything of it can be cleaned up.
    let is_over =
        |world: &World| world.controller.has_ended && world.controller.cleanups.is_empty();
    let mut can_end: Vec<bool> = worlds.iter().map(is_over).collect();
    let mut waiting: Vec<usize> = (0..worlds.len()).filter(|number| can_end[*number]).collect();
    while let Some(number) = waiting.pop() {
        for earlier in &before[number] {
            if !can_end[*earlier] {
                can_end[*earlier] = true;
                waiting.push(*earlier);
            }
        }
    }
    let stuck = can_end.iter().position(|can| !can).map(|number| &worlds[number]);
    assert!(stuck.is_none(), "nothing ends this: {stuck:?}");
}
