//! Asks the controller about work that goes on without the command: a controller that is started again is waited for.

use std::time::Duration;

use perigee_http::Client;
use perigee_model::{Problem, ProblemKind};
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::output;

/// A controller that starts again reads its records within seconds.
const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(500);

/// What is at a path. While the controller does not answer, it is asked again for a while. After that the error says
/// `goes_on`: that the work goes on, and which command shows it.
///
/// # Errors
/// As [`Client::get`].
pub async fn get<T: DeserializeOwned>(
    client: &Client,
    path: &str,
    goes_on: &str,
) -> Result<T, Problem> {
    get_within(client, path, goes_on, PATIENCE).await
}

async fn get_within<T: DeserializeOwned>(
    client: &Client,
    path: &str,
    goes_on: &str,
    patience: Duration,
) -> Result<T, Problem> {
    let begun = Instant::now();
    let mut is_told = false;
    loop {
        let problem = match client.get(path).await {
            Err(problem) if problem.kind == ProblemKind::Unavailable => problem,
            answered => return answered,
        };
        if begun.elapsed() >= patience {
            return Err(problem.next(goes_on));
        }
        if !is_told {
            let why = format!("{}: {}", problem.what, problem.why);
            output::note(&format!("{why}; trying again for {} s", patience.as_secs()));
            is_told = true;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Waits for work that goes on without the command. Ctrl-C ends only the waiting: then `goes_on` is said, and there is no result.
///
/// # Errors
/// As the work.
pub async fn until_interrupted<T>(
    waiting: impl Future<Output = Result<T, Problem>>,
    goes_on: &str,
) -> Result<Option<T>, Problem> {
    tokio::select! {
        ended = waiting => ended.map(Some),
        _ = tokio::signal::ctrl_c() => {
            // The terminal shows `^C` where the cursor is.
            let is_terminal = std::io::IsTerminal::is_terminal(&std::io::stderr());
            output::note(&format!("{}{goes_on}", if is_terminal { "\n" } else { "" }));
            Ok(None)
        }
    }
}

/// What was said last of something that is looked at again and again, so that nothing is said twice.
#[derive(Debug, Default)]
pub struct Said(String);

impl Said {
    /// Whether a text says something else than the last one. A number that has changed, as in `has not answered for 31 s`, is nothing
    /// new.
    pub fn is_news(&mut self, text: &str) -> bool {
        let words: String = text.chars().filter(|c| !c.is_ascii_digit()).collect();
        let is_news = words != self.0;
        self.0 = words;
        is_news
    }
}

/// The exit code of a command that Ctrl-C has ended, as a shell reports it.
pub const INTERRUPTED: u8 = 128 + 2;

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    const GOES_ON: &str = "the move goes on; `perigee vm info q-0001` shows it";

    fn free_address() -> String {
        format!("127.0.0.1:{}", perigee_http::unused_port())
    }

    fn client(address: &str) -> Client {
        Client::new(&format!("http://{address}"), Duration::from_secs(60)).expect("a client")
    }

    #[test]
    fn a_text_whose_seconds_alone_have_changed_is_not_said_again() {
        let mut said = Said::default();
        let texts =
            ["running", "host a has not answered for 9 s", "host a has not answered for 10 s"];
        assert_eq!(texts.map(|text| said.is_news(text)), [true, true, false]);
        assert!(said.is_news("running") && !said.is_news("running"));
    }

    #[tokio::test]
    async fn a_controller_that_is_started_again_is_waited_for() {
        let address = free_address();
        let client = client(&address);
        let asked = tokio::spawn(async move { get::<u32>(&client, "/", GOES_ON).await });
        tokio::time::sleep(PAUSE / 2).await;
        let listener = TcpListener::bind(&address).await.expect("the port is still free");
        let (mut stream, _) = listener.accept().await.expect("a request");
        let mut request = [0; 4096];
        assert!(stream.read(&mut request).await.expect("a request") > 0);
        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n7";
        stream.write_all(answer).await.expect("answered");
        assert_eq!(asked.await.expect("no panic"), Ok(7));
    }

    #[tokio::test]
    async fn a_controller_that_stays_away_ends_the_waiting_and_not_the_work() {
        let client = client(&free_address());
        let asked = get_within::<u32>(&client, "/", GOES_ON, PAUSE).await;
        let problem = asked.expect_err("nobody is there");
        assert_eq!((problem.kind, problem.next.as_str()), (ProblemKind::Unavailable, GOES_ON));
    }
}
