//! A socket: what it is, its addresses, what waits in it, its options.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::sys::socket::{SockaddrLike, SockaddrStorage, getpeername, getsockname};
use rekindle_os::{attributes, sockopt};

use crate::multicast::Groups;
use crate::record::Items;
use crate::table::{ERROR, Level, NO_ERROR, OPTIONS, OVER, Shape, SocketOption};

/// What was read.
#[derive(Debug)]
pub(super) struct Raw {
    family: i32,
    kind: i32,
    protocol: i32,
    listens: bool,
    state: Option<u8>,
    address: Option<String>,
    /// Where the file is now to which a UNIX socket was bound.
    file: Option<String>,
    peer: Peer,
    /// What poll(2) says.
    conditions: Option<i16>,
    readable: Option<i32>,
    congestion: Option<String>,
    device: Option<String>,
    groups: Vec<String>,
    options: Options,
}

/// The other end.
#[derive(Debug)]
struct Peer {
    is_there: bool,
    address: Option<String>,
    user: Option<(u32, u32)>,
}

/// Options with their values, which are kept together: there may be many sockets.
#[derive(Debug)]
struct Options {
    /// Each with how many bytes of `values` it has.
    each: Vec<(&'static SocketOption, usize)>,
    values: Vec<u8>,
}

impl Options {
    /// Bytes of all options of a TCP socket.
    const VALUES: usize = 512;

    fn read(socket: &OwnedFd, asked: impl Fn(&SocketOption) -> bool) -> Options {
        let (mut each, mut values) = (Vec::with_capacity(OPTIONS.len()), Vec::with_capacity(Options::VALUES));
        for option in OPTIONS.iter().filter(|option| asked(option)) {
            each.extend(value(socket, option, &mut values).map(|length| (option, length)));
        }
        Options { each, values }
    }

    fn values(&self) -> impl Iterator<Item = (&'static SocketOption, &[u8])> {
        let mut rest = self.values.as_slice();
        self.each.iter().map_while(move |(option, length)| {
            let (value, behind) = rest.split_at_checked(*length)?;
            rest = behind;
            Some((*option, value))
        })
    }
}

/// The state of a connection is the first byte of `TCP_INFO` (linux/tcp.h).
const CLOSED: u8 = 7;
const CONNECTING: u8 = 2;

impl Raw {
    /// `groups` are those of the network namespace that it is in.
    pub(super) fn read(socket: &OwnedFd, groups: &Groups) -> Raw {
        let number = |name| int(socket, libc::SOL_SOCKET, name).unwrap_or(-1);
        let (family, kind, protocol) = (number(libc::SO_DOMAIN), number(libc::SO_TYPE), number(libc::SO_PROTOCOL));
        let listens = number(libc::SO_ACCEPTCONN) == 1;
        let is_ip = matches!(family, libc::AF_INET | libc::AF_INET6);
        let is_tcp = is_ip && protocol == libc::IPPROTO_TCP;
        let levels = [
            (Level::Socket, true),
            (Level::Ip, is_ip),
            (Level::Ipv6, family == libc::AF_INET6),
            (Level::Tcp, is_tcp),
            (Level::Udp, is_ip && protocol == libc::IPPROTO_UDP),
            (Level::Netlink, family == libc::AF_NETLINK),
            (Level::Packet, family == libc::AF_PACKET),
        ];
        let asked = |option: &SocketOption| levels.contains(&(option.level, true));
        // The other end of a UNIX socket need not have a name.
        let peer = getpeername::<SockaddrStorage>(socket.as_raw_fd());
        let address = named(getsockname::<SockaddrStorage>(socket.as_raw_fd()));
        // An accepted connection has the file of the socket that listens, until CRIU makes it anew.
        let has_file = family == libc::AF_UNIX && (listens || kind == libc::SOCK_DGRAM);
        let is_bound = has_file && address.as_ref().is_some_and(|name| !name.starts_with('@'));
        Raw {
            family,
            kind,
            protocol,
            listens,
            state: is_tcp.then(|| tcp_state(socket)).flatten(),
            file: is_bound.then(|| attributes::bound_file(socket).ok()).flatten(),
            address,
            peer: Peer {
                is_there: peer.is_ok(),
                user: (family == libc::AF_UNIX).then(|| peer_user(socket)).flatten(),
                address: named(peer),
            },
            conditions: (!listens && (is_ip || matches!(kind, libc::SOCK_STREAM | libc::SOCK_SEQPACKET)))
                .then(|| attributes::conditions(socket).ok())
                .flatten(),
            readable: (!listens).then(|| attributes::length(socket, libc::FIONREAD).ok()).flatten(),
            congestion: is_tcp.then(|| string(socket, libc::IPPROTO_TCP, libc::TCP_CONGESTION)).flatten(),
            device: is_ip.then(|| string(socket, libc::SOL_SOCKET, libc::SO_BINDTODEVICE)).flatten(),
            // A socket of TCP is in none.
            groups: if is_ip && kind != libc::SOCK_STREAM {
                groups.of_socket(socket, family == libc::AF_INET6)
            } else {
                Vec::new()
            },
            options: Options::read(socket, asked),
        }
    }

    /// Whether it sends datagrams to a UNIX socket without a name, which nobody but its process can have closed.
    pub(super) fn sends_to_nameless(&self) -> bool {
        self.family == libc::AF_UNIX
            && self.kind == libc::SOCK_DGRAM
            && self.peer.is_there
            && self.peer.address.is_none()
    }

    /// Its other end is closed. The kernel forgets that end when something is sent to it, and CRIU at once.
    pub(super) fn lost_its_peer(&mut self) {
        self.peer.is_there = false;
    }

    /// Which directions of a connection are over.
    fn over(&self) -> Option<&'static str> {
        let [none, receive, both] = OVER;
        let is_connection = self.peer.is_there && matches!(self.kind, libc::SOCK_STREAM | libc::SOCK_SEQPACKET);
        let conditions = self.conditions.filter(|_| is_connection)?;
        Some(match conditions & (libc::POLLRDHUP | libc::POLLHUP) {
            0 => none,
            over if over & libc::POLLHUP == 0 => receive,
            _ => both,
        })
    }

    /// Whether an error waits. The error itself cannot be seen without taking it away.
    fn error(&self) -> Option<&'static str> {
        let conditions = self.conditions.filter(|_| self.family != libc::AF_UNIX)?;
        Some(if conditions & libc::POLLERR == 0 { NO_ERROR } else { ERROR })
    }

    pub(super) fn items(&self, items: &mut Items) {
        let mut put = |item: &str, value: String| {
            items.insert(item.to_owned(), value);
        };
        put("family", self.family.to_string());
        put("type", self.kind.to_string());
        put("protocol", self.protocol.to_string());
        let state = match self.state {
            _ if self.listens => "listens",
            Some(CLOSED) => "closed",
            Some(CONNECTING) => "connecting",
            _ if self.peer.is_there => "connected",
            _ => "not connected",
        };
        put("state", state.to_owned());
        let peer_user = self.peer.user.map(|(uid, gid)| format!("uid {uid} gid {gid}"));
        let is_unix = self.family == libc::AF_UNIX;
        // CRIU does not save packets, which may be lost on the way as well.
        let is_raw = self.kind == libc::SOCK_RAW && matches!(self.family, libc::AF_INET | libc::AF_INET6);
        let loses = self.protocol == libc::IPPROTO_UDP || is_raw || self.family == libc::AF_PACKET;
        let address = match () {
            // An accepted connection has the name of the socket that listens, until CRIU makes it anew.
            () if is_unix && state == "connected" => "local-name",
            // CRIU binds it to none.
            () if is_raw => "raw-address",
            () => "address",
        };
        for (item, value) in [
            (address, self.address.clone()),
            // CRIU makes a connection between UNIX sockets as a pair, and names it where it can.
            (if is_unix { "peer-name" } else { "peer" }, self.peer.address.clone()),
            ("file", self.file.clone()),
            ("peer-user", peer_user),
            ("shutdown", self.over().map(ToOwned::to_owned)),
            ("error", self.error().map(ToOwned::to_owned)),
            (if loses { "datagrams" } else { "readable" }, self.readable.map(|length| length.to_string())),
            ("congestion", self.congestion.clone()),
            ("device", self.device.clone().filter(|device| !device.is_empty())),
            ("multicast", Some(self.groups.join("\n")).filter(|groups| !groups.is_empty())),
        ] {
            if let Some(value) = value {
                put(item, value);
            }
        }
        let is_tcp = self.state.is_some();
        // An accepted connection has the hops of the first packet there, and nobody may set it (net/ipv4/tcp.c).
        let is_of_the_kernel = |option: &SocketOption| is_tcp && option.name.contains("_MULTICAST_");
        // Nobody can set an odd one, to which the kernel has grown it: what is set is doubled (socket(7)).
        let even = |value: &[u8]| value.first_chunk().map(|bytes| (i32::from_ne_bytes(*bytes) & !1).to_string());
        for (option, value) in self.options.values() {
            if !is_of_the_kernel(option) {
                let is_doubled = matches!(option.name, "SO_SNDBUF" | "SO_RCVBUF");
                put(option.name, even(value).filter(|_| is_doubled).unwrap_or_else(|| text(value)));
            }
        }
    }
}

/// The bytes of an option as the numbers in it.
fn text(value: &[u8]) -> String {
    let numbers = match value.len() {
        8 | 16 => {
            value.chunks_exact(8).map(|bytes| u64::from_ne_bytes(bytes.try_into().unwrap_or_default()).to_string())
        }
        _ => return value.first_chunk().map_or_else(String::new, |bytes| i32::from_ne_bytes(*bytes).to_string()),
    };
    numbers.collect::<Vec<_>>().join(" ")
}

/// Adds the value of an option. Returns how many bytes it has.
fn value(socket: &impl AsFd, option: &SocketOption, values: &mut Vec<u8>) -> Option<usize> {
    let mut value = [0; Shape::LONGEST];
    let length = sockopt::get(socket, option.level.number(), option.number, value.get_mut(..option.shape.bytes())?);
    // Some have one byte, if one is asked for or not.
    let value = value.get(..length.ok()?.max(4))?;
    values.extend_from_slice(value);
    Some(value.len())
}

fn int(socket: &impl AsFd, level: i32, name: i32) -> Option<i32> {
    let mut value = [0; 4];
    sockopt::get(socket, level, name, &mut value).ok()?;
    Some(i32::from_ne_bytes(value))
}

fn string(socket: &impl AsFd, level: i32, name: i32) -> Option<String> {
    let mut value = [0; 64];
    let length = sockopt::get(socket, level, name, &mut value).ok()?;
    let text = value.get(..length)?.split(|byte| *byte == 0).next()?;
    Some(String::from_utf8_lossy(text).into_owned())
}

fn tcp_state(socket: &impl AsFd) -> Option<u8> {
    let mut value = [0; 8];
    sockopt::get(socket, libc::IPPROTO_TCP, libc::TCP_INFO, &mut value).ok()?;
    value.first().copied()
}

/// User and group at the other end.
fn peer_user(socket: &impl AsFd) -> Option<(u32, u32)> {
    let mut value = [0; 12];
    sockopt::get(socket, libc::SOL_SOCKET, libc::SO_PEERCRED, &mut value).ok()?;
    let number = |at: usize| Some(u32::from_ne_bytes(value.get(at..at + 4)?.try_into().ok()?));
    // Nobody: there is no other end.
    Some((number(4)?, number(8)?)).filter(|(uid, _)| *uid != u32::MAX)
}

fn named(found: nix::Result<SockaddrStorage>) -> Option<String> {
    let found = found.ok()?;
    let text = match found.family()? {
        nix::sys::socket::AddressFamily::Unix => {
            let unix = found.as_unix_addr()?;
            match (unix.path(), unix.as_abstract()) {
                (Some(path), _) => path.display().to_string(),
                (None, Some(name)) => format!("@{}", String::from_utf8_lossy(name)),
                (None, None) => return None,
            }
        }
        _ => found.to_string(),
    };
    Some(text)
}
