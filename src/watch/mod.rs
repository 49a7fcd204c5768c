//! What is wrong with a job that has not ended, and who ended one that has.
//!
//! - [`witness`]: who killed it: the kernel for want of memory, or a GPU that failed;
//! - [`kmsg`] and [`xid`]: how the kernel and the driver say so.
//!
//! Nothing here changes the job or decides anything; the supervisor does.

pub mod kmsg;
pub mod witness;
pub mod xid;
