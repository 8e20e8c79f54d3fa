//! What the controller is told at its start.

use std::path::PathBuf;

use perigee_model::SiteId;
use perigee_model::network::PublishPorts;

use super::rentals::Renting;
use crate::live::Live;

/// It does not change while the controller runs, but for what is [`Live`].
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Where the controller is, if it was told.
    pub site: Option<SiteId>,
    /// For how many seconds outputs are kept whose job does not say it; `None`: until somebody deletes them.
    pub keep_outputs_s: Live<Option<u64>>,
    /// The ports of hosts that tenants may publish.
    pub publish_ports: PublishPorts,
    /// The controller's own TCP ports: of its API and its doors.
    pub own_ports: Vec<u16>,
    /// Where other machines call this controller, if they can.
    pub own_url: Option<String>,
    /// The program that runs jobs in guests whose image does not have it; `None`: where it is installed.
    pub runner: Option<PathBuf>,
    /// The file that says what hosts, disks and traffic cost; `None`: nothing costs anything.
    pub prices: Option<PathBuf>,
    /// Who has machines for rent.
    pub renting: Renting,
}
