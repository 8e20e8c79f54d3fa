//! The answers to PERSISTENT RESERVE IN (SPC-4, 6.15).

use super::super::Outcome;
use super::super::sense::Sense;
use super::{Registration, Reservations};

/// REPORT CAPABILITIES: all six kinds are supported, and registrations can survive a restart.
const CAPABILITIES: [u8; 8] = [0, 8, 0x01, 0x80, 0xea, 0x01, 0, 0];

impl Reservations {
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
