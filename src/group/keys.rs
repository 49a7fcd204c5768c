//! The documents of a group as keys of etcd, below the group's prefix:
//!
//! ```text
//!   members/RANK    the report of a member; removed with its lease
//!   nodes/RANK      its machine; removed with its lease
//!   leader          the membership that leads; removed with its lease
//!   plan            what all members are to do
//!   images/NUMBER   a group image
//!   cut/RANK        during a snapshot: what NCCL has started there, and whether GPU memory is restored; removed with its
//!                   lease
//! ```
//!
//! Each membership has one lease, and the same number as its lease. A report or a leader without that lease was written
//! by somebody else, or is left over: it does not count, and is replaced. It would never be removed.

use std::collections::BTreeMap;
use std::sync::Arc;

use rekindle_etcd::{Change, Compare, Entry, LeaseId, Op, Revision, State, Txn};
use rekindle_group::{Incarnation, Number, Rank, Versioned, View, Write};
use rekindle_store::JobName;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::board::Report;
use super::node::Node;

/// The prefix of the keys of all groups. The number is the version of the documents: another version has other keys, so
/// supervisors that do not understand each other never meet.
pub(crate) const PREFIX: &str = "/rekindle/1/";

/// What etcd compares with where a key has no lease, or does not exist.
const NO_LEASE: LeaseId = 0;

/// The prefix of a group's keys.
pub(crate) fn prefix(group: &JobName) -> String {
    format!("{PREFIX}{group}/")
}

/// The key of a member's report, for messages.
pub(crate) fn of_member(group: &JobName, rank: Rank) -> String {
    Key::Member(rank).below(&prefix(group))
}

/// The membership of a lease.
pub(super) fn membership(lease: LeaseId) -> Incarnation {
    Incarnation(lease.cast_unsigned())
}

/// The lease of a membership.
pub(super) fn lease(membership: Incarnation) -> LeaseId {
    membership.0.cast_signed()
}

/// A document of another writer that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("the coordinator has a document that rekindle cannot read, {key}: {source}")]
pub(super) struct Unreadable {
    key: String,
    source: serde_json::Error,
}

/// The whole state of the group, at one revision.
#[derive(Debug, Clone, Default)]
pub(super) struct Mirror {
    prefix: String,
    pub(super) view: View,
    pub(super) nodes: BTreeMap<Rank, Node>,
    pub(super) told: BTreeMap<Rank, Report>,
}

impl Mirror {
    pub(super) fn new(prefix: &str) -> Mirror {
        Mirror { prefix: prefix.to_owned(), ..Mirror::default() }
    }

    /// Replaces everything.
    pub(super) fn set(&mut self, state: State) -> Result<(), Unreadable> {
        let mut new = Mirror::new(&self.prefix);
        new.view.revision = state.revision;
        state.entries.into_iter().try_for_each(|entry| new.put(&entry))?;
        *self = new;
        Ok(())
    }

    /// All changes of one revision.
    pub(super) fn change(&mut self, revision: Revision, changes: Vec<Change>) -> Result<(), Unreadable> {
        self.view.revision = revision;
        changes.into_iter().try_for_each(|change| match change {
            Change::Put(entry) => self.put(&entry),
            Change::Deleted(key) => {
                self.remove(&key);
                Ok(())
            }
        })
    }

    fn put(&mut self, entry: &Entry) -> Result<(), Unreadable> {
        let Some(name) = entry.key.strip_prefix(&self.prefix) else { return Ok(()) };
        match Key::of(name) {
            Some(Key::Member(_) | Key::Leader) if entry.lease.is_none() => self.remove(&entry.key),
            Some(Key::Member(rank)) => {
                let report: rekindle_group::Report = read(entry)?;
                match is_of(entry, report.incarnation) {
                    true => drop(self.view.members.insert(rank, Arc::new(report))),
                    false => self.remove(&entry.key),
                }
            }
            Some(Key::Node(rank)) => drop(self.nodes.insert(rank, read(entry)?)),
            Some(Key::Cut(rank)) => drop(self.told.insert(rank, read(entry)?)),
            Some(Key::Leader) => self.view.leader = Some(read(entry)?).filter(|leader| is_of(entry, *leader)),
            Some(Key::Plan) => self.view.plan = Some(Arc::new(versioned(entry)?)),
            Some(Key::Image(number)) => drop(self.view.images.insert(number, Arc::new(versioned(entry)?))),
            None => {}
        }
        Ok(())
    }

    fn remove(&mut self, key: &str) {
        match key.strip_prefix(&self.prefix).and_then(Key::of) {
            Some(Key::Member(rank)) => drop(self.view.members.remove(&rank)),
            Some(Key::Node(rank)) => drop(self.nodes.remove(&rank)),
            Some(Key::Cut(rank)) => drop(self.told.remove(&rank)),
            Some(Key::Leader) => self.view.leader = None,
            Some(Key::Plan) => self.view.plan = None,
            Some(Key::Image(number)) => drop(self.view.images.remove(&number)),
            None => {}
        }
    }
}

/// The kind of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Key {
    Member(Rank),
    Node(Rank),
    Cut(Rank),
    Leader,
    Plan,
    Image(Number),
}

impl Key {
    fn of(name: &str) -> Option<Key> {
        match name.split_once('/') {
            None if name == "leader" => Some(Key::Leader),
            None if name == "plan" => Some(Key::Plan),
            Some(("members", rank)) => rank.parse().ok().map(|rank| Key::Member(Rank(rank))),
            Some(("nodes", rank)) => rank.parse().ok().map(|rank| Key::Node(Rank(rank))),
            Some(("cut", rank)) => rank.parse().ok().map(|rank| Key::Cut(Rank(rank))),
            Some(("images", number)) => number.parse().ok().map(|number| Key::Image(Number(number))),
            _ => None,
        }
    }

    fn below(self, prefix: &str) -> String {
        match self {
            Key::Member(Rank(rank)) => format!("{prefix}members/{rank}"),
            Key::Node(Rank(rank)) => format!("{prefix}nodes/{rank}"),
            Key::Cut(Rank(rank)) => format!("{prefix}cut/{rank}"),
            Key::Leader => format!("{prefix}leader"),
            Key::Plan => format!("{prefix}plan"),
            Key::Image(Number(number)) => format!("{prefix}images/{number}"),
        }
    }
}

/// Whether the entry belongs to the lease of this membership.
fn is_of(entry: &Entry, membership: Incarnation) -> bool {
    entry.lease == Some(lease(membership))
}

fn read<T: DeserializeOwned>(entry: &Entry) -> Result<T, Unreadable> {
    serde_json::from_slice(&entry.value).map_err(|source| Unreadable { key: entry.key.clone(), source })
}

fn versioned<T: DeserializeOwned>(entry: &Entry) -> Result<Versioned<T>, Unreadable> {
    Ok(Versioned { value: read(entry)?, revision: entry.modified })
}

/// Who writes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Writer<'a> {
    pub(super) prefix: &'a str,
    pub(super) rank: Rank,
    pub(super) node: &'a Node,
    pub(super) lease: LeaseId,
}

impl Writer<'_> {
    /// The transaction of a write, with its condition.
    pub(super) fn transaction(self, write: &Write) -> Result<Txn, serde_json::Error> {
        let key = |key: Key| key.below(self.prefix);
        let (member, leader) = (key(Key::Member(self.rank)), key(Key::Leader));
        let leads = || Compare::Lease(leader.clone(), self.lease);
        Ok(match write {
            // There is none, or one without a lease, which no supervisor has written.
            Write::Join(report) => Txn::when([Compare::Lease(member.clone(), NO_LEASE)])
                .then([self.mine(member, report)?, self.mine(key(Key::Node(self.rank)), self.node)?]),
            Write::Report(report) => {
                Txn::when([Compare::Lease(member.clone(), self.lease)]).then([self.mine(member, report)?])
            }
            Write::Lead(_) => Txn::when([Compare::Lease(leader.clone(), NO_LEASE)])
                .then([self.mine(leader, &membership(self.lease))?]),
            Write::Plan { plan, was, image } => {
                let of_image = image.as_ref().map(|(number, image)| kept(key(Key::Image(*number)), image));
                let plan_key = key(Key::Plan);
                Txn::when([leads(), is_still(plan_key.clone(), *was)])
                    .then([kept(plan_key, plan)?])
                    .then(of_image.transpose()?)
            }
            Write::Record { number, image, was } => {
                let image_key = key(Key::Image(*number));
                Txn::when([leads(), is_still(image_key.clone(), *was)]).then([kept(image_key, image)?])
            }
            Write::Remove { number, was, plan } => {
                let (image_key, plan_key) = (key(Key::Image(*number)), key(Key::Plan));
                Txn::when([
                    leads(),
                    is_still(image_key.clone(), Some(*was)),
                    is_still(plan_key.clone(), Some(plan.revision)),
                ])
                .then([Op::Delete(image_key), kept(plan_key, &plan.value)?])
            }
        })
    }

    /// The transaction that tells the other machines how far the snapshot is here.
    pub(super) fn tell(self, bytes: Vec<u8>) -> Txn {
        let key = |key: Key| key.below(self.prefix);
        let told = Op::Put { key: key(Key::Cut(self.rank)), value: bytes, lease: Some(self.lease) };
        Txn::when([Compare::Lease(key(Key::Member(self.rank)), self.lease)]).then([told])
    }

    /// Writes a key that is removed with the lease.
    fn mine(self, key: String, value: &impl Serialize) -> Result<Op, serde_json::Error> {
        Ok(Op::Put { key, value: serde_json::to_vec(value)?, lease: Some(self.lease) })
    }
}

/// Writes a key without a lease.
fn kept(key: String, value: &impl Serialize) -> Result<Op, serde_json::Error> {
    Ok(Op::Put { key, value: serde_json::to_vec(value)?, lease: None })
}

fn is_still(key: String, was: Option<Revision>) -> Compare {
    match was {
        Some(revision) => Compare::Modified(key, revision),
        None => Compare::Absent(key),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_group::{Epoch, Report};

    const PREFIX: &str = "/rekindle/1/bert/";

    fn entry(name: &str, value: &str, modified: Revision) -> Entry {
        let key = format!("{PREFIX}{name}");
        let lease = (name == "leader" || name.starts_with("members")).then_some(7);
        Entry { key, value: value.into(), created: 1, modified, lease }
    }

    fn report() -> Report {
        Report {
            incarnation: Incarnation(7),
            seen: 0,
            epoch: Epoch(0),
            state: rekindle_group::State::Idle,
            parts: BTreeMap::new(),
            storing: false,
            costs: rekindle_group::Costs::default(),
            done: false,
            asked: None,
            fresh: rekindle_group::Fresh::No,
            floor: Number(0),
            rests: false,
            rewound: None,
            begun: false,
        }
    }

    #[test]
    fn changes_lead_to_the_same_as_the_whole() {
        let text = serde_json::to_string(&report()).unwrap();
        let image = r#"{"epoch":1,"parts":{},"committed":true}"#;
        let entries = [
            entry("images/12", image, 4),
            entry("leader", "7", 3),
            entry("members/3", &text, 2),
            entry("of-a-newer-version", "?", 2),
        ];
        let mut whole = Mirror::new(PREFIX);
        whole.set(State { revision: 5, entries: entries.to_vec() }).unwrap();
        assert_eq!(whole.view.leader, Some(Incarnation(7)));
        assert_eq!(*whole.view.members[&Rank(3)], report());
        assert_eq!(whole.view.images[&Number(12)].revision, 4);

        let mut changed = Mirror::new(PREFIX);
        changed.change(4, vec![Change::Put(entry("plan", "null", 4))]).unwrap_err();
        changed.change(4, entries.map(Change::Put).to_vec()).unwrap();
        changed.change(5, vec![]).unwrap();
        assert_eq!(changed.view, whole.view);
        let gone = ["leader", "members/3", "images/12"].map(|name| Change::Deleted(format!("{PREFIX}{name}")));
        changed.change(6, gone.to_vec()).unwrap();
        assert_eq!(changed.view, View { revision: 6, ..View::default() });
    }

    #[test]
    fn a_report_without_its_lease_does_not_count() {
        let text = serde_json::to_string(&report()).unwrap();
        let own = [entry("members/3", &text, 2), entry("leader", "7", 3)];
        for lease in [None, Some(8)] {
            let mut mirror = Mirror::new(PREFIX);
            mirror.set(State { revision: 3, entries: own.to_vec() }).unwrap();
            assert!(mirror.view.leader.is_some() && mirror.view.members.len() == 1);
            let others = own.clone().map(|entry| Change::Put(Entry { lease, ..entry }));
            mirror.change(4, others.to_vec()).unwrap();
            assert_eq!(mirror.view, View { revision: 4, ..View::default() });
        }
        // Text that is no report, for example.
        Mirror::new(PREFIX).change(4, vec![Change::Put(Entry { lease: None, ..entry("members/3", "?", 4) })]).unwrap();
    }

    #[test]
    fn a_document_that_cannot_be_read_is_named() {
        let state = State { revision: 1, entries: vec![entry("members/3", r#"{"incarnation":7}"#, 1)] };
        let text = Mirror::new(PREFIX).set(state).unwrap_err().to_string();
        assert!(text.contains("/rekindle/1/bert/members/3"), "{text}");
    }
}
