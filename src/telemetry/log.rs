//! Our own log: lines on standard error, for people or, in JSON, for programs.

mod json;

use std::fmt;
use std::io::IsTerminal;
use std::sync::OnceLock;

use tracing::field::Field;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt as _;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{Writer, debug_fn};
use tracing_subscriber::fmt::time::ChronoLocal;

use super::clean;
use crate::config::{Level, LogFormat};
use rekindle_base::without_numbers;

/// The job that lines in JSON are about, once it is known.
static JOB: OnceLock<String> = OnceLock::new();
static FORMAT: OnceLock<LogFormat> = OnceLock::new();
static PLAIN: OnceLock<()> = OnceLock::new();

/// The log goes to a file, even if standard error is a terminal now. Call it before [`start`].
pub(crate) fn without_colours() {
    let _ = PLAIN.set(());
}

/// From now on the log is about this job.
pub(crate) fn is_about(job: &str) {
    // One process has one job.
    let _ = JOB.set(job.to_owned());
}

/// Whether logging has started with JSON lines: then nothing else may be written to standard error.
#[must_use]
pub(crate) fn is_json() -> bool {
    FORMAT.get() == Some(&LogFormat::Json)
}

/// Crates whose messages are never shown.
const SILENT: [&str; 6] = ["object_store", "reqwest", "hyper", "hyper_util", "h2", "rustls"];

/// Logs what is done at each snapshot, or whenever all is well: shown from the level `info` on, and not with `notice`.
#[macro_export]
macro_rules! routine {
    ($($message:tt)*) => { ::tracing::info!(target: "rekindle::routine", $($message)*) };
}

/// Starts logging. RUST_LOG overrides the configuration, if set.
pub(crate) fn start(level: Level, format: LogFormat) {
    let default = match level {
        Level::Error => "error",
        Level::Warn => "warn",
        Level::Notice => "info,rekindle::routine=warn",
        Level::Info => "info",
        Level::Debug => "rekindle=debug,info",
        Level::Trace => "rekindle=trace,info",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    // Messages of the clients of object stores quote requests, which contain signatures and tokens.
    let quiet = SILENT.iter().filter_map(|target| format!("{target}=off").parse().ok());
    let filter = quiet.fold(filter, EnvFilter::add_directive);
    let may_colour = PLAIN.get().is_none() && std::env::var_os("NO_COLOR").is_none();
    let colours = may_colour && std::io::stderr().is_terminal();
    let logger = tracing_subscriber::fmt()
        .fmt_fields(fields())
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(colours)
        .with_target(false)
        // Otherwise a line that cannot be written would be reported with eprintln, which panics if standard error has
        // failed (a closed pipe, a full disk), and the job would die of it.
        .log_internal_errors(false)
        .with_timer(ChronoLocal::new("%Y-%m-%d %H:%M:%S%.3f%:z".into()));
    // A second start in the same process (in tests) keeps the first.
    let started = match format {
        LogFormat::Text => logger.try_init(),
        LogFormat::Json => logger.with_ansi(false).event_format(json::Lines).try_init(),
    };
    if started.is_ok() {
        let _ = FORMAT.set(format);
    }
}

/// Fields for people: a message may quote text that a job has chosen, and must stay one line.
fn fields() -> impl for<'a> FormatFields<'a> {
    let write = |writer: &mut Writer<'_>, field: &Field, value: &dyn fmt::Debug| {
        let text = format!("{value:?}");
        match field.name() {
            "message" => writer.write_str(&clean::line(&without_numbers(&text))),
            name => write!(writer, "{name}={}", clean::line(&text)),
        }
    };
    debug_fn(write).delimited(" ")
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Output(Arc<Mutex<Vec<u8>>>);

    impl Write for Output {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_message_is_one_line_that_a_terminal_does_not_obey() {
        let out = Output::default();
        let writer = out.clone();
        let logger = tracing_subscriber::fmt().fmt_fields(fields()).with_writer(move || writer.clone());
        tracing::subscriber::with_default(logger.with_ansi(false).without_time().with_target(false).finish(), || {
            let name = "x\u{1b}]0;pwned\u{7}\n INFO all is well\u{9b}2J\u{202e}";
            tracing::warn!(image = 7, why = name, "process {name} ended");
        });
        let text = String::from_utf8(out.0.lock().unwrap().clone()).unwrap();
        let name = "x\\x1b]0;pwned\\x07\\x0a INFO all is well\\u{9b}2J\\u{202e}";
        assert!(text.starts_with(&format!(" WARN process {name} ended image=7 why=")), "{text}");
        assert!(text.lines().count() == 1 && !text.contains('\u{1b}'), "{text}");
    }
}
