//! What the machines tell each other during a group snapshot: what their processes have started on NCCL, while they reach
//! one point, and then that their GPU memory is restored. Key `cut/RANK`, one write for each change. It does not go through
//! the supervisor's thread, because the snapshot's thread waits for it. The protocol of the group does not know of it: no
//! decision of the leader depends on it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rekindle_engine::snapshot::Operations;
use rekindle_group::{Number, Rank};
use serde::{Deserialize, Serialize};

/// A document that is larger is not written: etcd refuses requests above 1.5 MiB.
const LARGEST: usize = 1 << 20;

/// A write that the coordinator has not shown by then is made again: it may have been lost, for example while etcd chose
/// another leader. Usually it takes milliseconds.
const AGAIN: Duration = Duration::from_secs(1);

/// What one machine has told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Report {
    /// In this group snapshot.
    number: Number,
    operations: Operations,
    /// The GPU memory of its processes is restored, or there is none. All machines are past the point then, so operations
    /// are not told with it.
    #[serde(default)]
    restored: bool,
}

/// Shared by the session, which reads and writes it in the coordinator, and the snapshot's thread.
#[derive(Debug, Clone, Default)]
pub struct Board(Arc<Mutex<Inner>>);

/// What this machine has told.
#[derive(Debug)]
struct Told {
    what: Report,
    /// The same, unless that is too large.
    written: Report,
    when: Instant,
}

#[derive(Debug, Default)]
struct Inner {
    of: BTreeMap<Rank, Report>,
    /// The latest of this machine.
    ours: Option<Told>,
    /// To be written. The session has been woken for it.
    unwritten: Option<Vec<u8>>,
}

impl Inner {
    /// `what` is what is compared with what is told next.
    fn tell(&mut self, what: Report, wake: impl FnOnce()) {
        let mut written = what.clone();
        let mut bytes = serde_json::to_vec(&written).unwrap_or_default();
        if bytes.len() > LARGEST {
            written.operations = Operations::uncounted();
            bytes = serde_json::to_vec(&written).unwrap_or_default();
        }
        self.ours = Some(Told { what, written, when: Instant::now() });
        // If there was something unwritten, the session is awake.
        if self.unwritten.replace(bytes).is_none() {
            wake();
        }
    }

    /// Whether this machine has told this, and need not tell it again.
    fn is_told(&self, rank: Rank, is_this: impl Fn(&Report) -> bool) -> bool {
        let arrived = |told: &Told| told.when.elapsed() < AGAIN || self.of.get(&rank) == Some(&told.written);
        self.ours.as_ref().is_some_and(|told| is_this(&told.what) && arrived(told))
    }

    /// What the others have told in this group snapshot.
    fn others(&self, number: Number, rank: Rank) -> impl Iterator<Item = &Report> {
        let others = self.of.iter().filter(move |(other, told)| **other != rank && told.number == number);
        others.map(|(_, told)| told)
    }
}

/// Whether so many others are all of a group of this size.
fn are_all(others: usize, size: u32) -> bool {
    others + 1 >= usize::try_from(size).unwrap_or(usize::MAX)
}

impl Board {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The other machines' documents, replaced by a new view of the coordinator.
    pub(super) fn show(&self, of: &BTreeMap<Rank, Report>) {
        self.inner().of.clone_from(of);
    }

    /// What is to be written now, if there is something new.
    pub(super) fn take(&self) -> Option<Vec<u8>> {
        self.inner().unwritten.take()
    }

    /// What is to be written cannot be: it is told again.
    pub(super) fn unsay(&self) {
        let mut inner = self.inner();
        (inner.ours, inner.unwritten) = (None, None);
    }

    /// Tells what is started here, and returns what is started on the `size - 1` other machines once all have told.
    /// `wake` is called if there is something to write.
    pub(super) fn exchange(
        &self,
        (number, rank, size): (Number, Rank, u32),
        operations: &Operations,
        wake: impl FnOnce(),
    ) -> Option<Vec<Operations>> {
        let mut inner = self.inner();
        let is_this = |told: &Report| told.number == number && !told.restored && told.operations == *operations;
        if !inner.is_told(rank, is_this) {
            inner.tell(Report { number, operations: operations.clone(), restored: false }, wake);
        }
        let others: Vec<Operations> = inner.others(number, rank).map(|told| told.operations.clone()).collect();
        are_all(others.len(), size).then_some(others)
    }

    /// Tells that the GPU memory of this machine is restored, and returns whether that of the `size - 1` others is. To be
    /// called until it is. `wake` is called if there is something to write.
    pub(super) fn restored(&self, (number, rank, size): (Number, Rank, u32), wake: impl FnOnce()) -> bool {
        let mut inner = self.inner();
        let ours = Report { number, operations: Operations::default(), restored: true };
        if !inner.is_told(rank, |told| *told == ours) {
            inner.tell(ours, wake);
        }
        are_all(inner.others(number, rank).filter(|told| told.restored).count(), size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operations(are_uncounted: bool) -> Operations {
        if are_uncounted { Operations::uncounted() } else { Operations::default() }
    }

    #[test]
    fn all_must_have_told_about_this_snapshot() {
        let board = Board::default();
        let mut woken = 0;
        let mut ask =
            |board: &Board, number| board.exchange((Number(number), Rank(0), 3), &operations(false), || woken += 1);
        assert_eq!(ask(&board, 7), None);
        assert_eq!(ask(&board, 7), None);
        let told = |number| Report { number: Number(number), operations: operations(true), restored: false };
        board.show(&BTreeMap::from([(Rank(0), told(7)), (Rank(1), told(7)), (Rank(2), told(6))]));
        assert_eq!(ask(&board, 7), None, "rank 2 has told about an earlier one");
        board.show(&BTreeMap::from([(Rank(1), told(7)), (Rank(2), told(7))]));
        assert_eq!(ask(&board, 7), Some(vec![operations(true), operations(true)]));
        assert_eq!(woken, 1, "what has not changed is not written again");
        let written: Report = serde_json::from_slice(&board.take().unwrap()).unwrap();
        assert_eq!((written.number, board.take()), (Number(7), None));
    }

    fn is_restored(number: u64) -> Report {
        Report { number: Number(number), operations: Operations::default(), restored: true }
    }

    #[test]
    fn all_must_have_restored_after_this_snapshot() {
        let board = Board::default();
        let mut woken = 0;
        let mut ask = |board: &Board| board.restored((Number(7), Rank(0), 3), || woken += 1);
        assert!(!ask(&board) && !ask(&board));
        let is_not = Report { restored: false, ..is_restored(7) };
        board.show(&BTreeMap::from([(Rank(0), is_restored(7)), (Rank(1), is_restored(7)), (Rank(2), is_restored(6))]));
        assert!(!ask(&board), "rank 2 has told about an earlier one");
        board.show(&BTreeMap::from([(Rank(1), is_restored(7)), (Rank(2), is_not)]));
        assert!(!ask(&board), "rank 2 was at the point, and has not restored");
        board.show(&BTreeMap::from([(Rank(1), is_restored(7)), (Rank(2), is_restored(7))]));
        assert!(ask(&board));
        assert_eq!(woken, 1, "it is written once");
        let written: Report = serde_json::from_slice(&board.take().unwrap()).unwrap();
        assert_eq!((written, board.take()), (is_restored(7), None));
        let alone = Board::default();
        assert!(alone.restored((Number(7), Rank(0), 1), || ()), "a group of one");
    }

    #[test]
    fn it_is_told_after_the_operations_and_again_for_the_next_snapshot() {
        let board = Board::default();
        let told = || board.take().map(|bytes| serde_json::from_slice::<Report>(&bytes).unwrap());
        let at = |number| (Number(number), Rank(0), 2);
        let not_restored = |number| Some(Report { restored: false, ..is_restored(number) });
        board.exchange(at(7), &operations(false), || ());
        assert_eq!(told(), not_restored(7));
        board.restored(at(7), || ());
        assert_eq!(told(), Some(is_restored(7)));
        board.exchange(at(8), &operations(false), || ());
        assert_eq!(told(), not_restored(8));
        board.restored(at(8), || ());
        assert_eq!(told(), Some(is_restored(8)));
    }

    #[test]
    fn what_did_not_arrive_is_told_again() {
        let at = (Number(7), Rank(0), 2);
        let restored = |board: &Board| {
            let mut is_woken = false;
            board.restored(at, || is_woken = true);
            is_woken
        };
        let exchange = |board: &Board| {
            let mut is_woken = false;
            board.exchange(at, &operations(false), || is_woken = true);
            is_woken
        };
        let long_ago = |board: &Board| {
            board.take();
            let mut inner = board.inner();
            let told = inner.ours.as_mut().unwrap();
            told.when = told.when.checked_sub(AGAIN).unwrap();
        };
        let (is_restored, is_not) = (is_restored(7), Report { restored: false, ..is_restored(7) });
        let look = |tells: &dyn Fn(&Board) -> bool, told: Report| {
            let board = Board::default();
            assert!(tells(&board) && !tells(&board));
            board.unsay();
            assert!(tells(&board), "there was no membership to write it with");
            long_ago(&board);
            assert!(tells(&board), "the write was lost");
            long_ago(&board);
            board.show(&BTreeMap::from([(Rank(0), told)]));
            assert!(!tells(&board), "it was not");
        };
        look(&restored, is_restored);
        look(&exchange, is_not);
    }

    #[test]
    fn a_report_without_the_field_has_not_restored() {
        let text = serde_json::to_value(is_restored(7)).unwrap();
        let fields = text.as_object().unwrap().clone().into_iter().filter(|(name, _)| name != "restored");
        let old: Report = serde_json::from_value(fields.collect::<serde_json::Map<_, _>>().into()).unwrap();
        assert_eq!(old, Report { restored: false, ..is_restored(7) });
    }
}
