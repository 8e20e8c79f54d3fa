//! Looks for texts in all frames of a network namespace, as somebody who listens there would.
//!
//! A frame that passes several network cards of the namespace counts each time.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memchr::memmem;
use perigee_model::Problem;
use rustix::net::sockopt::{Timeout, set_socket_recv_buffer_size_force, set_socket_timeout};
use rustix::net::{AddressFamily, SocketType, eth, socket};

use crate::netns;

/// Longer than any frame, also with the kernel's offloads.
const FRAME_BYTES_MAX: usize = 1 << 17;
/// What waits while this thread has no CPU.
const WAITING_BYTES_MAX: usize = 1 << 28;
/// How often it looks whether it is to end.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long it goes on after it is to end, if frames keep coming.
const REST_MAX: Duration = Duration::from_secs(60);

/// What was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    pub frames: u64,
    pub bytes: u64,
    /// For each text, in how many frames it was.
    pub found: Vec<u64>,
}

/// A capture that is under way. It ends when this is dropped, too.
pub struct Capture {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Seen, Problem>>>,
}

impl Capture {
    /// When this returns, every frame counts.
    ///
    /// # Errors
    /// When the namespace can't be entered, or its frames can't be read.
    pub fn begin(namespace: &str, texts: &[&str]) -> Result<Self, Problem> {
        let what = format!("can't see the frames of {namespace}");
        let failed = move |e: std::io::Error| Problem::internal(what.clone(), e);
        let open = || -> std::io::Result<File> {
            let socket = socket(AddressFamily::PACKET, SocketType::RAW, Some(eth::ALL))?;
            set_socket_recv_buffer_size_force(&socket, WAITING_BYTES_MAX)?;
            set_socket_timeout(&socket, Timeout::Recv, Some(LOOK_EVERY))?;
            Ok(File::from(socket))
        };
        let frames = netns::within(namespace, || open().map_err(&failed))?;
        let texts: Vec<Vec<u8>> = texts.iter().map(|text| text.as_bytes().to_vec()).collect();
        let stop = Arc::<AtomicBool>::default();
        let stopped = Arc::clone(&stop);
        let listen = move || look(frames, &texts, &stopped).map_err(failed);
        Ok(Self { stop, thread: Some(std::thread::spawn(listen)) })
    }

    /// What was seen until now. Frames that are on their way through the kernel count too.
    ///
    /// # Errors
    /// When frames could not be read.
    pub fn end(mut self) -> Result<Seen, Problem> {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        match ended {
            Some(Ok(seen)) => seen,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Err(Problem::internal("can't see frames", "the capture has ended before")),
        }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Reads until it is to stop and no frame comes for a while.
fn look(mut frames: File, texts: &[Vec<u8>], stop: &AtomicBool) -> std::io::Result<Seen> {
    let mut seen = Seen { frames: 0, bytes: 0, found: vec![0; texts.len()] };
    let mut buffer = vec![0; FRAME_BYTES_MAX];
    let mut rest = None;
    loop {
        if stop.load(Ordering::Relaxed)
            && rest.get_or_insert_with(Instant::now).elapsed() > REST_MAX
        {
            return Ok(seen);
        }
        let length = match frames.read(&mut buffer) {
            Ok(length) => length,
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                if stop.load(Ordering::Relaxed) {
                    return Ok(seen);
                }
                continue;
            }
            Err(error) => return Err(error),
        };
        let frame = &buffer[..length];
        seen.frames += 1;
        seen.bytes += length as u64;
        for (text, found) in texts.iter().zip(&mut seen.found) {
            *found += u64::from(has(frame, text));
        }
    }
}

fn has(frame: &[u8], text: &[u8]) -> bool {
    memmem::find(frame, text).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_found_at_any_place_of_a_frame() {
        for frame in ["marker", "a marker", "marker b", "a marker b", "mamarker"] {
            assert!(has(frame.as_bytes(), b"marker"), "{frame}");
        }
        for frame in ["", "marke", "mark er", "arker"] {
            assert!(!has(frame.as_bytes(), b"marker"), "{frame}");
        }
    }
}
