//! The options of sockets that the kernel tells.
//!
//! Which socket has which is left to the kernel: getsockopt(2) fails for those that it has not. Numbers that libc does
//! not have are those of the kernel's include/uapi (Linux 6.18).

/// Which sockets are asked for an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// All (`SOL_SOCKET`).
    Socket,
    /// IPv4, and IPv6 too (`IPPROTO_IP`): a socket of IPv6 may have connections of IPv4.
    Ip,
    /// IPv6 (`IPPROTO_IPV6`).
    Ipv6,
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// Netlink.
    Netlink,
    /// Packets of a device.
    Packet,
}

impl Level {
    /// The level's number in getsockopt(2).
    #[must_use]
    pub fn number(self) -> i32 {
        match self {
            Level::Socket => libc::SOL_SOCKET,
            Level::Ip => libc::IPPROTO_IP,
            Level::Ipv6 => libc::IPPROTO_IPV6,
            Level::Tcp => libc::IPPROTO_TCP,
            Level::Udp => libc::IPPROTO_UDP,
            Level::Netlink => libc::SOL_NETLINK,
            Level::Packet => libc::SOL_PACKET,
        }
    }
}

/// How many bytes a value has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// An int.
    Int,
    /// Two longs: a struct timeval.
    Time,
    /// Two ints: a struct linger.
    Linger,
    /// Eight bytes.
    Long,
}

impl Shape {
    /// Bytes of the longest.
    pub const LONGEST: usize = 16;

    /// The length.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Shape::Int => 4,
            Shape::Linger | Shape::Long => 8,
            Shape::Time => 16,
        }
    }
}

/// An option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketOption {
    /// Its name in the C library.
    pub name: &'static str,
    /// Where it belongs.
    pub level: Level,
    /// Its number.
    pub number: i32,
    /// Its value's form.
    pub shape: Shape,
    /// Whether a process may set it at any time to what it reads.
    pub settable: bool,
}

const fn int(level: Level, number: i32, name: &'static str) -> SocketOption {
    SocketOption { name, level, number, shape: Shape::Int, settable: true }
}

const fn shaped(level: Level, number: i32, name: &'static str, shape: Shape) -> SocketOption {
    SocketOption { name, level, number, shape, settable: true }
}

const fn told(level: Level, number: i32, name: &'static str) -> SocketOption {
    SocketOption { name, level, number, shape: Shape::Int, settable: false }
}

use Level::{Ip, Ipv6, Netlink, Packet, Socket, Tcp, Udp};

/// All of them. The sizes of the buffers (`SO_SNDBUF`, `SO_RCVBUF`) are set by doubling, so they are halved first
/// (socket(7)).
pub const OPTIONS: &[SocketOption] = &[
    int(Socket, libc::SO_REUSEADDR, "SO_REUSEADDR"),
    int(Socket, libc::SO_REUSEPORT, "SO_REUSEPORT"),
    int(Socket, libc::SO_KEEPALIVE, "SO_KEEPALIVE"),
    int(Socket, libc::SO_BROADCAST, "SO_BROADCAST"),
    int(Socket, libc::SO_OOBINLINE, "SO_OOBINLINE"),
    int(Socket, libc::SO_DONTROUTE, "SO_DONTROUTE"),
    int(Socket, libc::SO_PRIORITY, "SO_PRIORITY"),
    int(Socket, libc::SO_PASSCRED, "SO_PASSCRED"),
    int(Socket, libc::SO_PASSSEC, "SO_PASSSEC"),
    int(Socket, libc::SO_NO_CHECK, "SO_NO_CHECK"),
    int(Socket, libc::SO_RCVLOWAT, "SO_RCVLOWAT"),
    int(Socket, libc::SO_TIMESTAMP, "SO_TIMESTAMP"),
    int(Socket, libc::SO_TIMESTAMPNS, "SO_TIMESTAMPNS"),
    int(Socket, libc::SO_TIMESTAMPING, "SO_TIMESTAMPING"),
    int(Socket, libc::SO_MARK, "SO_MARK"),
    int(Socket, libc::SO_RXQ_OVFL, "SO_RXQ_OVFL"),
    int(Socket, libc::SO_PEEK_OFF, "SO_PEEK_OFF"),
    int(Socket, libc::SO_SELECT_ERR_QUEUE, "SO_SELECT_ERR_QUEUE"),
    int(Socket, libc::SO_BUSY_POLL, "SO_BUSY_POLL"),
    int(Socket, libc::SO_PREFER_BUSY_POLL, "SO_PREFER_BUSY_POLL"),
    int(Socket, libc::SO_BUSY_POLL_BUDGET, "SO_BUSY_POLL_BUDGET"),
    int(Socket, libc::SO_ZEROCOPY, "SO_ZEROCOPY"),
    int(Socket, libc::SO_LOCK_FILTER, "SO_LOCK_FILTER"),
    int(Socket, 72, "SO_BUF_LOCK"),
    int(Socket, 75, "SO_RCVMARK"),
    int(Socket, 76, "SO_PASSPIDFD"),
    told(Socket, libc::SO_SNDBUF, "SO_SNDBUF"),
    told(Socket, libc::SO_RCVBUF, "SO_RCVBUF"),
    shaped(Socket, libc::SO_LINGER, "SO_LINGER", Shape::Linger),
    shaped(Socket, libc::SO_RCVTIMEO, "SO_RCVTIMEO", Shape::Time),
    shaped(Socket, libc::SO_SNDTIMEO, "SO_SNDTIMEO", Shape::Time),
    shaped(Socket, libc::SO_MAX_PACING_RATE, "SO_MAX_PACING_RATE", Shape::Long),
    int(Ip, libc::IP_TOS, "IP_TOS"),
    int(Ip, libc::IP_TTL, "IP_TTL"),
    int(Ip, libc::IP_HDRINCL, "IP_HDRINCL"),
    int(Ip, libc::IP_RECVOPTS, "IP_RECVOPTS"),
    int(Ip, libc::IP_RETOPTS, "IP_RETOPTS"),
    int(Ip, libc::IP_PKTINFO, "IP_PKTINFO"),
    int(Ip, libc::IP_MTU_DISCOVER, "IP_MTU_DISCOVER"),
    int(Ip, libc::IP_RECVERR, "IP_RECVERR"),
    int(Ip, libc::IP_RECVTTL, "IP_RECVTTL"),
    int(Ip, libc::IP_RECVTOS, "IP_RECVTOS"),
    int(Ip, libc::IP_FREEBIND, "IP_FREEBIND"),
    int(Ip, libc::IP_TRANSPARENT, "IP_TRANSPARENT"),
    int(Ip, libc::IP_RECVORIGDSTADDR, "IP_RECVORIGDSTADDR"),
    int(Ip, libc::IP_MINTTL, "IP_MINTTL"),
    int(Ip, libc::IP_NODEFRAG, "IP_NODEFRAG"),
    int(Ip, 23, "IP_CHECKSUM"),
    int(Ip, libc::IP_BIND_ADDRESS_NO_PORT, "IP_BIND_ADDRESS_NO_PORT"),
    int(Ip, 25, "IP_RECVFRAGSIZE"),
    int(Ip, 26, "IP_RECVERR_RFC4884"),
    int(Ip, libc::IP_MULTICAST_TTL, "IP_MULTICAST_TTL"),
    int(Ip, libc::IP_MULTICAST_LOOP, "IP_MULTICAST_LOOP"),
    int(Ip, libc::IP_MULTICAST_ALL, "IP_MULTICAST_ALL"),
    int(Ip, libc::IP_UNICAST_IF, "IP_UNICAST_IF"),
    int(Ip, 51, "IP_LOCAL_PORT_RANGE"),
    told(Ip, libc::IP_MULTICAST_IF, "IP_MULTICAST_IF"),
    told(Ipv6, libc::IPV6_V6ONLY, "IPV6_V6ONLY"),
    int(Ipv6, libc::IPV6_UNICAST_HOPS, "IPV6_UNICAST_HOPS"),
    int(Ipv6, libc::IPV6_MULTICAST_HOPS, "IPV6_MULTICAST_HOPS"),
    int(Ipv6, libc::IPV6_MULTICAST_LOOP, "IPV6_MULTICAST_LOOP"),
    int(Ipv6, libc::IPV6_MULTICAST_IF, "IPV6_MULTICAST_IF"),
    int(Ipv6, 29, "IPV6_MULTICAST_ALL"),
    int(Ipv6, libc::IPV6_MTU_DISCOVER, "IPV6_MTU_DISCOVER"),
    int(Ipv6, libc::IPV6_RECVERR, "IPV6_RECVERR"),
    int(Ipv6, libc::IPV6_RECVPKTINFO, "IPV6_RECVPKTINFO"),
    int(Ipv6, libc::IPV6_RECVHOPLIMIT, "IPV6_RECVHOPLIMIT"),
    int(Ipv6, libc::IPV6_RECVRTHDR, "IPV6_RECVRTHDR"),
    int(Ipv6, libc::IPV6_RECVHOPOPTS, "IPV6_RECVHOPOPTS"),
    int(Ipv6, libc::IPV6_RECVDSTOPTS, "IPV6_RECVDSTOPTS"),
    int(Ipv6, 60, "IPV6_RECVPATHMTU"),
    int(Ipv6, libc::IPV6_TCLASS, "IPV6_TCLASS"),
    int(Ipv6, libc::IPV6_RECVTCLASS, "IPV6_RECVTCLASS"),
    int(Ipv6, libc::IPV6_DONTFRAG, "IPV6_DONTFRAG"),
    int(Ipv6, 70, "IPV6_AUTOFLOWLABEL"),
    int(Ipv6, 72, "IPV6_ADDR_PREFERENCES"),
    int(Ipv6, 73, "IPV6_MINHOPCOUNT"),
    int(Ipv6, libc::IPV6_RECVORIGDSTADDR, "IPV6_RECVORIGDSTADDR"),
    int(Ipv6, libc::IPV6_TRANSPARENT, "IPV6_TRANSPARENT"),
    int(Ipv6, 76, "IPV6_UNICAST_IF"),
    int(Ipv6, 33, "IPV6_FLOWINFO_SEND"),
    int(Ipv6, 77, "IPV6_RECVFRAGSIZE"),
    int(Ipv6, libc::IPV6_FREEBIND, "IPV6_FREEBIND"),
    int(Tcp, libc::TCP_NODELAY, "TCP_NODELAY"),
    int(Tcp, libc::TCP_CORK, "TCP_CORK"),
    int(Tcp, libc::TCP_KEEPIDLE, "TCP_KEEPIDLE"),
    int(Tcp, libc::TCP_KEEPINTVL, "TCP_KEEPINTVL"),
    int(Tcp, libc::TCP_KEEPCNT, "TCP_KEEPCNT"),
    int(Tcp, libc::TCP_SYNCNT, "TCP_SYNCNT"),
    int(Tcp, libc::TCP_LINGER2, "TCP_LINGER2"),
    int(Tcp, libc::TCP_DEFER_ACCEPT, "TCP_DEFER_ACCEPT"),
    int(Tcp, libc::TCP_USER_TIMEOUT, "TCP_USER_TIMEOUT"),
    int(Tcp, libc::TCP_FASTOPEN, "TCP_FASTOPEN"),
    int(Tcp, libc::TCP_FASTOPEN_CONNECT, "TCP_FASTOPEN_CONNECT"),
    int(Tcp, 34, "TCP_FASTOPEN_NO_COOKIE"),
    int(Tcp, libc::TCP_THIN_LINEAR_TIMEOUTS, "TCP_THIN_LINEAR_TIMEOUTS"),
    int(Tcp, libc::TCP_NOTSENT_LOWAT, "TCP_NOTSENT_LOWAT"),
    int(Tcp, libc::TCP_SAVE_SYN, "TCP_SAVE_SYN"),
    int(Tcp, 36, "TCP_INQ"),
    int(Tcp, 37, "TCP_TX_DELAY"),
    int(Tcp, 44, "TCP_RTO_MAX_MS"),
    int(Udp, libc::UDP_CORK, "UDP_CORK"),
    int(Udp, libc::UDP_ENCAP, "UDP_ENCAP"),
    int(Udp, 101, "UDP_NO_CHECK6_TX"),
    int(Udp, 102, "UDP_NO_CHECK6_RX"),
    int(Udp, libc::UDP_SEGMENT, "UDP_SEGMENT"),
    int(Udp, libc::UDP_GRO, "UDP_GRO"),
    int(Netlink, libc::NETLINK_PKTINFO, "NETLINK_PKTINFO"),
    int(Netlink, libc::NETLINK_BROADCAST_ERROR, "NETLINK_BROADCAST_ERROR"),
    int(Netlink, libc::NETLINK_NO_ENOBUFS, "NETLINK_NO_ENOBUFS"),
    int(Netlink, libc::NETLINK_CAP_ACK, "NETLINK_CAP_ACK"),
    int(Netlink, 11, "NETLINK_EXT_ACK"),
    int(Netlink, 12, "NETLINK_GET_STRICT_CHK"),
    int(Packet, libc::PACKET_AUXDATA, "PACKET_AUXDATA"),
    int(Packet, 9, "PACKET_ORIGDEV"),
    int(Packet, 14, "PACKET_LOSS"),
    int(Packet, 17, "PACKET_TIMESTAMP"),
    int(Packet, libc::PACKET_QDISC_BYPASS, "PACKET_QDISC_BYPASS"),
    int(Packet, 23, "PACKET_IGNORE_OUTGOING"),
];
