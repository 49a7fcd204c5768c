//! This member's part in one group snapshot: passes orders of the group on to the thread that takes the snapshot, and
//! its progress back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use rekindle_engine::snapshot::{Barrier, Elsewhere, Operations, Settled};
use rekindle_group::{Epoch, Incarnation, Local, Number, Part, Rank};
use rekindle_store::ImageId;
use rekindle_store::manifest::GroupPart;

use super::board::Board;

/// How often the thread looks whether the snapshot was cancelled.
const NAP: Duration = Duration::from_millis(20);

/// Why a snapshot is undone that the group aborts.
const ABORTED: &str = "another member could not take part, or took too long";

/// What the group orders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GroupOrder {
    /// All are locked: pull the cable.
    Pull,
    /// All cables are out: dump.
    Dump,
    /// All have dumped: keep the part.
    Keep(Settled),
    /// The snapshot is undone.
    Abort,
}

/// The end that belongs to the supervisor.
#[derive(Debug)]
pub struct Orders {
    /// The group snapshot.
    pub number: Number,
    words: mpsc::Sender<GroupOrder>,
    /// Whether the part is to be kept.
    pub is_kept: bool,
}

impl Orders {
    /// Passes an order on. The thread may have ended.
    pub fn give(&mut self, word: GroupOrder) {
        self.is_kept |= matches!(word, GroupOrder::Keep(_));
        let _ = self.words.send(word);
    }
}

/// How the snapshot's thread learns what NCCL has started on the other machines, and that they have restored.
pub struct Exchange {
    /// This member.
    pub rank: Rank,
    /// Number of members.
    pub size: u32,
    /// What the machines have told.
    pub board: Board,
    /// Has it written.
    pub wake: Box<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for Exchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exchange").field("rank", &self.rank).field("size", &self.size).finish_non_exhaustive()
    }
}

/// The end that belongs to the thread.
pub struct Turn {
    number: Number,
    part: GroupPart,
    words: Mutex<mpsc::Receiver<GroupOrder>>,
    /// The order that came before it was waited for.
    early: Mutex<Option<GroupOrder>>,
    tell: Box<dyn Fn(Local) + Send + Sync>,
    exchange: Exchange,
    cancel: OnceLock<Arc<AtomicBool>>,
    all_wait: AtomicBool,
}

impl std::fmt::Debug for Turn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Turn").field("part", &self.part).finish_non_exhaustive()
    }
}

impl Turn {
    /// A turn in this group snapshot of a job that runs since this epoch. `tell` is called with the progress.
    ///
    /// # Errors
    /// When the kernel gives no random numbers.
    pub fn new(
        number: Number,
        (epoch, origin): (Epoch, Incarnation),
        exchange: Exchange,
        tell: impl Fn(Local) + Send + Sync + 'static,
    ) -> Result<(Turn, Orders), getrandom::Error> {
        let (sender, words) = mpsc::channel();
        let mut mark = [0; 16];
        getrandom::fill(&mut mark)?;
        let mark = format!("{:032x}", u128::from_ne_bytes(mark));
        let turn = Turn {
            number,
            part: GroupPart { number: number.0, epoch: epoch.0, origin: origin.0, size: exchange.size, mark },
            words: Mutex::new(words),
            early: Mutex::default(),
            tell: Box::new(tell),
            exchange,
            cancel: OnceLock::new(),
            all_wait: AtomicBool::new(false),
        };
        Ok((turn, Orders { number, words: sender, is_kept: false }))
    }

    /// Setting this flag ends all waits.
    #[must_use]
    pub fn cancelled_by(self, flag: Arc<AtomicBool>) -> Turn {
        Turn { cancel: flag.into(), ..self }
    }

    fn is_cancelled(&self) -> bool {
        self.cancel.get().is_some_and(|flag| flag.load(Ordering::Relaxed))
    }

    /// Waits for an order. What was ordered before a cancellation counts: the group has recorded the part then.
    fn next(&self) -> Result<GroupOrder, String> {
        let words = lock(&self.words);
        let mut early = lock(&self.early).take().map(Ok);
        loop {
            match early.take().unwrap_or_else(|| words.recv_timeout(NAP)) {
                Ok(GroupOrder::Abort) => return Err(ABORTED.into()),
                Ok(word) => return Ok(word),
                Err(mpsc::RecvTimeoutError::Timeout) if !self.is_cancelled() => {}
                Err(mpsc::RecvTimeoutError::Timeout) => return Err("the job is being ended".into()),
                Err(mpsc::RecvTimeoutError::Disconnected) => return Err("the supervisor ends".into()),
            }
        }
    }

    fn wait_for(&self, wanted: &GroupOrder) -> Result<(), String> {
        let word = self.next()?;
        if word == *wanted { Ok(()) } else { Err(format!("the group ordered {word:?} instead of {wanted:?}")) }
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Elsewhere for Turn {
    fn exchange(&self, ours: &Operations) -> Option<Vec<Operations>> {
        let Exchange { rank, size, board, wake } = &self.exchange;
        board.exchange((self.number, *rank, *size), ours, wake)
    }
}

impl Barrier for Turn {
    fn part(&self) -> GroupPart {
        self.part.clone()
    }

    fn called_off(&self) -> Option<String> {
        let words = lock(&self.words);
        let mut early = lock(&self.early);
        *early = early.take().or_else(|| words.try_recv().ok());
        (*early == Some(GroupOrder::Abort)).then(|| ABORTED.into())
    }

    fn locked(&self) -> Result<(), String> {
        (self.tell)(Local::Locked(self.number));
        self.wait_for(&GroupOrder::Pull)?;
        self.all_wait.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn quiet(&self) -> Result<(), String> {
        (self.tell)(Local::Quiet(self.number));
        self.wait_for(&GroupOrder::Dump)
    }

    fn restored(&self) -> bool {
        let Exchange { rank, size, board, wake } = &self.exchange;
        board.restored((self.number, *rank, *size), wake)
    }

    fn dumped(&self, image: ImageId) -> Result<Settled, String> {
        let part = Part { image: image.to_string(), digest: self.part.mark.clone() };
        (self.tell)(Local::Dumped(self.number, part));
        match self.next()? {
            GroupOrder::Keep(settled) => Ok(settled),
            word => Err(format!("the group ordered {word:?} after the dump")),
        }
    }

    fn all_wait(&self) -> bool {
        self.all_wait.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::Utc;

    fn turn() -> (Turn, Orders, mpsc::Receiver<Local>, Arc<AtomicBool>) {
        let (sender, told) = mpsc::channel();
        let cancel = Arc::new(AtomicBool::new(false));
        let tell = move |local| drop(sender.send(local));
        let exchange = Exchange { rank: Rank(0), size: 1, board: Board::default(), wake: Box::new(|| ()) };
        let (turn, orders) = Turn::new(Number(3), (Epoch(2), Incarnation(9)), exchange, tell).unwrap();
        (turn.cancelled_by(Arc::clone(&cancel)), orders, told, cancel)
    }

    #[test]
    fn each_step_waits_for_its_order() {
        let (turn, mut orders, told, cancel) = turn();
        assert_eq!(turn.called_off(), None);
        orders.give(GroupOrder::Pull);
        assert_eq!(turn.called_off(), None);
        assert_eq!((turn.all_wait(), turn.locked(), turn.all_wait()), (false, Ok(()), true));
        orders.give(GroupOrder::Dump);
        assert_eq!(turn.quiet(), Ok(()));
        let image = ImageId::new(7, Utc::now());
        // The group has recorded the part, although the job was then told to end.
        orders.give(GroupOrder::Keep(Settled::End));
        cancel.store(true, Ordering::Relaxed);
        assert_eq!(turn.dumped(image), Ok(Settled::End));
        assert!(orders.is_kept);
        let part = Part { image: image.to_string(), digest: turn.part().mark };
        let number = Number(3);
        let all = [Local::Locked(number), Local::Quiet(number), Local::Dumped(number, part)];
        assert_eq!(told.try_iter().collect::<Vec<_>>(), all);
    }

    #[test]
    fn a_wait_ends_by_an_abort_a_cancellation_and_the_end_of_the_supervisor() {
        let (turn, mut orders, _told, _) = self::turn();
        orders.give(GroupOrder::Abort);
        assert!(turn.called_off().is_some() && turn.called_off().is_some(), "while it still locks");
        assert!(turn.locked().is_err() && !turn.all_wait());
        let (turn, _orders, _told, cancel) = self::turn();
        cancel.store(true, Ordering::Relaxed);
        assert!(turn.locked().is_err());
        let (turn, orders, _told, _) = self::turn();
        drop(orders);
        assert!(turn.quiet().is_err());
        let (turn, mut orders, _told, _) = self::turn();
        orders.give(GroupOrder::Dump);
        assert!(turn.locked().unwrap_err().contains("Dump"), "an order too early");
    }

    #[test]
    fn it_is_told_that_the_memory_is_restored_and_the_others_are_looked_at() {
        let turn_of = |rank, size, number| {
            let exchange = Exchange { rank: Rank(rank), size, board: Board::default(), wake: Box::new(|| ()) };
            Turn::new(Number(number), (Epoch(2), Incarnation(9)), exchange, |_| ()).unwrap().0
        };
        let written = |turn: &Turn| serde_json::from_slice(&turn.exchange.board.take().unwrap()).unwrap();
        let (turn, other, earlier) = (turn_of(0, 2, 3), turn_of(1, 2, 3), turn_of(1, 2, 2));
        assert!(!turn.restored() && !other.restored() && !earlier.restored());
        turn.exchange.board.show(&[(Rank(1), written(&earlier))].into());
        assert!(!turn.restored());
        turn.exchange.board.show(&[(Rank(1), written(&other))].into());
        assert!(turn.restored());
        assert!(turn_of(0, 1, 3).restored());
    }

    #[test]
    fn two_parts_never_have_the_same_mark() {
        let ((one, ..), (other, ..)) = (turn(), turn());
        assert_ne!(one.part().mark, other.part().mark);
        assert_eq!(one.part().mark.len(), 32);
    }
}
