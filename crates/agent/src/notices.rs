//! Whether the provider of a rented host takes the host back: what the metadata address says, which only the machine itself can reach.
//!
//! The address speaks as EC2's Instance Metadata Service, version 2, does: a token first, and with the token the question. That there is
//! nothing at the path (404) is no notice. Everything else that is no notice either is not known, and people are told so.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use perigee_http::{Client, Method, authority_of};
use perigee_model::Problem;
use perigee_model::lease::HostNotice;
use perigee_model::units::parse_time;
use serde::Deserialize;

/// Where EC2 and others that speak so have it.
pub const METADATA: &str = "http://169.254.169.254";
const TOKEN: &str = "/latest/api/token";
const TTL_HEADER: &str = "x-aws-ec2-metadata-token-ttl-seconds";
const TTL_S: &str = "60";
const TOKEN_HEADER: &str = "x-aws-ec2-metadata-token";
const TOKEN_BYTES_MAX: usize = 1024;
const ACTION: &str = "/latest/meta-data/spot/instance-action";
/// EC2's notices come 120 s before the end.
const LOOK_EVERY: Duration = Duration::from_secs(5);
const ANSWER_MAX: Duration = Duration::from_secs(3);

/// What the provider has said of this host.
#[derive(Debug)]
pub struct Notices {
    client: Client,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    notice: Option<HostNotice>,
    /// Why it is not known whether there is a notice now.
    trouble: Option<String>,
}

/// The answer at [`ACTION`].
#[derive(Debug, Deserialize)]
struct InstanceAction {
    action: String,
    time: String,
}

impl Notices {
    /// Of a metadata address, `http://HOST` or `http://HOST:PORT`. Nothing is asked yet.
    ///
    /// # Errors
    /// `Invalid` if the address has another form.
    pub fn new(address: &str) -> Result<Self, Problem> {
        let with_port = match authority_of(address) {
            Some(_) => address.to_owned(),
            None => format!("{}:80", address.trim_end_matches('/')),
        };
        Ok(Self { client: Client::new(&with_port, ANSWER_MAX)?, known: Mutex::default() })
    }

    /// That the host is taken back; `None` if no such thing was heard.
    pub fn notice(&self) -> Option<HostNotice> {
        self.known().notice.clone()
    }

    /// What people should know.
    pub fn warning(&self) -> Option<String> {
        let why = self.known().trouble.clone()?;
        Some(format!(
            "it is not known whether the provider takes this host back: {why}; where a provider does not say so, start the agent with \
             --metadata none"
        ))
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks again and again.
    pub async fn keep(&self) {
        loop {
            self.look().await;
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Asks once.
    pub async fn look(&self) {
        let heard = self.ask().await;
        let mut known = self.known();
        match heard {
            Ok(notice) => {
                if notice != known.notice {
                    match &notice {
                        Some(notice) => {
                            tracing::warn!(
                                "the provider takes this host back: {}",
                                notice.in_words()
                            );
                        }
                        None => {
                            tracing::warn!("the provider does not take this host back any more")
                        }
                    }
                }
                *known = Known { notice, trouble: None };
            }
            // What was heard before still holds.
            Err(problem) => {
                let why = format!("{}: {}", problem.what, problem.why);
                if known.trouble.is_none() {
                    tracing::warn!(
                        "it is not known whether the provider takes this host back: {why}"
                    );
                }
                known.trouble = Some(why);
            }
        }
    }

    async fn ask(&self) -> Result<Option<HostNotice>, Problem> {
        let what = || format!("can't understand the metadata at {}", self.client.address());
        let token = self.client.text(Method::PUT, TOKEN, (TTL_HEADER, TTL_S)).await?;
        let token =
            token.ok_or_else(|| Problem::internal(what(), format!("no {TOKEN} is there")))?;
        let is_token = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic());
        if !is_token || token.len() > TOKEN_BYTES_MAX {
            return Err(Problem::internal(what(), "its token is none"));
        }
        let Some(text) = self.client.text(Method::GET, ACTION, (TOKEN_HEADER, &token)).await?
        else {
            return Ok(None);
        };
        let said: InstanceAction =
            serde_json::from_str(&text).map_err(|error| Problem::internal(what(), error))?;
        let at_ms = parse_time(&said.time).map_err(|error| Problem::internal(what(), error))?;
        let action = said.action.chars().filter(|c| c.is_ascii_graphic()).take(40).collect();
        Ok(Some(HostNotice { action, ends_unix_s: at_ms / 1000 }))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use axum::Router;
    use axum::extract::State;
    use axum::http::{HeaderMap, StatusCode};
    use axum::routing::{get, put};

    use super::*;

    /// What the server answers at the two paths.
    type Said = Arc<Mutex<[(StatusCode, String); 2]>>;

    async fn token(State(said): State<Said>, headers: HeaderMap) -> (StatusCode, String) {
        assert_eq!(headers.get(TTL_HEADER).expect("a life time"), TTL_S);
        said.lock().unwrap()[0].clone()
    }

    async fn action(State(said): State<Said>, headers: HeaderMap) -> (StatusCode, String) {
        match headers.get(TOKEN_HEADER) {
            Some(token) if token == "t0ken==" => said.lock().unwrap()[1].clone(),
            _ => (StatusCode::UNAUTHORIZED, String::new()),
        }
    }

    /// A metadata address that speaks HTTP over TCP.
    async fn server() -> (Notices, Said) {
        let none = || (StatusCode::NOT_FOUND, "<html>no</html>".to_owned());
        let said: Said = Arc::new(Mutex::new([(StatusCode::OK, "t0ken==".to_owned()), none()]));
        let router = Router::new()
            .route(TOKEN, put(token))
            .route(ACTION, get(action))
            .with_state(Arc::clone(&said));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("an address"));
        tokio::spawn(async move { axum::serve(listener, router).await });
        (Notices::new(&address).expect("an address"), said)
    }

    fn say(said: &Said, path: usize, status: StatusCode, text: &str) {
        said.lock().unwrap()[path] = (status, text.to_owned());
    }

    #[tokio::test]
    async fn a_notice_is_heard_and_what_is_not_known_is_no_end_of_it() {
        let (notices, said) = server().await;
        notices.look().await;
        assert_eq!((notices.notice(), notices.warning()), (None, None));
        say(&said, 1, StatusCode::OK, r#"{"action": "terminate", "time": "2026-11-29T21:02:00Z"}"#);
        notices.look().await;
        let heard = notices.notice().expect("a notice");
        assert_eq!((heard.action.as_str(), heard.ends_unix_s), ("terminate", 1_795_986_120));
        assert_eq!(notices.warning(), None);
        for (path, status, text) in [
            (1, StatusCode::INTERNAL_SERVER_ERROR, "oops"),
            (1, StatusCode::OK, "<html>a login page</html>"),
            (1, StatusCode::OK, r#"{"action": "terminate", "time": "soon"}"#),
            (0, StatusCode::OK, "an odd\ntoken"),
            (0, StatusCode::OK, "another"),
            (0, StatusCode::NOT_FOUND, "version 1 only"),
        ] {
            say(&said, path, status, text);
            notices.look().await;
            assert_eq!(notices.notice().as_ref(), Some(&heard), "{text}");
            assert!(notices.warning().expect(text).contains("not known"), "{text}");
            say(&said, 0, StatusCode::OK, "t0ken==");
        }
        say(&said, 1, StatusCode::NOT_FOUND, "");
        notices.look().await;
        assert_eq!((notices.notice(), notices.warning()), (None, None), "it was taken back");
    }

    #[tokio::test]
    async fn an_address_where_nobody_answers_is_not_known() {
        let port = perigee_http::unused_port();
        let notices = Notices::new(&format!("http://127.0.0.1:{port}")).expect("an address");
        notices.look().await;
        assert_eq!(notices.notice(), None);
        assert!(notices.warning().expect("not known").contains("--metadata none"));
        assert!(Notices::new("169.254.169.254").is_err());
        assert_eq!(
            Notices::new(METADATA).expect("one").client.address(),
            "http://169.254.169.254:80"
        );
    }
}
