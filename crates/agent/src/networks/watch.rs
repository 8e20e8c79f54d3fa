//! Hears at once when somebody removes rules of an agent's packet filter (nftables) in this network namespace.

use std::io::ErrorKind;
use std::os::fd::{AsRawFd as _, OwnedFd};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Changes of nftables are sent to these listeners (`NFNLGRP_NFTABLES`).
const LISTENERS: u32 = 1 << (7 - 1);
/// Kinds of messages: a table, a chain or a rule was removed.
const REMOVED: [u16; 3] = [0x0a02, 0x0a05, 0x0a08];
/// All tables of agents begin so. Other programs change theirs often.
const OWN: &[u8] = b"perigee_";
/// Those that only count hold nothing off.
const COUNTING: &[u8] = b"perigee_talk_";
/// Before each message: its length (4 bytes), its kind (2), and 10 more.
const HEADER_BYTES: usize = 16;

/// Hears from the kernel (netlink, nftables) what others change of the packet filter.
#[derive(Debug)]
pub struct Watch(AsyncFd<OwnedFd>);

impl Watch {
    /// Begins to listen.
    ///
    /// # Errors
    /// If the kernel has no such socket for this process.
    pub fn new() -> std::io::Result<Self> {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let netfilter = SockProtocol::NetlinkNetFilter;
        let file = socket(AddressFamily::Netlink, SockType::Raw, flags, netfilter)?;
        bind(file.as_raw_fd(), &NetlinkAddr::new(0, LISTENERS))?;
        // SAFETY: the descriptor is open, and the same, for as long as the file is.
        let watched = unsafe { AsyncFd::register_with_interest(file, Interest::READABLE) }?;
        Ok(Self(watched))
    }

    /// Waits until something was removed. All that was removed by then is heard with it.
    pub async fn removed(&self) -> std::io::Result<()> {
        let mut buffer = vec![0; 64 << 10];
        let mut is_heard = false;
        loop {
            let mut ready = self.0.readable().await?;
            let got = ready.try_io(|file| {
                Ok(recv(file.get_ref().as_raw_fd(), &mut buffer, MsgFlags::empty())?)
            });
            match got {
                Ok(Ok(bytes)) => is_heard |= says_removed(&buffer[..bytes]),
                // More has happened than the kernel keeps.
                Ok(Err(error)) if error.raw_os_error() == Some(nix::libc::ENOBUFS) => {
                    is_heard = true;
                }
                Ok(Err(error)) if error.kind() != ErrorKind::Interrupted => return Err(error),
                // The kernel has said all.
                Err(_) if is_heard => return Ok(()),
                Ok(Err(_)) | Err(_) => {}
            }
        }
    }
}

fn says_removed(mut text: &[u8]) -> bool {
    while let Some((header, rest)) = text.split_at_checked(HEADER_BYTES) {
        let [a, b, c, d, kind @ ..] = header else { return false };
        let length = usize::try_from(u32::from_ne_bytes([*a, *b, *c, *d])).unwrap_or(usize::MAX);
        let length = length.max(HEADER_BYTES);
        let said = &rest[..rest.len().min(length - HEADER_BYTES)];
        let names = |table: &[u8]| said.windows(table.len()).any(|part| part == table);
        let is_removal = REMOVED.contains(&u16::from_ne_bytes([kind[0], kind[1]]));
        if is_removal && names(OWN) && !names(COUNTING) {
            return true;
        }
        // Messages begin at multiples of four.
        let next = length.checked_next_multiple_of(4);
        text = next.and_then(|next| text.get(next..)).unwrap_or_default();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removal_is_found_behind_other_messages() {
        let message = |kind: u16, table: &str| {
            let bytes = u32::try_from(HEADER_BYTES + table.len()).expect("a short one");
            let mut all = [&bytes.to_ne_bytes()[..], &kind.to_ne_bytes()].concat();
            all.resize(HEADER_BYTES, 0);
            all.extend(table.bytes());
            all.resize(all.len().next_multiple_of(4), 0);
            all
        };
        let [other, removed] = [message(0x0a00, "perigee_net_1"), message(0x0a02, "perigee_net_1")];
        assert!(says_removed(&[&other[..], &removed].concat()));
        // Another program's table is removed, and one of an agent is made.
        let strange = [message(0x0a02, "docker"), other.clone()].concat();
        let counting = message(0x0a08, "perigee_talk_1");
        for nothing in [&other[..], &strange, &counting, &[], &[0; 7], &[0; 40], &[0xff; 40]] {
            assert!(!says_removed(nothing), "{nothing:?}");
        }
    }
}
