//! What programs that run inside a job, or inside CRIU, and the supervisor agree on. Plain layouts and names; no code.
#![no_std]

pub mod sharing;
pub mod variables;
