//! The holder of a job's lock, as the lock file names it, and how long its silence may last.

use std::fmt;
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use rekindle_base::units::moment;
use rekindle_os::process;

/// How often a holder renews the time stamp of the lock file.
pub const HEARTBEAT: Duration = Duration::from_secs(30);
/// A holder on another machine whose last heartbeat is this old is dead. Ten heartbeats, because a file server may
/// stall for a while, and then all of its clients do.
pub(super) const STALE: Duration = Duration::from_secs(300);

/// The supervisor of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Its pid in its own PID namespace.
    pub(crate) pid: u32,
    /// The host name of its machine.
    pub host: String,
    /// The boot id of that machine.
    pub boot_id: String,
    /// When it took the lock.
    pub(crate) since: DateTime<Utc>,
    /// When the process began, in clock ticks since the boot, because pids are reused. An earlier version wrote none,
    /// and had no heartbeat.
    #[serde(default)]
    pub(crate) started: Option<u64>,
    /// Its PID namespace.
    #[serde(default)]
    pub(crate) pid_namespace: Option<String>,
}

impl Holder {
    /// This process.
    #[must_use]
    pub fn this_process() -> Holder {
        let host = nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned());
        let namespace = std::fs::read_link("/proc/self/ns/pid").ok();
        let pid = std::process::id();
        Holder {
            pid,
            host: host.unwrap_or_else(|_| "unknown".to_owned()),
            boot_id: process::boot_id().unwrap_or_else(|_| "unknown".to_owned()),
            // With the precision of the file, so that the value that is read equals the value written.
            since: DateTime::from_timestamp_millis(Utc::now().timestamp_millis()).unwrap_or_default(),
            started: process::start_time(pid.cast_signed()),
            pid_namespace: namespace.map(|path| path.to_string_lossy().into_owned()),
        }
    }

    /// Whether its process is alive, as far as is known: one in another PID namespace cannot be seen from here.
    #[must_use]
    pub fn may_live(&self) -> bool {
        self.pid_namespace != Holder::this_process().pid_namespace || self.lives()
    }

    /// Whether its process is seen to be alive.
    #[must_use]
    pub fn is_seen_alive(&self) -> bool {
        self.pid_namespace == Holder::this_process().pid_namespace && self.lives()
    }

    /// Whether its process is alive, if it is in this PID namespace. A zombie is not.
    pub(crate) fn lives(&self) -> bool {
        let pid = self.pid.cast_signed();
        process::state(pid).is_some_and(|state| !"ZX".contains(state)) && process::start_time(pid) == self.started
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pid {} on host {} since {}", self.pid, self.host, moment(self.since))
    }
}
