//! QEMU's own client, against this server.

use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use super::*;

/// Where the read goes that is not answered before somebody has seen the answer to the other one.
const LATE: u64 = 512 << 10;

/// A read of [`LATE`] waits for a permit. A read of another place is answered at once, or only when the late one
/// has come.
struct Disk {
    at_once: bool,
    has_come: Semaphore,
    late: Semaphore,
}

impl Device for Disk {
    fn size_bytes(&self) -> u64 {
        SIZE_BYTES as u64
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(async move {
            if offset == LATE {
                self.has_come.add_permits(1);
                self.late.acquire().await.expect("the gate is never closed").forget();
            } else {
                self.has_come.acquire().await.expect("the gate is never closed").forget();
            }
            Ok(vec![0; length_bytes as usize].into())
        })
    }

    fn try_read(&self, offset: u64, buffer: &mut [u8]) -> Option<Result<(), IoError>> {
        buffer.fill(0);
        (self.at_once && offset != LATE).then_some(Ok(()))
    }

    fn write(&self, _: u64, _: Bytes, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Err(IoError::ReadOnly) })
    }

    fn zero(&self, _: u64, _: u64, _: Zeroing, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Err(IoError::ReadOnly) })
    }

    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async { Ok(()) })
    }

    fn extents(&self, _: u64, length: u64) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        Box::pin(async move { Ok(vec![Extent { length_bytes: length, hole: false, zero: false }]) })
    }
}

#[tokio::test]
async fn qemu_gets_a_read_s_answer_while_a_later_read_is_not_answered() {
    for at_once in [false, true] {
        let (_dir, path) = socket();
        let (has_come, late) = (Semaphore::new(0), Semaphore::new(0));
        let disk = Arc::new(Disk { at_once, has_come, late });
        let address = Listen::Unix(path.clone());
        let exports = Arc::new(One(disk.clone(), Arc::default()));
        let server = Running::serve(exports, &address, ServerOptions::default()).await;
        let uri = format!("nbd+unix:///data?socket={}", path.display());
        let late = format!("aio_read {LATE} 4k");
        let commands = ["-c", "aio_read 0 4k", "-c", &late, "-c", "aio_flush"];
        // Its standard output is a pipe, on which it would keep its lines to itself until its end.
        let mut qemu = Command::new("stdbuf")
            .args(["-oL", "qemu-io", "-r", "-f", "raw"])
            .args(commands)
            .arg(uri)
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("qemu-io");
        let mut lines = BufReader::new(qemu.stdout.take().expect("a pipe")).lines();
        let first = within("the first read's answer", lines.next_line()).await.expect("a line");
        assert_eq!(first.as_deref(), Some("read 4096/4096 bytes at offset 0"));
        disk.late.add_permits(1);
        let ended = within("qemu-io to end", qemu.wait()).await.expect("its end");
        assert!(ended.success(), "{ended}");
        server.stop().await;
    }
}
