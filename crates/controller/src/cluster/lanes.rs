//! Live migrations over one link take place one after another.
//!
//! Two at once would each have half of the rate. Both would take twice as long, and would send more pages again,
//! because their guests go on writing.

use std::collections::BTreeMap;
use std::sync::Arc;

use perigee_model::MigrationId;
use tokio::sync::watch;

/// One direction of the link between two sites, or between two hosts of one site.
pub type Lane = (String, String);

type Queues = BTreeMap<Lane, Vec<Turn>>;

/// A migration in a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Turn {
    id: MigrationId,
    /// Its source goes soon.
    hurries: bool,
}

/// The migrations on each link in the order of their turns. The first one moves, the others wait.
#[derive(Debug, Clone)]
pub struct Lanes {
    queues: Arc<watch::Sender<Queues>>,
}

impl Default for Lanes {
    fn default() -> Self {
        Self { queues: Arc::new(watch::Sender::new(Queues::new())) }
    }
}

impl Lanes {
    /// Queues a migration. One that is in a queue already keeps its place.
    pub fn enter(&self, lane: &Lane, id: &MigrationId) {
        self.insert(lane, id, usize::MAX);
    }

    /// Puts a migration that is under way already before those that wait, for example after a restart.
    pub fn resume(&self, lane: &Lane, id: &MigrationId) {
        self.insert(lane, id, 0);
    }

    /// Puts a migration whose source goes soon before those that wait, and behind the one that moves and others that hurry.
    pub fn hurry(&self, lane: &Lane, id: &MigrationId) {
        self.queues.send_if_modified(|queues| {
            let queue = queues.entry(lane.clone()).or_default();
            let place = queue.iter().position(|turn| turn.id == *id);
            if place == Some(0) || place.is_some_and(|at| queue[at].hurries) {
                return false;
            }
            queue.retain(|turn| turn.id != *id);
            let waits = |turn: &Turn| !turn.hurries;
            let at = queue.iter().skip(1).position(waits).map_or(queue.len(), |after| after + 1);
            queue.insert(at, Turn { id: id.clone(), hurries: true });
            true
        });
    }

    fn insert(&self, lane: &Lane, id: &MigrationId, at: usize) {
        self.queues.send_if_modified(|queues| {
            let queue = queues.entry(lane.clone()).or_default();
            let is_new = queue.iter().all(|turn| turn.id != *id);
            if is_new {
                queue.insert(at.min(queue.len()), Turn { id: id.clone(), hurries: false });
            }
            is_new
        });
    }

    /// Removes a migration from its queue, so that the next one may move: it is over, or a host does not answer, so that
    /// nobody knows when it will be over.
    pub fn leave(&self, id: &MigrationId) {
        self.queues.send_if_modified(|queues| {
            let before: usize = queues.values().map(Vec::len).sum();
            queues.values_mut().for_each(|queue| queue.retain(|turn| turn.id != *id));
            queues.retain(|_, queue| !queue.is_empty());
            queues.values().map(Vec::len).sum::<usize>() < before
        });
    }

    /// The migrations that move or wait there, in their order.
    pub fn queue(&self, lane: &Lane) -> Vec<MigrationId> {
        let queues = self.queues.borrow();
        queues.get(lane).into_iter().flatten().map(|turn| turn.id.clone()).collect()
    }

    /// The migrations before this one; 0 when it is its turn.
    pub fn ahead(&self, lane: &Lane, id: &MigrationId) -> usize {
        ahead(&self.queues.borrow(), lane, id)
    }

    /// Waits until fewer than `most` migrations are before this one, and returns how many are left.
    pub async fn fewer_than(&self, most: usize, lane: &Lane, id: &MigrationId) -> usize {
        let mut queues = self.queues.subscribe();
        match queues.wait_for(|queues| ahead(queues, lane, id) < most).await {
            Ok(queues) => ahead(&queues, lane, id),
            // The sender lives as long as `self`.
            Err(_) => 0,
        }
    }
}

fn ahead(queues: &Queues, lane: &Lane, id: &MigrationId) -> usize {
    let queue = queues.get(lane).map_or(&[][..], Vec::as_slice);
    queue.iter().position(|turn| turn.id == *id).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u32) -> MigrationId {
        MigrationId::new(format!("q-{number}-m1")).expect("name")
    }

    fn lane() -> Lane {
        ("home".to_owned(), "cloud".to_owned())
    }

    fn ahead(lanes: &Lanes) -> [usize; 3] {
        [1, 2, 3].map(|number| lanes.ahead(&lane(), &id(number)))
    }

    fn three() -> Lanes {
        let lanes = Lanes::default();
        (1..=3).for_each(|number| lanes.enter(&lane(), &id(number)));
        lanes
    }

    #[tokio::test]
    async fn migrations_over_one_link_move_in_the_order_of_their_requests() {
        let lanes = three();
        assert_eq!(ahead(&lanes), [0, 1, 2]);
        lanes.leave(&id(1));
        assert_eq!(lanes.ahead(&lane(), &id(2)), 0);
        assert_eq!(lanes.fewer_than(2, &lane(), &id(3)).await, 1);
        lanes.leave(&id(2));
        assert_eq!(lanes.fewer_than(1, &lane(), &id(3)).await, 0);
        lanes.leave(&id(3));
        assert!(lanes.queues.borrow().is_empty());
    }

    #[tokio::test]
    async fn a_migration_that_gives_up_leaves_the_queue_and_other_links_are_free() {
        let lanes = three();
        let back = ("cloud".to_owned(), "home".to_owned());
        lanes.enter(&back, &id(4));
        assert_eq!(lanes.ahead(&back, &id(4)), 0);
        lanes.leave(&id(2));
        assert_eq!(lanes.fewer_than(2, &lane(), &id(3)).await, 1);
    }

    #[test]
    fn a_migration_that_is_under_way_waits_for_none() {
        let lanes = Lanes::default();
        lanes.enter(&lane(), &id(1));
        lanes.resume(&lane(), &id(2));
        assert_eq!(lanes.queue(&lane()), [id(2), id(1)]);
    }

    #[test]
    fn a_migration_from_a_host_that_goes_soon_overtakes_all_that_wait_but_others_that_hurry() {
        let lanes = three();
        lanes.enter(&lane(), &id(4));
        lanes.hurry(&lane(), &id(4));
        lanes.hurry(&lane(), &id(5));
        lanes.hurry(&lane(), &id(4));
        assert_eq!(lanes.queue(&lane()), [1, 4, 5, 2, 3].map(id), "the first one moves");
        lanes.hurry(&lane(), &id(1));
        lanes.leave(&id(1));
        assert_eq!(lanes.queue(&lane()), [4, 5, 2, 3].map(id));
        let other = ("cloud".to_owned(), "home".to_owned());
        lanes.hurry(&other, &id(6));
        assert_eq!(lanes.queue(&other), [id(6)]);
    }

    #[test]
    fn a_migration_whose_driver_begins_again_keeps_its_place() {
        let lanes = three();
        lanes.enter(&lane(), &id(2));
        lanes.resume(&lane(), &id(3));
        assert_eq!(ahead(&lanes), [0, 1, 2]);
    }
}
