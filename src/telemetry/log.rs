//! Our own log: lines on standard error, for people or, in JSON, for programs.

mod json;

use std::error::Error;
use std::io::IsTerminal;
use std::sync::OnceLock;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::time::ChronoLocal;

use crate::config::{Level, LogFormat};

/// The job that lines in JSON are about, once it is known.
static JOB: OnceLock<String> = OnceLock::new();
static FORMAT: OnceLock<LogFormat> = OnceLock::new();

/// From now on the log is about this job.
pub fn is_about(job: &str) {
    // One process has one job.
    let _ = JOB.set(job.to_owned());
}

/// Whether the log is there, and a line of it is JSON: then nothing else belongs on standard error.
#[must_use]
pub fn is_json() -> bool {
    FORMAT.get() == Some(&LogFormat::Json)
}

/// Crates whose messages are never shown.
const SILENT: [&str; 6] = ["object_store", "reqwest", "hyper", "hyper_util", "h2", "rustls"];

/// Starts logging. RUST_LOG, where it is set, decides in place of the configuration.
pub fn start(level: Level, format: LogFormat) {
    let default = match level {
        Level::Error => "error",
        Level::Warn => "warn",
        Level::Info => "info",
        Level::Debug => "rekindle=debug,info",
        Level::Trace => "rekindle=trace,info",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    // What the clients of object stores say quotes requests, and those hold signatures and tokens.
    let quiet = SILENT.iter().filter_map(|target| format!("{target}=off").parse().ok());
    let filter = quiet.fold(filter, EnvFilter::add_directive);
    let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let logger = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(colours)
        .with_target(false)
        // It would tell of a line that can not be written by eprintln, which panics when standard error is what failed
        // (a closed pipe, a full disk), and the job would die of it.
        .log_internal_errors(false)
        .with_timer(ChronoLocal::new("%Y-%m-%d %H:%M:%S%.3f".into()));
    // A second start in one process (tests) keeps the first.
    let started = match format {
        LogFormat::Text => logger.try_init(),
        LogFormat::Json => logger.with_ansi(false).event_format(json::Lines).try_init(),
    };
    if started.is_ok() {
        let _ = FORMAT.set(format);
    }
}

/// An error with all its causes on one line; a cause that its parent quotes already is left out.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}
