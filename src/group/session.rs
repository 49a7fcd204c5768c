//! The thread that talks to etcd for this member: it renews the lease, writes, and reports changes.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak, mpsc};
use std::time::{Duration, Instant};

use rekindle_etcd::{Client, Error, Event, Lease, Options};
use rekindle_group::{Answer, Incarnation, Rank, View, Write};
use rekindle_os::clock::since_boot;
use rekindle_os::fence::Fence;
use rekindle_store::JobName;

use super::board::Board;
use super::coordinator::Coordinator;
use super::keys::{self, Mirror, Unreadable, Writer};
use super::node::Node;

/// The pause between two tries while etcd cannot be reached.
const PAUSE: Duration = Duration::from_secs(1);

/// The supervisor hangs if it has done nothing for so many leases, and for so long: it looks at its lease several times in
/// each. A machine whose store does not answer for a moment does not lose its job for that.
const HANGS: u32 = 4;
const LEAST_HANG: Duration = Duration::from_secs(60);

/// How often in the time of a lease the fence is moved ahead.
const FENCE_LOOKS: u32 = 20;

/// News from the coordinator.
#[derive(Debug)]
pub enum CoordinatorEvent {
    /// The group, as it is now.
    Group {
        /// The documents of the protocol.
        view: Arc<View>,
        /// The machines of the members.
        nodes: Arc<BTreeMap<Rank, Node>>,
    },
    /// There is a new membership.
    Joined(Membership),
    /// This membership is over.
    Lost(Incarnation, Loss),
    /// The answer to a write.
    Wrote(Answer),
    /// It cannot be reached.
    Away {
        /// The reason, for a message.
        why: String,
    },
    /// It answers again.
    Back,
    /// It answers, and refuses to write what this member sends. Told once, until [`CoordinatorEvent::Accepts`].
    Refuses {
        /// The reason, for a message.
        why: String,
    },
    /// It has written something again.
    Accepts,
    /// It is another one now, which may have no data. The membership is over. Nothing is done until
    /// [`Session::afresh`].
    Moved,
    /// It did not answer for as long as it is waited for.
    Missing {
        /// The reason, for a message.
        why: String,
    },
    /// It cannot be used until a person changes something.
    Failed {
        /// The reason, for a message.
        why: String,
    },
}

/// How a membership was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Its lease is over.
    Expired,
    /// Its report was removed, or overwritten by somebody else. Nothing can be written for this membership any more.
    NotReported,
    /// The supervisor has done nothing for so long, so its lease is no longer renewed. The job's init ends the job before
    /// the lease expires.
    Hangs(Duration),
}

/// The life of the thread that decides. If it hangs, it does not lead, takes part in nothing, and does not end its job when
/// it is ordered to: the others would wait for it for as long as its lease is renewed.
#[derive(Debug, Default)]
struct Pulse(Mutex<Option<Instant>>);

impl Pulse {
    fn beats(&self) {
        *lock(&self.0) = Some(Instant::now());
    }

    /// It is not looked at any more.
    fn is_over(&self) {
        *lock(&self.0) = None;
    }

    /// Since when it has not done anything, if that is too long ago.
    fn hangs(&self, lease: Duration) -> Option<Duration> {
        let since = lock(&self.0).map(|beat| beat.elapsed());
        since.filter(|since| *since > (lease * HANGS).max(LEAST_HANG))
    }
}

/// The present membership, for the two threads that see its end.
#[derive(Debug, Default)]
struct Present {
    membership: Option<Incarnation>,
    /// Whether the group has seen its report.
    is_reported: bool,
}

impl Present {
    fn begins(&mut self, membership: Incarnation) {
        *self = Present { membership: Some(membership), is_reported: false };
    }

    /// Returns whether it was the present one: its end is told once.
    fn ends(&mut self, membership: Incarnation) -> bool {
        let was = self.membership == Some(membership);
        if was {
            *self = Present::default();
        }
        was
    }

    /// The membership, if its report was there and is gone.
    fn look(&mut self, view: &View, rank: Rank) -> Option<Incarnation> {
        let ours = self.membership?;
        let is_there = view.members.get(&rank).is_some_and(|report| report.incarnation == ours);
        self.is_reported |= is_there;
        (self.is_reported && !is_there).then_some(ours)
    }
}

/// A membership, which lives as long as its lease. The session owns the lease.
#[derive(Debug, Clone)]
pub struct Membership {
    incarnation: Incarnation,
    lease: Weak<Lease>,
}

impl Membership {
    /// Its name in the protocol.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// The same as time since the boot; none once the membership is over.
    fn is_sure_until(&self) -> Option<Duration> {
        Some(self.lease.upgrade()?.sure_until()).filter(|until| !until.is_zero())
    }

    /// A fence for the job of this membership: `margin` before the membership may end. It moves ahead with each renewal
    /// of the lease, on a thread of its own, so that nothing else that the supervisor does can hold it up.
    ///
    /// # Errors
    /// When the membership is over, or there is no timer or thread.
    pub fn fence(&self, margin: Duration, lease: Duration) -> std::io::Result<Arc<Fence>> {
        let over = || std::io::Error::other("the membership is over");
        let at = move |until: Duration| until.saturating_sub(margin);
        let fence = Arc::new(Fence::new(at(self.is_sure_until().ok_or_else(over)?))?);
        let (weak, membership) = (Arc::downgrade(&fence), self.clone());
        std::thread::Builder::new().name("fence".into()).spawn(move || {
            while let (Some(fence), Some(until)) = (weak.upgrade(), membership.is_sure_until()) {
                if let Err(error) = fence.extend(at(until)) {
                    tracing::error!("cannot extend the time at which the job's init ends the job: {error}");
                }
                drop(fence);
                std::thread::sleep(lease / FENCE_LOOKS);
            }
        })?;
        Ok(fence)
    }

    /// The membership cannot end before this time. A later call may return a later time, or none once the session is
    /// over.
    #[must_use]
    pub fn sure_until(&self) -> Instant {
        let until = self.lease.upgrade().map_or(Duration::ZERO, |lease| lease.sure_until());
        // The lease counts the time in which the machine sleeps; an Instant does not. So this time is correct only now.
        Instant::now() + until.saturating_sub(since_boot())
    }
}

/// Work for the thread.
enum Ask {
    Write(Box<Write>),
    /// There is something on the board to be written.
    Tell,
    /// The lease is lost.
    Lost(Incarnation),
    /// The report of this membership is gone, although its lease may live.
    Begin(Incarnation),
    /// Begin again with the coordinator that is there now.
    Afresh(Option<Incarnation>),
    Leave,
    Abandon,
}

/// This member's connection to its group. After a drop, the membership ends when its lease expires.
#[derive(Debug)]
pub struct Session {
    asks: mpsc::Sender<Ask>,
    board: Board,
    pulse: Arc<Pulse>,
    /// Closed when the thread ends.
    over: mpsc::Receiver<()>,
}

/// The identity of this member.
#[derive(Debug, Clone)]
pub struct Identity {
    /// The name of the group, and of the folder of each part in its store.
    pub group: JobName,
    /// The rank.
    pub rank: Rank,
    /// The machine.
    pub node: Node,
    /// How long a lease lives: whole seconds.
    pub lease: Duration,
    /// The membership of a supervisor that certainly runs no more, nor does its job: it is ended at once.
    pub former: Option<Incarnation>,
}

impl Session {
    /// Connects, and reports what happens. Tries addresses that do not answer again.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(
        coordinator: Coordinator,
        identity: Identity,
        tell: impl Fn(CoordinatorEvent) + Clone + Send + 'static,
    ) -> std::io::Result<Session> {
        let (sender, asks) = mpsc::channel();
        let (alive, over) = mpsc::channel();
        let (own, shared, pulse) = (sender.clone(), Board::default(), Arc::<Pulse>::default());
        let (board, looked_at) = (shared.clone(), Arc::clone(&pulse));
        std::thread::Builder::new().name("group".into()).spawn(move || {
            let prefix = keys::prefix(&identity.group);
            let (away, present, refuses) = (Arc::default(), Arc::default(), Cell::new(false));
            let pulse = looked_at;
            let worker =
                Worker { coordinator, prefix, identity, asks, own, tell, board, pulse, away, present, refuses };
            worker.run();
            drop(alive);
        })?;
        Ok(Session { asks: sender, board: shared, pulse, over })
    }

    /// The supervisor is at work. From the first call on, this must be called several times in each lease until
    /// [`Session::is_at_the_end`].
    pub fn beats(&self) {
        self.pulse.beats();
    }

    /// From now on the supervisor waits for what has no limit, such as the store, with nothing left to decide.
    pub fn is_at_the_end(&self) {
        self.pulse.is_over();
    }

    /// Writes, and reports the answer. One write at a time.
    pub fn write(&self, write: Write) {
        let _ = self.asks.send(Ask::Write(Box::new(write)));
    }

    /// What the machines tell each other during a snapshot, and a function that has it written.
    pub fn board(&self) -> (Board, impl Fn() + Send + Sync + 'static) {
        let asks = self.asks.clone();
        (self.board.clone(), move || drop(asks.send(Ask::Tell)))
    }

    /// Begins again, after [`CoordinatorEvent::Moved`] and once nothing of the job is left. `former` is the membership before.
    pub fn afresh(&self, former: Option<Incarnation>) {
        let _ = self.asks.send(Ask::Afresh(former));
    }

    /// Ends the membership, so that the others need not wait until its lease expires. Waits for the end, with a time
    /// limit.
    pub fn leave(self, limit: Duration) {
        let _ = self.asks.send(Ask::Leave);
        let _ = self.over.recv_timeout(limit);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.asks.send(Ask::Abandon);
    }
}

struct Worker<T> {
    coordinator: Coordinator,
    prefix: String,
    identity: Identity,
    asks: mpsc::Receiver<Ask>,
    own: mpsc::Sender<Ask>,
    tell: T,
    board: Board,
    pulse: Arc<Pulse>,
    /// Since when it does not answer, and why.
    away: Arc<Mutex<Option<(Instant, String)>>>,
    present: Arc<Mutex<Present>>,
    /// It has refused the last write.
    refuses: Cell<bool>,
}

/// How the work with one coordinator ends.
enum Over {
    /// There is no membership, or it is ended.
    Done,
    /// The coordinator is another one.
    Moved,
    /// The supervisor hangs.
    Hangs,
}

impl<T: Fn(CoordinatorEvent) + Clone + Send + 'static> Worker<T> {
    fn run(mut self) {
        loop {
            let hangs = match self.with_one() {
                Some(Over::Moved) => false,
                Some(Over::Hangs) => true,
                Some(Over::Done) | None => return,
            };
            if !hangs {
                (self.tell)(CoordinatorEvent::Moved);
            }
            // The membership of a supervisor that hung has a job, until the lease expires.
            self.identity.former = loop {
                match self.asks.recv_timeout(PAUSE) {
                    Err(mpsc::RecvTimeoutError::Timeout) if hangs && self.hangs().is_none() => break None,
                    Ok(Ask::Afresh(former)) if !hangs => break former,
                    Ok(Ask::Write(_)) => (self.tell)(CoordinatorEvent::Wrote(Answer::Conflict)),
                    Ok(Ask::Tell) => self.board.unsay(),
                    Ok(Ask::Lost(_) | Ask::Begin(_) | Ask::Afresh(_)) | Err(mpsc::RecvTimeoutError::Timeout) => {}
                    Ok(Ask::Leave | Ask::Abandon) | Err(mpsc::RecvTimeoutError::Disconnected) => return,
                }
            };
            *lock(&self.away) = None;
            self.refuses.set(false);
        }
    }

    /// Returns none if there is no membership to end.
    fn with_one(&self) -> Option<Over> {
        let (client, options) = self.patiently(|| {
            let options = Options { prefix: self.prefix.clone(), ..self.coordinator.options()? };
            Ok((Client::connect(&options)?, options))
        })?;
        let mut mirror = Mirror::new(&self.prefix);
        let (tell, board, away) = (self.tell.clone(), self.board.clone(), Arc::clone(&self.away));
        let (own, present, rank) = (self.own.clone(), Arc::clone(&self.present), self.identity.rank);
        let followed = client.follow(&self.prefix, move |event| match reflect(&mut mirror, &board, event) {
            Ok(told) => {
                match &told {
                    CoordinatorEvent::Away { why } => drop(lock(&away).get_or_insert((Instant::now(), why.clone()))),
                    _ => *lock(&away) = None,
                }
                let gone = match &told {
                    CoordinatorEvent::Group { view, .. } => lock(&present).look(view, rank),
                    _ => None,
                };
                tell(told);
                // Told with the lock held, here and where it expires: it must not arrive after the next membership.
                let mut present = lock(&present);
                if let Some(gone) = gone
                    && present.ends(gone)
                {
                    tell(CoordinatorEvent::Lost(gone, Loss::NotReported));
                    let _ = own.send(Ask::Begin(gone));
                }
            }
            Err(error) => tell(CoordinatorEvent::Failed { why: error.to_string() }),
        });
        let _follower = match followed {
            Ok(follower) => follower,
            Err(error) => {
                (self.tell)(CoordinatorEvent::Failed { why: error.to_string() });
                return None;
            }
        };
        if let Some(former) = self.identity.former
            && let Err(error) = client.revoke(keys::lease(former))
        {
            tracing::debug!("cannot end the former membership of this machine: {error}; it expires");
        }
        let mut lease = match self.join(&client, &options)? {
            Joined::With(lease) => lease,
            Joined::Moved => return Some(Over::Moved),
        };
        loop {
            let ask = match self.asks.recv_timeout(PAUSE) {
                Ok(ask) => Some(ask),
                Err(mpsc::RecvTimeoutError::Disconnected) => None,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    if let Some(since) = self.hangs() {
                        let membership = keys::membership(lease.id());
                        // Not revoked: it may have a job. Whoever is told of the loss can rely on it that the fence is
                        // not moved ahead any more.
                        lease.abandon();
                        let mut present = lock(&self.present);
                        if present.ends(membership) {
                            (self.tell)(CoordinatorEvent::Lost(membership, Loss::Hangs(since)));
                        }
                        return Some(Over::Hangs);
                    }
                    let away = lock(&self.away).clone();
                    let Some((since, why)) = away.filter(|_| !matches!(self.coordinator, Coordinator::Given(_))) else {
                        continue;
                    };
                    if self.coordinator.has_moved(&options) {
                        return Some(Over::Moved);
                    }
                    if self.is_missing(since, &why) {
                        return None;
                    }
                    continue;
                }
            };
            match ask {
                Some(Ask::Write(write)) => {
                    let answer = self.write(&client, &lease, &write);
                    (self.tell)(CoordinatorEvent::Wrote(answer));
                }
                Some(Ask::Tell) => {
                    // If it fails, the snapshot waits in vain: it is tried again, or goes on without the others.
                    let told = self.board.take().map(|bytes| client.txn(self.writer(&lease).tell(bytes)));
                    if let Some(Err(error)) = told {
                        tracing::debug!("cannot tell the other machines how far the snapshot is here: {error}");
                    }
                }
                Some(ask @ (Ask::Lost(over) | Ask::Begin(over))) if keys::membership(lease.id()) == over => {
                    // What else belongs to the lease must not wait until it expires.
                    if matches!(ask, Ask::Begin(_))
                        && let Err(error) = lease.revoke()
                    {
                        tracing::debug!("cannot end the membership: {error}; it expires");
                    }
                    lease = match self.join(&client, &options)? {
                        Joined::With(lease) => lease,
                        Joined::Moved => return Some(Over::Moved),
                    }
                }
                Some(Ask::Lost(_) | Ask::Begin(_) | Ask::Afresh(_)) => {}
                Some(Ask::Leave) => break,
                Some(Ask::Abandon) | None => return None,
            }
        }
        if let Err(error) = lease.revoke() {
            tracing::debug!("cannot leave the group: {error}; the others wait until the lease expires");
        }
        Some(Over::Done)
    }

    fn hangs(&self) -> Option<Duration> {
        self.pulse.hangs(self.identity.lease)
    }

    /// Whether it is waited for no longer. That is then told.
    fn is_missing(&self, since: Instant, why: &str) -> bool {
        // A lease that was granted before has expired by then, and the job was ended.
        let limit = self.coordinator.patience().map(|limit| limit.max(self.identity.lease));
        let is_over = limit.is_some_and(|limit| since.elapsed() >= limit);
        if is_over {
            (self.tell)(CoordinatorEvent::Missing { why: why.to_owned() });
        }
        is_over
    }

    /// Begins a new membership. Returns none if the thread must end.
    fn join(&self, client: &Client, options: &Options) -> Option<Joined> {
        let lease = self.patiently(|| {
            if self.coordinator.has_moved(options) {
                return Ok(None);
            }
            let (own, tell, present) = (self.own.clone(), self.tell.clone(), Arc::clone(&self.present));
            let granted = client.lease(self.identity.lease, move |lost| {
                let membership = keys::membership(lost.id);
                let mut present = lock(&present);
                if present.ends(membership) {
                    tell(CoordinatorEvent::Lost(membership, Loss::Expired));
                }
                drop(present);
                let _ = own.send(Ask::Lost(membership));
            });
            granted.map(Some)
        })?;
        let Some(lease) = lease else { return Some(Joined::Moved) };
        let lease = Arc::new(lease);
        let incarnation = keys::membership(lease.id());
        lock(&self.present).begins(incarnation);
        (self.tell)(CoordinatorEvent::Joined(Membership { incarnation, lease: Arc::downgrade(&lease) }));
        Some(Joined::With(lease))
    }

    /// Tries again until it succeeds. Returns none if it cannot succeed, or if the thread must end.
    fn patiently<R>(&self, mut attempt: impl FnMut() -> Result<R, Error>) -> Option<R> {
        let (mut said, since) = (String::new(), Instant::now());
        loop {
            match attempt() {
                Ok(result) => {
                    if !said.is_empty() {
                        (self.tell)(CoordinatorEvent::Back);
                    }
                    return Some(result);
                }
                Err(error) if self.coordinator.may_pass(&error) => {
                    let why = error.to_string();
                    if self.is_missing(since, &why) {
                        return None;
                    }
                    if said.is_empty() {
                        (self.tell)(CoordinatorEvent::Away { why: why.clone() });
                    }
                    said = why;
                }
                Err(error) => {
                    (self.tell)(CoordinatorEvent::Failed { why: error.to_string() });
                    return None;
                }
            }
            match self.asks.recv_timeout(PAUSE) {
                Ok(Ask::Leave | Ask::Abandon) | Err(mpsc::RecvTimeoutError::Disconnected) => return None,
                // Without a membership nothing can be written.
                Ok(Ask::Write(_)) => (self.tell)(CoordinatorEvent::Wrote(Answer::Conflict)),
                Ok(Ask::Tell) => self.board.unsay(),
                Ok(Ask::Lost(_) | Ask::Begin(_) | Ask::Afresh(_)) | Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
        }
    }

    fn writer<'a>(&'a self, lease: &Lease) -> Writer<'a> {
        let Identity { rank, node, .. } = &self.identity;
        Writer { prefix: &self.prefix, rank: *rank, node, lease: lease.id() }
    }

    fn write(&self, client: &Client, lease: &Lease, write: &Write) -> Answer {
        // Decided before the lease was lost. Under the present one a report would name a membership that is over: it would
        // not count, and prevent the report that does. And one would lead that has not joined.
        let of = match write {
            Write::Join(report) | Write::Report(report) => Some(report.incarnation),
            Write::Lead(incarnation) => Some(*incarnation),
            // These need the lead, which was lost with the lease.
            Write::Plan { .. } | Write::Record { .. } | Write::Remove { .. } => None,
        };
        if of.is_some_and(|of| of != keys::membership(lease.id())) {
            return Answer::Conflict;
        }
        let txn = match self.writer(lease).transaction(write) {
            Ok(txn) => txn,
            Err(error) => {
                (self.tell)(CoordinatorEvent::Failed {
                    why: format!("a document of the group cannot be written: {error}"),
                });
                return Answer::Conflict;
            }
        };
        match client.txn(txn) {
            Ok(answer) => {
                if self.refuses.replace(false) {
                    (self.tell)(CoordinatorEvent::Accepts);
                }
                if answer.succeeded { Answer::Done(answer.revision) } else { Answer::Conflict }
            }
            Err(error) if error.is_unsure() => Answer::Unknown,
            Err(error) => {
                self.not_written(&error);
                Answer::Conflict
            }
        }
    }

    /// The job continues: somebody may make room in etcd, and a certificate or a password that is being replaced may be there
    /// in a moment. If it is not, the lease expires, and the next membership fails with this error.
    fn not_written(&self, error: &Error) {
        tracing::debug!("the coordinator did not write: {error}");
        // These are told by whoever follows the keys, and by the lease.
        let is_away = matches!(error, Error::Unreachable { .. } | Error::NoQuorum { .. } | Error::LeaseGone);
        if !is_away && !self.refuses.replace(true) {
            (self.tell)(CoordinatorEvent::Refuses { why: error.to_string() });
        }
    }
}

/// The answer to a try to join.
enum Joined {
    With(Arc<Lease>),
    Moved,
}

fn lock<T>(of: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

fn reflect(mirror: &mut Mirror, board: &Board, event: Event) -> Result<CoordinatorEvent, Unreadable> {
    match event {
        Event::State(state) => mirror.set(state)?,
        Event::Changed { revision, changes } => mirror.change(revision, changes)?,
        Event::Away { reason, .. } => return Ok(CoordinatorEvent::Away { why: reason }),
        Event::Back => return Ok(CoordinatorEvent::Back),
    }
    board.show(&mirror.told);
    Ok(CoordinatorEvent::Group { view: Arc::new(mirror.view.clone()), nodes: Arc::new(mirror.nodes.clone()) })
}

#[cfg(test)]
mod tests;
