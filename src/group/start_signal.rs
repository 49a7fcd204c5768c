//! What a restored job waits for before it runs: that the jobs of the other machines are ready too.

use std::sync::mpsc;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// How often to look whether the wait is over for another reason.
const NAP: Duration = Duration::from_millis(20);

/// The end of the thread that restores the job.
pub struct StartSignal {
    go: Mutex<mpsc::Receiver<()>>,
    /// Reports that the job is ready.
    ready: Box<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for StartSignal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StartSignal")
    }
}

impl StartSignal {
    /// A signal, and the end that gives it. The job does not run if that end is dropped first.
    pub fn new(ready: impl Fn() + Send + Sync + 'static) -> (StartSignal, mpsc::Sender<()>) {
        let (sender, go) = mpsc::channel();
        (StartSignal { go: Mutex::new(go), ready: Box::new(ready) }, sender)
    }

    /// Returns whether the job may run; false if `is_over` said so before.
    pub fn wait(&self, is_over: &dyn Fn() -> bool) -> bool {
        (self.ready)();
        let go = self.go.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match go.recv_timeout(NAP) {
                Ok(()) => return true,
                Err(mpsc::RecvTimeoutError::Timeout) if !is_over() => {}
                Err(_) => return false,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn it_is_given_once_and_only_by_the_order() {
        static READY: AtomicU32 = AtomicU32::new(0);
        let ready = || {
            READY.fetch_add(1, Ordering::SeqCst);
        };
        let signal = || StartSignal::new(ready);
        let (awaited, go) = signal();
        assert!(!awaited.wait(&|| true));
        go.send(()).unwrap();
        assert!(awaited.wait(&|| false));
        let (awaited, go) = signal();
        drop(go);
        assert!(!awaited.wait(&|| false), "the supervisor ends");
        assert_eq!(READY.load(Ordering::SeqCst), 3);
    }
}
