//! What was typed, turned into calls of the library; tables, JSON and exit codes.

mod cuda;
pub mod exit;
pub mod output;

use std::process::ExitCode;

use clap::Parser;

pub use exit::Exit;
use output::Format;

/// Keeps long GPU jobs alive: snapshots on an interval, automatic restart from the newest good one
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    /// Print JSON instead of text
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Lock, checkpoint, restore and unlock a CUDA process by hand (driver 570 or newer)
    #[command(subcommand)]
    Cuda(cuda::CudaCommand),
}

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let format = if cli.json { Format::Json } else { Format::Text };
    let done = match &cli.command {
        Command::Cuda(command) => cuda::run(command, format),
    };
    match done {
        Ok(exit) => exit.into(),
        Err(error) => {
            eprintln!("rekindle: {error:#}");
            Exit::Internal.into()
        }
    }
}
