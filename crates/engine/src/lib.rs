//! One job: launched, frozen into an image, restored from one.
//!
//! - [`launch`]: the job's world: namespaces, init, reaper, interposer, user, limits, output.
//! - `guard`: what a process of the job may be and have: asked before a snapshot, compared before a restored job runs.
//! - [`snapshot`]: freezes and captures: an ordered list of phases with an undo each.
//! - [`restore`]: puts files back and makes processes of an image.
//!
//! It decides nothing: when to take a snapshot, and what to do after a job has ended, is its caller's.

mod guard;
pub mod launch;
pub mod restore;
pub mod snapshot;

#[cfg(test)]
mod samples;
