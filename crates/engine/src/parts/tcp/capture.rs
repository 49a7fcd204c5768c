//! Decides what to do with the job's TCP connections.
//!
//! A connection within the job can be restored: both ends are in the image. A connection to the outside cannot: the
//! other side has seen it end, and a restore of it fails. So by default the former are kept, and the latter are closed
//! in the image.
//!
//! A connection between two addresses of the group is inside, too: its other end is in the image of another node, taken
//! while no cable was in.
//!
//! CRIU keeps all or closes all. If there are both kinds, CRIU keeps all, and those to the outside are closed in the
//! image afterwards ([`close_connections_outwards`]). CRIU then puts their sockets into the repair mode of tcp(7) while
//! it dumps. A job without connections inside avoids that.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::launch::group::Subnet;
use rekindle_criu::Tcp;
use rekindle_criu::image::{self, TcpSocket, close_connections_outwards};
use rekindle_os::beneath::Beneath;
use rekindle_os::process;

/// `snapshot.tcp`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TcpChoice {
    /// Keeps connections within the job, and closes connections to the outside.
    #[default]
    Auto,
    /// Established connections are part of the image (CRIU's `tcp_established`).
    Keep,
    /// They are restored as closed (CRIU's `tcp_close`).
    Close,
}

/// Decides for the tree.
pub(crate) fn choose(wanted: TcpChoice, tree: &[i32], group: Option<Subnet>) -> Tcp {
    match wanted {
        TcpChoice::Keep => Tcp::Keep,
        TcpChoice::Close => Tcp::Close,
        TcpChoice::Auto => automatic(&connections(tree), group),
    }
}

/// Whether CRIU, told to do with the connections as `dumped` says, has closed one in the image that must be kept: it was made
/// after the choice.
pub(crate) fn has_closed_too_many(wanted: TcpChoice, dumped: Tcp, tree: &[i32], group: Option<Subnet>) -> bool {
    (wanted, dumped) == (TcpChoice::Auto, Tcp::Close) && has_inside(&connections(tree), group)
}

/// The two ends of an established connection, as /proc/net/tcp writes them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Connection {
    pub(super) local: String,
    pub(super) remote: String,
}

impl Connection {
    pub(super) fn is_within(&self, group: Subnet) -> bool {
        [&self.local, &self.remote].into_iter().all(|end| address(end).is_some_and(|at| group.contains(at)))
    }
}

/// The IPv4 address in "0100007F:1F90": the kernel writes the word as it is in memory.
fn address(end: &str) -> Option<IpAddr> {
    let (word, _) = end.split_once(':')?;
    let word = u32::from_str_radix(word, 16).ok()?;
    Some(Ipv4Addr::from(word.to_ne_bytes()).into())
}

fn automatic(all: &[Connection], group: Option<Subnet>) -> Tcp {
    if all.is_empty() || has_inside(all, group) { Tcp::Keep } else { Tcp::Close }
}

fn has_inside(all: &[Connection], group: Option<Subnet>) -> bool {
    let known: HashSet<&Connection> = all.iter().collect();
    let other_end = |c: &Connection| Connection { local: c.remote.clone(), remote: c.local.clone() };
    let inside = |c: &Connection| known.contains(&other_end(c)) || group.is_some_and(|group| c.is_within(group));
    all.iter().any(inside)
}

/// Closes the connections in the image that must not be kept; called while all tasks are frozen.
pub(crate) fn close_in_image(
    wanted: TcpChoice,
    dumped: Tcp,
    group: Option<Subnet>,
    criu_dir: &Beneath,
) -> Result<(), image::Error> {
    if (wanted, dumped) == (TcpChoice::Auto, Tcp::Keep) {
        let closed = close_connections_outwards(criu_dir, &|at| group.is_some_and(|group| group.contains(at)))?;
        tracing::debug!(closed, "closed TCP connections to the outside");
    }
    Ok(())
}

/// Closes the connections with kernel TLS in the image, and says so: CRIU (4.2) restores them as plain TCP, and what the program
/// writes would go out as it is. `found` are their local and remote addresses. If CRIU has closed all connections, none is left.
pub(crate) fn close_with_tls(
    dumped: Tcp,
    found: &[(SocketAddr, SocketAddr)],
    criu_dir: &Beneath,
) -> Result<Option<String>, image::Error> {
    if found.is_empty() || dumped == Tcp::Close {
        return Ok(None);
    }
    let closes = |local, remote| found.contains(&(local, remote)) || found.contains(&(remote, local));
    image::close_connections(criu_dir, &closes)?;
    let remote: Vec<String> = found.iter().map(|(_, remote)| remote.to_string()).collect();
    Ok(Some(format!(
        "connections with kernel TLS are closed in the image, because CRIU cannot restore it: to {}",
        remote.join(", ")
    )))
}

/// The connections that the image has, by the addresses of their two ends. `dumped` is how CRIU made it.
pub(crate) fn connections_in(
    criu_dir: &Beneath,
    dumped: Tcp,
) -> Result<HashSet<(SocketAddr, SocketAddr)>, image::Error> {
    if dumped == Tcp::Close {
        return Ok(HashSet::new());
    }
    let canonical = |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
    let ends = |socket: &TcpSocket| match *socket {
        TcpSocket::Connected { local, remote } => Some((canonical(local), canonical(remote))),
        TcpSocket::Listening(_) => None,
    };
    Ok(image::tcp_sockets(criu_dir)?.iter().filter_map(ends).collect())
}

/// The established connections that belong to processes of the tree.
fn connections(tree: &[i32]) -> Vec<Connection> {
    let sockets = tree.iter().flat_map(|pid| process::descriptors(*pid));
    let sockets: HashSet<u64> = sockets.filter_map(|(_, target)| process::socket(&target)).collect();
    let Some(root) = tree.first().filter(|_| !sockets.is_empty()) else { return Vec::new() };
    let tables = ["net/tcp", "net/tcp6"].map(|table| process::text(*root, table).unwrap_or_default());
    tables.iter().flat_map(|table| parse(table, &sockets)).collect()
}

fn parse(table: &str, sockets: &HashSet<u64>) -> Vec<Connection> {
    const LISTEN: &str = "0A";
    let connection = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (local, remote, state, inode) = (fields.get(1)?, fields.get(2)?, fields.get(3)?, fields.get(9)?);
        let wanted = *state != LISTEN && sockets.contains(&inode.parse().ok()?);
        wanted.then(|| Connection { local: plain(local), remote: plain(remote) })
    };
    table.lines().skip(1).filter_map(connection).collect()
}

/// An IPv4-mapped IPv6 address as the IPv4 address.
pub(super) fn plain(address: &str) -> String {
    address.strip_prefix("0000000000000000FFFF0000").unwrap_or(address).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11
   1: 0100007F:1F90 0100007F:C000 01 00000000:00000000 00:00000000 00000000     0        0 12
   2: 0100007F:C000 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0        0 13
   3: 0200000A:C001 0300000A:0050 01 00000000:00000000 00:00000000 00000000     0        0 14
";

    fn with(inodes: &[&str]) -> Tcp {
        within(inodes, None)
    }

    fn within(inodes: &[&str], group: Option<Subnet>) -> Tcp {
        automatic(&parse(TABLE, &inodes.iter().map(|inode| inode.parse().unwrap()).collect()), group)
    }

    #[test]
    fn connections_inside_are_kept() {
        assert_eq!(with(&["11", "12", "13"]), Tcp::Keep);
        assert_eq!(with(&["11"]), Tcp::Keep);
    }

    #[test]
    fn where_all_lead_out_criu_closes_them() {
        assert_eq!(with(&["12", "13", "14"]), Tcp::Keep, "two ends of one are inside");
        assert_eq!(with(&["14"]), Tcp::Close);
        assert_eq!(with(&["12"]), Tcp::Close, "the other end belongs to somebody else");
    }

    #[test]
    fn a_connection_inside_that_was_made_after_the_choice_is_seen() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let one = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let lost = |wanted, dumped| has_closed_too_many(wanted, dumped, &[std::process::id().cast_signed()], None);
        let other = listener.accept().unwrap();
        assert!(lost(TcpChoice::Auto, Tcp::Close));
        assert!(
            !lost(TcpChoice::Auto, Tcp::Keep) && !lost(TcpChoice::Close, Tcp::Close),
            "it is not closed, or must be"
        );
        drop((one, other));
    }

    #[test]
    fn a_connection_with_tls_is_noted_unless_all_are_closed() {
        let dir = tempfile::tempdir().unwrap();
        // Without records.
        std::fs::write(dir.path().join("files.img"), [0x5456_4319_u32, 0x5630_3138].map(u32::to_le_bytes).concat())
            .unwrap();
        let end = |port| SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port);
        let note = |dumped, found: &[_]| close_with_tls(dumped, found, &crate::samples::beneath(dir.path())).unwrap();
        assert_eq!((note(Tcp::Keep, &[]), note(Tcp::Close, &[(end(1), end(2))])), (None, None));
        let text = note(Tcp::Keep, &[(end(1), end(2))]).unwrap();
        assert!(text.contains("kernel TLS") && text.ends_with("to 127.0.0.1:2"), "{text}");
    }

    #[test]
    fn connections_within_the_group_are_inside() {
        let group = |subnet: &str| Some(subnet.parse().unwrap());
        assert_eq!(within(&["14"], group("10.0.0.0/16")), Tcp::Keep);
        assert_eq!(within(&["14"], group("10.0.0.0/30")), Tcp::Keep);
        assert_eq!(within(&["14"], group("10.213.0.0/16")), Tcp::Close);
    }
}
