//! What was typed, turned into calls of the library; tables, JSON and exit codes.

pub mod config;
pub mod exit;
pub mod output;

use std::process::ExitCode;

pub use exit::Exit;

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    Exit::Success.into()
}
