//! `[network]`: what the job sees of the network.

use serde::{Deserialize, Serialize};

/// `[network]`: what the job sees of the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Network {
    /// Whose it is.
    pub mode: NetworkMode,
}

/// `network.mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NetworkMode {
    /// That of the caller.
    #[default]
    Host,
    /// A network namespace of its own with nothing but a loopback device.
    Private,
}
