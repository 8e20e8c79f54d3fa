//! The handshake: options one after the other, until one of them chooses the export.
//!
//! ```text
//! greet -> options in the clear --STARTTLS--> TLS handshake -> options again, from the beginning
//!                  \-- GO, EXPORT_NAME -----------------------------\-- GO, EXPORT_NAME -> agreed
//! ```
//!
//! Everything that was negotiated before TLS is discarded, because anybody could have sent it. Nothing is
//! read ahead, so that no unencrypted byte is taken for an encrypted one.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use perigee_block::exports::{
    self, Admission, CONFINED_SUFFIX, Export, INCARNATION_PREFIX, LAYER_PREFIX, Opener,
};
use perigee_block::logins::LoginGuard;
use perigee_block::sessions::{Claim, SessionKey};
use perigee_model::client::Over;
use perigee_model::{HostId, Problem, ProblemKind};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_util::sync::CancellationToken;

use super::super::wire::{
    self, Dialect, FramingError, GoOption, MetaContextOption, OptionHead, PAYLOAD_BYTES_MAX,
    STRING_BYTES_MAX, export_flag, handshake_flag, info, option, reply,
};
use super::access::{Peer, View};
use super::command::Rules;
use super::contexts::Contexts;
use super::{ConnectionError, Shared};

const PREFERRED_BYTES: u32 = 4096;

/// The result of the negotiation.
pub struct Agreed {
    pub export: Export,
    pub rules: Rules,
    /// Kept until the connection is drained.
    pub claim: Option<Claim>,
    pub login: Option<LoginGuard>,
    /// The connection ends with it.
    pub admission: Option<Arc<Admission>>,
    /// Of a VM's disk: the connection ends when the disk goes from the VM.
    pub end: Option<CancellationToken>,
}

/// The end of the options.
pub enum Outcome {
    Agreed(Box<Agreed>),
    /// TLS begins with the next byte.
    StartTls,
    /// The client has gone or has given up.
    End,
}

/// The result of one option.
enum Next {
    Option,
    Ended(Outcome),
}

/// The handshake of one connection ("fixed newstyle"), from the server's greeting to the choice of an export.
pub struct Negotiation<'a> {
    shared: &'a Shared,
    stop: CancellationToken,
    peer: Peer,
    no_zeroes: bool,
    dialect: Dialect,
    /// The chosen contexts, and the export for which they were chosen.
    contexts: Option<(String, Contexts)>,
    claim: Option<Claim>,
    /// The session that the client has named was refused. Then it opens nothing: its requests could run beside those of
    /// the session's newer connection.
    refused: bool,
    /// Of the export that was opened last, if another host may have it only until further notice.
    admission: Option<Arc<Admission>>,
    /// Answers that are not sent yet.
    out: BytesMut,
}

/// An opened export, or the problem that the client may see. The problem does not reveal whether a hidden
/// export exists.
type Opened = Result<Export, Problem>;

const REFUSED_SESSION: &str = "the session that it named was refused";

impl<'a> Negotiation<'a> {
    /// `stop` ends the negotiation when the server ends.
    pub fn new(shared: &'a Shared, peer: Peer, stop: CancellationToken) -> Self {
        Self {
            shared,
            stop,
            peer,
            no_zeroes: false,
            dialect: Dialect::Simple,
            contexts: None,
            claim: None,
            refused: false,
            admission: None,
            out: BytesMut::new(),
        }
    }

    /// Continues with the same client, encrypted.
    pub fn encrypted(self, common_name: Option<String>, host: Option<HostId>) -> Self {
        let peer = Peer { encrypted: true, common_name, host, ..self.peer };
        Self { no_zeroes: self.no_zeroes, ..Self::new(self.shared, peer, self.stop) }
    }

    /// Returns false if the client has gone.
    pub async fn greet<S: AsyncRead + AsyncWrite + Unpin>(
        &mut self,
        stream: &mut S,
    ) -> Result<bool, ConnectionError> {
        self.out.put_u64(wire::MAGIC);
        self.out.put_u64(wire::OPTION_MAGIC);
        self.out.put_u16(handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
        self.send(stream).await?;
        let mut flags = [0; 4];
        // A port scanner closes the connection here.
        if !read_or_end(stream, &mut flags).await? {
            return Ok(false);
        }
        let flags = u32::from_be_bytes(flags);
        let known = u32::from(handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
        if flags & !known != 0 || flags & u32::from(handshake_flag::FIXED_NEWSTYLE) == 0 {
            return Err(FramingError::Malformed("the client's handshake flags").into());
        }
        self.no_zeroes = flags & u32::from(handshake_flag::NO_ZEROES) != 0;
        Ok(true)
    }

    /// Answers the client's options until one of them ends the negotiation: with an export, with TLS to begin, or
    /// without either.
    pub async fn options<S: AsyncRead + AsyncWrite + Unpin>(
        &mut self,
        stream: &mut S,
    ) -> Result<Outcome, ConnectionError> {
        loop {
            let mut head = [0; OptionHead::BYTES];
            if !read_or_end(stream, &mut head).await? {
                return Ok(Outcome::End);
            }
            let head = OptionHead::parse(&head)?;
            let mut data = vec![0; head.length_bytes as usize];
            stream.read_exact(&mut data).await?;
            let next = self.option(head.option, data.into()).await?;
            let sent = self.send(stream).await;
            match next {
                Next::Option => sent?,
                // The client need not wait for this answer and may already have gone.
                Next::Ended(Outcome::End) => return Ok(Outcome::End),
                Next::Ended(outcome) => {
                    sent?;
                    return Ok(outcome);
                }
            }
        }
    }

    async fn send<S: AsyncWrite + Unpin>(&mut self, stream: &mut S) -> Result<(), ConnectionError> {
        stream.write_all(&self.out.split()).await?;
        Ok(stream.flush().await?)
    }

    async fn option(&mut self, option: u32, data: Bytes) -> Result<Next, ConnectionError> {
        if self.must_encrypt() && !matches!(option, option::STARTTLS | option::ABORT) {
            if option == option::EXPORT_NAME {
                return Err(ConnectionError::Refused("the client does not use TLS".into()));
            }
            self.refuse(option, reply::ERR_TLS_REQD, "this server wants TLS: send STARTTLS first");
            return Ok(Next::Option);
        }
        match option {
            option::EXPORT_NAME => return self.export_name(&data).await,
            option::ABORT => {
                self.answer(option, reply::ACK, &[]);
                return Ok(Next::Ended(Outcome::End));
            }
            option::GO | option::INFO => match GoOption::parse(data) {
                Ok(go) => return Ok(self.go(option, go).await),
                Err(error) => self.refuse(option, reply::ERR_INVALID, &error),
            },
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                match MetaContextOption::parse(data) {
                    Ok(asked) => self.meta_contexts(option, asked),
                    Err(error) => self.refuse(option, reply::ERR_INVALID, &error),
                }
            }
            option::PERIGEE_SESSION => self.session(data).await,
            option::LIST
            | option::STARTTLS
            | option::STRUCTURED_REPLY
            | option::EXTENDED_HEADERS
                if !data.is_empty() =>
            {
                self.refuse(option, reply::ERR_INVALID, "the option takes no data");
            }
            option::LIST => self.list().await,
            option::STARTTLS => return Ok(self.start_tls()),
            option::STRUCTURED_REPLY | option::EXTENDED_HEADERS => self.speak(option),
            unknown => {
                let message = format!("option {unknown} is not known here");
                self.refuse(option, reply::ERR_UNSUP, &message);
            }
        }
        Ok(Next::Option)
    }

    fn must_encrypt(&self) -> bool {
        let required = self.shared.tls.as_ref().is_some_and(|tls| tls.required);
        required && !self.peer.local && !self.peer.encrypted
    }

    fn start_tls(&mut self) -> Next {
        if self.peer.encrypted {
            self.refuse(option::STARTTLS, reply::ERR_INVALID, "this is encrypted already");
            Next::Option
        } else if self.shared.tls.is_none() {
            self.refuse(option::STARTTLS, reply::ERR_POLICY, "this server has no certificate");
            Next::Option
        } else {
            self.answer(option::STARTTLS, reply::ACK, &[]);
            Next::Ended(Outcome::StartTls)
        }
    }

    /// Negotiates the format of requests and replies. It can only be extended.
    fn speak(&mut self, option: u32) {
        let wanted = match option {
            option::EXTENDED_HEADERS => Dialect::Extended,
            _ => Dialect::Structured,
        };
        if self.dialect == wanted {
            self.refuse(option, reply::ERR_INVALID, "that is agreed already");
        } else if self.dialect == Dialect::Extended {
            let why = "extended headers are agreed already";
            self.refuse(option, reply::ERR_EXT_HEADER_REQD, why);
        } else {
            self.dialect = wanted;
            self.answer(option, reply::ACK, &[]);
        }
    }

    async fn session(&mut self, key: Bytes) {
        let option = option::PERIGEE_SESSION;
        if self.peer.vm.is_some() {
            self.refused = true;
            self.refuse(option, reply::ERR_POLICY, "a VM's session is not that of another host");
        } else if self.claim.is_some() {
            self.refuse(option, reply::ERR_INVALID, "the session is named already");
        } else {
            let mut key = SessionKey::parse(&key);
            if let Some(host) = &self.peer.host {
                key = key.of_host(host.as_str());
            }
            self.claim = self.shared.sessions.claim(key, &self.stop).await;
            self.refused = self.claim.is_none();
            match self.claim {
                Some(_) => self.answer(option, reply::ACK, &[]),
                None => {
                    let why = "the session was connected anew since";
                    self.refuse(option, reply::ERR_SHUTDOWN, why);
                }
            }
        }
    }

    async fn list(&mut self) {
        if !self.shared.access.listing {
            return self.refuse(option::LIST, reply::ERR_POLICY, "exports are not listed here");
        }
        match self.visible_names().await {
            Ok(names) => {
                for name in names {
                    let mut data = BytesMut::new();
                    wire::put_string(&mut data, &name);
                    self.answer(option::LIST, reply::SERVER, &data);
                }
                self.answer(option::LIST, reply::ACK, &[]);
            }
            Err(problem) => self.refuse(option::LIST, reply::ERR_POLICY, &problem),
        }
    }

    async fn visible_names(&self) -> Result<Vec<String>, Problem> {
        let view = self.shared.access.view(&self.peer)?;
        let mut names = self.shared.exports.names().await?;
        names.retain(|name| view.shows(name, &self.peer));
        let Some(host) = &self.peer.host else { return Ok(names) };
        let mut admitted = Vec::new();
        for name in names {
            match self.shared.exports.admits(&name, host).await {
                Ok(_) => admitted.push(name),
                Err(problem) if problem.kind == ProblemKind::Forbidden => {}
                Err(problem) => return Err(problem),
            }
        }
        Ok(admitted)
    }

    fn meta_contexts(&mut self, option: u32, asked: MetaContextOption) {
        if self.dialect == Dialect::Simple {
            let why = "structured replies come first";
            return self.refuse(option, reply::ERR_INVALID, why);
        }
        let listing = option == option::LIST_META_CONTEXT;
        let chosen = Contexts::matching(&asked.queries, listing);
        for (id, name) in chosen.chosen() {
            let mut data = BytesMut::new();
            data.put_u32(if listing { 0 } else { id });
            data.put_slice(name.as_bytes());
            self.answer(option, reply::META_CONTEXT, &data);
        }
        if !listing {
            self.contexts = Some((asked.name, chosen));
        }
        self.answer(option, reply::ACK, &[]);
    }

    /// Opens an export. One that the client may not see is reported as missing, without a list of the others.
    async fn open(&mut self, name: &str) -> Opened {
        let view = self.shared.access.view(&self.peer).map_err(|problem| {
            tracing::error!(%problem, "the access list is wrong; no client sees any export");
            let what = format!("can't open export {name:?}");
            Problem::unavailable(what, "the server's access list is wrong")
        })?;
        let hidden = || {
            let what = format!("can't open export {name:?}");
            match &self.peer.vm {
                Some(vm) => {
                    let why = format!("this VM's socket does not serve it, only {}", vm.names());
                    Problem::not_found(what, why)
                }
                None => Problem::not_found(what, "it does not exist"),
            }
        };
        if !view.shows(name, &self.peer) && !self.shows_by_another_name(&view, name).await? {
            return Err(hidden());
        }
        let proxy = self.claim.as_ref().map(|claim| Opener::Proxy(claim.host()));
        let opener = proxy.unwrap_or(Opener::Client);
        let Peer { ip: address, encrypted, is_own, .. } = self.peer;
        let is_authenticated = self.peer.local || self.peer.common_name.is_some();
        let peer = exports::Peer { address, encrypted, is_own, is_authenticated };
        // A host that may not have it is told nothing of it, and costs it nothing.
        if let Some(host) = &self.peer.host {
            self.shared.exports.admits(name, host).await?;
        }
        let opened = self.shared.exports.open(name, opener, peer).await;
        // Again: another volume of this name may have come here while it was opened, or the host was let out.
        if let (Ok(_), Some(host)) = (&opened, &self.peer.host) {
            self.admission = self.shared.exports.admits(name, host).await?;
        }
        match opened {
            Err(problem)
                if problem.kind == ProblemKind::NotFound
                    && (!matches!(view, View::Everything) || !self.shared.access.listing) =>
            {
                Err(hidden())
            }
            opened => opened,
        }
    }

    /// An access list names images; other hosts ask for their layers.
    async fn shows_by_another_name(&self, view: &View, name: &str) -> Result<bool, Problem> {
        if !matches!(view, View::Only(_)) {
            return Ok(false);
        }
        let names = self.shared.exports.also_named(name).await?;
        Ok(names.iter().any(|name| view.shows(name, &self.peer)))
    }

    /// Where a proxy finds a volume that has left this server. Others find it through this server.
    async fn moved_to(&self, name: &str) -> Option<String> {
        self.claim.as_ref()?;
        let view = self.shared.access.view(&self.peer).ok()?;
        if !view.shows(name, &self.peer) {
            return None;
        }
        self.shared.exports.moved_to(name).await
    }

    /// The kind of reply for an export that was not opened. A proxy is told when asking again can't help.
    async fn refusal(&self, name: &str, problem: &Problem) -> u32 {
        let may_be_final = problem.kind == ProblemKind::Conflict && self.claim.is_some();
        if may_be_final && self.shared.exports.is_replaced(name).await {
            return reply::ERR_PERIGEE_REPLACED;
        }
        match problem.kind {
            ProblemKind::NotFound => reply::ERR_UNKNOWN,
            ProblemKind::Invalid => reply::ERR_INVALID,
            _ => reply::ERR_POLICY,
        }
    }

    fn agree(&mut self, name: &str, export: Export) -> Next {
        let contexts = self.contexts.take().filter(|(of, _)| of == name);
        let rules = Rules {
            read_only: export.read_only,
            dialect: self.dialect,
            contexts: contexts.map(|(_, contexts)| contexts).unwrap_or_default(),
        };
        let login = self.shared.exports.log_in(name, Over::Nbd, &self.peer.address);
        let claim = self.claim.take();
        let admission = self.admission.take();
        let end = self.peer.vm.as_ref().map(|vm| vm.end_of(name));
        let agreed = Agreed { export, rules, claim, login, admission, end };
        Next::Ended(Outcome::Agreed(Box::new(agreed)))
    }

    async fn go(&mut self, option: u32, go: GoOption) -> Next {
        // A client sends both at once.
        if self.refused {
            self.refuse(option, reply::ERR_SHUTDOWN, REFUSED_SESSION);
            return Next::Option;
        }
        let mut opened = self.open(&go.name).await;
        if opened.is_err() && self.claim.is_some() {
            if let Some(nbd_addr) = self.moved_to(&go.name).await {
                self.refuse(option, reply::ERR_PERIGEE_MOVED, &nbd_addr);
                return Next::Option;
            }
            // It may have come back in the meantime.
            opened = self.open(&go.name).await;
        }
        let export = match opened {
            Ok(export) => export,
            Err(problem) => {
                let kind = self.refusal(&go.name, &problem).await;
                self.refuse(option, kind, &problem);
                return Next::Option;
            }
        };
        let mut data = BytesMut::new();
        data.put_u16(info::EXPORT);
        data.put_u64(export.device.size_bytes());
        data.put_u16(self.flags(&export));
        self.answer(option, reply::INFO, &data);
        if go.infos.contains(&info::NAME) {
            let mut data = BytesMut::new();
            data.put_u16(info::NAME);
            data.put_slice(go.name.as_bytes());
            self.answer(option, reply::INFO, &data);
        }
        if let Some(identity) = identity(&export)
            && go.infos.contains(&info::DESCRIPTION)
        {
            let mut data = BytesMut::new();
            data.put_u16(info::DESCRIPTION);
            data.put_slice(identity.as_bytes());
            self.answer(option, reply::INFO, &data);
        }
        if let Some(home) = &export.home
            && go.infos.contains(&info::PERIGEE_HOME)
        {
            let mut data = BytesMut::new();
            data.put_u16(info::PERIGEE_HOME);
            data.put_slice(home.told().as_bytes());
            self.answer(option, reply::INFO, &data);
        }
        if go.infos.contains(&info::BLOCK_SIZE) {
            let mut data = BytesMut::new();
            data.put_u16(info::BLOCK_SIZE);
            data.put_u32(1);
            data.put_u32(PREFERRED_BYTES);
            data.put_u32(PAYLOAD_BYTES_MAX);
            self.answer(option, reply::INFO, &data);
        }
        self.answer(option, reply::ACK, &[]);
        if option == option::INFO { Next::Option } else { self.agree(&go.name, export) }
    }

    /// EXPORT_NAME, the old way to choose an export. The server can refuse it only by closing the connection.
    async fn export_name(&mut self, data: &[u8]) -> Result<Next, ConnectionError> {
        let name = std::str::from_utf8(data)
            .ok()
            .filter(|name| name.len() <= STRING_BYTES_MAX as usize)
            .ok_or(FramingError::Malformed("an export's name"))?;
        if self.refused {
            return Err(ConnectionError::Refused(REFUSED_SESSION.into()));
        }
        let export = self
            .open(name)
            .await
            .map_err(|problem| ConnectionError::Refused(problem.to_string()))?;
        self.out.put_u64(export.device.size_bytes());
        self.out.put_u16(self.flags(&export));
        if !self.no_zeroes {
            self.out.put_bytes(0, 124);
        }
        Ok(self.agree(name, export))
    }

    fn flags(&self, export: &Export) -> u16 {
        let mut flags = export_flag::HAS_FLAGS
            | export_flag::SEND_FLUSH
            | export_flag::SEND_FUA
            | export_flag::SEND_CACHE
            | export_flag::CAN_MULTI_CONN;
        if export.read_only {
            flags |= export_flag::READ_ONLY;
        } else {
            flags |= export_flag::SEND_TRIM
                | export_flag::SEND_WRITE_ZEROES
                | export_flag::SEND_FAST_ZERO;
        }
        if self.dialect != Dialect::Simple {
            flags |= export_flag::SEND_DF;
        }
        flags
    }

    fn answer(&mut self, option: u32, kind: u32, data: &[u8]) {
        self.out.put_slice(&wire::encode_option_reply(option, kind, data));
    }

    fn refuse(&mut self, option: u32, kind: u32, why: &(impl std::fmt::Display + ?Sized)) {
        let text = why.to_string();
        let end = text.floor_char_boundary(STRING_BYTES_MAX as usize);
        self.answer(option, kind, &text.as_bytes()[..end]);
    }
}

/// The identity of an export, which tells it from another one that had its name. For a layer this is its
/// name with the UUID, which is the same on every host. After it follows whether the data may leave its site.
fn identity(export: &Export) -> Option<String> {
    let layer = export.device.layer().map(|layer| format!("{LAYER_PREFIX}{layer}"));
    let volume = || Some(format!("{INCARNATION_PREFIX}{}", export.device.incarnation()?));
    let identity = layer.or_else(volume)?;
    Some(if export.confined { identity + CONFINED_SUFFIX } else { identity })
}

/// Returns false if the stream ended before the first byte.
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
