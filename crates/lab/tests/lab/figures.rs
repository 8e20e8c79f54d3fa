//! What the WAN's relay can carry here, and what it takes for it. It tests nothing; to see it:
//!
//! ```text
//! CARGO_PROFILE_DEV_OPT_LEVEL=3 cargo test -p perigee-lab --test lab -- --ignored --nocapture figures
//! ```

use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use perigee_lab::Lab;
use perigee_lab::usage::Usage;
use perigee_lab::wan::{self, Change};

use crate::bench::{Bench, answers, host};

const WARM: Duration = Duration::from_secs(1);
const WINDOW: Duration = Duration::from_secs(3);

/// Runs a closure in a host's network.
fn inside<T: Send + 'static>(
    lab: &Lab,
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let namespace = format!("/run/netns/{}", lab.definition.host_namespace(&host(name)));
    let enter = move || {
        let file = std::fs::File::open(namespace).expect("a namespace");
        nix::sched::setns(file, nix::sched::CloneFlags::CLONE_NEWNET).expect("setns");
        work()
    };
    std::thread::spawn(enter).join().expect("it ended well")
}

/// MiB a second from `home1` to `cloud1`, and the relay's CPU seconds for a GiB.
fn throughput(lab: &Lab, streams: usize) -> (f64, f64) {
    static BYTES: AtomicU64 = AtomicU64::new(0);
    static STOP: AtomicBool = AtomicBool::new(false);
    STOP.store(false, Relaxed);
    let address = lab.definition.host_address(&host("cloud1")).expect("an address");
    let listener = inside(lab, "cloud1", move || TcpListener::bind((address, 0)).expect("listen"));
    let to = listener.local_addr().expect("an address");
    let mut threads = Vec::new();
    for _ in 0..streams {
        let mut sender = inside(lab, "home1", move || TcpStream::connect(to).expect("connect"));
        let (mut receiver, _) = listener.accept().expect("accept");
        threads.push(std::thread::spawn(move || {
            let block = vec![0; 256 << 10];
            while std::io::Write::write(&mut sender, &block).is_ok_and(|n| n > 0) {}
        }));
        threads.push(std::thread::spawn(move || {
            let mut room = vec![0; 256 << 10];
            while !STOP.load(Relaxed) {
                let length = std::io::Read::read(&mut receiver, &mut room).expect("read");
                BYTES.fetch_add(length as u64, Relaxed);
            }
        }));
    }
    let relay = u32::try_from(lab.relay_pid().expect("it runs")).expect("a pid");
    let cpu_s = || Usage::of(relay).expect("its figures").cpu_s;
    std::thread::sleep(WARM);
    let (began, bytes, cpu) = (Instant::now(), BYTES.load(Relaxed), cpu_s());
    std::thread::sleep(WINDOW);
    #[expect(clippy::cast_precision_loss, reason = "a figure to look at")]
    let mib = (BYTES.load(Relaxed) - bytes) as f64 / f64::from(1 << 20);
    let result = (mib / began.elapsed().as_secs_f64(), (cpu_s() - cpu) / (mib / 1024.0));
    STOP.store(true, Relaxed);
    for thread in threads {
        thread.join().expect("it ended well");
    }
    result
}

/// Keeps one core busy until it is told not to.
fn busy(work: impl FnOnce()) {
    static STOP: AtomicBool = AtomicBool::new(false);
    let spin = std::thread::spawn(|| {
        while !STOP.load(Relaxed) {
            std::hint::spin_loop();
        }
    });
    work();
    STOP.store(true, Relaxed);
    spin.join().expect("it ended well");
}

#[tokio::test]
#[ignore = "it measures and tests nothing"]
async fn figures() {
    let bench = Bench::new();
    let lab = bench.up().await;
    let [home, cloud] = ["home", "cloud"].map(|name| name.parse().expect("a name"));
    let set = async |rtt_us: u64| {
        let change = Change { rtt_us: Some(rtt_us), ..Change::default() };
        wan::set(&lab, &home, &cloud, change).await.expect("wan set");
    };
    let load = std::fs::read_to_string("/proc/loadavg").expect("the load");
    eprintln!("load of the machine before: {}", load.trim());
    for (rtt_ms, streams) in [(0, 1), (0, 4), (16, 1), (16, 4)] {
        set(rtt_ms * 1000).await;
        let (rate, cpu) = throughput(&lab, streams);
        eprintln!("{rtt_ms} ms, {streams} streams: {rate:.0} MiB/s ({cpu:.2} CPU s per GiB)");
    }
    busy(|| {
        for streams in [1, 4] {
            let (rate, cpu) = throughput(&lab, streams);
            eprintln!("16 ms, {streams} streams, one core busy: {rate:.0} MiB/s ({cpu:.2})");
        }
    });
    for rate in ["100Mbit", "500Mbit", "1Gbit", "unlimited"] {
        let rate: wan::Rate = rate.parse().expect("a rate");
        let change = Change { rtt_us: Some(16_000), rate: Some(rate), ..Change::default() };
        let link = wan::set(&lab, &home, &cloud, change).await.expect("wan set");
        let report = wan::report(&lab, &[link]).expect("a report");
        let measured = report[0].measured.rate_bits_per_s.map(Option::unwrap_or_default);
        eprintln!("set {rate}: measured {:?}", measured.map(wan::format_bits));
    }
    for rtt_ms in [1, 2, 4, 8, 16] {
        set(rtt_ms * 1000).await;
        let mut times: Vec<Duration> =
            (0..9).filter_map(|_| answers(&lab, "home1", "cloud1")).collect();
        times.sort();
        eprintln!("RTT {rtt_ms} ms: shortest {:.2?}, median {:.2?}", times[0], times[4]);
    }
    bench.down(&lab.definition.id).await;
}
