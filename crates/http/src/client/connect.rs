//! Connections of the client: TCP, a unix socket, or TLS over TCP.

use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::Uri;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;

use crate::certificate::Certified;
use crate::connections::notice_loss;
use crate::identity::{Identity, connect_to_enrol};
use crate::trust::Refusal;
use crate::verify::Expected;

/// A connection is made within this time.
const CONNECT_MAX: Duration = Duration::from_secs(3);
/// The handshake of TLS needs the server itself, which may be busy, and not only its kernel.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

/// Where a server is, and how it is reached.
#[derive(Debug, Clone)]
pub(super) enum Way {
    Unix(PathBuf),
    /// `HOST:PORT`
    Tcp(String),
    /// `HOST:PORT`, the client's own certificates, and whose certificate the server has to show.
    Tls(String, Arc<Identity>, Expected),
    /// `HOST:PORT` of a controller, and the fingerprint of its authority's certificate.
    Enrol(String, String),
}

pub(super) trait Io: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Io for T {}

impl Connection for Box<dyn Io> {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

async fn within<T>(limit: Duration, made: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(limit, made).await.unwrap_or_else(|_| {
        let why = format!("no connection within {} s", limit.as_secs());
        Err(io::Error::new(io::ErrorKind::TimedOut, why))
    })
}

impl Way {
    async fn connect(&self) -> io::Result<Box<dyn Io>> {
        let tcp = async |authority: &str| {
            let stream = within(CONNECT_MAX, TcpStream::connect(authority)).await?;
            stream.set_nodelay(true)?;
            notice_loss(&stream);
            Ok::<_, io::Error>(stream)
        };
        Ok(match self {
            Self::Unix(path) => Box::new(within(CONNECT_MAX, UnixStream::connect(path)).await?),
            Self::Tcp(authority) => Box::new(tcp(authority).await?),
            Self::Tls(authority, identity, expected) => {
                let stream = tcp(authority).await?;
                let handshake = identity.connect(authority, expected.clone(), stream);
                let stream = within(HANDSHAKE_MAX, handshake).await?;
                let shown = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
                let server = shown.and_then(Certified::of);
                let server = server.ok_or_else(|| io::Error::other(Refusal::NotOurs))?;
                Box::new(Trusted { stream, server, identity: Arc::clone(identity) })
            }
            Self::Enrol(authority, fingerprint) => {
                let stream = tcp(authority).await?;
                let handshake = connect_to_enrol(authority, fingerprint.clone(), stream);
                Box::new(within(HANDSHAKE_MAX, handshake).await?)
            }
        })
    }
}

/// A connection that ends when the server's certificate does not count any more.
struct Trusted {
    stream: TlsStream<TcpStream>,
    server: Certified,
    identity: Arc<Identity>,
}

impl Trusted {
    fn check(&self) -> io::Result<()> {
        let checked = self.identity.check(&self.server);
        checked.map_err(|refusal| io::Error::new(io::ErrorKind::PermissionDenied, refusal))
    }
}

impl AsyncRead for Trusted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check()?;
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for Trusted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check()?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Makes the connections of one client, which all go the same way.
#[derive(Debug, Clone)]
pub(super) struct Connector(pub Way);

impl tower_service::Service<Uri> for Connector {
    type Response = TokioIo<Box<dyn Io>>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let way = self.0.clone();
        async move { way.connect().await.map(TokioIo::new) }.boxed()
    }
}
