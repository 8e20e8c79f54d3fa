//! `perigee host join`: this host gets its first certificate.

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use perigee_http::authority::NewKey;
use perigee_http::identity::Strangers;
use perigee_http::{Client, Identity, authority_of, private_directory};
use perigee_model::Problem;
use perigee_model::enrol::{Enrol, Enrolled, JoinToken};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::output;

const ANSWER_MAX: Duration = Duration::from_secs(30);
const CONNECT_MAX: Duration = Duration::from_secs(10);

/// Joins, and keeps what the controller gives. The token's fingerprint says which controller is the right one.
pub async fn join(token: JoinToken, dir: &Path, addresses: Vec<IpAddr>) -> Result<(), Problem> {
    // The token can't be used again, so what may fail here comes first.
    private_directory(dir)?;
    let addresses = match addresses.is_empty() {
        true => vec![own_address(&token).await?],
        false => addresses,
    };
    let client = Client::to_enrol(&token.controller_url, &token.fingerprint, ANSWER_MAX)?;
    let key = NewKey::generate()?;
    let host = token.host.clone();
    let public_key = key.public().to_hex();
    let ask = Enrol { host, secret: token.secret, public_key, addresses };
    let enrolled: Enrolled = client.post("/v1/enrol", &ask).await?;
    let own = key.credentials(&enrolled.certificate, &enrolled.ca);
    Identity::new(&own, Strangers::Refused)?;
    own.save(dir)?;
    let (host, dir) = (token.host, dir.display());
    output::text(&format!("host {host} has joined; its certificate is in {dir}"));
    Ok(())
}

/// A token is at most this long; the limit is only for what is not a token.
const TOKEN_BYTES_MAX: u64 = 64 << 10;

/// The token from the standard input.
///
/// # Errors
/// `Invalid` when it is none.
pub fn read_token() -> Result<JoinToken, Problem> {
    let what = "can't read the token from the standard input";
    let mut text = String::new();
    let read = BufReader::new(std::io::stdin().lock().take(TOKEN_BYTES_MAX)).read_line(&mut text);
    read.map_err(|error| Problem::invalid(what, error))?;
    text.trim().parse().map_err(|why| {
        Problem::invalid(what, why).next("give it the line that `perigee host token` has printed")
    })
}

/// The address from which this host reaches the controller.
async fn own_address(token: &JoinToken) -> Result<IpAddr, Problem> {
    let (host, url) = (&token.host, &token.controller_url);
    let unknown = |why: &dyn std::fmt::Display| {
        Problem::unavailable(format!("can't enrol host {host}: no connection to {url}"), why)
            .next("check the address in the token, or name this host's own one with --address")
    };
    let connect = TcpStream::connect(authority_of(url).unwrap_or_default());
    let connected = timeout(CONNECT_MAX, connect).await.map_err(|late| unknown(&late))?;
    let local = connected.and_then(|stream| stream.local_addr()).map_err(|e| unknown(&e))?;
    Ok(local.ip())
}
