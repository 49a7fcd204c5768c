//! NCCL's environment variables in the job's environment, so that its processes can be checkpointed.
//!
//! Measured with NCCL 2.28.9 on two H200 with NVLink, driver 580.159.04, 2026-11-22: all-reduce of 256 MiB has a bus
//! bandwidth of 298 GB/s; without direct access between GPUs (`NCCL_P2P_DISABLE=1`) 27.6 GB/s. With
//! `NCCL_CUMEM_HOST_ENABLE` on, the restore of a process fails even if it has released all memory of other processes;
//! with it off, NCCL uses /dev/shm. Multicast (NVLS) memory cannot be released and mapped again. `NCCL_CUMEM_ENABLE=0`
//! would make NCCL use CUDA IPC, which cannot be released either.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};

use serde::{Deserialize, Serialize};

/// The setting `gpu.nccl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Nccl {
    /// Disables as little as possible.
    #[default]
    Auto,
    /// Disables direct access between the GPUs of different processes.
    NoPeer,
    /// Sets nothing.
    Off,
}

/// With these, NCCL shares memory only in ways that the interposer can suspend.
const MANAGED: &[(&str, &str)] =
    &[("NCCL_CUMEM_ENABLE", "1"), ("NCCL_CUMEM_HOST_ENABLE", "0"), ("NCCL_NVLS_ENABLE", "0")];

/// With these, a process shares no memory.
const ALONE: &[(&str, &str)] = &[("NCCL_P2P_DISABLE", "1"), ("NCCL_CUMEM_HOST_ENABLE", "0"), ("NCCL_NVLS_ENABLE", "0")];

/// Adds the variables that `environment` does not set already. Returns what was added, and the settings that prevent
/// snapshots.
pub fn prepare(
    nccl: Nccl,
    has_interposer: bool,
    environment: &mut BTreeMap<OsString, OsString>,
) -> (Vec<String>, Vec<String>) {
    let wanted = match (nccl, has_interposer) {
        (Nccl::Off, _) => &[],
        (Nccl::Auto, true) => MANAGED,
        (Nccl::Auto, false) | (Nccl::NoPeer, _) => ALONE,
    };
    let (mut added, mut contrary) = (Vec::new(), Vec::new());
    for (name, value) in wanted {
        match environment.get(OsStr::new(name)) {
            None => {
                environment.insert(name.into(), value.into());
                added.push(format!("{name}={value}"));
            }
            Some(set) if set == value => {}
            Some(set) => contrary.push(format!("{name}={}", set.to_string_lossy())),
        }
    }
    // Without direct access between GPUs there is nothing to release.
    let has_no_peer = environment.get(OsStr::new("NCCL_P2P_DISABLE")).is_some_and(|set| set == "1");
    contrary.retain(|set| !(has_no_peer && set.starts_with("NCCL_CUMEM_ENABLE=")));
    (added, contrary)
}

/// Logs what was added, what it costs, and which settings prevent snapshots.
pub fn tell(added: &[String], contrary: &[String]) {
    if !added.is_empty() {
        let cost = match added.iter().any(|set| set.starts_with("NCCL_P2P_DISABLE")) {
            true => {
                "GPUs of different processes cannot access each other directly, which is slow if the machine has NVLink"
            }
            false => "NCCL multicast is disabled; GPUs access each other directly",
        };
        tracing::info!(target: "rekindle::routine", "gpu.nccl: {} in the job's environment: {cost}", added.join(" "));
    }
    if !contrary.is_empty() {
        tracing::warn!(
            "{} is set: with it, a job that uses NCCL on several GPUs cannot have snapshots. Remove it; gpu.nccl sets what is needed",
            contrary.join(" ")
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prepared(nccl: Nccl, has_interposer: bool, set: &[(&str, &str)]) -> (Vec<String>, Vec<String>, usize) {
        let mut environment = set.iter().map(|(name, value)| (name.into(), value.into())).collect();
        let (added, contrary) = prepare(nccl, has_interposer, &mut environment);
        (added, contrary, environment.len())
    }

    #[test]
    fn what_the_user_decided_stays() {
        let all = ["NCCL_CUMEM_ENABLE=1", "NCCL_CUMEM_HOST_ENABLE=0", "NCCL_NVLS_ENABLE=0"].map(String::from);
        assert_eq!(prepared(Nccl::Auto, true, &[]), (all.to_vec(), vec![], 3));
        let set = [("NCCL_NVLS_ENABLE", "1"), ("NCCL_CUMEM_ENABLE", "1")];
        let expected = (vec![all[1].clone()], vec!["NCCL_NVLS_ENABLE=1".to_owned()], 3);
        assert_eq!(prepared(Nccl::Auto, true, &set), expected);
        let set = [("NCCL_P2P_DISABLE", "1"), ("NCCL_CUMEM_ENABLE", "0")];
        assert_eq!(prepared(Nccl::Auto, true, &set).1, Vec::<String>::new());
        assert_eq!(prepared(Nccl::Off, true, &[]), (vec![], vec![], 0));
        assert_eq!(prepared(Nccl::NoPeer, true, &[]).0[0], "NCCL_P2P_DISABLE=1");
        assert_eq!(prepared(Nccl::Auto, false, &[]), prepared(Nccl::NoPeer, true, &[]));
    }
}
