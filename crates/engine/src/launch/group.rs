//! The network of a group: a device `rk0` in the job's network namespace, whose address never changes.
//!
//! Layout, for nodes on several machines:
//!
//! ```text
//!   job's namespace          hidden namespace             supervisor's namespace
//!   rk0 (macvlan) ---------> rk0 (VXLAN) ---------------> UDP to the other nodes
//! ```
//!
//! For nodes on one machine `rk0` is one end of a veth pair, whose other end is a port of a bridge. Invariants:
//! - Address and MAC address follow from the rank. So the job finds the same ones in each world, on any machine; only
//!   the forwarding entries name machines.
//! - All entries are static: there is no learning, flooding or ARP. A packet for an unknown address is dropped.
//! - The cable ([`Cable`]) is the device below `rk0`. It is out in a new world. While it is switched off, `rk0` keeps
//!   its routes: a connection waits, and does not fail or use the uplink.
//! - The hidden namespace belongs to the supervisor. The job cannot reach it, whatever its rights are. It ends with the
//!   supervisor, and the devices with it.
//!
//! The kernel does not compare the sender of a VXLAN packet with the members. Whoever can send UDP to the port and
//! knows the VNI can send into the group. So a firewall must protect the port.

mod names;
mod subnet;
pub(super) mod undelivered;

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::embedded;
use rekindle_os::links::{self, Link, Links, Vxlan};
pub use subnet::Subnet;

/// The job's device.
pub const DEVICE: &str = "rk0";
/// The UDP port that IANA has assigned to VXLAN.
pub const VXLAN_PORT: u16 = 4789;

/// How the nodes are joined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// By VXLAN over the network of the machines.
    Vxlan {
        /// The VXLAN network identifier, below 2^24. Use another one for each epoch, to keep out packets of earlier
        /// ones.
        vni: u32,
        /// The UDP port of all nodes.
        port: u16,
        /// This machine's address, to which the other nodes send.
        local: IpAddr,
    },
    /// By a bridge of this machine, which is created if it does not exist.
    Bridge {
        /// Its name.
        name: String,
    },
}

/// The network of one node of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The addresses of the group.
    pub subnet: Subnet,
    /// This node.
    pub rank: u32,
    /// Number of nodes.
    pub size: u32,
    /// How they are joined.
    pub kind: Kind,
    /// Largest packet in bytes; `None` for the largest that fits into one of the machine's network.
    pub mtu: Option<u32>,
    /// The addresses of the other nodes' machines. A node without one cannot be reached.
    pub peers: BTreeMap<u32, IpAddr>,
    /// The host names of each node.
    pub names: BTreeMap<u32, Vec<String>>,
    /// The folder for the file that the job sees as /etc/hosts.
    pub directory: PathBuf,
}

/// Why the group's network cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Too many nodes.
    #[error("a group of {size} machines needs more addresses than {subnet} has: set a larger group.subnet")]
    Size {
        /// The nodes.
        size: u32,
        /// The subnet.
        subnet: Subnet,
    },
    /// A rank that does not exist.
    #[error("rank {rank} is not in a group of {size} machines")]
    Rank {
        /// The rank.
        rank: u32,
        /// The nodes.
        size: u32,
    },
    /// The VNI has too many bits.
    #[error("VXLAN network identifier {0} is too large: it must be below 16777216")]
    Vni(u32),
    /// The machine does not have the address.
    #[error("this machine has no network device with the address {0}: name one that the other machines can reach")]
    Underlay(IpAddr),
    /// Not permitted.
    #[error(
        "the group's network needs CAP_NET_ADMIN and CAP_SYS_ADMIN, which this process lacks: run rekindle as root"
    )]
    Right,
    /// The kernel lacks a kind of device.
    #[error("the kernel has no {0} devices, which the group's network needs: run `modprobe {0}`")]
    Kind(&'static str),
    /// The port is in use.
    #[error(
        "UDP port {0} is used by another program, or by another group with the same VXLAN network identifier: end that program, or set \
         group.network = \"vxlan:PORT\" with another port on all machines"
    )]
    Port(u16),
    /// The file for /etc/hosts cannot be written.
    #[error("cannot write {}", path.display())]
    Names {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The kernel refused a step.
    #[error("cannot make the group's network: {step} failed")]
    Step {
        /// The step.
        step: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

/// How often a device of a supervisor that was killed is removed. It may disappear by itself meanwhile.
const LEFTOVERS: u32 = 10;
/// How long the devices of a supervisor that was killed may take to disappear.
const LEFTOVERS_END: Duration = Duration::from_secs(5);

impl Plan {
    /// Checks the values, without touching anything.
    ///
    /// # Errors
    /// When the rank or the size does not fit.
    pub fn check(&self) -> Result<(), Error> {
        let Plan { rank, size, subnet, .. } = *self;
        if rank >= size {
            return Err(Error::Rank { rank, size });
        }
        if size > subnet.room() {
            return Err(Error::Size { size, subnet });
        }
        match self.kind {
            Kind::Vxlan { vni, .. } if vni >> 24 != 0 => Err(Error::Vni(vni)),
            _ => Ok(()),
        }
    }

    /// Writes the job's /etc/hosts and returns its path.
    pub(super) fn hosts(&self) -> Result<PathBuf, Error> {
        let machine = std::fs::read_to_string("/etc/hosts").unwrap_or_default();
        let path = self.directory.join("hosts");
        let text = names::hosts_like(&machine, self.subnet, &self.names);
        let written = embedded::put(&path, text.as_bytes(), 0o644);
        written.map_err(|source| Error::Names { path: path.clone(), source })?;
        Ok(path)
    }

    /// Makes the network in the namespace of a job, with the cable out.
    pub(super) fn join(&self, job: BorrowedFd<'_>) -> Result<Cable, Error> {
        self.check()?;
        let cable = match &self.kind {
            Kind::Vxlan { vni, port, local } => self.lay_vxlan(job, *vni, *port, *local)?,
            Kind::Bridge { name } => self.lay_veth(job, name)?,
        };
        cable.set_peers(&self.peers)?;
        let inside = Links::of(job).map_err(failed("entering the job's network"))?;
        let device = inside.find(DEVICE).map_err(failed("finding the job's device"))?.index;
        let address = self.subnet.address(self.rank);
        inside.up(device).map_err(failed("switching on the job's device"))?;
        inside.add_address(device, address, self.subnet.prefix()).map_err(failed("setting the job's address"))?;
        for rank in (0..self.size).filter(|rank| *rank != self.rank) {
            inside
                .set_neighbour(device, self.subnet.address(rank), self.subnet.mac(rank))
                .map_err(failed("setting the neighbours of the job"))?;
        }
        cable.unplug_now()?;
        Ok(cable)
    }

    fn lay_vxlan(&self, job: BorrowedFd<'_>, vni: u32, port: u16, local: IpAddr) -> Result<Cable, Error> {
        let here = Links::here().map_err(failed("opening rtnetlink"))?;
        let largest = packet_of(&here, local)?;
        let mtu = self.mtu.map_or(largest, |mtu| mtu.min(largest));
        let hidden = links::new_namespace().map_err(failed("creating a network namespace"))?;
        let vxlan = Vxlan { vni, port, local, mtu };
        let deadline = Instant::now() + LEFTOVERS_END;
        while let Err(error) = here.add_vxlan(DEVICE, &vxlan, hidden.as_fd()) {
            match error.raw_os_error() {
                // The kernel removes the devices of a killed supervisor a moment after its end.
                Some(libc::EEXIST) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(10)),
                Some(libc::EEXIST | libc::EADDRINUSE) => return Err(Error::Port(port)),
                Some(libc::EOPNOTSUPP) => return Err(Error::Kind("vxlan")),
                _ => return Err(failed("creating the VXLAN device")(error)),
            }
        }
        let links = Links::of(hidden.as_fd()).map_err(failed("entering a network namespace"))?;
        let device = links.find(DEVICE).map_err(failed("finding the VXLAN device"))?;
        let forwarding = Some((self.subnet, self.rank, self.size));
        let cable = Cable { links, device, forwarding };
        cable.links.up(device.index).map_err(|error| match error.raw_os_error() {
            Some(libc::EADDRINUSE) => Error::Port(port),
            _ => failed("switching on the VXLAN device")(error),
        })?;
        cable.links.add_macvlan(DEVICE, device, self.subnet.mac(self.rank), job).map_err(made("macvlan"))?;
        Ok(cable)
    }

    fn lay_veth(&self, job: BorrowedFd<'_>, name: &str) -> Result<Cable, Error> {
        let links = Links::here().map_err(failed("opening rtnetlink"))?;
        match links.add_bridge(name) {
            Err(error) if error.raw_os_error() != Some(libc::EEXIST) => return Err(made("bridge")(error)),
            _ => {}
        }
        let bridge = links.find(name).map_err(failed("finding the bridge"))?;
        links.up(bridge.index).map_err(failed("switching on the bridge"))?;
        let end = port(name, self.rank);
        let mac = self.subnet.mac(self.rank);
        let mut tries = LEFTOVERS;
        while let Err(error) = links.add_veth(&end, DEVICE, mac, self.mtu.unwrap_or(bridge.mtu), job) {
            tries -= 1;
            if error.raw_os_error() != Some(libc::EEXIST) || tries == 0 {
                return Err(made("veth")(error));
            }
            // Of a supervisor that was killed: this one has the rank now. Its namespace may live on with a connection whose
            // data was not acknowledged, and answer for the job that is restored here.
            match links.find(&end).and_then(|left| links.remove(left.index)) {
                Err(error) if error.raw_os_error() != Some(libc::ENODEV) => {
                    return Err(failed("removing the device of an earlier job")(error));
                }
                _ => {}
            }
        }
        let device = links.find(&end).map_err(failed("finding the veth device"))?;
        let cable = Cable { links, device, forwarding: None };
        cable.links.join_bridge(device.index, bridge.index).map_err(failed("joining the bridge"))?;
        cable.plug()?;
        Ok(cable)
    }
}

/// The device of a rank at a bridge. One rank has one there: the earlier one is found by this name. Of 15 bytes, which is all
/// that the kernel takes.
fn port(bridge: &str, rank: u32) -> String {
    let mut hash = blake3::Hasher::new();
    hash.update(bridge.as_bytes()).update(&[0]).update(&rank.to_le_bytes());
    let hash = hash.finalize().to_hex();
    format!("rk{}", hash.get(..13).unwrap_or_default())
}

/// The connection of `rk0` to the other nodes. All methods may be called at any time, repeatedly, and from any thread.
#[derive(Debug)]
pub struct Cable {
    links: Links,
    device: Link,
    /// The subnet, this rank and the size, if there are forwarding entries.
    forwarding: Option<(Subnet, u32, u32)>,
}

impl Cable {
    /// Puts the cable in. TCP continues at its next retransmission.
    ///
    /// # Errors
    /// When the device is gone.
    pub fn plug(&self) -> Result<(), Error> {
        self.links.up(self.device.index).map_err(failed("plugging in the cable"))
    }

    /// Pulls the cable until the returned value is dropped. Once this returns, nothing passes: no data, and no
    /// acknowledgement.
    ///
    /// # Errors
    /// When the device is gone.
    pub fn unplug(&self) -> Result<Unplugged<'_>, Error> {
        self.unplug_now()?;
        Ok(Unplugged { cable: Some(self) })
    }

    fn unplug_now(&self) -> Result<(), Error> {
        self.links.down(self.device.index).map_err(failed("pulling the cable"))
    }

    /// Sets the addresses of the other nodes' machines. The job does not notice.
    ///
    /// # Errors
    /// When the device is gone, or an address is not of the same family as this machine's.
    pub fn set_peers(&self, peers: &BTreeMap<u32, IpAddr>) -> Result<(), Error> {
        let Some((subnet, own, size)) = self.forwarding else { return Ok(()) };
        for rank in (0..size).filter(|rank| *rank != own) {
            let mac = subnet.mac(rank);
            match peers.get(&rank) {
                Some(to) => self.links.set_forwarding(self.device.index, mac, *to),
                None => self.links.remove_forwarding(self.device.index, mac),
            }
            .map_err(failed("setting a forwarding entry"))?;
        }
        Ok(())
    }

    /// Largest packet in bytes.
    #[must_use]
    pub fn mtu(&self) -> u32 {
        self.device.mtu
    }
}

impl Drop for Cable {
    /// At once: the kernel removes a namespace late, and the next world needs the same VNI.
    fn drop(&mut self) {
        match self.links.remove(self.device.index) {
            Err(error) if error.raw_os_error() != Some(libc::ENODEV) => {
                tracing::debug!("cannot remove the device of the group's network: {error}");
            }
            _ => {}
        }
    }
}

/// The cable is out. It is put in when this is dropped.
#[derive(Debug)]
#[must_use = "the cable is put in when this is dropped"]
pub struct Unplugged<'a> {
    cable: Option<&'a Cable>,
}

impl Unplugged<'_> {
    /// Puts it in.
    ///
    /// # Errors
    /// When the device is gone.
    pub fn plug(mut self) -> Result<(), Error> {
        self.cable.take().map_or(Ok(()), Cable::plug)
    }

    /// Leaves it out: the caller puts it in later.
    pub fn leave_out(mut self) {
        self.cable = None;
    }
}

impl Drop for Unplugged<'_> {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.cable.map(Cable::plug) {
            tracing::warn!("{error}: the job does not reach the other machines");
        }
    }
}

/// The largest packet of the group's network, in bytes, that fits into one of the machine's network at this address.
///
/// # Errors
/// When the machine does not have the address.
pub fn largest_packet(local: IpAddr) -> Result<u32, Error> {
    packet_of(&Links::here().map_err(failed("opening rtnetlink"))?, local)
}

fn packet_of(here: &Links, local: IpAddr) -> Result<u32, Error> {
    let underlay = here.with_address(local).map_err(|_| Error::Underlay(local))?;
    let headers = if local.is_ipv4() { 50 } else { 70 };
    Ok(underlay.mtu.saturating_sub(headers))
}

/// Checks that this kernel has what the network of a group over several machines needs, and that the UDP port is free.
/// Leaves nothing behind.
///
/// # Errors
/// What is missing.
pub fn check_machine(port: u16) -> Result<(), Error> {
    let refused = |step| move |error| failed(step)(error);
    let [host, other] = [links::new_namespace(), links::new_namespace()];
    let (host, other) = (
        host.map_err(refused("creating a network namespace"))?,
        other.map_err(refused("creating a network namespace"))?,
    );
    let links = Links::of(host.as_fd()).map_err(refused("entering a network namespace"))?;
    let vxlan = Vxlan { vni: 1, port, local: IpAddr::from([127, 0, 0, 1]), mtu: 1450 };
    links.add_vxlan("vxlan", &vxlan, host.as_fd()).map_err(made("vxlan"))?;
    let lower = links.find("vxlan").map_err(failed("finding the VXLAN device"))?;
    links.add_macvlan(DEVICE, lower, Subnet::default().mac(0), other.as_fd()).map_err(made("macvlan"))?;
    match std::net::UdpSocket::bind((std::net::Ipv4Addr::UNSPECIFIED, port)) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(Error::Port(port)),
        _ => Ok(()),
    }
}

fn failed(step: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => Error::Right,
        _ => Error::Step { step, source },
    }
}

/// A device of that kind could not be created.
fn made(kind: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| match source.raw_os_error() {
        Some(libc::EOPNOTSUPP) => Error::Kind(kind),
        _ => failed("creating a device")(source),
    }
}

#[cfg(test)]
mod tests;
