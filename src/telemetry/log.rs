//! Our own log: lines on standard error, for people or, in JSON, for programs.
//!
//! A thread writes them ([`queue`]), so that a reader who does not read blocks nobody who logs. [`flush`] waits for it:
//! before the process ends, and before standard error becomes another file.

mod json;
mod queue;

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;
use std::time::Duration;

use tracing::field::Field;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt as _;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{Writer, debug_fn};
use tracing_subscriber::fmt::time::ChronoLocal;

use super::clean;
use crate::config::{Level, LogFormat};
use queue::Queue;
use rekindle_base::without_numbers;

/// The job that lines in JSON are about, once it is known.
static JOB: OnceLock<String> = OnceLock::new();
static FORMAT: OnceLock<LogFormat> = OnceLock::new();
static PLAIN: OnceLock<()> = OnceLock::new();
static QUEUE: Queue = Queue::new();
/// Whether the thread that writes the queue runs.
static IS_WRITTEN: OnceLock<bool> = OnceLock::new();

/// How long the process waits for the last lines: nobody may read our standard error.
const FLUSH: Duration = Duration::from_secs(1);

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

/// Waits until the lines so far are written: for a second at most if nobody reads them.
pub(crate) fn flush() {
    if IS_WRITTEN.get() == Some(&true) {
        QUEUE.flush(FLUSH, queue::is_room);
    }
}

/// Writes a whole line to standard error, after the lines of the log so far.
pub(crate) fn print(line: &str) {
    // There is nobody to tell that standard error does not work.
    let _ = Lines.write_all(line.as_bytes());
}

/// Where lines are written: by the thread, once logging has started.
struct Lines;

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match IS_WRITTEN.get() {
            Some(true) => QUEUE.push(line),
            _ => queue::write_out(line),
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Starts the thread that writes. Without it those who log write themselves.
fn start_writing() -> bool {
    let tell = |dropped: u64| {
        tracing::warn!("{dropped} lines of this log were dropped here, because nobody read standard error");
    };
    std::thread::Builder::new().name("log".into()).spawn(move || QUEUE.work(queue::write_out, tell)).is_ok()
}

/// Starts logging. The configuration alone says what is logged: RUST_LOG is set for the libraries of the job.
pub(crate) fn start(level: Level, format: LogFormat) {
    let default = match level {
        Level::Error => "error",
        Level::Warn => "warn",
        Level::Notice => "info,rekindle::routine=warn",
        Level::Info => "info",
        Level::Debug => "rekindle=debug,info",
        Level::Trace => "rekindle=trace,info",
    };
    let filter = EnvFilter::new(default);
    // Messages of the clients of object stores quote requests, which contain signatures and tokens.
    let quiet = SILENT.iter().filter_map(|target| format!("{target}=off").parse().ok());
    let filter = quiet.fold(filter, EnvFilter::add_directive);
    let may_colour = PLAIN.get().is_none() && std::env::var_os("NO_COLOR").is_none();
    let colours = may_colour && io::stderr().is_terminal();
    IS_WRITTEN.get_or_init(start_writing);
    let logger = tracing_subscriber::fmt()
        .fmt_fields(fields())
        .with_env_filter(filter)
        .with_writer(|| Lines)
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
