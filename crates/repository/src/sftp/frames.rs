//! Ends a session whose client sends a packet that is too long. russh-sftp would go on in the middle of it, and take
//! what is in it for packets.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::packets::PACKET_BYTES_MAX;

/// A stream of packets, each with its length in four bytes before it. It is at its end where one is too long.
#[derive(Debug)]
pub struct Frames<S> {
    stream: S,
    /// The bytes of the next length that have come.
    length: [u8; 4],
    has: usize,
    /// What is still to come of the present packet.
    left: usize,
    is_over: bool,
}

impl<S> Frames<S> {
    pub fn new(stream: S) -> Self {
        Self { stream, length: [0; 4], has: 0, left: 0, is_over: false }
    }

    /// Whether a packet that begins among these bytes is too long.
    fn follow(&mut self, mut bytes: &[u8]) -> bool {
        while let Some((first, rest)) = bytes.split_first() {
            if self.left > 0 {
                let skipped = self.left.min(bytes.len());
                self.left -= skipped;
                bytes = &bytes[skipped..];
                continue;
            }
            self.length[self.has] = *first;
            self.has += 1;
            bytes = rest;
            if self.has == self.length.len() {
                let length = u32::from_be_bytes(self.length);
                if length > PACKET_BYTES_MAX {
                    return true;
                }
                (self.has, self.left) = (0, usize::try_from(length).unwrap_or(usize::MAX));
            }
        }
        false
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Frames<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        if self.is_over {
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        if self.follow(&buf.filled()[before..]) {
            tracing::info!("an SFTP client has sent a packet that is too long");
            buf.set_filled(before);
            self.is_over = true;
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Frames<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn nothing_of_a_packet_that_is_too_long_is_read() {
        let (mut client, server) = tokio::io::duplex(1 << 20);
        let mut frames = Frames::new(server);
        client.write_all(b"\0\0\0\x02ab\0\0\0\0\0\0\0\x01c").await.expect("room");
        let mut first = [0; 15];
        frames.read_exact(&mut first).await.expect("three packets");
        // A client hides a packet in one that is too long.
        client.write_all(&(PACKET_BYTES_MAX + 1).to_be_bytes()).await.expect("room");
        client.write_all(b"\0\0\0\x01x").await.expect("room");
        let error = frames.read_u32().await.expect_err("the stream is over");
        assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof);
        frames.read_u8().await.expect_err("and stays so");
    }

    #[tokio::test]
    async fn packets_in_pieces_are_followed() {
        let (mut client, server) = tokio::io::duplex(1 << 20);
        let mut frames = Frames::new(server);
        let longest = vec![7; PACKET_BYTES_MAX as usize];
        let mut sent = PACKET_BYTES_MAX.to_be_bytes().to_vec();
        sent.extend(&longest);
        for piece in sent.chunks(1000) {
            client.write_all(piece).await.expect("room");
        }
        assert_eq!(frames.read_u32().await.expect("a length"), PACKET_BYTES_MAX);
        let mut got = vec![0; longest.len()];
        frames.read_exact(&mut got).await.expect("the longest packet is one");
        assert!(got == longest);
        drop(client);
        frames.read_u32().await.expect_err("the end");
    }
}
