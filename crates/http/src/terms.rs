//! A host's side of [`perigee_model::term`]: it is commanded by the controller with the greatest term that it has seen, and refuses others.
//!
//! The term is kept in a file that takes its space when it is made, so that a full disk does not keep a controller out that has been started
//! again. While it is not known which term is the greatest, a controller may look and change nothing. Who shows no term is no controller: what it
//! may do is said elsewhere.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::CONNECTION;
use axum::http::{HeaderValue, Method};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use perigee_model::Problem;
use perigee_model::term::{Shown, SignedTerm, TERM_HEADER, Term};
use perigee_model::units::format_time;
use serde::{Deserialize, Serialize};

use crate::certificate::{PeerIdentity, now_ms};
use crate::clock::since_boot_ms;
use crate::network::Network;
use crate::peer::{ClientAddress, Peer};
use crate::reply::Failure;
use crate::seldom::Seldom;
use crate::slots::Slots;

/// The name of the file.
pub const TERM_FILE: &str = "controller-term";

/// For how long a host shows that it has refused a controller.
const SHOWN_FOR: Duration = Duration::from_secs(3600);

/// The controller that commands here, as it is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Kept {
    term: Term,
    signed: SignedTerm,
    /// When it was seen first, by this host's clock.
    since_ms: u64,
    from: String,
}

/// What is known of it: that nobody has commanded here, or why that is not known.
type KnownTerm = Result<Option<Kept>, String>;

/// Which controller commands this host's daemon.
#[derive(Debug)]
pub struct Terms {
    path: PathBuf,
    network: Network,
    known: RwLock<KnownTerm>,
    /// Whoever changes what is kept takes turns.
    taking: tokio::sync::Mutex<()>,
    refused: Mutex<Option<(Instant, String)>>,
    refused_total: AtomicU64,
    /// When the controller that commands here was heard last, by the kernel's clock; 0 if it was not.
    commanded_ms: AtomicU64,
    seldom: Seldom,
}

enum Refusal {
    Older(Kept),
    Other(Problem),
}

impl Terms {
    /// The file is in this directory, which is the daemon's own.
    pub fn open(dir: &Path, network: &Network) -> Arc<Self> {
        let path = dir.join(TERM_FILE);
        let known = read(&path, network).map(|(kept, _)| kept);
        if let Err(why) = &known {
            tracing::error!("it is not known which controller commands here: {why}");
        }
        Arc::new(Self {
            path,
            network: network.clone(),
            known: RwLock::new(known),
            taking: tokio::sync::Mutex::default(),
            refused: Mutex::default(),
            refused_total: AtomicU64::default(),
            commanded_ms: AtomicU64::default(),
            seldom: Seldom::default(),
        })
    }

    /// The number of the term that commands here; 0 if there is none, or if that is not known.
    pub fn number(&self) -> u64 {
        self.known().ok().flatten().map_or(0, |kept| kept.term.number)
    }

    /// How many requests of older controllers were refused.
    pub fn refused_total(&self) -> u64 {
        self.refused_total.load(Ordering::Relaxed)
    }

    /// When the controller whose term commands here was heard last, in milliseconds since the kernel's start
    /// ([`since_boot_ms`]); `None` if this daemon has not heard it yet.
    pub fn commanded_ms(&self) -> Option<u64> {
        Some(self.commanded_ms.load(Ordering::Relaxed)).filter(|at_ms| *at_ms > 0)
    }

    /// What people should know.
    pub fn warnings(&self) -> Vec<String> {
        let unknown = self.known().err().map(|why| self.unknown(&why));
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let refused = refused.filter(|(at, _)| at.elapsed() < SHOWN_FOR).map(|(_, text)| text);
        unknown.into_iter().chain(refused).collect()
    }

    fn known(&self) -> KnownTerm {
        self.known.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn unknown(&self, why: &str) -> String {
        format!(
            "it is not known which controller commands here, so none may change anything: {why}; repair {path}, or remove it if \
             only one controller runs",
            path = self.path.display()
        )
    }

    /// Whether it is known that the term which is shown commands here.
    async fn take_shown(
        self: &Arc<Self>,
        shown: &HeaderValue,
        (request, from): (&str, String),
        reads: bool,
    ) -> Result<bool, Refusal> {
        let signed = SignedTerm(shown.to_str().unwrap_or_default().to_owned());
        let Some(term) = self.network.term(&signed) else {
            let why = "its term is not signed by this cluster's authority";
            return Err(Refusal::Other(Problem::forbidden(format!("can't answer {request}"), why)));
        };
        let newest = match self.known() {
            Ok(kept) if Shown::of(term, kept.as_ref().map(|kept| kept.term)) != Shown::Newer => {
                kept
            }
            _ => match self.take(Kept { term, signed, since_ms: now_ms(), from }).await {
                Ok(kept) => Some(kept),
                Err(_) if reads => return Ok(false),
                Err(why) => {
                    let what = format!("can't answer {request}");
                    return Err(Refusal::Other(Problem::unavailable(what, self.unknown(&why))));
                }
            },
        };
        match newest {
            Some(kept) if kept.term != term => {
                self.note_refused(term, &kept);
                Err(Refusal::Older(kept))
            }
            _ => Ok(true),
        }
    }

    /// Keeps a term if it is still the newest, and returns the one that is.
    async fn take(self: &Arc<Self>, new: Kept) -> Result<Kept, String> {
        let _turn = self.taking.lock().await;
        let terms = Arc::clone(self);
        let taken = tokio::task::spawn_blocking(move || {
            let taken = keep(&terms.path, &terms.network, new);
            let known = taken.clone().map(Some);
            *terms.known.write().unwrap_or_else(PoisonError::into_inner) = known;
            taken
        });
        taken.await.unwrap_or_else(|error| Err(error.to_string()))
    }

    fn note_refused(&self, term: Term, by: &Kept) {
        let total = self.refused_total.fetch_add(1, Ordering::Relaxed) + 1;
        let text = format!(
            "a controller with term {term} is refused, because {}; {total} requests so far, the last one at {}",
            by.commands(),
            format_time(now_ms())
        );
        if let Some(count) = self.seldom.happened() {
            tracing::warn!(count, "{text}");
        }
        let now = Some((Instant::now(), text));
        *self.refused.lock().unwrap_or_else(PoisonError::into_inner) = now;
    }
}

impl Kept {
    fn commands(&self) -> String {
        let Self { term, since_ms, from, .. } = self;
        format!(
            "the one with term {term} commands here since {}, from {from}",
            format_time(*since_ms)
        )
    }
}

/// The greatest of those kept that the present authority has signed, and the slot for the next. A host that has joined another cluster starts
/// anew.
fn read(path: &Path, network: &Network) -> Result<(Option<Kept>, u64), String> {
    let failed = |error: std::io::Error| format!("can't read {}: {error}", path.display());
    let kept = Slots::open(path).and_then(|slots| slots.read()).map_err(failed)?;
    let read = kept.into_iter().filter_map(|(slot, record)| {
        let kept: Kept = serde_json::from_slice(&record).ok()?;
        (network.term(&kept.signed) == Some(kept.term)).then_some((slot, kept))
    });
    let greatest = read.max_by_key(|(_, kept)| kept.term.number);
    let next = greatest.as_ref().map_or(0, |(slot, _)| slot + 1);
    Ok((greatest.map(|(_, kept)| kept), next))
}

fn keep(path: &Path, network: &Network, new: Kept) -> Result<Kept, String> {
    let (before, slot) = read(path, network)?;
    match (Shown::of(new.term, before.as_ref().map(|kept| kept.term)), before) {
        (Shown::Same | Shown::Older, Some(before)) => return Ok(before),
        (_, Some(before)) => tracing::info!(
            "the controller with term {} commands here from now on; before: {}",
            new.term,
            before.term
        ),
        (_, None) => tracing::info!("the controller with term {} commands here", new.term),
    }
    let failed = |error: std::io::Error| format!("can't write {}: {error}", path.display());
    let record = serde_json::to_vec(&new).map_err(|error| failed(error.into()))?;
    Slots::open(path).and_then(|slots| slots.write(slot, &record)).map_err(failed)?;
    Ok(new)
}

/// Has a daemon's API refuse controllers that do not command here any more.
pub fn obey(router: Router, terms: Arc<Terms>) -> Router {
    router.layer(from_fn_with_state(terms, check))
}

async fn check(State(terms): State<Arc<Terms>>, request: Request, next: Next) -> Response {
    let Some(shown) = request.headers().get(TERM_HEADER).cloned() else {
        return next.run(request).await;
    };
    let asked = format!("{} {}", request.method(), request.uri().path());
    let address = request.extensions().get::<ClientAddress>().and_then(|address| address.0);
    let from = address.map_or_else(|| "this host".to_owned(), |address| address.to_string());
    let reads = [Method::GET, Method::HEAD].contains(request.method());
    let refusal = match terms.take_shown(&shown, (&asked, from), reads).await {
        Ok(commands) => {
            if commands && is_controller(&terms.network, request.extensions().get::<Peer>()) {
                terms.commanded_ms.store(since_boot_ms(), Ordering::Relaxed);
            }
            return next.run(request).await;
        }
        Err(refusal) => refusal,
    };
    let (problem, by) = match refusal {
        Refusal::Other(problem) => (problem, None),
        Refusal::Older(kept) => {
            let problem = Problem::superseded(
                format!("this controller may not ask for {asked}"),
                kept.commands(),
            );
            (problem, HeaderValue::from_str(&kept.signed.0).ok())
        }
    };
    let mut answer = Failure(problem).into_response();
    // The body was not read.
    answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    if let Some(by) = by {
        answer.headers_mut().insert(TERM_HEADER, by);
    }
    answer
}

/// Whether who shows a term is the controller: a host has seen the controller's term, and could show it too. Without certificates
/// everybody is believed.
fn is_controller(network: &Network, peer: Option<&Peer>) -> bool {
    match network {
        Network::Plain => true,
        Network::Tls(_) => {
            peer.and_then(Peer::identity).is_some_and(|who| *who == PeerIdentity::Controller)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use axum::routing::get;
    use perigee_model::{HostId, ProblemKind};
    use uuid::Uuid;

    use super::*;
    use crate::identity::{Identity, Strangers};
    use crate::{Authority, Claim, Client, Json, Listen, PeerIdentity};

    /// A host's daemon, and how often it has done something.
    struct Host {
        dir: tempfile::TempDir,
        network: Network,
        done: Arc<AtomicU32>,
        server: Option<tokio::task::JoinHandle<Result<(), Problem>>>,
        terms: Arc<Terms>,
    }

    impl Host {
        async fn start(network: Network) -> Self {
            let dir = tempfile::tempdir().expect("a directory");
            let terms = Terms::open(dir.path(), &network);
            let mut host = Self { dir, network, done: Arc::default(), server: None, terms };
            host.restart().await;
            host
        }

        async fn restart(&mut self) {
            if let Some(server) = self.server.take() {
                server.abort();
                server.await.expect_err("aborted");
            }
            self.terms = Terms::open(self.dir.path(), &self.network);
            let done = Arc::clone(&self.done);
            let act = async move || Json(done.fetch_add(1, Ordering::Relaxed));
            let router = Router::new().route("/", get(async || Json("here")).delete(act));
            let (router, listens) =
                (obey(router, self.terms.clone()), [Listen::Unix(self.socket())]);
            let serve = async move { crate::serve(router, &listens, &Network::Plain).await };
            self.server = Some(tokio::spawn(serve));
            let begun = Instant::now();
            while tokio::net::UnixStream::connect(self.socket()).await.is_err() {
                assert!(begun.elapsed().as_secs() < 60, "nobody listens");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }

        fn socket(&self) -> PathBuf {
            self.dir.path().join("socket")
        }

        fn client(&self, claim: &Arc<Claim>) -> Client {
            let address = format!("unix:{}", self.socket().display());
            Client::new(&address, Duration::from_secs(60)).expect("a client").claiming(claim)
        }

        fn done(&self) -> u32 {
            self.done.load(Ordering::Relaxed)
        }
    }

    fn unsigned(number: u64) -> (Term, SignedTerm) {
        let term = Term { number, start: Uuid::new_v4() };
        let text = serde_json::to_string(&term).expect("JSON");
        (term, SignedTerm(format!("unsigned {text}")))
    }

    fn claim(number: u64) -> Arc<Claim> {
        let (term, signed) = unsigned(number);
        Claim::new(term, &signed, &Network::Plain).expect("a claim")
    }

    #[tokio::test]
    async fn a_second_controller_is_refused_and_sends_nothing_more() {
        let mut host = Host::start(Network::Plain).await;
        let (old, new, twin) = (claim(6), claim(7), claim(7));
        host.client(&old).delete("/").await.expect("it is the only one");
        host.client(&new).delete("/").await.expect("it is newer");
        host.restart().await;
        assert_eq!(host.terms.commanded_ms(), None, "this process has not heard it yet");
        host.client(&new).delete("/").await.expect("the same as before");
        let heard_ms = host.terms.commanded_ms().expect("it was heard");
        while since_boot_ms() == heard_ms {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        for older in [&old, &twin] {
            let refused = host.client(older).delete("/").await.expect_err("another one commands");
            assert_eq!(
                refused.kind,
                ProblemKind::Unavailable,
                "nothing follows from it: {refused}"
            );
            assert_eq!(older.refusal().expect("it is told").by, 7);
            assert!(refused.why.contains("term 7"), "{refused}");
        }
        assert_eq!(host.terms.refused_total(), 2);
        assert!(host.terms.warnings()[0].contains("is refused"), "{:?}", host.terms.warnings());
        host.client(&old).get::<String>("/").await.expect_err("it does not even ask");
        assert_eq!((host.terms.refused_total(), host.done()), (2, 3));
        let nobody = Client::new(&format!("unix:{}", host.socket().display()), SHOWN_FOR);
        nobody.expect("a client").delete("/").await.expect("no controller, and none is refused");
        assert_eq!(host.terms.commanded_ms(), Some(heard_ms), "neither of them commands here");
    }

    #[tokio::test]
    async fn while_the_term_is_not_known_nothing_is_changed_and_nobody_is_told_that_he_is_superseded()
     {
        let mut host = Host::start(Network::Plain).await;
        let now = claim(7);
        host.client(&now).delete("/").await.expect("it is the only one");
        let file = host.dir.path().join(TERM_FILE);
        std::fs::write(&file, [b'x'; 8192]).expect("a damaged disk");
        host.restart().await;
        assert_eq!(host.client(&now).get::<String>("/").await.expect("it may look"), "here");
        assert_eq!(host.terms.commanded_ms(), None, "it is not known whether it commands");
        let refused = host.client(&now).delete("/").await.expect_err("it is not known");
        assert_eq!(refused.kind, ProblemKind::Unavailable);
        assert!(refused.why.contains(TERM_FILE) && now.refusal().is_none(), "{refused}");
        assert!(host.terms.warnings()[0].contains("not known"), "{:?}", host.terms.warnings());
        std::fs::remove_file(&file).expect("repaired");
        host.client(&now).delete("/").await.expect("it is known again");
        assert!(host.terms.warnings().is_empty());
    }

    #[tokio::test]
    async fn a_host_that_was_broken_into_does_not_stop_the_controller_with_a_term_it_has_made_up() {
        let dir = tempfile::tempdir().expect("a directory");
        let authority = Authority::open(&dir.path().join("authority")).expect("an authority");
        let owner = PeerIdentity::Host(HostId::new("home1").expect("a name"));
        let own = authority.credentials(&owner, &[]).expect("credentials");
        let network = Network::Tls(Identity::new(&own, Strangers::Refused).expect("an identity"));
        let signed = |number| {
            let term = Term { number, start: Uuid::new_v4() };
            (term, authority.sign_term(&term).expect("signed"))
        };
        let ((term, own), (_, newer)) = (signed(7), signed(8));
        let claim = Claim::new(term, &own, &network).expect("a claim");
        let said = Problem::superseded("DELETE /", "another one commands");
        let header = |signed: &SignedTerm| HeaderValue::from_str(&signed.0).expect("a header");
        let (older, made_up) = (header(&signed(6).1), header(&unsigned(1000).1));
        for no_proof in [None, Some(&made_up), Some(&older)] {
            let problem = claim.apply_refusal("home1", no_proof, &said);
            assert!(claim.refusal().is_none(), "{problem}");
        }
        claim.apply_refusal("home1", Some(&header(&newer)), &said);
        assert_eq!(claim.refusal().expect("it is proven").by, 8);
        let peer = |identity| Peer::Known(crate::Certified { identity, issued_ms: 0 });
        let controller = peer(PeerIdentity::Controller);
        for other in [None, Some(&peer(owner)), Some(&Peer::Local), Some(&Peer::Stranger)] {
            assert!(!is_controller(&network, other), "{other:?} may have seen a term");
        }
        assert!(is_controller(&network, Some(&controller)));
        let host = Host::start(network).await;
        let forged = Claim::new(unsigned(9).0, &unsigned(9).1, &Network::Plain).expect("a claim");
        let refused = host.client(&forged).delete("/").await.expect_err("nobody has signed it");
        assert_eq!(refused.kind, ProblemKind::Forbidden);
        assert_eq!((host.done(), host.terms.number()), (0, 0));
    }
}
