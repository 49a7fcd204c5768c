//! Keeps long GPU jobs alive: launches a job, snapshots it on an interval, and brings it back from the newest good
//! image when it dies. The job is not changed and does not know.
//!
//! ```text
//!  launch ----> run ----(interval, signal)----> snapshot ----> resume
//!                |                                  |
//!                |                            store::staging: the image is whole in memory
//!              crash                                |   while the job runs:
//!                |                            store::persist: cut, hash, pack what is new, publish; rotate, gc
//!                v                                  |
//!            restart <------- newest good image <---+---> store::replica
//!                     in memory, or store::unpack'ed from the packs of the store
//! ```
//!
//! Without room in memory an image is made in the store at once. The job may have our interposer loaded (the crate in
//! `native/preload/`, embedded by build.rs and unpacked by [`launch::interposer`]): it has the CUDA driver's copy of device memory
//! land in the image, and processes let go of GPU memory that they share. CRIU loads a plugin of ours (the
//! crate in `native/plugin/`, embedded too): in a dump where the machine has NVIDIA's devices, and for a job of another user, on whose
//! files it then works with that user's rights.
//!
//! The modules in the order of that flow:
//!
//! - [`base`]: plain data and calculations that all others speak of.
//! - [`cli`]: what was typed, turned into calls of the modules below; tables, JSON and exit codes.
//! - [`config`]: TOML, typed and then validated; touches nothing.
//! - [`launch`]: the job's world: namespaces, init, reaper, interposer, user, limits, output.
//! - [`guard`]: what a process of the job may be and have: asked before a snapshot, compared before a restored job runs.
//! - [`snapshot`]: freeze and capture, an ordered list of phases with an undo each; CRIU's pages are received in memory.
//! - [`store`]: one folder a job, one image a snapshot, in memory first; chunks in packs, retention, verify, repair, replica.
//! - [`restart`]: why did it end, is it worth another try, from which image; put files back, restore.
//! - [`supervisor`]: the one owner of the state; a pure `step` function and the loop that carries out its actions.
//! - [`published`]: what others see of a running job.
//! - [`control`]: the socket on which others ask the supervisor for something; its protocol, both ends.
//! - [`scheduler`]: the batch system that started us: what it calls the job, when its time is over, how it is queued again.
//! - [`watch`]: what is wrong with a job that has not ended, and who ended one that has.
//! - [`word`]: the job's own socket, on which it asks for something, or learns that it was brought back.
//! - [`hooks`]: commands and a webhook that are told what happens.
//! - [`doctor`]: what `run` needs of the machine: found, judged, each with a fix.
//! - [`sys`]: the only code with `unsafe` of this crate: spawning into namespaces, CRIU's protocol, libcuda, GPU memory that is
//!   shared, ptrace, pages of files, durable writes.
//! - [`telemetry`]: logs for people, the journal of a job's events, metrics.
//! - [`report`]: what a job's time went to, from that journal: a page, a document.

pub mod cli;
mod config;
pub mod control;
mod doctor;
mod hooks;
#[cfg(test)]
mod layers;
mod policy;
pub mod published;
pub mod report;
mod scheduler;
pub mod supervisor;
pub mod telemetry;
mod watch;
pub mod word;
