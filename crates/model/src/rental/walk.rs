//! Walks a rental through every order of events: a provider that makes an instance late or twice for one token, that lists it late or no more,
//! loses answers and takes it back, a controller that is killed anywhere, and a host that joins when it likes.

use super::*;
use crate::walker::Walk;

/// More requests lead to nothing new.
const ASKS_MAX: u8 = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct World {
    state: RentalState,
    requested: Requested,
    asks: u8,
    /// A request that may still be carried out, as the provider has it.
    in_flight: bool,
    /// The driver waits for the answer.
    waits: bool,
    /// Instances at the provider.
    instances: u8,
    /// Whether the provider's list has them already.
    is_listed: bool,
    /// The grace period after the last request, or after the instance was there last, is over.
    is_settled: bool,
    host: RentedHost,
    is_lease_over: bool,
    has_vms: bool,
    is_given_back: bool,
    is_forced: bool,
    is_late: bool,
}

impl World {
    const START: Self = Self {
        state: RentalState::Wanted,
        requested: Requested::Nothing,
        asks: 0,
        in_flight: false,
        waits: false,
        instances: 0,
        is_listed: false,
        is_settled: false,
        host: RentedHost::Unknown,
        is_lease_over: false,
        has_vms: false,
        is_given_back: false,
        is_forced: false,
        is_late: false,
    };

    fn seen(&self) -> Seen {
        match (self.instances, self.is_listed) {
            (0, _) | (_, false) if self.is_settled => Seen::AbsentForLong,
            (0, _) | (_, false) => Seen::Absent,
            _ => Seen::There,
        }
    }

    /// What the driver does; the provider may have said nothing.
    fn driven(&self, seen: Seen) -> Self {
        let known = Known {
            state: self.state,
            requested: self.requested,
            seen,
            host: self.host,
            is_lease_over: self.is_lease_over,
            is_given_back: self.is_given_back,
            is_forced: self.is_forced,
            is_late: self.is_late,
            may_ask: self.asks < ASKS_MAX,
            is_empty: (self.host == RentedHost::Up).then_some(!self.has_vms),
        };
        let mut next = *self;
        match decide(&known) {
            Step::Wait | Step::Drain => {}
            Step::Ask => {
                next.state = self.state.next(RentalEvent::Asks).expect("it may ask");
                next.requested = Requested::Perhaps;
                next.asks += 1;
                (next.in_flight, next.waits, next.is_settled) = (true, true, false);
            }
            Step::Event(event) => {
                next.state = self.state.next(event).expect("a step is possible");
                if next.state == RentalState::Ending {
                    assert!(
                        !self.has_vms
                            || self.instances == 0
                            || self.is_forced
                            || self.is_lease_over,
                        "under a VM: {self:?}"
                    );
                }
            }
            Step::End => (next.instances, next.has_vms) = (0, false),
            Step::Forget => {
                assert!(!self.has_vms || self.instances == 0, "under a VM: {self:?}");
                (next.host, next.is_lease_over) = (RentedHost::Unknown, false);
            }
        }
        if next.instances == 0 && next.host == RentedHost::Up {
            next.host = RentedHost::Silent;
        }
        next
    }

    fn next(&self) -> Vec<Self> {
        let mut all = vec![self.driven(self.seen())];
        // Of one whose host has joined the lists may say anything.
        let may_lack = self.instances == 0 || self.host != RentedHost::Unknown;
        if !self.in_flight && (may_lack || self.is_listed) {
            all.push(Self { is_settled: true, ..*self });
        }
        if self.instances > 0 {
            all.push(Self { is_listed: true, ..*self });
        }
        if self.in_flight {
            all.push(Self { in_flight: false, waits: false, ..*self });
        }
        if self.host == RentedHost::Silent {
            // Its lease is over, and a host that ran has ended itself.
            let is_settled = self.is_settled && self.instances == 0;
            let ended = Self { instances: 0, has_vms: false, is_settled, ..*self };
            all.push(Self { is_lease_over: true, ..ended });
            if self.is_listed && self.instances > 0 {
                // Its agent is gone, and did not end it.
                all.push(Self { is_lease_over: true, ..*self });
            }
        }
        all.push(Self { is_late: true, ..*self });
        all.push(Self { is_given_back: true, has_vms: false, ..*self });
        all
    }

    fn late(&self) -> Vec<Self> {
        // The provider can't be asked, or the controller was killed: the answer is lost.
        let mut all = vec![self.driven(Seen::NotKnown), Self { waits: false, ..*self }];
        if self.in_flight {
            // The token is not honoured: each request makes an instance.
            let made = Self {
                in_flight: false,
                instances: self.instances + 1,
                is_listed: false,
                is_settled: false,
                ..*self
            };
            all.push(Self { waits: false, ..made });
            if self.waits {
                let state = self.state.next(RentalEvent::Shown).unwrap_or(self.state);
                all.push(Self { waits: false, state, ..made });
                // A refusal says of this request only that it made nothing.
                let before = if self.asks > 1 { Requested::Perhaps } else { Requested::Nothing };
                let refused = Self { in_flight: false, waits: false, ..*self };
                all.push(Self { requested: before, ..refused });
                if self.asks == 1 {
                    all.push(Self { requested: Requested::Refused, ..refused });
                }
            }
        }
        if self.instances > 0 {
            // The provider takes it back.
            let host = match self.host {
                RentedHost::Unknown => RentedHost::Unknown,
                _ => RentedHost::Silent,
            };
            all.push(Self { instances: 0, has_vms: false, is_settled: false, host, ..*self });
            let may_join = !matches!(self.state, RentalState::Ending | RentalState::Gone);
            if may_join {
                all.push(Self { host: RentedHost::Up, is_lease_over: false, ..*self });
            }
            if self.host != RentedHost::Unknown && !self.is_lease_over {
                // Somebody changes its tags.
                all.push(Self { is_listed: false, is_settled: false, ..*self });
            }
            if self.host == RentedHost::Up {
                all.push(Self { host: RentedHost::Silent, ..*self });
                use RentalState::{Asked, Joined, Starting};
                let takes_vms = matches!(self.state, Asked | Starting | Joined);
                all.push(Self { has_vms: takes_vms || self.has_vms, ..*self });
            }
        }
        if self.host == RentedHost::Silent && (self.instances == 0 || self.is_listed) {
            // A person removes it.
            let host = RentedHost::Unknown;
            all.push(Self { host, is_lease_over: false, has_vms: false, ..*self });
        }
        all.push(Self { is_given_back: true, ..*self });
        all.push(Self { is_given_back: true, is_forced: true, ..*self });
        all
    }
}

fn check(world: &World) {
    assert!(world.instances <= 1, "two instances: {world:?}");
    let has_none = world.instances == 0 && !world.in_flight;
    assert!(world.state != RentalState::Wanted || has_none, "never recorded: {world:?}");
    assert!(world.state != RentalState::Gone || has_none, "nobody ends it: {world:?}");
}

#[test]
fn no_order_of_events_makes_two_instances_or_leaves_one_that_nobody_ends() {
    let walk = Walk::all(World::START, check, World::next, World::late);
    assert!(walk.worlds.len() > 200, "{} worlds", walk.worlds.len());
    let stuck = walk.stuck(|world| world.state == RentalState::Gone);
    assert!(stuck.is_empty(), "{} of {} worlds, as {:?}", stuck.len(), walk.worlds.len(), stuck[0]);
}

/// With nobody's help: no instance outlives its lease for long, also if its agent can't end it any more.
#[test]
fn the_driver_ends_an_instance_that_is_listed_and_whose_host_is_silent_after_its_lease() {
    let walk = Walk::all(World::START, check, World::next, World::late);
    let outlives = |world: &&World| world.is_lease_over && world.instances > 0 && world.is_listed;
    let mut seen = 0;
    for world in walk.worlds.iter().filter(outlives) {
        let mut now = *world;
        for _ in 0..5 {
            now = now.driven(now.seen());
        }
        assert_eq!(now.instances, 0, "{world:?} comes to {now:?}");
        seen += 1;
    }
    assert!(seen > 10, "{seen} worlds");
}

#[test]
fn every_state_says_of_every_event_whether_it_is_possible() {
    use RentalEvent::{Asks, Emptied, GivenBack, HostJoined, Shown, Vanished};
    let events = [Asks, Shown, HostJoined, GivenBack, Emptied, Vanished];
    let possible = RentalState::ALL.map(|state| {
        events.iter().filter(|event| state.next(**event).is_ok()).copied().collect::<Vec<_>>()
    });
    let expected: [&[RentalEvent]; 7] = [
        &[Asks, GivenBack],
        &[Asks, Shown, GivenBack, Vanished],
        &[HostJoined, GivenBack, Vanished],
        &[GivenBack, Vanished],
        &[Emptied, Vanished],
        &[Vanished],
        &[Shown],
    ];
    assert_eq!(possible.each_ref().map(Vec::as_slice), expected);
}

#[test]
fn a_provider_that_is_not_known_to_have_it_not_is_not_asked_twice() {
    let known = Known {
        state: RentalState::Asked,
        requested: Requested::Perhaps,
        seen: Seen::NotKnown,
        host: RentedHost::Unknown,
        is_lease_over: false,
        is_given_back: false,
        is_forced: false,
        is_late: false,
        may_ask: true,
        is_empty: None,
    };
    for seen in [Seen::NotKnown, Seen::Absent] {
        assert_eq!(decide(&Known { seen, ..known }), Step::Wait, "{seen:?}");
    }
    assert_eq!(decide(&Known { seen: Seen::AbsentForLong, ..known }), Step::Ask);
}

#[test]
fn a_host_that_has_joined_is_drained_even_if_no_list_ever_shows_its_instance() {
    let known = Known {
        state: RentalState::Asked,
        requested: Requested::Perhaps,
        seen: Seen::NotKnown,
        host: RentedHost::Up,
        is_lease_over: false,
        is_given_back: true,
        is_forced: false,
        is_late: true,
        may_ask: false,
        is_empty: None,
    };
    assert_eq!(decide(&known), Step::Drain);
    assert_eq!(decide(&Known { is_given_back: false, ..known }), Step::Wait);
}
