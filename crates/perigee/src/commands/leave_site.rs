//! `perigee image update` and `perigee volume update`: whether data may leave its site.

use perigee_model::leave_site::{LeaveSiteSet, SetLeaveSite};
use perigee_model::{LeaveSite, Problem};

use crate::context::Context;
use crate::output::{self, Column};
use crate::servers::{PoolOption, server};

/// A change of whether data may leave its site.
#[derive(Debug, clap::Args)]
pub struct LeaveSiteChange {
    /// `never`: other sites get no copy, and read it into memory only, over encrypted links. `allowed`: copies
    /// may be made anywhere
    #[arg(long)]
    leave_site: LeaveSite,
    /// Confirm that what could not leave its site may be copied to any site from now on
    #[arg(long)]
    yes: bool,
}

impl LeaveSiteChange {
    /// Makes the change, and says what else it applies to.
    pub async fn apply(self, context: &Context, pool: PoolOption, of: &str) -> Result<(), Problem> {
        let ask = SetLeaveSite { leave_site: self.leave_site, confirmed: self.yes };
        let path = format!("{of}/leave-site");
        let set: LeaveSiteSet = server(context, pool).await?.put(&path, &ask).await?;
        output::one(context.format, &set, CHANGED)
    }
}

const CHANGED: &[Column<LeaveSiteSet>] = &[
    ("leave site", |set| set.leave_site.to_string()),
    ("layers", |set| set.layers.len().to_string()),
    ("also", |set| output::or_dash(some(&set.also).as_ref())),
    ("shares data, may leave", |set| output::or_dash(some(&set.may_leave).as_ref())),
];

fn some(names: &[String]) -> Option<String> {
    (!names.is_empty()).then(|| names.join(", "))
}
