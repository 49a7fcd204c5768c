//! What a job that has completed has sent, and another machine has not received yet.
//!
//! The kernel of a machine keeps sending after the end of a process. But a job's network ends with the job: what was
//! still to be sent was lost, and the other end, which was not even told that the connection is closed, waited for ever.
//! So the network of a completed job stays until all has arrived, for a limited time.

use std::fs::File;
use std::io;
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, setns};

/// How long it may take. A cable that was pulled for a snapshot is in again by then, and TCP has tried again.
pub(in crate::launch) const LIMIT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(5);

/// The network of a job, which stays as long as this does.
#[derive(Debug)]
pub(in crate::launch) struct Undelivered(File);

impl Undelivered {
    /// The network of this process.
    pub(in crate::launch) fn of(pid: i32) -> io::Result<Undelivered> {
        File::open(format!("/proc/{pid}/ns/net")).map(Undelivered)
    }

    /// Waits until all that was sent has arrived. The job must have ended.
    pub(in crate::launch) fn wait(&self, limit: Duration) -> io::Result<()> {
        let wait = || -> io::Result<()> {
            setns(&self.0, CloneFlags::CLONE_NEWNET)?;
            let end = Instant::now() + limit;
            while left() {
                if Instant::now() >= end {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                std::thread::sleep(PAUSE);
            }
            Ok(())
        };
        // A thread of its own: it stays in that network.
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().spawn_scoped(scope, wait)?;
            thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread panicked")))
        })
    }
}

/// Whether this thread's network has connections with something to send.
fn left() -> bool {
    let tables = ["tcp", "tcp6"].map(|table| std::fs::read_to_string(format!("/proc/thread-self/net/{table}")));
    tables.iter().flatten().any(|table| has_unsent(table))
}

/// Whether a table in the form of /proc/net/tcp has a connection that was closed here and whose end has not arrived.
fn has_unsent(table: &str) -> bool {
    // FIN_WAIT1, LAST_ACK, CLOSING. In all other states of a connection without a process, the other end has all.
    const SENDING: [&str; 3] = ["04", "09", "0B"];
    table.lines().skip(1).any(|line| line.split_whitespace().nth(3).is_some_and(|state| SENDING.contains(&state)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_connections_that_still_send_are_waited_for() {
        let table = |state: &str| {
            format!(
                "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
                 0: 0100D50A:15B3 0200D50A:C000 {state} 00000001:00000000 01:00000014 00000000     0        0 0\n"
            )
        };
        assert!(["04", "09", "0B"].iter().all(|state| has_unsent(&table(state))));
        // FIN_WAIT2, TIME_WAIT, LISTEN.
        assert!(!["05", "06", "0A"].iter().any(|state| has_unsent(&table(state))));
        assert!(!has_unsent(""));
    }
}
