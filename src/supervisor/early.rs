//! Signals while no loop receives them: before the job is started, and while Slurm queues it again.
//!
//! Before the loop a run can wait for minutes: for the store's lock, for an image from the replica, for the other machines
//! of a group. By default a signal ends a process at once. Then Slurm's USR2 does not queue the job again, the lock names
//! a process that is gone, and process 1 of a container does not even get the signal: the kernel drops it. So a thread
//! takes the signals, removes the work folder, gives the lock back, and ends the process with the exit code that belongs to the signal. Nothing
//! else is undone: whatever the process was doing, it may be killed at any time.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use signal_hook::consts as sig;
use signal_hook::iterator::{Handle, Signals};
use signal_hook::low_level;

use super::signals::{HURRY, STOPS, is_wanted};
use crate::config::Requeue;
use crate::scheduler::{QUEUE_AGAIN, Scheduler};
use crate::telemetry::log;
use rekindle_base::chain;
use rekindle_engine::launch::work::WorkFolder;
use rekindle_os::spawn::Ended;
use rekindle_store::ReleaseAtExit;

/// The thread, which ends the process.
#[derive(Debug)]
pub(crate) struct Early {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
    duties: Arc<Mutex<Duties>>,
}

/// What is done before the process ends.
#[derive(Debug)]
struct Duties {
    /// What is said about the signal.
    text: Option<&'static str>,
    /// The lock that is given back.
    lock: Option<ReleaseAtExit>,
    /// The work folder that is removed.
    work: Option<Arc<WorkFolder>>,
    /// How the job is queued again.
    scheduler: Scheduler,
    request: Request,
}

/// Who asks Slurm to queue the job again after USR2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Request {
    /// Nobody: the exit code does it.
    Nobody,
    /// This process.
    Ours,
    /// Another machine of the group, once all have stored their parts. The request ends them, so it cannot be ours.
    OfTheGroup,
}

impl Early {
    /// Takes the signals that request a stop, until the loop takes them. USR1 does nothing: there is no job yet.
    ///
    /// # Errors
    /// When the kernel refuses a handler or a thread.
    pub(crate) fn before_the_loop(scheduler: Scheduler) -> io::Result<Early> {
        let signals: Vec<i32> = STOPS.into_iter().chain([sig::SIGUSR1]).collect();
        Early::start(
            &signals,
            Duties {
                text: Some("before the job was started: this run ends"),
                lock: None,
                work: None,
                scheduler,
                request: Request::Nobody,
            },
        )
    }

    /// Takes the signals that end the waiting at the end of a run, until the process ends.
    ///
    /// # Errors
    /// When the kernel refuses a handler or a thread.
    pub(super) fn after_the_loop(
        lock: ReleaseAtExit,
        work: Arc<WorkFolder>,
        scheduler: Scheduler,
    ) -> io::Result<Early> {
        let (text, lock, work, request) = (None, Some(lock), Some(work), Request::Nobody);
        Early::start(&HURRY, Duties { text, lock, work, scheduler, request })
    }

    fn start(wanted: &[i32], duties: Duties) -> io::Result<Early> {
        let mut signals = Signals::new(wanted.iter().filter(|signal| is_wanted(**signal)))?;
        let (handle, duties) = (signals.handle(), Arc::new(Mutex::new(duties)));
        let ours = Arc::clone(&duties);
        let receive = move |signal| match signal {
            sig::SIGUSR1 => say("received SIGUSR1, which has no effect: the job does not run yet"),
            signal => locked(&ours).end(signal),
        };
        let run = move || {
            signals.forever().for_each(&receive);
            // Those that came just before the end of that.
            signals.pending().for_each(receive);
        };
        let thread = std::thread::Builder::new().name("early".into()).spawn(run)?;
        Ok(Early { handle, thread: Some(thread), duties })
    }

    /// The configuration is known: how USR2 has a job of this machine queued again.
    pub(crate) fn queues_again(&self, scheduler: Scheduler, requeue: Requeue) {
        let request = if requeue == Requeue::Scontrol { Request::Ours } else { Request::Nobody };
        let mut duties = locked(&self.duties);
        (duties.scheduler, duties.request) = (scheduler, request);
    }

    /// The same for a job of several machines.
    pub(crate) fn group_queues_again(&self, scheduler: Scheduler, requeue: Requeue) {
        let request = if requeue == Requeue::Scontrol { Request::OfTheGroup } else { Request::Nobody };
        let mut duties = locked(&self.duties);
        (duties.scheduler, duties.request) = (scheduler, request);
    }

    /// From now on this lock is given back.
    pub(crate) fn gives_back(&self, lock: ReleaseAtExit) {
        locked(&self.duties).lock = Some(lock);
    }

    /// From now on this work folder is removed.
    pub(crate) fn removes(&self, work: Arc<WorkFolder>) {
        locked(&self.duties).work = Some(work);
    }
}

/// The loop has the signals now, or this process is about to end.
impl Drop for Early {
    fn drop(&mut self) {
        self.handle.close();
        self.thread.take().map(JoinHandle::join);
    }
}

fn locked(duties: &Mutex<Duties>) -> MutexGuard<'_, Duties> {
    duties.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Duties {
    fn end(&mut self, signal: i32) -> ! {
        if let Some(text) = self.text {
            let name = Ended::Signal(signal).to_string();
            say(&format!("received {} {text}", name.trim_start_matches("signal ")));
        }
        match self.request {
            Request::Ours if signal == sig::SIGUSR2 => {
                if let Err(error) = self.scheduler.requeue() {
                    say(&format!("the job is not queued again: {}", chain(&error)));
                }
            }
            Request::OfTheGroup if signal == sig::SIGUSR2 => say(
                "another machine of the group asks Slurm to queue the job again. If none has a supervisor yet, use \
                `scontrol requeue`",
            ),
            _ => {}
        }
        self.work.iter().for_each(|work| work.remove());
        self.lock.iter().for_each(ReleaseAtExit::release);
        log::flush();
        low_level::exit(match signal {
            sig::SIGUSR2 => QUEUE_AGAIN.into(),
            signal => 128 + signal,
        })
    }
}

/// Logs it, but does not wait long for a reader who is stuck: this process may be about to end.
fn say(text: &str) {
    tracing::info!("{text}");
    log::flush();
}
