//! The `rekindle` command.
use std::process::ExitCode;

fn main() -> ExitCode {
    rekindle::cli::main()
}
