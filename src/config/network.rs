//! `[network]`: the network of the job.

use serde::{Deserialize, Serialize};

/// `[network]`: the network of the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Network {
    /// Which network the job uses.
    pub(crate) mode: NetworkMode,
    /// The connection of a private network to the outside.
    pub(crate) uplink: UplinkMode,
}

/// `network.mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum NetworkMode {
    /// The caller's network.
    #[default]
    Host,
    /// Its own network namespace with a loopback device, and an uplink if configured.
    Private,
}

/// `network.uplink`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum UplinkMode {
    /// No connection.
    #[default]
    Off,
    /// slirp4netns, a program that forwards the job's packets through its own connections.
    User,
}
