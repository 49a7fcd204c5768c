//! hwloc's environment variable in the job's environment, so that it does not open GPUs that nobody wants to use.
//!
//! Open MPI looks at the machine with hwloc, in each rank and in its daemon (`orted`). hwloc's plugin `hwloc_opencl.so`
//! asks NVIDIA's OpenCL for its devices, which opens them and never closes them. Measured with Open MPI 4.1.6 and
//! mpi4py on an H200: /dev/nvidiactl, twice /dev/nvidia-uvm and four times /dev/nvidia0 in each process.
//! `HWLOC_COMPONENTS=-opencl` prevents it; `-gl`, `-nvml`, `-cuda` and the variables of Open MPI and UCX do not.
//! [`crate::parts::devices`] judges the devices that are open in spite of this.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};

/// hwloc's variable for the components that it may use, separated by commas. `-NAME` at any place excludes one, and
/// `stop` excludes all that are not named before it (hwloc 2.9, `hwloc_disc_components_enable_others`).
pub(crate) const VARIABLE: &str = "HWLOC_COMPONENTS";
/// What keeps it from asking OpenCL.
pub(crate) const WITHOUT_OPENCL: &str = "-opencl";

/// Adds the variable to `environment`, unless it is set there. Returns the user's value if that lets hwloc ask OpenCL.
pub fn prepare(environment: &mut BTreeMap<OsString, OsString>) -> Option<String> {
    match environment.get(OsStr::new(VARIABLE)) {
        None => {
            environment.insert(VARIABLE.into(), WITHOUT_OPENCL.into());
            None
        }
        Some(set) => Some(set.to_string_lossy().into_owned()).filter(|set| asks_opencl(set)),
    }
}

/// Logs what the user's value means.
pub fn tell(set: Option<&str>) {
    if let Some(set) = set {
        tracing::info!(
            "{VARIABLE}={set} is set and does not exclude OpenCL: hwloc (Open MPI) may open the GPUs in each process; add \
             {WITHOUT_OPENCL} to it if snapshots are refused for that"
        );
    }
}

/// Whether hwloc asks OpenCL with this value.
fn asks_opencl(value: &str) -> bool {
    let mut names = value.split(',');
    if names.clone().any(|name| name == WITHOUT_OPENCL) {
        return false;
    }
    names.find(|name| ["opencl", "stop"].contains(name)) != Some("stop")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prepared(set: Option<&str>) -> (Option<String>, Option<OsString>) {
        let mut environment = set.iter().map(|value| (VARIABLE.into(), value.into())).collect();
        let told = prepare(&mut environment);
        (told, environment.remove(OsStr::new(VARIABLE)))
    }

    #[test]
    fn it_is_set_where_the_user_has_not_set_it() {
        assert_eq!(prepared(None), (None, Some("-opencl".into())));
    }

    #[test]
    fn the_users_value_stays_and_is_told_where_it_lets_opencl_in() {
        for value in ["", "-gl", "linux,opencl,stop", "-gl, -opencl"] {
            assert_eq!(prepared(Some(value)), (Some(value.into()), Some(value.into())), "{value}");
        }
        for value in ["-opencl", "-gl,-opencl", "opencl,-opencl", "linux,x86,stop", "stop,opencl"] {
            assert_eq!(prepared(Some(value)), (None, Some(value.into())), "{value}");
        }
    }
}
