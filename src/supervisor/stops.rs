//! Requests to stop: which count as the same request, and which as a second one, which stops at once.

use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGTERM, SIGUSR2};

use super::state::{Event, Stop};

/// Signals that come together are one request. GNU timeout signals its child and its group, a shell passes on what the
/// terminal sent to both, and a scheduler signals each process of a job.
const TOGETHER: Duration = Duration::from_secs(2);

/// The requests so far.
#[derive(Debug, Default)]
pub(super) struct Stops {
    /// The first signal.
    signal: Option<Instant>,
    /// That was USR2.
    queues_again: bool,
    /// There was a command.
    command: bool,
    /// Nothing more is waited for.
    at_once: bool,
}

/// How a request counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request {
    /// The first: there is time for a final image.
    First,
    /// The same again.
    Repeated,
    /// A second request: nothing more is waited for.
    AtOnce,
}

impl Stops {
    /// Counts a signal that requests a stop. USR2 never means more than a first request: who sends it wants the final
    /// image, and some schedulers send it several times. Nor does TERM after it: at its time limit Slurm sends that to all
    /// processes, and lets them live for some time more (KillWait). Nor does HUP after another request: the terminal was
    /// closed. The first signal after a command may be from somebody who does not know of that, as at a shutdown.
    pub(super) fn signal(&mut self, signal: i32, now: Instant) -> Request {
        match self.signal {
            _ if signal == SIGHUP && (self.command || self.signal.is_some()) => Request::Repeated,
            None => {
                (self.signal, self.queues_again) = (Some(now), signal == SIGUSR2);
                match (self.command, self.at_once) {
                    (false, _) => Request::First,
                    (true, false) => Request::Repeated,
                    (true, true) => Request::AtOnce,
                }
            }
            Some(_) if signal == SIGUSR2 || signal == SIGTERM && self.queues_again => Request::Repeated,
            Some(first) if !self.at_once && now.saturating_duration_since(first) < TOGETHER => Request::Repeated,
            Some(_) => {
                self.at_once = true;
                Request::AtOnce
            }
        }
    }

    /// The event for a signal that requests a stop.
    pub(super) fn event(&mut self, signal: i32, now: Instant) -> Event {
        let stop = if signal == SIGUSR2 { Stop::Requeue } else { Stop::Signal(signal) };
        match self.signal(signal, now) {
            Request::AtOnce => Event::StopNow(stop),
            Request::First | Request::Repeated => Event::Stop(stop),
        }
    }

    /// Counts a command that requests a stop; the program says which of the two it wants.
    pub(super) fn command(&mut self, at_once: bool) -> Request {
        let is_first = !self.command && self.signal.is_none();
        let request = if is_first { Request::First } else { Request::Repeated };
        self.command = true;
        self.at_once |= at_once;
        if at_once { Request::AtOnce } else { request }
    }

    /// Whether there is nothing more to wait for.
    pub(super) fn is_at_once(&self) -> bool {
        self.at_once
    }
}

#[cfg(test)]
mod tests {
    use signal_hook::consts::SIGINT;

    use super::*;

    #[test]
    fn only_signals_that_mean_it_end_the_wait_for_the_store() {
        let now = Instant::now();
        let later = now + Duration::from_secs(60);
        let mut stops = Stops::default();
        assert_eq!(stops.event(SIGUSR2, now), Event::Stop(Stop::Requeue));
        assert_eq!(stops.event(SIGUSR2, later), Event::Stop(Stop::Requeue));
        assert_eq!(stops.signal(SIGUSR2, later), Request::Repeated);
        assert_eq!(stops.event(SIGTERM, later), Event::Stop(Stop::Signal(SIGTERM)));
        assert_eq!(stops.signal(SIGTERM, later + later.duration_since(now)), Request::Repeated);
        assert!(!stops.is_at_once(), "the final image would be lost, and the job is queued again");
        assert_eq!(stops.event(SIGINT, later), Event::StopNow(Stop::Signal(SIGINT)));
        assert_eq!(stops.event(SIGUSR2, later), Event::Stop(Stop::Requeue));
        assert!(stops.is_at_once());
    }

    #[test]
    fn signals_that_come_together_are_one_request() {
        let now = Instant::now();
        let at = |millis| now + Duration::from_millis(millis);
        let mut stops = Stops::default();
        assert_eq!(stops.signal(SIGTERM, at(0)), Request::First);
        assert_eq!(
            (stops.signal(SIGTERM, at(20)), stops.signal(SIGTERM, at(1999))),
            (Request::Repeated, Request::Repeated)
        );
        assert!(!stops.is_at_once());
        assert_eq!(
            stops.signal(SIGTERM, at(2000)),
            Request::AtOnce,
            "from the first one on, or a sender that repeats is never heard"
        );
        assert!(stops.is_at_once());
        assert_eq!(stops.signal(SIGTERM, at(2001)), Request::AtOnce);
    }

    #[test]
    fn a_command_says_what_it_wants() {
        let now = Instant::now();
        let mut stops = Stops::default();
        assert_eq!((stops.command(false), stops.command(false)), (Request::First, Request::Repeated));
        assert!(!stops.is_at_once());
        assert_eq!(stops.command(true), Request::AtOnce);
        assert!(stops.is_at_once());
        assert_eq!(stops.signal(SIGTERM, now), Request::AtOnce);
    }

    /// The machine is shut down, or the terminal closed, while the final image of a command is taken or stored.
    #[test]
    fn a_signal_after_a_command_does_not_give_up_the_final_image() {
        let now = Instant::now();
        let at = |secs| now + Duration::from_secs(secs);
        let mut stops = Stops::default();
        assert_eq!(stops.command(false), Request::First);
        assert_eq!(
            (stops.signal(SIGHUP, at(10)), stops.signal(SIGHUP, at(20))),
            (Request::Repeated, Request::Repeated)
        );
        assert_eq!(stops.signal(SIGTERM, at(30)), Request::Repeated);
        assert_eq!(stops.event(SIGHUP, at(40)), Event::Stop(Stop::Signal(SIGHUP)));
        assert!(!stops.is_at_once());
        assert_eq!(stops.event(SIGTERM, at(50)), Event::StopNow(Stop::Signal(SIGTERM)));
        assert!(stops.is_at_once());
        let mut stops = Stops::default();
        assert_eq!((stops.signal(SIGINT, at(0)), stops.signal(SIGHUP, at(10))), (Request::First, Request::Repeated));
        assert_eq!(stops.signal(SIGINT, at(20)), Request::AtOnce);
        let mut stops = Stops::default();
        assert_eq!((stops.signal(SIGHUP, at(0)), stops.signal(SIGTERM, at(10))), (Request::First, Request::AtOnce));
    }
}
