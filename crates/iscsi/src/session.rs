//! A session after its login: the initiator, the negotiated parameters, and the volume.

use std::net::SocketAddr;

use perigee_block::logins::LoginGuard;
use perigee_block::sessions::Claim;
use perigee_model::client::export_of_target;

use super::access::Client;
use super::execute::Disk;
use super::pdu::{Digests, serial_before};
use super::scsi::reservations::Port;
use super::text::Parameters;
use super::unit::Place;

/// There is one group of ports, with one port.
pub const PORTAL_GROUP: u16 = 1;
/// The most unanswered commands of an initiator.
pub const COMMANDS_MAX: u32 = 128;

/// A session with a unit.
pub struct Attached {
    pub disk: Disk,
    pub place: Place,
    /// Dropped when none of the session's tasks runs any more.
    pub claim: Claim,
    /// The session's entry in the list of the volume's users.
    pub login: Option<LoginGuard>,
}

/// A session, which here has one connection (MaxConnections=1), from its login to its end.
pub struct Session {
    pub port: Port,
    pub client: Client,
    pub parameters: Parameters,
    /// `None` for a discovery session.
    pub attached: Option<Attached>,
    pub numbers: Numbers,
    /// The address at which the initiator has reached this target.
    pub portal: SocketAddr,
}

impl Session {
    /// Of the full feature phase. A login itself has none.
    pub fn digests(&self) -> Digests {
        let Parameters { header_digest, data_digest, .. } = self.parameters;
        Digests { header: header_digest, data: data_digest }
    }
}

/// The position of a PDU in the order of commands, by its CmdSN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandOrder {
    /// It is the next one, or immediate.
    Next,
    /// The number is outside the granted window: the PDU is ignored (RFC 7143, 4.2.2.1).
    Ignore,
    /// An earlier command is missing. It can no longer come on the only connection.
    Gap,
}

/// The numbers that keep commands and answers in order.
#[derive(Debug, Clone, Copy)]
pub struct Numbers {
    stat_sn: u32,
    exp_cmd_sn: u32,
    max_cmd_sn: u32,
    /// The highest number that the initiator knows to be granted.
    told_max_cmd_sn: u32,
}

impl Numbers {
    /// From the login: the target's first number, and the initiator's. [`COMMANDS_MAX`] commands may be under way.
    pub fn new(stat_sn: u32, cmd_sn: u32) -> Self {
        let max_cmd_sn = cmd_sn.wrapping_add(COMMANDS_MAX - 1);
        Self { stat_sn, exp_cmd_sn: cmd_sn, max_cmd_sn, told_max_cmd_sn: max_cmd_sn }
    }

    /// Whether a command is the next one, comes too early, or is outside of the window and ignored (RFC 7143, 4.2.2.1).
    pub fn judge(&self, cmd_sn: u32, immediate: bool) -> CommandOrder {
        if immediate || cmd_sn == self.exp_cmd_sn {
            return CommandOrder::Next;
        }
        let beyond = serial_before(self.told_max_cmd_sn, cmd_sn);
        if beyond || serial_before(cmd_sn, self.exp_cmd_sn) {
            CommandOrder::Ignore
        } else {
            CommandOrder::Gap
        }
    }

    /// The command is taken, so that the next one is expected. One for immediate delivery takes no number.
    pub fn take(&mut self, immediate: bool) {
        if !immediate {
            self.exp_cmd_sn = self.exp_cmd_sn.wrapping_add(1);
        }
    }

    /// Grants as many commands as there is room for. Granted numbers are never withdrawn.
    pub fn grant(&mut self, open: usize) {
        let open = u32::try_from(open).unwrap_or(COMMANDS_MAX).min(COMMANDS_MAX);
        let max = self.exp_cmd_sn.wrapping_add(COMMANDS_MAX - open).wrapping_sub(1);
        if serial_before(self.max_cmd_sn, max) {
            self.max_cmd_sn = max;
        }
    }

    /// The number that the next command has to have.
    pub fn exp_cmd_sn(&self) -> u32 {
        self.exp_cmd_sn
    }

    /// The last number that the initiator may use now.
    pub fn max_cmd_sn(&self) -> u32 {
        self.max_cmd_sn
    }

    /// Records that an answer with these numbers was sent.
    pub fn told(&mut self) {
        self.told_max_cmd_sn = self.max_cmd_sn;
    }

    /// The number of the next answer, for a PDU that carries no status.
    pub fn stat_sn(&self) -> u32 {
        self.stat_sn
    }

    /// The number of the next status. It counts up.
    pub fn next_stat_sn(&mut self) -> u32 {
        let number = self.stat_sn;
        self.stat_sn = number.wrapping_add(1);
        number
    }
}

/// The export of a target's name. Initiators can't choose an epoch.
pub fn export_of(target: &str) -> Option<String> {
    export_of_target(target).filter(|export| !export.contains('@'))
}

/// Whether discovery lists an export. Images are not listed, but can be used by name.
pub fn is_listed(export: &str) -> bool {
    !export.contains(':')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_taken_in_their_order() {
        let mut numbers = Numbers::new(1, u32::MAX);
        assert_eq!(numbers.judge(u32::MAX, false), CommandOrder::Next);
        numbers.take(false);
        assert_eq!(numbers.judge(0, false), CommandOrder::Next);
        assert_eq!(numbers.judge(1, false), CommandOrder::Gap);
        assert_eq!(numbers.judge(u32::MAX, false), CommandOrder::Ignore);
        assert_eq!(numbers.judge(77, true), CommandOrder::Next);
        numbers.take(true);
        assert_eq!(numbers.exp_cmd_sn(), 0);
    }

    #[test]
    fn what_was_granted_is_not_taken_back() {
        let mut numbers = Numbers::new(1, 10);
        let first = numbers.max_cmd_sn();
        assert_eq!(first, 10 + COMMANDS_MAX - 1);
        assert_eq!(numbers.judge(first + 1, false), CommandOrder::Ignore);
        numbers.take(false);
        numbers.grant(1);
        assert_eq!(numbers.max_cmd_sn(), first, "the command is still open");
        numbers.grant(0);
        assert_eq!(numbers.max_cmd_sn(), first + 1);
        numbers.grant(50);
        assert_eq!(numbers.max_cmd_sn(), first + 1);
        assert_eq!(
            numbers.judge(first + 1, false),
            CommandOrder::Ignore,
            "no answer has said so yet"
        );
        numbers.told();
        assert_eq!(numbers.judge(first + 1, false), CommandOrder::Gap);
    }

    #[test]
    fn a_target_s_name_says_its_export() {
        assert_eq!(export_of("iqn.2026-11.org.perigee:data").as_deref(), Some("data"));
        assert_eq!(
            export_of("iqn.2026-11.org.perigee:image:debian").as_deref(),
            Some("image:debian")
        );
        assert_eq!(export_of("iqn.2026-11.org.perigee:data@3").as_deref(), None);
        assert_eq!(export_of("iqn.2026-11.org.other:data").as_deref(), None);
    }
}
