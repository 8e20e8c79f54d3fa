//! What another host may do here because the controller has allowed it: [`perigee_model::grant`].

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use perigee_http::{Certified, Failure, Peer, PeerIdentity};
use perigee_model::grant::{Allowed, GRANT_HEADER, Grant, SignedGrant};
use perigee_model::{HostId, Problem};

use super::Control;

/// What the sender of a request may do. Whether it may send such a request at all is decided before: [`super::callers`].
pub enum Granted {
    /// It is the controller, or nobody has certificates.
    Everything,
    /// Another host.
    To(HostId, Result<Grant, String>),
}

impl Granted {
    /// Whether the sender is another host than this one.
    pub fn is_elsewhere(&self, control: &Control) -> bool {
        let Self::To(host, _) = self else { return false };
        let own = control.remotes.identity().map(|identity| identity.own().identity);
        own != Some(PeerIdentity::Host(host.clone()))
    }

    /// # Errors
    /// Forbidden unless a host's grant allows this.
    pub fn check(&self, what: &str, allows: impl Fn(&Allowed) -> bool) -> Result<(), Problem> {
        let Self::To(host, grant) = self else { return Ok(()) };
        let why = match grant {
            Ok(grant) if allows(&grant.allows) => return Ok(()),
            Ok(_) => format!("the controller has allowed host {host} something else"),
            Err(why) => why.clone(),
        };
        Err(Problem::forbidden(what, why).next("ask the controller to do it"))
    }
}

impl FromRequestParts<Arc<Control>> for Granted {
    type Rejection = Failure;

    async fn from_request_parts(
        parts: &mut Parts,
        control: &Arc<Control>,
    ) -> Result<Self, Failure> {
        let peer = Peer::from_request_parts(parts, control).await?;
        let Peer::Known(Certified { identity: PeerIdentity::Host(host), .. }) = peer else {
            return Ok(Self::Everything);
        };
        let shown = parts.headers.get(GRANT_HEADER).and_then(|value| value.to_str().ok());
        let grant = match (shown, control.remotes.identity()) {
            (None, _) | (_, None) => {
                Err(format!("host {host} does not show that the controller has allowed it"))
            }
            (Some(shown), Some(identity)) => {
                let checked = identity.grant(&SignedGrant(shown.to_owned()), &host);
                checked.map_err(|no| format!("what host {host} shows does not count: {no}"))
            }
        };
        Ok(Self::To(host, grant))
    }
}
