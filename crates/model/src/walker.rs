//! Walks every world (state of all parts together) that a state machine can reach. The proofs of the machines use it.

use std::collections::HashMap;
use std::hash::Hash;

/// Every world that can be reached, with the numbers of the worlds that follow it. Late messages lead to worlds as
/// well. But nobody may have to wait for such a message, so these worlds are not among `next`.
pub(crate) struct Walk<World> {
    pub(crate) worlds: Vec<World>,
    numbers: HashMap<World, u32>,
    next: Vec<Vec<u32>>,
}

impl<World: Copy + Eq + Hash> Walk<World> {
    /// Walks from `start`, and checks each world once.
    pub(crate) fn all<Next, Late>(
        start: World,
        check: impl Fn(&World),
        next: impl Fn(&World) -> Next,
        late: impl Fn(&World) -> Late,
    ) -> Self
    where
        Next: IntoIterator<Item = World>,
        Late: IntoIterator<Item = World>,
    {
        let mut walk = Self { worlds: Vec::new(), numbers: HashMap::new(), next: Vec::new() };
        walk.number(start);
        while let Some(world) = walk.worlds.get(walk.next.len()).copied() {
            check(&world);
            for after in late(&world) {
                walk.number(after);
            }
            let mut following: Vec<u32> =
                next(&world).into_iter().map(|after| walk.number(after)).collect();
            following.sort_unstable();
            following.dedup();
            walk.next.push(following);
        }
        walk
    }

    fn number(&mut self, world: World) -> u32 {
        let fresh = u32::try_from(self.worlds.len()).unwrap();
        let number = *self.numbers.entry(world).or_insert(fresh);
        if number == fresh {
            self.worlds.push(world);
        }
        number
    }

    /// The worlds from which none that is `good` can be reached.
    pub(crate) fn stuck(&self, good: impl Fn(&World) -> bool) -> Vec<World> {
        let mut before: Vec<Vec<u32>> = vec![Vec::new(); self.worlds.len()];
        for (number, next) in self.next.iter().enumerate() {
            for after in next {
                before[usize::try_from(*after).unwrap()].push(u32::try_from(number).unwrap());
            }
        }
        let mut can: Vec<bool> = self.worlds.iter().map(good).collect();
        let mut waiting: Vec<usize> = (0..can.len()).filter(|number| can[*number]).collect();
        while let Some(number) = waiting.pop() {
            for earlier in &before[number] {
                let earlier = usize::try_from(*earlier).unwrap();
                if !can[earlier] {
                    can[earlier] = true;
                    waiting.push(earlier);
                }
            }
        }
        (0..can.len()).filter(|number| !can[*number]).map(|number| self.worlds[number]).collect()
    }
}
