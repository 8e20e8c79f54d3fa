//! A bounded map. When it is full, it drops an entry that was not read lately (the CLOCK algorithm). A host's read
//! cache and the planner's replay of that cache use it.

use std::collections::HashMap;
use std::hash::Hash;

/// The map. Each call of [`Clock::place`] names the bound.
#[derive(Debug)]
pub struct Clock<K, V> {
    places: HashMap<K, usize>,
    slots: Vec<Slot<K, V>>,
    hand: usize,
}

#[derive(Debug)]
struct Slot<K, V> {
    /// `None`: it is free.
    key: Option<K>,
    read: bool,
    value: V,
}

impl<K, V> Default for Clock<K, V> {
    fn default() -> Self {
        Self { places: HashMap::new(), slots: Vec::new(), hand: 0 }
    }
}

impl<K: Copy + Eq + Hash, V> Clock<K, V> {
    /// The value of a key. The key counts as read.
    pub fn read(&mut self, key: &K) -> Option<&V> {
        let slot = &mut self.slots[*self.places.get(key)?];
        slot.read = true;
        Some(&slot.value)
    }

    /// The value of a key. The key does not count as read.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.places.get(key).map(|place| &self.slots[*place].value)
    }

    /// The place of a key's value. The caller then sets the value. It is the key's own place, a new one, or that
    /// of a key that is dropped. `None` if the bound is 0 and the map is empty.
    pub fn place(&mut self, key: K, slots_max: usize, new: impl FnOnce() -> V) -> Option<&mut V> {
        let place = match self.places.get(&key) {
            Some(place) => *place,
            None if self.slots.len() < slots_max => {
                self.slots.push(Slot { key: Some(key), read: false, value: new() });
                self.slots.len() - 1
            }
            None if self.slots.is_empty() => return None,
            None => self.free(),
        };
        self.slots[place].key = Some(key);
        self.places.insert(key, place);
        Some(&mut self.slots[place].value)
    }

    /// Drops a key.
    pub fn remove(&mut self, key: &K) {
        if let Some(place) = self.places.remove(key) {
            self.slots[place].key = None;
            self.slots[place].read = false;
        }
    }

    /// The number of values that it has memory for.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Drops an entry, and returns its slot.
    fn free(&mut self) -> usize {
        loop {
            let place = self.hand;
            self.hand = (self.hand + 1) % self.slots.len();
            let slot = &mut self.slots[place];
            if !std::mem::take(&mut slot.read) {
                if let Some(key) = slot.key.take() {
                    self.places.remove(&key);
                }
                return place;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_stays_and_what_is_removed_is_gone() {
        let mut clock = Clock::default();
        for number in 0..1000_u64 {
            *clock.place(number, 8, || 0).expect("a place") = number * 2;
            assert_eq!(clock.read(&0), Some(&0), "{number}");
            assert_eq!(clock.get(&number), Some(&(number * 2)));
        }
        assert_eq!(clock.slots(), 8);
        clock.remove(&0);
        assert_eq!(clock.read(&0), None);
        assert!(clock.place(1, 0, || 0).is_some(), "a place that is there");
        assert!(Clock::<u64, u64>::default().place(1, 0, || 0).is_none());
    }
}
