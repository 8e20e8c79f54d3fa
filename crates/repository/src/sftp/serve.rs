//! The packets of a session, one after the other: each is read whole, checked, given to the session, and answered.
//!
//! russh-sftp takes packets apart. Its own loop makes names that are no UTF-8 into others, so that two files become one; it goes
//! on in the middle of a packet that is too long; and it answers what it can't take apart without the request's number, so
//! that the client waits for ever.

use bytes::Bytes;
use russh_sftp::protocol::{Packet, Status, StatusCode};
use russh_sftp::server::{Handler, StatusReply};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::packets::{PACKET_BYTES_MAX, check_paths, is_request};

/// Serves until the client says no more.
pub async fn serve<S, H>(mut stream: S, mut session: H)
where
    S: AsyncRead + AsyncWrite + Unpin,
    H: Handler<Error = StatusReply> + Send,
{
    while let Some(packet) = next_packet(&mut stream).await {
        let Ok(answer) = Bytes::try_from(answer(packet, &mut session).await) else { break };
        // A client that has gone needs no answers.
        if stream.write_all(&answer).await.is_err() || stream.flush().await.is_err() {
            break;
        }
    }
}

/// The next packet, without its length; none at the end, and where one is too long.
pub async fn next_packet<S: AsyncRead + Unpin>(stream: &mut S) -> Option<Bytes> {
    let length = stream.read_u32().await.ok()?;
    if length > PACKET_BYTES_MAX {
        tracing::info!("an SFTP client has sent a packet that is too long");
        return None;
    }
    let mut packet = vec![0; usize::try_from(length).ok()?];
    stream.read_exact(&mut packet).await.ok()?;
    Some(packet.into())
}

/// A request that is one; or the answer to what is none.
pub fn request(mut packet: Bytes) -> Result<Packet, StatusReply> {
    check_paths(&packet)?;
    let is_known = packet.first().copied().is_some_and(is_request);
    let refused = if is_known { StatusCode::BadMessage } else { StatusCode::OpUnsupported };
    Packet::try_from(&mut packet).map_err(|_| refused.into())
}

async fn answer<H: Handler<Error = StatusReply> + Send>(packet: Bytes, session: &mut H) -> Packet {
    // After the packet's kind.
    let id = packet.get(1..5).and_then(|id| id.try_into().ok()).map_or(0, u32::from_be_bytes);
    let answered = match request(packet) {
        Ok(request) => given(request, session).await,
        Err(refused) => Err(refused),
    };
    answered.unwrap_or_else(|StatusReply { status_code, error_message, language_tag }| {
        Packet::Status(Status {
            id,
            status_code,
            error_message: error_message.unwrap_or_else(|| status_code.to_string()),
            language_tag: language_tag.unwrap_or_else(|| "en".to_owned()),
        })
    })
}

async fn given<H>(request: Packet, to: &mut H) -> Result<Packet, StatusReply>
where
    H: Handler<Error = StatusReply> + Send,
{
    Ok(match request {
        Packet::Init(r) => to.init(r.version, r.extensions).await?.into(),
        Packet::Open(r) => to.open(r.id, r.filename, r.pflags, r.attrs).await?.into(),
        Packet::Close(r) => to.close(r.id, r.handle).await?.into(),
        Packet::Read(r) => to.read(r.id, r.handle, r.offset, r.len).await?.into(),
        Packet::Write(r) => to.write(r.id, r.handle, r.offset, r.data).await?.into(),
        Packet::Lstat(r) => to.lstat(r.id, r.path).await?.into(),
        Packet::Fstat(r) => to.fstat(r.id, r.handle).await?.into(),
        Packet::SetStat(r) => to.setstat(r.id, r.path, r.attrs).await?.into(),
        Packet::FSetStat(r) => to.fsetstat(r.id, r.handle, r.attrs).await?.into(),
        Packet::OpenDir(r) => to.opendir(r.id, r.path).await?.into(),
        Packet::ReadDir(r) => to.readdir(r.id, r.handle).await?.into(),
        Packet::Remove(r) => to.remove(r.id, r.filename).await?.into(),
        Packet::MkDir(r) => to.mkdir(r.id, r.path, r.attrs).await?.into(),
        Packet::RmDir(r) => to.rmdir(r.id, r.path).await?.into(),
        Packet::RealPath(r) => to.realpath(r.id, r.path).await?.into(),
        Packet::Stat(r) => to.stat(r.id, r.path).await?.into(),
        Packet::Rename(r) => to.rename(r.id, r.oldpath, r.newpath).await?.into(),
        Packet::ReadLink(r) => to.readlink(r.id, r.path).await?.into(),
        Packet::Symlink(r) => to.symlink(r.id, r.linkpath, r.targetpath).await?.into(),
        Packet::Extended(r) => to.extended(r.id, r.request, r.data).await?,
        // What servers say.
        _ => return Err(StatusCode::BadMessage.into()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kind of packet, a number, and texts with their lengths.
    fn packet(kind: u8, texts: &[&[u8]]) -> Bytes {
        let mut packet = vec![kind, 0, 0, 0, 7];
        for text in texts {
            packet.extend(u32::try_from(text.len()).expect("short").to_be_bytes());
            packet.extend(*text);
        }
        // Flags and attributes, where there are some.
        packet.extend([0; 8]);
        packet.into()
    }

    #[tokio::test]
    async fn nothing_of_a_packet_that_is_too_long_is_read() {
        let (mut client, mut server) = tokio::io::duplex(1 << 20);
        client.write_all(b"\0\0\0\x02ab\0\0\0\0\0\0\0\x01c").await.expect("room");
        for sent in [&b"ab"[..], b"", b"c"] {
            assert_eq!(next_packet(&mut server).await.as_deref(), Some(sent));
        }
        let longest = vec![7; PACKET_BYTES_MAX as usize];
        client.write_all(&PACKET_BYTES_MAX.to_be_bytes()).await.expect("room");
        client.write_all(&longest).await.expect("room");
        assert!(next_packet(&mut server).await.expect("the longest packet is one") == longest);
        client.write_all(&(PACKET_BYTES_MAX + 1).to_be_bytes()).await.expect("room");
        assert_eq!(next_packet(&mut server).await, None);
    }

    #[test]
    fn a_path_that_is_no_utf_8_is_refused_in_each_request() {
        // OPEN, LSTAT, SETSTAT, OPENDIR, REMOVE, MKDIR, RMDIR, REALPATH, STAT, READLINK
        for kind in [3, 7, 9, 11, 13, 14, 15, 16, 17, 19] {
            request(packet(kind, &["/a/café".as_bytes()])).expect("UTF-8 is a path");
            let refused = request(packet(kind, &[b"/a/caf\xe9"])).expect_err("it is no UTF-8");
            let why = refused.error_message.expect("a reason");
            assert!(why.contains(r"caf\xe9") && why.contains("UTF-8"), "{kind}: {why}");
        }
        // RENAME, SYMLINK
        for kind in [18, 20] {
            request(packet(kind, &[b"/a/x", b"/a/y"])).expect("two paths");
            request(packet(kind, &[b"/a/x", b"/a/\xff"])).expect_err("the second one is none");
            request(packet(kind, &[b"/a/\xff", b"/a/y"])).expect_err("the first one is none");
        }
    }

    #[test]
    fn what_is_no_request_is_refused() {
        for (packet, code) in [
            (&[][..], StatusCode::OpUnsupported),
            (&[99, 0, 0, 0, 1], StatusCode::OpUnsupported),
            // A path that is longer than its packet.
            (&[17, 0, 0, 0, 1, 0, 0, 0, 9, b'a'], StatusCode::BadMessage),
        ] {
            let refused = request(Bytes::copy_from_slice(packet)).expect_err("it is none");
            assert_eq!(refused.status_code, code, "{packet:?}");
        }
    }
}
