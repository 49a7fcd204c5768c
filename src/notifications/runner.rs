//! The thread that runs hooks: in order, one at a time, with a bounded queue.
//!
//! At the end of a run all remaining hooks together have one `hooks.timeout`. The hooks before the last one have half
//! of it: one that hangs does not prevent the last one.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use super::command;
use super::{Context, Point, Refused, Report, Reporter};
use crate::config::{Hooks, OnError};

/// Maximum queue of hooks that nothing waits for. It fills only if hooks take longer than the time between events.
const MOST: usize = 64;
/// How often a waiter checks whether it was cancelled.
const LOOK: Duration = Duration::from_millis(20);

/// Runs hooks.
#[derive(Debug, Clone)]
pub(crate) struct Runner(Arc<Shared>);

struct Shared {
    hooks: Hooks,
    context: Context,
    reporter: Reporter,
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Runner").field("hooks", &self.hooks).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Task>,
    has_thread: bool,
    busy: bool,
    left_out: bool,
    /// Set when the run is going to end.
    hurry: Option<Hurry>,
    /// Set when the run is ending.
    closing: Option<Closing>,
}

/// Until when a stop waits for a hook of a snapshot that had begun before it.
#[derive(Clone, Copy)]
struct Hurry {
    since: Instant,
    until: Instant,
}

impl Queue {
    /// The end of the time for a hook that something waits for, if a stop has made it shorter.
    fn hurried(&self, time: Time) -> Option<Instant> {
        let hurry = self.hurry.filter(|hurry| time.can_hurry && time.began <= hurry.since)?;
        (hurry.until < time.until).then_some(hurry.until)
    }
}

/// Time limits for hooks at the end of a run.
#[derive(Clone, Copy)]
struct Closing {
    others: Instant,
    last: Instant,
}

struct Task {
    point: Point,
    document: Vec<u8>,
    gate: Option<GateOf>,
}

/// The time for a hook that something waits for.
#[derive(Clone, Copy)]
struct Time {
    began: Instant,
    until: Instant,
    /// Whether a stop leaves less.
    can_hurry: bool,
}

/// State of a hook that something waits for.
struct GateOf {
    time: Time,
    called_off: Arc<AtomicBool>,
    /// Its turn has come.
    begun: Arc<AtomicBool>,
    answer: mpsc::Sender<Result<(), String>>,
}

impl Runner {
    /// No thread is started yet.
    #[must_use]
    pub(crate) fn new(hooks: &Hooks, context: Context, reporter: Reporter) -> Runner {
        let (queue, changed) = (Mutex::default(), Condvar::new());
        Runner(Arc::new(Shared { hooks: hooks.clone(), context, reporter, queue, changed }))
    }

    /// Whether there is a hook for it.
    #[must_use]
    pub(crate) fn has(&self, point: Point) -> bool {
        !point.command(&self.0.hooks).is_empty()
    }

    /// Queues a hook. If too many wait, the oldest of those that only tell of a success makes room: failures and the end
    /// are told.
    pub(crate) fn tell(&self, point: Point, document: Vec<u8>) {
        let mut queue = self.0.queue();
        let mut task = Some(Task { point, document, gate: None });
        let mut dropped = None;
        if queue.waiting.len() < MOST {
            queue.left_out = false;
        } else {
            let minor =
                |task: &Task| task.gate.is_none() && matches!(task.point, Point::AfterSnapshot | Point::AfterRestore);
            let oldest = queue.waiting.iter().position(minor).and_then(|at| queue.waiting.remove(at));
            let left_out = oldest.or_else(|| task.take());
            dropped = left_out.filter(|_| !std::mem::replace(&mut queue.left_out, true));
        }
        match task {
            Some(task) => self.0.push(queue, task),
            None => drop(queue),
        }
        if let Some(dropped) = dropped {
            self.0.report(dropped.point, format!("dropped: {MOST} others are waiting"));
        }
    }

    /// A hook that something waits for. `None` if there is no such hook.
    #[must_use]
    pub(crate) fn gate(&self, point: Point, document: Vec<u8>, limit: Duration) -> Option<Gate> {
        self.has(point).then(|| Gate { shared: Arc::clone(&self.0), point, document, limit })
    }

    /// A stop was requested: a hook that a snapshot has begun to wait for before has this time at most from now on. Only
    /// the first call counts.
    pub(crate) fn hurry(&self, limit: Duration) {
        let since = Instant::now();
        self.0.queue().hurry.get_or_insert(Hurry { since, until: since + limit });
    }

    /// Waits for the remaining hooks, at most `hooks.timeout`, and no longer when the end `hurries`; after that nothing
    /// runs any more.
    pub(crate) fn close(&self, hurries: &dyn Fn() -> bool) {
        let began = Instant::now();
        let mut last = began + self.0.hooks.timeout;
        let mut queue = self.0.queue();
        queue.closing = Some(Closing { others: began + self.0.hooks.timeout / 2, last });
        // A thread that could not be started does not empty the queue.
        while queue.has_thread && (queue.busy || !queue.waiting.is_empty()) {
            let now = Instant::now();
            if last > now && hurries() {
                last = now;
                queue.closing = Some(Closing { others: now, last });
                queue.waiting.clear();
            }
            // A hook that is killed now ends soon.
            let left = (last + command::GRACE).saturating_duration_since(now);
            if left.is_zero() {
                break;
            }
            queue = self.0.changed.wait_timeout(queue, left.min(LOOK)).unwrap_or_else(PoisonError::into_inner).0;
        }
        queue.waiting.clear();
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report(&self, point: Point, why: String) {
        (self.reporter)(Report { hook: point.name(), why });
    }

    fn push(self: &Arc<Self>, mut queue: MutexGuard<'_, Queue>, task: Task) {
        if !queue.has_thread {
            let shared = Arc::clone(self);
            let started = std::thread::Builder::new().name("hooks".into()).spawn(move || shared.work());
            if let Err(error) = started {
                drop(queue);
                return self.report(task.point, format!("cannot start a thread: {error}"));
            }
            queue.has_thread = true;
        }
        queue.waiting.push_back(task);
        self.changed.notify_all();
    }

    /// The thread; it ends with the process.
    fn work(&self) {
        let mut queue = self.queue();
        loop {
            let Some(task) = queue.waiting.pop_front() else {
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            queue.busy = true;
            drop(queue);
            self.run(task);
            queue = self.queue();
            queue.busy = false;
            self.changed.notify_all();
        }
    }

    fn run(&self, task: Task) {
        let Task { point, document, gate } = task;
        let limit = gate.as_ref().map(|gate| gate.time.until.saturating_duration_since(Instant::now()));
        let limit = limit.unwrap_or(self.hooks.timeout).min(self.hooks.timeout);
        let hurried = |gate: &GateOf| self.queue().hurried(gate.time);
        let is_late = || gate.as_ref().and_then(hurried).is_some_and(|until| until <= Instant::now());
        let wanted = || {
            let gate = gate.as_ref().is_none_or(|gate| !gate.called_off.load(Ordering::Relaxed));
            gate && !is_late() && self.may_run()
        };
        let result = if limit.is_zero() {
            Err("the hooks before it took too long".to_owned())
        } else if is_late() {
            Err("a stop was requested, and the hooks before it took too long".to_owned())
        } else if !wanted() {
            Err("no time was left for it".to_owned())
        } else {
            gate.iter().for_each(|gate| gate.begun.store(true, Ordering::Relaxed));
            let words = point.command(&self.hooks);
            command::run(point, words, &self.context, &document, limit, &wanted).map_err(|error| match error {
                command::Error::CalledOff if is_late() => "a stop was requested, and it took too long".to_owned(),
                error => error.to_string(),
            })
        };
        if let Err(why) = &result
            && gate.as_ref().is_none_or(|gate| !gate.called_off.load(Ordering::Relaxed))
        {
            self.report(point, why.clone());
        }
        if let Some(gate) = gate {
            // If it was cancelled, nobody waits for the result.
            let _ = gate.answer.send(result);
        }
    }

    /// Whether the end of the run leaves time for the present hook.
    fn may_run(&self) -> bool {
        let queue = self.queue();
        let Some(closing) = queue.closing else { return true };
        let until = if queue.waiting.is_empty() { closing.last } else { closing.others };
        Instant::now() < until
    }
}

/// How long a hook that something waits for may take to end after its time, once it is killed: on a busy machine its end
/// may be seen late.
const ENDS: Duration = Duration::from_secs(5);

/// A hook that something waits for.
#[derive(Debug)]
pub(crate) struct Gate {
    shared: Arc<Shared>,
    point: Point,
    document: Vec<u8>,
    limit: Duration,
}

/// The result for the waiting operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Passed {
    /// Continue.
    Yes,
    /// The hook refused.
    Refused(Refused),
    /// It was cancelled.
    CalledOff,
}

impl Gate {
    /// Runs the hook, after those queued before it, and waits for its end, at most its time limit.
    #[must_use]
    pub(crate) fn pass(self, cancelled: &dyn Fn() -> bool) -> Passed {
        let Gate { shared, point, document, limit } = self;
        let (called_off, begun) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let (answer, result) = mpsc::channel();
        let began = Instant::now();
        // A restore needs what its hook does, also when the run is going to stop.
        let time = Time { began, until: began + limit, can_hurry: point == Point::BeforeSnapshot };
        let of = GateOf { time, called_off: Arc::clone(&called_off), begun: Arc::clone(&begun), answer };
        shared.push(shared.queue(), Task { point, document, gate: Some(of) });
        loop {
            let (grace, late) = match begun.load(Ordering::Relaxed) {
                true => (ENDS, "it took too long, and did not end when it was killed"),
                false => (command::GRACE, "the hooks before it took too long"),
            };
            let why = match result.recv_timeout(LOOK) {
                Ok(Ok(())) => return Passed::Yes,
                Ok(Err(why)) => why,
                Err(mpsc::RecvTimeoutError::Timeout) if cancelled() => {
                    called_off.store(true, Ordering::Relaxed);
                    return Passed::CalledOff;
                }
                Err(mpsc::RecvTimeoutError::Timeout)
                    if Instant::now() > shared.queue().hurried(time).unwrap_or(time.until) + grace =>
                {
                    called_off.store(true, Ordering::Relaxed);
                    shared.report(point, late.to_owned());
                    late.to_owned()
                }
                Err(mpsc::RecvTimeoutError::Timeout) => continue,
                Err(mpsc::RecvTimeoutError::Disconnected) => "it could not be started".to_owned(),
            };
            return match shared.hooks.on_error {
                OnError::Ignore => Passed::Yes,
                OnError::Refuse => Passed::Refused(Refused { hook: point.name(), why }),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reports() -> (Reporter, mpsc::Receiver<Report>) {
        let (sender, reports) = mpsc::channel();
        let sender = Mutex::new(sender);
        (Arc::new(move |report| drop(sender.lock().unwrap().send(report))), reports)
    }

    fn sh(script: &str) -> Vec<String> {
        vec!["sh".into(), "-c".into(), script.into()]
    }

    fn runner(hooks: &Hooks) -> (Runner, mpsc::Receiver<Report>) {
        let (reporter, reports) = reports();
        let context = Context { job: "j".into(), folder: "/s/j".into() };
        (Runner::new(hooks, context, reporter), reports)
    }

    const NEVER: &dyn Fn() -> bool = &|| false;

    #[test]
    fn hooks_run_in_order_and_the_end_waits_for_them() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        let script = sh(&format!("sleep 0.05; cat >>{}", out.display()));
        let hooks = Hooks { after_snapshot: script.clone(), on_completion: script, ..Hooks::default() };
        let (runner, reports) = runner(&hooks);
        for n in 0..5 {
            runner.tell(Point::AfterSnapshot, format!("{n}").into_bytes());
        }
        runner.tell(Point::OnCompletion, b"done".to_vec());
        runner.close(NEVER);
        assert_eq!(std::fs::read_to_string(&out).unwrap(), "01234done");
        assert!(reports.try_recv().is_err());
        assert!(!runner.has(Point::OnFailure) && runner.gate(Point::OnFailure, vec![], Duration::ZERO).is_none());
    }

    #[test]
    fn the_end_waits_no_longer_than_the_timeout_and_the_last_has_its_share() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        let hooks = Hooks {
            after_snapshot: sh("sleep 60"),
            on_completion: sh(&format!("cat >{}", out.display())),
            timeout: Duration::from_secs(16),
            ..Hooks::default()
        };
        let (runner, reports) = runner(&hooks);
        (0..3).for_each(|_| runner.tell(Point::AfterSnapshot, Vec::new()));
        runner.tell(Point::OnCompletion, b"done".to_vec());
        let began = Instant::now();
        runner.close(NEVER);
        assert!(began.elapsed() < hooks.timeout + 2 * command::GRACE, "{:?}", began.elapsed());
        assert_eq!(std::fs::read_to_string(&out).unwrap(), "done");
        assert_eq!(reports.try_iter().filter(|report| report.hook == "after-snapshot").count(), 3);
    }

    #[test]
    fn the_end_does_not_wait_for_hooks_if_it_is_in_a_hurry() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        let hooks = Hooks {
            after_snapshot: sh("sleep 60"),
            on_completion: sh(&format!("cat >{}", out.display())),
            ..Hooks::default()
        };
        let (runner, _reports) = runner(&hooks);
        runner.tell(Point::AfterSnapshot, Vec::new());
        runner.tell(Point::OnCompletion, Vec::new());
        let began = Instant::now();
        // The signal comes while it waits.
        runner.close(&|| began.elapsed() > Duration::from_millis(100));
        assert!(began.elapsed() < hooks.timeout / 2, "{:?}", began.elapsed());
        assert!(!out.exists());
    }

    #[test]
    fn what_waits_goes_on_is_refused_or_is_called_off() {
        let mut hooks = Hooks { before_snapshot: sh("read line; exit $line"), ..Hooks::default() };
        hooks.on_error = OnError::Refuse;
        let limit = Duration::from_secs(20);
        let (strict, reports) = runner(&hooks);
        let gate = |runner: &Runner, code: &str| {
            runner.gate(Point::BeforeSnapshot, format!("{code}\n").into_bytes(), limit).unwrap()
        };
        assert_eq!(gate(&strict, "0").pass(NEVER), Passed::Yes);
        let refused = Refused { hook: "before-snapshot", why: "it ended with exit code 7".into() };
        assert_eq!(gate(&strict, "7").pass(NEVER), Passed::Refused(refused));
        assert_eq!(reports.try_iter().count(), 1);
        hooks.on_error = OnError::Ignore;
        let (lenient, reports) = runner(&hooks);
        assert_eq!(gate(&lenient, "7").pass(NEVER), Passed::Yes);
        assert_eq!(reports.try_recv().unwrap().why, "it ended with exit code 7");
        hooks.before_snapshot = sh("sleep 60");
        let (slow, reports) = runner(&hooks);
        let began = Instant::now();
        assert_eq!(gate(&slow, "").pass(&|| true), Passed::CalledOff);
        slow.close(NEVER);
        assert!(began.elapsed() < limit && reports.try_recv().is_err());
    }

    #[test]
    fn a_failure_and_the_end_are_told_though_too_many_wait() {
        let dir = tempfile::tempdir().unwrap();
        let (out, go) = (dir.path().join("out"), dir.path().join("go"));
        let tell = sh(&format!("while [ ! -e {} ]; do sleep 0.01; done; cat >>{}", go.display(), out.display()));
        let hooks = Hooks {
            after_snapshot: tell.clone(),
            on_failure: tell.clone(),
            on_completion: tell,
            // They are some seventy programs.
            timeout: Duration::from_secs(300),
            ..Hooks::default()
        };
        let (runner, reports) = runner(&hooks);
        runner.tell(Point::OnFailure, b"first ".to_vec());
        let began = Instant::now();
        while !runner.0.queue().busy {
            assert!(began.elapsed() < Duration::from_secs(20));
            std::thread::sleep(LOOK);
        }
        (0..MOST + 2).for_each(|n| runner.tell(Point::AfterSnapshot, format!("{n} ").into_bytes()));
        runner.tell(Point::OnFailure, b"failure ".to_vec());
        runner.tell(Point::OnCompletion, b"end".to_vec());
        assert_eq!(runner.0.queue().waiting.len(), MOST);
        let dropped: Vec<_> = reports.try_iter().map(|report| report.hook).collect();
        assert_eq!(dropped, ["after-snapshot"], "it is said once");
        std::fs::write(&go, "").unwrap();
        runner.close(NEVER);
        let snapshots: String = (4..MOST + 2).map(|n| format!("{n} ")).collect();
        assert_eq!(std::fs::read_to_string(&out).unwrap(), format!("first {snapshots}failure end"));
    }

    #[test]
    fn a_hook_that_takes_too_long_by_itself_is_told_with_its_output() {
        // Long enough for a shell to start on a busy machine.
        let limit = Duration::from_secs(8);
        let hooks = Hooks { before_snapshot: sh("echo so far; exec sleep 60"), timeout: limit, ..Hooks::default() };
        let (runner, reports) = runner(&hooks);
        assert_eq!(runner.gate(Point::BeforeSnapshot, Vec::new(), limit).unwrap().pass(NEVER), Passed::Yes);
        let why = reports.recv().unwrap().why;
        assert!(why.starts_with("it was killed after ") && why.ends_with(": so far"), "{why}");
    }

    #[test]
    fn a_stop_leaves_less_time_to_a_hook_that_runs_but_not_to_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let slow = dir.path().join("slow");
        std::fs::write(&slow, "").unwrap();
        let script = sh(&format!("[ ! -e {0} ] || {{ echo >{0}; exec sleep 60; }}", slow.display()));
        let hooks = Hooks { before_snapshot: script, timeout: Duration::from_secs(60), ..Hooks::default() };
        let (runner, reports) = runner(&hooks);
        let gate = || runner.gate(Point::BeforeSnapshot, Vec::new(), hooks.timeout).unwrap();
        let began = Instant::now();
        // The stop comes once it runs.
        let stops = || {
            if std::fs::read(&slow).unwrap() == b"\n" {
                runner.hurry(Duration::from_millis(100));
            }
            false
        };
        assert_eq!(gate().pass(&stops), Passed::Yes);
        assert!(began.elapsed() < hooks.timeout / 2, "{:?}", began.elapsed());
        assert_eq!(reports.recv().unwrap().why, "a stop was requested, and it took too long");
        std::fs::remove_file(&slow).unwrap();
        assert_eq!((gate().pass(NEVER), reports.try_iter().count()), (Passed::Yes, 0));
    }

    #[test]
    fn what_waits_waits_for_those_before_it_but_not_for_ever() {
        let hooks = Hooks { after_snapshot: sh("sleep 60"), before_snapshot: sh("true"), ..Hooks::default() };
        let (runner, reports) = runner(&hooks);
        runner.tell(Point::AfterSnapshot, Vec::new());
        let began = Instant::now();
        let gate = runner.gate(Point::BeforeSnapshot, Vec::new(), Duration::from_millis(200)).unwrap();
        assert_eq!(gate.pass(NEVER), Passed::Yes);
        assert!(began.elapsed() < Duration::from_secs(20));
        let report = reports.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!((report.hook, report.why.as_str()), ("before-snapshot", "the hooks before it took too long"));
    }
}
