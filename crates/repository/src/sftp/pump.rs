//! Lets a connection's loop never wait for a session that waits for it.
//!
//! russh hands what comes on a channel to a queue of 100 messages, and its loop waits when the queue is full. What a client
//! says of its window is in this queue too. So a session that waits until the client has taken its answers, and reads
//! nothing meanwhile, stops the loop, which then does not send these answers: a file of more than some 20 MiB never came. Here
//! requests are taken from the channel at once, and wait for the session in a buffer.

use tokio::io::{
    AsyncRead, AsyncWrite, AsyncWriteExt as _, BufReader, DuplexStream, copy_buf, duplex, split,
};

/// Requests that wait: many more than a client sends without waiting for answers, and bounded.
const REQUESTS_BYTES: usize = 4 << 20;
/// Answers that wait until they are sent.
const ANSWERS_BYTES: usize = 1 << 20;
/// What is moved at once: some packets of SSH.
const PIECE_BYTES: usize = 128 << 10;

/// The side of a session. The other one is moved by a task, until the session has ended and its answers are sent.
pub fn pumped<S>(channel: S) -> impl AsyncRead + AsyncWrite + Unpin + Send + 'static
where
    S: AsyncRead + AsyncWrite + Send + 'static,
{
    let (requests, to_session) = duplex(REQUESTS_BYTES);
    let (answers, from_session) = duplex(ANSWERS_BYTES);
    tokio::spawn(pump(channel, to_session, from_session));
    tokio::io::join(requests, answers)
}

async fn pump<S>(channel: S, mut to_session: DuplexStream, from_session: DuplexStream)
where
    S: AsyncRead + AsyncWrite + Send + 'static,
{
    let (from_client, mut to_client) = split(channel);
    let requests = async {
        let mut from_client = BufReader::with_capacity(PIECE_BYTES, from_client);
        // However it ends, the session sees the end of its requests.
        let _ = copy_buf(&mut from_client, &mut to_session).await;
        drop(to_session);
        std::future::pending::<()>().await;
    };
    let answers = async {
        let mut from_session = BufReader::with_capacity(PIECE_BYTES, from_session);
        // A client that has gone needs no answers.
        let _ = copy_buf(&mut from_session, &mut to_client).await;
        let _ = to_client.shutdown().await;
    };
    tokio::select! {
        () = requests => {}
        () = answers => {}
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;

    use super::*;

    /// A session that answers before it reads on does not keep the client from sending.
    #[tokio::test]
    async fn requests_are_taken_while_nobody_takes_the_answers() {
        let (mut client, channel) = duplex(64);
        let mut session = pumped(channel);
        let session = tokio::spawn(async move {
            // More than the channel has room for.
            session.write_all(&[1; 100_000]).await.expect("it goes on");
            let mut requests = Vec::new();
            session.read_to_end(&mut requests).await.expect("requests");
            requests.len()
        });
        client.write_all(&[2; 100_000]).await.expect("it is taken");
        let mut answers = vec![0; 100_000];
        client.read_exact(&mut answers).await.expect("answers");
        client.shutdown().await.expect("its end");
        assert_eq!(session.await.expect("a session"), 100_000);
        assert_eq!(client.read(&mut answers).await.expect("the end"), 0);
    }
}
