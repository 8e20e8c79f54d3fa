//! `perigee lab run faults`: one fault at a time, in each phase of each placement of a job's data.
//!
//! | question | file |
//! |---|---|
//! | which cells are there | `table.rs` |
//! | how does a fault come and go | `inflict.rs`, `disk.rs` |
//! | who writes and verifies meanwhile | without a VM `writer.rs`, in a guest `work.sh` |
//! | is there one writer at any time | `watch.rs` |
//! | what is done in a cell, and what is looked at afterwards | `volumes.rs`, `replicas.rs`, `vms.rs` |
//! | what is in the results | `outcome.rs`, `record.rs` |

mod disk;
mod ground;
mod inflict;
mod outcome;
mod record;
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
use crate::progress::Steps;
use crate::up::{self, Lab, with_lab};
use crate::wan::{LinkSettings, Rate};
use ground::Ground;
pub(crate) use ground::until;
pub(crate) use inflict::kill;
use outcome::Ran;
pub use outcome::{CellResult, Outcome, Verdict};
use record::Record;
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
    pub lab: up::Options,
    /// The golden image's disk; only for cells with a VM.
    pub image: PathBuf,
    /// The kernel that the agents boot to find out whether KVM works.
    pub kernel: PathBuf,
    /// The cells to run. Empty: all that have no result yet.
    pub cells: Vec<Cell>,
    /// Directory for `results.json` and `report.html`. Results of other cells stay there.
    pub out: PathBuf,
}

/// Runs the cells with a VM in one lab and at the same time the others in another lab. The labs are always removed
/// afterwards. The results are written after each cell, so that an interrupted run keeps those of its finished cells.
///
/// # Errors
/// The cells could not be run. What goes wrong in a cell is not an error here, but is in [`CellResult::faults`].
pub async fn faults(options: &Options, steps: &Steps) -> Result<Vec<CellResult>, Problem> {
    let record = Record::open(&options.out, &options.lab.program)?;
    let cells = match &options.cells[..] {
        [] => record.missing(),
        chosen => chosen.to_vec(),
    };
    let run = Run { options, steps, record };
    let (with_vm, without): (Vec<Cell>, Vec<Cell>) =
        cells.iter().partition(|cell| cell.placement.has_vm());
    let vms = run.in_lab(VMS_BITS_PER_S, &with_vm, async |ground| {
        let step = steps.begin("import the image");
        vms::prepare(ground, &options.image).await?;
        step.done("");
        run.vm_cells(ground, &with_vm).await
    });
    let volumes = run.in_lab(VOLUMES_BITS_PER_S, &without, async |ground| {
        for (number, &cell) in without.iter().enumerate() {
            run.volume_cell(ground, cell, number).await?;
        }
        Ok(())
    });
    let (vms, volumes) = tokio::join!(vms, volumes);
    vms.and(volumes)?;
    Ok(run.record.of(&cells))
}

struct Run<'a> {
    options: &'a Options,
    steps: &'a Steps,
    record: Record,
}

impl Run<'_> {
    /// Does the work in a lab of its own, if there are cells for it.
    async fn in_lab(
        &self,
        bits_per_s: u64,
        cells: &[Cell],
        work: impl AsyncFnOnce(&Ground<'_>) -> Result<(), Problem>,
    ) -> Result<(), Problem> {
        if cells.is_empty() {
            return Ok(());
        }
        let mut sites = Definition::default_sites();
        // One host for each site, so that it is clear at which host a replica is.
        sites.iter_mut().for_each(|site| site.hosts.truncate(1));
        let link = LinkSettings { rate: Rate(Some(bits_per_s)), ..LinkSettings::of_rtt_us(RTT_US) };
        let mut definition = Definition::new(LabId::random(), sites, link);
        definition.probe_kernel = Some(self.options.kernel.clone());
        with_lab(definition, &self.options.lab, self.steps, async |lab: Lab| {
            let step = self.steps.begin("a disk for each pool");
            disk::give_each_pool_a_disk(&lab).await?;
            let ground = Ground::new(&lab)?;
            ground.is_ready().await?;
            step.done("");
            work(&ground).await
        })
        .await
    }

    async fn volume_cell(
        &self,
        ground: &Ground<'_>,
        cell: Cell,
        number: usize,
    ) -> Result<(), Problem> {
        for left in (0..TRIES).rev() {
            // A server that is still down after one cell must not count against the next cell.
            ground.is_ready().await?;
            let (began, step) = (Instant::now(), self.steps.begin(cell.to_string()));
            let name = format!("faults-{number}-{left}");
            let ran = volumes::run(ground, cell, &name).await;
            let is_again = left > 0 && ran.as_ref().is_ok_and(is_to_try_again);
            let result = CellResult::of(cell, ran, began.elapsed().as_secs_f64());
            step.done(&says(&result));
            if !is_again {
                return self.record.keep(result);
            }
        }
        Ok(())
    }

    async fn vm_cells(&self, ground: &Ground<'_>, cells: &[Cell]) -> Result<(), Problem> {
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
                    self.record.keep(result)?;
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
    fn last(&self, left: Vec<String>, cells: &[Cell]) -> Result<(), Problem> {
        let result = cells.last().and_then(|cell| self.record.of(&[*cell]).pop());
        let Some(mut result) = result.filter(|_| !left.is_empty()) else { return Ok(()) };
        result.faults.extend(left.iter().map(|what| format!("left behind: {what}")));
        result.verdict = Verdict::Wrong;
        self.record.keep(result)
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
