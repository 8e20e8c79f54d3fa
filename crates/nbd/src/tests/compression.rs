//! Reads that are sent compressed.

use perigee_block::stats::Counters;

use super::*;

const READ: u32 = 64 << 10;

/// Half of it are the same few bytes, and half of it can't be compressed.
fn content() -> Vec<u8> {
    let mut state = 1_u64;
    let noise = (0..SIZE_BYTES / 2).map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_be_bytes()[0]
    });
    b"compress".repeat(SIZE_BYTES / 16).into_iter().chain(noise).collect()
}

async fn opened(memory: &Arc<Memory>, listen: Listen) -> (Running, NbdDevice, Arc<Counters>) {
    *memory.bytes.lock().expect("no holder panics") = content();
    let server = Running::start_with(memory, &listen, ServerOptions::default()).await;
    let counters = Arc::<Counters>::default();
    let remote =
        RemoteExport { counters: Some(counters.clone()), ..RemoteExport::new(listen, "data") };
    let device = within("the export to open", NbdDevice::open(remote)).await.expect("the export");
    (server, device, counters)
}

async fn read_everything(device: &NbdDevice) {
    for (number, expected) in content().chunks(READ as usize).enumerate() {
        let offset = u64::from(READ) * number as u64;
        let data = within("a read", device.read(offset, READ)).await.expect("a read");
        assert!(data == expected, "at {offset}");
    }
}

#[tokio::test]
async fn reads_over_a_thin_link_are_compressed_where_that_helps() {
    let memory = Memory::new(0);
    let address = Listen::Tcp(format!("127.0.0.1:{}", perigee_http::unused_port()));
    let (server, device, counters) = opened(&memory, address).await;
    read_everything(&device).await;
    assert_eq!(counters.snapshot().network_saved_bytes, 0, "nothing shows that the link is thin");
    device.seem_thin();
    read_everything(&device).await;
    let stats = counters.snapshot();
    let (saved, most) = (stats.network_saved_bytes, SIZE_BYTES as u64 / 2);
    assert!(saved > most * 9 / 10 && saved < most, "{stats:?}");
    assert_eq!(stats.network_bytes, 2 * SIZE_BYTES as u64, "what the reader got");
    server.stop().await;
}

#[tokio::test]
async fn nothing_is_compressed_on_one_host() {
    let memory = Memory::new(0);
    let (_dir, path) = socket();
    let (server, device, counters) = opened(&memory, Listen::Unix(path)).await;
    device.seem_thin();
    read_everything(&device).await;
    assert_eq!(counters.snapshot().network_saved_bytes, 0);
    server.stop().await;
}
