//! A progress bar for long operations, only on a terminal. It is drawn on standard error, so that standard output stays
//! clean.

use std::io::{IsTerminal, stderr};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::telemetry::clean;
use rekindle_store::persist::Progress;

/// How often it is drawn.
const TICK: Duration = Duration::from_millis(100);
const PLAIN: &str = "{msg} [{bar:30}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}, {eta} remaining";
const COLOURED: &str =
    "{msg} [{bar:30.cyan/blue}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}, {eta} remaining";

/// Does `work` and shows a progress bar for it; `work` updates the progress that it is given. The bar is removed when
/// this returns.
pub(crate) fn shown<R>(what: &str, work: impl FnOnce(&Progress) -> R) -> R {
    let progress = Progress::default();
    if !stderr().is_terminal() {
        return work(&progress);
    }
    thread::scope(|scope| {
        let (done, is_done) = channel::<()>();
        let draw = || {
            let is_done = is_done;
            let bar = bar(what);
            // Nothing is sent: the sender is dropped when the work is done or has panicked.
            while is_done.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                let (bytes, total) = progress.bytes();
                bar.set_length(total);
                bar.set_position(bytes);
            }
            bar.finish_and_clear();
        };
        // Without a thread there is no bar, but the work is still done.
        let _drawing = thread::Builder::new().name("progress".into()).spawn_scoped(scope, draw);
        let result = work(&progress);
        drop(done);
        result
    })
}

/// Does `work` and shows a spinner with the elapsed time. It is removed when this returns.
pub(crate) fn waited<R>(what: &str, work: impl FnOnce() -> R) -> R {
    told(what, |_| work())
}

/// The same for work that reports its progress as text.
pub(crate) fn told<R>(what: &str, work: impl FnOnce(&dyn Fn(String)) -> R) -> R {
    if !stderr().is_terminal() {
        return work(&drop);
    }
    let spinner = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{msg} {elapsed}").unwrap_or_else(|_| ProgressStyle::default_spinner());
    spinner.set_style(style);
    spinner.set_message(clean::line(what).into_owned());
    spinner.enable_steady_tick(TICK);
    let result = work(&|message| spinner.set_message(clean::line(&message).into_owned()));
    spinner.finish_and_clear();
    result
}

fn bar(what: &str) -> ProgressBar {
    let template = if std::env::var_os("NO_COLOR").is_none_or(|set| set.is_empty()) { COLOURED } else { PLAIN };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
    bar.with_style(style.progress_chars("=> ")).with_message(clean::line(what).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_the_bar_are_understood() {
        for template in [PLAIN, COLOURED] {
            ProgressStyle::with_template(template).unwrap();
        }
    }

    #[test]
    fn what_the_work_answers_is_answered() {
        assert_eq!(shown("x", |progress| progress.bytes()), (0, 0));
    }
}
