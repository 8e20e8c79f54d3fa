//! The places for connections: so many for all clients, and so many for one address, so that one client does not lock
//! out the others.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::peer::ClientAddress;

/// The places of one listener.
#[derive(Debug, Clone)]
pub struct Places {
    connections: usize,
    connections_of_one: usize,
    taken: Arc<Mutex<TakenPlaces>>,
}

#[derive(Debug, Default)]
struct TakenPlaces {
    count: usize,
    of: BTreeMap<IpAddr, usize>,
}

/// A connection's place. It is free again when this is dropped.
#[derive(Debug)]
pub struct ConnectionPlace {
    address: Option<IpAddr>,
    places: Places,
}

impl Places {
    /// So many connections at the same time, and so many of them from one address.
    pub fn new(connections: usize, connections_of_one: usize) -> Self {
        Self { connections, connections_of_one, taken: Arc::default() }
    }

    /// All but an eighth for one address: another host may have many volumes open here.
    pub fn shared(connections: usize) -> Self {
        Self::new(connections, connections - connections / 8)
    }

    /// Ignores poisoning: no step between two changes can panic.
    fn lock(&self) -> MutexGuard<'_, TakenPlaces> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for a connection. Addresses of IPv6 count as one if their networks are the same: a client has a whole
    /// one.
    ///
    /// # Errors
    /// Why there is none. Processes of this host on a unix socket have only the limit of all.
    pub fn take(&self, ClientAddress(address): ClientAddress) -> Result<ConnectionPlace, String> {
        let address = address.map(network_of);
        let mut taken = self.lock();
        if taken.count >= self.connections {
            let max = self.connections;
            return Err(format!("{max} connections are open, which is the limit"));
        }
        if let Some(address) = address {
            let max = self.connections_of_one;
            let count = taken.of.entry(address).or_default();
            if *count >= max {
                return Err(format!(
                    "{max} connections from {address} are open, which is the limit for one address"
                ));
            }
            *count += 1;
        }
        taken.count += 1;
        Ok(ConnectionPlace { address, places: self.clone() })
    }
}

/// An address, without the part of it that a client of IPv6 chooses.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(ip) => {
            let [a, b, c, d, ..] = ip.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        ip => ip,
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        let mut taken = self.places.lock();
        taken.count -= 1;
        if let Some(address) = self.address
            && let Some(count) = taken.of.get_mut(&address)
        {
            *count -= 1;
            if *count == 0 {
                taken.of.remove(&address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_does_not_lock_out_the_others() {
        let places = Places::new(3, 2);
        let [greedy, other] =
            ["10.0.0.7", "10.0.0.8"].map(|ip| ClientAddress(Some(ip.parse().expect("an address"))));
        let first = places.take(greedy).expect("a place");
        let _second = places.take(greedy).expect("a place");
        let refused = places.take(greedy).expect_err("the limit of one");
        assert!(refused.contains("2 connections from 10.0.0.7"), "{refused}");
        let third = places.take(other).expect("another client");
        let refused = places.take(ClientAddress(None)).expect_err("the limit of all");
        assert!(refused.contains("3 connections are open"), "{refused}");
        drop(first);
        let _again = places.take(greedy).expect("it is free again");
        drop(third);
        let _local = places.take(ClientAddress(None)).expect("it is free again");
    }

    #[test]
    fn a_client_with_a_whole_network_has_the_places_of_one() {
        let places = Places::new(8, 2);
        let at = |ip: &str| ClientAddress(Some(ip.parse().expect("an address")));
        let _held =
            ["2001:db8::1", "2001:db8::2:1"].map(|ip| places.take(at(ip)).expect("a place"));
        places.take(at("2001:db8::ffff:ffff:ffff:ffff")).expect_err("the same network");
        let _other = places.take(at("2001:db8:0:1::1")).expect("another network");
        let _mapped =
            ["::ffff:10.0.0.7", "10.0.0.7"].map(|ip| places.take(at(ip)).expect("a place"));
        places.take(at("10.0.0.7")).expect_err("it is the same address");
        let _next = places.take(at("::ffff:10.0.0.8")).expect("another address");
    }

    #[test]
    fn one_place_is_one_for_anybody() {
        let places = Places::shared(1);
        let _only = places.take(ClientAddress(Some([10, 0, 0, 7].into()))).expect("a place");
        places.take(ClientAddress(Some([10, 0, 0, 8].into()))).expect_err("it is taken");
    }
}
