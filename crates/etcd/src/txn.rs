//! Entries and transactions, and their encoding in etcd's protocol.

use crate::members::unsigned;
use crate::messages::{
    self, CompareResult, CompareTarget, DeleteRangeRequest, KeyValue, PutRequest, RangeRequest, Request, RequestOp,
    Target, TxnRequest,
};
use crate::{LeaseId, Revision};

/// A key with its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// The value.
    pub value: Vec<u8>,
    /// When the key was created. If it changes, the key was removed and created again.
    pub created: Revision,
    /// When it was last written.
    pub modified: Revision,
    /// The lease that it belongs to.
    pub lease: Option<LeaseId>,
}

/// What is stored below a prefix, at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// The revision of this state.
    pub revision: Revision,
    /// Ordered by key.
    pub entries: Vec<Entry>,
}

/// A condition of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Compare {
    /// There is no such key.
    Absent(String),
    /// There is such a key.
    Present(String),
    /// The key was created in this revision, and has not been removed since.
    Created(String, Revision),
    /// The key was last written in this revision.
    Modified(String, Revision),
    /// The key has this value.
    Value(String, Vec<u8>),
    /// The key belongs to this lease.
    Lease(String, LeaseId),
}

/// A part of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Writes a key.
    Put {
        /// The key.
        key: String,
        /// The value.
        value: Vec<u8>,
        /// Removes the key when this lease ends. Without a lease the key belongs to none, even if it did before.
        lease: Option<LeaseId>,
    },
    /// Removes a key. A missing key is not an error.
    Delete(String),
    /// Removes all keys with this prefix.
    DeletePrefix(String),
    /// Reads a key.
    Get(String),
    /// Reads all keys with this prefix.
    GetPrefix(String),
}

/// A transaction: all of `then` if all conditions hold, else all of `otherwise`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Txn {
    /// The conditions.
    pub compares: Vec<Compare>,
    /// The operations if all of them hold.
    pub then: Vec<Op>,
    /// The operations if one does not hold.
    pub otherwise: Vec<Op>,
}

impl Txn {
    /// A transaction with these conditions, which does nothing.
    #[must_use]
    pub fn when(compares: impl IntoIterator<Item = Compare>) -> Txn {
        Txn { compares: compares.into_iter().collect(), ..Txn::default() }
    }

    /// Adds an operation for the case that all conditions hold.
    #[must_use]
    pub fn then(mut self, ops: impl IntoIterator<Item = Op>) -> Txn {
        self.then.extend(ops);
        self
    }

    /// Adds an operation for the case that one does not hold.
    #[must_use]
    pub fn otherwise(mut self, ops: impl IntoIterator<Item = Op>) -> Txn {
        self.otherwise.extend(ops);
        self
    }

    /// Whether it changes nothing, so that it may be done twice.
    pub(crate) fn only_reads(&self) -> bool {
        self.then.iter().chain(&self.otherwise).all(|op| matches!(op, Op::Get(_) | Op::GetPrefix(_)))
    }
}

/// The result of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TxnAnswer {
    /// Whether the conditions held.
    pub succeeded: bool,
    /// The revision after it. If it wrote something, the written keys were modified in this revision.
    pub revision: Revision,
    /// The answers to [`Op::Get`] and [`Op::GetPrefix`], in their order.
    pub got: Vec<Vec<Entry>>,
}

/// The end of the range of all keys with this prefix.
pub(crate) fn range_end(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    // All keys from the prefix on.
    vec![0]
}

pub(crate) fn range(prefix: &str) -> RangeRequest {
    RangeRequest { key: prefix.into(), range_end: range_end(prefix), count_only: false }
}

impl From<KeyValue> for Entry {
    fn from(kv: KeyValue) -> Entry {
        Entry {
            // Nobody else writes below the prefix, and our keys are text.
            key: text(kv.key),
            value: kv.value,
            created: unsigned(kv.create_revision),
            modified: unsigned(kv.mod_revision),
            lease: (kv.lease != 0).then_some(kv.lease),
        }
    }
}

pub(crate) fn text(key: Vec<u8>) -> String {
    String::from_utf8(key).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

impl From<Compare> for messages::Compare {
    fn from(compare: Compare) -> messages::Compare {
        use CompareResult::{Equal, Greater};
        let signed = |revision: Revision| i64::try_from(revision).unwrap_or(i64::MAX);
        let (key, result, target, against) = match compare {
            Compare::Absent(key) => (key, Equal, CompareTarget::Create, Target::Create(0)),
            Compare::Present(key) => (key, Greater, CompareTarget::Create, Target::Create(0)),
            Compare::Created(key, revision) => (key, Equal, CompareTarget::Create, Target::Create(signed(revision))),
            Compare::Modified(key, revision) => (key, Equal, CompareTarget::Mod, Target::Mod(signed(revision))),
            Compare::Value(key, value) => (key, Equal, CompareTarget::Value, Target::Value(value)),
            Compare::Lease(key, lease) => (key, Equal, CompareTarget::Lease, Target::Lease(lease)),
        };
        messages::Compare { result: result.into(), target: target.into(), key: key.into(), against: Some(against) }
    }
}

impl From<Op> for RequestOp {
    fn from(op: Op) -> RequestOp {
        let request = match op {
            Op::Put { key, value, lease } => {
                Request::Put(PutRequest { key: key.into(), value, lease: lease.unwrap_or(0) })
            }
            Op::Delete(key) => Request::Delete(DeleteRangeRequest { key: key.into(), range_end: Vec::new() }),
            Op::DeletePrefix(prefix) => {
                let range_end = range_end(&prefix);
                Request::Delete(DeleteRangeRequest { key: prefix.into(), range_end })
            }
            Op::Get(key) => Request::Range(RangeRequest { key: key.into(), range_end: Vec::new(), count_only: false }),
            Op::GetPrefix(prefix) => Request::Range(range(&prefix)),
        };
        RequestOp { request: Some(request) }
    }
}

impl From<Txn> for TxnRequest {
    fn from(txn: Txn) -> TxnRequest {
        TxnRequest {
            compare: txn.compares.into_iter().map(Into::into).collect(),
            success: txn.then.into_iter().map(Into::into).collect(),
            failure: txn.otherwise.into_iter().map(Into::into).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_ends_after_the_last_key_with_the_prefix() {
        assert_eq!(range_end("a/"), b"a0");
        assert_eq!(range_end("a"), b"b");
        assert_eq!(range_end(""), [0]);
        let end = range_end("\u{7f}");
        assert!(end.as_slice() > "\u{7f}\u{10ffff}".as_bytes());
    }
}
