//! Checks of an etcd before it is used.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::client::Client;
use crate::error::Result;
use crate::members::{Kind, Members, Refusal, numbers};
use crate::messages::{MemberListRequest, MemberListResponse};
use crate::options::Options;
use crate::read::probe;
use crate::runtime::Running;
use crate::txn::{Op, Txn};

/// How many writes are timed.
const WRITES: usize = 5;

/// A write that takes longer is slow: etcd needs a disk that syncs within 10 ms, and an equally fast network. Otherwise
/// leases and elections fail first.
pub const SLOW: Duration = Duration::from_millis(100);

/// An etcd that works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// The given addresses, in their order.
    pub members: Vec<MemberFacts>,
    /// Number of members of the cluster. None if the user has no right to ask.
    pub size: Option<usize>,
    /// The median time of a few writes. A quorum has synced each of them to disk.
    pub write: Duration,
}

/// One of the given addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberFacts {
    /// The address.
    pub endpoint: String,
    /// Its answer, or why it does not answer.
    pub state: std::result::Result<MemberState, String>,
}

/// A member that answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberState {
    /// The version of etcd.
    pub version: String,
    /// Whether it leads.
    pub leads: bool,
    /// Whether it knows a leader.
    pub has_leader: bool,
    /// The size of its database in bytes.
    pub size: u64,
    /// Its alarms, as etcd writes them.
    pub alarms: Vec<String>,
}

impl Facts {
    /// Whether a write takes too long.
    #[must_use]
    pub fn is_slow(&self) -> bool {
        self.write > SLOW
    }

    /// Whether a leader that hung may end leases that others have renewed meanwhile (etcd#15247). This affects etcd
    /// before 3.4.31, and 3.5 before 3.5.13, with more than one member.
    #[must_use]
    pub fn may_end_leases_early(&self) -> bool {
        let states = self.members.iter().filter_map(|member| member.state.as_ref().ok());
        self.size.unwrap_or(self.members.len()) > 1 && states.into_iter().any(|state| ends_leases_early(&state.version))
    }

    /// The addresses that do not answer.
    pub fn away(&self) -> impl Iterator<Item = &MemberFacts> {
        self.members.iter().filter(|member| member.state.is_err())
    }
}

fn ends_leases_early(version: &str) -> bool {
    match numbers(version) {
        version @ (3, 5, _) => version < (3, 5, 13),
        version => version < (3, 4, 31),
    }
}

/// Connects as [`Client::connect`] does, asks each of the given addresses, writes a key below the prefix, and removes
/// it.
///
/// # Errors
/// The reason why etcd cannot be used.
pub fn check(options: &Options) -> Result<Facts> {
    let client = Client::connect(options)?;
    let running = Running::start("etcd-check", options, Arc::default())?;
    let asked = async {
        probe(&running.members).await?;
        Ok(ask(&running.members).await)
    };
    let (members, size) = running.wait(asked)?;
    // No other process has this key, and its value has no meaning: no condition is needed.
    let unique = rekindle_os::clock::since_boot().as_nanos();
    let key = options.hidden(&format!("check/{:x}-{unique:x}", std::process::id()));
    let mut times = Vec::new();
    for _ in 0..WRITES {
        let before = Instant::now();
        let op = Op::Put { key: key.clone(), value: b"rekindle doctor".into(), lease: None };
        client.txn(Txn::default().then([op]))?;
        times.push(before.elapsed());
    }
    client.txn(Txn::default().then([Op::Delete(key)]))?;
    times.sort_unstable();
    let write = times.get(WRITES / 2).copied().unwrap_or_default();
    Ok(Facts { members, size, write })
}

/// Asks whether this etcd is one of those that may end leases early ([`Facts::may_end_leases_early`]). Writes nothing.
///
/// # Errors
/// If no member answers.
pub fn may_end_leases_early(options: &Options) -> Result<bool> {
    Client::connect(options)?;
    let running = Running::start("etcd-check", options, Arc::default())?;
    let (members, size) = running.wait(async { Ok(ask(&running.members).await) })?;
    Ok(Facts { members, size, write: Duration::ZERO }.may_end_leases_early())
}

/// Asks each of the given addresses, and for the number of members.
async fn ask(of: &Members) -> (Vec<MemberFacts>, Option<usize>) {
    let mut members = Vec::new();
    for n in 0..of.count() {
        let state = look(of, n).await;
        members.push(MemberFacts { endpoint: of.address(n).to_owned(), state });
    }
    let list = of.call("/etcdserverpb.Cluster/MemberList", MemberListRequest {}, Kind::Repeatable).await;
    (members, list.ok().map(|list: MemberListResponse| list.members.len()))
}

async fn look(members: &Members, member: usize) -> std::result::Result<MemberState, String> {
    let status = match members.look(member).await {
        Ok((_, status)) => status,
        Err(Refusal::Member(why)) => return Err(why),
        Err(Refusal::All(error)) => return Err(error.to_string()),
    };
    let id = status.header.as_ref().map_or(0, |header| header.member_id);
    Ok(MemberState {
        version: status.version,
        leads: id != 0 && status.leader == id,
        has_leader: status.leader != 0,
        size: u64::try_from(status.size).unwrap_or(0),
        alarms: status
            .errors
            .into_iter()
            .filter(|error| error.contains("alarm:"))
            .map(|it| it.trim().to_owned())
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_versions_end_leases_early() {
        for (version, early) in [
            ("3.4.23", true),
            ("3.4.30", true),
            ("3.4.31", false),
            ("3.5.0-rc.1", true),
            ("3.5.12", true),
            ("3.5.13", false),
            ("3.6.0", false),
        ] {
            assert_eq!(ends_leases_early(version), early, "{version}");
        }
    }
}
