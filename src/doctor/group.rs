//! Requirements of a job over several machines: its coordinator and its network.

use std::error::Error as _;

use super::Check;
use crate::config::{Config, Coordinator, Group, GroupNetwork};
use crate::group;
use rekindle_base::chain;
use rekindle_engine::launch::group as network;
use rekindle_etcd as etcd;

/// What was not asked is None, as for a job on one machine.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) coordinator: Option<Result<etcd::Facts, etcd::Error>>,
    pub(super) network: Option<Result<(), network::Error>>,
}

pub(super) fn gather(config: &Config) -> Facts {
    let of = &config.group;
    let coordinator = match &of.coordinator {
        // The etcd of rank 0 is not there before the run.
        Coordinator::Local(_) => None,
        Coordinator::Members(members) if of.is_on() && !members.is_empty() => {
            Some(etcd::check(&etcd::Options { prefix: prefix(config), ..of.etcd(members) }))
        }
        Coordinator::Members(_) => None,
    };
    let network = match of.network {
        GroupNetwork::Vxlan(port) if of.is_on() => Some(network::check_machine(port)),
        _ => None,
    };
    Facts { coordinator, network }
}

/// Of the keys of the group, because the user of etcd may have no right to others.
fn prefix(config: &Config) -> String {
    let name = config.job.name.as_ref().and_then(|name| name.parse().ok());
    name.map_or_else(|| group::PREFIX.to_owned(), |name| group::prefix(&name))
}

pub(super) fn judge(facts: &Facts, of: &Group) -> Vec<Check> {
    let coordinator = facts.coordinator.as_ref().map(judge_coordinator);
    let network = facts.network.as_ref().map(|network| judge_network(network, of));
    coordinator.into_iter().chain(network).collect()
}

/// What an error says, and the advice in its last sentence.
fn parted(error: &str, otherwise: &str) -> (String, String) {
    match error.rsplit_once(". ") {
        Some((what, advice)) => {
            let (first, rest) = advice.split_at(advice.chars().next().map_or(0, char::len_utf8));
            (what.to_owned(), first.to_lowercase() + rest)
        }
        None => (error.to_owned(), otherwise.to_owned()),
    }
}

fn judge_coordinator(answer: &Result<etcd::Facts, etcd::Error>) -> Check {
    let name = "group.coordinator";
    let facts = match answer {
        Ok(facts) => facts,
        Err(error) => {
            let (what, fix) = parted(&chain(error), "check group.coordinator, and `etcdctl endpoint health`");
            return match error {
                // It may have the right to the keys of other groups.
                etcd::Error::Denied { .. } => Check::warn(name, what, fix),
                _ => Check::missing(name, what, fix),
            };
        }
    };
    let alarms = facts.members.iter().filter_map(|member| member.state.as_ref().ok()).flat_map(|state| &state.alarms);
    let alarms: Vec<&str> = alarms.map(String::as_str).collect();
    let away: Vec<String> = facts
        .members
        .iter()
        .filter_map(|member| Some(format!("{} ({})", member.endpoint, member.state.as_ref().err()?)))
        .collect();
    let write = format!("a write takes {} ms", facts.write.as_millis());
    if !alarms.is_empty() {
        let fix = "see `etcdctl alarm list`: compact and defragment etcd, then run `etcdctl alarm disarm`";
        return Check::warn(name, format!("etcd reports {}", alarms.join(", ")), fix);
    }
    if !away.is_empty() {
        let fix = "start these members of etcd, or take them out of group.coordinator";
        return Check::warn(name, format!("no answer from {}", away.join(", ")), fix);
    }
    if facts.is_slow() {
        let fix = "give etcd a disk that syncs within 10 ms: on a slow one, leases of machines that work can expire";
        return Check::warn(name, format!("etcd is slow: {write}"), fix);
    }
    if facts.may_end_leases_early() {
        let found = format!(
            "etcd works, {write}. Its version may end leases too early (etcd#15247): rekindle waits longer after a machine \
             is lost"
        );
        return Check::warn(name, found, "install etcd 3.4.31, 3.5.13 or newer");
    }
    let size = facts.size.unwrap_or(facts.members.len());
    let members = if size == 1 { "1 member".to_owned() } else { format!("{size} members") };
    Check::ok(name, format!("etcd with {members} works, {write}"))
}

fn judge_network(answer: &Result<(), network::Error>, of: &Group) -> Check {
    let name = "group.network";
    match answer {
        Ok(()) => Check::ok(
            name,
            format!("VXLAN and macvlan can be made, and the UDP port of group.network = \"{}\" is free", of.network),
        ),
        Err(error @ network::Error::Port(_)) => {
            let fix = "set group.network = \"vxlan:PORT\" with another port on all machines, if it is not the port of another group that runs here";
            Check::warn(name, error.to_string(), fix)
        }
        // These end with the advice.
        Err(error @ (network::Error::Right | network::Error::Kind(_))) if error.source().is_none() => {
            let text = error.to_string();
            let (what, fix) = text.rsplit_once(": ").unwrap_or((&text, "run rekindle as root"));
            Check::missing(name, what, fix)
        }
        Err(error) => Check::missing(name, chain(error), "run rekindle as root, and see the kernel's log (dmesg)"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::doctor::State;

    fn member(version: &str, alarms: &[&str]) -> etcd::MemberFacts {
        let state = etcd::MemberState {
            version: version.into(),
            leads: true,
            has_leader: true,
            size: 1,
            alarms: alarms.iter().map(|alarm| (*alarm).to_owned()).collect(),
        };
        etcd::MemberFacts { endpoint: "http://a:2379".into(), state: Ok(state) }
    }

    fn judged(members: Vec<etcd::MemberFacts>, write_ms: u64) -> Check {
        let size = Some(members.len());
        judge_coordinator(&Ok(etcd::Facts { members, size, write: Duration::from_millis(write_ms) }))
    }

    #[test]
    fn a_job_on_one_machine_needs_neither() {
        let config = Config::default();
        assert!(judge(&gather(&config), &config.group).is_empty());
    }

    #[test]
    fn an_etcd_that_works_is_told_from_one_that_will_not_for_long() {
        let check = judged(vec![member("3.5.13", &[])], 3);
        assert_eq!((check.state, check.found.as_str()), (State::Ok, "etcd with 1 member works, a write takes 3 ms"));
        let away = etcd::MemberFacts { endpoint: "http://b:2379".into(), state: Err("connection refused".into()) };
        for (members, write, found) in [
            (vec![member("3.5.13", &["alarm:NOSPACE "])], 3, "etcd reports alarm:NOSPACE "),
            (vec![member("3.5.13", &[]), away], 3, "no answer from http://b:2379 (connection refused)"),
            (vec![member("3.5.13", &[])], 101, "etcd is slow: a write takes 101 ms"),
            (vec![member("3.4.23", &[]), member("3.4.23", &[])], 3, "may end leases too early"),
        ] {
            let check = judged(members, write);
            assert!(check.state == State::Warn && check.found.contains(found), "{check:?}");
            assert!(check.fix.is_some());
        }
    }

    #[test]
    fn what_cannot_be_used_is_missing_with_advice() {
        let tried = "http://a:2379: connection refused".to_owned();
        let check = judge_coordinator(&Err(etcd::Error::NoQuorum { tried }));
        assert_eq!(check.state, State::Missing);
        assert_eq!(check.found, "etcd has no quorum (http://a:2379: connection refused)");
        assert_eq!(check.fix.as_deref(), Some("start its missing members, or repair the network between them"));
        let of = Group::default();
        let check = judge_network(&Err(network::Error::Kind("vxlan")), &of);
        assert_eq!((check.state, check.fix.as_deref()), (State::Missing, Some("run `modprobe vxlan`")));
        assert_eq!(judge_network(&Err(network::Error::Port(4789)), &of).state, State::Warn);
        assert_eq!(judge_network(&Ok(()), &of).state, State::Ok);
    }
}
