//! An image that is imported from a web server: this command fetches it and sends it on, so that no daemon of the cluster ever
//! asks an address that a user names.

use futures_util::stream;
use perigee_http::certificate::hex;
use perigee_http::{Body, Client, Method};
use perigee_model::limits::{OutOfLimits, VOLUME_BYTES};
use perigee_model::volume::{BLOCK_BYTES, Upload};
use perigee_model::{HostId, Problem};
use reqwest::redirect::Policy;
use reqwest::{Version, header};
use sha2::{Digest as _, Sha256};
use tokio_rustls::rustls::crypto::ring;

use crate::output;

/// Whether it is the address of a file on a web server.
pub fn is_address(text: &str) -> bool {
    text.starts_with("https://") || text.starts_with("http://")
}

/// A checksum as `sha256sum` prints it.
pub fn sha256(text: &str) -> Result<String, String> {
    let is_hex = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_hex { Ok(text.to_ascii_lowercase()) } else { Err("it has not 64 hex digits".to_owned()) }
}

/// What has come so far.
struct Fetched {
    answer: reqwest::Response,
    bytes: u64,
    hash: Sha256,
    expected: Option<String>,
    bar: indicatif::ProgressBar,
}

impl Fetched {
    async fn next(mut self) -> Result<Option<(bytes::Bytes, Self)>, std::io::Error> {
        // Who prints it says what could not be done.
        let broken = std::io::Error::other::<String>;
        match self.answer.chunk().await.map_err(|error| broken(chain(&error)))? {
            Some(piece) => {
                self.bytes += piece.len() as u64;
                check_length(self.bytes).map_err(|error| broken(error.to_string()))?;
                self.hash.update(&piece);
                self.bar.set_position(self.bytes);
                Ok(Some((piece, self)))
            }
            None => {
                let found = hex(&std::mem::take(&mut self.hash).finalize());
                // An error here ends the upload, so nothing is made of it.
                match &self.expected {
                    Some(expected) if *expected != found => Err(broken(format!(
                        "its SHA-256 is {found}, and not the {expected} that was asked for"
                    ))),
                    _ => Ok(None),
                }
            }
        }
    }
}

/// A file is not longer than the largest disk. It may be shorter than any.
fn check_length(bytes: u64) -> Result<(), OutOfLimits> {
    VOLUME_BYTES.check(bytes.max(BLOCK_BYTES)).map(drop)
}

/// Whether the answer ends where the connection does, be that the file's end or not.
fn ends_anywhere(answer: &reqwest::Response) -> bool {
    let has = |name: header::HeaderName| answer.headers().contains_key(name);
    answer.version() <= Version::HTTP_11
        && !has(header::CONTENT_LENGTH)
        && !has(header::TRANSFER_ENCODING)
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

/// Fetches a file and sends it to the host that is to make an image of it. No redirect is followed.
///
/// # Errors
/// `Invalid` for an address that is not trusted to give what was meant, or if something else has come.
pub async fn send_on(
    client: &Client,
    address: &str,
    sha256: Option<String>,
    host: Option<&HostId>,
) -> Result<Upload, Problem> {
    let what = || format!("can't download {address}");
    if sha256.is_none() && !address.starts_with("https://") {
        let why = "over http anybody on the way can change it";
        return Err(Problem::invalid(what(), why).next("say what it has to be: --sha256 …"));
    }
    // Another one may be there already.
    let _ = ring::default_provider().install_default();
    let web = reqwest::Client::builder()
        .redirect(Policy::none())
        .user_agent(concat!("perigee/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(std::time::Duration::from_secs(20))
        .read_timeout(std::time::Duration::from_secs(60))
        .build()
        .map_err(|error| Problem::internal(what(), chain(&error)))?;
    let answer = web.get(address).send().await;
    let answer = answer.map_err(|error| Problem::unavailable(what(), chain(&error)))?;
    let status = answer.status();
    if status.is_redirection() {
        let to = answer.headers().get("location").and_then(|to| to.to_str().ok());
        let why = format!("it redirects to {}", to.unwrap_or("another address"));
        return Err(
            Problem::invalid(what(), why).next("if you trust that address, give it instead")
        );
    }
    if !status.is_success() {
        return Err(Problem::not_found(what(), format!("the server answers {status}")));
    }
    if sha256.is_none() && ends_anywhere(&answer) {
        let why = "the server does not say where the file ends, so nobody can tell whether all of it comes";
        return Err(Problem::invalid(what(), why).next(
            "say what it has to be: --sha256 …; or download it, check it, and import the file",
        ));
    }
    let length = answer.content_length();
    if let Some(length) = length {
        check_length(length).map_err(|error| error.problem(what()))?;
    }
    let bar = output::progress_bar(&"download", "{bytes} of {total_bytes}");
    bar.set_length(length.unwrap_or_default());
    let fetched =
        Fetched { answer, bytes: 0, hash: Sha256::new(), expected: sha256, bar: bar.clone() };
    let (tell, told) = std::sync::mpsc::channel();
    let pieces = stream::try_unfold(fetched, move |fetched| {
        let tell = tell.clone();
        async move {
            let next = fetched.next().await;
            if let Err(error) = &next {
                // The connection shows only that it ended.
                let _ = tell.send(error.to_string());
            }
            next
        }
    });
    let path = match host {
        Some(host) => format!("/v1/uploads?host={host}"),
        None => "/v1/uploads".to_owned(),
    };
    let sent = client.send_body::<Upload>(Method::POST, &path, Body::from_stream(pieces)).await;
    bar.finish_and_clear();
    match told.try_recv() {
        Ok(why) => Err(Problem::invalid(what(), why)),
        Err(_) => sent,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;

    /// A web server with one answer.
    fn server(answer: &'static str) -> String {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            let mut request = [0; 4096];
            let _ = stream.read(&mut request).expect("a request");
            stream.write_all(answer.as_bytes()).expect("it is sent");
        });
        format!("http://{address}/image")
    }

    const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello";
    const HELLO: &str = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";

    fn nowhere() -> Client {
        Client::new("unix:/nonexistent/socket", std::time::Duration::from_secs(5))
            .expect("a client")
    }

    async fn refused(address: &str, sha256: Option<&str>) -> Problem {
        let sent = send_on(&nowhere(), address, sha256.map(str::to_owned), None).await;
        sent.expect_err("nobody takes it")
    }

    #[tokio::test]
    async fn what_comes_over_http_needs_a_checksum_and_no_redirect_is_followed() {
        let problem = refused("http://example.org/image", None).await;
        assert!(problem.next.contains("--sha256"), "{problem}");
        let away = "HTTP/1.1 302 Found\r\nlocation: http://10.0.0.1/\r\ncontent-length: 0\r\n\r\n";
        let problem = refused(&server(away), Some(HELLO)).await;
        assert!(problem.why.contains("redirects to http://10.0.0.1/"), "{problem}");
        let none = "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n";
        let problem = refused(&server(none), Some(HELLO)).await;
        assert!(problem.why.contains("404"), "{problem}");
    }

    #[tokio::test]
    async fn what_has_another_checksum_is_not_sent_whole() {
        let mut fetched = fetched(&"0".repeat(64)).await;
        loop {
            match fetched.next().await {
                Ok(Some((_, next))) => fetched = next,
                Ok(None) => panic!("it is not what was asked for"),
                Err(error) => {
                    assert!(error.to_string().contains(HELLO), "{error}");
                    break;
                }
            }
        }
        let mut fetched = self::fetched(HELLO).await;
        while let Some((_, next)) = fetched.next().await.expect("it is what was asked for") {
            fetched = next;
        }
    }

    async fn fetched(expected: &str) -> Fetched {
        let _ = ring::default_provider().install_default();
        let address = server(OK);
        Fetched {
            answer: reqwest::get(&address).await.expect("an answer"),
            bytes: 0,
            hash: Sha256::new(),
            expected: Some(expected.to_owned()),
            bar: indicatif::ProgressBar::hidden(),
        }
    }

    #[test]
    fn a_checksum_is_64_hex_digits() {
        assert_eq!(sha256(&HELLO.to_uppercase()).expect("one"), HELLO);
        assert!(sha256("abc").is_err() && sha256(&"g".repeat(64)).is_err());
    }
}
