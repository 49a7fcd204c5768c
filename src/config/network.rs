//! `[network]`: what the job sees of the network.

use serde::{Deserialize, Serialize};

/// `[network]`: what the job sees of the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Network {
    /// Whose it is.
    pub mode: NetworkMode,
    /// The way out of one of its own.
    pub uplink: UplinkMode,
}

/// `network.mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NetworkMode {
    /// That of the caller.
    #[default]
    Host,
    /// Its own network namespace with a loopback device, and an uplink if configured.
    Private,
}

/// `network.uplink`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UplinkMode {
    /// There is none.
    #[default]
    Off,
    /// slirp4netns, a program that makes the job's packets its own connections.
    User,
}
