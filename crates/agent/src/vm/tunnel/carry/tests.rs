use std::sync::mpsc;

use proptest::prelude::*;

use super::*;

const PATIENCE: Duration = Duration::from_secs(60);

/// The tests' program is this process if a test starts a tunnel.
#[test]
fn it_is_the_process_of_a_tunnel() {
    let words: Vec<String> = std::env::args().collect();
    let Some(at) = words.iter().position(|word| word == "--nocapture") else { return };
    if let [key, end, at, to] = &words[at + 1..] {
        carry_for_ever(Path::new(key), end, at, to).unwrap();
    }
}

fn key(byte: &str) -> MigrationKey {
    MigrationKey { hex: byte.repeat(MigrationKey::DIGITS / 2) }
}

/// Two tunnels, and what has become of them.
struct Pair {
    /// QEMU's end at the source and at the destination.
    outside: [UnixStream; 2],
    /// Another handle of the connection between them.
    network: TcpStream,
    ended: [mpsc::Receiver<io::Result<()>>; 2],
}

fn pair_with(keys: [&MigrationKey; 2]) -> Pair {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let network = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (accepted, _) = listener.accept().unwrap();
    let other = network.try_clone().unwrap();
    let begin = |key, end, network: TcpStream| {
        let (outside, plain) = UnixStream::pair().unwrap();
        outside.set_read_timeout(Some(PATIENCE)).unwrap();
        let tls = Tls::new(key, end).unwrap();
        let (tell, ended) = mpsc::channel();
        thread::spawn(move || tell.send(tls.carry(&network, || Ok(plain))));
        (outside, ended)
    };
    let (source, source_ended) = begin(keys[0], End::Source, network);
    let (destination, destination_ended) = begin(keys[1], End::Destination, accepted);
    Pair {
        outside: [source, destination],
        network: other,
        ended: [source_ended, destination_ended],
    }
}

fn bytes(count: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_be_bytes()[0]
    };
    (0..count).map(|_| next()).collect()
}

/// Writes these in pieces of this size, and then says that it was all.
fn write_all(mut to: &UnixStream, bytes: &[u8], piece: usize) {
    bytes.chunks(piece).for_each(|piece| to.write_all(piece).unwrap());
    to.shutdown(Shutdown::Write).unwrap();
}

fn read_all(mut from: &UnixStream) -> Vec<u8> {
    let mut all = Vec::new();
    from.read_to_end(&mut all).unwrap();
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn what_goes_in_comes_out_both_ways(
        there in 0_usize..1_500_000, back in 0_usize..1_500_000, piece in 1_000_usize..600_000, seed: u64
    ) {
        let pair = pair_with([&key("ab"), &key("ab")]);
        let sent = [bytes(there, seed), bytes(back, !seed)];
        let [source, destination] = &pair.outside;
        let come = thread::scope(|scope| {
            scope.spawn(|| write_all(source, &sent[0], piece));
            scope.spawn(|| write_all(destination, &sent[1], piece));
            let come = scope.spawn(|| read_all(destination));
            [come.join().unwrap(), read_all(source)]
        });
        prop_assert!(come == sent);
        for ended in pair.ended {
            ended.recv_timeout(PATIENCE).unwrap().unwrap();
        }
    }
}

#[test]
fn a_direction_that_has_ended_leaves_the_other_one_open() {
    let pair = pair_with([&key("ab"), &key("ab")]);
    let [mut source, destination] = pair.outside;
    destination.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_all(&source), b"", "the end came");
    source.write_all(b"memory").unwrap();
    source.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_all(&destination), b"memory");
    for ended in pair.ended {
        ended.recv_timeout(PATIENCE).unwrap().unwrap();
    }
}

#[test]
fn another_key_is_refused_at_both_ends() {
    let pair = pair_with([&key("ab"), &key("cd")]);
    let [source, destination] = &pair.outside;
    // It may be refused before that.
    let _ = (&mut &*source).write_all(b"memory");
    let [at_source, at_destination] = pair.ended.map(|ended| ended.recv_timeout(PATIENCE).unwrap());
    let refused = at_source.unwrap_err().to_string();
    assert!(refused.contains("UnknownIssuer"), "{refused}");
    assert!(at_destination.is_err());
    assert_eq!(read_all(destination), b"");
}

/// The destination's own check, which the source's comes before.
#[test]
fn a_source_with_another_key_is_refused() {
    let [right, wrong] = ["ab", "cd"].map(key);
    let Tls::Source(own) = Tls::new(&wrong, End::Source).unwrap() else { panic!() };
    let mut own = Arc::unwrap_or_clone(own);
    let destination = pair_of(&right, End::Destination);
    let provider = Arc::new(default_provider());
    own.dangerous().set_certificate_verifier(Arc::new(Only { key: destination, provider }));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let network = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (accepted, _) = listener.accept().unwrap();
    let (outside, plain) = UnixStream::pair().unwrap();
    let source = thread::spawn(move || Tls::Source(Arc::new(own)).carry(&network, || Ok(plain)));
    let tls = Tls::new(&right, End::Destination).unwrap();
    let refused = tls.carry(&accepted, || panic!("QEMU is not reached")).unwrap_err().to_string();
    assert!(refused.contains("UnknownIssuer"), "{refused}");
    drop(accepted);
    assert!(source.join().unwrap().is_err());
    drop(outside);
}

fn pair_of(key: &MigrationKey, end: End) -> CertificateDer<'static> {
    pair(key, end).unwrap().end_entity_cert().unwrap().clone().into_owned()
}

#[test]
fn each_end_and_each_key_has_a_pair_of_its_own() {
    let all =
        ["ab", "cd"].map(|byte| [End::Source, End::Destination].map(|e| pair_of(&key(byte), e)));
    let [[a, b], [c, d]] = &all;
    assert!(a != b && a != c && a != d && b != c && b != d && c != d);
    assert_eq!(*a, pair_of(&key("ab"), End::Source), "made anew it is the same");
}

#[test]
fn a_connection_that_is_cut_is_no_end() {
    let pair = pair_with([&key("ab"), &key("ab")]);
    let [mut source, mut destination] = pair.outside;
    source.write_all(b"memory").unwrap();
    let mut come = [0; 6];
    destination.read_exact(&mut come).unwrap();
    pair.network.shutdown(Shutdown::Both).unwrap();
    for ended in pair.ended {
        let why = ended.recv_timeout(PATIENCE).unwrap().unwrap_err();
        assert_eq!(why.kind(), ErrorKind::UnexpectedEof, "{why}");
    }
    // Also who only waits hears of it.
    assert_eq!((read_all(&source), read_all(&destination)), (Vec::new(), Vec::new()));
    drop((source, destination));
}

#[test]
fn a_reader_that_stands_holds_its_writer_up_and_not_the_other_direction() {
    let pair = pair_with([&key("ab"), &key("ab")]);
    let [source, mut destination] = pair.outside;
    let sent = bytes(96 << 20, 7);
    source.set_nonblocking(true).unwrap();
    let (mut taken, until) = (0, Instant::now() + PATIENCE);
    let mut stands_since = Instant::now();
    // Until nothing is taken any more.
    while stands_since.elapsed() < Duration::from_secs(1) {
        assert!(taken < sent.len() && Instant::now() < until, "it takes more and more: {taken}");
        match (&mut &source).write(&sent[taken..]) {
            Ok(count) => (taken, stands_since) = (taken + count, Instant::now()),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
    }
    source.set_nonblocking(false).unwrap();
    destination.write_all(b"answer").unwrap();
    let mut answer = [0; 6];
    (&mut &source).read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"answer");
    thread::scope(|scope| {
        scope.spawn(|| write_all(&source, &sent[taken..], STEP_BYTES));
        assert!(read_all(&destination) == sent);
    });
}

#[test]
fn one_connection_too_many_is_hung_up_on() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    let (begun, all_begun) = mpsc::channel();
    let begun = Mutex::new(begun);
    thread::spawn(move || {
        serve(listener.incoming(), move |mut stream: TcpStream| {
            begun.lock().unwrap().send(()).unwrap();
            stream.read(&mut [0]).map(drop)
        })
    });
    let connect = || TcpStream::connect(to).unwrap();
    let mut open: Vec<TcpStream> = (0..CONNECTIONS_MAX).map(|_| connect()).collect();
    for _ in 0..CONNECTIONS_MAX {
        all_begun.recv_timeout(PATIENCE).unwrap();
    }
    let mut more = connect();
    more.set_read_timeout(Some(PATIENCE)).unwrap();
    let end = more.read(&mut [0]).map_err(|error| error.kind());
    assert!(matches!(end, Ok(0) | Err(ErrorKind::ConnectionReset)), "it is hung up on: {end:?}");
    open.pop();
    let until = Instant::now() + PATIENCE;
    let again = loop {
        let again = connect();
        if all_begun.recv_timeout(Duration::from_millis(300)).is_ok() {
            break again;
        }
        assert!(Instant::now() < until, "none is taken when one has ended");
    };
    drop(again);
}
