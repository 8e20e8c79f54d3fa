//! A sparse array: only the used parts take memory, so that the cost of a 16 TiB volume depends on its used
//! part. Reads take no lock. An entry is created once and never removed.

use std::sync::OnceLock;

/// The number of entries that are allocated together.
const CHUNK: usize = 256;

type Chunk<T> = Box<[OnceLock<T>]>;

/// An array whose entries are made when they are first used, and never removed.
pub(crate) struct Sparse<T> {
    chunks: Box<[OnceLock<Chunk<T>>]>,
}

fn unset<T>(length: usize) -> Box<[OnceLock<T>]> {
    (0..length).map(|_| OnceLock::new()).collect()
}

impl<T> Sparse<T> {
    /// An array of `length` entries, none of which is in use.
    pub(crate) fn new(length: usize) -> Self {
        Self { chunks: unset(length.div_ceil(CHUNK)) }
    }

    pub(crate) fn get(&self, at: usize) -> Option<&T> {
        self.chunks[at / CHUNK].get()?[at % CHUNK].get()
    }

    pub(crate) fn get_or_init(&self, at: usize, make: impl FnOnce() -> T) -> &T {
        self.chunks[at / CHUNK].get_or_init(|| unset(CHUNK))[at % CHUNK].get_or_init(make)
    }

    /// The first entry in use at or after `from`.
    pub(crate) fn next_in_use(&self, from: usize) -> Option<usize> {
        let mut at = from;
        while let Some(chunk) = self.chunks.get(at / CHUNK) {
            let end = (at / CHUNK + 1) * CHUNK;
            if let Some(entries) = chunk.get()
                && let Some(found) = (at..end).find(|at| entries[at % CHUNK].get().is_some())
            {
                return Some(found);
            }
            at = end;
        }
        None
    }

    /// The entries in use, in order.
    pub(crate) fn in_use(&self) -> impl Iterator<Item = (usize, &T)> {
        let mut from = 0;
        std::iter::from_fn(move || {
            let at = self.next_in_use(from)?;
            from = at + 1;
            Some((at, self.get(at)?))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_in_use_are_found_in_order() {
        let sparse = Sparse::new(3 * CHUNK);
        for at in [CHUNK * 2 + 5, 0, CHUNK - 1] {
            assert_eq!(*sparse.get_or_init(at, || at), at);
        }
        let found: Vec<_> = sparse.in_use().collect();
        assert_eq!(found, [(0, &0), (CHUNK - 1, &(CHUNK - 1)), (CHUNK * 2 + 5, &(CHUNK * 2 + 5))]);
        assert_eq!(sparse.get(1), None);
        assert_eq!(sparse.next_in_use(CHUNK), Some(CHUNK * 2 + 5));
    }
}
