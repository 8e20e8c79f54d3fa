//! A device in memory, and exports with only this device, for fuzz targets (feature `fuzzing`).

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use perigee_model::Problem;

use crate::device::{Device, Extent, IoError, Zeroing};
use crate::exports::{Export, Exports, Opener, Peer};
use crate::switch::Switch;

const SIZE_BYTES: usize = 1 << 20;

struct Memory(Mutex<Vec<u8>>);

impl Memory {
    fn with<T>(&self, offset: u64, length: usize, work: impl FnOnce(&mut [u8]) -> T) -> T {
        let from = usize::try_from(offset).expect("the server checks the range");
        work(&mut self.0.lock().expect("no holder panics")[from..from + length])
    }
}

impl Device for Memory {
    fn size_bytes(&self) -> u64 {
        SIZE_BYTES as u64
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        let length = usize::try_from(length_bytes).expect("32 bits");
        Box::pin(async move { Ok(self.with(offset, length, |b| Bytes::copy_from_slice(b))) })
    }

    fn try_read(&self, offset: u64, buffer: &mut [u8]) -> Option<Result<(), IoError>> {
        // Some reads succeed at once and some have to wait, as with a disk.
        (offset & 4096 == 0).then(|| {
            self.with(offset, buffer.len(), |bytes| buffer.copy_from_slice(bytes));
            Ok(())
        })
    }

    fn write(&self, offset: u64, data: Bytes, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async move {
            self.with(offset, data.len(), |bytes| bytes.copy_from_slice(&data));
            Ok(())
        })
    }

    fn zero(
        &self,
        offset: u64,
        length_bytes: u64,
        _: Zeroing,
        _: bool,
    ) -> BoxFuture<'_, Result<(), IoError>> {
        let length = usize::try_from(length_bytes).expect("the server checks the range");
        Box::pin(async move {
            self.with(offset, length, |bytes| bytes.fill(0));
            Ok(())
        })
    }

    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Ok(()) })
    }

    fn extents(&self, _: u64, length: u64) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        let extent = Extent { length_bytes: length.min(70_000), hole: true, zero: true };
        Box::pin(async move { Ok(vec![extent]) })
    }
}

/// Exports for the fuzz targets of all protocols.
pub struct One;

impl Exports for One {
    fn names(&self) -> BoxFuture<'_, Result<Vec<String>, Problem>> {
        Box::pin(async { Ok(vec!["data".into(), "read-only".into()]) })
    }

    fn open<'a>(
        &'a self,
        name: &'a str,
        _: Opener,
        _: Peer,
    ) -> BoxFuture<'a, Result<Export, Problem>> {
        Box::pin(async move {
            if name != "data" && name != "read-only" {
                return Err(Problem::not_found("can't open it", "there is no such export"));
            }
            let device = Arc::new(Memory(Mutex::new(vec![1; SIZE_BYTES])));
            let device = Switch::new(device);
            Ok(Export {
                device,
                read_only: name != "data",
                counters: Arc::default(),
                home: None,
                confined: false,
            })
        })
    }
}
