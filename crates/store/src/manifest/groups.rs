//! Fields of a manifest: control groups.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::contents::Owner;
use crate::paths::GroupPath;

/// A control group that processes of the job were in, or one between it and the supervisor's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ControlGroup {
    /// The controllers of its hierarchy, as /proc/PID/cgroup lists them; empty for cgroup v2.
    pub hierarchy: String,
    /// Its path below the group of the supervisor.
    pub path: GroupPath,
    /// `st_mode` of its folder.
    pub mode: u32,
    /// The owner of its folder.
    pub owner: Owner,
    /// The owner of its `cgroup.procs`: the user that it was delegated to.
    pub procs: Owner,
    /// Its settings that differ from those of a new group, by the names of their files.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub settings: BTreeMap<String, String>,
    /// The pids of the processes in it, as they see themselves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<i32>,
}
