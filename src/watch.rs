//! What is wrong with a job that has not ended, and who ended one that has.
//!
//! - [`detector`]: the thread that notices a hang, by [`clock`]s that stand still in snapshots; [`beats`] is the job's own sign of
//!   life, [`stacks`] what its processes are at then;
//! - [`lines`]: the output as it comes, held against the rules;
//! - [`gpu`]: whether GPUs work for the job, and their faults while it runs;
//! - [`witness`]: who killed it: the kernel for want of memory, or a GPU that failed;
//! - [`kmsg`] and [`xid`](rekindle_base::xid): how the kernel and the driver say so.
//!
//! Nothing here changes the job or decides anything; the supervisor does.

pub(crate) mod beats;
pub(crate) mod clock;
pub(crate) mod gpu;
pub(crate) mod hang_detector;
pub(crate) mod kmsg;
pub(crate) mod lines;
pub(crate) mod stacks;
pub(crate) mod witness;
