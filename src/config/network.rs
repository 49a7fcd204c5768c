//! `[network]`: the network of the job.

use serde::{Deserialize, Serialize};

/// `[network]`: the network of the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Network {
    /// Which network the job uses.
    pub(crate) mode: NetworkMode,
}

/// `network.mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum NetworkMode {
    /// The caller's network.
    #[default]
    Host,
    /// Its own network namespace with a loopback device.
    Private,
    /// The same with a connection to the outside: slirp4netns, a program that forwards the job's packets through its own
    /// connections.
    Uplink,
}
