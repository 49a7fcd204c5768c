//! Connections inside the job that wait in a listener's queue, until the job accepts them.
//!
//! They are in no image: no process has a descriptor of them, and CRIU leaves them out. The end that made the connection
//! would be restored, and find it closed, with all that it had sent. So a snapshot waits until the job, which runs
//! meanwhile, has accepted them; if a new one is there when the processes are stopped, it is tried again.
//!
//! A job may also let connections wait for long, or always have one that waits. So a connection delays snapshots for
//! [`patience`] at most, and all of them together delay one for `LIMIT`. Then the image is taken without them.
//!
//! Connections from outside do not count: they are closed at a restore whether they were accepted or not.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::capture::{Connection, plain};
use crate::launch::group::Subnet;
use rekindle_os::process;
use rekindle_store::manifest::Reason;

/// How long connections may delay one snapshot.
const LIMIT: Duration = Duration::from_secs(30);
/// A look reads the descriptors of all processes.
const PAUSE: Duration = Duration::from_millis(25);

/// After this time the job counts as one that does not accept a connection. The last snapshot before the job is stopped
/// must not come too late, and a group has a time limit for the snapshots of all its members.
pub(crate) fn patience(reason: Reason) -> Duration {
    match reason {
        Reason::Final | Reason::Group => Duration::from_secs(2),
        Reason::Interval | Reason::Signal | Reason::Request => Duration::from_secs(10),
    }
}

/// What earlier snapshots saw, so that a connection that keeps waiting delays only for a time.
#[derive(Debug, Default)]
pub struct Queues(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    /// When each was first seen to wait.
    since: BTreeMap<Connection, Instant>,
    /// Since when snapshots are delayed.
    delayed: Option<Instant>,
}

/// Connections that wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unaccepted(Vec<Connection>);

impl std::fmt::Display for Unaccepted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ports = self
            .0
            .iter()
            .filter_map(|it| Some(u16::from_str_radix(it.local.rsplit_once(':')?.1, 16).ok()?.to_string()));
        let mut ports: Vec<String> = ports.collect();
        ports.sort_unstable();
        ports.dedup();
        let count = self.0.len();
        let waits = if count == 1 { "connection of the job waits" } else { "connections of the job wait" };
        write!(f, "{count} {waits} to be accepted at port {}", ports.join(", "))
    }
}

impl Queues {
    /// Those that delay a snapshot, or else those that the image will not have.
    pub(crate) fn look(
        &self,
        tree: &[i32],
        group: Option<Subnet>,
        patience: Duration,
    ) -> Result<Option<Unaccepted>, Unaccepted> {
        self.judge(find(tree, group), patience, Instant::now())
    }

    /// Waits until these processes have accepted what waits, or will not. They must be running.
    pub(crate) fn let_pass(
        &self,
        tree: &[i32],
        group: Option<Subnet>,
        patience: Duration,
        cancelled: &dyn Fn() -> bool,
    ) {
        let mut is_told = false;
        while let Err(found) = self.look(tree, group, patience)
            && !cancelled()
        {
            if !is_told {
                tracing::info!("the snapshot waits a moment: {found}");
                is_told = true;
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn judge(
        &self,
        found: Vec<Connection>,
        patience: Duration,
        now: Instant,
    ) -> Result<Option<Unaccepted>, Unaccepted> {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.since.retain(|connection, _| found.contains(connection));
        let mut is_fresh = false;
        for connection in &found {
            let since = *seen.since.entry(connection.clone()).or_insert(now);
            is_fresh |= now.saturating_duration_since(since) < patience;
        }
        let began = is_fresh.then(|| *seen.delayed.get_or_insert(now));
        if began.is_some_and(|began| now.saturating_duration_since(began) < LIMIT) {
            return Err(Unaccepted(found));
        }
        seen.delayed = None;
        Ok((!found.is_empty()).then_some(Unaccepted(found)))
    }
}

/// The connections inside that wait at listeners of the tree.
fn find(tree: &[i32], group: Option<Subnet>) -> Vec<Connection> {
    let sockets = tree.iter().flat_map(|pid| process::descriptors(*pid));
    let sockets: HashSet<u64> = sockets.filter_map(|(_, target)| process::socket(&target)).collect();
    let Some(root) = tree.first().filter(|_| !sockets.is_empty()) else { return Vec::new() };
    let tables = ["net/tcp", "net/tcp6"].map(|table| process::text(*root, table).unwrap_or_default());
    waiting(&tables, &sockets, group)
}

/// A line of /proc/net/tcp.
struct Line {
    connection: Connection,
    state: String,
    inode: u64,
}

fn waiting(tables: &[String], sockets: &HashSet<u64>, group: Option<Subnet>) -> Vec<Connection> {
    const LISTEN: &str = "0A";
    // Established, or closed by the other end since; and those whose handshake lacks the last packet.
    const WAITING: [&str; 3] = ["01", "08", "03"];
    let line = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let connection = Connection { local: plain(fields.get(1)?), remote: plain(fields.get(2)?) };
        Some(Line { connection, state: (*fields.get(3)?).to_owned(), inode: fields.get(9)?.parse().ok()? })
    };
    let lines: Vec<Line> = tables.iter().flat_map(|table| table.lines().skip(1)).filter_map(line).collect();
    let of_the_job = || lines.iter().filter(|line| sockets.contains(&line.inode));
    let port = |end: &str| end.rsplit_once(':').map(|(_, port)| port.to_owned());
    let listens: HashSet<String> =
        of_the_job().filter(|line| line.state == LISTEN).filter_map(|line| port(&line.connection.local)).collect();
    let known: HashSet<&Connection> = of_the_job().map(|line| &line.connection).collect();
    let is_inside = |connection: &Connection| {
        let other_end = Connection { local: connection.remote.clone(), remote: connection.local.clone() };
        known.contains(&other_end) || group.is_some_and(|group| connection.is_within(group))
    };
    // A connection that nobody has accepted has no inode.
    let waits = |line: &&Line| {
        line.inode == 0
            && WAITING.contains(&&*line.state)
            && port(&line.connection.local).is_some_and(|port| listens.contains(&port))
            && is_inside(&line.connection)
    };
    lines.iter().filter(waits).map(|line| line.connection.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(remote: &str) -> Connection {
        Connection { local: "0100D50A:15B3".into(), remote: remote.into() }
    }

    #[test]
    fn a_connection_delays_for_a_time_and_all_together_too() {
        let (queues, begin) = (Queues::default(), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        let patience = patience(Reason::Interval);
        let judge =
            |all: &[&str], seconds| queues.judge(all.iter().map(|it| connection(it)).collect(), patience, at(seconds));
        assert_eq!(judge(&[], 0), Ok(None));
        assert!(judge(&["a"], 1).is_err() && judge(&["a"], 10).is_err());
        assert!(judge(&["a"], 11).is_ok_and(|left_out| left_out.is_some()), "nobody accepts it");
        assert!(judge(&["a"], 100).is_ok(), "nor later");
        assert!(judge(&["a", "b"], 101).is_err(), "another one");
        // There is always a new one.
        assert!(judge(&["c"], 110).is_err() && judge(&["d"], 120).is_err() && judge(&["e"], 130).is_err());
        assert!(judge(&["f"], 131).is_ok(), "a snapshot is not delayed for longer");
        assert!(judge(&["g"], 132).is_err(), "the next one is again");
    }

    #[test]
    fn only_connections_inside_wait() {
        let table = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100D50A:15B3 00000000:0000 0A 00000000:00000002 00:00000000 00000000     0        0 11
   1: 0100D50A:15B3 0200D50A:C000 01 00000000:00000005 00:00000000 00000000     0        0 0
   2: 0100D50A:15B3 0300D50A:C001 03 00000000:00000000 00:00000000 00000000     0        0 0
   3: 0100D50A:15B3 0400D50A:C001 01 00000000:00000000 00:00000000 00000000     0        0 12
   4: 0100D50A:15B3 0500D50A:C001 05 00000000:00000000 00:00000000 00000000     0        0 0
   5: 0100D50A:15B4 0200D50A:C002 01 00000000:00000000 00:00000000 00000000     0        0 0
   6: 0100007F:15B3 0100007F:C003 08 00000000:00000000 00:00000000 00000000     0        0 0
   7: 0100007F:C003 0100007F:15B3 05 00000000:00000000 00:00000000 00000000     0        0 13
   8: 0100007F:15B3 0100007F:C004 01 00000000:00000000 00:00000000 00000000     0        0 0
";
        let sockets = HashSet::from([11, 12, 13]);
        let found = |group: Option<&str>| {
            let all = waiting(&[table.to_owned()], &sockets, group.map(|it| it.parse().unwrap()));
            all.into_iter().map(|it| it.remote).collect::<Vec<_>>()
        };
        assert_eq!(found(Some("10.213.0.0/16")), ["0200D50A:C000", "0300D50A:C001", "0100007F:C003"]);
        assert_eq!(found(None), ["0100007F:C003"], "the other end is a process of the job");
        let words = Unaccepted(vec![connection("a"), connection("b")]).to_string();
        assert_eq!(words, "2 connections of the job wait to be accepted at port 5555");
    }
}
