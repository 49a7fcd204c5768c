//! The addresses of a group.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

use rekindle_os::links::Mac;

/// An IPv4 network, whose first address is rank 0's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subnet {
    network: u32,
    prefix: u8,
}

/// Why a text is not a subnet of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotASubnet {
    /// It has another form.
    #[error("not an IPv4 network like 10.213.0.0/16")]
    Form,
    /// The prefix is too short or too long.
    #[error("the prefix length must be from 8 to 30")]
    Prefix,
    /// It has bits of a host.
    #[error("the address has bits beyond the prefix length")]
    Bits,
}

impl Default for Subnet {
    fn default() -> Subnet {
        Subnet { network: Ipv4Addr::new(10, 213, 0, 0).to_bits(), prefix: 16 }
    }
}

impl Subnet {
    /// Number of addresses for nodes: all except the first and the last one.
    #[must_use]
    pub fn room(self) -> u32 {
        self.hosts() - 1
    }

    /// The prefix length.
    #[must_use]
    pub fn prefix(self) -> u8 {
        self.prefix
    }

    /// The address of a node, whose rank is below [`Subnet::room`].
    #[must_use]
    pub fn address(self, rank: u32) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.network | (rank + 1) & self.hosts())
    }

    /// The MAC address of a node: a locally administered one.
    #[must_use]
    pub fn mac(self, rank: u32) -> Mac {
        let [a, b, c, d] = self.address(rank).octets();
        [0x02, b'k', a, b, c, d]
    }

    /// Whether the address is one of the group's.
    #[must_use]
    pub fn contains(self, address: IpAddr) -> bool {
        match address.to_canonical() {
            IpAddr::V4(address) => address.to_bits() & !self.hosts() == self.network,
            IpAddr::V6(_) => false,
        }
    }

    fn hosts(self) -> u32 {
        u32::MAX >> self.prefix
    }
}

impl fmt::Display for Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", Ipv4Addr::from_bits(self.network), self.prefix)
    }
}

impl FromStr for Subnet {
    type Err = NotASubnet;

    fn from_str(text: &str) -> Result<Subnet, NotASubnet> {
        let (network, prefix) = text.split_once('/').ok_or(NotASubnet::Form)?;
        let network: Ipv4Addr = network.parse().map_err(|_| NotASubnet::Form)?;
        let prefix: u8 = prefix.parse().map_err(|_| NotASubnet::Form)?;
        if !(8..=30).contains(&prefix) {
            return Err(NotASubnet::Prefix);
        }
        let subnet = Subnet { network: network.to_bits(), prefix };
        if subnet.network & subnet.hosts() == 0 { Ok(subnet) } else { Err(NotASubnet::Bits) }
    }
}
