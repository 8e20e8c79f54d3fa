//! The cluster rents hosts by itself.

use perigee_model::Problem;
use perigee_model::limits::RENTED_MOST;
use perigee_model::renting::{Renting, SetRenting};

use crate::cluster::Cluster;

/// `PUT /renting`: what an admin says from now on.
///
/// # Errors
/// `Invalid` for more hosts at once than the limit allows; if the store fails.
pub async fn set_renting(cluster: &Cluster, ask: SetRenting) -> Result<Renting, Problem> {
    let what = "can't set how hosts are rented";
    ask.most.map(|most| RENTED_MOST.check(most)).transpose().map_err(|e| e.problem(what))?;
    let _turn = cluster.renter.turn.lock().await;
    cluster.renter.set(&cluster.records, ask).await?;
    Ok(cluster.renter.shown())
}
