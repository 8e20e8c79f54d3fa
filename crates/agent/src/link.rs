//! Measures the link to another agent's host: round trip and rate.

use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::body::Body;
use bytes::Bytes;
use futures_util::future::try_join_all;
use perigee_http::{Expected, Network, authority_of};
use perigee_model::Problem;
use perigee_model::limits::{MEASURE_S, OutOfLimits, PROBE_BYTES, PROBE_STREAMS};
use perigee_model::vm::{LinkProbe, ProbeLink};
use tokio::net::TcpStream;

const CHUNK_BYTES: usize = 64 << 10;
const CONNECTS: usize = 7;
const DEADLINE: Duration = Duration::from_secs(60);

/// Bytes that no link can compress.
fn chunk() -> Bytes {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let words = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.take(CHUNK_BYTES / 8).flatten().collect()
}

/// A body with this many bytes.
pub fn blob(length_bytes: u64) -> Result<Body, Problem> {
    let too_long = |error: OutOfLimits| error.problem("can't send bytes for a probe");
    PROBE_BYTES.check(length_bytes).map_err(too_long)?;
    let whole = chunk();
    let mut left = usize::try_from(length_bytes).unwrap_or(0);
    let chunks = std::iter::from_fn(move || {
        let length = left.min(CHUNK_BYTES);
        left -= length;
        (length > 0).then(|| Ok::<_, std::convert::Infallible>(whole.slice(..length)))
    });
    Ok(Body::from_stream(futures_util::stream::iter(chunks)))
}

/// Connects several times for the round trip, then reads a blob for the rate.
pub async fn probe(request: &ProbeLink, network: &Network) -> Result<LinkProbe, Problem> {
    let what = || format!("can't probe the link to {}", request.peer_agent_url);
    let bad = |error: OutOfLimits| error.problem(what());
    PROBE_BYTES.check(request.length_bytes).map_err(bad)?;
    PROBE_STREAMS.check(request.streams).map_err(bad)?;
    request.for_s.map_or(Ok(1), |seconds| MEASURE_S.check(seconds)).map_err(bad)?;
    let measure = async {
        let rtt_ms = round_trip_ms(&request.peer_agent_url).await?;
        let rate_bytes_per_s = match request.for_s {
            None => rate(request, network).await?,
            Some(seconds) => rate_for(request, network, Duration::from_secs(seconds)).await?,
        };
        Ok(LinkProbe { rtt_ms, rate_bytes_per_s })
    };
    let deadline = DEADLINE + Duration::from_secs(request.for_s.unwrap_or(0));
    tokio::time::timeout(deadline, measure).await.unwrap_or_else(|_| {
        Err(Problem::unavailable(what(), format!("it took longer than {} s", deadline.as_secs())))
    })
}

async fn round_trip_ms(url: &str) -> Result<f64, Problem> {
    let address = address_of(url)?;
    let mut times_ms = Vec::with_capacity(CONNECTS);
    for _ in 0..CONNECTS {
        let start = Instant::now();
        let stream = TcpStream::connect(address).await.map_err(|e| {
            Problem::unavailable(format!("can't connect to {address}"), e)
                .next("check that the agent is running there")
        })?;
        times_ms.push(start.elapsed().as_secs_f64() * 1000.0);
        drop(stream);
    }
    times_ms.sort_by(f64::total_cmp);
    Ok(times_ms[CONNECTS / 2])
}

/// `IP:PORT` of `http://IP:PORT` or `https://IP:PORT`.
pub fn address_of(url: &str) -> Result<&str, Problem> {
    authority_of(url).ok_or_else(|| {
        let why = "it is neither http://IP:PORT nor https://IP:PORT";
        Problem::invalid(format!("can't use the address {url:?}"), why)
    })
}

/// The rate of all streams together in the last three quarters of this time. Each stream reads one blob after another.
async fn rate_for(request: &ProbeLink, network: &Network, whole: Duration) -> Result<u64, Problem> {
    let url = &request.peer_agent_url;
    let client = network.client(url, Expected::Address, DEADLINE + whole)?;
    let path = format!("/v1/blob?length_bytes={}", request.length_bytes);
    let read_bytes = AtomicU64::new(0);
    let stream = async || -> Result<Infallible, Problem> {
        loop {
            let mut response = client.get_response(&path).await?;
            let failed = |e| Problem::unavailable(format!("can't read from {url}"), e);
            while let Some(chunk) = response.chunk().await.map_err(failed)? {
                read_bytes.fetch_add(chunk.len() as u64, Ordering::Relaxed);
            }
        }
    };
    let now = || read_bytes.load(Ordering::Relaxed);
    let measure = async {
        tokio::time::sleep(whole / 4).await;
        let (begun, before) = (Instant::now(), now());
        tokio::time::sleep(whole * 3 / 4).await;
        let nanos = begun.elapsed().as_nanos().max(1);
        let rate = u128::from(now() - before) * 1_000_000_000 / nanos;
        u64::try_from(rate).unwrap_or(u64::MAX)
    };
    let streams = try_join_all((0..request.streams).map(|_| stream()));
    tokio::select! {
        rate = measure => Ok(rate),
        failed = streams => Err(failed.err().unwrap_or_else(|| {
            Problem::internal(format!("can't read from {url}"), "no stream was asked for")
        })),
    }
}

async fn rate(request: &ProbeLink, network: &Network) -> Result<u64, Problem> {
    let client = network.client(&request.peer_agent_url, Expected::Address, DEADLINE)?;
    let path = format!("/v1/blob?length_bytes={}", request.length_bytes);
    let mut response = client.get_response(&path).await?;
    let mut meter = Meter::new(request.length_bytes);
    let start = Instant::now();
    loop {
        let chunk = response.chunk().await.map_err(|e| {
            Problem::unavailable(format!("can't read from {}", request.peer_agent_url), e)
        })?;
        let Some(chunk) = chunk else { break };
        meter.add(chunk.len() as u64, start.elapsed());
    }
    if meter.read_bytes < request.length_bytes {
        return Err(Problem::unavailable(
            format!("can't read from {}", request.peer_agent_url),
            format!("only {} of {} bytes arrived", meter.read_bytes, request.length_bytes),
        ));
    }
    Ok(meter.rate_bytes_per_s())
}

/// Measures the rate of the last three quarters, because TCP starts slowly: with a long round trip the first
/// round trips would hide the link's rate.
struct Meter {
    skip_bytes: u64,
    read_bytes: u64,
    /// The start of the measured part: bytes read and time.
    mark: Option<(u64, Duration)>,
    end: Duration,
}

impl Meter {
    fn new(length_bytes: u64) -> Self {
        Self { skip_bytes: length_bytes / 4, read_bytes: 0, mark: None, end: Duration::ZERO }
    }

    fn add(&mut self, bytes: u64, at: Duration) {
        self.read_bytes += bytes;
        self.end = at;
        if self.mark.is_none() && self.read_bytes > self.skip_bytes {
            self.mark = Some((self.read_bytes, at));
        }
    }

    /// The rate of all bytes if they came in one piece.
    #[allow(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rate is not that precise, and neither negative nor beyond u64"
    )]
    fn rate_bytes_per_s(&self) -> u64 {
        let (from_bytes, from) = match self.mark {
            Some((bytes, at)) if bytes < self.read_bytes && at < self.end => (bytes, at),
            _ => (0, Duration::ZERO),
        };
        let seconds = (self.end - from).as_secs_f64().max(1e-6);
        ((self.read_bytes - from_bytes) as f64 / seconds) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slow_beginning_does_not_count() {
        let mut meter = Meter::new(4000);
        meter.add(1001, Duration::from_secs(10));
        meter.add(2999, Duration::from_secs(11));
        assert_eq!(meter.rate_bytes_per_s(), 2999);
    }

    #[test]
    fn a_blob_in_one_piece_counts_whole() {
        let mut meter = Meter::new(1000);
        meter.add(1000, Duration::from_secs(2));
        assert_eq!(meter.rate_bytes_per_s(), 500);
    }

    #[test]
    fn an_address_needs_a_port() {
        assert_eq!(address_of("http://10.0.0.1:7/").unwrap(), "10.0.0.1:7");
        for bad in ["http://10.0.0.1", "10.0.0.1:7", "http://x:y"] {
            assert!(address_of(bad).is_err(), "{bad}");
        }
    }

    /// An agent that sends blobs.
    async fn peer() -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let blobs = axum::routing::get(async || blob(1 << 20).expect("a blob"));
        let router = axum::Router::new().route("/v1/blob", blobs);
        tokio::spawn(async move { axum::serve(listener, router).await });
        url
    }

    #[tokio::test]
    async fn streams_read_until_the_time_is_over() {
        let ask = ProbeLink {
            peer_agent_url: peer().await,
            length_bytes: 1 << 20,
            for_s: Some(1),
            streams: 4,
        };
        let measured = probe(&ask, &Network::Plain).await.expect("figures");
        assert!(measured.rate_bytes_per_s > 0 && measured.rtt_ms > 0.0, "{measured:?}");
        for (for_s, streams, names) in
            [(Some(61), 1, "1m"), (Some(0), 1, "1s"), (None, 17, "16"), (None, 0, "1")]
        {
            let bad = ProbeLink { for_s, streams, ..ask.clone() };
            let refused = probe(&bad, &Network::Plain).await.expect_err("beyond a limit");
            assert!(refused.why.contains(names), "{refused}");
        }
    }

    #[tokio::test]
    async fn a_peer_that_ends_in_between_is_no_rate() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                drop(socket);
            }
        });
        let (length_bytes, for_s) = (1 << 20, Some(30));
        let ask = ProbeLink { peer_agent_url: url, length_bytes, for_s, streams: 2 };
        probe(&ask, &Network::Plain).await.expect_err("it answers nothing");
    }

    #[test]
    fn a_blob_beyond_the_bound_is_refused() {
        assert!(blob(64 << 20).is_ok());
        assert!(blob((64 << 20) + 1).is_err());
    }
}
