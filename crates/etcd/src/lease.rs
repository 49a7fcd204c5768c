//! A lease, and the time before which it has certainly not expired.
//!
//! etcd counts a lease's time from the moment when it handles a grant or a renewal, or from a later one if its leader
//! changes. Both are after the request was sent. So the lease lives at least for its time after the sending, whenever
//! the answer arrives.
//!
//! But a leader that was paused or cut off answers renewals alone, until it notices that the others have elected
//! another leader (etcd before 3.4.31 and 3.5.13). There the lease may have expired. So a renewal counts only with the
//! proof of a quorum: a linearizable read by the same member, in the same term, finds a key that belongs to the lease.
//! Then no other leader existed when the lease was renewed.
//!
//! Somebody may remove that key alone. Then it is written again: etcd writes no key of a lease that does not exist.
//!
//! etcd may grant more time than was asked for: at least one and a half election timeouts. What is beyond does not count. The
//! owner and those who wait for its end go by the time that was asked for, and the others do not know of the longer one.
//!
//! The same versions may end a lease too early when such a leader continues (etcd#15247). No client can prevent that.
//! So if the keys of a lease disappear, its owner may not know it yet ([`crate::Facts::may_end_leases_early`]).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::stream::{self, FuturesUnordered, StreamExt};
use http::uri::PathAndQuery;
use rekindle_os::clock::since_boot;
use tokio::time::{sleep, timeout};
use tonic::Status;
use tonic::transport::Channel;
use tonic_prost::ProstCodec;

use crate::LeaseId;
use crate::error::{Error, Result, Verdict, judge};
use crate::members::{Kind, Members, Refusal, ready, reason, unary, unsigned, with_token};
use crate::messages::{
    Header, LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest, LeaseKeepAliveResponse, LeaseRevokeRequest,
    LeaseRevokeResponse, RangeRequest, RangeResponse, TxnRequest, TxnResponse,
};
use crate::runtime::Running;
use crate::txn::{Op, Txn};

/// The part of a lease's time that counts. The clocks of two machines differ less: the kernel corrects them by at most
/// 0.05 %, and a bad crystal is wrong by 0.02 %.
const SURE: f64 = 0.99;

/// The pause between two tries of a renewal.
const PAUSE: Duration = Duration::from_millis(100);

/// The lease has expired in etcd, or somebody has revoked it. Its keys are removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lost {
    /// The lease.
    pub id: LeaseId,
}

/// A lease, with a thread that renews it. After a drop it is no longer renewed, and expires.
#[derive(Debug)]
pub struct Lease {
    id: LeaseId,
    shared: Arc<Shared>,
    running: Running,
}

#[derive(Debug)]
struct Shared {
    /// In nanoseconds since the boot.
    sure_until: AtomicU64,
    lost: AtomicBool,
}

impl Shared {
    /// The lease lives for `ttl` seconds from a moment on.
    fn sure(&self, sent: Duration, ttl: i64) {
        let until = sent + Duration::from_secs(unsigned(ttl)).mul_f64(SURE);
        let until = u64::try_from(until.as_nanos()).unwrap_or(u64::MAX);
        self.sure_until.fetch_max(until, Ordering::Release);
    }

    fn gone(&self) {
        self.lost.store(true, Ordering::Release);
    }
}

impl Lease {
    pub(crate) fn grant(members: &Members, ttl: Duration, lost: impl FnOnce(Lost) + Send + 'static) -> Result<Lease> {
        let seconds = i64::try_from(ttl.as_secs()).unwrap_or(i64::MAX);
        if seconds == 0 || ttl.subsec_nanos() > 0 {
            return Err(Error::Options(format!("a lease lives for whole seconds, not for {ttl:?}")));
        }
        let running = Running::start("etcd-lease", &members.options, members.known())?;
        let shared = Arc::new(Shared { sure_until: AtomicU64::new(0), lost: AtomicBool::new(false) });
        // If an unanswered try was done, its lease is not renewed, and expires.
        let sent = since_boot();
        let request = LeaseGrantRequest { ttl: seconds, id: 0 };
        let call = running.members.call("/etcdserverpb.Lease/LeaseGrant", request, Kind::Repeatable);
        let granted: LeaseGrantResponse = running.wait(call)?;
        if !granted.error.is_empty() {
            return Err(Error::Refused(granted.error));
        }
        let marker = running.members.options.hidden(&format!("leases/{:x}", granted.id));
        running.wait(mark(&running.members, &marker, granted.id))?;
        let ttl = granted.ttl.min(seconds);
        shared.sure(sent, ttl);
        let renewer = Renewer { id: granted.id, ttl, marker, shared: Arc::clone(&shared) };
        running.spawn(renewer.run(Arc::clone(&running.members), lost));
        Ok(Lease { id: granted.id, shared, running })
    }

    /// Its number, for [`crate::Op::Put`].
    #[must_use]
    pub fn id(&self) -> LeaseId {
        self.id
    }

    /// The lease has certainly not expired before this moment, as time since the boot
    /// ([`rekindle_os::clock::since_boot`], which counts the time in which the machine sleeps). Zero once it is lost,
    /// revoked or abandoned.
    ///
    /// The moment may pass, and a later call may return a later one: etcd did not answer, then answered before the
    /// lease expired.
    #[must_use]
    pub fn sure_until(&self) -> Duration {
        if self.is_lost() {
            return Duration::ZERO;
        }
        Duration::from_nanos(self.shared.sure_until.load(Ordering::Acquire))
    }

    /// Renews it no more, so that it expires. [`Lease::sure_until`] is zero from then on, and its end is not told.
    pub fn abandon(&self) {
        self.shared.gone();
    }

    /// Whether it has expired, was revoked or abandoned.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.shared.lost.load(Ordering::Acquire)
    }

    /// Ends the lease at once: etcd removes its keys. [`Lease::sure_until`] is zero from then on.
    ///
    /// # Errors
    /// If no quorum answers in time. The lease may then exist until its time is over.
    pub fn revoke(&self) -> Result<()> {
        self.shared.gone();
        revoke(&self.running, self.id)
    }
}

/// Ends a lease at once. One that does not exist counts as ended.
pub(crate) fn revoke(running: &Running, id: LeaseId) -> Result<()> {
    let request = LeaseRevokeRequest { id };
    let call = running.members.call("/etcdserverpb.Lease/LeaseRevoke", request, Kind::Repeatable);
    match running.wait::<Result<LeaseRevokeResponse>>(call) {
        // A first try may have been done.
        Ok(_) | Err(Error::LeaseGone) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Writes the key that belongs to the lease. Harmless if done twice or late: no other process has this key, and etcd removes
/// it with the lease.
async fn mark(members: &Members, marker: &str, id: LeaseId) -> Result<()> {
    let op = Op::Put { key: marker.to_owned(), value: Vec::new(), lease: Some(id) };
    let marked = Txn::default().then([op]).into();
    members.call::<TxnRequest, TxnResponse>("/etcdserverpb.KV/Txn", marked, Kind::Repeatable).await.map(drop)
}

/// Renews a lease.
struct Renewer {
    id: LeaseId,
    /// The time that counts, in seconds.
    ttl: i64,
    /// A key that etcd removes with the lease.
    marker: String,
    shared: Arc<Shared>,
}

/// The answer to a renewal.
enum Renewed {
    Yes,
    Gone,
    Failed(String),
}

impl Renewer {
    async fn run(self, members: Arc<Members>, lost: impl FnOnce(Lost)) {
        let interval = Duration::from_secs(unsigned(self.ttl).max(1)) / 4;
        loop {
            sleep(interval).await;
            if self.renewed(&members, interval).await {
                continue;
            }
            // Unless it was revoked or abandoned meanwhile.
            if !self.shared.lost.swap(true, Ordering::AcqRel) {
                lost(Lost { id: self.id });
            }
            return;
        }
    }

    /// Renews the lease at the member that answered last. If it does not answer, asks others too: a follower of a
    /// leader that hangs waits longer than the lease lives. Returns false if the lease does not exist any more.
    async fn renewed(&self, members: &Members, interval: Duration) -> bool {
        let (first, count) = (members.preferred(), members.count().max(1));
        let mut free: VecDeque<usize> = (0..count).map(|n| (first + n) % count).collect();
        let mut asked = FuturesUnordered::new();
        while !self.shared.lost.load(Ordering::Acquire) {
            if let Some(member) = free.pop_front() {
                asked.push(async move { (member, self.renew(members, member, interval).await) });
            }
            match timeout(interval / 4, asked.next()).await {
                Ok(Some((member, Renewed::Yes))) => {
                    members.prefer(member);
                    return true;
                }
                Ok(Some((_, Renewed::Gone))) => return false,
                Ok(Some((member, Renewed::Failed(why)))) => {
                    let address = members.address(member);
                    tracing::debug!("cannot renew the lease {:x} at {address}: {why}", self.id);
                    members.distrust(member);
                    free.push_back(member);
                    sleep(PAUSE).await;
                }
                Ok(None) | Err(_) => {}
            }
        }
        false
    }

    async fn renew(&self, members: &Members, member: usize, limit: Duration) -> Renewed {
        let channel = match timeout(limit, members.channel(member)).await {
            Ok(Ok(channel)) => channel,
            Ok(Err(Refusal::Member(why))) => return Renewed::Failed(why),
            Ok(Err(Refusal::All(error))) => return Renewed::Failed(error.to_string()),
            Err(_) => return Renewed::Failed(format!("no connection within {limit:.1?}")),
        };
        let token = members.token();
        match timeout(limit, self.renew_on(members, member, channel, token.as_deref())).await {
            Ok(Ok(renewed)) => renewed,
            Ok(Err(status)) => {
                if matches!(judge(&status), Verdict::Login(_)) {
                    members.forget_token();
                }
                Renewed::Failed(reason(&status))
            }
            Err(_) => Renewed::Failed(format!("no answer within {limit:.1?}")),
        }
    }

    async fn renew_on(
        &self,
        members: &Members,
        member: usize,
        channel: Channel,
        token: Option<&str>,
    ) -> std::result::Result<Renewed, Status> {
        // Before the request is sent: see above.
        let sent = since_boot();
        let answer = self.keep_alive(channel.clone(), token).await?;
        let Some(answer) = answer.filter(|answer| answer.id == self.id) else {
            return Ok(Renewed::Failed("it answers nothing".into()));
        };
        if let Err(error) = members.same_cluster(member, answer.header.as_ref()) {
            return Ok(Renewed::Failed(error.to_string()));
        }
        let request = RangeRequest { key: self.marker.as_str().into(), range_end: Vec::new(), count_only: false };
        let proof: RangeResponse = unary(channel, "/etcdserverpb.KV/Range", with_token(request, token)).await?;
        let term = |header: Option<&Header>| header.map(|header| header.raft_term);
        if term(proof.header.as_ref()) != term(answer.header.as_ref()) {
            return Ok(Renewed::Failed("another leader was elected meanwhile".into()));
        }
        let marked = proof.kvs.iter().any(|kv| kv.lease == self.id);
        Ok(match (answer.ttl > 0, marked) {
            (true, true) => {
                self.shared.sure(sent, answer.ttl.min(self.ttl));
                Renewed::Yes
            }
            (false, false) => Renewed::Gone,
            (true, false) => self.mark_again(members).await,
            // A new leader may not know all leases yet.
            (false, true) => Renewed::Failed("it does not know the lease yet".into()),
        })
    }

    /// Somebody has removed the key of the lease: without it, no renewal counts. The next try proves that the lease lives.
    async fn mark_again(&self, members: &Members) -> Renewed {
        match mark(members, &self.marker, self.id).await {
            Ok(()) => Renewed::Failed("the key of the lease was gone, and is written again".into()),
            Err(Error::LeaseGone) => Renewed::Gone,
            Err(error) => Renewed::Failed(error.to_string()),
        }
    }

    async fn keep_alive(
        &self,
        channel: Channel,
        token: Option<&str>,
    ) -> std::result::Result<Option<LeaseKeepAliveResponse>, Status> {
        let mut grpc = ready(channel).await?;
        let request = LeaseKeepAliveRequest { id: self.id };
        let path = PathAndQuery::from_static("/etcdserverpb.Lease/LeaseKeepAlive");
        let codec = ProstCodec::<LeaseKeepAliveRequest, LeaseKeepAliveResponse>::default();
        // The stream must stay open until the answer arrives: etcd would not send one.
        let requests = stream::iter([request]).chain(stream::pending());
        grpc.streaming(with_token(requests, token), path, codec).await?.into_inner().message().await
    }
}
