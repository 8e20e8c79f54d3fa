//! Reservations of a unit: persistent reservations (SPC-4, 5.13) and the older RESERVE and RELEASE.
//!
//! ```text
//!              REGISTER                RESERVE
//! not known  ----------->  registered  -------->  holder     one kind of reservation at a time
//!            <-----------              <--------
//!        key 0, CLEAR, PREEMPT     RELEASE, CLEAR, PREEMPT
//! ```
//!
//! These are pure functions. A change returns which initiators to notify and which tasks to abort. If the
//! change must survive a restart (APTPL), the caller stores it before it answers.

use serde::{Deserialize, Serialize};

use super::Outcome;
use super::command::Command;
use super::sense::Sense;

/// An initiator's port: its name and the session's ISID, as iSCSI writes them together.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Port(pub String);

const REGISTRATIONS_MAX: usize = 256;
/// The length of PERSISTENT RESERVE OUT's parameter list without the names of other ports.
pub const PERSISTENT_OUT_BYTES: u32 = 24;

/// The unit attentions for initiators that a change affects.
mod attention {
    pub const RESERVATIONS_PREEMPTED: u16 = 0x2a03;
    pub const RESERVATIONS_RELEASED: u16 = 0x2a04;
    pub const REGISTRATIONS_PREEMPTED: u16 = 0x2a05;
}

/// The kinds of reservations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Kind {
    WriteExclusive,
    ExclusiveAccess,
    WriteExclusiveRegistrants,
    ExclusiveAccessRegistrants,
    WriteExclusiveAll,
    ExclusiveAccessAll,
}

impl Kind {
    fn parse(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::WriteExclusive,
            3 => Self::ExclusiveAccess,
            5 => Self::WriteExclusiveRegistrants,
            6 => Self::ExclusiveAccessRegistrants,
            7 => Self::WriteExclusiveAll,
            8 => Self::ExclusiveAccessAll,
            _ => return None,
        })
    }

    fn number(self) -> u8 {
        match self {
            Self::WriteExclusive => 1,
            Self::ExclusiveAccess => 3,
            Self::WriteExclusiveRegistrants => 5,
            Self::ExclusiveAccessRegistrants => 6,
            Self::WriteExclusiveAll => 7,
            Self::ExclusiveAccessAll => 8,
        }
    }

    fn lets_all_read(self) -> bool {
        use Kind::{WriteExclusive, WriteExclusiveAll, WriteExclusiveRegistrants};
        matches!(self, WriteExclusive | WriteExclusiveRegistrants | WriteExclusiveAll)
    }

    /// Every registered port may do what the holder may.
    fn is_for_registrants(self) -> bool {
        !matches!(self, Self::WriteExclusive | Self::ExclusiveAccess)
    }

    /// Every registered port is a holder.
    fn is_held_by_all(self) -> bool {
        matches!(self, Self::WriteExclusiveAll | Self::ExclusiveAccessAll)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Held {
    /// The port that reserved the unit. With a kind that all registrants hold, any of them.
    by: Port,
    kind: Kind,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Registration {
    port: Port,
    key: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reservations {
    generation: u32,
    registrations: Vec<Registration>,
    held: Option<Held>,
    /// Whether the registrations must survive a restart of the server.
    pub kept: bool,
    /// The holder of a RESERVE, which ends with the session.
    #[serde(skip)]
    old: Option<Port>,
}

/// The effects of a change on other initiators.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Effects {
    pub attentions: Vec<(Port, u16)>,
    /// The ports whose tasks are aborted.
    pub aborted: Vec<Port>,
}

/// A PERSISTENT RESERVE OUT.
#[derive(Debug, Clone, Copy)]
pub struct Out {
    pub action: u8,
    pub scope_type: u8,
    /// The key under which the port claims to be registered.
    key: u64,
    /// The key to which the action applies.
    action_key: u64,
    kept: bool,
}

impl Out {
    /// # Errors
    /// When the list has a wrong length, or asks for something that is not supported.
    pub fn parse(action: u8, scope_type: u8, list: &[u8]) -> Result<Self, Sense> {
        let list: &[u8; 24] = list.try_into().map_err(|_| Sense::PARAMETER_LIST_LENGTH)?;
        // SPEC_I_PT and ALL_TG_PT: registering for others.
        if list[20] & 0x0c != 0 && matches!(action, 0 | 6) {
            return Err(Sense::INVALID_PARAMETER);
        }
        let number = |at: usize| u64::from_be_bytes(list[at..at + 8].try_into().expect("eight"));
        let (key, action_key) = (number(0), number(8));
        Ok(Self { action, scope_type, key, action_key, kept: list[20] & 1 != 0 })
    }

    fn kind(&self) -> Result<Kind, Sense> {
        let kind = Kind::parse(self.scope_type & 0x0f).filter(|_| self.scope_type >> 4 == 0);
        kind.ok_or_else(|| Sense::invalid_field(2))
    }
}

/// The kind of access that a command needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    /// Always allowed.
    Free,
    /// Allowed during any persistent reservation.
    Look,
    Read,
    Write,
}

fn use_of(command: &Command) -> Use {
    match command {
        Command::Inquiry { .. }
        | Command::ReportLuns { .. }
        | Command::RequestSense { .. }
        | Command::Release => Use::Free,
        Command::TestUnitReady
        | Command::ReadCapacity10
        | Command::ReadCapacity16 { .. }
        | Command::ReportOpcodes(_)
        | Command::ReportTaskManagement { .. }
        | Command::PreventAllow
        | Command::PersistentIn { .. }
        | Command::PersistentOut { .. }
        | Command::Reserve => Use::Look,
        Command::Read { .. }
        | Command::Verify { .. }
        | Command::Prefetch { .. }
        | Command::LbaStatus { .. }
        | Command::ReadDefects { .. }
        | Command::ModeSense(_) => Use::Read,
        Command::Write { .. }
        | Command::WriteVerify { .. }
        | Command::WriteSame { .. }
        | Command::CompareAndWrite { .. }
        | Command::OrWrite { .. }
        | Command::Unmap { .. }
        | Command::SynchronizeCache
        | Command::StartStop { .. }
        | Command::ModeSelect { .. } => Use::Write,
    }
}

impl Reservations {
    /// Whether there are no reservations or registrations. Then nothing needs to be checked or stored.
    pub fn is_empty(&self) -> bool {
        self.registrations.is_empty() && self.held.is_none() && self.old.is_none()
    }

    pub fn allows(&self, port: &Port, command: &Command) -> bool {
        let used = use_of(command);
        if let Some(old) = &self.old {
            return used == Use::Free || old == port;
        }
        let Some(held) = &self.held else { return true };
        match used {
            Use::Free | Use::Look => true,
            Use::Read if held.kind.lets_all_read() => true,
            Use::Read | Use::Write => {
                held.by == *port || held.kind.is_for_registrants() && self.key_of(port).is_some()
            }
        }
    }

    /// RESERVE. The two ways to reserve exclude each other.
    pub fn reserve(&mut self, port: &Port) -> Outcome {
        if !self.registrations.is_empty() || self.old.as_ref().is_some_and(|old| old != port) {
            return Outcome::Conflict;
        }
        self.old = Some(port.clone());
        Outcome::DONE
    }

    /// RELEASE, and the end of a session.
    pub fn release(&mut self, port: &Port) {
        if self.old.as_ref() == Some(port) {
            self.old = None;
        }
    }

    /// Resets the unit: only persistent reservations stay.
    pub fn reset(&mut self) {
        self.old = None;
    }

    fn key_of(&self, port: &Port) -> Option<u64> {
        self.registrations.iter().find(|other| other.port == *port).map(|found| found.key)
    }

    fn is_holder(&self, port: &Port) -> bool {
        self.held.as_ref().is_some_and(|held| {
            held.by == *port || held.kind.is_held_by_all() && self.key_of(port).is_some()
        })
    }

    /// PERSISTENT RESERVE OUT.
    ///
    /// # Errors
    /// The answer of a refusal. Then nothing has changed.
    pub fn change(&mut self, port: &Port, out: &Out) -> Result<Effects, Outcome> {
        if self.old.as_ref().is_some_and(|old| old != port) {
            return Err(Outcome::Conflict);
        }
        let own_key = self.key_of(port);
        if matches!(out.action, 0 | 6) {
            return self.register(port, out);
        }
        if own_key != Some(out.key) {
            return Err(Outcome::Conflict);
        }
        match out.action {
            1 => self.reserve_persistently(port, out.kind()?),
            2 => self.release_persistently(port, out.kind()?),
            3 => Ok(self.clear(port)),
            4 | 5 => self.preempt(port, out),
            _ => Err(Sense::invalid_field(1).into()),
        }
    }

    fn register(&mut self, port: &Port, out: &Out) -> Result<Effects, Outcome> {
        let own = self.registrations.iter().position(|other| other.port == *port);
        let claimed = own.map_or(0, |at| self.registrations[at].key);
        if out.action == 0 && out.key != claimed {
            return Err(Outcome::Conflict);
        }
        let mut effects = Effects::default();
        match (own, out.action_key) {
            (None, 0) => return Ok(effects),
            (None, key) => {
                if self.registrations.len() == REGISTRATIONS_MAX {
                    return Err(Sense::TOO_MANY_REGISTRATIONS.into());
                }
                self.registrations.push(Registration { port: port.clone(), key });
            }
            (Some(at), 0) => {
                self.registrations.remove(at);
                self.drop_reservation_of(port, &mut effects);
            }
            (Some(at), key) => self.registrations[at].key = key,
        }
        self.kept = out.kept;
        self.generation = self.generation.wrapping_add(1);
        Ok(effects)
    }

    /// A port that is not registered any more can't be the holder.
    fn drop_reservation_of(&mut self, port: &Port, effects: &mut Effects) {
        let Some(held) = &mut self.held else { return };
        if held.kind.is_held_by_all() {
            match self.registrations.first() {
                Some(next) => held.by = next.port.clone(),
                None => self.held = None,
            }
        } else if held.by == *port {
            if held.kind.is_for_registrants() {
                effects.attentions = self.others(port, attention::RESERVATIONS_RELEASED);
            }
            self.held = None;
        }
    }

    fn others(&self, port: &Port, code: u16) -> Vec<(Port, u16)> {
        let others = self.registrations.iter().filter(|other| other.port != *port);
        others.map(|other| (other.port.clone(), code)).collect()
    }

    fn reserve_persistently(&mut self, port: &Port, kind: Kind) -> Result<Effects, Outcome> {
        match &self.held {
            Some(held) if held.kind != kind || !self.is_holder(port) => Err(Outcome::Conflict),
            Some(_) => Ok(Effects::default()),
            None => {
                self.held = Some(Held { by: port.clone(), kind });
                Ok(Effects::default())
            }
        }
    }

    fn release_persistently(&mut self, port: &Port, kind: Kind) -> Result<Effects, Outcome> {
        let Some(held) = self.held.clone().filter(|_| self.is_holder(port)) else {
            return Ok(Effects::default());
        };
        if held.kind != kind {
            return Err(Sense::INVALID_RELEASE.into());
        }
        self.held = None;
        let told = kind.is_for_registrants();
        let attentions =
            if told { self.others(port, attention::RESERVATIONS_RELEASED) } else { Vec::new() };
        Ok(Effects { attentions, ..Effects::default() })
    }

    fn clear(&mut self, port: &Port) -> Effects {
        let attentions = self.others(port, attention::RESERVATIONS_PREEMPTED);
        self.registrations.clear();
        self.held = None;
        self.generation = self.generation.wrapping_add(1);
        Effects { attentions, ..Effects::default() }
    }

    fn preempt(&mut self, port: &Port, out: &Out) -> Result<Effects, Outcome> {
        let kind = out.kind()?;
        let held_key = self.held.as_ref().and_then(|held| self.key_of(&held.by));
        let held_by_all = self.held.as_ref().is_some_and(|held| held.kind.is_held_by_all());
        let takes_over = if held_by_all {
            out.action_key == 0
        } else {
            held_key.is_some() && held_key == Some(out.action_key)
        };
        if out.action_key == 0 && !takes_over {
            return Err(Sense::INVALID_PARAMETER.into());
        }
        let concerned = |other: &Registration| {
            other.port != *port && (out.action_key == 0 || other.key == out.action_key)
        };
        let gone: Vec<Port> =
            self.registrations.iter().filter(|r| concerned(r)).map(|r| r.port.clone()).collect();
        let own = self.key_of(port) == Some(out.action_key);
        if gone.is_empty() && !takes_over && !own {
            return Err(Outcome::Conflict);
        }
        self.registrations.retain(|other| !concerned(other));
        let mut effects = Effects::default();
        let preempted = |port: &Port| (port.clone(), attention::REGISTRATIONS_PREEMPTED);
        effects.attentions.extend(gone.iter().map(preempted));
        if takes_over {
            let changed = self.held.as_ref().is_some_and(|held| held.kind != kind);
            if changed {
                effects.attentions.extend(self.others(port, attention::RESERVATIONS_RELEASED));
            }
            self.held = Some(Held { by: port.clone(), kind });
        } else if held_by_all && let Some(held) = &mut self.held {
            held.by = port.clone();
        }
        if out.action == 5 {
            effects.aborted = gone;
        }
        self.generation = self.generation.wrapping_add(1);
        Ok(effects)
    }

    /// PERSISTENT RESERVE IN.
    pub fn report(&self, action: u8, allocated_bytes: u16) -> Outcome {
        let data = match action {
            0 => self.listed(self.registrations.iter().flat_map(|r| r.key.to_be_bytes()).collect()),
            1 => self.listed(self.reservation()),
            2 => CAPABILITIES.to_vec(),
            3 => self.listed(self.registrations.iter().flat_map(|r| self.full_status(r)).collect()),
            _ => return Sense::invalid_field(1).into(),
        };
        Outcome::answer(data, allocated_bytes)
    }

    fn listed(&self, body: Vec<u8>) -> Vec<u8> {
        let length = u32::try_from(body.len()).expect("registrations are bounded");
        let mut data = self.generation.to_be_bytes().to_vec();
        data.extend(length.to_be_bytes());
        data.extend(body);
        data
    }

    fn reservation(&self) -> Vec<u8> {
        let Some(held) = &self.held else { return Vec::new() };
        let key = if held.kind.is_held_by_all() { 0 } else { self.key_of(&held.by).unwrap_or(0) };
        let mut data = key.to_be_bytes().to_vec();
        data.extend([0, 0, 0, 0, 0, held.kind.number(), 0, 0]);
        data
    }

    fn full_status(&self, registration: &Registration) -> Vec<u8> {
        let holder = self.is_holder(&registration.port);
        let kind = self.held.as_ref().filter(|_| holder).map_or(0, |held| held.kind.number());
        let mut name = registration.port.0.clone().into_bytes();
        name.resize((name.len() + 1).next_multiple_of(4), 0);
        let name_bytes = u16::try_from(name.len()).expect("a name was bounded at login");
        let mut data = registration.key.to_be_bytes().to_vec();
        data.extend([0, 0, 0, 0, u8::from(holder), kind, 0, 0, 0, 0, 0, 1]);
        data.extend(u32::from(name_bytes + 4).to_be_bytes());
        // A name of an iSCSI port, with its session.
        data.extend([0x45, 0]);
        data.extend(name_bytes.to_be_bytes());
        data.extend(name);
        data
    }
}

/// REPORT CAPABILITIES: all six kinds are supported, and registrations can survive a restart.
const CAPABILITIES: [u8; 8] = [0, 8, 0x01, 0x80, 0xea, 0x01, 0, 0];

#[cfg(test)]
mod tests {
    use super::super::command::Range;
    use super::*;

    fn port(name: &str) -> Port {
        Port(name.into())
    }

    fn out(action: u8, kind: u8, key: u64, action_key: u64) -> Out {
        Out { action, scope_type: kind, key, action_key, kept: false }
    }

    fn read() -> Command {
        Command::Read { range: Range { offset: 0, length_bytes: 512 }, fua: false }
    }

    fn write() -> Command {
        Command::Write { range: Range { offset: 0, length_bytes: 512 }, fua: false }
    }

    /// `a` and `b` are registered with keys 1 and 2, and `a` has reserved.
    fn reserved(kind: u8) -> Reservations {
        let mut state = Reservations::default();
        for (name, key) in [("a", 1), ("b", 2)] {
            state.change(&port(name), &out(0, 0, 0, key)).expect("a registration");
        }
        state.change(&port("a"), &out(1, kind, 1, 0)).expect("a reservation");
        state
    }

    #[test]
    fn each_kind_lets_others_do_what_it_says() {
        for (kind, registered, unknown) in [
            (1, (true, false), (true, false)),
            (3, (false, false), (false, false)),
            (5, (true, true), (true, false)),
            (6, (true, true), (false, false)),
            (7, (true, true), (true, false)),
            (8, (true, true), (false, false)),
        ] {
            let state = reserved(kind);
            let may =
                |name| (state.allows(&port(name), &read()), state.allows(&port(name), &write()));
            assert_eq!(may("a"), (true, true), "kind {kind}");
            assert_eq!(may("b"), registered, "kind {kind}");
            assert_eq!(may("c"), unknown, "kind {kind}");
        }
    }

    #[test]
    fn only_the_right_key_changes_anything() {
        let mut state = reserved(1);
        let before = state.clone();
        for wrong in
            [out(0, 0, 7, 9), out(1, 1, 7, 0), out(2, 1, 7, 0), out(3, 0, 7, 0), out(4, 1, 7, 1)]
        {
            assert_eq!(state.change(&port("b"), &wrong), Err(Outcome::Conflict));
        }
        assert_eq!(state.change(&port("c"), &out(1, 1, 0, 0)), Err(Outcome::Conflict));
        assert_eq!(state, before);
    }

    #[test]
    fn a_reservation_ends_with_its_holder_s_registration() {
        let mut state = reserved(5);
        let effects = state.change(&port("a"), &out(0, 0, 1, 0)).expect("it goes");
        assert_eq!(effects.attentions, [(port("b"), 0x2a04)]);
        assert!(state.allows(&port("c"), &write()));
    }

    #[test]
    fn a_reservation_that_all_hold_ends_with_the_last_one() {
        let mut state = reserved(8);
        state.change(&port("a"), &out(0, 0, 1, 0)).expect("it goes");
        assert!(!state.allows(&port("c"), &read()) && state.allows(&port("b"), &write()));
        state.change(&port("b"), &out(0, 0, 2, 0)).expect("it goes");
        assert!(state.allows(&port("c"), &read()) && state.is_empty());
    }

    #[test]
    fn preempting_the_holder_takes_over() {
        let mut state = reserved(3);
        let effects = state.change(&port("b"), &out(5, 1, 2, 1)).expect("it is preempted");
        assert_eq!(effects.attentions, [(port("a"), 0x2a05)]);
        assert_eq!(effects.aborted, [port("a")]);
        assert!(state.allows(&port("b"), &write()) && !state.allows(&port("a"), &write()));
        assert!(state.allows(&port("a"), &read()), "the new kind is write exclusive");
        assert_eq!(state.key_of(&port("a")), None);
    }

    #[test]
    fn preempting_another_leaves_the_reservation() {
        let mut state = reserved(1);
        state.change(&port("a"), &out(4, 1, 1, 2)).expect("it is preempted");
        assert_eq!(state.key_of(&port("b")), None);
        assert!(state.allows(&port("a"), &write()) && !state.allows(&port("b"), &write()));
        assert_eq!(state.change(&port("a"), &out(4, 1, 1, 9)), Err(Outcome::Conflict));
    }

    #[test]
    fn clear_takes_everything() {
        let mut state = reserved(1);
        let effects = state.change(&port("b"), &out(3, 0, 2, 0)).expect("all is cleared");
        assert_eq!(effects.attentions, [(port("a"), 0x2a03)]);
        assert!(state.is_empty());
    }

    #[test]
    fn a_release_of_another_kind_is_refused() {
        let mut state = reserved(1);
        let refused = state.change(&port("a"), &out(2, 3, 1, 0));
        assert_eq!(refused, Err(Outcome::Check(Sense::INVALID_RELEASE)));
        state.change(&port("b"), &out(2, 1, 2, 0)).expect("nothing to release is no fault");
        assert!(!state.allows(&port("b"), &write()));
    }

    #[test]
    fn the_old_way_and_the_new_way_exclude_each_other() {
        let mut state = Reservations::default();
        assert_eq!(state.reserve(&port("a")), Outcome::DONE);
        assert_eq!(state.reserve(&port("b")), Outcome::Conflict);
        assert!(!state.allows(&port("b"), &Command::TestUnitReady));
        assert_eq!(state.change(&port("b"), &out(0, 0, 0, 5)), Err(Outcome::Conflict));
        state.release(&port("b"));
        assert!(!state.allows(&port("b"), &read()));
        state.release(&port("a"));
        assert_eq!(reserved(1).reserve(&port("a")), Outcome::Conflict);
    }

    #[test]
    fn what_is_kept_is_what_was_there() {
        let state = reserved(6);
        let text = serde_json::to_string(&state).expect("JSON");
        assert_eq!(serde_json::from_str::<Reservations>(&text).expect("the same"), state);
    }

    #[test]
    fn reports_say_keys_holder_and_names() {
        let state = reserved(1);
        let data = |action| match state.report(action, 1000) {
            Outcome::Good(data) => data.to_vec(),
            other => panic!("{other:?}"),
        };
        assert_eq!(data(0)[..8], [0, 0, 0, 2, 0, 0, 0, 16]);
        assert_eq!(data(1)[4..], [0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0]);
        let full = data(3);
        assert_eq!(usize::from(full[7]) + 8, full.len());
        assert_eq!((full[8 + 12], full[8 + 13], full[8 + 24]), (1, 1, 0x45));
        assert_eq!(state.report(4, 1000), Outcome::Check(Sense::invalid_field(1)));
    }
}
