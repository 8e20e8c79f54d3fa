//! Gives the network card its address, or waits until it has the one that cloud-init gives it.

use std::net::{Ipv4Addr, UdpSocket};
use std::process::Command;
use std::time::{Duration, Instant};

use perigee_model::guest::GuestNetwork;

use crate::cloud_init;
use crate::error::Error;

/// The image has no udev, so the first card has this name.
const CARD: &str = "eth0";
const RESOLVERS: &str = "/etc/resolv.conf";
/// Some inits go on before the card has its address.
const DEADLINE: Duration = Duration::from_secs(120);
const POLL_DELAY: Duration = Duration::from_millis(200);

/// What cloud-init has set up, with the tools and the names of its image, stays as it is.
pub fn set_up(network: &GuestNetwork) -> Result<(), Error> {
    match cloud_init::is_there() {
        true if network.optional => Ok(()),
        true => wait_for(network.address, DEADLINE),
        false => set_up_card(network),
    }
}

fn wait_for(address: Ipv4Addr, deadline: Duration) -> Result<(), Error> {
    let begun = Instant::now();
    // Only an address of this machine can be bound.
    while let Err(error) = UdpSocket::bind((address, 0)) {
        if begun.elapsed() >= deadline {
            let limit_s = deadline.as_secs();
            let why = format!("cloud-init gave no card {address} within {limit_s} s: {error}");
            return Err(Error::Network(why));
        }
        std::thread::sleep(POLL_DELAY);
    }
    Ok(())
}

fn set_up_card(network: &GuestNetwork) -> Result<(), Error> {
    let GuestNetwork { address, prefix_bits, gateway, dns, optional: _ } = network;
    let (address, gateway) = (format!("{address}/{prefix_bits}"), gateway.to_string());
    run(&["modprobe", "virtio_net"])?;
    run(&["busybox", "ip", "link", "set", "lo", "up"])?;
    run(&["busybox", "ip", "link", "set", CARD, "up"])?;
    run(&["busybox", "ip", "address", "add", &address, "dev", CARD])?;
    run(&["busybox", "ip", "route", "add", "default", "via", &gateway])?;
    std::fs::write(RESOLVERS, format!("nameserver {dns}\n"))
        .map_err(Error::io(format!("write {RESOLVERS}")))
}

fn run(line: &[&str]) -> Result<(), Error> {
    let output = Command::new(line[0]).args(&line[1..]).output();
    let output = output.map_err(|error| Error::Network(format!("{}: {error}", line.join(" "))))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Error::Network(format!("{}: {}", line.join(" "), said.trim())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_a_card_has_is_not_given_again() {
        wait_for(Ipv4Addr::LOCALHOST, DEADLINE).expect("the loopback has it");
        // Nobody has this one (RFC 5737).
        let missing = wait_for(Ipv4Addr::new(192, 0, 2, 1), Duration::ZERO);
        let why = missing.expect_err("no card has it").to_string();
        assert!(why.contains("gave no card 192.0.2.1 within 0 s"), "{why}");
    }
}
