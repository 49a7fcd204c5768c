//! The CUDA path and what can go wrong on it: `rekindle run` with the stand-in libcuda, real CRIU and real kill -9.
//!
//! Faults come from outside, never through hooks in the product: files that the stand-in looks at, a wrapper in CRIU's
//! place, full file systems, signals.

#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is the report")]

mod cut;
mod deaths;
mod devices;
#[path = "../support/devices.rs"]
mod devices_here;
mod gpus;
mod host;
mod init;
mod kept;
mod landing;
mod losses;
mod phases;
mod rig;
mod room;
mod same;
mod sharing;
mod slow;
mod snapshots;
#[path = "../support/standin.rs"]
#[allow(dead_code, reason = "this binary starts its jobs under rekindle")]
mod standin;
mod stops;
mod storms;
#[path = "../support/supervisor.rs"]
mod supervisor;
