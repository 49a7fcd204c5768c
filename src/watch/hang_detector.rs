//! The thread that notices when a job makes no progress. It checks the job's output, processor and GPU time, and
//! watchdog messages.
//!
//! It learns which life runs, and when its clocks must stop: while a snapshot is taken, while the job is suspended,
//! being restored or without all of its memory. Activity in that time does not count: CRIU's own work in the job (its
//! parasite) shows as the job's processor time. Time in which this process itself was stopped does not count either: the
//! job was probably stopped with it (`scontrol suspend`, `docker pause`, a virtual machine that was paused).

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::clock::Clock;
use super::gpu::GpuWork;
use super::stacks;
use crate::config::Watch;
use rekindle_base::cause::Missing;
use rekindle_engine::launch::output;
use rekindle_os::beneath::Beneath;
use rekindle_os::process;

/// If a wait took so much longer than planned, this process was stopped.
const SLEPT: Duration = Duration::from_secs(2);

/// Messages to it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Order {
    /// A new life, with this number and this pid of its root. Its clocks are stopped until they are started.
    Life(u32, i32),
    /// Start the clocks. The number is reported with the progress since then ([`Finding::Moves`]).
    Go(u64),
    /// Stop the clocks.
    Hold,
    /// This hang could not be acted on when it was reported: report it again if it lasts.
    Unheard(Missing),
}

/// A report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Finding {
    /// No output for this time, which is logged.
    Silent(Duration),
    /// Something has been missing for longer than allowed.
    Hung {
        /// The missing activity.
        what: Missing,
        /// For how long.
        idle: Duration,
        /// The file with the stacks.
        stacks: Option<PathBuf>,
    },
    /// The missing activity has returned.
    GoesOn(Missing),
    /// This activity was seen for the first time since the clocks were started with this number.
    Moves(u64, Missing),
}

/// Time without output after which the log says so. Few trainings print less often, and a line in the log harms none.
const SILENCE: Duration = Duration::from_secs(1800);

/// The detector and what it watches.
#[derive(Debug)]
pub(crate) struct HangDetector {
    clocks: Vec<(Missing, Clock)>,
    silence: Clock,
    files: output::Files,
    /// Counts the job's WATCHDOG=1.
    beats: Arc<AtomicU64>,
    /// The job's log folder.
    logs: Beneath,
    pause: Duration,
    /// Whether the clocks count.
    going: bool,
    life: u32,
    root: Option<i32>,
    seen: Seen,
    gpu: GpuWork,
    /// The number of the last start of the clocks, and the activities not seen since.
    unseen: (u64, Vec<Missing>),
}

/// The values at the last check.
#[derive(Debug, Default, PartialEq, Eq)]
struct Seen {
    lengths: [u64; 2],
    ticks: u64,
    at: Option<Instant>,
    beats: u64,
}

impl HangDetector {
    /// A detector with the configured clocks.
    #[must_use]
    pub(crate) fn new(watch: &Watch, files: &output::Files, logs: Beneath, beats: Arc<AtomicU64>) -> HangDetector {
        let wanted = [
            (Missing::Output, watch.no_output_for),
            (Missing::Work, watch.no_cpu_for),
            (Missing::Notify, watch.no_notify_for),
        ];
        let clocks: Vec<_> =
            wanted.into_iter().filter_map(|(what, patience)| Some((what, Clock::new(patience.limit()?)))).collect();
        let silence = Clock::new(SILENCE);
        // A tenth of a limit is precise enough; a silence alone is not urgent.
        let shortest = clocks.iter().map(|(_, clock)| clock.limit()).min();
        let pause = shortest.map_or(Duration::from_secs(60), |shortest| {
            (shortest / 10).clamp(Duration::from_millis(20), Duration::from_secs(10))
        });
        let files = files.clone();
        let (seen, gpu) = (Seen::default(), GpuWork::default());
        let (going, unseen) = (false, (0, Vec::new()));
        HangDetector { clocks, silence, files, beats, logs, pause, going, life: 0, root: None, seen, gpu, unseen }
    }

    /// Runs until the sender of orders is gone.
    pub(crate) fn keep(mut self, orders: &Receiver<Order>, report: impl Fn(u32, Finding)) {
        loop {
            // While the clocks are stopped there is nothing to check: an idle job costs nothing.
            let began = Instant::now();
            let order = if self.going { orders.recv_timeout(self.pause) } else { orders.recv().map_err(Into::into) };
            let now = Instant::now();
            let slept = self.has_slept(began, now, &report);
            match order {
                Ok(order) => self.obey(order, now, &report),
                Err(RecvTimeoutError::Timeout) if slept => {}
                Err(RecvTimeoutError::Timeout) => self.look(now, &report),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Whether this process was stopped while it waited since `began`. Nothing of that time counts then.
    fn has_slept(&mut self, began: Instant, now: Instant, report: &impl Fn(u32, Finding)) -> bool {
        let slept = self.going && now.saturating_duration_since(began) > self.pause + SLEPT;
        if slept {
            self.clocks().for_each(|clock| {
                clock.hold(began);
                clock.go(now);
            });
            self.look_at_output(now, report);
            self.look_at_beats(now, report);
            self.rebase(now);
        }
        slept
    }

    fn obey(&mut self, order: Order, now: Instant, report: &impl Fn(u32, Finding)) {
        match order {
            Order::Life(life, root) => {
                (self.life, self.root, self.going) = (life, Some(root), false);
                self.unseen.1.clear();
                self.clocks().for_each(Clock::reset);
                self.gpu.forget();
                self.rebase(now);
            }
            Order::Go(number) => {
                self.going = true;
                // The job may have printed this before the snapshot: it is progress, but not since then.
                self.look_at_output(now, report);
                self.rebase(now);
                if self.watches(Missing::Work) {
                    // Earlier samples are of the time before.
                    let _ = self.root.is_some_and(|root| self.gpu.is_working(root));
                }
                self.clocks().for_each(|clock| clock.go(now));
                self.unseen = (number, self.clocks.iter().map(|(what, _)| *what).collect());
            }
            Order::Hold => {
                // CRIU's work in the job may have begun, but it does not print.
                self.look_at_output(now, report);
                self.look_at_beats(now, report);
                self.unseen.1.clear();
                self.going = false;
                self.clocks().for_each(|clock| clock.hold(now));
            }
            Order::Unheard(missing) => {
                let unheard = self.clocks.iter_mut().filter(|(what, _)| *what == missing);
                unheard.for_each(|(_, clock)| clock.is_unheard());
            }
        }
    }

    fn clocks(&mut self) -> impl Iterator<Item = &mut Clock> {
        self.clocks.iter_mut().map(|(_, clock)| clock).chain([&mut self.silence])
    }

    /// Takes the current values as the last seen ones.
    fn rebase(&mut self, now: Instant) {
        let lengths = self.lengths();
        self.seen = Seen { lengths, ticks: self.ticks(), at: Some(now), beats: self.beats.load(Ordering::Relaxed) };
    }

    fn lengths(&self) -> [u64; 2] {
        self.files.lengths()
    }

    fn watches(&self, wanted: Missing) -> bool {
        self.clocks.iter().any(|(what, _)| *what == wanted)
    }

    /// Processor time of all processes of the job, including those that have ended and were waited for.
    fn ticks(&self) -> u64 {
        let Some(root) = self.root.filter(|_| self.watches(Missing::Work)) else { return 0 };
        process::tree(root).into_iter().filter_map(process::cpu_ticks).sum()
    }

    fn progress(&mut self, wanted: Missing, now: Instant, report: &impl Fn(u32, Finding)) {
        let life = self.life;
        if let Some(at) = self.unseen.1.iter().position(|what| *what == wanted) {
            self.unseen.1.swap_remove(at);
            report(life, Finding::Moves(self.unseen.0, wanted));
        }
        for (what, clock) in self.clocks.iter_mut().filter(|(what, _)| *what == wanted) {
            if clock.progress(now) {
                report(life, Finding::GoesOn(*what));
            }
        }
        if wanted == Missing::Output {
            self.silence.progress(now);
        }
    }

    fn look_at_output(&mut self, now: Instant, report: &impl Fn(u32, Finding)) {
        let lengths = self.lengths();
        // A shorter file was rotated, which happens only to one that has grown.
        if lengths != self.seen.lengths {
            self.seen.lengths = lengths;
            self.progress(Missing::Output, now, report);
        }
    }

    fn look_at_beats(&mut self, now: Instant, report: &impl Fn(u32, Finding)) {
        let beats = self.beats.load(Ordering::Relaxed);
        if beats != self.seen.beats {
            self.seen.beats = beats;
            self.progress(Missing::Notify, now, report);
        }
    }

    fn look(&mut self, now: Instant, report: &impl Fn(u32, Finding)) {
        self.look_at_output(now, report);
        self.look_at_beats(now, report);
        if self.watches(Missing::Work) {
            let ticks = self.ticks();
            let over = self.seen.at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
            if worked(self.seen.ticks, ticks, over) || self.root.is_some_and(|root| self.gpu.is_working(root)) {
                self.progress(Missing::Work, now, report);
            }
            (self.seen.ticks, self.seen.at) = (ticks, Some(now));
        }
        if let Some(idle) = self.silence.due(now) {
            report(self.life, Finding::Silent(idle));
        }
        let due: Vec<(Missing, Duration)> =
            self.clocks.iter_mut().filter_map(|(what, clock)| Some((*what, clock.due(now)?))).collect();
        // One is enough to act on; the stacks are the same.
        if let Some((what, idle)) = due.into_iter().next() {
            let stacks = self.root.and_then(|root| stacks::keep(root, &self.logs, what, idle));
            report(self.life, Finding::Hung { what, idle, stacks });
        }
    }
}

/// Whether this much processor time counts as work: 1 % of a processor. Threads that only wait and check the clock use
/// less. A tick is 10 ms (`USER_HZ` is 100 on every Linux).
fn worked(before: u64, now: u64, over: Duration) -> bool {
    // Less than before: a process has ended, and its parent has not waited for it yet.
    let Some(used) = now.checked_sub(before) else { return true };
    u128::from(used) * 10 * 100 >= over.as_millis() && used > 0
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::config::watch::Patience;

    const SECOND: Duration = Duration::from_secs(1);

    /// A detector of hangs of a process that does not exist, ten seconds without output long.
    fn detector(folder: &std::path::Path) -> HangDetector {
        let files = output::Files::create(folder, output::Bounds::default()).unwrap();
        let watch = Watch { no_output_for: Patience::For(10 * SECOND), ..Watch::default() };
        HangDetector::new(&watch, &files, Beneath::at(folder).unwrap(), Arc::default())
    }

    #[test]
    fn a_hang_that_could_not_be_acted_on_is_found_again_when_the_job_runs() {
        let dir = tempfile::tempdir().unwrap();
        let mut detector = detector(dir.path());
        let (start, found) = (Instant::now(), RefCell::new(Vec::new()));
        let report = |life, finding| match finding {
            Finding::Hung { what, idle, .. } => found.borrow_mut().push((life, what, idle)),
            Finding::Moves(..) => {}
            other => panic!("{other:?}"),
        };
        detector.obey(Order::Life(1, i32::MAX), start, &report);
        detector.obey(Order::Go(1), start, &report);
        detector.look(start + 10 * SECOND, &report);
        detector.look(start + 11 * SECOND, &report);
        assert_eq!(found.take(), [(1, Missing::Output, 10 * SECOND)], "once");
        // A snapshot had begun when that was received.
        detector.obey(Order::Hold, start + 11 * SECOND, &report);
        detector.obey(Order::Unheard(Missing::Output), start + 12 * SECOND, &report);
        assert!(found.borrow().is_empty());
        detector.obey(Order::Go(1), start + 60 * SECOND, &report);
        detector.look(start + 61 * SECOND, &report);
        detector.look(start + 62 * SECOND, &report);
        assert_eq!(found.take(), [(1, Missing::Output, 12 * SECOND)]);
        // If it prints after the snapshot, it did not hang.
        detector.obey(Order::Unheard(Missing::Output), start + 62 * SECOND, &report);
        std::fs::write(&detector.files.stdout, "goes on").unwrap();
        detector.look(start + 63 * SECOND, &report);
        assert!(found.borrow().is_empty());
    }

    #[test]
    fn progress_after_a_snapshot_is_told_from_progress_before_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut detector = detector(dir.path());
        let (start, found) = (Instant::now(), RefCell::new(Vec::new()));
        let report = |_, finding| found.borrow_mut().push(finding);
        let at = |seconds| start + seconds * SECOND;
        let output = detector.files.stdout.clone();
        let prints = || std::fs::write(&output, format!("{}.", std::fs::read_to_string(&output).unwrap())).unwrap();
        detector.obey(Order::Life(1, i32::MAX), start, &report);
        detector.obey(Order::Go(1), start, &report);
        detector.look(at(1), &report);
        assert_eq!(found.take(), []);
        prints();
        detector.look(at(2), &report);
        prints();
        detector.look(at(3), &report);
        assert_eq!(found.take(), [Finding::Moves(1, Missing::Output)], "once");
        // A snapshot begins and ends. What the job prints before the clocks are started may be from before the image.
        detector.obey(Order::Hold, at(4), &report);
        prints();
        detector.obey(Order::Go(2), at(8), &report);
        detector.look(at(9), &report);
        assert_eq!(found.take(), []);
        // What it prints before the next snapshot is not.
        prints();
        detector.obey(Order::Hold, at(10), &report);
        assert_eq!(found.take(), [Finding::Moves(2, Missing::Output)]);
    }

    #[test]
    fn a_pause_of_this_process_and_the_job_is_no_hang() {
        let dir = tempfile::tempdir().unwrap();
        let mut detector = detector(dir.path());
        let (start, found) = (Instant::now(), RefCell::new(Vec::new()));
        let report = |_, finding| found.borrow_mut().push(finding);
        let at = |seconds| start + seconds * SECOND;
        detector.obey(Order::Life(1, i32::MAX), start, &report);
        assert!(!detector.has_slept(start, at(1000), &report), "the clocks are stopped");
        detector.obey(Order::Go(1), at(1000), &report);
        assert!(!detector.has_slept(at(1000), at(1003), &report), "a busy machine");
        detector.look(at(1009), &report);
        assert!(detector.has_slept(at(1009), at(9000), &report));
        detector.look(at(9000), &report);
        assert!(found.borrow().is_empty());
        detector.look(at(9001), &report);
        let hung = Finding::Hung { what: Missing::Output, idle: 10 * SECOND, stacks: None };
        let found = found.take().into_iter().map(|finding| match finding {
            Finding::Hung { what, idle, .. } => Finding::Hung { what, idle, stacks: None },
            other => other,
        });
        assert_eq!(found.collect::<Vec<_>>(), [hung], "the time before counts");
    }

    #[test]
    fn one_per_cent_of_a_processor_is_work() {
        let second = Duration::from_secs(1);
        assert!(worked(100, 101, second), "10 ms in a second");
        assert!(!worked(100, 100, second));
        assert!(!worked(100, 100, Duration::ZERO));
        assert!(!worked(100, 104, 5 * second));
        assert!(worked(100, 105, 5 * second));
        assert!(worked(100, 90, second), "one has ended");
    }

    #[test]
    fn half_an_hour_without_output_is_told_once_until_there_is_more() {
        let dir = tempfile::tempdir().unwrap();
        let files = output::Files::create(dir.path(), output::Bounds::default()).unwrap();
        let logs = Beneath::at(dir.path()).unwrap();
        let mut detector = HangDetector::new(&Watch::default(), &files, logs, Arc::default());
        assert_eq!(detector.pause, Duration::from_secs(60));
        let (start, found) = (Instant::now(), RefCell::new(Vec::new()));
        let report = |_, finding| found.borrow_mut().push(finding);
        let at = |minutes: u32| start + minutes * 60 * SECOND;
        detector.obey(Order::Life(1, i32::MAX), start, &report);
        detector.obey(Order::Go(1), start, &report);
        detector.look(at(29), &report);
        assert_eq!(found.take(), []);
        detector.look(at(30), &report);
        detector.look(at(31), &report);
        assert_eq!(found.take(), [Finding::Silent(SILENCE)]);
        std::fs::write(&files.stdout, "goes on").unwrap();
        detector.look(at(40), &report);
        detector.look(at(69), &report);
        assert_eq!(found.take(), []);
        detector.look(at(70), &report);
        assert_eq!(found.take(), [Finding::Silent(SILENCE)]);
    }
}
