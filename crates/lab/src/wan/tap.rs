//! A TAP: the relay reads a site's outgoing frames from it, and writes arriving frames to it.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;

use nix::libc;
use perigee_model::Problem;

mod ioctl {
    use nix::libc;

    nix::ioctl_write_ptr_bad!(set_interface, libc::TUNSETIFF, libc::ifreq);
    nix::ioctl_write_int_bad!(set_offload, libc::TUNSETOFFLOAD);
}

/// A TAP whose frames begin with a virtio-net header of 10 bytes.
#[derive(Debug)]
pub struct Tap {
    name: String,
    file: File,
}

impl Tap {
    /// Opens an existing card in the namespace of this thread.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn open(name: &str) -> Result<Self, Problem> {
        let fail = |error: &dyn std::fmt::Display| {
            Problem::internal(format!("can't open the TAP {name}"), error)
        };
        let file = File::options()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/net/tun")
            .map_err(|e| fail(&e).next("the lab needs root and /dev/net/tun"))?;
        let bytes = name.as_bytes();
        // SAFETY: the struct consists of integers, for which zero is a valid value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        if bytes.len() >= request.ifr_name.len() {
            return Err(fail(&"the name is too long"));
        }
        for (to, from) in request.ifr_name.iter_mut().zip(bytes) {
            *to = from.cast_signed();
        }
        let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).map_err(|e| fail(&e))?;
        // SAFETY: the request lives during the call, and its name ends with a zero.
        unsafe { ioctl::set_interface(file.as_raw_fd(), &raw const request) }
            .map_err(|e| fail(&e))?;
        Ok(Self { name: name.to_owned(), file })
    }

    /// Sets whether hosts may send up to 64 KiB of TCP or UDP as one frame.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn set_super_frames(&self, on: bool) -> Result<(), Problem> {
        let checksums = libc::TUN_F_CSUM;
        let tcp = libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
        let udp = libc::TUN_F_USO4 | libc::TUN_F_USO6;
        // Kernels before 6.2 do not have the UDP features.
        let choices = if on { [checksums | tcp | udp, checksums | tcp] } else { [checksums; 2] };
        let set = |features: libc::c_uint| {
            let features =
                libc::c_int::try_from(features).map_err(|_| nix::errno::Errno::EINVAL)?;
            // SAFETY: the call takes a number and touches no memory of this process.
            unsafe { ioctl::set_offload(self.file.as_raw_fd(), features) }
        };
        set(choices[0]).or_else(|_| set(choices[1])).map(drop).map_err(|errno| {
            Problem::internal(format!("can't set the offloads of the TAP {}", self.name), errno)
        })
    }

    /// Reads one frame. Fails with `WouldBlock` if there is none.
    pub fn read(&self, room: &mut [u8]) -> std::io::Result<usize> {
        std::io::Read::read(&mut &self.file, room)
    }

    /// One frame, with its header. The kernel takes all of it or nothing.
    pub fn write(&self, frame: &[u8]) -> std::io::Result<usize> {
        std::io::Write::write(&mut &self.file, frame)
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
