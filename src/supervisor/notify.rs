//! Messages to the service manager: READY=1, STATUS=, WATCHDOG=1, EXTEND_TIMEOUT_USEC= and STOPPING=1 (sd_notify(3)).
//!
//! All messages come from the thread that owns the state, so that a watchdog notices when it is stuck. They must not
//! block it: `sd_notify::notify` waits while the manager's queue is full, so messages are sent without waiting, and
//! repeated at the next beat if that failed. No message is sent twice in a row, and none without NOTIFY_SOCKET.

use std::cell::Cell;
use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use sd_notify::NotifyState;

use super::Setup;
use super::state::Machine;
use crate::published::{JobState, Published};
use crate::telemetry::clean::is_harmful;
use rekindle_base::units::counted;
use rekindle_store::persist::Progress;

/// Environment variables that the manager sets for us only. A job that has them would send messages in our name
/// (NotifyAccess=all), or wait for our watchdog.
pub(crate) const VARIABLES: [&str; 3] = ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"];

/// By how much a time-out is extended each time. Long enough that a machine under load is not late with the next
/// request.
const EXTENSION: Duration = Duration::from_secs(60);
/// How often a time-out is extended.
pub(crate) const EXTEND_EVERY: Duration = Duration::from_secs(15);
/// The pause after a message could not be sent.
const RETRY: Duration = Duration::from_secs(1);
/// Without progress for this long, plus the time that a single step may take, no more time is requested: the manager
/// then ends what hangs for ever (a dead file server).
const STALLED: Duration = Duration::from_secs(300);
/// Maximum length of a reason in the status; the journal has the full text.
const LONGEST_REASON: usize = 200;

/// The manager's socket, and the last message.
#[derive(Debug)]
pub(crate) struct Notify {
    socket: Option<(UnixDatagram, SocketAddr)>,
    said: Said,
    /// Whether the last message was sent.
    heard: bool,
}

/// The phase of the service, as the manager sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    /// The job has not run yet.
    Starting,
    /// It runs or is being restored.
    Up,
    /// It is over, or is ending.
    Stopping,
}

impl Phase {
    pub(super) fn of(machine: &Machine<'_>, is_over: bool) -> Phase {
        if is_over || machine.is_stopping() {
            Phase::Stopping
        } else if machine.state().life().is_some() {
            Phase::Up
        } else {
            Phase::Starting
        }
    }
}

/// The last message, and when the next is due.
#[derive(Debug, Clone)]
struct Said {
    phase: Phase,
    status: String,
    /// Half of the watchdog's time.
    watchdog: Option<Duration>,
    alive: Option<Instant>,
    extended: Option<Instant>,
    /// The last progress, and when it was seen.
    mark: Option<(JobState, u64)>,
    moved: Instant,
    stalled: Duration,
}

impl Notify {
    /// The manager that the environment names, if any.
    #[must_use]
    pub(crate) fn from_environment() -> Notify {
        let socket = std::env::var_os("NOTIFY_SOCKET").and_then(|name| match open(&name) {
            Ok(socket) => Some(socket),
            Err(error) => {
                tracing::warn!("cannot notify the service manager: NOTIFY_SOCKET={}: {error}", name.display());
                None
            }
        });
        Notify { socket, said: Said::new(sd_notify::watchdog_enabled(), Duration::ZERO, Instant::now()), heard: true }
    }

    pub(super) fn of(setup: &Setup) -> Notify {
        let (restart, snapshot) = (&setup.config.restart, &setup.config.snapshot);
        let step =
            restart.restore_timeout.max(restart.longest_backoff()).max(snapshot.grace).max(snapshot.stop_limit());
        let mut notify = Notify::from_environment();
        notify.said.stalled += step;
        notify
    }

    /// Reports that an image is being fetched before the job can start, with its progress, and asks for more time.
    pub(crate) fn fetching(&self, image: u32, progress: &Progress) {
        let (done, total) = progress.bytes();
        let percent = (done.saturating_mul(100) / total.max(1)).min(99);
        let status = format!("fetching image {image} from the replica, {percent} %");
        self.send(&[NotifyState::Status(&status), extension()]);
    }

    /// Reports that the job cannot start yet, and asks for more time.
    pub(crate) fn waiting(&self, why: &str) {
        self.send(&[NotifyState::Status(why), extension()]);
    }

    /// Reports that the service is over before it began. Without READY=1, or with STOPPING=1 beside it, systemd would
    /// count it as failed ("protocol").
    pub(crate) fn nothing_to_do(&self, status: &str) {
        self.send(&[NotifyState::Ready, NotifyState::Status(status)]);
    }

    /// At the end of the run something is waited for that has a time limit of its own: reports that we are alive, and asks
    /// for more time, as often as it must be. `said` is when that was done.
    pub(super) fn waits_at_the_end(&self, said: &Cell<Option<Instant>>, now: Instant) {
        let every = self.said.watchdog.map_or(EXTEND_EVERY, |watchdog| watchdog.min(EXTEND_EVERY));
        if said.get().is_none_or(|at| now.saturating_duration_since(at) >= every) {
            said.set(Some(now));
            self.send(&[NotifyState::Watchdog, extension()]);
        }
    }

    /// When the next beat is due.
    pub(super) fn next_wake(&self, now: Instant) -> Option<Instant> {
        let wanted = self.socket.as_ref().and_then(|_| self.said.patience(now))?;
        Some(now + if self.heard { wanted } else { wanted.max(RETRY) })
    }

    /// Reports changes, and that the caller's thread is alive.
    pub(super) fn beat(&mut self, phase: Phase, published: &Published, now: Instant) {
        if self.socket.is_none() {
            return;
        }
        let status = status(published, Utc::now());
        let next = self.said.after(phase, status, mark(published), now);
        self.heard = self.send(&self.said.news(&next, now));
        if self.heard {
            self.said = next;
        }
    }

    /// Returns whether the message was sent.
    fn send(&self, states: &[NotifyState<'_>]) -> bool {
        let Some((socket, address)) = self.socket.as_ref().filter(|_| !states.is_empty()) else { return true };
        let text: String = states.iter().map(|state| format!("{state}\n")).collect();
        match socket.send_to_addr(text.as_bytes(), address) {
            Ok(_) => true,
            Err(error) => {
                tracing::debug!("cannot notify the service manager: {error}");
                false
            }
        }
    }
}

/// A non-blocking socket, and the address to send to. A name that begins with @ has no file (unix(7), abstract).
fn open(name: &OsStr) -> io::Result<(UnixDatagram, SocketAddr)> {
    let address = match name.as_bytes() {
        [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest)?,
        [b'/', ..] => SocketAddr::from_pathname(Path::new(name))?,
        _ => return Err(io::Error::new(io::ErrorKind::Unsupported, "neither an absolute path nor an abstract socket")),
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    Ok((socket, address))
}

fn extension() -> NotifyState<'static> {
    NotifyState::ExtendTimeoutUsec(u32::try_from(EXTENSION.as_micros()).unwrap_or(u32::MAX))
}

impl Said {
    fn new(watchdog: Option<Duration>, stalled: Duration, now: Instant) -> Said {
        Said {
            phase: Phase::Starting,
            status: String::new(),
            watchdog: watchdog.map(|every| every / 2),
            alive: None,
            extended: None,
            mark: None,
            moved: now,
            stalled: stalled + STALLED,
        }
    }

    /// The message for now. A phase never goes back: for the manager, a job that is being restored is up.
    fn after(&self, phase: Phase, status: String, mark: (JobState, u64), now: Instant) -> Said {
        let mut next = Said { phase: phase.max(self.phase), status, ..self.clone() };
        if Some(mark) != next.mark || next.phase != self.phase {
            (next.mark, next.moved) = (Some(mark), now);
        }
        let due = |last: Option<Instant>, every| last.is_none_or(|at| now.saturating_duration_since(at) >= every);
        if next.watchdog.is_some_and(|every| due(next.alive, every)) {
            next.alive = Some(now);
        }
        let stuck = now.saturating_duration_since(next.moved) >= next.stalled;
        if next.phase != Phase::Up && !stuck && (next.phase != self.phase || due(next.extended, EXTEND_EVERY)) {
            next.extended = Some(now);
        }
        next
    }

    /// The messages that lead from the present state to `next`.
    fn news<'a>(&self, next: &'a Said, now: Instant) -> Vec<NotifyState<'a>> {
        let mut news = Vec::new();
        if self.phase < Phase::Up && next.phase == Phase::Up {
            news.push(NotifyState::Ready);
        }
        if self.phase < Phase::Stopping && next.phase == Phase::Stopping {
            news.push(NotifyState::Stopping);
        }
        if self.status != next.status {
            news.push(NotifyState::Status(&next.status));
        }
        if next.alive == Some(now) && self.alive != next.alive {
            news.push(NotifyState::Watchdog);
        }
        if next.extended == Some(now) && self.extended != next.extended {
            news.push(extension());
        }
        news
    }

    fn patience(&self, now: Instant) -> Option<Duration> {
        let left = |last: Option<Instant>, every: Duration| {
            every.saturating_sub(last.map_or(every, |at| now.saturating_duration_since(at)))
        };
        let alive = self.watchdog.map(|every| left(self.alive, every));
        let extended = (self.phase != Phase::Up).then(|| left(self.extended, EXTEND_EVERY));
        alive.into_iter().chain(extended).min()
    }
}

/// A value that changes with each progress.
fn mark(published: &Published) -> (JobState, u64) {
    let moving = [&published.restoring, &published.persisting, &published.replicating];
    (published.state, moving.into_iter().flatten().map(|moving| moving.done.saturating_add(moving.written)).sum())
}

/// One line for people: what `systemctl status` shows.
fn status(published: &Published, now: DateTime<Utc>) -> String {
    let mut line = published.state.to_string();
    let mut add = |part: String| {
        line.push_str("; ");
        line.push_str(&part);
    };
    if let Some(moving) = &published.restoring {
        add(format!("reading image {}, {} %", moving.image.sequence(), moving.percent()));
    }
    if let (Some(image), Some(freeze)) = (published.last_image, published.last_freeze_us) {
        let (age, freeze) = (age(now - image.taken()), Duration::from_micros(freeze).as_secs_f64());
        add(format!("image {} taken {age}, the job was frozen for {freeze:.1} s", image.sequence()));
    }
    for (moving, place) in [(&published.persisting, "store"), (&published.replicating, "replica")] {
        if let Some(moving) = moving {
            add(format!("copying image {} to the {place}, {} %", moving.image.sequence(), moving.percent()));
        }
    }
    let failures = [
        (&published.last_failure, "the newest snapshot failed"),
        (&published.persist_failure, "not in the store"),
        (&published.replica_failure, "not in the replica"),
        (&published.rehearsal_failure, "could not be restored in a rehearsal"),
    ];
    for (why, what) in failures {
        if let Some(why) = why {
            let why: String = why.chars().map(|c| if is_harmful(c) { ' ' } else { c }).take(LONGEST_REASON).collect();
            add(format!("{what}: {why}"));
        }
    }
    if published.restarts > 0 {
        add(counted(published.restarts.into(), "restart"));
    }
    line
}

/// Rounded as far as is useful, because the line is sent again whenever it changes.
fn age(time: TimeDelta) -> String {
    let (amount, unit) = match u64::try_from(time.num_minutes()).unwrap_or(0) {
        0 => return "just now".into(),
        minutes @ 1..60 => (minutes, "minute"),
        minutes @ 60..1440 => (minutes / 60, "hour"),
        minutes => (minutes / 1440, "day"),
    };
    format!("{} ago", counted(amount, unit))
}

#[cfg(test)]
mod tests;
