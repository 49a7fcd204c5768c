//! Shared definitions of the supervisor and the programs that run inside a job or inside CRIU. Plain layouts and names;
//! no code.
#![no_std]

pub mod init;
pub mod nccl;
pub mod sharing;
pub mod variables;
