//! What a member publishes about its machine when it joins.

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
}
