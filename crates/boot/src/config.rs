//! The configuration of network boot.

use std::net::Ipv4Addr;
use std::path::PathBuf;

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use perigee_model::Problem;

/// The configuration of network boot.
#[derive(Debug, Clone)]
pub struct Config {
    /// The volume server's control API.
    pub control: String,
    /// The network interface that leads to the machines.
    pub interface: String,
    /// This machine's address there; by default the interface's first one.
    pub address: Option<Ipv4Addr>,
    pub dhcp: Dhcp,
    pub http_port: u16,
    /// The volume server's ports at this machine's address.
    pub iscsi_port: u16,
    pub nbd_port: u16,
    /// The kernel for machines with their root over NBD.
    pub kernel: Option<PathBuf>,
    pub initrd: Option<PathBuf>,
    pub append: String,
    /// The directory of dnsmasq's configuration and leases.
    pub state: PathBuf,
    /// The directory of `undionly.kpxe` and `snponly.efi`, the iPXE for machines that have only PXE.
    pub ipxe: PathBuf,
}

/// The server that gives the machines their addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dhcp {
    /// This one, from a range.
    Serve { first: Ipv4Addr, last: Ipv4Addr },
    /// Another one; this one only says what to boot.
    Proxy,
}

/// The current state of a network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    pub name: String,
    pub address: Ipv4Addr,
    pub netmask: Ipv4Addr,
    pub is_up: bool,
}

impl Interface {
    /// # Errors
    /// Not found when the interface does not exist or has no IPv4 address.
    pub fn find(name: &str, address: Option<Ipv4Addr>) -> Result<Self, Problem> {
        let what = format!("can't use network interface {name}");
        let all = getifaddrs().map_err(|error| Problem::internal(&what, error))?;
        let mut names = Vec::new();
        for entry in all {
            if !names.contains(&entry.interface_name) {
                names.push(entry.interface_name.clone());
            }
            let v4 = |address: Option<nix::sys::socket::SockaddrStorage>| {
                Some(address?.as_sockaddr_in()?.ip())
            };
            let (Some(own), Some(netmask)) = (v4(entry.address), v4(entry.netmask)) else {
                continue;
            };
            if entry.interface_name == name && address.is_none_or(|address| address == own) {
                let is_up = entry.flags.contains(InterfaceFlags::IFF_UP);
                return Ok(Self { name: name.to_owned(), address: own, netmask, is_up });
            }
        }
        let problem = match (names.iter().any(|other| other == name), address) {
            (false, _) => {
                let why = format!("it does not exist; this machine has: {}", names.join(", "));
                Problem::not_found(what, why)
            }
            (true, Some(address)) => {
                Problem::not_found(what, format!("it does not have the address {address}"))
            }
            (true, None) => Problem::not_found(what, "it has no IPv4 address"),
        };
        Err(problem.next("name the interface that leads to the machines, and give it an address"))
    }

    /// The network's own address.
    pub fn network(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.address.to_bits() & self.netmask.to_bits())
    }

    /// Whether an address is in the network that the boot service serves.
    pub fn reaches(&self, address: Ipv4Addr) -> bool {
        address.to_bits() & self.netmask.to_bits() == self.network().to_bits()
    }
}

impl Config {
    /// The interface. This checks that the configuration fits it.
    ///
    /// # Errors
    /// Not found, or invalid when the range of addresses is not in its network.
    pub fn interface(&self) -> Result<Interface, Problem> {
        let interface = Interface::find(&self.interface, self.address)?;
        if let Dhcp::Serve { first, last } = self.dhcp {
            let what = format!("can't use the DHCP range {first}-{last}");
            if first > last {
                return Err(Problem::invalid(what, "it ends before it begins"));
            }
            if !interface.reaches(first) || !interface.reaches(last) {
                let why = format!(
                    "the network of {} is {}/{}",
                    interface.name,
                    interface.network(),
                    interface.netmask
                );
                return Err(Problem::invalid(what, why).next("give a range in that network"));
            }
            if (first..=last).contains(&interface.address) {
                let why = format!("{} is this machine's own address", interface.address);
                return Err(Problem::invalid(what, why).next("leave it out of the range"));
            }
        }
        Ok(interface)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_card_is_found_and_another_is_named_missing() {
        let lo = Interface::find("lo", None).expect("every machine has it");
        assert_eq!((lo.address, lo.network()), (Ipv4Addr::LOCALHOST, Ipv4Addr::new(127, 0, 0, 0)));
        assert!(lo.reaches(Ipv4Addr::new(127, 1, 2, 3)) && !lo.reaches(Ipv4Addr::new(10, 0, 0, 1)));
        let missing = Interface::find("no-such-card", None).expect_err("there is none");
        assert!(missing.to_string().contains("lo"), "{missing}");
        let other = Interface::find("lo", Some(Ipv4Addr::new(10, 0, 0, 1)));
        assert!(other.expect_err("not there").to_string().contains("10.0.0.1"));
    }
}
