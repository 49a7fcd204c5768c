//! What a member publishes about its machine when it joins.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// A member's machine and the options of its supervisor: all that must be equal in a group, and the machine's address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// The machine's name.
    pub host: String,
    /// Its address in the network of the machines.
    pub address: IpAddr,
    /// The version of rekindle.
    pub rekindle: String,
    /// The version of CRIU.
    pub criu: String,
    /// The version of the NVIDIA driver, if there is one.
    pub driver: Option<String>,
    /// Number of members of the group.
    pub size: u32,
    /// The addresses of the job's network.
    pub subnet: String,
    /// How long a lease lives, in seconds.
    pub lease_s: u64,
    /// How the machines are joined.
    #[serde(default)]
    pub network: String,
    /// The largest packet of the job's network that this machine can send, in bytes; none for a bridge.
    #[serde(default)]
    pub packet: Option<u32>,
    /// The id of the job's user.
    #[serde(default)]
    pub user: u32,
}

/// What two members of a group have differently, and must not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disagreement {
    what: &'static str,
    ours: String,
    theirs: String,
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {} there and {} here", self.what, self.theirs, self.ours)
    }
}

impl Node {
    /// The first thing that the other member has differently and that must be equal in a group.
    #[must_use]
    pub fn disagrees(&self, other: &Node) -> Option<Disagreement> {
        let (ours, theirs) = (self.must_be_equal(), other.must_be_equal());
        let both = ours.into_iter().zip(theirs);
        both.into_iter()
            .find_map(|((what, ours), (_, theirs))| (ours != theirs).then_some(Disagreement { what, ours, theirs }))
    }

    fn must_be_equal(&self) -> [(&'static str, String); 8] {
        let family = if self.address.is_ipv4() { "IPv4" } else { "IPv6" };
        [
            // First: another version may not know all that follows.
            ("the version of rekindle", self.rekindle.clone()),
            ("the number of machines (group.nodes)", self.size.to_string()),
            ("the job's network (group.subnet)", self.subnet.clone()),
            // Members with different ones would start, and never reach each other.
            ("how the machines are joined (group.network)", self.network.clone()),
            ("the kind of the machine's address (group.address)", family.into()),
            // Else it is another job with the same name.
            ("the user id of the job (job.user)", self.user.to_string()),
            ("the lease (group.lease)", format!("{}s", self.lease_s)),
            ("the NVIDIA driver", self.driver.clone().unwrap_or_else(|| "missing".into())),
        ]
    }
}

/// What a machine of a group of three tells of itself, for tests.
#[cfg(test)]
pub(crate) fn any_node() -> Node {
    Node {
        host: "a".into(),
        address: [10, 0, 0, 1].into(),
        rekindle: "0.1.0".into(),
        criu: "4.2".into(),
        driver: None,
        size: 3,
        subnet: "10.213.0.0/16".into(),
        lease_s: 30,
        network: "vxlan".into(),
        packet: Some(1450),
        user: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_must_be_equal_is_named() {
        let node = any_node();
        for (other, what) in [
            (Node { network: "vxlan:4790".into(), ..node.clone() }, "group.network"),
            (Node { address: "fd00::1".parse().unwrap(), ..node.clone() }, "group.address"),
            (Node { user: 1001, ..node.clone() }, "job.user"),
        ] {
            let text = node.disagrees(&other).unwrap().to_string();
            assert!(text.contains(what), "{text}");
        }
        let other = Node { packet: Some(8950), ..node.clone() };
        assert_eq!(node.disagrees(&other), None, "the smallest one counts");
        let other = Node { host: "b".into(), address: [10, 0, 0, 2].into(), criu: "4.1".into(), ..node.clone() };
        assert_eq!(node.disagrees(&other), None, "an image names the CRIU that it needs");
        let other = Node { size: 4, ..node.clone() };
        let text = node.disagrees(&other).unwrap().to_string();
        assert_eq!(text, "the number of machines (group.nodes) is 4 there and 3 here");
        let other = Node { driver: Some("580.1".into()), ..node.clone() };
        assert_eq!(node.disagrees(&other).unwrap().to_string(), "the NVIDIA driver is 580.1 there and missing here");
    }
}
