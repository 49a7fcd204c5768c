//! The network of the group as this member makes it in one epoch.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;

use rekindle_engine::launch::group::{Kind, Plan, Subnet};
use rekindle_group::{Epoch, Incarnation, Rank};
use rekindle_store::JobName;

use super::node::Node;

/// How the machines are joined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Underlay {
    /// By VXLAN, with this UDP port.
    Vxlan(u16),
    /// By a bridge of this machine.
    Bridge(String),
}

/// All that the network of a member has in every epoch.
#[derive(Debug, Clone)]
pub struct Layout {
    /// The group.
    pub group: JobName,
    /// This member.
    pub rank: Rank,
    /// Number of members.
    pub size: u32,
    /// The addresses.
    pub subnet: Subnet,
    /// How the machines are joined.
    pub underlay: Underlay,
    /// This machine's address.
    pub address: IpAddr,
    /// The folder for the file that the job sees as /etc/hosts.
    pub directory: PathBuf,
    /// What this machine knows about the names of machines.
    pub known: KnownNames,
}

/// What a machine knows by itself about the names of machines: from no document of the coordinator.
#[derive(Debug, Clone, Default)]
pub struct KnownNames {
    /// Its own name.
    pub host: String,
    /// The machines of the job, as its scheduler calls them.
    pub nodes: BTreeSet<String>,
}

impl Layout {
    /// The network of an epoch, with these machines. `hosts` is the present /etc/hosts of this machine.
    #[must_use]
    pub fn plan(&self, origin: Incarnation, epoch: Epoch, nodes: &BTreeMap<Rank, Node>, hosts: &str) -> Plan {
        let kind = match &self.underlay {
            Underlay::Vxlan(port) => {
                Kind::Vxlan { vni: vni(&self.group, origin, epoch), port: *port, local: self.address }
            }
            Underlay::Bridge(name) => Kind::Bridge { name: name.clone() },
        };
        let others = nodes.iter().filter(|(rank, _)| **rank != self.rank);
        Plan {
            subnet: self.subnet,
            rank: self.rank.0,
            size: self.size,
            kind,
            // The smallest one of all: a connection that was restored keeps sending segments for the machine that was
            // there before, and nobody tells it that they are too large now.
            mtu: nodes.values().filter_map(|node| node.packet).min(),
            peers: others.map(|(rank, node)| (rank.0, node.address)).collect(),
            names: self.names(nodes, hosts),
            directory: self.directory.clone(),
        }
    }
}

impl Layout {
    /// The names of each member: GROUP-RANK, and the name of its machine.
    ///
    /// The name of another machine comes from the coordinator. Whoever can write there could call a machine `db.example.org`, and
    /// the job would look for that there. So it is only taken if it cannot take the place of another machine: the
    /// scheduler of this machine knows it, /etc/hosts of this machine has that machine's address for it, or it has no dot
    /// and is not in /etc/hosts.
    fn names(&self, nodes: &BTreeMap<Rank, Node>, hosts: &str) -> BTreeMap<u32, Vec<String>> {
        let ours = |rank: u32| format!("{}-{rank}", self.group);
        let own = Some(self.known.host.as_str()).filter(|host| is_name(host));
        let is_taken = |host: &str| {
            let same = |other: &str| other.eq_ignore_ascii_case(host);
            same(&self.known.host)
                || nodes.values().filter(|node| same(&node.host)).count() > 1
                || (0..self.size).any(|rank| same(&ours(rank)))
        };
        let is_safe = |node: &Node| {
            let known = addresses(hosts, &node.host);
            let is_theirs = |address: &&str| address.parse() == Ok(node.address);
            self.known.nodes.contains(&node.host)
                || if known.is_empty() { !node.host.contains('.') } else { known.iter().all(is_theirs) }
        };
        let of = |rank: Rank, node: &Node| {
            let host = match rank == self.rank {
                true => own,
                false => Some(node.host.as_str()).filter(|host| is_name(host) && !is_taken(host) && is_safe(node)),
            };
            host.map(str::to_owned).into_iter().chain([ours(rank.0)]).collect()
        };
        nodes.iter().map(|(rank, node)| (rank.0, of(*rank, node))).collect()
    }
}

/// Another one for each group and each epoch, so that packets of others are not taken for this one's.
fn vni(group: &JobName, origin: Incarnation, epoch: Epoch) -> u32 {
    let mut hash = blake3::Hasher::new();
    hash.update(group.as_str().as_bytes()).update(&origin.0.to_le_bytes()).update(&epoch.0.to_le_bytes());
    let hash = hash.finalize();
    let [a, b, c, ..] = *hash.as_bytes();
    // 0 is valid, but some tools take it for "none".
    u32::from_be_bytes([0, a, b, c]).max(1)
}

/// Whether it can be a name in /etc/hosts that is no other machine's by itself: each machine has its own loopback device, and
/// the job means that one.
fn is_name(host: &str) -> bool {
    let is_label =
        |label: &str| !label.is_empty() && label.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'));
    let is_loopback = host.split('.').any(|label| label.eq_ignore_ascii_case("localhost"))
        || ["ip6-localhost", "ip6-loopback"].iter().any(|own| host.eq_ignore_ascii_case(own));
    host.split('.').all(is_label) && !is_loopback
}

/// The addresses of a name in a file like /etc/hosts (hosts(5)).
fn addresses<'a>(hosts: &'a str, name: &str) -> Vec<&'a str> {
    let of = |line: &'a str| {
        let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
        let address = words.next()?;
        words.any(|word| word.eq_ignore_ascii_case(name)).then_some(address)
    };
    hosts.lines().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::super::node::any_node;
    use super::*;

    fn node(host: &str, address: [u8; 4]) -> Node {
        Node { host: host.into(), address: address.into(), ..any_node() }
    }

    fn layout() -> Layout {
        Layout {
            group: "bert".parse().unwrap(),
            rank: Rank(1),
            size: 3,
            subnet: Subnet::default(),
            underlay: Underlay::Vxlan(4789),
            address: [10, 0, 0, 2].into(),
            directory: "/tmp".into(),
            known: KnownNames { host: "b".into(), nodes: BTreeSet::new() },
        }
    }

    /// The names of rank 0, which calls itself this, on the machine of rank 1.
    fn names_of(host: &str, layout: &Layout, hosts: &str) -> Vec<String> {
        let nodes = [(Rank(0), node(host, [10, 0, 0, 1])), (Rank(1), node("b", [10, 0, 0, 2]))].into();
        let mut plan = layout.plan(Incarnation(1), Epoch(4), &nodes, hosts);
        assert_eq!(plan.names[&1], ["b", "bert-1"], "{host}");
        plan.names.remove(&0).unwrap()
    }

    #[test]
    fn members_are_found_by_rank_and_by_a_host_name_of_their_own() {
        let nodes = BTreeMap::from([
            (Rank(0), node("a", [10, 0, 0, 1])),
            (Rank(1), node("b", [10, 0, 0, 2])),
            (Rank(2), node("B", [10, 0, 0, 2])),
        ]);
        let layout = layout();
        let plan = layout.plan(Incarnation(1), Epoch(4), &nodes, "");
        assert_eq!(plan.names[&0], ["a", "bert-0"]);
        assert_eq!((&*plan.names[&1], &*plan.names[&2]), (&["b".into(), "bert-1".into()][..], &["bert-2".into()][..]));
        assert_eq!(plan.peers.keys().collect::<Vec<_>>(), [&0, &2]);
        plan.check().unwrap();
        let two = BTreeMap::from([(Rank(0), node("c", [10, 0, 0, 1])), (Rank(2), node("C", [10, 0, 0, 3]))]);
        let plan = layout.plan(Incarnation(1), Epoch(4), &two, "");
        assert_eq!((&*plan.names[&0], &*plan.names[&2]), (&["bert-0".into()][..], &["bert-2".into()][..]));
        for own in ["localhost", "LOCALHOST", "localhost.localdomain", "ip6-localhost"] {
            assert_eq!(names_of(own, &layout, ""), ["bert-0"], "{own}");
            let known = KnownNames { host: own.into(), ..KnownNames::default() };
            let here = Layout { known, ..layout.clone() };
            assert_eq!(here.plan(Incarnation(1), Epoch(4), &nodes, "").names[&1], ["bert-1"], "{own}");
        }
        let small = Node { packet: Some(1330), ..node("c", [10, 0, 0, 3]) };
        let mixed = BTreeMap::from([(Rank(0), node("a", [10, 0, 0, 1])), (Rank(1), small)]);
        assert_eq!(layout.plan(Incarnation(1), Epoch(4), &mixed, "").mtu, Some(1330));
        let plan = layout.plan(Incarnation(1), Epoch(4), &nodes, "");
        let later = layout.plan(Incarnation(1), Epoch(5), &nodes, "");
        assert_ne!(plan.kind, later.kind, "packets of an earlier epoch are kept out");
    }

    /// Whoever can write to the coordinator chooses it: the jobs of the others must not look for `db.example.org` there.
    #[test]
    fn a_member_takes_no_name_from_others() {
        let hosts = "127.0.0.1 localhost\n192.0.2.9 vault vault.example # in use\n10.0.0.1 here.example here\n";
        let layout = layout();
        for taken in [
            "db.example.org",
            "a.example",
            "vault",
            "VAULT",
            "vault.example",
            "B",
            "bert-1",
            "Bert-2",
            "a\n10.9.9.9 example.org",
            "a b",
            "",
            "a.",
        ] {
            assert_eq!(names_of(taken, &layout, hosts), ["bert-0"], "{taken:?}");
        }
        // It means that machine here, too, or nothing.
        for free in ["a", "node-7", "here", "here.example"] {
            assert_eq!(names_of(free, &layout, hosts), [free, "bert-0"], "{free}");
        }
        // What the scheduler of this machine says does not come from the others.
        let nodes = ["a.example", "vault"].map(String::from).into();
        let listed = Layout { known: KnownNames { nodes, ..layout.known.clone() }, ..layout.clone() };
        assert_eq!(names_of("a.example", &listed, hosts), ["a.example", "bert-0"]);
        assert_eq!(names_of("vault", &listed, hosts), ["vault", "bert-0"]);
        assert_eq!(names_of("db.example.org", &listed, hosts), ["bert-0"]);
    }
}
