//! A bound on what the headers of a tar's entries make their reader keep in memory. Whoever writes the tar is not trusted.

use std::cell::Cell;
use std::io::{self, Read};

/// The most bytes of headers between one entry's data and the next entry's data.
pub const TAR_HEADER_BYTES_MAX: u64 = 64 << 10;

/// A reader that returns no more bytes than its budget. Before the headers of an entry the budget is
/// [`TAR_HEADER_BYTES_MAX`], and before its data it is unlimited.
#[derive(Debug)]
pub struct Bounded<'a, R> {
    inner: R,
    budget: &'a Cell<u64>,
}

impl<'a, R: Read> Bounded<'a, R> {
    /// Whoever has the budget may change it at any time.
    pub fn new(inner: R, budget: &'a Cell<u64>) -> Self {
        Self { inner, budget }
    }
}

impl<R: Read> Read for Bounded<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.budget.get();
        if left == 0 && !buffer.is_empty() {
            let why =
                format!("the headers of an entry take more than {TAR_HEADER_BYTES_MAX} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        let room = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let length = self.inner.read(&mut buffer[..room])?;
        self.budget.set(left - length as u64);
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_read_than_the_budget_allows() {
        let budget = Cell::new(4);
        let mut reader = Bounded::new(&b"0123456789"[..], &budget);
        let mut read = [0; 10];
        assert_eq!(reader.read(&mut read).expect("some"), 4);
        let error = reader.read(&mut read).expect_err("it has none left");
        assert!(error.to_string().contains("headers"), "{error}");
        budget.set(u64::MAX);
        assert_eq!(reader.read(&mut read).expect("the rest"), 6);
    }
}
