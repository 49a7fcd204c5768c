//! Linux behind safe functions: processes, namespaces, ptrace, pidfds, durable files, direct I/O.
//!
//! A file that needs `unsafe` says so at its top, and each block says why it is sound.

pub mod affinity;
pub mod attributes;
pub mod beneath;
pub mod blocks;
pub mod cgroup;
pub mod clock;
pub mod datagrams;
pub mod descriptor_table;
pub mod descriptors;
pub mod detach;
pub mod direct;
pub mod durable;
pub mod elf;
pub mod exits;
pub mod fence;
pub mod identity;
pub mod inherited;
pub mod leases;
pub mod links;
pub mod maps;
pub mod mounts;
pub mod netns;
pub mod pages;
pub mod parallel;
pub mod point;
pub mod process;
pub mod ptrace;
pub mod regular;
pub mod rights;
pub mod same;
pub mod scheduling;
pub mod shielded;
pub mod sock_diag;
pub mod sockopt;
pub mod sparse;
pub mod spawn;
pub mod stopped;
pub mod tcp_repair;
pub mod terminal;
pub mod timerfd;
pub mod ulp;
pub mod unix_diag;
pub mod view;
pub mod xattr;
