//! The job's /etc/hosts: the machine's own, and the members of the group.

use std::collections::{BTreeMap, BTreeSet};

use super::Subnet;

/// The machine's lines, without the names of members: a machine often gives its own name an address of its loopback
/// device. Then each member's names with its address in the group.
pub(super) fn hosts_like(machine: &str, subnet: Subnet, names: &BTreeMap<u32, Vec<String>>) -> String {
    let members: BTreeSet<String> = names.values().flatten().map(|name| name.to_ascii_lowercase()).collect();
    let mut text = String::new();
    for line in machine.lines() {
        let content = line.split('#').next().unwrap_or_default();
        let mut words = content.split_whitespace();
        let Some(address) = words.next() else { continue };
        let kept: Vec<&str> = words.filter(|name| !members.contains(&name.to_ascii_lowercase())).collect();
        if !kept.is_empty() {
            text.extend([address, " ", &kept.join(" "), "\n"]);
        }
    }
    for (rank, names) in names.iter().filter(|(_, names)| !names.is_empty()) {
        text.extend([&subnet.address(*rank).to_string(), " ", &names.join(" "), "\n"]);
    }
    text
}
