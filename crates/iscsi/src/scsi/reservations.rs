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

mod report;

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
    /// Another initiator has taken this one's reservation.
    pub const RESERVATIONS_PREEMPTED: u16 = 0x2a03;
    /// A reservation that forbade commands is gone.
    pub const RESERVATIONS_RELEASED: u16 = 0x2a04;
    /// Another initiator has removed this one's registration.
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

/// Who has registered at a unit and who holds it: persistent reservations (SPC-4, 5.13), and the old RESERVE. At most
/// 256 ports register.
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

    /// Whether the port may send the command now. Otherwise the answer is RESERVATION CONFLICT.
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
}

#[cfg(test)]
mod tests;
