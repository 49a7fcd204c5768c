//! Keeps long GPU jobs alive: launches a job, snapshots it on an interval, and brings it back from the newest good
//! image when it dies. The job is not changed and does not know.
//!
//! ```text
//!  launch ----> run ----(interval, signal)----> snapshot ----> resume
//!                |                                  |
//!              crash                                v
//!                |                            store: hash, fsync, publish, rotate
//!                v                                  |
//!            restart <------- newest good image <---+
//! ```
//!
//! The modules in the order of that flow:
//!
//! - [`cli`]: what was typed, turned into calls of the modules below; tables, JSON and exit codes.
//! - [`config`]: TOML, typed and then validated; touches nothing.
//! - [`launch`]: the job's world: namespaces, init, reaper, user, limits, output.
//! - [`snapshot`]: freeze and capture, an ordered list of phases with an undo each.
//! - [`store`]: one folder a job, one image a snapshot; publish, verify, rotate.
//! - [`restart`]: why did it end, is it worth another try, from which image; put files back, restore.
//! - [`supervisor`]: the one owner of the state; a pure `step` function and the loop that carries out its actions.
//! - [`doctor`]: what `run` needs of the machine: found, judged, each with a fix.
//! - [`sys`]: the only code with `unsafe`: spawning into namespaces, CRIU's protocol, libcuda, durable writes.
//! - [`telemetry`]: logs for people.

pub mod cli;
pub mod config;
pub mod doctor;
pub mod launch;
pub mod restart;
pub mod snapshot;
pub mod store;
pub mod supervisor;
pub mod sys;
pub mod telemetry;
#[cfg(test)]
mod test_gate;

pub use sys::cuda;
