//! Asks the kernel about interfaces of this process's network namespace. (`/sys/class/net` has those of the namespace that has
//! mounted it.)

use std::io::{Error, ErrorKind, Result};
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd as _, OwnedFd};

use nix::libc::{self, ifreq};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

mod ioctl {
    use nix::libc;

    nix::ioctl_readwrite_bad!(driver, libc::SIOCETHTOOL, libc::ifreq);
    nix::ioctl_readwrite_bad!(mtu, libc::SIOCGIFMTU, libc::ifreq);
}

/// `struct ethtool_drvinfo`.
#[repr(C)]
struct Driver {
    command: u32,
    name: [u8; 32],
    rest: [u8; 160],
}

const GET_DRIVER: u32 = 3;
const BRIDGE: &[u8] = b"bridge\0";

/// A socket to ask over, and the question.
fn ask(name: &str) -> Result<(OwnedFd, ifreq)> {
    // The kernel would take the beginning of a longer name for all of it.
    if name.len() >= libc::IFNAMSIZ {
        return Err(ErrorKind::InvalidInput.into());
    }
    let flags = SockFlag::SOCK_CLOEXEC;
    let socket = socket(AddressFamily::Unix, SockType::Datagram, flags, None)?;
    // SAFETY: all zeros is a value of this plain struct.
    let mut request: ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    Ok((socket, request))
}

/// Whether it is a bridge. One that is not there is none.
///
/// # Errors
/// The kernel doesn't say it.
pub fn is_bridge(name: &str) -> Result<bool> {
    let (socket, mut request) = ask(name)?;
    let mut driver = Driver { command: GET_DRIVER, name: [0; 32], rest: [0; 160] };
    request.ifr_ifru.ifru_data = (&raw mut driver).cast();
    // SAFETY: the descriptor is open; the request, and what it points to, live until the call has ended, and the kernel writes no
    // more than this command's structure, which is as long.
    match unsafe { ioctl::driver(socket.as_raw_fd(), &raw mut request) } {
        Ok(_) => Ok(driver.name.starts_with(BRIDGE)),
        // An interface need not have a driver that says its name.
        Err(nix::errno::Errno::ENODEV | nix::errno::Errno::EOPNOTSUPP) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// The bytes of its longest packet.
///
/// # Errors
/// It is not there, or the kernel doesn't say it.
pub fn mtu(name: &str) -> Result<u32> {
    let (socket, mut request) = ask(name)?;
    // SAFETY: the descriptor is open and the request lives until the call has ended.
    unsafe { ioctl::mtu(socket.as_raw_fd(), &raw mut request) }?;
    // SAFETY: the kernel has written this field.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    u32::try_from(mtu).map_err(Error::other)
}

/// Whether the kernel says that there is none.
pub fn is_gone(name: &str) -> bool {
    mtu(name).is_err_and(|error| error.raw_os_error() == Some(libc::ENODEV))
}

/// The IPv4 addresses of this host's interfaces.
pub fn interfaces() -> impl Iterator<Item = Ipv4Addr> {
    let interfaces = nix::ifaddrs::getifaddrs().into_iter().flatten();
    interfaces.filter_map(|interface| Some(interface.address?.as_sockaddr_in()?.ip()))
}
