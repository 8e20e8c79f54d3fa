//! The handshake: options one after the other, until one of them picks the export.

use bytes::{BufMut, Bytes, BytesMut};
use perigee_model::ProblemKind;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_util::sync::CancellationToken;

use super::super::wire::{
    self, CONTEXT_ALLOCATION, CONTEXT_ALLOCATION_ID, Dialect, FramingError, GoOption,
    MetaContextOption, OptionHead, PAYLOAD_BYTES_MAX, STRING_BYTES_MAX, export_flag,
    handshake_flag, info, option, reply,
};
use super::command::Rules;
use super::sessions::Claim;
use super::{ConnectionError, Export, Opener, Shared};

const PREFERRED_BYTES: u32 = 4096;

/// What client and server agreed on.
pub struct Agreed {
    pub export: Export,
    pub rules: Rules,
    /// Kept until the connection is drained.
    pub claim: Option<Claim>,
}

/// What an option leads to.
enum Next {
    Option,
    Transmission(Agreed),
    End,
}

pub struct Negotiation<'a> {
    shared: &'a Shared,
    stop: CancellationToken,
    no_zeroes: bool,
    structured: bool,
    /// The export for which `base:allocation` was chosen.
    allocation_of: Option<String>,
    claim: Option<Claim>,
}

impl<'a> Negotiation<'a> {
    pub fn new(shared: &'a Shared, stop: CancellationToken) -> Self {
        Self { shared, stop, no_zeroes: false, structured: false, allocation_of: None, claim: None }
    }

    /// `None` when the client went away or gave up.
    pub async fn run<S: AsyncRead + AsyncWrite + Unpin>(
        &mut self,
        stream: &mut S,
    ) -> Result<Option<Agreed>, ConnectionError> {
        self.greet(stream).await?;
        loop {
            let mut head = [0; OptionHead::BYTES];
            if !read_or_end(stream, &mut head).await? {
                return Ok(None);
            }
            let head = OptionHead::parse(&head)?;
            let mut data = vec![0; head.length_bytes as usize];
            stream.read_exact(&mut data).await?;
            let next = self.option(stream, head.option, data.into()).await;
            stream.flush().await?;
            match next? {
                Next::Option => {}
                Next::Transmission(agreed) => return Ok(Some(agreed)),
                Next::End => return Ok(None),
            }
        }
    }

    async fn greet<S: AsyncRead + AsyncWrite + Unpin>(
        &mut self,
        stream: &mut S,
    ) -> Result<(), ConnectionError> {
        let mut greeting = BytesMut::new();
        greeting.put_u64(wire::MAGIC);
        greeting.put_u64(wire::OPTION_MAGIC);
        greeting.put_u16(handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
        stream.write_all(&greeting).await?;
        stream.flush().await?;
        let flags = match stream.read_u32().await {
            Ok(flags) => flags,
            // Someone looked whether the port is open.
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let known = u32::from(handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
        if flags & !known != 0 || flags & u32::from(handshake_flag::FIXED_NEWSTYLE) == 0 {
            return Err(FramingError::Malformed("the client's handshake flags").into());
        }
        self.no_zeroes = flags & u32::from(handshake_flag::NO_ZEROES) != 0;
        Ok(())
    }

    async fn option<S: AsyncWrite + Unpin>(
        &mut self,
        stream: &mut S,
        option: u32,
        data: Bytes,
    ) -> Result<Next, ConnectionError> {
        match option {
            option::EXPORT_NAME => return self.export_name(stream, &data).await,
            option::ABORT => {
                // The client may be gone already: it need not wait for this.
                let _unheard = answer(stream, option, reply::ACK, &[]).await;
                return Ok(Next::End);
            }
            option::GO | option::INFO => match GoOption::parse(data) {
                Ok(go) => return self.go(stream, option, go).await,
                Err(error) => refuse(stream, option, reply::ERR_INVALID, &error).await?,
            },
            option::LIST if data.is_empty() => self.list(stream).await?,
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.structured = true;
                answer(stream, option, reply::ACK, &[]).await?;
            }
            option::LIST | option::STRUCTURED_REPLY => {
                refuse(stream, option, reply::ERR_INVALID, "the option takes no data").await?;
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                match MetaContextOption::parse(data) {
                    Ok(contexts) => self.contexts(stream, option, contexts).await?,
                    Err(error) => refuse(stream, option, reply::ERR_INVALID, &error).await?,
                }
            }
            option::PERIGEE_SESSION if self.claim.is_none() => {
                self.claim = Some(self.shared.sessions.claim(data, &self.stop).await);
                answer(stream, option, reply::ACK, &[]).await?;
            }
            option::PERIGEE_SESSION => {
                refuse(stream, option, reply::ERR_INVALID, "the session is named already").await?;
            }
            unknown => {
                let message = format!("option {unknown} is not known here");
                refuse(stream, option, reply::ERR_UNSUP, &message).await?;
            }
        }
        Ok(Next::Option)
    }

    async fn list<S: AsyncWrite + Unpin>(&self, stream: &mut S) -> Result<(), ConnectionError> {
        match self.shared.exports.names().await {
            Ok(names) => {
                for name in names {
                    let mut data = BytesMut::new();
                    wire::put_string(&mut data, &name);
                    answer(stream, option::LIST, reply::SERVER, &data).await?;
                }
                answer(stream, option::LIST, reply::ACK, &[]).await
            }
            Err(problem) => refuse(stream, option::LIST, reply::ERR_POLICY, &problem).await,
        }
    }

    async fn contexts<S: AsyncWrite + Unpin>(
        &mut self,
        stream: &mut S,
        option: u32,
        contexts: MetaContextOption,
    ) -> Result<(), ConnectionError> {
        if !self.structured {
            let why = "structured replies come first";
            return refuse(stream, option, reply::ERR_INVALID, why).await;
        }
        let listing = option == option::LIST_META_CONTEXT;
        let wanted = contexts.queries.iter().any(|q| q == CONTEXT_ALLOCATION)
            || listing
                && (contexts.queries.is_empty() || contexts.queries.iter().any(|q| q == "base:"));
        if !listing {
            self.allocation_of = wanted.then(|| contexts.name.clone());
        }
        if wanted {
            let mut data = BytesMut::new();
            data.put_u32(if listing { 0 } else { CONTEXT_ALLOCATION_ID });
            data.put_slice(CONTEXT_ALLOCATION.as_bytes());
            answer(stream, option, reply::META_CONTEXT, &data).await?;
        }
        answer(stream, option, reply::ACK, &[]).await
    }

    fn opener(&self) -> Opener {
        if self.claim.is_some() { Opener::Proxy } else { Opener::Client }
    }

    fn agree(&mut self, name: &str, export: Export) -> Agreed {
        let rules = Rules {
            read_only: export.read_only,
            dialect: if self.structured { Dialect::Structured } else { Dialect::Simple },
            allocation: self.allocation_of.as_deref() == Some(name),
        };
        Agreed { export, rules, claim: self.claim.take() }
    }

    async fn go<S: AsyncWrite + Unpin>(
        &mut self,
        stream: &mut S,
        option: u32,
        go: GoOption,
    ) -> Result<Next, ConnectionError> {
        let export = match self.shared.exports.open(&go.name, self.opener()).await {
            Ok(export) => export,
            Err(problem) => {
                let kind = match problem.kind {
                    ProblemKind::NotFound => reply::ERR_UNKNOWN,
                    ProblemKind::Invalid => reply::ERR_INVALID,
                    _ => reply::ERR_POLICY,
                };
                refuse(stream, option, kind, &problem).await?;
                return Ok(Next::Option);
            }
        };
        let mut data = BytesMut::new();
        data.put_u16(info::EXPORT);
        data.put_u64(export.device.size_bytes());
        data.put_u16(self.flags(&export));
        answer(stream, option, reply::INFO, &data).await?;
        if go.infos.contains(&info::NAME) {
            let mut data = BytesMut::new();
            data.put_u16(info::NAME);
            data.put_slice(go.name.as_bytes());
            answer(stream, option, reply::INFO, &data).await?;
        }
        if go.infos.contains(&info::BLOCK_SIZE) {
            let mut data = BytesMut::new();
            data.put_u16(info::BLOCK_SIZE);
            data.put_u32(1);
            data.put_u32(PREFERRED_BYTES);
            data.put_u32(PAYLOAD_BYTES_MAX);
            answer(stream, option, reply::INFO, &data).await?;
        }
        answer(stream, option, reply::ACK, &[]).await?;
        if option == option::INFO {
            return Ok(Next::Option);
        }
        Ok(Next::Transmission(self.agree(&go.name, export)))
    }

    /// The old way to pick an export has no way to say no but to hang up.
    async fn export_name<S: AsyncWrite + Unpin>(
        &mut self,
        stream: &mut S,
        data: &[u8],
    ) -> Result<Next, ConnectionError> {
        let name = std::str::from_utf8(data)
            .ok()
            .filter(|name| name.len() <= STRING_BYTES_MAX as usize)
            .ok_or(FramingError::Malformed("an export's name"))?;
        let export = self
            .shared
            .exports
            .open(name, self.opener())
            .await
            .map_err(|problem| ConnectionError::Refused(problem.to_string()))?;
        let mut out = BytesMut::new();
        out.put_u64(export.device.size_bytes());
        out.put_u16(self.flags(&export));
        if !self.no_zeroes {
            out.put_bytes(0, 124);
        }
        stream.write_all(&out).await?;
        Ok(Next::Transmission(self.agree(name, export)))
    }

    fn flags(&self, export: &Export) -> u16 {
        let mut flags = export_flag::HAS_FLAGS
            | export_flag::SEND_FLUSH
            | export_flag::SEND_FUA
            | export_flag::CAN_MULTI_CONN;
        if export.read_only {
            flags |= export_flag::READ_ONLY;
        } else {
            flags |= export_flag::SEND_TRIM | export_flag::SEND_WRITE_ZEROES;
        }
        if self.structured {
            flags |= export_flag::SEND_DF;
        }
        flags
    }
}

async fn answer<S: AsyncWrite + Unpin>(
    stream: &mut S,
    option: u32,
    kind: u32,
    data: &[u8],
) -> Result<(), ConnectionError> {
    Ok(stream.write_all(&wire::encode_option_reply(option, kind, data)).await?)
}

async fn refuse<S: AsyncWrite + Unpin>(
    stream: &mut S,
    option: u32,
    kind: u32,
    why: &(impl std::fmt::Display + ?Sized),
) -> Result<(), ConnectionError> {
    let text = why.to_string();
    let end = text.floor_char_boundary(STRING_BYTES_MAX as usize);
    answer(stream, option, kind, &text.as_bytes()[..end]).await
}

/// False when the stream ended before the first byte.
async fn read_or_end<S: AsyncRead + Unpin>(
    stream: &mut S,
    buffer: &mut [u8],
) -> Result<bool, ConnectionError> {
    let first = stream.read(buffer).await?;
    if first == 0 {
        return Ok(false);
    }
    stream.read_exact(&mut buffer[first..]).await?;
    Ok(true)
}
