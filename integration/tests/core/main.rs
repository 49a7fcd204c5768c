//! `rekindle run` and the commands around it: real processes, real CRIU, real kill -9, no GPU.
//!
//! Needs root and REKINDLE_CRIU; what is missing is a SKIP, or a failure where REKINDLE_TEST_REQUIRE names it
//! (`root,criu,python`). Each test has a folder, a store and processes of its own, and leaves none of them.

#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is the report")]

#[path = "../support/devices.rs"]
mod devices_here;
#[path = "../support/supervisor.rs"]
mod supervisor;

mod clean;
mod commands;
mod comparison;
mod compat;
mod completions;
mod configured;
mod contents;
mod control;
mod criu_death;
mod damage;
mod databases;
mod dead;
mod deadline;
mod devices;
mod environment;
mod events;
mod forks;
mod full;
mod groups;
mod habit;
mod hooks;
mod hostile_store;
mod interruption;
mod interval;
mod job_api;
mod kinds;
mod ladder;
mod launch;
mod lock;
mod memory;
mod memory_group;
mod metrics;
mod mistakes;
mod notify;
mod output;
mod packed;
mod page;
mod passing;
mod paths;
mod proven;
mod refused;
mod rehearse;
mod repair;
mod requeue;
mod rot;
mod settings;
mod stacks;
mod stop;
mod store_sweep;
mod sweep;
mod threads;
mod trees;
mod uplink;
mod user;
mod watch;
