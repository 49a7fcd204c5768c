//! One job: launched, frozen into an image, restored from an image.
//!
//! - [`launch`]: the job's environment: namespaces, init, reaper, interposer, user, limits, output.
//! - [`parts`]: the parts of a job besides its memory; for each kind, how it is captured and how it is put back.
//! - [`snapshot`]: freezes and captures: an ordered list of phases with an undo each.
//! - [`restore`]: puts files back and creates processes from an image.
//!
//! This crate decides nothing: its caller decides when to take a snapshot, and what to do after a job has ended.

pub mod launch;
pub mod parts;
pub mod restore;
pub mod snapshot;
mod steps;

#[cfg(test)]
mod samples;
