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

type Queues = BTreeMap<Lane, Vec<MigrationId>>;

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
    /// Queues a migration. It leaves the queue when the returned value is dropped.
    pub fn enter(&self, lane: Lane, id: MigrationId) -> Place {
        self.queues.send_modify(|queues| queues.entry(lane.clone()).or_default().push(id.clone()));
        Place { lanes: self.clone(), lane, id }
    }

    /// Puts a migration that is under way already before those that wait, for example after a restart.
    pub fn resume(&self, lane: Lane, id: MigrationId) -> Place {
        self.queues
            .send_modify(|queues| queues.entry(lane.clone()).or_default().insert(0, id.clone()));
        Place { lanes: self.clone(), lane, id }
    }

    /// The migrations that move or wait there.
    pub fn len(&self, lane: &Lane) -> usize {
        self.queues.borrow().get(lane).map_or(0, Vec::len)
    }
}

/// A migration's place in the queue of its link.
#[derive(Debug)]
pub struct Place {
    lanes: Lanes,
    lane: Lane,
    id: MigrationId,
}

impl Place {
    /// The migrations before it; 0 when it is its turn.
    pub fn ahead(&self) -> usize {
        ahead(&self.lanes.queues.borrow(), &self.lane, &self.id)
    }

    /// Waits until fewer than `ahead` migrations are before it, and returns how many are left.
    pub async fn fewer_than(&self, ahead_before: usize) -> usize {
        let mut queues = self.lanes.queues.subscribe();
        let fewer = |queues: &Queues| ahead(queues, &self.lane, &self.id) < ahead_before;
        match queues.wait_for(fewer).await {
            Ok(queues) => ahead(&queues, &self.lane, &self.id),
            // The sender lives as long as this place.
            Err(_) => 0,
        }
    }
}

fn ahead(queues: &Queues, lane: &Lane, id: &MigrationId) -> usize {
    let queue = queues.get(lane).map_or(&[][..], Vec::as_slice);
    queue.iter().position(|other| other == id).unwrap_or(0)
}

impl Drop for Place {
    fn drop(&mut self) {
        self.lanes.queues.send_modify(|queues| {
            let Some(queue) = queues.get_mut(&self.lane) else { return };
            if let Some(at) = queue.iter().position(|id| *id == self.id) {
                queue.remove(at);
            }
            if queue.is_empty() {
                queues.remove(&self.lane);
            }
        });
    }
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

    #[tokio::test]
    async fn migrations_over_one_link_move_in_the_order_of_their_requests() {
        let lanes = Lanes::default();
        let first = lanes.enter(lane(), id(1));
        let second = lanes.enter(lane(), id(2));
        let third = lanes.enter(lane(), id(3));
        assert_eq!((first.ahead(), second.ahead(), third.ahead()), (0, 1, 2));
        drop(first);
        assert_eq!((second.ahead(), third.fewer_than(2).await), (0, 1));
        drop(second);
        assert_eq!(third.fewer_than(1).await, 0);
        drop(third);
        assert_eq!(lanes.len(&lane()), 0);
        assert!(lanes.queues.borrow().is_empty());
    }

    #[tokio::test]
    async fn a_migration_that_gives_up_leaves_the_queue_and_other_links_are_free() {
        let lanes = Lanes::default();
        let _first = lanes.enter(lane(), id(1));
        let second = lanes.enter(lane(), id(2));
        let third = lanes.enter(lane(), id(3));
        let back = lanes.enter(("cloud".to_owned(), "home".to_owned()), id(4));
        assert_eq!(back.ahead(), 0);
        drop(second);
        assert_eq!(third.fewer_than(2).await, 1);
    }

    #[tokio::test]
    async fn a_migration_that_is_under_way_waits_for_none() {
        let lanes = Lanes::default();
        let waiting = lanes.enter(lane(), id(1));
        let under_way = lanes.resume(lane(), id(2));
        assert_eq!((under_way.ahead(), waiting.ahead()), (0, 1));
    }
}
