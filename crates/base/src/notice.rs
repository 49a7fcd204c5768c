//! What a cloud announces about the machine: that it ends, or that it is disturbed for a moment.

use std::fmt;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

/// A cloud that announces interruptions of its machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cloud {
    /// Amazon EC2.
    Aws,
    /// Google Compute Engine.
    Google,
    /// Microsoft Azure.
    Azure,
}

impl fmt::Display for Cloud {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Cloud::Aws => "AWS",
            Cloud::Google => "Google Cloud",
            Cloud::Azure => "Azure",
        })
    }
}

/// What is announced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The machine is terminated.
    Terminate,
    /// It is stopped.
    Stop,
    /// It is hibernated.
    Hibernate,
    /// It is taken back for somebody else.
    Preempt,
    /// It is restarted.
    Reboot,
    /// It is started again on another host.
    Redeploy,
    /// It may be taken back soon.
    Rebalance,
    /// It is moved to another host while it runs.
    Migrate,
    /// It is paused for some seconds.
    Freeze,
    /// A kind of a newer version.
    #[serde(other)]
    Unknown,
}

impl Kind {
    /// Whether the processes of the machine end.
    #[must_use]
    pub fn ends_the_machine(self) -> bool {
        match self {
            Kind::Terminate | Kind::Stop | Kind::Hibernate | Kind::Preempt | Kind::Reboot | Kind::Redeploy => true,
            Kind::Rebalance | Kind::Migrate | Kind::Freeze | Kind::Unknown => false,
        }
    }
}

/// Continues a sentence that begins with the name of the cloud.
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Terminate => "terminates this machine",
            Kind::Stop => "stops this machine",
            Kind::Hibernate => "hibernates this machine",
            Kind::Preempt => "takes this machine back",
            Kind::Reboot => "restarts this machine",
            Kind::Redeploy => "starts this machine again on another host",
            Kind::Rebalance => "may take this machine back soon",
            Kind::Migrate => "moves this machine to another host while it runs",
            Kind::Freeze => "pauses this machine for some seconds",
            Kind::Unknown => "announces something unknown to this version of rekindle",
        })
    }
}

/// An announcement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// The cloud.
    pub cloud: Cloud,
    /// What it announces.
    pub kind: Kind,
    /// Tells announcements of one cloud apart.
    pub id: String,
    /// When it happens, if the cloud says so.
    pub at: Option<DateTime<Utc>>,
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.cloud, self.kind)
    }
}
