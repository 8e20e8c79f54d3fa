//! The number of bytes that a frame takes on the wire, computed from its virtio-net header.
//!
//! ```text
//! byte 0      1         2        4         6           8            10
//!      flags  GSO type  hdr_len  GSO size  csum_start  csum_offset  Ethernet frame …
//! ```
//!
//! A host passes up to 64 KiB of TCP or UDP on as one frame. On a wire it would be cut into segments of
//! `GSO size` bytes, each with its own headers. `hdr_len` is only a hint.

/// The virtio-net header before each frame of a TAP without the number of buffers.
pub const HEADER_BYTES: usize = 10;
/// 64 KiB of IP, the Ethernet header with a VLAN tag, and the header above, rounded up.
pub const FRAME_BYTES_MAX: usize = 66 << 10;

const GSO_NONE: u8 = 0;
const GSO_UDP_L4: u8 = 5;
const GSO_TYPES: u8 = 0x7f;
const UDP_HEADER_BYTES: usize = 8;
const TCP_DATA_OFFSET: usize = 12;

/// The Ethernet bytes of all segments of a frame. `frame` begins with the virtio-net header.
pub fn wire_bytes(frame: &[u8]) -> u64 {
    let ethernet = frame.get(HEADER_BYTES..).unwrap_or_default();
    let segmented = segments(frame, ethernet);
    segmented.unwrap_or(ethernet.len()) as u64
}

fn segments(frame: &[u8], ethernet: &[u8]) -> Option<usize> {
    let number =
        |at: usize| Some(usize::from(u16::from_ne_bytes(*frame.get(at..)?.first_chunk()?)));
    let (gso_type, gso_bytes, transport) = (frame.get(1)? & GSO_TYPES, number(4)?, number(6)?);
    if gso_type == GSO_NONE || gso_bytes == 0 {
        return None;
    }
    let headers = transport
        + match gso_type {
            GSO_UDP_L4 => UDP_HEADER_BYTES,
            _ => usize::from(ethernet.get(transport + TCP_DATA_OFFSET)? >> 4) * 4,
        };
    let payload = ethernet.len().checked_sub(headers)?;
    Some(payload + payload.div_ceil(gso_bytes).max(1) * headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ETHERNET_AND_IP: usize = 14 + 20;

    fn frame(
        gso_type: u8,
        gso_bytes: u16,
        hdr_len: u16,
        data_offset: u8,
        payload: usize,
    ) -> Vec<u8> {
        let transport = if gso_type == GSO_UDP_L4 { 8 } else { usize::from(data_offset) * 4 };
        let mut frame = vec![0; HEADER_BYTES + ETHERNET_AND_IP + transport + payload];
        frame[1] = gso_type;
        frame[2..4].copy_from_slice(&hdr_len.to_ne_bytes());
        frame[4..6].copy_from_slice(&gso_bytes.to_ne_bytes());
        frame[6..8].copy_from_slice(&34u16.to_ne_bytes());
        frame[HEADER_BYTES + ETHERNET_AND_IP + TCP_DATA_OFFSET] = data_offset << 4;
        frame
    }

    #[test]
    fn a_plain_frame_takes_its_length() {
        assert_eq!(wire_bytes(&frame(GSO_NONE, 0, 0, 5, 100)), 34 + 20 + 100);
    }

    #[test]
    fn each_segment_of_tcp_has_the_headers_again_whatever_the_hint_says() {
        for hdr_len in [0, 66, 200, u16::MAX] {
            let three = frame(1, 1448, hdr_len, 8, 2 * 1448 + 1);
            assert_eq!(wire_bytes(&three), 3 * 66 + 2 * 1448 + 1);
        }
        let with_ecn = frame(1 | 0x80, 1448, 66, 8, 1449);
        assert_eq!(wire_bytes(&with_ecn), 2 * 66 + 1449);
    }

    #[test]
    fn each_segment_of_udp_has_eight_bytes_of_header() {
        assert_eq!(wire_bytes(&frame(GSO_UDP_L4, 1000, 42, 0, 2500)), 3 * 42 + 2500);
    }

    #[test]
    fn a_damaged_frame_takes_its_length_and_no_panic() {
        let good = frame(1, 1448, 66, 8, 3000);
        for length in 0..good.len() {
            let bytes = wire_bytes(&good[..length]);
            assert!(bytes <= 4 * length as u64 + 66, "{length}: {bytes}");
        }
        let mut far = good.clone();
        far[6..8].copy_from_slice(&u16::MAX.to_ne_bytes());
        assert_eq!(wire_bytes(&far), (good.len() - HEADER_BYTES) as u64);
    }
}
