//! The calls of the supervisor.

use std::sync::Arc;
use std::time::Duration;

use crate::LeaseId;
use crate::error::Result;
use crate::follow::{Event, Follower};
use crate::lease::{self, Lease, Lost};
use crate::members::Kind;
use crate::messages::{TxnRequest, TxnResponse};
use crate::options::Options;
use crate::read::{entries, probe, state};
use crate::runtime::Running;
use crate::txn::{State, Txn, TxnAnswer};

/// A connection to etcd. Its calls block, and may be made by several threads at once.
#[derive(Debug)]
pub struct Client {
    running: Running,
}

impl Client {
    /// Connects: a member answers, its version is new enough, the login works, and the prefix can be read with a
    /// quorum.
    ///
    /// # Errors
    /// The first of these that fails, and what to do.
    pub fn connect(options: &Options) -> Result<Client> {
        options.validate()?;
        let running = Running::start("etcd", options, Arc::default())?;
        running.wait(probe(&running.members))?;
        Ok(Client { running })
    }

    /// Reads everything below a prefix, including all that was written before the call.
    ///
    /// # Errors
    /// If no quorum answers in time, or etcd refuses.
    pub fn get(&self, prefix: &str) -> Result<State> {
        self.running.wait(state(&self.running.members, prefix))
    }

    /// Executes a transaction, at most once.
    ///
    /// # Errors
    /// [`crate::Error::Unsure`] if it is unknown whether the transaction is done or still will be. After any other
    /// error nothing was done.
    pub fn txn(&self, txn: Txn) -> Result<TxnAnswer> {
        let kind = if txn.only_reads() { Kind::Repeatable } else { Kind::Once };
        let members = &self.running.members;
        let seen = members.seen();
        let request = TxnRequest::from(txn);
        let answer: TxnResponse = self.running.wait(members.call("/etcdserverpb.KV/Txn", request, kind))?;
        let revision = members.not_before(answer.header.as_ref(), seen)?;
        let got = answer.responses.into_iter().filter_map(|response| response.range);
        let got = got.map(|range| entries(members, range.kvs)).collect();
        Ok(TxnAnswer { succeeded: answer.succeeded, revision, got })
    }

    /// Gets a lease, and renews it until it is revoked or dropped. Calls `lost` if etcd has let it expire: its keys are
    /// then already removed.
    ///
    /// # Errors
    /// If no quorum answers in time, or etcd refuses.
    pub fn lease(&self, ttl: Duration, lost: impl FnOnce(Lost) + Send + 'static) -> Result<Lease> {
        Lease::grant(&self.running.members, ttl, lost)
    }

    /// Ends a lease whose owner is dead at once: etcd removes its keys. One that does not exist counts as ended.
    ///
    /// # Errors
    /// If no quorum answers in time. The lease may then exist until its time is over.
    pub fn revoke(&self, id: LeaseId) -> Result<()> {
        lease::revoke(&self.running, id)
    }

    /// Calls `tell` with everything below a prefix, then with each change, on a thread of its own, until the follower
    /// is dropped.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn follow(&self, prefix: &str, tell: impl FnMut(Event) + Send + 'static) -> Result<Follower> {
        Follower::start(&self.running.members, prefix, tell)
    }
}
