//! The process that carries a migration, encrypted: between a unix socket of QEMU and the other host.
//!
//! It is TLS 1.3. From the migration's key both ends make the same two pairs of keys (Ed25519), one for each end. An end shows its own
//! public key without a certificate (RFC 7250), and takes only the other one. Nothing is resumed or sent early.
//!
//! A connection has two threads, one for each direction. Only the first one writes to the network, and only the second one reads from
//! it. Both wait without the lock on the encryption, so a direction that stands does not hold the other one up. The end of a
//! direction is passed on as such only if the other end has said it (`close_notify`). After any fault both directions end.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use perigee_model::vm::MigrationKey;
use ring::hkdf;
use tokio_rustls::rustls::client::danger::{
    HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
};
use tokio_rustls::rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use tokio_rustls::rustls::crypto::ring::{cipher_suite, default_provider, sign::any_eddsa_type};
use tokio_rustls::rustls::crypto::{CryptoProvider, verify_tls13_signature_with_raw_key};
use tokio_rustls::rustls::pki_types::{
    CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use tokio_rustls::rustls::server::AlwaysResolvesServerRawPublicKeys;
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{
    CertificateError, ClientConfig, ClientConnection, Connection, DigitallySignedStruct,
    DistinguishedName, Error, ServerConfig, ServerConnection, SignatureScheme,
};

use crate::vm::tls::End;

/// As much is taken from a socket at once: the steps of a tunnel cost more than its bytes if they are small.
const STEP_BYTES: usize = 256 << 10;
/// For how long the other end of a connection may keep the handshake waiting. It holds nothing up meanwhile.
const HANDSHAKE_MAX: Duration = Duration::from_secs(60);
/// So many connections at once, from whoever makes them. A migration makes one.
const CONNECTIONS_MAX: usize = 256;
/// After a connection that could not be accepted.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
/// What the keys are for.
const CONTEXT: &[u8] = b"perigee tunnel of a migration 1";
/// A private key of Ed25519 follows (RFC 8410, section 7).
const PKCS8: [u8; 16] = [
    0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20,
];

/// Carries what comes to `at` to `to`, until the process is killed. The source's QEMU connects to a unix socket; the destination's QEMU
/// listens at one.
///
/// # Errors
/// If the key can't be read; if it can't listen.
pub fn carry_for_ever(key_file: &Path, end: &str, at: &str, to: &str) -> io::Result<()> {
    let invalid = |why: String| io::Error::new(ErrorKind::InvalidInput, why);
    let text = std::fs::read_to_string(key_file)?;
    let hex = text.trim_end().rsplit_once(':').map(|(_, hex)| hex.to_owned());
    let key = hex.map(|hex| MigrationKey { hex }).filter(MigrationKey::is_one);
    let key = key.ok_or_else(|| invalid(format!("{} has no key", key_file.display())))?;
    let ends = [End::Source, End::Destination].into_iter();
    let end = ends.into_iter().find(|one| one.name() == end);
    let end = end.ok_or_else(|| invalid("it is neither source nor destination".to_owned()))?;
    let tls = Tls::new(&key, end).map_err(|error| invalid(error.to_string()))?;
    match end {
        End::Source => {
            let to: SocketAddr = to.parse().map_err(|_| invalid(format!("{to} is no address")))?;
            let listener = UnixListener::bind(at)?;
            serve(listener.incoming(), move |plain| {
                let network = TcpStream::connect_timeout(&to, HANDSHAKE_MAX)
                    .map_err(|error| io::Error::new(error.kind(), format!("{to}: {error}")))?;
                tls.carry(&network, || Ok(plain))
            })
        }
        End::Destination => {
            let (listener, to) = (TcpListener::bind(at)?, to.to_owned());
            serve(listener.incoming(), move |network| {
                tls.carry(&network, || UnixStream::connect(&to))
            })
        }
    }
}

fn serve<S: Send + 'static>(
    incoming: impl Iterator<Item = io::Result<S>>,
    carry: impl Fn(S) -> io::Result<()> + Send + Sync + 'static,
) -> io::Result<()> {
    let carry = Arc::new(carry);
    for stream in incoming {
        let begun = stream.and_then(|stream| {
            // What is one too many is hung up on.
            if Arc::strong_count(&carry) > CONNECTIONS_MAX {
                return Err(io::Error::other("it has too many connections"));
            }
            let carry = Arc::clone(&carry);
            thread::Builder::new().spawn(move || carry(stream).unwrap_or_else(|error| say(&error)))
        });
        if let Err(error) = begun {
            say(&error);
            thread::sleep(ACCEPT_AGAIN);
        }
    }
    Ok(())
}

/// The process's log is what it writes there.
fn say(error: &io::Error) {
    eprintln!("{error}");
}

/// How one end encrypts.
enum Tls {
    Source(Arc<ClientConfig>),
    Destination(Arc<ServerConfig>),
}

impl Tls {
    fn new(key: &MigrationKey, end: End) -> Result<Self, Error> {
        let mut provider = default_provider();
        provider.cipher_suites = vec![
            cipher_suite::TLS13_AES_128_GCM_SHA256,
            cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ];
        let provider = Arc::new(provider);
        let [source, destination] =
            [End::Source, End::Destination].map(|end| pair(key, end).map(Arc::new));
        let (source, destination) = (source?, destination?);
        let only = |other: &CertifiedKey| {
            let key = other.end_entity_cert()?.clone().into_owned();
            Ok::<_, Error>(Arc::new(Only { key, provider: Arc::clone(&provider) }))
        };
        match end {
            End::Source => {
                let own = AlwaysResolvesClientRawPublicKeys::new(source);
                let mut config = ClientConfig::builder_with_provider(Arc::clone(&provider))
                    .with_protocol_versions(&[&TLS13])?
                    .dangerous()
                    .with_custom_certificate_verifier(only(&destination)?)
                    .with_client_cert_resolver(Arc::new(own));
                config.resumption = Resumption::disabled();
                config.enable_sni = false;
                Ok(Self::Source(Arc::new(config)))
            }
            End::Destination => {
                let own = AlwaysResolvesServerRawPublicKeys::new(destination);
                let mut config = ServerConfig::builder_with_provider(Arc::clone(&provider))
                    .with_protocol_versions(&[&TLS13])?
                    .with_client_cert_verifier(only(&source)?)
                    .with_cert_resolver(Arc::new(own));
                config.send_tls13_tickets = 0;
                Ok(Self::Destination(Arc::new(config)))
            }
        }
    }

    /// Until both directions have ended. QEMU is reached only when the other end has shown that it has the key.
    fn carry(
        &self,
        network: &TcpStream,
        plain: impl FnOnce() -> io::Result<UnixStream>,
    ) -> io::Result<()> {
        network.set_nodelay(true)?;
        let mut tls = match self {
            Self::Source(config) => {
                // Nobody looks at the name.
                let name = ServerName::try_from("migration").map_err(io::Error::other)?;
                let tls = ClientConnection::new(Arc::clone(config), name);
                Connection::from(tls.map_err(io::Error::other)?)
            }
            Self::Destination(config) => {
                ServerConnection::new(Arc::clone(config)).map_err(io::Error::other)?.into()
            }
        };
        let mut handshake = Handshake { network, until: Instant::now() + HANDSHAKE_MAX };
        while tls.is_handshaking() {
            tls.complete_io(&mut handshake)?;
        }
        network.set_read_timeout(None)?;
        network.set_write_timeout(None)?;
        // What is given to it is sent before it gets more.
        tls.set_buffer_limit(None);
        both_ways(&Mutex::new(tls), network, &plain()?)
    }
}

/// An end's pair of keys.
fn pair(key: &MigrationKey, end: End) -> Result<CertifiedKey, Error> {
    let mut der = [PKCS8, [0; 16], [0; 16]].concat();
    let made = hkdf::Salt::new(hkdf::HKDF_SHA256, CONTEXT).extract(key.hex.as_bytes());
    let name = [end.name().as_bytes()];
    let filled = made.expand(&name, hkdf::HKDF_SHA256).and_then(|made| made.fill(&mut der[16..]));
    filled.map_err(|_| Error::General("the key of the migration can't be used".to_owned()))?;
    let signs = any_eddsa_type(&PrivatePkcs8KeyDer::from(der))?;
    let public = signs.public_key().ok_or(Error::NoCertificatesPresented)?;
    Ok(CertifiedKey::new(vec![CertificateDer::from(public.as_ref().to_vec())], signs))
}

/// Takes this public key only.
#[derive(Debug)]
struct Only {
    key: CertificateDer<'static>,
    provider: Arc<CryptoProvider>,
}

impl Only {
    fn check(&self, shown: &CertificateDer<'_>) -> Result<(), Error> {
        let is_known = *shown == self.key;
        is_known.then_some(()).ok_or(CertificateError::UnknownIssuer.into())
    }
}

/// What a verifier of a server and one of a client have in common.
macro_rules! takes_ed25519 {
    () => {
        /// Only TLS 1.3 is spoken.
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(Error::General("TLS 1.2 is not spoken".to_owned()))
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            shown: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.check(shown)?;
            let key = SubjectPublicKeyInfoDer::from(shown.as_ref());
            let known = &self.provider.signature_verification_algorithms;
            verify_tls13_signature_with_raw_key(message, &key, signature, known)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            vec![SignatureScheme::ED25519]
        }

        fn requires_raw_public_keys(&self) -> bool {
            true
        }
    };
}

impl ServerCertVerifier for Only {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(shown).map(|()| ServerCertVerified::assertion())
    }

    takes_ed25519!();
}

impl ClientCertVerifier for Only {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        shown: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(shown).map(|()| ClientCertVerified::assertion())
    }

    takes_ed25519!();
}

/// A connection whose handshake has a deadline, however slowly its bytes come.
struct Handshake<'a> {
    network: &'a TcpStream,
    until: Instant,
}

impl Handshake<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(Some(left)).ok_or_else(late)
    }
}

fn late() -> io::Error {
    let why = format!("the other end's handshake took more than {} s", HANDSHAKE_MAX.as_secs());
    io::Error::new(ErrorKind::TimedOut, why)
}

/// A socket says so when its time is over.
fn or_late(error: io::Error) -> io::Error {
    if error.kind() == ErrorKind::WouldBlock { late() } else { error }
}

impl Read for Handshake<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.network.set_read_timeout(self.left()?)?;
        self.network.read(bytes).map_err(or_late)
    }
}

impl Write for Handshake<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.network.set_write_timeout(self.left()?)?;
        self.network.write(bytes).map_err(or_late)
    }

    /// What refuses the other end is several parts, of which all are to be sent.
    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.network.set_write_timeout(self.left()?)?;
        self.network.write_vectored(parts).map_err(or_late)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn both_ways(tls: &Mutex<Connection>, network: &TcpStream, plain: &UnixStream) -> io::Result<()> {
    // The other direction's error only follows from it.
    let first = OnceLock::new();
    let ended = |end: io::Result<()>| {
        if let Err(error) = end {
            first.get_or_init(|| error);
            // They may be closed already.
            let _ = network.shutdown(Shutdown::Both);
            let _ = plain.shutdown(Shutdown::Both);
        }
    };
    thread::scope(|scope| {
        let out = thread::Builder::new();
        out.spawn_scoped(scope, || ended(outwards(tls, network, plain)))?;
        ended(inwards(tls, network, plain));
        Ok::<(), io::Error>(())
    })?;
    first.into_inner().map_or(Ok(()), Err)
}

fn locked(tls: &Mutex<Connection>) -> MutexGuard<'_, Connection> {
    tls.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What QEMU writes.
fn outwards(
    tls: &Mutex<Connection>,
    mut network: &TcpStream,
    mut plain: &UnixStream,
) -> io::Result<()> {
    let (mut clear, mut sealed) = (vec![0; STEP_BYTES], Vec::with_capacity(STEP_BYTES));
    loop {
        let count = plain.read(&mut clear)?;
        sealed.clear();
        {
            let mut tls = locked(tls);
            match count {
                0 => tls.send_close_notify(),
                _ => tls.writer().write_all(&clear[..count])?,
            }
            while tls.wants_write() {
                tls.write_tls(&mut sealed)?;
            }
        }
        network.write_all(&sealed)?;
        if count == 0 {
            return network.shutdown(Shutdown::Write);
        }
    }
}

/// What the other end's QEMU writes.
fn inwards(
    tls: &Mutex<Connection>,
    mut network: &TcpStream,
    mut plain: &UnixStream,
) -> io::Result<()> {
    // What one step brings is no longer than this step and a record.
    let (mut sealed, mut clear) = (vec![0; STEP_BYTES], vec![0; 2 * STEP_BYTES]);
    // With the handshake's last bytes the first ones may have come.
    let mut come = 0;
    loop {
        let (mut rest, mut count) = (&sealed[..come], 0);
        let has_ended = {
            let mut tls = locked(tls);
            loop {
                let state = tls.process_new_packets().map_err(io::Error::other)?;
                let end = count + state.plaintext_bytes_to_read();
                tls.reader().read_exact(&mut clear[count..end])?;
                count = end;
                if rest.is_empty() || state.peer_has_closed() {
                    break state.peer_has_closed();
                }
                tls.read_tls(&mut rest)?;
            }
        };
        plain.write_all(&clear[..count])?;
        if has_ended {
            return plain.shutdown(Shutdown::Write);
        }
        come = network.read(&mut sealed)?;
        if come == 0 {
            let why = "the other end has hung up in the middle";
            return Err(io::Error::new(ErrorKind::UnexpectedEof, why));
        }
    }
}

#[cfg(test)]
mod tests;
