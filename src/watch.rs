//! Finds out whether a running job hangs, and why a job ended.
//!
//! - [`hang_detector`]: the thread that notices a hang, with [`clock`]s that are stopped during snapshots; [`beats`] are the
//!   job's watchdog messages, [`stacks`] records the stacks of its processes;
//! - [`deaths`]: the thread that notices when a process of the job dies;
//! - [`lines`]: compares new output with the rules;
//! - [`gpu`]: whether GPUs work for the job, and their faults while it runs;
//! - [`quiet`]: waits until the dead are off the GPUs;
//! - [`interruption`]: what clouds announce about the machine;
//! - [`witness`]: finds out what killed it: the kernel for lack of memory, or a GPU that failed;
//! - [`kin`]: whether a process that the kernel names is the job's;
//! - [`kmsg`] and [`xid`](rekindle_base::xid): messages of the kernel and the driver about this.
//!
//! Nothing here changes the job or decides anything; the supervisor does.

pub(crate) mod beats;
pub(crate) mod clock;
pub(crate) mod deaths;
pub(crate) mod gpu;
pub(crate) mod hang_detector;
pub(crate) mod interruption;
pub(crate) mod kin;
pub(crate) mod kmsg;
pub(crate) mod lines;
pub(crate) mod quiet;
pub(crate) mod stacks;
pub(crate) mod witness;
