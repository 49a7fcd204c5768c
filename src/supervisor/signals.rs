//! The signals that the supervisor receives, and their meaning.

use std::io;
use std::sync::mpsc;

use signal_hook::consts as sig;
use signal_hook::iterator::{Handle, Signals};

use super::Message;
use rekindle_os::inherited;

/// Signals that are for us.
pub(super) const OURS: [i32; 5] = [sig::SIGTERM, sig::SIGINT, sig::SIGHUP, sig::SIGUSR1, sig::SIGUSR2];
/// Signals that request a stop.
pub(super) const STOPS: [i32; 4] = [sig::SIGTERM, sig::SIGINT, sig::SIGHUP, sig::SIGUSR2];
/// Signals that are passed on to the job.
const FORWARDED: [i32; 3] = [sig::SIGQUIT, sig::SIGCONT, sig::SIGWINCH];

/// Signals that stay ignored if the caller ignored them: with `nohup`, closing the terminal ends nothing.
const MAY_BE_IGNORED: [i32; 3] = [sig::SIGHUP, sig::SIGINT, sig::SIGQUIT];

/// Turns signals into messages, on a separate thread.
pub(super) fn listen(sender: mpsc::Sender<Message>) -> io::Result<Handle> {
    let wanted = OURS.iter().chain(&FORWARDED).filter(|s| !(MAY_BE_IGNORED.contains(s) && inherited::is_ignored(**s)));
    let mut signals = Signals::new(wanted)?;
    let handle = signals.handle();
    let mut run = move || signals.forever().try_for_each(|signal| sender.send(Message::Signal(signal)));
    std::thread::Builder::new().name("signals".into()).spawn(move || drop(run()))?;
    Ok(handle)
}
