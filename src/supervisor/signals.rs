//! The signals that the supervisor receives, and their meaning.

use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use signal_hook::consts as sig;
use signal_hook::iterator::{Handle, Signals};

use super::Message;
use rekindle_os::inherited;

/// Signals that are for us.
const OURS: [i32; 5] = [sig::SIGTERM, sig::SIGINT, sig::SIGHUP, sig::SIGUSR1, sig::SIGUSR2];
/// Signals that request a stop.
pub(super) const STOPS: [i32; 4] = [sig::SIGTERM, sig::SIGINT, sig::SIGHUP, sig::SIGUSR2];
/// Signals that end the waiting at the end of a run. USR1 and USR2 ask for an image, and there is no job any more.
pub(super) const HURRY: [i32; 3] = [sig::SIGTERM, sig::SIGINT, sig::SIGHUP];
/// Signals that are passed on to the job.
const FORWARDED: [i32; 3] = [sig::SIGQUIT, sig::SIGCONT, sig::SIGWINCH];

/// Signals that stay ignored if the caller ignored them: with `nohup`, closing the terminal ends nothing.
const MAY_BE_IGNORED: [i32; 3] = [sig::SIGHUP, sig::SIGINT, sig::SIGQUIT];

/// Whether the caller lets us have this signal.
pub(super) fn is_wanted(signal: i32) -> bool {
    !(MAY_BE_IGNORED.contains(&signal) && inherited::is_ignored(signal))
}

/// Turns signals into messages, on a separate thread.
pub(super) fn listen(sender: mpsc::Sender<Message>) -> io::Result<Handle> {
    let wanted = OURS.iter().chain(&FORWARDED).filter(|signal| is_wanted(**signal));
    let mut signals = Signals::new(wanted)?;
    let handle = signals.handle();
    let mut run = move || signals.forever().try_for_each(|signal| sender.send(Message::Signal(signal, Instant::now())));
    std::thread::Builder::new().name("signals".into()).spawn(move || drop(run()))?;
    Ok(handle)
}

/// The end of the run is known; its record, hooks and the remaining output are left. A user who does not want to wait for
/// them sends a signal: it sets the flag that is returned, until [`let_end_us`].
pub(super) fn hurry_up() -> Arc<AtomicBool> {
    let hurried = Arc::default();
    for signal in HURRY.iter().filter(|signal| !inherited::is_ignored(**signal)) {
        if let Err(error) = signal_hook::flag::register(*signal, Arc::clone(&hurried)) {
            tracing::debug!("signal {signal} does not end the waiting: {error}");
        }
    }
    hurried
}

/// From now on a signal that ends the waiting ends us.
pub(super) fn let_end_us() {
    inherited::let_end_us(&HURRY);
}
