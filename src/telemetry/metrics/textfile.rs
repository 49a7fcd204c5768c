//! The metrics as a file, for node_exporter's textfile collector.
//!
//! A separate thread replaces the file, because its file system may hang: at most once per `PAUSE`, and only after
//! changes. After the run the file remains and contains how the job ended.

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::serve::Render;
use rekindle_os::durable;

/// Pause between two writes.
const PAUSE: Duration = Duration::from_secs(5);
/// Time limit for the last write.
const LAST: Duration = Duration::from_secs(2);

/// A file that is kept up to date.
#[derive(Debug, Clone)]
pub(crate) struct Textfile(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// There are changes that are not written yet.
    news: bool,
    closing: bool,
    writing: bool,
}

impl Textfile {
    /// Writes the file for the first time after the first change.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub(crate) fn start(path: PathBuf, render: Render) -> std::io::Result<Textfile> {
        let textfile = Textfile(Arc::default());
        let shared = Arc::clone(&textfile.0);
        std::thread::Builder::new().name("textfile".into()).spawn(move || shared.work(&path, &render))?;
        Ok(textfile)
    }

    /// The metrics have changed.
    pub(crate) fn news(&self) {
        self.0.state().news = true;
        self.0.changed.notify_all();
    }

    /// Writes the last changes now, and waits a little for that.
    pub(crate) fn close(&self) {
        let until = Instant::now() + LAST;
        let mut state = self.0.state();
        (state.closing, state.news) = (true, true);
        self.0.changed.notify_all();
        while state.news || state.writing {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.0.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread; it ends with the process.
    fn work(&self, path: &std::path::Path, render: &Render) {
        let mut last: Option<Instant> = None;
        let mut complained = false;
        let mut state = self.state();
        loop {
            if !state.news {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let left = last.map_or(Duration::ZERO, |last| PAUSE.saturating_sub(last.elapsed()));
            if !left.is_zero() && !state.closing {
                state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            (state.news, state.writing) = (false, true);
            drop(state);
            // Readable by others: node_exporter does not run as root.
            let written = durable::replace_file(path, render().as_bytes(), 0o644);
            if let Err(error) = written
                && !std::mem::replace(&mut complained, true)
            {
                tracing::warn!("cannot write metrics to {}: {error}", path.display());
            }
            last = Some(Instant::now());
            state = self.state();
            state.writing = false;
            self.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn the_last_news_are_in_it_and_it_is_not_written_for_each() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.prom");
        let rendered = Arc::new(AtomicU32::new(0));
        let counter = Arc::clone(&rendered);
        let render: Render = Arc::new(move || format!("x {}\n", counter.fetch_add(1, Ordering::SeqCst) + 1));
        let textfile = Textfile::start(path.clone(), render).unwrap();
        assert!(!path.exists());
        for _ in 0..1000 {
            textfile.news();
        }
        // It waits for a moment only.
        let began = Instant::now();
        textfile.close();
        while textfile.0.state().news || textfile.0.state().writing {
            assert!(began.elapsed() < Duration::from_secs(60), "it is not written");
            std::thread::sleep(Duration::from_millis(5));
        }
        let written = rendered.load(Ordering::SeqCst);
        assert!((1..=2).contains(&written), "{written}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("x {written}\n"));
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn one_that_can_not_be_written_holds_nobody_up() {
        let textfile = Textfile::start("/proc/nowhere/x.prom".into(), Arc::new(String::new)).unwrap();
        textfile.news();
        textfile.close();
    }
}
