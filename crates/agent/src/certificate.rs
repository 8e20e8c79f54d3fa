//! Keeps the host's certificate, and the list of revoked ones, up to date in the host's identity directory, where the
//! volume server finds them too.

use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_http::authority::NewKey;
use perigee_http::certificate::Credentials;
use perigee_http::certificate::{CERTIFICATE_LIFE, now_ms};
use perigee_http::identity::REVOKED_FILE;
use perigee_http::trust::{Revoked, list_id};
use perigee_http::{Client, Identity, write_private};
use perigee_model::enrol::{Enrolled, RenewCertificate};
use perigee_model::{HostId, Problem};

use crate::config::Config;
use crate::register;

/// How often the controller is asked which certificates are revoked.
const LOOK_EVERY: Duration = Duration::from_secs(30);

/// How long the whole list may take, which may have grown for years.
const LIST_MAX: Duration = LOOK_EVERY;

/// The least time between two tries to renew the certificate.
const RENEWAL_PAUSE: Duration = Duration::from_secs(3600);

/// It does not end.
pub async fn keep(config: &Config) {
    let Some(identity) = config.network.identity() else { return std::future::pending().await };
    let follow = Arc::clone(identity).follow();
    tokio::join!(follow, ask_controller(config, identity));
}

async fn ask_controller(config: &Config, identity: &Identity) {
    let client = |url| register::client(url, &config.network, LIST_MAX);
    let client = config.controller.as_deref().map(client);
    // An address that can't be used is the heartbeat's problem.
    let Some(Ok(client)) = client else { return };
    let (host, told, known, tried, unsaved) = (&config.host, None, None, None, None);
    let mut keeper = Keeper { client, host, identity, told, known, tried, unsaved };
    let mut said = None;
    loop {
        let failed = keeper.look().await.err().map(|problem| problem.to_string());
        if failed != said {
            if let Some(problem) = &failed {
                tracing::warn!(%problem, "can't bring the host's certificate up to date");
            }
            said = failed;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

struct Keeper<'a> {
    client: Client,
    host: &'a HostId,
    identity: &'a Identity,
    /// Which list of revoked certificates the controller has sent last.
    told: Option<String>,
    /// The list that is in the directory.
    known: Option<Revoked>,
    /// When it was last tried to renew the certificate.
    tried: Option<Instant>,
    /// The one that is in use, if it could not be written.
    unsaved: Option<Credentials>,
}

impl Keeper<'_> {
    async fn look(&mut self) -> Result<(), Problem> {
        let known = self.told.iter().map(|told| format!("?known={told}"));
        let path = format!("/v1/revoked{}", known.collect::<String>());
        let news: Revoked = self.client.get(&path).await?;
        if !news.is_empty() {
            self.told = Some(list_id(&news));
        }
        let revoked = self.identity.revoke(news);
        // The certificate is renewed also where nothing can be written at present.
        let mut kept = Ok(());
        if self.known.as_ref() != Some(&revoked) {
            kept = self.keep_revoked(&revoked);
            self.known = kept.is_ok().then_some(revoked);
        }
        if let Some(new) = &self.unsaved {
            kept = kept.and(self.save(new));
            if kept.is_ok() {
                self.unsaved = None;
            }
        }
        let tried_lately = self.tried.is_some_and(|tried| tried.elapsed() < RENEWAL_PAUSE);
        if !tried_lately && is_due(self.identity.own().issued_ms, now_ms()) {
            self.tried = Some(Instant::now());
            let new = self.renew().await?;
            if let Err(problem) = self.save(&new) {
                (kept, self.unsaved) = (Err(problem), Some(new));
            }
        }
        kept
    }

    fn save(&self, new: &Credentials) -> Result<(), Problem> {
        self.identity.dir().map_or(Ok(()), |dir| new.save(dir))
    }

    fn keep_revoked(&self, revoked: &Revoked) -> Result<(), Problem> {
        let Some(dir) = self.identity.dir() else { return Ok(()) };
        let what = "can't keep the list of revoked certificates";
        let text = serde_json::to_vec(revoked).map_err(|e| Problem::internal(what, e))?;
        write_private(&dir.join(REVOKED_FILE), &text)
    }

    async fn renew(&self) -> Result<Credentials, Problem> {
        let key = NewKey::generate()?;
        let ask = RenewCertificate { public_key: key.public().to_hex() };
        let path = format!("/v1/hosts/{}/certificate", self.host);
        let new: Enrolled = self.client.post(&path, &ask).await?;
        let new = key.credentials(&new.certificate, &new.ca);
        // What can't be used does not replace what is in the directory: with it the host could not ask for another one.
        self.identity.renew(&new)?;
        tracing::info!(host = %self.host, "the host has a new certificate");
        Ok(new)
    }
}

/// After a third of its life; also if one of the two clocks was wrong by as much.
fn is_due(issued_ms: u64, now_ms: u64) -> bool {
    u128::from(now_ms.abs_diff(issued_ms)) * 3 > CERTIFICATE_LIFE.as_millis()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_renewed_after_a_third_of_its_life() {
        const DAY_MS: u64 = 24 * 3600 * 1000;
        let issued_ms = 1_800_000_000_000;
        assert!(!is_due(issued_ms, issued_ms + 9 * DAY_MS));
        assert!(is_due(issued_ms, issued_ms + 11 * DAY_MS));
        assert!(!is_due(issued_ms, issued_ms - DAY_MS), "the host's clock is slow");
        assert!(is_due(issued_ms, issued_ms - 11 * DAY_MS), "the controller's clock was fast");
    }
}
