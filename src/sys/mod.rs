//! The only code with `unsafe`: what the kernel, the CUDA driver and CRIU offer, behind safe doors.
#![allow(unsafe_code, reason = "this module is where it is allowed; every block says why it is sound")]

pub mod blocks;
pub mod cgroup;
pub mod clock;
pub mod criu;
pub mod cuda;
pub mod direct;
pub mod durable;
pub mod elf;
pub mod identity;
pub mod inherited;
pub mod leases;
pub mod netns;
pub mod nvml;
pub mod pages;
pub mod parallel;
pub(crate) mod point;
pub mod process;
pub mod ptrace;
pub mod repair;
pub mod rights;
pub mod sharing;
pub mod sock_diag;
pub mod sparse;
pub mod spawn;
pub mod view;
