//! What is measured: cells. A cell is a pair of the same programs in the same VMs, one after the other, so that the machine's speed is
//! the same for both. A round has each cell once.

use std::fmt;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

/// As in the paper's experiment: four worker nodes.
pub const VM_COUNT: u32 = 4;

/// What a cell compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Data at the target of the site, and data at the other site's, over Perigee's own path.
    Distance,
    /// The same over iSCSI: Linux' initiator in the guest, and Perigee's target.
    IscsiPerigee,
    /// The same with tgt, a target that is not ours.
    IscsiTgt,
    /// Data at the other site: after a move there by hand, and before.
    MoveHand,
    /// Data at the other site, and the planner may move the VMs while the program runs.
    MovePlanner,
    /// Ranks' talk and storage over one network, and over one for each.
    Network,
    /// The programs on the host itself; TPC-H also with its database on an iSCSI disk.
    Host,
}

impl Kind {
    pub const ALL: [Self; 7] = [
        Self::Distance,
        Self::IscsiPerigee,
        Self::IscsiTgt,
        Self::MoveHand,
        Self::MovePlanner,
        Self::Network,
        Self::Host,
    ];

    /// As after `--only`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Distance => "distance",
            Self::IscsiPerigee => "iscsi-perigee",
            Self::IscsiTgt => "iscsi-tgt",
            Self::MoveHand => "move-hand",
            Self::MovePlanner => "move-planner",
            Self::Network => "network",
            Self::Host => "host",
        }
    }

    /// How many VMs a cell has: all four of the local site, or the two that the two servers of the other site have room for.
    pub fn vms(self) -> u32 {
        match self {
            Self::MoveHand | Self::MovePlanner => 2,
            _ => VM_COUNT,
        }
    }

    /// # Errors
    /// There is no such kind.
    pub fn parse(word: &str) -> Result<Self> {
        match Self::ALL.into_iter().find(|kind| kind.name() == word) {
            Some(kind) => Ok(kind),
            None => {
                let all: Vec<&str> = Self::ALL.into_iter().map(Self::name).collect();
                bail!("--only {word}: there is no such part; there are {}", all.join(", "))
            }
        }
    }
}

/// One cell of one round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Cell {
    /// From 1 on.
    pub round: u32,
    pub kind: Kind,
    /// Of the paper: a dilated cell's link has `f` times as much.
    pub rtt_ms: u32,
    pub is_dilated: bool,
}

impl Cell {
    /// Which side is measured first: they take turns.
    pub fn begins_far(&self) -> bool {
        self.round.is_multiple_of(2)
    }

    /// Whether it is one of the few that show that all of it works: the farthest of each kind, dilated, and of experiment 1 also the nearest.
    pub fn is_of_quick_run(&self, rtts: &[u32]) -> bool {
        let is_far = Some(&self.rtt_ms) == rtts.iter().max();
        match self.kind {
            Kind::Host => true,
            Kind::Distance | Kind::Network => self.is_dilated,
            _ => self.is_dilated && is_far,
        }
    }

    /// Whether its figures over time are kept: those that the report shows.
    pub fn has_series(&self) -> bool {
        let is_shown = matches!(self.kind, Kind::Distance | Kind::IscsiPerigee);
        self.round == 1 && self.is_dilated && is_shown
    }

    /// The same cell of another round is the same column of a table.
    pub fn column(&self) -> (Kind, u32, bool) {
        (self.kind, self.rtt_ms, self.is_dilated)
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dilated = if self.is_dilated { "" } else { ", undilated" };
        write!(f, "round {}, {}, {} ms{dilated}", self.round, self.kind.name(), self.rtt_ms)
    }
}

/// The cells of one round. `rtts` are the distances of experiment 1; the others have the nearest and
/// the farthest of them.
pub fn of_round(round: u32, rtts: &[u32]) -> Vec<Cell> {
    let mut rtts = rtts.to_vec();
    rtts.sort_unstable();
    rtts.dedup();
    let ends: Vec<u32> = match rtts[..] {
        [] => Vec::new(),
        [one] => vec![one],
        [first, .., last] => vec![first, last],
    };
    let far = rtts.last().copied().unwrap_or_default();
    let cell = |kind, rtt_ms, is_dilated| Cell { round, kind, rtt_ms, is_dilated };
    let mut cells: Vec<Cell> = rtts.iter().map(|rtt| cell(Kind::Distance, *rtt, true)).collect();
    cells.extend(ends.iter().map(|rtt| cell(Kind::Distance, *rtt, false)));
    for kind in [Kind::IscsiPerigee, Kind::IscsiTgt] {
        cells.extend(ends.iter().map(|rtt| cell(kind, *rtt, true)));
    }
    cells.push(cell(Kind::IscsiPerigee, far, false));
    cells.extend(ends.iter().map(|rtt| cell(Kind::MoveHand, *rtt, true)));
    cells.push(cell(Kind::MoveHand, far, false));
    cells.push(cell(Kind::MovePlanner, far, true));
    cells.push(cell(Kind::Network, 0, true));
    cells.push(cell(Kind::Network, 0, false));
    cells.push(cell(Kind::Host, 0, false));
    cells
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_round_has_each_cell_once_and_each_experiment_an_undilated_one() {
        let cells = of_round(1, &[16, 4, 1, 8, 2, 0]);
        let once: BTreeSet<Cell> = cells.iter().copied().collect();
        assert_eq!(once.len(), cells.len());
        for kind in [Kind::Distance, Kind::IscsiPerigee, Kind::MoveHand, Kind::Network] {
            let of = |is_dilated| {
                cells.iter().any(|cell| (cell.kind, cell.is_dilated) == (kind, is_dilated))
            };
            assert!(of(true) && of(false), "{kind:?}");
        }
        let undilated: Vec<u32> = cells
            .iter()
            .filter(|cell| cell.kind == Kind::Distance && !cell.is_dilated)
            .map(|cell| cell.rtt_ms)
            .collect();
        assert_eq!(undilated, [0, 16]);
    }

    #[test]
    fn the_sides_take_turns_and_a_cell_has_the_same_column_in_each_round() {
        let (first, second) = (of_round(1, &[0, 16]), of_round(2, &[0, 16]));
        assert!(!first[0].begins_far() && second[0].begins_far());
        let columns = |cells: &[Cell]| -> Vec<_> { cells.iter().map(Cell::column).collect() };
        assert_eq!(columns(&first), columns(&second));
    }

    #[test]
    fn a_quick_run_has_each_part_and_two_distances() {
        let rtts = [0, 16];
        let cells: Vec<Cell> =
            of_round(1, &rtts).into_iter().filter(|cell| cell.is_of_quick_run(&rtts)).collect();
        let kinds: BTreeSet<Kind> = cells.iter().map(|cell| cell.kind).collect();
        assert_eq!((kinds.len(), cells.len()), (Kind::ALL.len(), Kind::ALL.len() + 1));
    }

    #[test]
    fn a_part_is_known_by_its_name_only() {
        for kind in Kind::ALL {
            assert_eq!(Kind::parse(kind.name()).expect("a part"), kind);
        }
        let error = Kind::parse("tpch").expect_err("no part").to_string();
        assert!(error.contains("iscsi-tgt"), "{error}");
    }
}
