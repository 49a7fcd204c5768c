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
    /// Where it was below the group of the supervisor.
    pub path: GroupPath,
    /// `st_mode` of its folder.
    pub mode: u32,
    /// Who owned its folder.
    pub owner: Owner,
    /// Who owned its `cgroup.procs`: who it was handed to.
    pub procs: Owner,
    /// Its settings that are not what a new group has, by the names of their files.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub settings: BTreeMap<String, String>,
    /// The processes in it, as they see themselves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<i32>,
}
