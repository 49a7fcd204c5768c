//! The lines of the log on their way to standard error.
//!
//! A reader may not read: a terminal after Ctrl-S, a pager, a connection that stalls. Then a write blocks, and with it
//! whoever logs, in the end the owner of the job's state. So a thread of its own writes the lines. While too many of them
//! wait, further lines are dropped and counted. What is queued is lost if the process is killed.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd as _;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// How many bytes may wait: some thousand lines.
const MOST: usize = 1 << 20;

/// How much longer the last lines are waited for on a machine that is busy.
const BUSY: u32 = 10;

/// Lines that wait to be written.
#[derive(Debug)]
pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Debug)]
struct Waiting {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    dropped: u64,
    /// A line is being written.
    writes: bool,
}

impl Queue {
    pub(super) const fn new() -> Queue {
        let waiting = Waiting { lines: VecDeque::new(), bytes: 0, dropped: 0, writes: false };
        Queue { waiting: Mutex::new(waiting), changed: Condvar::new() }
    }

    fn locked(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a line, or drops it if too many wait. Never blocks for a reader.
    pub(super) fn push(&self, line: &[u8]) {
        let mut waiting = self.locked();
        if !waiting.lines.is_empty() && waiting.bytes.saturating_add(line.len()) > MOST {
            waiting.dropped += 1;
            return;
        }
        waiting.bytes += line.len();
        waiting.lines.push_back(line.to_owned());
        self.changed.notify_all();
    }

    /// Writes the lines for ever. `tell` logs how many were dropped, once there is room for that.
    pub(super) fn work(&self, mut write: impl FnMut(&[u8]), tell: impl Fn(u64)) {
        loop {
            let line = self.next();
            write(&line);
            let dropped = {
                let mut waiting = self.locked();
                if waiting.bytes <= MOST / 2 { std::mem::take(&mut waiting.dropped) } else { 0 }
            };
            if dropped > 0 {
                tell(dropped);
            }
            self.locked().writes = false;
            self.changed.notify_all();
        }
    }

    fn next(&self) -> Vec<u8> {
        let mut waiting = self.locked();
        loop {
            if let Some(line) = waiting.lines.pop_front() {
                waiting.bytes -= line.len();
                waiting.writes = true;
                return line;
            }
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until all is written, for at most this long. If the thread that writes only lacks a processor, [`BUSY`] times as
    /// long: it is not writing, or there `is_room` for what it writes.
    pub(super) fn flush(&self, limit: Duration, is_room: impl Fn() -> bool) {
        let began = Instant::now();
        let mut until = began + limit;
        let mut waiting = self.locked();
        while !waiting.lines.is_empty() || waiting.writes {
            let mut left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                if began.elapsed() >= limit * BUSY || waiting.writes && !is_room() {
                    return;
                }
                left = limit / BUSY;
                until = Instant::now() + left;
            }
            waiting = self.changed.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Whether a write to standard error does not block now. Of a file nobody can tell: its server may not answer.
pub(super) fn is_room() -> bool {
    let err = io::stderr();
    let is_file = nix::sys::stat::fstat(&err).is_ok_and(|stat| stat.st_mode & nix::libc::S_IFMT == nix::libc::S_IFREG);
    let mut fds = [PollFd::new(err.as_fd(), PollFlags::POLLOUT)];
    !is_file && poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

/// Writes to standard error, without the lock that the standard library takes for that: a write may block.
pub(super) fn write_out(mut bytes: &[u8]) {
    let err = io::stderr();
    while !bytes.is_empty() {
        match nix::unistd::write(&err, bytes) {
            Ok(count @ 1..) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(Errno::EINTR) => {}
            // Somebody else who has this terminal or pipe has made it non-blocking.
            Err(Errno::EAGAIN) => {
                let _ = poll(&mut [PollFd::new(err.as_fd(), PollFlags::POLLOUT)], PollTimeout::NONE);
            }
            // A reader that is gone, or a full disk: the job goes on.
            Ok(0) | Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use super::*;

    #[test]
    fn a_stuck_reader_blocks_nobody_and_is_told_how_many_lines_it_missed() {
        let queue = Arc::new(Queue::new());
        let (go, gate) = mpsc::channel::<()>();
        let (out, written) = mpsc::channel::<Vec<u8>>();
        let ours = Arc::clone(&queue);
        std::thread::spawn(move || {
            let write = |line: &[u8]| {
                let _ = gate.recv();
                let _ = out.send(line.to_owned());
            };
            ours.work(write, |dropped| ours.push(format!("{dropped} dropped").as_bytes()));
        });
        let line = vec![b'x'; MOST / 8];
        (0..20).for_each(|_| queue.push(&line));
        queue.flush(Duration::from_millis(1), || false);
        assert!(written.try_recv().is_err(), "nothing is read yet");
        // One is being written, if the thread has begun.
        let held = if queue.locked().writes { 9 } else { 8 };
        let dropped = queue.locked().dropped;
        assert!((11..=12).contains(&dropped), "{dropped}");
        drop(go);
        queue.flush(Duration::from_secs(60), || true);
        let all: Vec<Vec<u8>> = written.try_iter().collect();
        assert!(all.len() as u64 == 20 - dropped + 1 && all.len() <= held + 1, "{}", all.len());
        assert_eq!(
            all.iter().filter(|one| one.starts_with(b"1")).collect::<Vec<_>>(),
            [format!("{dropped} dropped").as_bytes()]
        );
    }

    /// The last lines say why a run has ended.
    #[test]
    fn on_a_busy_machine_the_last_lines_are_waited_for_while_there_is_room() {
        static QUEUE: Queue = Queue::new();
        let limit = Duration::from_millis(200);
        let (out, written) = mpsc::channel::<Vec<u8>>();
        QUEUE.locked().writes = true;
        let began = Instant::now();
        QUEUE.flush(limit, || false);
        assert!(began.elapsed() < limit * BUSY, "nobody reads");
        QUEUE.locked().writes = false;
        QUEUE.push(b"why");
        std::thread::spawn(move || {
            std::thread::sleep(2 * limit);
            QUEUE.work(|line| drop(out.send(line.to_owned())), |_| {});
        });
        QUEUE.flush(limit, || false);
        assert_eq!(written.try_recv().unwrap(), b"why");
    }

    #[test]
    fn a_line_that_is_longer_than_the_queue_is_written() {
        let queue = Queue::new();
        queue.push(&vec![b'x'; MOST + 1]);
        queue.push(b"next");
        assert_eq!((queue.next().len(), queue.locked().dropped), (MOST + 1, 1));
    }
}
