//! One stream type for unix and TCP connections, set up so that a dead peer is noticed.

use std::io::{self, IoSlice};
use std::net::{IpAddr, Ipv4Addr};
use std::pin::Pin;
use std::task::{Context, Poll};

use nix::sys::socket::{setsockopt, sockopt};
use nix::unistd::Uid;
use nix::{getsockopt_impl, libc, setsockopt_impl, sockopt_impl};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

/// A peer that acknowledges nothing for this long counts as gone.
const SILENCE_S_MAX: u32 = 20;
const KEEPALIVE_IDLE_S: u32 = 5;
/// What is not acknowledged is sent again at least so often: the shortest time that the kernel allows. By default each
/// wait is twice as long as the one before, so a connection goes on up to as long after an outage as the outage was.
const RETRANSMIT_MS_MAX: u32 = 1000;
/// Since Linux 6.15.
const TCP_RTO_MAX_MS: libc::c_int = 44;
/// The send buffer of a unix socket. The default is smaller than two replies of 128 KiB. (TCP sizes its
/// buffers itself.)
const UNIX_SEND_BYTES: usize = 512 << 10;

sockopt_impl!(
    /// The longest time until a packet that was not acknowledged is sent again.
    RetransmitMsMax,
    Both,
    libc::IPPROTO_TCP,
    TCP_RTO_MAX_MS,
    u32
);

/// A connected socket with the options that [`Self::tcp`] or [`Self::unix`] sets.
#[derive(Debug)]
pub enum Socket {
    /// A client or server at another host, or at this one over loopback.
    Tcp(TcpStream),
    /// A client at this host.
    Unix(UnixStream),
}

impl Socket {
    /// # Errors
    /// When the kernel refuses a socket option.
    pub fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        setsockopt(&stream, sockopt::KeepAlive, &true)?;
        setsockopt(&stream, sockopt::TcpKeepIdle, &KEEPALIVE_IDLE_S)?;
        setsockopt(&stream, sockopt::TcpKeepInterval, &KEEPALIVE_IDLE_S)?;
        setsockopt(&stream, sockopt::TcpUserTimeout, &(SILENCE_S_MAX * 1000))?;
        // Older kernels don't know it.
        let _waits_longer = setsockopt(&stream, RetransmitMsMax, &RETRANSMIT_MS_MAX);
        Ok(Self::Tcp(stream))
    }

    /// The peer's address.
    pub fn peer(&self) -> String {
        match self {
            Self::Tcp(stream) => {
                stream.peer_addr().map_or_else(|_| "?".into(), |peer| peer.to_string())
            }
            Self::Unix(_) => "this host".into(),
        }
    }

    /// The address of a peer at another host, or at this one over loopback.
    pub fn address(&self) -> Option<IpAddr> {
        match self {
            // A connection that is gone already has no address, and nothing to be kept from.
            Self::Tcp(stream) => Some(
                stream
                    .peer_addr()
                    .map_or(Ipv4Addr::UNSPECIFIED.into(), |peer| peer.ip().to_canonical()),
            ),
            Self::Unix(_) => None,
        }
    }

    /// The user of a peer on a unix socket, as the kernel tells it; `None` if the peer is elsewhere or that is not known.
    pub fn peer_uid(&self) -> Option<u32> {
        match self {
            Self::Tcp(_) => None,
            Self::Unix(stream) => stream.peer_cred().ok().map(|peer| peer.uid()),
        }
    }

    /// Whether the peer is a process of this host that runs as this process's user or as root.
    pub fn is_own(&self) -> bool {
        self.peer_uid().is_some_and(|uid| uid == 0 || uid == Uid::effective().as_raw())
    }

    /// # Errors
    /// When the kernel refuses a socket option. A buffer size beyond its limit is reduced to the limit.
    pub fn unix(stream: UnixStream) -> io::Result<Self> {
        setsockopt(&stream, sockopt::SndBuf, &UNIX_SEND_BYTES)?;
        Ok(Self::Unix(stream))
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Unix(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Self::Unix(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Self::Unix(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::socket::getsockopt;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_connection_goes_on_a_second_after_an_outage_however_long_that_was() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address");
        let stream = TcpStream::connect(address).await.expect("a connection");
        let by_default_ms = getsockopt(&stream, RetransmitMsMax);
        let Ok(Socket::Tcp(stream)) = Socket::tcp(stream) else { panic!("no socket") };
        let Ok(by_default_ms) = by_default_ms else {
            eprintln!("not run: this kernel is older than Linux 6.15");
            return;
        };
        assert!(by_default_ms >= RETRANSMIT_MS_MAX, "{by_default_ms}");
        assert_eq!(getsockopt(&stream, RetransmitMsMax), Ok(RETRANSMIT_MS_MAX));
    }
}
