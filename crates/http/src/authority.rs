//! The cluster's certificate authority: it makes the certificates by which the daemons know each other.
//!
//! A certificate names its owner as a URI ([`PeerIdentity`]), the owner's IP addresses, and in its serial number the
//! time of its issue, so that revoking what an owner has got so far needs no list of certificates.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use perigee_model::{HostId, Problem};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SanType, SerialNumber,
    SignatureAlgorithm, date_time_ymd,
};
use tokio_rustls::rustls::pki_types::ServerName;

use crate::certificate::{
    CA_FILE, CERTIFICATE_LIFE, Certified, Credentials, PeerIdentity, certificates, fingerprint,
    hex, now_ms, of_hex, since_1970,
};
use crate::files::{keep_entry, read, read_private, write_private};

/// The authority's key, beside its certificate. Whoever has it can be anybody in the cluster.
pub const CA_KEY_FILE: &str = "ca.key";

const AUTHORITY_LIFE: Duration = Duration::from_secs(20 * 365 * 24 * 3600);
/// How much the clocks of two hosts may differ.
const CLOCK_SKEW_MAX: Duration = Duration::from_secs(3600);

/// The length of a point of the curve P-256, not compressed.
const PUBLIC_KEY_BYTES: usize = 65;
const NOT_COMPRESSED: u8 = 4;

/// The directory, in the authority's, of hosts that were enrolled without a token.
const MADE_HERE: &str = "hosts";

/// The authority of one cluster.
pub struct Authority {
    dir: PathBuf,
    ca_pem: String,
    fingerprint: String,
    issuer: Issuer<'static, KeyPair>,
}

/// The public half of a key for a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublicKey(Vec<u8>);

/// A key that a daemon makes for its own certificate. Its private half never leaves the host.
pub struct NewKey(KeyPair);

fn failed(error: impl std::fmt::Display) -> Problem {
    Problem::internal("can't make a certificate", error)
}

impl NewKey {
    /// # Errors
    /// When the system gives no random numbers.
    pub fn generate() -> Result<Self, Problem> {
        KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map(Self).map_err(failed)
    }

    /// What the authority is given.
    pub fn public(&self) -> PublicKey {
        PublicKey(self.0.public_key_raw().to_vec())
    }

    /// What a daemon keeps: its new certificate and this key.
    pub fn credentials(&self, certificate_pem: &str, ca_pem: &str) -> Credentials {
        let identity = format!("{certificate_pem}{}", self.0.serialize_pem());
        Credentials { ca: ca_pem.as_bytes().to_vec(), identity: identity.into_bytes() }
    }
}

impl PublicKey {
    /// # Errors
    /// When the text is not the hexadecimal form of a key.
    pub fn from_hex(text: &str) -> Result<Self, Problem> {
        let bytes = of_hex(text).filter(|b| b.len() == PUBLIC_KEY_BYTES);
        let bytes = bytes.filter(|b| b[0] == NOT_COMPRESSED);
        bytes.map(Self).ok_or_else(|| {
            Problem::invalid(
                "can't make a certificate",
                "the public key is not one of P-256, in hex",
            )
        })
    }

    /// The hexadecimal form.
    pub fn to_hex(&self) -> String {
        hex(&self.0)
    }
}

impl PublicKeyData for PublicKey {
    fn der_bytes(&self) -> &[u8] {
        &self.0
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

impl Authority {
    /// The authority in a directory. It is made if there is neither a directory nor a file in it.
    ///
    /// # Errors
    /// When the files can't be read or written, do not belong together, or other users may read the key.
    pub fn open(dir: &Path) -> Result<Self, Problem> {
        if !dir.join(CA_FILE).exists() && !dir.join(CA_KEY_FILE).exists() {
            Self::make(dir)?;
        }
        let unusable = |why: &dyn std::fmt::Display| {
            Problem::invalid(format!("can't use the authority in {}", dir.display()), why).next(
                "restore both files from a backup; or remove the directory for a new authority, which all hosts have to join",
            )
        };
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).map_err(|e| unusable(&e));
        let ca_pem = text(read(&dir.join(CA_FILE))?)?;
        let key_pem = text(read_private(&dir.join(CA_KEY_FILE))?)?;
        let key = KeyPair::from_pem(&key_pem).map_err(|e| unusable(&e))?;
        let der = certificates(ca_pem.as_bytes()).map_err(|e| unusable(&e))?;
        let public = key.public_key_raw();
        if !der[0].windows(public.len()).any(|part| part == public) {
            return Err(unusable(&"the key is not the one of the certificate"));
        }
        let fingerprint = fingerprint(&der[0]);
        let issuer = Issuer::new(params(&key), key);
        Ok(Self { dir: dir.to_owned(), ca_pem, fingerprint, issuer })
    }

    /// The fingerprint of the authority in a directory, for whoever may not use its key.
    ///
    /// # Errors
    /// When there is none, or its certificate can't be read.
    pub fn fingerprint_in(dir: &Path) -> Result<String, Problem> {
        let der = certificates(&read(&dir.join(CA_FILE))?);
        let der = der.map_err(|why| {
            Problem::invalid(format!("can't use the authority in {}", dir.display()), why)
        })?;
        Ok(fingerprint(&der[0]))
    }

    /// Makes both files under another name, so that two processes that begin together use one authority.
    fn make(dir: &Path) -> Result<(), Problem> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(failed)?;
        let ca = params(&key).self_signed(&key).map_err(failed)?;
        let new = dir.with_extension(format!("new-{}", uuid::Uuid::new_v4().simple()));
        write_private(&new.join(CA_FILE), ca.pem().as_bytes())?;
        write_private(&new.join(CA_KEY_FILE), key.serialize_pem().as_bytes())?;
        if let Err(error) = std::fs::rename(&new, dir) {
            let removed = std::fs::remove_dir_all(&new);
            if !dir.join(CA_KEY_FILE).exists() {
                let what = format!("can't make the authority in {}", dir.display());
                return Err(Problem::invalid(what, error));
            }
            return removed.map_err(failed);
        }
        keep_entry(dir).map_err(failed)?;
        tracing::info!(dir = %dir.display(), "made the cluster's certificate authority");
        Ok(())
    }

    pub(crate) fn key(&self) -> &KeyPair {
        self.issuer.key()
    }

    /// The authority's certificate.
    pub fn ca_pem(&self) -> &str {
        &self.ca_pem
    }

    /// The SHA-256 of the authority's certificate, in hexadecimal.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// A certificate, as PEM. The addresses are those at which its owner may be called. The certificate counts from
    /// `now`. `issued_ms` is compared with what is revoked, and is later than `now` if the clock was set back.
    ///
    /// # Errors
    /// `Internal` when it can't be signed.
    pub fn issue(
        &self,
        to: &PeerIdentity,
        addresses: &[IpAddr],
        key: &PublicKey,
        now: SystemTime,
        issued_ms: u64,
    ) -> Result<String, Problem> {
        let called = addresses.iter().map(|address| SanType::IpAddress(*address)).collect();
        self.issue_called(to, called, key, now, issued_ms)
    }

    fn issue_called(
        &self,
        to: &PeerIdentity,
        called: Vec<SanType>,
        key: &PublicKey,
        now: SystemTime,
        issued_ms: u64,
    ) -> Result<String, Problem> {
        let now = since_1970(now);
        let epoch = date_time_ymd(1970, 1, 1);
        let uri = to.to_string().try_into().map_err(failed)?;
        let mut params = CertificateParams::default();
        params.subject_alt_names = [SanType::URI(uri)].into_iter().chain(called).collect();
        params.distinguished_name = named(&common_name(to));
        params.serial_number = Some(SerialNumber::from_slice(&Certified::serial(issued_ms)));
        params.not_before = epoch + now.saturating_sub(CLOCK_SKEW_MAX);
        params.not_after = epoch + now + CERTIFICATE_LIFE;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        Ok(params.signed_by(key, &self.issuer).map_err(failed)?.pem())
    }

    /// A new key and a certificate for it.
    ///
    /// # Errors
    /// As [`Authority::issue`].
    pub fn credentials(
        &self,
        to: &PeerIdentity,
        addresses: &[IpAddr],
    ) -> Result<Credentials, Problem> {
        let key = NewKey::generate()?;
        let certificate = self.issue(to, addresses, &key.public(), SystemTime::now(), now_ms())?;
        Ok(key.credentials(&certificate, &self.ca_pem))
    }

    /// A new key and a certificate for the controller. `called` are the addresses and DNS names at which people and
    /// programs call it; hosts know it by what it is.
    ///
    /// # Errors
    /// `Invalid` for what is neither; else as [`Authority::issue`].
    pub fn controller(&self, called: &[String]) -> Result<Credentials, Problem> {
        let name = |text: &String| match ServerName::try_from(text.as_str()) {
            Ok(ServerName::IpAddress(address)) => Ok(SanType::IpAddress(IpAddr::from(address))),
            Ok(_) => text.as_str().try_into().map(SanType::DnsName).map_err(failed),
            Err(error) => {
                let what = format!("can't use the name {text:?} for the controller");
                Err(Problem::invalid(what, error))
            }
        };
        let called = called.iter().map(name).collect::<Result<_, _>>()?;
        let (key, to) = (NewKey::generate()?, PeerIdentity::Controller);
        let pem = self.issue_called(&to, called, &key.public(), SystemTime::now(), now_ms())?;
        Ok(key.credentials(&pem, &self.ca_pem))
    }

    /// What a host needs that is enrolled where the authority is, without a token. The controller knows of the host from
    /// its next start on.
    ///
    /// # Errors
    /// As [`Authority::issue`]; also when it can't be noted.
    pub fn enrol(&self, host: &HostId, addresses: &[IpAddr]) -> Result<Credentials, Problem> {
        let made = self.credentials(&PeerIdentity::Host(host.clone()), addresses)?;
        let note = serde_json::to_vec(addresses).map_err(failed)?;
        write_private(&self.dir.join(MADE_HERE).join(host.as_str()), &note)?;
        Ok(made)
    }

    /// The hosts that were enrolled here, with their addresses.
    ///
    /// # Errors
    /// When a note can't be read.
    pub fn enrolled_here(&self) -> Result<Vec<(HostId, Vec<IpAddr>)>, Problem> {
        let dir = self.dir.join(MADE_HERE);
        if !dir.exists() {
            return Ok(Vec::new());
        }
        let unusable = |e: &dyn std::fmt::Display| {
            Problem::invalid(format!("can't use the list of hosts in {}", dir.display()), e)
                .next("remove what is not a host's name there")
        };
        let mut all = Vec::new();
        for entry in std::fs::read_dir(&dir).map_err(|e| unusable(&e))? {
            let entry = entry.map_err(|e| unusable(&e))?;
            // A note that was being written when the machine stopped has a name that is none of a host.
            let Ok(host) = entry.file_name().to_string_lossy().parse() else { continue };
            let note = read(&entry.path())?;
            all.push((host, serde_json::from_slice(&note).map_err(|e| unusable(&e))?));
        }
        Ok(all)
    }
}

/// NBD servers know their clients by this name, if they have an access list.
fn common_name(of: &PeerIdentity) -> String {
    match of {
        PeerIdentity::Host(host) => host.to_string(),
        PeerIdentity::Controller | PeerIdentity::Operator => of.to_string(),
    }
}

fn named(common_name: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::OrganizationName, "Perigee");
    name.push(DnType::CommonName, common_name);
    name
}

/// Those of the authority's own certificate. They follow from its key, so that only the key has to be kept to go on
/// issuing.
fn params(key: &KeyPair) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let short = &fingerprint(key.public_key_raw())[..16];
    params.distinguished_name = named(&format!("cluster {short}"));
    let (epoch, now) = (date_time_ymd(1970, 1, 1), since_1970(SystemTime::now()));
    params.not_before = epoch + now.saturating_sub(CLOCK_SKEW_MAX);
    params.not_after = epoch + now + AUTHORITY_LIFE;
    params
}
