//! One job: launched, frozen into an image, restored from one.
//!
//! - [`launch`]: the job's world: namespaces, init, reaper, interposer, user, limits, output.
//! - [`parts`]: what a job is made of besides its memory: each kind of thing captured and, beside that, put back.
//! - [`snapshot`]: freezes and captures: an ordered list of phases with an undo each.
//! - [`restore`]: puts files back and makes processes of an image.
//!
//! It decides nothing: when to take a snapshot, and what to do after a job has ended, is its caller's.

pub mod launch;
pub mod parts;
pub mod restore;
pub mod snapshot;

#[cfg(test)]
mod samples;
