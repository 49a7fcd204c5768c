//! Network devices of a network namespace, with the kernel's rtnetlink(7): VXLAN, macvlan, veth, bridge, addresses,
//! neighbours, forwarding entries.
//!
//! A netlink socket stays in the namespace in which it was created, so a [`Links`] works there from any thread, for as
//! long as it exists. A new device may be put into another namespace at once: no other name and no half-made device is
//! ever visible. All of it needs CAP_NET_ADMIN over the namespaces; without it the kernel answers EPERM.

use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{
    InfoBridge, InfoData, InfoKind, InfoMacVlan, InfoVeth, InfoVxlan, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
    MacVlanMode,
};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::socket::{AddressFamily as Family, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, setsockopt};
use nix::sys::socket::{socket, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};

/// A MAC address.
pub type Mac = [u8; 6];

/// The network devices of one network namespace.
#[derive(Debug)]
pub struct Links {
    /// One request at a time.
    socket: Mutex<OwnedFd>,
}

/// A device with its number in its namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// The number (`ifindex`).
    pub index: u32,
    /// Largest packet in bytes.
    pub mtu: u32,
}

/// A VXLAN device that learns nothing and floods nothing: it sends only to its forwarding entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vxlan {
    /// The VXLAN network identifier, of 24 bits.
    pub vni: u32,
    /// The UDP port, here and at the other ends.
    pub port: u16,
    /// The address from which it sends, of the namespace of [`Links`].
    pub local: IpAddr,
    /// Largest packet in bytes.
    pub mtu: u32,
}

/// A network namespace of this process.
///
/// # Errors
/// When /proc is not mounted.
pub(crate) fn own_namespace() -> io::Result<OwnedFd> {
    File::open("/proc/thread-self/ns/net").map(OwnedFd::from)
}

/// Creates an empty network namespace. It exists as long as a descriptor or a device in it.
///
/// # Errors
/// Without CAP_SYS_ADMIN.
pub fn new_namespace() -> io::Result<OwnedFd> {
    on_a_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET)?;
        own_namespace()
    })
}

/// Runs this on a thread of its own, which may change its namespace because it ends then.
fn on_a_thread<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, work)?;
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread panicked")))
    })
}

impl Links {
    /// The devices of this process's namespace.
    ///
    /// # Errors
    /// When the kernel has no rtnetlink.
    pub fn here() -> io::Result<Links> {
        let protocol = SockProtocol::NetlinkRoute;
        let socket = socket(Family::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
        // The kernel answers at once, so this time limit is never reached.
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::seconds(2))?;
        Ok(Links { socket: Mutex::new(socket) })
    }

    /// The devices of that namespace.
    ///
    /// # Errors
    /// When it cannot be entered.
    pub fn of(namespace: BorrowedFd<'_>) -> io::Result<Links> {
        on_a_thread(|| {
            setns(namespace, CloneFlags::CLONE_NEWNET)?;
            Links::here()
        })
    }

    /// The device with this name.
    ///
    /// # Errors
    /// ENODEV when there is none.
    pub fn find(&self, name: &str) -> io::Result<Link> {
        let mut message = LinkMessage::default();
        message.attributes.push(LinkAttribute::IfName(name.to_owned()));
        let found = self.ask(RouteNetlinkMessage::GetLink(message), 0)?;
        found.iter().find_map(link).ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))
    }

    /// The device that has this address.
    ///
    /// # Errors
    /// EADDRNOTAVAIL when none has it.
    pub fn with_address(&self, address: IpAddr) -> io::Result<Link> {
        let all = self.ask(RouteNetlinkMessage::GetAddress(AddressMessage::default()), NLM_F_DUMP)?;
        let has = |attribute: &AddressAttribute| match attribute {
            AddressAttribute::Address(one) | AddressAttribute::Local(one) => *one == address,
            _ => false,
        };
        let index = all.iter().find_map(|answer| match answer {
            RouteNetlinkMessage::NewAddress(one) if one.attributes.iter().any(has) => Some(one.header.index),
            _ => None,
        });
        let index = index.ok_or_else(|| io::Error::from_raw_os_error(libc::EADDRNOTAVAIL))?;
        let mut message = LinkMessage::default();
        message.header.index = index;
        let found = self.ask(RouteNetlinkMessage::GetLink(message), 0)?;
        found.iter().find_map(link).ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))
    }

    /// Creates a VXLAN device in the namespace `into`. Its UDP packets go through the namespace of this [`Links`].
    ///
    /// # Errors
    /// EOPNOTSUPP without VXLAN in the kernel, EEXIST if another device has the VNI and port, EADDRINUSE if a program
    /// has the port.
    pub fn add_vxlan(&self, name: &str, vxlan: &Vxlan, into: BorrowedFd<'_>) -> io::Result<()> {
        let local = match vxlan.local {
            IpAddr::V4(address) => InfoVxlan::Local(address),
            IpAddr::V6(address) => InfoVxlan::Local6(address),
        };
        let data = vec![
            InfoVxlan::Id(vxlan.vni),
            local,
            InfoVxlan::Port(vxlan.port),
            InfoVxlan::Learning(false),
            InfoVxlan::UDPCsum(true),
        ];
        let mut attributes = created(name, InfoKind::Vxlan, Some(InfoData::Vxlan(data)));
        attributes.extend([LinkAttribute::NetNsFd(into.as_raw_fd()), LinkAttribute::Mtu(vxlan.mtu)]);
        self.create(attributes)
    }

    /// Creates a macvlan device in the namespace `into`, over the device `lower` of this one: what it sends and gets
    /// goes through `lower`, and stops when `lower` is down.
    ///
    /// # Errors
    /// EOPNOTSUPP without macvlan in the kernel.
    pub fn add_macvlan(&self, name: &str, lower: Link, mac: Mac, into: BorrowedFd<'_>) -> io::Result<()> {
        let data = InfoData::MacVlan(vec![InfoMacVlan::Mode(MacVlanMode::Private)]);
        let mut attributes = created(name, InfoKind::MacVlan, Some(data));
        attributes.extend([
            LinkAttribute::Link(lower.index),
            LinkAttribute::NetNsFd(into.as_raw_fd()),
            LinkAttribute::Address(mac.to_vec()),
            LinkAttribute::Mtu(lower.mtu),
        ]);
        self.create(attributes)
    }

    /// Creates a pair of connected devices: `name` here, and `inside` with this MAC address in the namespace `into`.
    ///
    /// # Errors
    /// EEXIST if there is one with that name, EOPNOTSUPP without veth in the kernel.
    pub fn add_veth(&self, name: &str, inside: &str, mac: Mac, mtu: u32, into: BorrowedFd<'_>) -> io::Result<()> {
        let mut peer = LinkMessage::default();
        peer.attributes = vec![
            LinkAttribute::IfName(inside.to_owned()),
            LinkAttribute::Address(mac.to_vec()),
            LinkAttribute::Mtu(mtu),
            LinkAttribute::NetNsFd(into.as_raw_fd()),
        ];
        let mut attributes = created(name, InfoKind::Veth, Some(InfoData::Veth(InfoVeth::Peer(peer))));
        attributes.push(LinkAttribute::Mtu(mtu));
        self.create(attributes)
    }

    /// Creates a bridge.
    ///
    /// # Errors
    /// EEXIST if there is a device with that name, EOPNOTSUPP without bridges in the kernel.
    pub fn add_bridge(&self, name: &str) -> io::Result<()> {
        self.create(created(name, InfoKind::Bridge, Some(InfoData::Bridge(Vec::<InfoBridge>::new()))))
    }

    fn create(&self, attributes: Vec<LinkAttribute>) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.attributes = attributes;
        self.ask(RouteNetlinkMessage::NewLink(message), NLM_F_CREATE | NLM_F_EXCL).map(drop)
    }

    /// Removes a device.
    ///
    /// # Errors
    /// ENODEV if it is gone.
    pub fn remove(&self, index: u32) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        self.ask(RouteNetlinkMessage::DelLink(message), 0).map(drop)
    }

    /// Switches a device on. One that is on stays so.
    ///
    /// # Errors
    /// ENODEV if it is gone; EADDRINUSE if another program has the UDP port of a VXLAN device.
    pub fn up(&self, index: u32) -> io::Result<()> {
        self.switch(index, LinkFlags::Up)
    }

    /// Switches a device off: when this returns, it takes and sends nothing. One that is off stays so.
    ///
    /// # Errors
    /// ENODEV if it is gone.
    pub fn down(&self, index: u32) -> io::Result<()> {
        self.switch(index, LinkFlags::empty())
    }

    fn switch(&self, index: u32, flags: LinkFlags) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.header.flags = flags;
        message.header.change_mask = LinkFlags::Up;
        self.ask(RouteNetlinkMessage::SetLink(message), 0).map(drop)
    }

    /// Makes a device a port of a bridge.
    ///
    /// # Errors
    /// When one of them is gone, or the second is not a bridge.
    pub fn join_bridge(&self, index: u32, bridge: u32) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.attributes = vec![LinkAttribute::Controller(bridge)];
        self.ask(RouteNetlinkMessage::SetLink(message), 0).map(drop)
    }

    /// Gives a device an address with its subnet.
    ///
    /// # Errors
    /// EEXIST if it has it.
    pub fn add_address(&self, index: u32, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
        let mut message = AddressMessage::default();
        message.header.family = AddressFamily::Inet;
        message.header.prefix_len = prefix;
        message.header.index = index;
        message.attributes = vec![AddressAttribute::Local(address.into()), AddressAttribute::Address(address.into())];
        self.ask(RouteNetlinkMessage::NewAddress(message), NLM_F_CREATE | NLM_F_EXCL).map(drop)
    }

    /// Records permanently that this address has this MAC address, without ARP.
    ///
    /// # Errors
    /// When the device is gone.
    pub fn set_neighbour(&self, index: u32, address: Ipv4Addr, mac: Mac) -> io::Result<()> {
        let mut message = NeighbourMessage::default();
        message.header.family = AddressFamily::Inet;
        message.header.ifindex = index;
        message.header.state = NeighbourState::Permanent;
        message.attributes = vec![
            NeighbourAttribute::Destination(NeighbourAddress::Inet(address)),
            NeighbourAttribute::LinkLayerAddress(mac.to_vec()),
        ];
        self.ask(RouteNetlinkMessage::NewNeighbour(message), NLM_F_CREATE | NLM_F_REPLACE).map(drop)
    }

    /// Has a VXLAN device send packets for this MAC address to that address, and no more to another.
    ///
    /// # Errors
    /// When the device is gone, or the address is of the other family than the device's.
    pub fn set_forwarding(&self, index: u32, mac: Mac, to: IpAddr) -> io::Result<()> {
        let mut message = forwarding(index, mac);
        message.attributes.push(NeighbourAttribute::Destination(match to {
            IpAddr::V4(address) => NeighbourAddress::Inet(address),
            IpAddr::V6(address) => NeighbourAddress::Inet6(address),
        }));
        self.ask(RouteNetlinkMessage::NewNeighbour(message), NLM_F_CREATE | NLM_F_REPLACE).map(drop)
    }

    /// Makes a VXLAN device drop packets for this MAC address. A missing entry is not an error.
    ///
    /// # Errors
    /// When the device is gone.
    pub fn remove_forwarding(&self, index: u32, mac: Mac) -> io::Result<()> {
        match self.ask(RouteNetlinkMessage::DelNeighbour(forwarding(index, mac)), 0) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            other => other.map(drop),
        }
    }

    /// Sends a request and returns the answers.
    fn ask(&self, message: RouteNetlinkMessage, flags: u16) -> io::Result<Vec<RouteNetlinkMessage>> {
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags | if flags & NLM_F_DUMP == NLM_F_DUMP { 0 } else { NLM_F_ACK };
        let mut message = NetlinkMessage::new(header, NetlinkPayload::from(message));
        message.finalize();
        let mut request = vec![0; message.buffer_len()];
        message.serialize(&mut request);
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        send(socket.as_raw_fd(), &request, MsgFlags::empty())?;
        answers(socket.as_fd())
    }
}

/// Reads up to the end of the answer.
fn answers(socket: BorrowedFd<'_>) -> io::Result<Vec<RouteNetlinkMessage>> {
    // The kernel fills at most 32 KiB at once (`netlink_dump`).
    let (mut buffer, mut found) = (vec![0; 64 << 10], Vec::new());
    loop {
        let length = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        let mut left = buffer.get(..length).unwrap_or_default();
        while !left.is_empty() {
            let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(left).map_err(io::Error::other)?;
            match answer.payload {
                NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
                NetlinkPayload::Error(_) | NetlinkPayload::Done(_) => return Ok(found),
                NetlinkPayload::InnerMessage(message) => found.push(message),
                _ => {}
            }
            let size = usize::try_from(answer.header.length).map_err(io::Error::other)?;
            left = left.get(size.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

fn created(name: &str, kind: InfoKind, data: Option<InfoData>) -> Vec<LinkAttribute> {
    let info = [LinkInfo::Kind(kind)].into_iter().chain(data.map(LinkInfo::Data)).collect();
    vec![LinkAttribute::IfName(name.to_owned()), LinkAttribute::LinkInfo(info)]
}

/// An entry of a VXLAN device's own table (`NTF_SELF`).
fn forwarding(index: u32, mac: Mac) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = AddressFamily::Bridge;
    message.header.ifindex = index;
    message.header.state = NeighbourState::Permanent;
    message.header.flags = NeighbourFlags::Own;
    message.attributes = vec![NeighbourAttribute::LinkLayerAddress(mac.to_vec())];
    message
}

fn link(answer: &RouteNetlinkMessage) -> Option<Link> {
    let RouteNetlinkMessage::NewLink(message) = answer else { return None };
    let mtu = message.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Mtu(mtu) => Some(*mtu),
        _ => None,
    });
    Some(Link { index: message.header.index, mtu: mtu? })
}

#[cfg(test)]
mod tests;
