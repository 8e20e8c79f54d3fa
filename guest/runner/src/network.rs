//! Gives the network card its address.

use std::process::Command;

use perigee_model::guest::GuestNetwork;

use crate::error::Error;

/// The image has no udev, so the first card has this name.
const CARD: &str = "eth0";
const RESOLVERS: &str = "/etc/resolv.conf";

pub fn set_up(network: &GuestNetwork) -> Result<(), Error> {
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
