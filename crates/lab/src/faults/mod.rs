//! `perigee lab run faults`: one fault at a time, in each phase of each placement of a job's data.
//!
//! | question | file |
//! |---|---|
//! | which cells are there | `table.rs` |
//! | how does a fault come and go | `inflict.rs`, `disk.rs` |
//! | who writes and verifies meanwhile | without a VM `writer.rs`, in a guest `work.sh` |
//! | is there one writer at any time | `watch.rs` |
//! | what is done in a cell, and what is looked at afterwards | `volumes.rs`, `replicas.rs`, `vms.rs` |
//! | what is in the results | `outcome.rs` |

mod disk;
mod ground;
mod inflict;
mod outcome;
mod replicas;
mod table;
mod vms;
mod volumes;
mod watch;
mod writer;

use std::path::PathBuf;
use std::time::Instant;

use perigee_model::Problem;

use crate::definition::{Definition, LabId};
use crate::measuring::{self, QEMU, VERSION};
use crate::progress::Steps;
use crate::up::{self, Lab, with_lab};
use crate::wan::{LinkSettings, Rate};
use ground::Ground;
use outcome::Ran;
pub use outcome::{CellResult, Outcome, Verdict};
pub use table::{Cell, choose, word};
use vms::Guest;

const RTT_US: u64 = 16_000;
/// Slow enough that a fault can come in every phase.
const VOLUMES_BITS_PER_S: u64 = 100_000_000;
/// Faster for the cells with a VM, which have more to move.
const VMS_BITS_PER_S: u64 = 400_000_000;
/// How often a cell is tried if its phase is over before the fault comes.
const TRIES: u32 = 4;

/// The options of a run.
#[derive(Debug, Clone)]
pub struct Options {
    pub id: LabId,
    pub lab: up::Options,
    /// The golden image's disk; only for cells with a VM.
    pub image: PathBuf,
    /// The kernel that the agents boot to find out whether KVM works.
    pub kernel: PathBuf,
    pub cells: Vec<Cell>,
    /// Only cells that have no result yet.
    pub missing: bool,
    /// Directory for `results.json` and `report.html`. Results of other cells stay there.
    pub out: PathBuf,
}

/// Runs the cells in a lab of its own, which is always removed afterwards. The results are written after each cell, so
/// that an interrupted run keeps those of its finished cells.
///
/// # Errors
/// The cells could not be run. What goes wrong in a cell is not an error here, but is in [`CellResult::faults`].
pub async fn faults(options: &Options, steps: &Steps) -> Result<Vec<CellResult>, Problem> {
    let mut outcome = Outcome::read(&options.out)?;
    let is_wanted = |cell: &&Cell| !options.missing || outcome.of(cell).is_none();
    let cells: Vec<Cell> = options.cells.iter().filter(is_wanted).copied().collect();
    if cells.is_empty() {
        return Ok(Vec::new());
    }
    outcome.versions = measuring::versions(VERSION, &[QEMU]);
    let settings = link(VOLUMES_BITS_PER_S);
    let mut sites = Definition::default_sites();
    // One host for each site, so that it is clear at which host a replica is.
    sites.iter_mut().for_each(|site| site.hosts.truncate(1));
    let mut definition = Definition::new(options.id.clone(), sites, settings);
    definition.probe_kernel = Some(options.kernel.clone());
    with_lab(definition, &options.lab, steps, async |lab: Lab| {
        let mut run = Run { options, steps, outcome, results: Vec::new(), number: 0 };
        run.all(&lab, &cells).await?;
        Ok(run.results)
    })
    .await
}

fn link(bits_per_s: u64) -> LinkSettings {
    LinkSettings { rate: Rate(Some(bits_per_s)), ..LinkSettings::of_rtt_us(RTT_US) }
}

struct Run<'a> {
    options: &'a Options,
    steps: &'a Steps,
    outcome: Outcome,
    results: Vec<CellResult>,
    /// The number of the last volume.
    number: u32,
}

impl Run<'_> {
    async fn all(&mut self, lab: &Lab, cells: &[Cell]) -> Result<(), Problem> {
        let step = self.steps.begin("a disk for each pool");
        disk::give_each_pool_a_disk(lab).await?;
        let ground = Ground::new(lab)?;
        ground.is_ready().await?;
        step.done("");
        let (with_vm, without): (Vec<Cell>, Vec<Cell>) =
            cells.iter().partition(|cell| cell.placement.has_vm());
        for cell in without {
            self.volume_cell(&ground, cell).await?;
        }
        if !with_vm.is_empty() {
            inflict::set_link(lab, link(VMS_BITS_PER_S)).await?;
            let step = self.steps.begin("import the image");
            vms::prepare(&ground, &self.options.image).await?;
            step.done("");
            self.vm_cells(&ground, &with_vm).await?;
        }
        Ok(())
    }

    async fn volume_cell(&mut self, ground: &Ground<'_>, cell: Cell) -> Result<(), Problem> {
        for left in (0..TRIES).rev() {
            // A server that is still down after one cell must not count against the next cell.
            ground.is_ready().await?;
            let (began, step) = (Instant::now(), self.steps.begin(cell.to_string()));
            self.number += 1;
            let ran = volumes::run(ground, cell, self.number).await;
            let is_again = left > 0 && ran.as_ref().is_ok_and(is_to_try_again);
            let result = CellResult::of(cell, ran, began.elapsed().as_secs_f64());
            step.done(&says(&result));
            if !is_again {
                return self.keep(result);
            }
        }
        Ok(())
    }

    async fn vm_cells(&mut self, ground: &Ground<'_>, cells: &[Cell]) -> Result<(), Problem> {
        let mut guest: Option<Guest<'_>> = None;
        for &cell in cells {
            for left in (0..TRIES).rev() {
                let here = match guest.take() {
                    Some(here) => here,
                    None => self.boot(ground).await?,
                };
                let (began, step) = (Instant::now(), self.steps.begin(cell.to_string()));
                let mut ran = here.run(cell).await;
                // After trouble the next cell begins with another guest.
                if ran.as_ref().is_ok_and(|ran| ran.faults.is_empty()) && !here.is_over().await? {
                    guest = Some(here);
                } else {
                    let ended = here.end().await;
                    if let (Ok(ran), Ok(left)) = (&mut ran, &ended) {
                        ran.faults.extend(left.iter().map(|what| format!("left behind: {what}")));
                    }
                    if let Err(problem) = ended {
                        self.steps.say(&format!("    {problem}"));
                    }
                }
                let is_again = left > 0 && ran.as_ref().is_ok_and(is_to_try_again);
                let result = CellResult::of(cell, ran, began.elapsed().as_secs_f64());
                step.done(&says(&result));
                if !is_again {
                    self.keep(result)?;
                    break;
                }
            }
        }
        match guest {
            Some(guest) => self.last(guest.end().await?, cells),
            None => Ok(()),
        }
    }

    async fn boot<'g>(&self, ground: &'g Ground<'g>) -> Result<Guest<'g>, Problem> {
        let step = self.steps.begin("boot a guest");
        let guest = Guest::start(ground).await?;
        step.done("");
        Ok(guest)
    }

    /// Counts what is left at the end as a fault of the last cell.
    fn last(&mut self, left: Vec<String>, cells: &[Cell]) -> Result<(), Problem> {
        let result = cells.last().and_then(|cell| self.outcome.of(cell)).cloned();
        let Some(mut result) = result.filter(|_| !left.is_empty()) else { return Ok(()) };
        result.faults.extend(left.iter().map(|what| format!("left behind: {what}")));
        result.verdict = Verdict::Wrong;
        self.results.retain(|other| other.cell != result.cell);
        self.keep(result)
    }

    fn keep(&mut self, result: CellResult) -> Result<(), Problem> {
        self.results.push(result.clone());
        self.outcome.set(result);
        self.outcome.write(&self.options.out)
    }
}

fn is_to_try_again(ran: &Ran) -> bool {
    !ran.is_seen && ran.faults.is_empty()
}

fn says(result: &CellResult) -> String {
    let word = word(result.verdict);
    let faults: String = result.faults.iter().map(|fault| format!("\n      {fault}")).collect();
    format!("{word}: {}{faults}", result.ended)
}
