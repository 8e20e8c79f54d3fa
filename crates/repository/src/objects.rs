//! Contents of files in an S3 store. object_store speaks S3.
//!
//! Names, lengths and hashes stay in the local tree, so that lists, renames, quotas and "whole or not there" are what they
//! are without a store. A file whose content is in the store has a local inode of its length without blocks, and the
//! attribute [`OBJECT`] with the object's key. Each content has a key of its own that is never used again.
//!
//! 1. The bytes of an upload go into its part, as without a store. Each [`PIECE_BYTES`] of them that came in order are
//!    sent while the rest arrives.
//! 2. Before anything is sent, the part has the attribute [`SENDING`] with the key, durably. So no object is ever there
//!    that nobody knows of.
//! 3. When the object is complete, the part gets [`OBJECT`], gives its blocks back, and is renamed into the tree.
//!
//! What is in `parts/` with a key and has no name in the tree is garbage: its object is deleted, and then the part. A
//! file that is deleted or replaced gets there by a link that is made before its name changes.

mod credentials;
mod reader;
mod sending;

use std::collections::{BTreeSet, HashMap};
use std::future::Future;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::TryStreamExt as _;
use object_store::aws::AmazonS3;
use object_store::client::{HttpClient, HttpConnector};
use object_store::multipart::MultipartStore as _;
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, BackoffConfig, ClientConfigKey, ClientOptions, Error, ObjectStore as _,
    ObjectStoreExt as _, PutOptions, PutPayload, RetryConfig,
};
use perigee_model::Problem;
use perigee_model::percent::in_ascii;
use reqwest::redirect::Policy;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::space::lock;

pub use reader::ObjectReader;
pub use sending::{Sending, Target};

/// The attribute of a file whose content is in the store: the object's key.
pub const OBJECT: &str = "user.perigee.object";
/// The attribute of a part whose content is being sent: the object's key, and the store's id of the upload in pieces.
pub const SENDING: &str = "user.perigee.sending";

/// How many bytes go to the store at once. S3 takes at most 10,000 pieces for an object.
pub const PIECE_BYTES: u64 = 16 << 20;
/// Pieces that are sent at the same time, and those of one upload. They are in memory.
const PIECES_MAX: usize = 8;
const PIECES_OF_ONE_MAX: usize = 2;

/// How long a request is repeated while the store does not answer or is overloaded.
const RETRY_MAX: Duration = Duration::from_secs(120);
/// How long a store may take to accept a connection.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// A store that sends nothing for this long is asked again.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// How long the controller's start waits for the store.
const PROBE_MAX: Duration = Duration::from_secs(15);

/// How long the store is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waits {
    /// For a piece, or another request that has an end, with all repetitions.
    pub request: Duration,
    /// For the next one of the pieces that are being sent, by those who want to send another one.
    pub place: Duration,
}

impl Default for Waits {
    fn default() -> Self {
        Self { request: Duration::from_secs(300), place: Duration::from_secs(120) }
    }
}

/// Where the store is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// The bucket.
    pub bucket: String,
    /// What all keys begin with.
    pub prefix: String,
    /// The address of the server, if it is not AWS's.
    pub endpoint: Option<String>,
    /// A file with the credentials, if they are not those that AWS's tools would use.
    pub credentials: Option<PathBuf>,
    /// How long it is waited for.
    pub waits: Waits,
}

impl Address {
    /// Of `s3://BUCKET/PREFIX`.
    ///
    /// # Errors
    /// `Invalid` if it is none.
    pub fn parse(text: &str, endpoint: Option<String>) -> Result<Self, Problem> {
        let refused = |why: &str| {
            Problem::invalid(format!("can't keep files in {text}"), why)
                .next("give the address of an S3 store as s3://BUCKET/PREFIX")
        };
        let rest = text.strip_prefix("s3://").ok_or_else(|| refused("it is not an S3 store"))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(refused("it names no bucket"));
        }
        let prefix = prefix.trim_matches('/').to_owned();
        Path::parse(&prefix).map_err(|e| refused(&e.to_string()))?;
        let waits = Waits::default();
        Ok(Self { bucket: bucket.to_owned(), prefix, endpoint, credentials: None, waits })
    }
}

/// An S3 store. Whoever waits for it is a task: threads that may block are few, and the disk needs them.
#[derive(Debug)]
pub struct Objects {
    s3: AmazonS3,
    prefix: String,
    waits: Waits,
    places: Arc<Semaphore>,
    /// How many pieces the store has taken since the start.
    taken: AtomicU64,
    /// How many readers each object has: it is not deleted meanwhile.
    in_use: Mutex<HashMap<String, usize>>,
}

/// Why the store has not done something.
#[derive(Debug)]
pub enum NotDone {
    /// It does not accept the credentials, or they do not suffice (401 or 403). With the same ones it refuses the next time too.
    Refused(Problem),
    /// All else.
    Failed(Problem),
}

impl From<NotDone> for Problem {
    fn from(not_done: NotDone) -> Self {
        match not_done {
            NotDone::Refused(problem) | NotDone::Failed(problem) => problem,
        }
    }
}

fn not_done(what: impl Into<String>, error: Error) -> NotDone {
    let what = what.into();
    match error {
        Error::NotFound { source, .. } => {
            NotDone::Failed(Problem::internal(what, deepest(&*source)))
        }
        Error::PermissionDenied { source, .. } | Error::Unauthenticated { source, .. } => {
            let why = format!("the store refuses: {}", deepest(&*source));
            NotDone::Refused(
                Problem::unavailable(what, why)
                    .next("check the controller's credentials for the store"),
            )
        }
        error => {
            let why = format!("the store failed: {}", deepest(&error));
            NotDone::Failed(
                Problem::unavailable(what, why)
                    .next("try again; if it stays so, look after the store"),
            )
        }
    }
}

/// The first causes of an error say nothing that its last one does not.
fn deepest(error: &(dyn std::error::Error + 'static)) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}

/// A wait for the store has an end.
async fn within<T>(
    what: &str,
    max: Duration,
    act: impl Future<Output = object_store::Result<T>>,
) -> Result<T, NotDone> {
    match tokio::time::timeout(max, act).await {
        Ok(done) => done.map_err(|e| not_done(what, e)),
        Err(_) => {
            let why = format!("the store has not answered for {} s", max.as_secs());
            Err(NotDone::Failed(
                Problem::unavailable(what, why)
                    .next("try again; if it stays so, look after the store"),
            ))
        }
    }
}

impl Objects {
    /// Makes a client of the store, with the credentials that AWS's tools would use. Nothing is asked of the store.
    ///
    /// # Errors
    /// If there are no such credentials, or the address can't be one.
    pub fn connect(address: &Address) -> Result<Arc<Self>, Problem> {
        let what = || format!("can't use s3://{}/{}", address.bucket, address.prefix);
        // The client has no provider of cryptography of its own. One that is there already is the same.
        let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
        let plain = address.endpoint.as_ref().is_some_and(|url| url.starts_with("http://"));
        if plain {
            tracing::warn!(
                "the store is spoken to without TLS: everybody on the way can read the files"
            );
        }
        let retry = RetryConfig {
            backoff: BackoffConfig {
                max_backoff: Duration::from_secs(5),
                ..BackoffConfig::default()
            },
            max_retries: usize::MAX,
            retry_timeout: RETRY_MAX,
        };
        let mut builder = credentials::found(address.credentials.as_deref())?
            .with_bucket_name(&address.bucket)
            .with_client_options(ClientOptions::new().with_allow_http(plain))
            .with_http_connector(NoRedirects)
            .with_retry(retry);
        if let Some(endpoint) = &address.endpoint {
            builder = builder.with_endpoint(endpoint);
        }
        let s3 = builder.build().map_err(|e| Problem::invalid(what(), e))?;
        Ok(Arc::new(Self {
            s3,
            prefix: address.prefix.clone(),
            waits: address.waits,
            places: Arc::new(Semaphore::new(PIECES_MAX)),
            taken: AtomicU64::new(0),
            in_use: Mutex::default(),
        }))
    }

    /// As [`Self::connect`], and makes sure that the store keeps something.
    ///
    /// # Errors
    /// If the store refuses to keep something. One that does not answer now may do so later.
    pub async fn open(address: &Address) -> Result<Arc<Self>, Problem> {
        let what = || format!("can't keep files in s3://{}/{}", address.bucket, address.prefix);
        let objects = Self::connect(address)?;
        match tokio::time::timeout(PROBE_MAX, objects.probe()).await {
            Ok(Ok(())) => {}
            Ok(Err(
                error @ (Error::NotFound { .. }
                | Error::PermissionDenied { .. }
                | Error::Unauthenticated { .. }),
            )) => return Err(Problem::invalid(what(), deepest(&error))),
            Ok(Err(error)) => {
                tracing::warn!(%error, "the S3 store does not work; files in it can't be used meanwhile");
            }
            Err(_) => {
                tracing::warn!("the S3 store does not answer; files in it can't be used meanwhile");
            }
        }
        Ok(objects)
    }

    async fn probe(&self) -> object_store::Result<()> {
        let at = self.at(&format!("probe/{}", uuid::Uuid::new_v4()));
        self.s3.put(&at, PutPayload::from_static(b"perigee")).await?;
        self.s3.delete(&at).await
    }

    fn at(&self, key: &str) -> Path {
        Path::from_iter(
            self.prefix.split('/').filter(|part| !part.is_empty()).chain(key.split('/')),
        )
    }

    /// Waits until a piece has a place in memory. Those who wait get theirs in turn.
    ///
    /// # Errors
    /// `Unavailable` if the store takes no piece at all for a while.
    pub async fn place(self: &Arc<Self>, what: &str) -> Result<Place, Problem> {
        let place = Arc::clone(&self.places).acquire_owned();
        tokio::pin!(place);
        loop {
            let before = self.taken.load(Ordering::Relaxed);
            match tokio::time::timeout(self.waits.place, &mut place).await {
                Ok(Ok(permit)) => return Ok(Place { objects: Arc::clone(self), _permit: permit }),
                Ok(Err(closed)) => return Err(Problem::internal(what, closed)),
                Err(_) if self.taken.load(Ordering::Relaxed) != before => {}
                Err(_) => {
                    let why = format!(
                        "the store has taken none of the {PIECES_MAX} pieces that are being sent to it for {} s",
                        self.waits.place.as_secs()
                    );
                    return Err(Problem::unavailable(what, why)
                        .next("try again; if it stays so, look after the store"));
                }
            }
        }
    }

    /// Stores an object in one request.
    ///
    /// # Errors
    /// If the store does not take it.
    pub async fn put(
        &self,
        target: &Target,
        place: Place,
        bytes: Vec<u8>,
        sha256: &str,
    ) -> Result<(), Problem> {
        let mut attributes = about(target);
        attributes.insert(Attribute::Metadata("perigee-sha256".into()), sha256.to_owned().into());
        let options = PutOptions { attributes, ..PutOptions::default() };
        let at = self.at(&target.key);
        let put = self.s3.put_opts(&at, bytes.into(), options);
        let put = within(&target.what, self.waits.request, put).await;
        place.end(put)?;
        Ok(())
    }

    /// Stores an object of any kind in one request.
    ///
    /// # Errors
    /// If the store does not take it.
    pub async fn put_whole(&self, what: &str, key: &str, bytes: Vec<u8>) -> Result<(), NotDone> {
        let at = self.at(key);
        within(what, self.waits.request, self.s3.put(&at, bytes.into())).await.map(drop)
    }

    /// Reads an object in one request; `None`: there is none.
    ///
    /// # Errors
    /// If the store fails, or the object is larger than it can be.
    pub async fn get_whole(
        &self,
        what: &str,
        key: &str,
        bytes_max: u64,
    ) -> Result<Option<Bytes>, NotDone> {
        let at = self.at(key);
        let get = async {
            let got = match self.s3.get(&at).await {
                Err(Error::NotFound { .. }) => return Ok(None),
                got => got?,
            };
            if got.meta.size > bytes_max {
                return Ok(Some(Err(got.meta.size)));
            }
            Ok(Some(Ok(got.bytes().await?)))
        };
        match within(what, self.waits.request, get).await? {
            None => Ok(None),
            Some(Ok(bytes)) => Ok(Some(bytes)),
            Some(Err(size)) => {
                let why = format!("{key} has {size} bytes, and can have {bytes_max} at most");
                Err(NotDone::Failed(Problem::conflict(what, why)))
            }
        }
    }

    /// The first bytes of an object, or fewer if it has not so many; `None` if there is none.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn get_start(
        &self,
        what: &str,
        key: &str,
        bytes: u64,
    ) -> Result<Option<Bytes>, NotDone> {
        let at = self.at(key);
        let get = async {
            match self.s3.get_range(&at, 0..bytes).await {
                Err(Error::NotFound { .. }) => Ok(None),
                got => got.map(Some),
            }
        };
        within(what, self.waits.request, get).await
    }

    /// The next parts of the keys below a prefix.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn names(&self, what: &str, prefix: &str) -> Result<BTreeSet<String>, NotDone> {
        let at = self.at(prefix);
        let list = self.s3.list_with_delimiter(Some(&at));
        let found = within(what, self.waits.request, list).await?;
        let objects = found.objects.into_iter().map(|object| object.location);
        let all = objects.chain(found.common_prefixes);
        Ok(all.filter_map(|path| path.filename().map(str::to_owned)).collect())
    }

    /// How many bytes all objects have.
    ///
    /// # Errors
    /// If the store fails, or is silent for too long.
    pub async fn bytes(&self, what: &str) -> Result<u64, NotDone> {
        let at = Path::from(self.prefix.as_str());
        let (mut all, mut bytes) = (self.s3.list(Some(&at)), 0_u64);
        while let Some(object) = within(what, self.waits.request, all.try_next()).await? {
            bytes = bytes.saturating_add(object.size);
        }
        Ok(bytes)
    }

    /// How many bytes an object has.
    async fn length_of(&self, target: &Target) -> Result<u64, Problem> {
        let at = self.at(&target.key);
        let found = within(&target.what, self.waits.request, self.s3.head(&at)).await?;
        Ok(found.size)
    }

    /// Deletes an object, and what there is of one that was sent in pieces. It may be gone already.
    ///
    /// # Errors
    /// If the store does not do it.
    pub async fn delete(&self, key: &str, id: Option<&str>) -> Result<(), NotDone> {
        let (what, at) = (format!("can't delete the object {key}"), self.at(key));
        if let Some(id) = id {
            let id = id.to_owned();
            let aborted = absent(self.s3.abort_multipart(&at, &id));
            within(&what, self.waits.request, aborted).await?;
        }
        within(&what, self.waits.request, absent(self.s3.delete(&at))).await
    }

    /// Keeps an object from being deleted.
    fn hold(self: &Arc<Self>, key: &str) -> Held {
        *lock(&self.in_use).entry(key.to_owned()).or_default() += 1;
        Held { objects: Arc::clone(self), key: key.to_owned() }
    }

    /// Whether somebody reads an object.
    pub fn is_in_use(&self, key: &str) -> bool {
        lock(&self.in_use).contains_key(key)
    }
}

/// Makes HTTP clients that follow no redirect. Else whoever answers for the store could have the controller read from any
/// server that only the controller reaches.
#[derive(Debug)]
struct NoRedirects;

impl HttpConnector for NoRedirects {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let plain = options.get_config_value(&ClientConfigKey::AllowHttp);
        let client = reqwest::Client::builder()
            .redirect(Policy::none())
            .http1_only()
            .https_only(plain.as_deref() != Some("true"))
            .connect_timeout(CONNECT_MAX)
            .read_timeout(SILENCE_MAX)
            .build();
        let client = client
            .map_err(|error| Error::Generic { store: "HTTP client", source: Box::new(error) })?;
        Ok(HttpClient::new(client))
    }
}

async fn absent(act: impl Future<Output = object_store::Result<()>>) -> object_store::Result<()> {
    match act.await {
        Err(Error::NotFound { .. }) => Ok(()),
        done => done,
    }
}

/// What the store shows of an object to whoever has lost the tree: metadata are ASCII.
fn about(target: &Target) -> Attributes {
    let path = in_ascii(&target.path).to_string();
    [(Attribute::Metadata("perigee-path".into()), path)].into_iter().collect()
}

/// A piece's place in memory, while it is sent.
#[derive(Debug)]
pub struct Place {
    objects: Arc<Objects>,
    _permit: OwnedSemaphorePermit,
}

impl Place {
    fn end<T>(self, sent: Result<T, NotDone>) -> Result<T, NotDone> {
        if sent.is_ok() {
            self.objects.taken.fetch_add(1, Ordering::Relaxed);
        }
        sent
    }
}

/// A reader's hold of an object.
#[derive(Debug)]
struct Held {
    objects: Arc<Objects>,
    key: String,
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut in_use = lock(&self.objects.in_use);
        if let Some(readers) = in_use.get_mut(&self.key) {
            *readers -= 1;
            if *readers == 0 {
                in_use.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::http::StatusCode;
    use axum::response::Redirect;
    use axum::routing::any;
    use tempfile::NamedTempFile;

    use super::*;

    /// A store that answers like this, and the file with its credentials.
    async fn store(answers: Router) -> (Address, NamedTempFile) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
        tokio::spawn(async move { axum::serve(listener, answers).await });
        let credentials = NamedTempFile::new().expect("a file");
        let keys = "[default]\naws_access_key_id=key\naws_secret_access_key=key\n";
        std::fs::write(&credentials, keys).expect("it is written");
        let address = Address::parse("s3://files", Some(endpoint)).expect("an address");
        (Address { credentials: Some(credentials.path().to_owned()), ..address }, credentials)
    }

    #[tokio::test]
    async fn a_store_that_refuses_the_credentials_is_told_from_one_that_fails() {
        for (status, refuses) in [
            (StatusCode::UNAUTHORIZED, true),
            (StatusCode::FORBIDDEN, true),
            (StatusCode::BAD_REQUEST, false),
        ] {
            let answers = Router::new().fallback(move || std::future::ready(status));
            let (address, _credentials) = store(answers).await;
            let objects = Objects::connect(&address).expect("a client");
            let not_done = objects.put_whole("can't keep it", "k", Vec::new()).await;
            let not_done = not_done.expect_err("it is not kept");
            assert_eq!(matches!(not_done, NotDone::Refused(_)), refuses, "{not_done:?}");
        }
    }

    #[tokio::test]
    async fn a_redirect_of_the_store_is_not_followed() {
        let asked = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&asked);
        let elsewhere = move || {
            counted.fetch_add(1, Ordering::Relaxed);
            std::future::ready("what only this machine reads")
        };
        let router = Router::new()
            .route("/elsewhere", any(elsewhere))
            .fallback(async || Redirect::temporary("/elsewhere"));
        let (address, _credentials) = store(router).await;
        let objects = Objects::open(&address).await.expect("it may do better later");
        let target = Target { key: "k".into(), path: "f".into(), what: "can't read it".into() };
        let refused = objects.length_of(&target).await.expect_err("it is elsewhere");
        assert_eq!(asked.load(Ordering::Relaxed), 0, "{refused}");
        assert!(refused.why.contains("307"), "{refused}");
    }

    #[test]
    fn an_address_names_a_bucket_and_what_keys_begin_with() {
        let of = |text: &str| Address::parse(text, None).map(|a| (a.bucket, a.prefix));
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(of("s3://b/p/q/").expect("an address"), pair("b", "p/q"));
        assert_eq!(of("s3://b").expect("an address"), pair("b", ""));
        for bad in ["b/p", "http://b/p", "s3://", "s3:///p", "s3://b/a//c", "s3://b/../c"] {
            of(bad).expect_err(bad);
        }
    }

    #[test]
    fn metadata_of_an_object_are_ascii() {
        let path = "a/ü 100%\n".to_owned();
        let target = Target { key: "k".into(), path, what: String::new() };
        let attributes = about(&target);
        let value = attributes.get(&Attribute::Metadata("perigee-path".into()));
        assert_eq!(value.map(|v| v.as_ref().to_owned()).as_deref(), Some("a/%C3%BC 100%25%0A"));
    }
}
