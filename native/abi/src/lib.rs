//! Shared definitions of the supervisor and the programs that run inside a job or inside CRIU: plain layouts and names.
//! And what those programs share among themselves ([`runtime`]).
#![no_std]

pub mod init;
pub mod nccl;
pub mod runtime;
pub mod sharing;
pub mod variables;
