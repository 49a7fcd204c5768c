//! The environment variables that rekindle sets for others: the job, hooks, CRIU and what works inside them.
//!
//! Each of these may run `rekindle` itself, so that none of them is the variable of a configuration key.

use rekindle_abi::variables as helpers;

/// For the job and for hooks: the name of the job.
pub(crate) const JOB: &str = "REKINDLE_JOB";
/// For the job: the run that it belongs to.
pub(crate) const RUN_ID: &str = "REKINDLE_RUN_ID";
/// For the job: the socket for its requests.
pub(crate) const SOCKET: &str = "REKINDLE_SOCKET";
/// For hooks: what has happened.
pub(crate) const HOOK: &str = "REKINDLE_HOOK";
/// For hooks: the job's folder in the store.
pub(crate) const FOLDER: &str = "REKINDLE_FOLDER";
/// For the job of a group: the number of machines.
pub(crate) const GROUP_SIZE: &str = "REKINDLE_GROUP_SIZE";
/// For the job of a group: the number of this machine.
pub(crate) const GROUP_RANK: &str = "REKINDLE_GROUP_RANK";
/// For the job of a group: the address of this machine in the group's network.
pub(crate) const GROUP_OWN: &str = "REKINDLE_GROUP_OWN";
/// For the job of a group: the address of rank 0 in the group's network.
pub(crate) const GROUP_FIRST: &str = "REKINDLE_GROUP_FIRST";

/// Those that a job gets, which the configuration cannot set for it.
pub(crate) const OF_JOB: [&str; 7] = [JOB, RUN_ID, SOCKET, GROUP_SIZE, GROUP_RANK, GROUP_OWN, GROUP_FIRST];

/// The others.
pub(crate) const OF_OTHERS: [&str; 7] = [
    HOOK,
    FOLDER,
    helpers::LANDING,
    helpers::COPY_THREADS,
    helpers::KEEP_MEMORY,
    helpers::text(helpers::DEVICES),
    helpers::text(helpers::FILES_AS),
];
