//! Keeps long GPU jobs alive: starts a job, takes snapshots at an interval, and restores it from the newest good image
//! when it dies. The job is not changed and does not notice.
//!
//! This crate is the product around the crates below it (ARCHITECTURE.md has the picture): [`rekindle_engine`] launches,
//! freezes and restores one job, [`rekindle_store`] keeps its images, [`rekindle_replica`] copies them to another place.
//!
//! - [`cli`]: what was typed, turned into calls of the modules below; tables, JSON and exit codes.
//! - `config`: TOML, typed and then validated; touches nothing. What it means for each part is in its `options`.
//! - `policy`: why did it end, is it worth another try, from which image.
//! - [`supervisor`]: the one owner of the state; a pure `step` function and the loop that carries out its actions.
//! - [`published`]: what others see of a running job.
//! - [`control`]: the socket on which others ask the supervisor for something; its protocol, both ends.
//! - `scheduler`: the batch system that started us: what it calls the job, when its time is over, how it is queued
//!   again.
//! - `watch`: whether a running job has a problem, who ended a job, and whether a cloud interrupts the machine.
//! - [`job_api`]: the job's own socket, on which it asks for something, or learns that it was restored.
//! - `notifications`: the hooks that are told what happens.
//! - [`group`]: a job over several machines: the connection to the coordinator.
//! - `doctor`: what `run` needs of the machine: found, judged, each with a fix.
//! - [`telemetry`]: logs for people, the journal of a job's events, metrics.
//! - [`report`]: what a job's time went to, from that journal: a page, a document.

pub mod cli;
mod config;
pub mod control;
mod doctor;
pub mod group;
pub mod job_api;
#[cfg(test)]
mod layers;
mod notifications;
mod policy;
pub mod published;
pub mod report;
mod scheduler;
pub mod supervisor;
pub mod telemetry;
mod variables;
mod watch;
