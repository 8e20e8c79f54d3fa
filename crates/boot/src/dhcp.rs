//! Finds the DHCP servers of a network: it sends the request of a machine that boots there.

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};

use crate::config::Interface;

const CLIENT_PORT: u16 = 68;
const SERVER_PORT: u16 = 67;
const COOKIE: [u8; 4] = [99, 130, 83, 99];
/// The length of a message's fixed part, before the cookie.
const HEAD_BYTES: usize = 236;
const REPLY: u8 = 2;
/// A MAC address that no machine has.
const CARD: [u8; 6] = [0x02, b'p', b'g', b'b', b'c', b'k'];

mod option {
    /// Fills space between options; it has no length (RFC 2132, 3.1).
    pub const PAD: u8 = 0;
    /// What kind of message it is: DISCOVER, OFFER, REQUEST … (RFC 2132, 9.6).
    pub const TYPE: u8 = 53;
    /// The address of the server that is meant (RFC 2132, 9.7).
    pub const SERVER: u8 = 54;
    /// The options that the client wants, one byte each (RFC 2132, 9.8).
    pub const WANTED: u8 = 55;
    /// The last option; it has no length (RFC 2132, 3.2).
    pub const END: u8 = 255;
}

/// A DHCP server that offered an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    pub server: Ipv4Addr,
    pub address: Ipv4Addr,
}

/// The servers that offer an address within this time. A proxy offers none and is left out.
///
/// # Errors
/// The client's port can't be used. It needs root, and a DHCP client of this machine may be using it.
pub fn offers(interface: &Interface, patience: Duration) -> io::Result<Vec<Offer>> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, CLIENT_PORT))?;
    setsockopt(&socket, sockopt::BindToDevice, &interface.name.as_str().into())?;
    socket.set_broadcast(true)?;
    let id = std::process::id();
    socket.send_to(&discover(id), (Ipv4Addr::BROADCAST, SERVER_PORT))?;
    let end = Instant::now() + patience;
    let mut found: Vec<Offer> = Vec::new();
    let mut message = [0; 1500];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(found);
        }
        socket.set_read_timeout(Some(left))?;
        let length = match socket.recv(&mut message) {
            Ok(length) => length,
            Err(error)
                if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) =>
            {
                return Ok(found);
            }
            Err(error) => return Err(error),
        };
        if let Some(offer) = parse_offer(&message[..length], id)
            && !found.contains(&offer)
        {
            found.push(offer);
        }
    }
}

fn discover(id: u32) -> Vec<u8> {
    let mut message = vec![0; HEAD_BYTES];
    // A request, on Ethernet, with addresses of 6 bytes.
    message[..3].copy_from_slice(&[1, 1, 6]);
    message[4..8].copy_from_slice(&id.to_be_bytes());
    // Asks for broadcast answers, because this machine does not have the offered address.
    message[10] = 0x80;
    message[28..34].copy_from_slice(&CARD);
    message.extend(COOKIE);
    message.extend([option::TYPE, 1, 1, option::WANTED, 2, 1, 3, option::END]);
    message
}

fn parse_offer(message: &[u8], id: u32) -> Option<Offer> {
    let (head, rest) = message.split_at_checked(HEAD_BYTES)?;
    let options = rest.strip_prefix(&COOKIE)?;
    if head[0] != REPLY || head[4..8] != id.to_be_bytes() {
        return None;
    }
    let address = Ipv4Addr::from(<[u8; 4]>::try_from(&head[16..20]).ok()?);
    let server = Ipv4Addr::from(<[u8; 4]>::try_from(option_of(options, option::SERVER)?).ok()?);
    (!address.is_unspecified()).then_some(Offer { server, address })
}

fn option_of(mut options: &[u8], wanted: u8) -> Option<&[u8]> {
    loop {
        match *options {
            [option::PAD, ref rest @ ..] => options = rest,
            [option::END, ..] | [] | [_] => return None,
            [code, length, ref rest @ ..] => {
                let (value, rest) = rest.split_at_checked(length.into())?;
                if code == wanted {
                    return Some(value);
                }
                options = rest;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(id: u32, address: [u8; 4], options: &[u8]) -> Vec<u8> {
        let mut message = discover(id);
        message.truncate(HEAD_BYTES);
        message[0] = REPLY;
        message[16..20].copy_from_slice(&address);
        message.extend(COOKIE);
        message.extend(options);
        message
    }

    #[test]
    fn an_offer_names_its_server_and_the_address() {
        let options = [0, 53, 1, 2, 54, 4, 10, 0, 0, 1, 255];
        let found = parse_offer(&offer(7, [10, 0, 0, 9], &options), 7);
        let (server, address) = (Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 9));
        assert_eq!(found, Some(Offer { server, address }));
    }

    #[test]
    fn what_is_no_offer_to_us_is_left_out() {
        let options = [54, 4, 10, 0, 0, 1, 255];
        let whole = offer(7, [10, 0, 0, 9], &options);
        assert_eq!(parse_offer(&whole, 8), None, "another's");
        assert_eq!(parse_offer(&offer(7, [0; 4], &options), 7), None, "a proxy's");
        assert_eq!(parse_offer(&offer(7, [10, 0, 0, 9], &[54, 40, 1]), 7), None, "cut");
        for length in 0..whole.len() {
            parse_offer(&whole[..length], 7);
        }
    }
}
