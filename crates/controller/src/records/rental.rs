//! The records of rented hosts.

use perigee_model::RentalId;
use perigee_model::rental::Rental;
use serde::{Deserialize, Serialize};

/// The prefix of the records of rentals.
pub const RENTALS: &str = "rentals/";

/// A rented host with everything its driver must know after a restart.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RentalRecord {
    /// As shown to people.
    pub view: Rental,
    /// Where its host reaches the controller.
    pub controller_url: Option<String>,
    /// The secret of its host's join token, until nobody needs the token any more. Each request for the instance has the same one: a provider that
    /// honours the request's token refuses another request with it.
    pub secret: Option<String>,
}

/// What people asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RentalIntent {
    /// Who wants it to end, as the audit log names them.
    pub ended_by: Option<String>,
    /// Its VMs end with it.
    pub now: bool,
}

/// The key of a [`RentalRecord`].
pub fn rental_key(rental: &RentalId) -> String {
    format!("{RENTALS}{rental}")
}

/// The key of a [`RentalIntent`].
pub fn rental_intent_key(rental: &RentalId) -> String {
    format!("intents/rentals/{rental}")
}
