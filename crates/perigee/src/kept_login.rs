//! What `perigee login` keeps: a token, with the address of the controller and the fingerprint of its authority.

use std::path::PathBuf;
use std::time::Duration;

use perigee_http::{Client, read_private};
use perigee_model::Problem;
use serde::{Deserialize, Serialize};

use crate::context::Context;

/// What `perigee login` has kept.
#[derive(Serialize, Deserialize)]
pub struct Kept {
    /// `https://HOST:PORT`
    pub controller: String,
    /// The SHA-256 of the authority's certificate, in hexadecimal digits.
    pub fingerprint: String,
    pub token: String,
}

impl Kept {
    /// Of the controller.
    pub fn url(&self) -> &str {
        &self.controller
    }

    /// A client of the controller that sends the token.
    pub fn client(&self, wait: Duration) -> Result<Client, Problem> {
        Client::to_enrol(&self.controller, &self.fingerprint, wait)?.with_token(&self.token)
    }
}

/// `$XDG_CONFIG_HOME/perigee/login.json`
pub fn path() -> Result<PathBuf, Problem> {
    Ok(directory()?.join("login.json"))
}

/// `$XDG_CONFIG_HOME/perigee`
pub fn directory() -> Result<PathBuf, Problem> {
    let dir = |name| std::env::var_os(name).filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let config = dir("XDG_CONFIG_HOME").or_else(|| dir("HOME").map(|home| home.join(".config")));
    let config = config.ok_or_else(|| {
        Problem::invalid(
            "can't find the file of the login",
            "neither HOME nor XDG_CONFIG_HOME is set",
        )
    })?;
    Ok(config.join("perigee"))
}

/// The login to use: if the user names a controller, that one's only.
pub fn kept(context: &Context) -> Result<Option<Kept>, Problem> {
    let path = match path() {
        Ok(path) if path.exists() => path,
        _ => return Ok(None),
    };
    let kept: Kept = serde_json::from_slice(&read_private(&path)?).map_err(|e| {
        Problem::invalid(format!("can't read {}", path.display()), e)
            .next("log in again: perigee login")
    })?;
    let is_meant = context.api.as_ref().is_none_or(|api| *api == kept.controller);
    Ok(is_meant.then_some(kept))
}

/// The address at which this machine reaches the controller, if other machines may reach it there too.
pub fn https_url(context: &Context) -> Result<Option<String>, Problem> {
    let kept = kept(context)?.map(|kept| kept.controller);
    Ok(kept.or_else(|| context.api.clone()).filter(|url| url.starts_with("https://")))
}
