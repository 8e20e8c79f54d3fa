//! Connects and asks a server for an export.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes, BytesMut};
use perigee_block::exports::{CONFINED_SUFFIX, INCARNATION_PREFIX, LAYER_PREFIX, SessionHome};
use perigee_block::sessions::ProxyKey;
use perigee_block::stream::socket::Socket;
use perigee_http::Listen;
use perigee_model::{Incarnation, LayerId, Problem};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::{TcpStream, UnixStream};

use super::super::wire::{
    self, CONTEXT_ALLOCATION, CONTEXT_COMPRESSION, Dialect, FramingError, GoOption,
    MetaContextOption, OptionReplyHead, PAYLOAD_BYTES_MAX, export_flag, handshake_flag, info,
    option, reply,
};
use super::tls::ClientTls;

/// What the server says of the export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportInfo {
    pub size_bytes: u64,
    flags: u16,
    /// The longest read or write that the server accepts.
    pub request_bytes_max: u32,
    /// Whether the server answers `BLOCK_STATUS`.
    pub allocation: bool,
    /// The sealed layer behind the export, if the server names one.
    pub layer: Option<LayerId>,
    /// Tells volumes apart that had the same name one after the other, if the server sends it.
    pub incarnation: Option<Incarnation>,
    /// Where the volume is, if the server says so.
    pub home: Option<SessionHome>,
    /// The server says that its data may not leave its site.
    pub confined: bool,
    /// The time that the server took to answer a question that needs no work.
    pub round_trip: Duration,
    /// The format of this connection's requests and replies.
    pub dialect: Dialect,
    /// Whether the server compresses reads.
    pub compression: bool,
}

impl ExportInfo {
    /// Whether the export has this bit of [`export_flag`].
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Whether it is the export that was there before, as far as the server says. One that is confined now and was not
    /// is another one: whoever opened it has to open it again.
    pub fn is_still(&self, before: &Self) -> bool {
        !self.is_confined_since(before) && self.is_same(before)
    }

    /// Whether it was not confined before.
    pub fn is_confined_since(&self, before: &Self) -> bool {
        self.confined && !before.confined
    }

    /// As [`Self::is_still`], also if it is confined now and was not.
    pub fn is_same(&self, before: &Self) -> bool {
        match (self.incarnation, before.incarnation) {
            // The volume may have been enlarged in the meantime.
            (Some(is), Some(was)) => is == was && self.size_bytes >= before.size_bytes,
            (None, Some(_)) | (Some(_), None) => false,
            (None, None) => (self.size_bytes, self.layer) == (before.size_bytes, before.layer),
        }
    }
}

/// Why there is no connection to the export.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("it does not speak NBD as we do: {0}")]
    Framing(#[from] FramingError),
    #[error("{0}")]
    UnknownExport(String),
    #[error("the server refused: {0}")]
    Refused(String),
    /// The address of its new home, `HOST:PORT`.
    #[error("the volume has another home now, at {0}")]
    Moved(String),
    /// What the server says.
    #[error("{0}")]
    Replaced(String),
    #[error("it wants TLS")]
    TlsRequired,
    #[error("TLS: {0}")]
    Tls(io::Error),
    #[error("no answer within {0} s")]
    TimedOut(u64),
}

impl HandshakeError {
    /// What a user is told: kind, reason, and what to do. `Unavailable` is worth another try later; the others are
    /// not.
    pub fn into_problem(self, name: &str, address: &str) -> Problem {
        let what = format!("export {name:?} of NBD server {address}");
        match self {
            Self::UnknownExport(text) => Problem::not_found(what, text),
            // No later try finds a server at what is no address.
            Self::Io(error) if error.kind() == io::ErrorKind::InvalidInput => {
                Problem::invalid(what, error).next("name the server as HOST:PORT")
            }
            Self::Io(_) | Self::TimedOut(_) => Problem::unavailable(what, self)
                .next("does that host's volume server run, and is this its NBD address?"),
            Self::TlsRequired => Problem::unavailable(what, self)
                .next("let this host join the cluster (perigee host join), or give this server the authority's certificate with --remote-tls-ca"),
            Self::Tls(_) => Problem::unavailable(what, self).next(
                "is each side a host of the cluster that is not revoked? Or do --remote-tls-ca, and the server's --tls-ca, fit the other's certificate?",
            ),
            Self::Moved(_) => Problem::conflict(what, self).next("attach it at its home"),
            Self::Replaced(_) => Problem::conflict(what, self),
            Self::Framing(_) | Self::Refused(_) => Problem::unavailable(what, self),
        }
    }
}

/// How an export is reached.
pub struct Way {
    pub address: Listen,
    pub name: String,
    pub tls: Option<ClientTls>,
    /// The proxy's session that the connections belong to. `None` if this is no proxy.
    pub session: Option<Arc<ProxyKey>>,
}

impl Way {
    /// The number of a new opening of the session.
    pub fn next_opening(&self) -> u64 {
        self.session.as_ref().map_or(0, |_| ProxyKey::next_opening())
    }

    /// What connection `number` of an opening sends to the server to identify itself.
    pub fn joins(&self, opening: u64, number: u64) -> Option<Bytes> {
        self.session.as_ref().map(|session| session.told(opening, number))
    }
}

/// A connection, encrypted or not.
pub trait Channel: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Channel for T {}

/// A connection to a server, over TLS or without it, whose reads go through a buffer.
pub type Stream = BufReader<Box<dyn Channel>>;

/// 64 KiB: a whole answer of usual size is one read of the socket.
pub fn buffered<C: Channel>(channel: C) -> BufReader<C> {
    BufReader::with_capacity(64 << 10, channel)
}

/// A connection on which all is agreed that does not depend on the export. To open one takes one more round trip.
pub struct Prepared {
    stream: Stream,
    dialect: Dialect,
    round_trip: Duration,
}

/// `session` is sent to the server to identify a proxy's session.
pub async fn connect(
    way: &Way,
    session: Option<Bytes>,
) -> Result<(Stream, ExportInfo), HandshakeError> {
    open(prepare(&way.address, way.tls.as_ref()).await?, way, session).await
}

/// All of a connection's beginning that does not depend on the export.
pub async fn prepare(
    address: &Listen,
    tls: Option<&ClientTls>,
) -> Result<Prepared, HandshakeError> {
    let mut stream: Stream = match address {
        Listen::Tcp(address) => {
            let socket = Socket::tcp(TcpStream::connect(address).await?)?;
            match tls {
                None => buffered(Box::new(socket)),
                Some(tls) => return speak(encrypt(tls, address, socket).await?).await,
            }
        }
        Listen::Unix(path) => buffered(Box::new(Socket::unix(UnixStream::connect(path).await?)?)),
    };
    greet(&mut stream).await?;
    speak(stream).await
}

/// The whole handshake without encryption.
#[cfg(feature = "fuzzing")]
pub async fn agree(
    mut stream: Stream,
    way: &Way,
    session: Option<Bytes>,
) -> Result<(Stream, ExportInfo), HandshakeError> {
    greet(&mut stream).await?;
    open(speak(stream).await?, way, session).await
}

/// Only the greeting and the request for TLS are sent unencrypted.
async fn encrypt(tls: &ClientTls, address: &str, socket: Socket) -> Result<Stream, HandshakeError> {
    let mut clear = buffered(socket);
    greet(&mut clear).await?;
    if let Err((_, why)) = ask(&mut clear, option::STARTTLS, &[]).await? {
        let why = if why.is_empty() { String::new() } else { format!(": {why}") };
        return Err(HandshakeError::Refused(format!("it does not speak TLS{why}")));
    }
    if !clear.buffer().is_empty() {
        return Err(FramingError::Malformed("bytes in the clear where TLS begins").into());
    }
    let encrypted = tls.connect(address, clear.into_inner()).await.map_err(HandshakeError::Tls)?;
    Ok(buffered(Box::new(encrypted)))
}

async fn greet<S: Channel>(stream: &mut S) -> Result<(), HandshakeError> {
    let magic = stream.read_u64().await?;
    if magic != wire::MAGIC {
        return Err(FramingError::Magic { what: "the server's greeting", found: magic }.into());
    }
    let magic = stream.read_u64().await?;
    if magic != wire::OPTION_MAGIC {
        return Err(FramingError::Malformed("the server knows only the old handshake").into());
    }
    let flags = stream.read_u16().await?;
    if flags & handshake_flag::FIXED_NEWSTYLE == 0 {
        return Err(FramingError::Malformed("the server does not speak fixed newstyle").into());
    }
    let ours = flags & (handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
    Ok(stream.write_u32(ours.into()).await?)
}

/// Agrees on the format of requests and replies.
async fn speak(mut stream: Stream) -> Result<Prepared, HandshakeError> {
    let asked = Instant::now();
    let extended = ask(&mut stream, option::EXTENDED_HEADERS, &[]).await?.is_ok();
    let round_trip = asked.elapsed();
    let dialect = if extended {
        Dialect::Extended
    } else if ask(&mut stream, option::STRUCTURED_REPLY, &[]).await?.is_ok() {
        Dialect::Structured
    } else {
        Dialect::Simple
    };
    Ok(Prepared { stream, dialect, round_trip })
}

/// Chooses the export. The questions are sent together, so this takes one round trip.
pub async fn open(
    prepared: Prepared,
    way: &Way,
    session: Option<Bytes>,
) -> Result<(Stream, ExportInfo), HandshakeError> {
    let Prepared { mut stream, dialect, round_trip } = prepared;
    let name = &way.name;
    let has_contexts = dialect != Dialect::Simple;
    let mut questions = BytesMut::new();
    if has_contexts {
        let mut queries = vec![CONTEXT_ALLOCATION.into()];
        // Within one host no link is used.
        let far = matches!(way.address, Listen::Tcp(_));
        queries.extend(far.then(|| CONTEXT_COMPRESSION.into()));
        let contexts = MetaContextOption { name: name.clone(), queries };
        questions.extend(wire::encode_option(option::SET_META_CONTEXT, &contexts.encode()));
    }
    if let Some(told) = &session {
        questions.extend(wire::encode_option(option::PERIGEE_SESSION, told));
    }
    let mut infos = vec![info::BLOCK_SIZE, info::DESCRIPTION];
    infos.extend(way.session.is_some().then_some(info::PERIGEE_HOME));
    let go = GoOption { name: name.clone(), infos };
    questions.extend(wire::encode_option(option::GO, &go.encode()));
    stream.write_all(&questions).await?;
    stream.flush().await?;
    let (mut allocation, mut compression) = (false, false);
    if has_contexts {
        let chosen = hear(&mut stream, option::SET_META_CONTEXT).await?;
        let has = |context: &str| {
            let chosen = chosen.as_ref().ok().into_iter().flatten();
            chosen.filter_map(|info| info.get(4..)).any(|name| name == context.as_bytes())
        };
        (allocation, compression) = (has(CONTEXT_ALLOCATION), has(CONTEXT_COMPRESSION));
    }
    if session.is_some() {
        match hear(&mut stream, option::PERIGEE_SESSION).await? {
            // A server that does not know sessions is trusted not to run requests of a closed connection late.
            Ok(_) | Err((reply::ERR_UNSUP, _)) => {}
            Err((_, why)) => return Err(HandshakeError::Refused(why)),
        }
    }
    match hear(&mut stream, option::GO).await? {
        Ok(infos) => {
            let info = export_info(infos, allocation, dialect)?;
            Ok((stream, ExportInfo { round_trip, compression, ..info }))
        }
        Err((reply::ERR_UNKNOWN, text)) => Err(HandshakeError::UnknownExport(text)),
        Err((reply::ERR_TLS_REQD, _)) => Err(HandshakeError::TlsRequired),
        Err((reply::ERR_PERIGEE_MOVED, nbd_addr)) => Err(HandshakeError::Moved(nbd_addr)),
        Err((reply::ERR_PERIGEE_REPLACED, text)) => Err(HandshakeError::Replaced(text)),
        Err((_, text)) => Err(HandshakeError::Refused(text)),
    }
}

fn export_info(
    infos: Vec<Bytes>,
    allocation: bool,
    dialect: Dialect,
) -> Result<ExportInfo, HandshakeError> {
    const SHORT: FramingError = FramingError::Malformed("the export's description is too short");
    let mut export = None;
    let mut request_bytes_max = PAYLOAD_BYTES_MAX;
    let (mut layer, mut incarnation, mut home, mut confined) = (None, None, None, false);
    for mut data in infos {
        match data.try_get_u16().map_err(|_| SHORT)? {
            info::EXPORT => {
                let size_bytes = data.try_get_u64().map_err(|_| SHORT)?;
                export = Some((size_bytes, data.try_get_u16().map_err(|_| SHORT)?));
            }
            info::BLOCK_SIZE if data.remaining() == 12 => {
                data.advance(8);
                request_bytes_max = data.get_u32().clamp(4096, PAYLOAD_BYTES_MAX);
            }
            info::DESCRIPTION => {
                let text = std::str::from_utf8(&data).unwrap_or_default();
                confined = text.ends_with(CONFINED_SUFFIX);
                let text = text.strip_suffix(CONFINED_SUFFIX).unwrap_or(text);
                layer = text.strip_prefix(LAYER_PREFIX).and_then(|id| id.parse().ok());
                incarnation = text.strip_prefix(INCARNATION_PREFIX).and_then(|id| id.parse().ok());
            }
            info::PERIGEE_HOME => {
                home = std::str::from_utf8(&data).ok().and_then(SessionHome::parse);
            }
            _ => {}
        }
    }
    let (size_bytes, flags) = export.ok_or(SHORT)?;
    if flags & export_flag::HAS_FLAGS == 0 {
        return Err(FramingError::Malformed("the export has no flags").into());
    }
    let round_trip = Duration::ZERO;
    Ok(ExportInfo {
        size_bytes,
        flags,
        request_bytes_max,
        allocation,
        layer,
        incarnation,
        home,
        confined,
        round_trip,
        dialect,
        compression: false,
    })
}

/// Returns the data of each reply with information, or the kind and text of the error.
type Answer = Result<Vec<Bytes>, (u32, String)>;

async fn ask<S: Channel>(
    stream: &mut S,
    option: u32,
    data: &[u8],
) -> Result<Answer, HandshakeError> {
    stream.write_all(&wire::encode_option(option, data)).await?;
    stream.flush().await?;
    hear(stream, option).await
}

/// The answer to an option that was sent.
async fn hear<S: Channel>(stream: &mut S, option: u32) -> Result<Answer, HandshakeError> {
    let mut infos = Vec::new();
    loop {
        let mut head = [0; OptionReplyHead::BYTES];
        stream.read_exact(&mut head).await?;
        let head = OptionReplyHead::parse(&head)?;
        if head.option != option {
            return Err(FramingError::Malformed("a reply to an option that was not sent").into());
        }
        let mut data = BytesMut::zeroed(head.length_bytes as usize);
        stream.read_exact(&mut data).await?;
        match head.kind {
            reply::ACK => return Ok(Ok(infos)),
            kind if reply::is_error(kind) => {
                return Ok(Err((kind, String::from_utf8_lossy(&data).into_owned())));
            }
            _ if infos.len() == 64 => {
                return Err(FramingError::Malformed("replies to an option without an end").into());
            }
            _ => infos.push(data.freeze()),
        }
    }
}
