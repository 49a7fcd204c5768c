//! Reads of the prefix.

use crate::error::Result;
use crate::members::{Kind, Members};
use crate::messages::{KeyValue, RangeRequest, RangeResponse};
use crate::txn::{Entry, State, range, range_end};

/// Checks that a quorum can read the prefix, and that etcd has not lost newer data.
pub(crate) async fn probe(members: &Members) -> Result<()> {
    let seen = members.seen();
    let prefix = &members.options.prefix;
    let request = RangeRequest { count_only: true, key: prefix.as_str().into(), range_end: range_end(prefix) };
    let answer: RangeResponse = members.call("/etcdserverpb.KV/Range", request, Kind::Repeatable).await?;
    members.not_before(answer.header.as_ref(), seen)?;
    Ok(())
}

/// Everything below a prefix.
pub(crate) async fn state(members: &Members, prefix: &str) -> Result<State> {
    let seen = members.seen();
    let answer: RangeResponse = members.call("/etcdserverpb.KV/Range", range(prefix), Kind::Repeatable).await?;
    let revision = members.not_before(answer.header.as_ref(), seen)?;
    Ok(State { revision, entries: entries(members, answer.kvs) })
}

/// The entries without this crate's own keys.
pub(crate) fn entries(members: &Members, kvs: Vec<KeyValue>) -> Vec<Entry> {
    kvs.into_iter().filter(|kv| !members.options.is_hidden(&kv.key)).map(Into::into).collect()
}
