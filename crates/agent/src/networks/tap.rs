//! A VM's card: a TAP that is there for as long as QEMU has it open.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use nix::libc;

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
