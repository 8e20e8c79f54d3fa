//! The virtio-serial port to the host. One thread writes the outbox, one reads the host's messages.
//!
//! The host may close its side for a while (a restarted agent, a migration). Then reads return 0 bytes and
//! writes block in the kernel. Both continue when the host opens it again, and after the host's `resume` lost
//! messages are sent again.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use perigee_model::guest::{GuestBody, HostMessage, LINE_BYTES_MAX, PORT_NAME};

use crate::clock;
use crate::command::Wishes;
use crate::outbox::Outbox;

const RETRY_DELAY: Duration = Duration::from_millis(100);
const BATCH_BYTES: usize = 32 * 1024;

/// Serves the port until the guest powers off. The threads are never joined, because they have nothing to save.
pub fn start(outbox: Arc<Outbox>, wishes: Arc<Wishes>) {
    std::thread::spawn(move || {
        let port = open_port();
        let input = loop {
            match port.try_clone() {
                Ok(input) => break input,
                Err(_) => std::thread::sleep(RETRY_DELAY),
            }
        };
        let incoming = Arc::clone(&outbox);
        std::thread::spawn(move || read_forever(input, &incoming, &wishes));
        write_forever(port, &outbox);
    });
}

fn open_port() -> File {
    let mut told = false;
    loop {
        let opened = find_port(Path::new("/sys/class/virtio-ports"), PORT_NAME)
            .and_then(|path| OpenOptions::new().read(true).write(true).open(path));
        match opened {
            Ok(port) => return port,
            Err(error) if !told => {
                crate::console(&format!("waiting for the port {PORT_NAME}: {error}"));
                told = true;
            }
            Err(_) => {}
        }
        std::thread::sleep(RETRY_DELAY);
    }
}

/// Finds the device node of the port with this name in sysfs, so that no udev is needed.
fn find_port(class: &Path, name: &str) -> io::Result<PathBuf> {
    for entry in std::fs::read_dir(class)? {
        let entry = entry?;
        if std::fs::read_to_string(entry.path().join("name"))?.trim() == name {
            return Ok(Path::new("/dev").join(entry.file_name()));
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, "no such port"))
}

fn write_forever(mut port: File, outbox: &Outbox) {
    loop {
        let batch = outbox.next_batch(BATCH_BYTES);
        if port.write_all(&batch).is_err() {
            std::thread::sleep(RETRY_DELAY);
            outbox.apply(&HostMessage::Resume);
        }
    }
}

fn read_forever(mut port: File, outbox: &Arc<Outbox>, wishes: &Wishes) {
    let mut framing = HostLines::default();
    let mut buffer = [0; 4096];
    let mut sync_number = None;
    loop {
        match port.read(&mut buffer) {
            Ok(0) | Err(_) => {
                framing = HostLines::default();
                std::thread::sleep(RETRY_DELAY);
            }
            Ok(length) => framing.feed(&buffer[..length], |message| match message {
                HostMessage::Begin => wishes.begin(),
                HostMessage::EndCommand => wishes.end_command(),
                HostMessage::SyncNumber(number) => sync_number = Some(number),
                HostMessage::Sync => sync(outbox, sync_number.take()),
                HostMessage::Clock { unix_us } => clock::catch_up(unix_us),
                message => outbox.apply(&message),
            }),
        }
    }
}

/// In a thread of its own, because it may take long, and acknowledgements must be read meanwhile.
fn sync(outbox: &Arc<Outbox>, number: Option<u32>) {
    let outbox = Arc::clone(outbox);
    std::thread::spawn(move || {
        nix::unistd::sync();
        outbox.push(GuestBody::Synced { number });
    });
}

/// Splits the host's bytes into messages.
#[derive(Default)]
struct HostLines {
    line: Vec<u8>,
}

impl HostLines {
    /// An invalid line is treated as a `resume`: it may be the joined parts of lines of two connections, and it
    /// does no harm to send again what the host already has.
    fn feed(&mut self, bytes: &[u8], mut each: impl FnMut(HostMessage)) {
        for byte in bytes {
            if *byte != b'\n' {
                if self.line.len() < LINE_BYTES_MAX {
                    self.line.push(*byte);
                }
                continue;
            }
            if !self.line.is_empty() {
                each(serde_json::from_slice(&self.line).unwrap_or(HostMessage::Resume));
            }
            self.line.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(chunks: &[&[u8]]) -> Vec<HostMessage> {
        let mut lines = HostLines::default();
        let mut messages = Vec::new();
        for chunk in chunks {
            lines.feed(chunk, |message| messages.push(message));
        }
        messages
    }

    #[test]
    fn a_message_may_arrive_in_pieces() {
        assert_eq!(
            messages(&[b"\"resume\"\n{\"ac", b"k\":12}\n"]),
            [HostMessage::Resume, HostMessage::Ack(12)]
        );
    }

    #[test]
    fn a_torn_line_makes_the_guest_send_again() {
        assert_eq!(messages(&[b"{\"ack\":1\"resume\"\n"]), [HostMessage::Resume]);
    }

    #[test]
    fn an_endless_line_is_bounded() {
        let mut lines = HostLines::default();
        lines.feed(&vec![b'x'; 2 * LINE_BYTES_MAX], |_| {});
        assert_eq!(lines.line.len(), LINE_BYTES_MAX);
    }

    #[test]
    fn the_port_is_found_by_its_name() {
        let class = tempfile::tempdir().unwrap();
        for (node, name) in [("vport1p1", "other"), ("vport1p2", PORT_NAME)] {
            std::fs::create_dir(class.path().join(node)).unwrap();
            std::fs::write(class.path().join(node).join("name"), format!("{name}\n")).unwrap();
        }
        assert_eq!(find_port(class.path(), PORT_NAME).unwrap(), Path::new("/dev/vport1p2"));
        assert!(find_port(class.path(), "missing").is_err());
    }
}
