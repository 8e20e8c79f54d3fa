//! A proxy before moto that does to chosen requests what a network and a provider may do.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream;
use tokio_rustls::rustls::crypto::ring;

/// What becomes of a request.
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    /// It is done, and its answer is cut.
    LoseAnswer,
    /// It is not done, and no answer comes.
    LoseRequest,
    /// EC2 refuses it: status and code.
    Refuse(u16, &'static str),
    /// EC2 answers this instead.
    Say(&'static str),
}

/// The proxy. It ends with the runtime of its test.
#[derive(Clone)]
pub struct Faults {
    shared: Arc<Shared>,
    /// Where it listens.
    pub endpoint: String,
}

struct Shared {
    moto: String,
    web: reqwest::Client,
    faults: Mutex<VecDeque<(&'static str, Fault)>>,
    seen: Mutex<Vec<String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no test has panicked with it")
}

impl Faults {
    /// A proxy before the server with this port.
    pub async fn before(port: u16) -> Self {
        // Another one may be there already.
        let _ = ring::default_provider().install_default();
        let shared = Arc::new(Shared {
            moto: format!("http://127.0.0.1:{port}"),
            web: reqwest::Client::builder().no_proxy().build().expect("a client"),
            faults: Mutex::default(),
            seen: Mutex::default(),
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
        let router = axum::Router::new().fallback(pass).with_state(Arc::clone(&shared));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { shared, endpoint }
    }

    /// The next requests for this action fail so, one after the other.
    pub fn next(&self, action: &'static str, faults: &[Fault]) {
        lock(&self.shared.faults).extend(faults.iter().map(|fault| (action, *fault)));
    }

    /// All requests for this action since the start, as sent.
    pub fn seen(&self, action: &str) -> Vec<String> {
        let of = format!("Action={action}&");
        lock(&self.shared.seen).iter().filter(|form| form.starts_with(&of)).cloned().collect()
    }

    /// Whether all faults have happened.
    pub fn all_happened(&self) -> bool {
        lock(&self.shared.faults).is_empty()
    }
}

/// The fields of a query, the action first.
fn query(uri: &Uri) -> String {
    let (action, others): (Vec<&str>, Vec<&str>) =
        uri.query().unwrap_or_default().split('&').partition(|field| field.starts_with("Action="));
    [action, others].concat().join("&")
}

struct Request {
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    form: String,
}

async fn pass(
    State(shared): State<Arc<Shared>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    form: String,
) -> Response {
    let request = Request { method, uri: uri.clone(), headers, form: form.clone() };
    // libcloud asks with a query in no order.
    let form = if form.is_empty() { query(&uri) } else { form };
    lock(&shared.seen).push(form.clone());
    let fault = {
        let mut faults = lock(&shared.faults);
        let is_meant = |(action, _): &(&str, Fault)| form.starts_with(&format!("Action={action}&"));
        let at = faults.iter().position(is_meant);
        at.and_then(|at| faults.remove(at)).map(|(_, fault)| fault)
    };
    match fault {
        Some(Fault::LoseRequest) => lost(),
        Some(Fault::Say(answer)) => answer.into_response(),
        Some(Fault::Refuse(status, code)) => {
            let status = StatusCode::from_u16(status).expect("a status");
            let body = format!(
                "<Response><Errors><Error><Code>{code}</Code><Message>because of a test</Message></Error></Errors></Response>"
            );
            (status, body).into_response()
        }
        Some(Fault::LoseAnswer) => {
            forward(&shared, request).await;
            lost()
        }
        None => {
            let (status, body) = forward(&shared, request).await;
            (status, body).into_response()
        }
    }
}

async fn forward(shared: &Shared, from: Request) -> (StatusCode, String) {
    let url = format!("{}{}", shared.moto, from.uri);
    // Pages of few instances, so that a few instances are many pages.
    let form = from.form.replace("MaxResults=500", "MaxResults=2");
    let mut request = shared.web.request(from.method, url).body(form);
    // moto finds the region in the signature, and does not check it.
    for name in ["authorization", "content-type", "x-amz-date"] {
        if let Some(value) = from.headers.get(name) {
            request = request.header(name, value);
        }
    }
    let answer = request.send().await.expect("moto answers");
    let status = answer.status();
    let body = answer.text().await.expect("moto's whole answer");
    // moto 5.2.5 leaves out the slash at the end of the namespace; libcloud wants it.
    (status, body.replace("/doc/2016-11-15\"", "/doc/2016-11-15/\""))
}

/// An answer that begins and is cut.
fn lost() -> Response {
    let cut = std::io::Error::other("lost");
    Body::from_stream(stream::iter([Ok(b"<".to_vec()), Err(cut)])).into_response()
}
