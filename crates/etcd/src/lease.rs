//! A lease, and until when it surely has not expired.
//!
//! etcd counts a lease's time from the moment it handles a grant or renewal, and from a later one after a change of its leader. Both
//! come after the request was sent. So the lease lives at least for its time from the sending on, whenever the answer arrives.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use http::uri::PathAndQuery;
use rekindle_os::clock::since_boot;
use tokio::time::{sleep, timeout};
use tonic::Status;
use tonic_prost::ProstCodec;

use crate::LeaseId;
use crate::error::{Error, Result};
use crate::members::{Kind, Members, Refusal, ready, reason, unsigned, with_token};
use crate::messages::{
    LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest, LeaseKeepAliveResponse, LeaseRevokeRequest,
    LeaseRevokeResponse,
};
use crate::runtime::Running;

/// The part of a lease's time that counts. Clocks of two machines differ by less: the kernel corrects them by 0.05 % at most,
/// and a bad crystal is wrong by 0.02 %.
const SURE: f64 = 0.99;

/// Between two tries of a renewal.
const PAUSE: Duration = Duration::from_millis(100);

/// etcd has let a lease expire, or somebody has revoked it. Its keys are removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lost {
    /// The lease.
    pub id: LeaseId,
}

/// A lease that is renewed by a thread of its own. When this is dropped, it is not renewed any more, and expires.
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
        // A try that may have been done leaves a lease that nobody renews.
        let sent = since_boot();
        let request = LeaseGrantRequest { ttl: seconds, id: 0 };
        let call = running.members.call("/etcdserverpb.Lease/LeaseGrant", request, Kind::Repeatable);
        let granted: LeaseGrantResponse = running.wait(call)?;
        if !granted.error.is_empty() {
            return Err(Error::Refused(granted.error));
        }
        shared.sure(sent, granted.ttl);
        let renewer = Renewer { id: granted.id, ttl: granted.ttl, shared: Arc::clone(&shared) };
        running.spawn(renewer.run(Arc::clone(&running.members), lost));
        Ok(Lease { id: granted.id, shared, running })
    }

    /// Its number, for [`crate::Op::Put`].
    #[must_use]
    pub fn id(&self) -> LeaseId {
        self.id
    }

    /// The latest moment until which the lease surely has not expired, as time since the boot
    /// ([`rekindle_os::clock::since_boot`], which counts the time in which the machine sleeps). Zero once it is lost or revoked.
    ///
    /// It may pass, and be later again after that: etcd was away, and came back before it let the lease expire.
    #[must_use]
    pub fn sure_until(&self) -> Duration {
        if self.is_lost() {
            return Duration::ZERO;
        }
        Duration::from_nanos(self.shared.sure_until.load(Ordering::Acquire))
    }

    /// How long the lease surely does not expire from now on.
    #[must_use]
    pub fn sure_for(&self) -> Duration {
        self.sure_until().saturating_sub(since_boot())
    }

    /// Whether it has expired or was revoked.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.shared.lost.load(Ordering::Acquire)
    }

    /// Ends the lease at once: etcd removes its keys. [`Lease::sure_until`] is over from then on.
    ///
    /// # Errors
    /// If no quorum answers in time. The lease may then exist until its time is over.
    pub fn revoke(&self) -> Result<()> {
        self.shared.gone();
        let request = LeaseRevokeRequest { id: self.id };
        let call = self.running.members.call("/etcdserverpb.Lease/LeaseRevoke", request, Kind::Repeatable);
        match self.running.wait::<Result<LeaseRevokeResponse>>(call) {
            // A first try may have been done.
            Ok(_) | Err(Error::LeaseGone) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// Renews a lease.
struct Renewer {
    id: LeaseId,
    ttl: i64,
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
        // Two tries can fail before the time is over, with one more in reserve.
        let interval = Duration::from_secs(unsigned(self.ttl).max(1)) / 4;
        loop {
            sleep(interval).await;
            let mut member = members.preferred();
            loop {
                if self.shared.lost.load(Ordering::Acquire) {
                    return;
                }
                match self.renew(&members, member, interval).await {
                    Renewed::Yes => break,
                    Renewed::Gone => {
                        // Not if it was revoked meanwhile.
                        if !self.shared.lost.swap(true, Ordering::AcqRel) {
                            lost(Lost { id: self.id });
                        }
                        return;
                    }
                    Renewed::Failed(why) => {
                        let address = members.address(member);
                        tracing::debug!("cannot renew the lease {:x} at {address}: {why}", self.id);
                        members.distrust(member);
                        member = (member + 1) % members.count().max(1);
                        sleep(PAUSE).await;
                    }
                }
            }
        }
    }

    async fn renew(&self, members: &Members, member: usize, limit: Duration) -> Renewed {
        let channel = match timeout(limit, members.channel(member)).await {
            Ok(Ok(channel)) => channel,
            Ok(Err(Refusal::Member(why))) => return Renewed::Failed(why),
            Ok(Err(Refusal::All(error))) => return Renewed::Failed(error.to_string()),
            Err(_) => return Renewed::Failed(format!("no connection within {limit:.1?}")),
        };
        // Before it is sent: see above.
        let sent = since_boot();
        let token = members.token();
        let asked = async {
            let mut grpc = ready(channel).await?;
            let request = LeaseKeepAliveRequest { id: self.id };
            let path = PathAndQuery::from_static("/etcdserverpb.Lease/LeaseKeepAlive");
            let codec = ProstCodec::<LeaseKeepAliveRequest, LeaseKeepAliveResponse>::default();
            // The stream must not end before the answer is there: etcd would not give one.
            let requests = futures_util::StreamExt::chain(
                futures_util::stream::iter([request]),
                futures_util::stream::pending::<LeaseKeepAliveRequest>(),
            );
            let answer = grpc.streaming(with_token(requests, token.as_deref()), path, codec).await?;
            answer.into_inner().message().await
        };
        match timeout(limit, asked).await {
            Ok(Ok(Some(answer))) if answer.id == self.id => {
                if let Err(error) = members.same_cluster(member, answer.header.as_ref()) {
                    return Renewed::Failed(error.to_string());
                }
                if answer.ttl <= 0 {
                    return Renewed::Gone;
                }
                self.shared.sure(sent, answer.ttl);
                Renewed::Yes
            }
            Ok(Ok(_)) => Renewed::Failed("it answers nothing".into()),
            Ok(Err(status)) => {
                if lease_is_gone(&status) {
                    return Renewed::Gone;
                }
                if status.code() == tonic::Code::Unauthenticated {
                    members.forget_token();
                }
                Renewed::Failed(reason(&status))
            }
            Err(_) => Renewed::Failed(format!("no answer within {limit:.1?}")),
        }
    }
}

fn lease_is_gone(status: &Status) -> bool {
    status.message() == "etcdserver: requested lease not found"
}
