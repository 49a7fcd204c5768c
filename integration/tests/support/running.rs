//! A `rekindle` that was started: what it says, waits that have a limit, and its end.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use rekindle::published::Published;

use super::{LIMIT, Lab, alive, comes, kill, tail};

/// A `rekindle` that was started; killed when it goes out of scope.
#[derive(Debug)]
pub(crate) struct Running {
    begun: DateTime<Utc>,
    child: Child,
    out: Stream,
    err: Stream,
}

/// What was read so far.
type Bytes = Arc<Mutex<Vec<u8>>>;

/// The end of a pipe that what was said comes from, and where it goes.
#[derive(Debug)]
struct Source {
    from: File,
    /// Held from a read until what was read is in all texts.
    reading: Mutex<()>,
    into: Vec<Bytes>,
}

impl Source {
    /// As much as a pipe holds, in reads of a quarter of it.
    const PIPE: usize = 64 << 10;

    fn is_readable(&self, timeout: PollTimeout) -> bool {
        let mut polled = [PollFd::new(self.from.as_fd(), PollFlags::POLLIN)];
        // A signal may interrupt it.
        poll(&mut polled, timeout).is_ok_and(|count| count > 0)
    }

    /// Reads once if there is something. False at the end.
    fn read(&self) -> bool {
        let _reading = self.reading.lock().unwrap();
        if !self.is_readable(PollTimeout::ZERO) {
            return true;
        }
        let mut buffer = [0; Self::PIPE / 4];
        let Ok(count @ 1..) = (&self.from).read(&mut buffer) else { return false };
        self.into.iter().for_each(|into| into.lock().unwrap().extend_from_slice(&buffer[..count]));
        true
    }

    /// Reads what was written before this call. The thread that reads may be late on a busy machine.
    fn catch_up(&self) {
        // The first read waits until the thread has put down what it has read.
        for _ in 0..=4 {
            if !self.read() || !self.is_readable(PollTimeout::ZERO) {
                return;
            }
        }
    }
}

/// A text that is written to pipes, one after the other.
#[derive(Debug, Clone, Default)]
pub(super) struct Text {
    bytes: Bytes,
    sources: Arc<Mutex<Vec<Arc<Source>>>>,
}

impl Text {
    /// All that was written before this call: what is published or stored was said before.
    pub(super) fn get(&self) -> String {
        let sources = self.sources.lock().unwrap().clone();
        sources.iter().for_each(|source| source.catch_up());
        String::from_utf8_lossy(&self.bytes.lock().unwrap()).into_owned()
    }
}

#[derive(Debug)]
struct Stream {
    text: Text,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl Stream {
    /// Reads all of it, and appends it to another text, too.
    fn new(from: impl Into<OwnedFd>, also: Option<&Text>) -> Stream {
        let text = Text::default();
        let texts = || also.into_iter().chain([&text]);
        let into = texts().map(|text| Arc::clone(&text.bytes)).collect();
        let source = Arc::new(Source { from: from.into().into(), reading: Mutex::default(), into });
        texts().for_each(|text| text.sources.lock().unwrap().push(Arc::clone(&source)));
        let read = move || {
            while !source.is_readable(PollTimeout::NONE) || source.read() {}
        };
        Stream { text, reader: Some(std::thread::spawn(read)) }
    }

    fn text(&self) -> String {
        self.text.get()
    }

    /// Waits until its other end is closed.
    fn close(&mut self) {
        if let Some(reader) = self.reader.take() {
            assert!(comes(LIMIT, || reader.is_finished()), "something holds rekindle's output open");
        }
    }
}

impl Running {
    /// Starts it; what it says is appended to `log`, too.
    pub(super) fn start(command: &mut Command, log: Option<&Text>) -> Running {
        let begun = Utc::now();
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let out = Stream::new(child.stdout.take().unwrap(), None);
        let err = Stream::new(child.stderr.take().unwrap(), log);
        Running { begun, child, out, err }
    }

    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    /// What was printed so far: the job's output.
    pub(crate) fn out(&self) -> String {
        self.out.text()
    }

    /// What was printed so far to standard error: the job's and rekindle's own messages.
    pub(crate) fn err(&self) -> String {
        self.err.text()
    }

    /// What it published: not what a supervisor before it, killed with -9, left behind.
    pub(crate) fn published(&self, lab: &Lab) -> Option<Published> {
        lab.published().filter(|published| published.begun >= self.begun)
    }

    /// Reads standard error as it is then, for a closure that is handed to one of the waits here.
    pub(crate) fn said_so_far(&self) -> impl Fn() -> String + use<> {
        let text = self.err.text.clone();
        move || text.get()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(self.pid(), signal);
    }

    /// A second request to stop: signals that come together are one.
    pub(crate) fn second_stop(&self, signal: Signal) {
        // The time between them counts from when the first one was seen. It was the same signal.
        let (seen, received) = (Instant::now(), format!("received {signal}"));
        while !self.err.text.get().contains(&received) && seen.elapsed() < LIMIT / 3 {
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(Duration::from_millis(2100));
        self.signal(signal);
    }

    /// How it ended, once all that it said was read; none while it runs.
    pub(crate) fn status(&mut self) -> Option<ExitStatus> {
        let status = self.child.try_wait().unwrap()?;
        [&mut self.out, &mut self.err].into_iter().for_each(Stream::close);
        Some(status)
    }

    /// Whether it still runs.
    pub(crate) fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits until `done`; fails with what was said when the supervisor ends before or the time is over.
    pub(crate) fn wait_for(&mut self, what: &str, done: impl FnMut() -> bool) {
        self.wait_every(Duration::from_millis(10), what, done);
    }

    /// The same for what is there for a moment only.
    pub(crate) fn wait_closely(&mut self, what: &str, done: impl FnMut() -> bool) {
        self.wait_every(Duration::from_micros(200), what, done);
    }

    fn wait_every(&mut self, pause: Duration, what: &str, mut done: impl FnMut() -> bool) {
        let deadline = Instant::now() + LIMIT;
        while !done() {
            let said = || format!("--- output\n{}\n--- messages\n{}", tail(&self.out.text()), tail(&self.err.text()));
            if let Some(status) = self.child.try_wait().unwrap() {
                assert!(done(), "rekindle ended ({status}) before {what}\n{}", said());
                return;
            }
            let below = || below(self.child.id().cast_signed());
            assert!(Instant::now() < deadline, "waited {LIMIT:?} in vain until {what}\n{}\n{}", said(), below());
            std::thread::sleep(pause);
        }
    }

    /// Waits until standard error holds the words.
    pub(crate) fn wait_said(&mut self, words: &str) {
        let text = self.err.text.clone();
        let said = || text.get().contains(words);
        self.wait_for(&format!("it says {words:?}"), said);
    }

    /// Waits until standard error holds the words so many times. What is published can be read before what is said.
    pub(crate) fn wait_said_times(&mut self, words: &str, times: usize) {
        let text = self.err.text.clone();
        let count = || text.get().matches(words).count();
        self.wait_for(&format!("it says {words:?} {times} times"), || count() == times);
    }

    /// Waits until the job printed the words.
    pub(crate) fn wait_printed(&mut self, words: &str) {
        let text = self.out.text.clone();
        let said = || text.get().contains(words);
        self.wait_for(&format!("the job prints {words:?}"), said);
    }

    /// Takes a snapshot by signal, and waits until it is in the store. Answers its number.
    pub(crate) fn snapshot(&mut self, lab: &Lab) -> u32 {
        let newest = || lab.images().first().map_or(0, |image| image.id.sequence());
        let (before, failed) = (newest(), self.err().matches("snapshot failed").count());
        self.signal(Signal::SIGUSR1);
        let text = self.err.text.clone();
        self.wait_for("a new image is there", || {
            let said = text.get();
            assert!(said.matches("snapshot failed").count() == failed, "{}", tail(&said));
            newest() > before
                && lab.published().is_some_and(|p| p.state.as_str() == "running" && p.persisting.is_none())
        });
        newest()
    }

    /// Waits until the job runs, and answers the pid of its first process.
    pub(crate) fn job_pid(&mut self, lab: &Lab) -> i32 {
        let begun = self.begun;
        let own = || lab.published().filter(|published| published.begun >= begun);
        // Kept as it was seen: a snapshot that begins a moment later changes the state again.
        let mut pid = None;
        self.wait_for("the job runs", || {
            pid = own().filter(|p| p.state.as_str() == "running" && p.pid.is_some_and(alive)).and_then(|p| p.pid);
            pid.is_some()
        });
        pid.unwrap()
    }

    /// Kills the job's first process, and waits until the job is back.
    pub(crate) fn crash(&mut self, lab: &Lab) {
        let pid = self.job_pid(lab);
        let restarts = lab.published().unwrap().restarts;
        let restored = |run: &Running| run.err().matches("the job was restored from ").count();
        let before = restored(self);
        kill(pid, Signal::SIGKILL);
        self.wait_for("the job is back", || {
            lab.published()
                .is_some_and(|p| p.restarts > restarts && p.state.as_str() == "running" && p.pid.is_some_and(alive))
        });
        // Another thread writes the log, and may be later than the state. With some levels nothing is said.
        comes(Duration::from_secs(2), || restored(self) > before);
        let said = self.err();
        assert!(!said.contains("starting again from the beginning"), "it is not back, it began anew:\n{}", tail(&said));
    }

    /// Waits for the end: exit code (128 + n for a signal), output, messages.
    pub(crate) fn finish(mut self, limit: Duration) -> (i32, String, String) {
        let ended = comes(limit, || !self.runs());
        assert!(ended, "rekindle did not end within {limit:?}\n{}\n{}", tail(&self.out()), tail(&self.err()));
        let status = self.status().unwrap();
        (status.code().unwrap_or_else(|| 128 + status.signal().unwrap()), self.out(), self.err())
    }

    /// Waits for the end with this exit code; answers output and messages.
    pub(crate) fn ends_with(self, code: i32) -> (String, String) {
        let (found, out, err) = self.finish(LIMIT);
        assert_eq!(found, code, "exit code\n--- output\n{}\n--- messages\n{}", tail(&out), tail(&err));
        (out, err)
    }

    /// kill -9 of the supervisor, reaped.
    pub(crate) fn kill_9(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// The same, and all that it said was read: nothing is added to the log later.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.status();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the processes below this one do, for a message.
fn below(root: i32) -> String {
    let of = |pid: i32| {
        let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let [stat, at, call, stack] = ["stat", "wchan", "syscall", "stack"].map(read);
        let stat: String = stat.chars().take(60).collect();
        format!("{stat} in {at}, system call {}\n{stack}", call.trim_end())
    };
    let all: Vec<String> = rekindle_os::process::tree(root).into_iter().map(of).collect();
    format!("--- processes\n{}", all.join("\n"))
}
