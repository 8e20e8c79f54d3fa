//! A controller's side of [`perigee_model::term`]: what it shows to hosts, and whether one has refused it for good.

use std::sync::Arc;

use axum::http::HeaderValue;
use perigee_model::Problem;
use perigee_model::term::{Shown, SignedTerm, Term};
use tokio::sync::watch;

use crate::network::Network;

/// A controller's claim to command the hosts. When one host has shown a newer term, nothing is sent with it any more.
#[derive(Debug)]
pub struct Claim {
    term: Term,
    header: HeaderValue,
    network: Network,
    refusal: watch::Sender<Option<Refusal>>,
}

/// Another controller commands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The number of its term.
    pub by: u64,
    /// Who says so, and since when.
    pub why: String,
}

impl Claim {
    /// # Errors
    /// `Internal` if the term can't be sent.
    pub fn new(term: Term, signed: &SignedTerm, network: &Network) -> Result<Arc<Self>, Problem> {
        let header = HeaderValue::from_str(&signed.0)
            .map_err(|e| Problem::internal("can't claim to be the controller", e))?;
        let refusal = watch::Sender::new(None);
        Ok(Arc::new(Self { term, header, network: network.clone(), refusal }))
    }

    /// This start of the controller.
    pub fn term(&self) -> Term {
        self.term
    }

    /// Why it does not count any more.
    pub fn refusal(&self) -> Option<Refusal> {
        self.refusal.borrow().clone()
    }

    /// Waits until it does not count any more.
    pub async fn until_refused(&self) -> Refusal {
        let mut refusals = self.refusal.subscribe();
        let refused = refusals.wait_for(Option::is_some).await.ok().and_then(|found| found.clone());
        match refused {
            Some(refusal) => refusal,
            // The sender is in this claim.
            None => std::future::pending().await,
        }
    }

    /// It does not count any more. The first reason stays.
    pub fn refuse(&self, refusal: Refusal) {
        self.refusal.send_if_modified(|known| {
            let is_new = known.is_none();
            known.get_or_insert(refusal);
            is_new
        });
    }

    pub(crate) fn header(&self) -> &HeaderValue {
        &self.header
    }

    /// # Errors
    /// If nothing is to be sent any more. For those who ask, the host is not reached: nothing follows from it.
    pub(crate) fn check(&self, address: &str) -> Result<(), Problem> {
        match self.refusal() {
            None => Ok(()),
            Some(refusal) => {
                Err(Problem::unavailable(format!("{address} is not asked"), refusal.why))
            }
        }
    }

    /// What follows from a host's refusal, which shows the newer term. A host that can show none has not the last word.
    pub(crate) fn apply_refusal(
        &self,
        address: &str,
        by: Option<&HeaderValue>,
        said: &Problem,
    ) -> Problem {
        let shown = by.and_then(|by| by.to_str().ok()).map(|by| SignedTerm(by.to_owned()));
        let newer = shown.and_then(|shown| self.network.term(&shown));
        match newer.filter(|newer| Shown::of(self.term, Some(*newer)) == Shown::Older) {
            Some(newer) => {
                let why = format!(
                    "another controller commands the hosts: {address} says that {}",
                    said.why
                );
                self.refuse(Refusal { by: newer.number, why: why.clone() });
                Problem::unavailable(&said.what, why)
            }
            None => {
                let why =
                    format!("{address} says that another controller commands, and shows no proof");
                Problem::unavailable(&said.what, why)
            }
        }
    }
}
