//! The network of the group as this member makes it in one epoch.

use std::collections::BTreeMap;
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
}

impl Layout {
    /// The network of an epoch, with these machines.
    #[must_use]
    pub fn plan(&self, origin: Incarnation, epoch: Epoch, nodes: &BTreeMap<Rank, Node>) -> Plan {
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
            names: names(&self.group, nodes),
            directory: self.directory.clone(),
        }
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

/// The names of each member: GROUP-RANK, and the name of its machine if no other member has the same.
fn names(group: &JobName, nodes: &BTreeMap<Rank, Node>) -> BTreeMap<u32, Vec<String>> {
    // Each machine has its own, and the job means that one.
    let is_loopback = |host: &str| {
        let host = host.to_ascii_lowercase();
        host.split('.').any(|label| label == "localhost") || ["ip6-localhost", "ip6-loopback"].contains(&&*host)
    };
    let is_alone = |host: &str| nodes.values().filter(|node| node.host == host).count() == 1;
    // It becomes a line of /etc/hosts, and comes from whoever can write to the coordinator.
    let is_name = |host: &str| {
        !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_'))
    };
    let of = |rank: &Rank, node: &Node| {
        let own = format!("{group}-{}", rank.0);
        let host = Some(node.host.clone()).filter(|host| is_name(host) && is_alone(host) && !is_loopback(host));
        [host, Some(own)].into_iter().flatten().collect()
    };
    nodes.iter().map(|(rank, node)| (rank.0, of(rank, node))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::node::any_node;
    use super::*;

    fn node(host: &str, address: [u8; 4]) -> Node {
        Node { host: host.into(), address: address.into(), ..any_node() }
    }

    #[test]
    fn members_are_found_by_rank_and_by_a_host_name_of_their_own() {
        let nodes = BTreeMap::from([
            (Rank(0), node("a", [10, 0, 0, 1])),
            (Rank(1), node("b", [10, 0, 0, 2])),
            (Rank(2), node("b", [10, 0, 0, 2])),
        ]);
        let layout = Layout {
            group: "bert".parse().unwrap(),
            rank: Rank(1),
            size: 3,
            subnet: Subnet::default(),
            underlay: Underlay::Vxlan(4789),
            address: [10, 0, 0, 2].into(),
            directory: "/tmp".into(),
        };
        let plan = layout.plan(Incarnation(1), Epoch(4), &nodes);
        assert_eq!(plan.names[&0], ["a", "bert-0"]);
        assert_eq!((&*plan.names[&1], &*plan.names[&2]), (&["bert-1".into()][..], &["bert-2".into()][..]));
        assert_eq!(plan.peers.keys().collect::<Vec<_>>(), [&0, &2]);
        plan.check().unwrap();
        let hostile = BTreeMap::from([(Rank(0), node("a\n10.9.9.9 example.org", [10, 0, 0, 1]))]);
        assert_eq!(layout.plan(Incarnation(1), Epoch(4), &hostile).names[&0], ["bert-0"]);
        for own in ["localhost", "LOCALHOST", "localhost.localdomain", "ip6-localhost"] {
            let nodes = BTreeMap::from([(Rank(0), node(own, [10, 0, 0, 1]))]);
            assert_eq!(layout.plan(Incarnation(1), Epoch(4), &nodes).names[&0], ["bert-0"], "{own}");
        }
        let small = Node { packet: Some(1330), ..node("c", [10, 0, 0, 3]) };
        let nodes = BTreeMap::from([(Rank(0), node("a", [10, 0, 0, 1])), (Rank(1), small)]);
        assert_eq!(layout.plan(Incarnation(1), Epoch(4), &nodes).mtu, Some(1330));
        let nodes = BTreeMap::from([
            (Rank(0), node("a", [10, 0, 0, 1])),
            (Rank(1), node("b", [10, 0, 0, 2])),
            (Rank(2), node("b", [10, 0, 0, 2])),
        ]);
        let later = layout.plan(Incarnation(1), Epoch(5), &nodes);
        assert_ne!(plan.kind, later.kind, "packets of an earlier epoch are kept out");
    }
}
