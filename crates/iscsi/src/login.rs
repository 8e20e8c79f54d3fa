//! The login phase: the initiator's name, its authentication, and the negotiation of the session.
//!
//! ```text
//! security (CHAP, if the initiator has to prove itself) -> operation (keys) -> full feature
//! ```
//!
//! An initiator that is not authenticated learns nothing about targets: only afterwards does the server
//! check whether the target exists and whether the initiator may use it. The answer is the same in both
//! cases.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use perigee_block::exports::{Opener, Peer};
use perigee_block::measured::Measured;
use perigee_block::sessions::SessionKey;
use perigee_model::ProblemKind;
use perigee_model::client::{ISCSI_NAME_BYTES_MAX, Over};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_util::sync::CancellationToken;

use super::access::Client;
use super::chap::{self, Algorithm, Challenge, Chap};
use super::execute::Disk;
use super::pdu::{Digests, HEAD_BYTES, Head, flag, padded, request, response};
use super::scsi::inquiry::Identity;
use super::scsi::reservations::Port;
use super::session::{Attached, COMMANDS_MAX, Numbers, PORTAL_GROUP, Session, export_of};
use super::text::{self, Answers, OUR_DATA_BYTES_MAX, Parameters, TEXT_BYTES_MAX};
use super::{ConnectionError, Shared};

/// The most data of a login PDU, whatever is negotiated later.
const LOGIN_DATA_BYTES_MAX: u32 = 8192;
/// The most exchanges of a login, which normally has a few.
const EXCHANGES_MAX: usize = 64;

/// The reason why a login fails: class and detail (RFC 7143, 11.13.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Refusal(u8, u8);

impl Refusal {
    const INITIATOR_ERROR: Self = Self(2, 0);
    const AUTHENTICATION: Self = Self(2, 1);
    const NO_TARGET: Self = Self(2, 3);
    const UNSUPPORTED_VERSION: Self = Self(2, 5);
    const MISSING_PARAMETER: Self = Self(2, 7);
    const NO_SESSION: Self = Self(2, 0x0a);
    const INVALID: Self = Self(2, 0x0b);
    const TARGET_ERROR: Self = Self(3, 0);
    const UNAVAILABLE: Self = Self(3, 1);
    const NO_RESOURCES: Self = Self(3, 2);
}

mod stage {
    /// SecurityNegotiation: the two sides prove who they are.
    pub const SECURITY: u8 = 0;
    /// LoginOperationalNegotiation: lengths, digests, burst sizes.
    pub const OPERATION: u8 = 1;
    /// FullFeaturePhase: the login is over, and commands may come.
    pub const FULL_FEATURE: u8 = 3;
}

/// The state of CHAP.
#[derive(Debug)]
enum Proof {
    /// CHAP is not needed, or has not begun.
    Open,
    /// CHAP was chosen as the method.
    Chosen,
    Asked(Challenge),
    Done,
}

/// One login (RFC 7143, chapter 6) from its first request to its session, or to its refusal with a status of two
/// bytes.
pub struct Login<'a> {
    shared: &'a Shared,
    peer: String,
    stop: CancellationToken,
    stage: Option<u8>,
    /// Keys that have not fully arrived.
    cut: Vec<u8>,
    initiator: Option<String>,
    target: Option<String>,
    discovery: bool,
    client: Client,
    proof: Proof,
    parameters: Parameters,
    declared: bool,
    isid: [u8; 6],
    stat_sn: u32,
    cmd_sn: u32,
}

/// The answer to one PDU.
struct Answer {
    text: Answers,
    /// The stage that begins.
    next: Option<u8>,
}

impl<'a> Login<'a> {
    /// `peer` is the initiator's address.
    pub fn new(shared: &'a Shared, peer: String, stop: CancellationToken) -> Self {
        Self {
            shared,
            peer,
            stop,
            stage: None,
            cut: Vec::new(),
            initiator: None,
            target: None,
            discovery: false,
            client: Client::default(),
            proof: Proof::Open,
            parameters: Parameters::default(),
            declared: false,
            isid: [0; 6],
            stat_sn: 0,
            cmd_sn: 0,
        }
    }

    /// Runs until the session begins. Returns `None` if the initiator has gone.
    ///
    /// # Errors
    /// When the login is refused, or the request is not a login. The initiator has got an answer.
    pub async fn run<S>(
        mut self,
        stream: &mut S,
        portal: std::net::SocketAddr,
    ) -> Result<Option<Session>, ConnectionError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        for exchange in 0..EXCHANGES_MAX {
            let Some((head, data)) = receive(stream).await? else { return Ok(None) };
            if exchange == 0 {
                self.isid = head.0[8..14].try_into().expect("six bytes");
                self.stat_sn = head.u32_at(28);
                self.cmd_sn = head.cmd_sn();
            }
            let answered = self.answer(&head, &data).await;
            let begins = matches!(&answered, Ok(a) if a.next == Some(stage::FULL_FEATURE));
            let attached = match answered {
                Ok(answer) if begins => match self.attach().await {
                    Ok(attached) => Ok((answer, attached)),
                    Err(refusal) => Err(refusal),
                },
                Ok(answer) => Ok((answer, None)),
                Err(refusal) => Err(refusal),
            };
            let (answer, attached) = match attached {
                Ok(both) => both,
                Err(refusal) => return Err(self.refuse(stream, &head, refusal).await),
            };
            self.send(stream, &head, answer, begins).await?;
            if begins {
                return Ok(Some(self.session(attached, portal)));
            }
        }
        Err(ConnectionError::Refused("the login has too many exchanges".into()))
    }

    async fn answer(&mut self, head: &Head, data: &[u8]) -> Result<Answer, Refusal> {
        let flags = head.flags();
        let (current, next) = (flags >> 2 & 3, flags & 3);
        let transits = flags & flag::FINAL != 0;
        // The lowest version that the initiator speaks.
        if head.0[3] != 0 {
            return Err(Refusal::UNSUPPORTED_VERSION);
        }
        if head.u16_at(14) != 0 {
            return Err(Refusal::NO_SESSION);
        }
        let expected = self.stage.is_none_or(|stage| stage == current);
        let forward = !transits || next > current && next != 2;
        if !expected || !forward || current > stage::OPERATION {
            return Err(Refusal::INVALID);
        }
        self.stage = Some(current);
        if self.cut.len() + data.len() > TEXT_BYTES_MAX {
            return Err(Refusal::INITIATOR_ERROR);
        }
        self.cut.extend(data);
        if flags & flag::CONTINUE != 0 {
            return if transits {
                Err(Refusal::INVALID)
            } else {
                Ok(Answer { text: Answers::default(), next: None })
            };
        }
        let bytes = std::mem::take(&mut self.cut);
        let keys = text::parse(&bytes).map_err(|_| Refusal::INITIATOR_ERROR)?;
        let mut answers = Answers::default();
        self.identify(&keys, &mut answers).await?;
        if current == stage::SECURITY {
            self.prove(&keys, &mut answers)?;
        }
        self.operate(&keys, current, &mut answers)?;
        let proved = self.client.chap.is_none() || matches!(self.proof, Proof::Done);
        if current == stage::OPERATION && !proved {
            return Err(Refusal::AUTHENTICATION);
        }
        let next = (transits && proved).then_some(next);
        if let Some(next) = next {
            self.stage = Some(next);
        }
        Ok(Answer { text: answers, next })
    }

    /// The first PDU says who logs in, and where.
    async fn identify(
        &mut self,
        keys: &[(&str, &str)],
        answers: &mut Answers,
    ) -> Result<(), Refusal> {
        if self.initiator.is_some() {
            return Ok(());
        }
        let value = |key| text::value(keys, key);
        let initiator = value("InitiatorName").ok_or(Refusal::MISSING_PARAMETER)?.to_lowercase();
        let well_formed = ["iqn.", "eui.", "naa."].iter().any(|kind| initiator.starts_with(kind));
        let plain = !initiator.bytes().any(|byte| byte.is_ascii_control() || byte == b',');
        if initiator.len() > ISCSI_NAME_BYTES_MAX || !well_formed || !plain {
            return Err(Refusal::INITIATOR_ERROR);
        }
        self.discovery = match value("SessionType") {
            None | Some("Normal") => false,
            Some("Discovery") => true,
            Some(_) => return Err(Refusal(2, 9)),
        };
        self.target = value("TargetName").map(str::to_lowercase);
        if self.target.is_none() && !self.discovery {
            return Err(Refusal::MISSING_PARAMETER);
        }
        let found = self.shared.clients.find(&initiator).await.map_err(|problem| {
            tracing::error!(%problem, "can't read the access rules; no initiator can log in");
            Refusal::UNAVAILABLE
        })?;
        // An unknown initiator needs no CHAP and sees no targets.
        self.client = found.unwrap_or_default();
        self.initiator = Some(initiator);
        if !self.discovery {
            answers.add("TargetPortalGroupTag", PORTAL_GROUP);
        }
        Ok(())
    }

    fn prove(&mut self, keys: &[(&str, &str)], answers: &mut Answers) -> Result<(), Refusal> {
        if let Some(methods) = text::value(keys, "AuthMethod") {
            let wanted = if self.client.chap.is_some() { "CHAP" } else { "None" };
            if !methods.split(',').any(|method| method == wanted) {
                return Err(Refusal::AUTHENTICATION);
            }
            answers.add("AuthMethod", wanted);
            self.proof = Proof::Chosen;
        }
        let Some(chap) = self.client.chap.clone() else { return Ok(()) };
        match std::mem::replace(&mut self.proof, Proof::Open) {
            Proof::Chosen => {
                self.proof = match text::value(keys, "CHAP_A") {
                    Some(list) => Proof::Asked(ask(list, answers)?),
                    None => Proof::Chosen,
                };
                Ok(())
            }
            Proof::Asked(challenge) => {
                check(&chap, &challenge, keys, answers)?;
                self.proof = Proof::Done;
                Ok(())
            }
            Proof::Done => {
                self.proof = Proof::Done;
                Ok(())
            }
            // The initiator has to choose a method before it sends operational keys.
            Proof::Open => Err(Refusal::AUTHENTICATION),
        }
    }

    fn operate(
        &mut self,
        keys: &[(&str, &str)],
        current: u8,
        answers: &mut Answers,
    ) -> Result<(), Refusal> {
        for (key, value) in keys {
            if is_of_login(key) {
                continue;
            }
            let agreed = self.parameters.agree(key, value, self.discovery, answers);
            agreed.map_err(|_| Refusal::INITIATOR_ERROR)?;
        }
        if current == stage::OPERATION && !self.declared {
            answers.add("MaxRecvDataSegmentLength", OUR_DATA_BYTES_MAX);
            self.declared = true;
        }
        Ok(())
    }

    /// Opens the session's volume.
    async fn attach(&mut self) -> Result<Option<Attached>, Refusal> {
        self.parameters.settle();
        if self.discovery {
            return Ok(None);
        }
        let target = self.target.clone().unwrap_or_default();
        let allowed = export_of(&target).filter(|export| self.client.may_use(export));
        let export = &allowed.ok_or(Refusal::NO_TARGET)?;
        let port = self.port();
        // The session that this one replaces ends first, with all of its tasks.
        let key = SessionKey::plain(format!("{} {target}", port.0));
        let claim = self.shared.sessions.claim(key, &self.stop).await;
        let claim = claim.ok_or(Refusal::UNAVAILABLE)?;
        let address = self.peer.parse::<SocketAddr>().map(|peer| peer.ip().to_canonical());
        // A peer without an address belongs to no site.
        let address = Some(address.unwrap_or(Ipv4Addr::UNSPECIFIED.into()));
        let peer = Peer { address, encrypted: false, is_own: false, is_authenticated: true };
        let opened = self.shared.exports.open(export, Opener::Client, peer).await;
        let opened = opened.map_err(|problem| match problem.kind {
            ProblemKind::NotFound | ProblemKind::Invalid => Refusal::NO_TARGET,
            _ => {
                tracing::warn!(%target, %problem, "can't open a target");
                Refusal::UNAVAILABLE
            }
        })?;
        let size_bytes = opened.device.size_bytes();
        let units = &self.shared.units;
        let (incarnation, layer) = (opened.device.incarnation(), opened.device.layer());
        let identity = Identity::new(target.clone(), export, incarnation, layer);
        let joined = units.join(export, identity, port, size_bytes).await;
        let place = joined.map_err(|problem| {
            tracing::error!(%target, %problem, "can't open a target");
            Refusal::TARGET_ERROR
        })?;
        let disk = Disk {
            unit: place.unit.clone(),
            nexus: place.nexus.clone(),
            device: Arc::new(Measured::new(opened.device, opened.counters)),
            read_only: opened.read_only,
        };
        let initiator = self.initiator.as_deref().unwrap_or_default();
        let peer = format!("{initiator} at {}", self.peer);
        let login = self.shared.exports.log_in(export, Over::Iscsi, &peer);
        Ok(Some(Attached { disk, place, claim, login }))
    }

    fn port(&self) -> Port {
        let isid: String = self.isid.iter().map(|byte| format!("{byte:02x}")).collect();
        Port(format!("{},i,0x{isid}", self.initiator.as_deref().unwrap_or_default()))
    }

    fn session(self, attached: Option<Attached>, portal: std::net::SocketAddr) -> Session {
        Session {
            port: self.port(),
            numbers: Numbers::new(self.stat_sn, self.cmd_sn),
            client: self.client,
            parameters: self.parameters,
            attached,
            portal,
        }
    }

    fn head_to(&mut self, request: &Head, flags: u8) -> Head {
        let stat_sn = self.stat_sn;
        self.stat_sn = stat_sn.wrapping_add(1);
        Head::new(response::LOGIN, flags)
            .with(8, &self.isid)
            .with(16, &request.0[16..20])
            .with_u32(24, stat_sn)
            .with_u32(28, self.cmd_sn)
            .with_u32(32, self.cmd_sn.wrapping_add(COMMANDS_MAX - 1))
    }

    async fn send<S: AsyncWrite + Unpin>(
        &mut self,
        stream: &mut S,
        request: &Head,
        answer: Answer,
        begins: bool,
    ) -> Result<(), ConnectionError> {
        let current = request.flags() & 0x0c;
        let flags = answer.next.map_or(current, |next| flag::FINAL | current | next);
        let mut head = self.head_to(request, flags);
        if begins {
            head = head.with(14, &self.shared.next_tsih().to_be_bytes());
        }
        let text = answer.text.into_bytes();
        stream.write_all(&Digests::default().encode(head, &text)).await?;
        Ok(stream.flush().await?)
    }

    async fn refuse<S: AsyncWrite + Unpin>(
        &mut self,
        stream: &mut S,
        request: &Head,
        refusal: Refusal,
    ) -> ConnectionError {
        let head = self.head_to(request, request.flags() & 0x0c).with(36, &[refusal.0, refusal.1]);
        let sent = stream.write_all(&Digests::default().encode(head, &[])).await;
        let who = self.initiator.as_deref().unwrap_or("unknown");
        let Refusal(class, detail) = refusal;
        match sent {
            Ok(()) => ConnectionError::Refused(format!(
                "the login of {who}, with status {class:02x}{detail:02x}"
            )),
            Err(error) => error.into(),
        }
    }
}

fn ask(list: &str, answers: &mut Answers) -> Result<Challenge, Refusal> {
    let algorithm = Algorithm::choose(list).ok_or(Refusal::AUTHENTICATION)?;
    let challenge = Challenge::new(algorithm).map_err(|error| {
        tracing::error!(%error, "can't get random bytes for CHAP");
        Refusal::NO_RESOURCES
    })?;
    answers.add("CHAP_A", algorithm.number());
    answers.add("CHAP_I", challenge.id);
    answers.add("CHAP_C", challenge.text());
    Ok(challenge)
}

/// Checks the initiator's response, and answers its challenge if it sent one.
fn check(
    chap: &Chap,
    challenge: &Challenge,
    keys: &[(&str, &str)],
    answers: &mut Answers,
) -> Result<(), Refusal> {
    let value = |key| text::value(keys, key);
    let proof = value("CHAP_N").zip(value("CHAP_R").and_then(chap::binary));
    let (user, response) = proof.ok_or(Refusal::AUTHENTICATION)?;
    if !challenge.is_met(&chap.initiator, user, &response) {
        return Err(Refusal::AUTHENTICATION);
    }
    let (id, theirs) = match (value("CHAP_I"), value("CHAP_C")) {
        (None, None) => return Ok(()),
        (id, theirs) => (id.and_then(chap::identifier), theirs.and_then(chap::binary)),
    };
    let (Some(id), Some(theirs), Some(target)) = (id, theirs, &chap.target) else {
        return Err(Refusal::AUTHENTICATION);
    };
    if theirs.is_empty() || challenge.is_reflected(&theirs) {
        return Err(Refusal::AUTHENTICATION);
    }
    answers.add("CHAP_N", &target.user);
    answers.add("CHAP_R", chap::prove(challenge.algorithm, target, id, &theirs));
    Ok(())
}

/// Whether a key belongs to the login itself and not to the session's operation.
fn is_of_login(key: &str) -> bool {
    matches!(
        key,
        "InitiatorName"
            | "InitiatorAlias"
            | "TargetName"
            | "TargetAlias"
            | "SessionType"
            | "AuthMethod"
            | "CHAP_A"
            | "CHAP_I"
            | "CHAP_C"
            | "CHAP_N"
            | "CHAP_R"
    )
}

/// Receives one login PDU. Returns `None` if the initiator has closed the connection.
async fn receive<S: AsyncRead + Unpin>(
    stream: &mut S,
) -> Result<Option<(Head, Vec<u8>)>, ConnectionError> {
    let mut bytes = [0; HEAD_BYTES];
    match stream.read_exact(&mut bytes).await {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    let head = Head(bytes);
    if head.opcode() != request::LOGIN {
        return Err(ConnectionError::Protocol("the first PDU is not a login"));
    }
    if head.data_bytes() > LOGIN_DATA_BYTES_MAX || head.ahs_bytes() > 0 {
        return Err(ConnectionError::Protocol("a login PDU that is too long"));
    }
    let length = head.data_bytes() as usize;
    let mut data = vec![0; padded(length)];
    stream.read_exact(&mut data).await?;
    data.truncate(length);
    Ok(Some((head, data)))
}
