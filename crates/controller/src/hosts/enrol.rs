//! Which hosts belong to the cluster: tokens with which they join, their certificates, and revoking these.
//!
//! A token is good for one host and one time. Only the SHA-256 of its secret is kept. It is removed before the
//! certificate is made, so a host whose answer was lost needs another token.
//!
//! A certificate carries the time of its issue, and is revoked if this is not later than the time of a revocation.
//! So that this holds after the clock was set back, both times are later than all earlier ones of the same identity.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use perigee_http::authority::PublicKey;
use perigee_http::certificate::{fingerprint, hex, now_ms};
use perigee_http::identity::{self, REVOKED_FILE};
use perigee_http::trust::{Revoked, list_id};
use perigee_http::{PeerIdentity, authority_of, write_private};
use perigee_model::enrol::{Enrol, Enrolled, HostRevoked, JoinToken};
use perigee_model::limits::HOST_ADDRESSES;
use perigee_model::network::TunnelEnd;
use perigee_model::vm::HostAddresses;
use perigee_model::{HostId, Problem};
use serde::{Deserialize, Serialize};

use crate::cluster::tasks::Task;
use crate::cluster::{Cluster, HostLink};

/// How long a host has to join.
const TOKEN_LIFE: Duration = Duration::from_secs(3600);

const TOKENS: &str = "join_tokens/";
const ENROLLED: &str = "enrolled/";
const REVOKED: &str = "revoked/";

/// A token that was not used yet. The key is its host's name: a new one replaces it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Token {
    secret_sha256: String,
    /// When it was made, and until when it counts, by the system's clock; Unix time.
    #[serde(default)]
    made_ms: u64,
    until_ms: u64,
    /// The only address for which it is good; `None`: for every one.
    address: Option<IpAddr>,
}

/// A host that has a certificate.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EnrolledHost {
    host: HostId,
    /// The addresses at which its certificate counts.
    addresses: Vec<IpAddr>,
    /// The time of issue in its newest certificate.
    issued_ms: u64,
}

/// The certificates of an identity that do not count any more.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RevokedIdentity {
    identity: String,
    /// Those that were issued until then.
    until_ms: u64,
}

fn key(prefix: &str, of: impl std::fmt::Display) -> String {
    format!("{prefix}{of}")
}

impl Token {
    fn new(secret: &str, now_ms: u64, life: Duration) -> Self {
        let life_ms = u64::try_from(life.min(TOKEN_LIFE).as_millis()).unwrap_or(u64::MAX);
        let secret_sha256 = fingerprint(secret.as_bytes());
        Self { secret_sha256, made_ms: now_ms, until_ms: now_ms + life_ms, address: None }
    }

    /// Both sides of the comparison are hashes, so the time that it takes tells nothing about the secret. `age_ms` is the time that was seen to
    /// pass: a clock that is set back makes no token count again. The system's clock counts the time for which the machine was off.
    fn counts(&self, secret: &str, now_ms: u64, age_ms: u64) -> bool {
        let life_ms = self.until_ms.saturating_sub(self.made_ms);
        self.is(secret) && now_ms < self.until_ms && age_ms < life_ms
    }

    fn is(&self, secret: &str) -> bool {
        self.secret_sha256 == fingerprint(secret.as_bytes())
    }
}

/// With `--insecure` anybody could ask for any host's certificate.
fn has_certificates(cluster: &Cluster, what: &str) -> Result<(), Problem> {
    if cluster.network.identity().is_some() {
        return Ok(());
    }
    let why = "this controller runs with --insecure, and gives no certificates";
    Err(Problem::forbidden(what, why).next("start the controller without --insecure"))
}

/// Makes a token with which the host joins.
///
/// # Errors
/// `Invalid` when the controller's address is not one for a host.
pub async fn token(
    cluster: &Cluster,
    host: HostId,
    controller_url: Option<String>,
) -> Result<JoinToken, Problem> {
    let what = format!("can't make a token for host {host}");
    has_certificates(cluster, &what)?;
    let known = controller_url.or_else(|| cluster.settings.own_url.clone());
    let controller_url = known.ok_or_else(|| {
        let why = "the controller listens at no address that other machines reach";
        Problem::invalid(&what, why).next(format!(
            "name the address at which the host reaches the controller: perigee host token {host} --controller https://HOST:PORT"
        ))
    })?;
    if !controller_url.starts_with("https://") || authority_of(&controller_url).is_none() {
        let why = format!("{controller_url:?} is not https://HOST:PORT");
        return Err(Problem::invalid(what, why)
            .next(format!("name the address at which the host reaches the controller: perigee host token {host} --controller https://HOST:PORT")));
    }
    token_of(cluster, host, new_secret(), controller_url, TOKEN_LIFE).await
}

/// A secret for a token, which nobody can guess.
pub fn new_secret() -> String {
    let random = [uuid::Uuid::new_v4(), uuid::Uuid::new_v4()].map(|id| *id.as_bytes());
    hex(&random.concat())
}

/// The token with this secret, which counts for so long from now on, and an hour at most. It replaces an earlier one of its host.
///
/// # Errors
/// When the store can't be used.
pub async fn token_of(
    cluster: &Cluster,
    host: HostId,
    secret: String,
    controller_url: String,
    life: Duration,
) -> Result<JoinToken, Problem> {
    let _turn = cluster.enrolling.lock().await;
    cluster.records.put(&key(TOKENS, &host), &Token::new(&secret, now_ms(), life)).await?;
    tracing::info!(%host, "made a token for a host to join");
    let fingerprint = cluster.authority.fingerprint().to_owned();
    Ok(JoinToken { host, secret, fingerprint, controller_url })
}

/// From now on the host's token, if it was not used yet, is good for a host with this address only. A text that is no address changes nothing.
///
/// # Errors
/// When the store can't be used.
pub async fn bind_token(cluster: &Cluster, host: &HostId, address: &str) -> Result<(), Problem> {
    let Ok(address) = address.parse::<IpAddr>() else { return Ok(()) };
    let _turn = cluster.enrolling.lock().await;
    if let Some(token) = cluster.records.read::<Token>(&key(TOKENS, host)).await? {
        let bound = Token { address: Some(address.to_canonical()), ..token };
        cluster.records.put(&key(TOKENS, host), &bound).await?;
    }
    Ok(())
}

/// The token of this host, if it counts with this secret.
async fn good_token(cluster: &Cluster, host: &HostId, secret: &str) -> Result<Token, Problem> {
    let token: Option<Token> = cluster.records.read(&key(TOKENS, host)).await?;
    let is_known = token.as_ref().is_some_and(|token| token.is(secret));
    let counts =
        |token: &Token| token.counts(secret, now_ms(), cluster.clock.age_ms(token.made_ms));
    if let Some(token) = token.filter(counts) {
        return Ok(token);
    }
    if let Some(count) = cluster.bad_joins.happened() {
        tracing::warn!(%host, count, "a host can't join: its token does not count");
    }
    let why = match is_known {
        true => "by the controller's clock, the token's time is over",
        false => "the token is wrong, used, or older than its time",
    };
    Err(Problem::forbidden(format!("can't enrol host {host}"), why)
        .next(format!("make one: perigee host token {host}")))
}

/// Whether a host could join with this secret now, and the only address at which it could, if there is one. The token stays good.
///
/// # Errors
/// `Forbidden` when the token does not count.
pub async fn check_token(
    cluster: &Cluster,
    host: &HostId,
    secret: &str,
) -> Result<Option<IpAddr>, Problem> {
    has_certificates(cluster, &format!("can't enrol host {host}"))?;
    Ok(good_token(cluster, host, secret).await?.address)
}

/// The addresses at which the host's certificate counts; `None` if it has none.
///
/// # Errors
/// When the store can't be used.
pub async fn addresses(cluster: &Cluster, host: &HostId) -> Result<Option<Vec<IpAddr>>, Problem> {
    let enrolled: Option<EnrolledHost> = cluster.records.read(&key(ENROLLED, host)).await?;
    Ok(enrolled.map(|enrolled| enrolled.addresses))
}

/// A host joins with a token, and gets its first certificate.
///
/// # Errors
/// `Forbidden` when the token does not count; `Conflict` when another host has one of the addresses.
pub async fn enrol(cluster: &Cluster, ask: Enrol) -> Result<Enrolled, Problem> {
    let host = &ask.host;
    let what = format!("can't enrol host {host}");
    has_certificates(cluster, &what)?;
    HOST_ADDRESSES.check(ask.addresses.len()).map_err(|e| e.problem(&what))?;
    let public = PublicKey::from_hex(&ask.public_key)?;
    let addresses: Vec<IpAddr> = ask.addresses.iter().map(IpAddr::to_canonical).collect();
    let _turn = cluster.enrolling.lock().await;
    let token = good_token(cluster, host, &ask.secret).await?;
    if let Some(only) = token.address.filter(|a| !addresses.contains(a)) {
        tracing::warn!(%host, ?addresses, "a host can't join: its token is for {only}");
        let why = format!("its token is for a host with the address {only}");
        return Err(Problem::forbidden(what, why).next("join with that address: --address"));
    }
    let others: Vec<EnrolledHost> = cluster.records.list(ENROLLED).await?;
    for other in others.iter().filter(|other| other.host != *host) {
        if let Some(taken) = addresses.iter().find(|a| other.addresses.contains(a)) {
            let why = format!("host {} has the address {taken}", other.host);
            return Err(Problem::conflict(what, why).next(format!(
                "if that host is gone for good: perigee host revoke {}",
                other.host
            )));
        }
    }
    cluster.records.remove(&key(TOKENS, host)).await?;
    if others.iter().any(|known| known.host == *host) {
        // Whoever had joined as this host may not be the one who joins now.
        revoke(cluster, &PeerIdentity::Host(host.clone())).await?;
    }
    tracing::info!(%host, ?addresses, "a host joins");
    issue(cluster, host, addresses, &public).await
}

/// A host that has a certificate asks for the next one. The caller has checked that it is this host.
///
/// # Errors
/// `Forbidden` when the host is not enrolled, or was revoked.
pub async fn renew(cluster: &Cluster, host: &HostId, key_hex: &str) -> Result<Enrolled, Problem> {
    let what = format!("can't renew the certificate of host {host}");
    has_certificates(cluster, &what)?;
    let public = PublicKey::from_hex(key_hex)?;
    let _turn = cluster.enrolling.lock().await;
    let enrolled: Option<EnrolledHost> = cluster.records.read(&key(ENROLLED, host)).await?;
    let enrolled = enrolled.ok_or_else(|| {
        let why = "the controller does not know that it has joined";
        Problem::forbidden(what, why).next(format!("let it join again: perigee host token {host}"))
    })?;
    tracing::info!(%host, "a host renews its certificate");
    issue(cluster, host, enrolled.addresses, &public).await
}

/// Takes note of hosts that were enrolled where the authority is, so that they get their next certificates. A host that
/// was revoked has to join with a token.
///
/// # Errors
/// When the store or the authority's directory can't be used.
pub async fn know_enrolled_here(cluster: &Cluster) -> Result<(), Problem> {
    let _turn = cluster.enrolling.lock().await;
    let revoked = revoked(cluster).await?;
    for (host, addresses) in cluster.authority.enrolled_here()? {
        let enrolled: Option<EnrolledHost> = cluster.records.read(&key(ENROLLED, &host)).await?;
        let identity = PeerIdentity::Host(host.clone()).to_string();
        if enrolled.is_none() && !revoked.contains_key(&identity) {
            tracing::info!(%host, ?addresses, "a host was enrolled here");
            let new = EnrolledHost { host, addresses, issued_ms: now_ms() };
            cluster.records.put(&key(ENROLLED, &new.host), &new).await?;
        }
    }
    Ok(())
}

/// The caller has its turn at enrolling.
async fn issue(
    cluster: &Cluster,
    host: &HostId,
    addresses: Vec<IpAddr>,
    public: &PublicKey,
) -> Result<Enrolled, Problem> {
    let identity = PeerIdentity::Host(host.clone());
    let issued_ms = now_ms().max(last_ms(cluster, &identity).await?.saturating_add(1));
    let certificate =
        cluster.authority.issue(&identity, &addresses, public, SystemTime::now(), issued_ms)?;
    let enrolled = EnrolledHost { host: host.clone(), addresses, issued_ms };
    cluster.records.put(&key(ENROLLED, host), &enrolled).await?;
    Ok(Enrolled { certificate, ca: cluster.authority.ca_pem().to_owned() })
}

/// The latest time that was given to a certificate of this identity, or to its revocation.
async fn last_ms(cluster: &Cluster, of: &PeerIdentity) -> Result<u64, Problem> {
    let revoked_ms = revoked(cluster).await?.remove(&of.to_string()).unwrap_or(0);
    let enrolled: Option<EnrolledHost> = match of {
        PeerIdentity::Host(host) => cluster.records.read(&key(ENROLLED, host)).await?,
        PeerIdentity::Controller | PeerIdentity::Operator => None,
    };
    Ok(enrolled.map_or(0, |enrolled| enrolled.issued_ms).max(revoked_ms))
}

/// The certificates that the host has do not count any more. It may join again with a new token.
///
/// # Errors
/// When the store can't be used.
pub async fn revoke_host(cluster: &Cluster, host: HostId) -> Result<HostRevoked, Problem> {
    let _turn = cluster.enrolling.lock().await;
    let enrolled: Option<EnrolledHost> = cluster.records.read(&key(ENROLLED, &host)).await?;
    revoke(cluster, &PeerIdentity::Host(host.clone())).await?;
    cluster.records.remove(&key(ENROLLED, &host)).await?;
    cluster.records.remove(&key(TOKENS, &host)).await?;
    Ok(HostRevoked { was_enrolled: enrolled.is_some() })
}

/// No host joins under this name any more, unless one has registered under it: its token does not count, nor does a certificate with which nobody
/// has registered. Returns whether no such host is in the cluster.
///
/// # Errors
/// When the store can't be used.
pub async fn shut_out(cluster: &Cluster, host: &HostId) -> Result<bool, Problem> {
    let _turn = cluster.enrolling.lock().await;
    cluster.records.remove(&key(TOKENS, host)).await?;
    if cluster.hosts.get(host).is_ok() {
        return Ok(false);
    }
    let enrolled: Option<EnrolledHost> = cluster.records.read(&key(ENROLLED, host)).await?;
    if enrolled.is_some() {
        revoke(cluster, &PeerIdentity::Host(host.clone())).await?;
        cluster.records.remove(&key(ENROLLED, host)).await?;
    }
    Ok(true)
}

/// The certificates that operators have do not count any more.
///
/// # Errors
/// When the store can't be used.
pub async fn revoke_operators(cluster: &Cluster) -> Result<(), Problem> {
    let _turn = cluster.enrolling.lock().await;
    revoke(cluster, &PeerIdentity::Operator).await
}

async fn revoke(cluster: &Cluster, identity: &PeerIdentity) -> Result<(), Problem> {
    let until_ms = now_ms().max(last_ms(cluster, identity).await?);
    let revoked = RevokedIdentity { identity: identity.to_string(), until_ms };
    cluster.records.put(&key(REVOKED, identity), &revoked).await?;
    tracing::warn!(%identity, "certificates are revoked");
    know_revoked(cluster).await
}

/// What every daemon has to know about revoked certificates.
///
/// # Errors
/// When the store can't be used.
pub async fn revoked(cluster: &Cluster) -> Result<Revoked, Problem> {
    let all: Vec<RevokedIdentity> = cluster.records.list(REVOKED).await?;
    let all = all.into_iter().map(|revoked| (revoked.identity, revoked.until_ms));
    let all: Revoked = all.collect();
    // The controller's own list has also what a store that was lost or set back knew.
    Ok(cluster.network.identity().map_or(all.clone(), |identity| identity.revoke(all)))
}

/// The same for whoever knows the list with this id: nothing if that is still the list. The list grows with each name that a
/// host ever had, and every agent asks often.
///
/// # Errors
/// When the store can't be used.
pub async fn revoked_but(cluster: &Cluster, known: Option<&str>) -> Result<Revoked, Problem> {
    let all = match cluster.network.identity() {
        // It has what the store has.
        Some(identity) => identity.revoke(Revoked::new()),
        None => revoked(cluster).await?,
    };
    let is_known = known.is_some_and(|known| known == list_id(&all));
    Ok(if is_known { Revoked::new() } else { all })
}

/// From now on the controller itself refuses what is revoked, also if it loses its store: the list is kept beside the
/// authority's key too.
///
/// # Errors
/// When the store or the list can't be used.
pub async fn know_revoked(cluster: &Cluster) -> Result<(), Problem> {
    let Some(identity) = cluster.network.identity() else { return Ok(()) };
    let dir = crate::store::directory::authority_dir(&cluster.state_dir);
    let kept = identity::read_revoked(&dir)?;
    identity.revoke(kept.clone());
    let all = revoked(cluster).await?;
    if all == kept {
        return Ok(());
    }
    let what = "can't keep the list of revoked certificates";
    let text = serde_json::to_vec(&all).map_err(|e| Problem::internal(what, e))?;
    write_private(&dir.join(REVOKED_FILE), &text)
}

/// Under TLS the others find a host only at addresses of its certificate.
///
/// # Errors
/// `Invalid` if the host reports another address.
pub async fn check_addresses(
    cluster: &Cluster,
    host: &HostId,
    reported: &HostAddresses,
) -> Result<(), Problem> {
    let tunnel = reported.tunnel.as_ref();
    tunnel.map_or(Ok(()), TunnelEnd::check)?;
    let key_of = |tunnel: Option<&TunnelEnd>| tunnel.map(|tunnel| tunnel.public_key.clone());
    let own = key_of(tunnel);
    let all = cluster.hosts.all();
    let same = |other: &&Arc<HostLink>| {
        other.id != *host && own.is_some() && key_of(other.addresses.tunnel.as_ref()) == own
    };
    if let Some(other) = all.iter().find(same) {
        let why = format!("host {} has the same key for its tunnels", other.id);
        return Err(Problem::conflict(format!("can't register host {host}"), why).next(
            "if it is a copy of that host, remove networks/tunnel.key in its agent's state directory, and start the agent again",
        ));
    }
    let enrolled: Option<EnrolledHost> = cluster.records.read(&key(ENROLLED, host)).await?;
    // Without a record the store was lost: what a host can't be called at shows later.
    let (Some(_), Some(enrolled)) = (cluster.network.identity(), enrolled) else { return Ok(()) };
    let daemons = [&reported.agent_url, &reported.volume_url, &reported.nbd_addr];
    for address in daemons.into_iter().chain(tunnel.map(|tunnel| &tunnel.endpoint)) {
        let authority = authority_of(address).unwrap_or(address);
        let ip = authority.rsplit_once(':').map_or(authority, |(ip, _)| ip);
        let ip = ip.trim_matches(['[', ']']).parse().ok().map(|ip: IpAddr| ip.to_canonical());
        if !ip.is_some_and(|ip| enrolled.addresses.contains(&ip)) {
            let known: Vec<String> = enrolled.addresses.iter().map(IpAddr::to_string).collect();
            let known = known.join(", ");
            let why = format!("{address} is not at an address of its certificate ({known})");
            return Err(Problem::invalid(format!("can't register host {host}"), why).next(format!(
                "start its daemons with one of these, or let it join again with --address: perigee host token {host}"
            )));
        }
    }
    Ok(())
}

/// The controller gives itself a new certificate from time to time. It does not end.
pub async fn keep_own_certificate(cluster: Arc<Cluster>, task: Task) {
    loop {
        tokio::time::sleep(cluster.timing.own_renewal).await;
        let renew = async {
            cluster.traffic.renew(&cluster.authority, &cluster.network)?;
            Ok("renewed the controller's own certificate".to_owned())
        };
        task.round(renew).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_counts_for_an_hour() {
        const HOUR_MS: u64 = 3600 * 1000;
        let now_ms = 1_800_000_000_000;
        let token = Token::new("secret", now_ms, TOKEN_LIFE);
        assert!(token.counts("secret", now_ms + HOUR_MS - 1, HOUR_MS - 1));
        assert!(!token.counts("secret", now_ms + HOUR_MS, 0), "the machine was off");
        assert!(!token.counts("secret", now_ms, HOUR_MS), "the clock was set back");
        assert!(!token.counts("another", now_ms, 0));
    }
}
