//! A connection between the controller and an agent that carries bytes both ways once an HTTP request was answered (RFC 9110, 7.8):
//! the console of a VM. What clients of the controller speak is a WebSocket ([`crate::websocket`]).
//!
//! Nothing limits how long it may be silent. A side that receives nothing for a minute while bytes wait for it is
//! disconnected, as with every answer, and so is one that has vanished. A tunnel counts as a connection of its listener until
//! it has ended.

use std::io;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::http::header::{CONNECTION, UPGRADE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::Response;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use perigee_model::Problem;
use tokio::io::{AsyncRead, AsyncWrite, copy_bidirectional};

use crate::connections::Impatient;
use crate::connections::places::ConnectionPlace;

/// The bytes of both directions.
pub type Tunnel = TokioIo<Upgraded>;

/// What a request for a tunnel names in its header `Upgrade`.
pub(crate) const PROTOCOL: &str = "perigee-tunnel";

/// A tunnel that begins when its answer was sent.
#[derive(Debug)]
pub struct Begun {
    upgrade: OnUpgrade,
    _place: Option<Arc<ConnectionPlace>>,
}

impl Begun {
    /// Carries bytes between the client and another connection until one of them has closed.
    ///
    /// # Errors
    /// When the client has gone before the answer, or one of the connections breaks.
    pub async fn carry(self, other: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> io::Result<()> {
        let mut client = TokioIo::new(self.upgrade.await.map_err(io::Error::other)?);
        copy_bidirectional(&mut client, &mut Impatient::carried_to(other)).await.map(drop)
    }
}

/// Takes a request for a tunnel: gives the answer, which has to be sent, and what comes after it.
///
/// # Errors
/// `Invalid` when the request asks for something else.
pub fn accept(mut request: Request) -> Result<(Response, Begun), Problem> {
    let asked = request.headers().get(UPGRADE).is_some_and(|asked| asked == PROTOCOL);
    if !asked {
        let what = format!("{} {}", request.method(), request.uri().path());
        let why = format!("it has no header `Upgrade: {PROTOCOL}`");
        return Err(Problem::invalid(what, why));
    }
    let place = request.extensions().get::<Arc<ConnectionPlace>>().cloned();
    let begun = Begun { upgrade: hyper::upgrade::on(&mut request), _place: place };
    let mut answer = Response::new(Body::empty());
    *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
    answer.headers_mut().insert(UPGRADE, HeaderValue::from_static(PROTOCOL));
    Ok((answer, begun))
}
