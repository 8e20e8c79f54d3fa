//! Server-sent events: that what a page shows has changed, and the new lines of a job's log.
//!
//! Nothing tells when a figure of a host or a VM changes: the controller asks for it. So an open page is made anew every
//! [`LOOK_EVERY`], once for all who see the same ([`super::looks`]), and what is told is only whether it differs. The caller is
//! looked up again each time: a token that is over, or a role that has changed, counts at once.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::{HeaderMap, Method, Uri};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream;
use perigee_http::Failure;
use perigee_model::guest::LogStream;
use perigee_model::job::LogLine;
use perigee_model::limits::{LIVE_PAGES, LIVE_PAGES_OF_ONE, LIVE_PAGES_OF_USERS, OutOfLimits};
use perigee_model::{JobId, Problem, ProblemKind};
use perigee_web::parts::LoggedLine;
use serde::Deserialize;
use tokio::time::Instant;

use super::ask::{self, Ask};
use super::looks::LOOK_EVERY;
use super::{Shared, Web, pages};
use crate::api::Caller;

/// How often a log is looked at for new lines.
const LOG_EVERY: Duration = Duration::from_secs(1);
/// A silent stream says so often that it is there, and so notices that its reader has gone.
const SIGN_OF_LIFE: Duration = Duration::from_secs(15);
/// A stream ends after this time, and the browser opens another one: certificates are checked when a request comes.
const LIFE_MAX: Duration = Duration::from_secs(600);
/// A browser waits so long before it opens a lost stream again.
const AGAIN: Duration = Duration::from_secs(2);
/// So many lines of a log are read at a time.
const LINES: usize = 500;

/// How many streams are open.
#[derive(Debug, Default)]
pub struct LivePages(Mutex<Open>);

#[derive(Debug, Default)]
struct Open {
    /// Of each user.
    of_each: BTreeMap<String, u32>,
    /// Of all who are no admins.
    of_users: u32,
}

/// A stream. It counts until it is dropped.
#[derive(Debug)]
struct Place {
    all: Arc<LivePages>,
    who: String,
    is_admins: bool,
}

impl LivePages {
    /// # Errors
    /// `Unavailable`, with the limit, if there are too many.
    fn begin(self: &Arc<Self>, who: &str, is_admins: bool) -> Result<Place, Problem> {
        let full = |error: OutOfLimits| {
            Problem::new(ProblemKind::Unavailable, "can't keep the page fresh", error)
                .next("close other pages, or load this one again to see what is new")
        };
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of_one = open.of_each.get(who).copied().unwrap_or_default() + 1;
        let of_users = open.of_users + u32::from(!is_admins);
        LIVE_PAGES_OF_ONE.check(of_one).map_err(full)?;
        LIVE_PAGES_OF_USERS.check(of_users).map_err(full)?;
        LIVE_PAGES.check(open.of_each.values().sum::<u32>() + 1).map_err(full)?;
        open.of_users = of_users;
        open.of_each.insert(who.to_owned(), of_one);
        Ok(Place { all: Arc::clone(self), who: who.to_owned(), is_admins })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.all.0.lock().unwrap_or_else(PoisonError::into_inner);
        open.of_users = open.of_users.saturating_sub(u32::from(!self.is_admins));
        if let Some(own) = open.of_each.get_mut(&self.who) {
            *own = own.saturating_sub(1);
            if *own == 0 {
                open.of_each.remove(&self.who);
            }
        }
    }
}

/// A stream's reader, and since when it reads.
#[derive(Clone)]
struct Reader {
    web: Web,
    caller: Caller,
    begun: Instant,
    _place: Arc<Place>,
}

impl Reader {
    fn new(web: Web, caller: Caller) -> Result<Self, Problem> {
        let place = Arc::new(web.live.begin(&caller.who, caller.is_admin())?);
        Ok(Self { web, caller, begun: Instant::now(), _place: place })
    }

    /// Whether the stream is not too old, and its reader is still a user, with the role that it has now.
    fn may_go_on(&mut self) -> bool {
        if self.begun.elapsed() > LIFE_MAX {
            return false;
        }
        let Some(token) = self.caller.token.clone() else { return true };
        let user = self.web.cluster.accounts.by_token_id(&token.id);
        let Some(user) = user else { return false };
        self.caller = Caller { token: Some(token), ..user.into() };
        true
    }
}

fn events<S>(events: S) -> Response
where
    S: stream::Stream<Item = Result<Event, Infallible>> + Send + 'static,
{
    Sse::new(events).keep_alive(KeepAlive::new().interval(SIGN_OF_LIFE)).into_response()
}

/// The query of [`page`].
#[derive(Debug, Deserialize)]
pub struct Of {
    /// The page's path, with its query.
    of: String,
    /// On the page of a job: the lines of its log after this message are told too.
    after: Option<u64>,
    /// Those of this VM, of a job with several ones.
    rank: Option<u32>,
}

/// Tells the state of what a page shows: at once, and whenever it is another one. On the page of a job it also tells the new lines
/// of the log, each once, until the job has ended: a browser has few connections.
pub async fn page(
    State(web): Shared,
    caller: Caller,
    headers: HeaderMap,
    query: Result<Query<Of>, axum::extract::rejection::QueryRejection>,
) -> Result<Response, Failure> {
    let Query(asked) = query.map_err(|e| Problem::invalid("request query", e.body_text()))?;
    let uri: Uri = asked.of.parse().map_err(|e| Problem::invalid("request query", e))?;
    if !ask::may(&caller, &Method::GET, uri.path()) {
        let why = format!("{} may not ask for this", caller.who);
        return Err(Problem::forbidden(format!("can't keep {} fresh", uri.path()), why).into());
    }
    let mut log = None;
    if let Some(after) = asked.after {
        let job = pages::job_of(&uri).ok_or_else(|| {
            Problem::invalid("request query", format!("{} has no log", uri.path()))
        })?;
        let job = Ask::new(&web.cluster, &caller).job(job).await?.id;
        // A browser that opens a lost stream again says which line it had last.
        let last = headers.get("last-event-id").and_then(|last| last.to_str().ok()?.parse().ok());
        log = Some((job, last.unwrap_or(after)));
    }
    let reader = Reader::new(web, caller)?;
    let following = log.map(|(job, after)| Following {
        reader: reader.clone(),
        job,
        rank: asked.rank,
        after,
        due: Instant::now(),
        lines: VecDeque::new(),
        was_over: false,
        is_told: false,
    });
    let watching = Watching { reader, uri, due: Instant::now(), told: None };
    let states = stream::unfold(watching, |mut watching| async move {
        let event = watching.next().await?;
        Some((Ok(event), watching))
    });
    let lines = stream::unfold(following, |following| async move {
        let mut following = following?;
        let event = following.next().await?;
        Some((Ok(event), Some(following)))
    });
    Ok(events(stream::select(states, lines)))
}

/// What watches a page.
struct Watching {
    reader: Reader,
    uri: Uri,
    /// When it looks again.
    due: Instant,
    told: Option<String>,
}

impl Watching {
    /// The next event; `None` at the stream's end.
    async fn next(&mut self) -> Option<Event> {
        loop {
            tokio::time::sleep_until(self.due).await;
            let reader = &mut self.reader;
            if !reader.may_go_on() || !ask::may(&reader.caller, &Method::GET, self.uri.path()) {
                return None;
            }
            let web = &reader.web;
            let seen = web.looks.seen(&web.cluster, &reader.caller, &self.uri).await;
            self.due = seen.at + LOOK_EVERY;
            if self.told.as_ref() == Some(&seen.state) {
                continue;
            }
            let event = Event::default().event("state").data(&seen.state);
            let is_first = self.told.replace(seen.state).is_none();
            return Some(if is_first { event.retry(AGAIN) } else { event });
        }
    }
}

/// What is added to the address of a page's events, so that the lines of the log after this message come with them.
pub fn log_query(rank: Option<u32>, after: u64) -> String {
    let rank = rank.map_or_else(String::new, |rank| format!("&rank={rank}"));
    format!("after={after}{rank}")
}

/// A line as it is shown.
pub fn logged(line: &LogLine) -> LoggedLine {
    LoggedLine { text: line.line.clone(), is_error: line.stream == LogStream::Stderr }
}

/// What follows a job's log.
struct Following {
    reader: Reader,
    job: JobId,
    rank: Option<u32>,
    after: u64,
    /// When it looks again.
    due: Instant,
    lines: VecDeque<LogLine>,
    /// The job had ended before the log was read last.
    was_over: bool,
    is_told: bool,
}

impl Following {
    /// The next event; `None` at the stream's end.
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(line) = self.lines.pop_front() {
                self.after = line.seq;
                return Some(self.event(&line));
            }
            tokio::time::sleep_until(self.due).await;
            if self.is_told || !self.reader.may_go_on() {
                return None;
            }
            self.due = Instant::now() + LOG_EVERY;
            let ask = Ask::new(&self.reader.web.cluster, &self.reader.caller);
            let more = ask.log(&self.job, (self.rank, self.after, Some(LINES))).await;
            let more = match more {
                Ok(more) => more,
                Err(problem) if is_gone(&problem) => return None,
                // What can't be read now is read with the next look.
                Err(_) => continue,
            };
            if more.is_empty() && self.was_over {
                self.is_told = true;
                return Some(Event::default().event("end").data("the job has ended"));
            }
            self.lines.extend(more);
            // Whether the reader still sees the job is asked each time, and nothing else of it.
            ask.full::<JobId>(self.job.as_str()).await.ok()?;
            self.was_over = ask.cluster.index.job(&self.job).is_none();
        }
    }

    fn event(&self, line: &LogLine) -> Event {
        let LoggedLine { text, is_error } = logged(line);
        let next = log_query(self.rank, line.seq);
        let data = serde_json::json!({"text": text, "is_error": is_error, "next": next});
        Event::default().event("line").id(line.seq.to_string()).data(data.to_string())
    }
}

/// Whether there is no such job for the reader, now and later.
fn is_gone(problem: &Problem) -> bool {
    matches!(problem.kind, ProblemKind::NotFound | ProblemKind::Forbidden)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_leave_places_for_admins() {
        let all = Arc::new(LivePages::default());
        let user = |number: i128| all.begin(&format!("acme/user{number}"), false);
        let mut places: Vec<Place> =
            (0..LIVE_PAGES_OF_USERS.max).map(|number| user(number).expect("a place")).collect();
        let refused = user(LIVE_PAGES_OF_USERS.max).expect_err("no place").to_string();
        assert!(refused.contains("for users who are no admins is 81"), "{refused}");
        for number in LIVE_PAGES_OF_USERS.max..LIVE_PAGES.max {
            places.push(all.begin(&format!("default/admin{number}"), true).expect("a place"));
        }
        let refused = all.begin("default/root", true).expect_err("no place").to_string();
        assert!(refused.contains("pages that are kept fresh is 101"), "{refused}");
        drop(places);
        let _place = user(0).expect("a place");
    }
}
