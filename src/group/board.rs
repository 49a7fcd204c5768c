//! What the processes of each machine have started on NCCL, while a group snapshot lets them reach one point: key
//! `cut/RANK`, one write for each change. It does not go through the supervisor's thread, because the snapshot's thread
//! waits for it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rekindle_engine::snapshot::Operations;
use rekindle_group::{Number, Rank};
use serde::{Deserialize, Serialize};

/// A document that is larger is not written: etcd refuses requests above 1.5 MiB.
const LARGEST: usize = 1 << 20;

/// What one machine has told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Report {
    /// In this group snapshot.
    number: Number,
    operations: Operations,
}

/// Shared by the session, which reads and writes it in the coordinator, and the snapshot's thread.
#[derive(Debug, Clone, Default)]
pub struct Board(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    of: BTreeMap<Rank, Report>,
    /// The latest of this machine.
    ours: Option<Report>,
    /// To be written. The session has been woken for it.
    unwritten: Option<Vec<u8>>,
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
        let is_told = inner.ours.as_ref().is_some_and(|told| told.number == number && told.operations == *operations);
        if !is_told {
            let mut told = Report { number, operations: operations.clone() };
            let mut bytes = serde_json::to_vec(&told).unwrap_or_default();
            if bytes.len() > LARGEST {
                told.operations = Operations::uncounted();
                bytes = serde_json::to_vec(&told).unwrap_or_default();
            }
            inner.ours = Some(Report { number, operations: operations.clone() });
            // If there was something unwritten, the session is awake.
            if inner.unwritten.replace(bytes).is_none() {
                wake();
            }
        }
        let others = inner.of.iter().filter(|(other, told)| **other != rank && told.number == number);
        let others: Vec<Operations> = others.map(|(_, told)| told.operations.clone()).collect();
        (others.len() + 1 >= usize::try_from(size).unwrap_or(usize::MAX)).then_some(others)
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
        let told = |number| Report { number: Number(number), operations: operations(true) };
        board.show(&BTreeMap::from([(Rank(0), told(7)), (Rank(1), told(7)), (Rank(2), told(6))]));
        assert_eq!(ask(&board, 7), None, "rank 2 has told about an earlier one");
        board.show(&BTreeMap::from([(Rank(1), told(7)), (Rank(2), told(7))]));
        assert_eq!(ask(&board, 7), Some(vec![operations(true), operations(true)]));
        assert_eq!(woken, 1, "what has not changed is not written again");
        let written: Report = serde_json::from_slice(&board.take().unwrap()).unwrap();
        assert_eq!((written.number, board.take()), (Number(7), None));
    }
}
