//! A VM's card: a TAP that is there for as long as QEMU has it open.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use nix::libc;
use tokio::time::Instant;

use super::names::Tag;
use super::plan::{Segment, There};
use super::tools::batch;

/// A card that is no VM's is removed after this time.
pub(super) const STRANGE_FOR: Duration =
    if cfg!(test) { Duration::from_millis(200) } else { Duration::from_secs(10) };

mod ioctl {
    use nix::libc;

    nix::ioctl_write_ptr_bad!(set_interface, libc::TUNSETIFF, libc::ifreq);
}

/// Makes it in this process's network namespace. It is down.
///
/// # Errors
/// `ResourceBusy` while somebody else has a card with this name open.
pub fn make(name: &str) -> std::io::Result<OwnedFd> {
    let file = File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")?;
    // SAFETY: all zeros is a value of this plain struct.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()).take(libc::IFNAMSIZ - 1) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).unwrap_or_default();
    // SAFETY: the descriptor is open and the request lives until the call has ended.
    unsafe { ioctl::set_interface(file.as_raw_fd(), &raw const request) }?;
    Ok(file.into())
}

/// Removes cards that are no VM's for some time. A QEMU can have the kernel keep its card when it ends.
pub async fn remove_strange(
    tag: &Tag,
    segments: &[Segment],
    there: &There,
    strange: &mut BTreeMap<String, Instant>,
) -> Result<(), String> {
    let known: BTreeSet<&str> =
        segments.iter().flat_map(|s| &s.taps).map(|tap| tap.name.as_str()).collect();
    let names = there.links.iter().map(|link| link.ifname.as_str());
    let cards = names.filter(|name| tag.is_own(name) && name.starts_with("pt"));
    let now: BTreeSet<&str> = cards.filter(|name| !known.contains(name)).collect();
    strange.retain(|name, _| now.contains(name.as_str()));
    for name in now {
        strange.entry(name.to_owned()).or_insert_with(Instant::now);
    }
    let old = strange.iter().filter(|(_, since)| since.elapsed() > STRANGE_FOR);
    let lines: Vec<String> = old.map(|(name, _)| format!("link delete dev {name}")).collect();
    batch("ip", &lines).await
}
