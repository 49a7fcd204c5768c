//! Which boundaries of SECURITY.md this machine and configuration weaken.

use super::Check;
use crate::config::{Config, Coordinator};

#[derive(Debug, Clone)]
pub(super) struct Facts {
    /// `fs.protected_hardlinks`; `None` if it cannot be read.
    protected_hardlinks: Option<bool>,
    /// `fs.protected_symlinks`.
    protected_symlinks: Option<bool>,
    /// Whether there is swap that is not encrypted, which may contain pages of images.
    swap: bool,
    /// Core dumps of setuid programs are readable by their user (`fs.suid_dumpable` = 1).
    readable_dumps: bool,
}

pub(super) fn gather() -> Facts {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let flag = |name: &str| read(&format!("/proc/sys/fs/{name}")).map(|text| text.trim() != "0");
    Facts {
        protected_hardlinks: flag("protected_hardlinks"),
        protected_symlinks: flag("protected_symlinks"),
        swap: read("/proc/swaps").is_some_and(|text| text.lines().count() > 1),
        readable_dumps: read("/proc/sys/fs/suid_dumpable").is_some_and(|text| text.trim() == "1"),
    }
}

pub(super) fn judge(facts: &Facts, config: &Config) -> Vec<Check> {
    let always = vec![user(config), links(facts), dumps(facts), store(config), memory(facts, config)];
    always.into_iter().chain(coordinator(config)).collect()
}

fn user(config: &Config) -> Check {
    let name = "boundaries.user";
    match &config.job.user {
        Some(user) => Check::ok(name, format!("the job runs as {user}")),
        None => Check::not_here(name, "job.user is not set: the job runs as root and is not restricted"),
    }
}

fn links(facts: &Facts) -> Check {
    let name = "boundaries.links";
    let off = [("protected_hardlinks", facts.protected_hardlinks), ("protected_symlinks", facts.protected_symlinks)];
    let off: Vec<&str> = off.into_iter().filter_map(|(name, is_on)| (is_on == Some(false)).then_some(name)).collect();
    if off.is_empty() {
        return Check::ok(
            name,
            "users cannot make hard links to files of others, and symlinks in shared folders such \
            as /tmp are not followed",
        );
    }
    let settings: Vec<String> = off.iter().map(|name| format!("fs.{name}=1")).collect();
    Check::warn(
        name,
        format!(
            "fs.{} is off: a job's user can replace the job's files by links to files of others",
            off.join(" and fs.")
        ),
        format!("sudo sysctl {}   # also add it to /etc/sysctl.d", settings.join(" ")),
    )
}

fn dumps(facts: &Facts) -> Check {
    let name = "boundaries.dumps";
    if facts.readable_dumps {
        return Check::warn(
            name,
            "fs.suid_dumpable is 1: users can read the memory of processes with more rights",
            "sudo sysctl fs.suid_dumpable=0   # or 2; also add it to /etc/sysctl.d",
        );
    }
    Check::ok(name, "users cannot read the memory of processes with more rights")
}

fn store(config: &Config) -> Check {
    let name = "boundaries.store";
    match (&config.store.encryption_key, &config.replica.url) {
        (Some(_), _) => Check::ok(name, "images are signed and encrypted with store.encryption-key"),
        (None, Some(url)) => Check::warn(
            name,
            format!(
                "no store.encryption-key: whoever can write {url} can become root on each machine that restores \
                from it"
            ),
            "(umask 077; mkdir -p /etc/rekindle; head -c 32 /dev/urandom > /etc/rekindle/store.key), and set store.encryption-key to this file",
        ),
        (None, None) => Check::not_here(
            name,
            "no store.encryption-key: whoever can write the store can become root on this \
                machine",
        ),
    }
}

fn memory(facts: &Facts, config: &Config) -> Check {
    let name = "boundaries.swap";
    match (facts.swap, &config.store.encryption_key) {
        (true, Some(_)) => Check::warn(
            name,
            "there is swap: images in memory are not encrypted, and parts of them may be written to the disk",
            "encrypt the swap, or turn it off: sudo swapoff -a",
        ),
        (true, None) => Check::not_here(name, "there is swap, but images are not encrypted in any case"),
        (false, _) => Check::ok(name, "no swap: images in memory are not written to a disk"),
    }
}

/// Who can write to the coordinator of a group. A local one has keys of its own.
fn coordinator(config: &Config) -> Option<Check> {
    let name = "boundaries.coordinator";
    let group = &config.group;
    let Coordinator::Members(members) = &group.coordinator else { return None };
    if members.is_empty() {
        return None;
    }
    let fix = "use https:// addresses, and group.certificate or group.user (SECURITY.md)";
    let plain = members.iter().find(|member| member.starts_with("http://"));
    Some(match (plain, group.certificate.is_some() || group.user.is_some()) {
        (Some(member), _) => Check::warn(
            name,
            format!("no TLS to {member}: whoever can read or change packets to it can stop the jobs of the group"),
            fix,
        ),
        (None, false) => Check::warn(
            name,
            "neither group.certificate nor group.user is set: whoever can reach etcd can stop the jobs of the group, \
            unless etcd refuses them",
            fix,
        ),
        (None, true) => Check::ok(name, "the connection to etcd is encrypted, and this machine identifies itself"),
    })
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    fn facts() -> Facts {
        Facts { protected_hardlinks: Some(true), protected_symlinks: Some(true), swap: false, readable_dumps: false }
    }

    fn found(facts: &Facts, config: &Config, name: &str) -> Check {
        judge(facts, config).into_iter().find(|check| check.check == name).unwrap()
    }

    #[test]
    fn what_weakens_a_boundary_has_a_fix() {
        let mut config = Config::default();
        assert!(judge(&facts(), &config).iter().all(|check| check.state != State::Warn));
        let weak = Facts { protected_hardlinks: Some(false), swap: true, readable_dumps: true, ..facts() };
        let links = found(&weak, &config, "boundaries.links");
        assert_eq!(links.state, State::Warn);
        assert!(links.fix.unwrap().contains("fs.protected_hardlinks=1"));
        assert_eq!(found(&weak, &config, "boundaries.dumps").state, State::Warn);
        assert_eq!(found(&weak, &config, "boundaries.swap").state, State::NotHere);
        config.replica.url = Some("s3://bucket/jobs".parse().unwrap());
        let store = found(&weak, &config, "boundaries.store");
        assert!(store.state == State::Warn && store.found.contains("s3://bucket/jobs"), "{store:?}");
        let coordinator =
            |config: &Config| judge(&weak, config).into_iter().find(|check| check.check == "boundaries.coordinator");
        assert_eq!(coordinator(&config), None, "there is no group");
        config.group.coordinator = Coordinator::Members(vec!["https://a:2379".into(), "http://b:2379".into()]);
        config.group.user = Some("bert".into());
        let plain = coordinator(&config).unwrap();
        assert!(plain.state == State::Warn && plain.found.contains("http://b:2379"), "{plain:?}");
        config.group.coordinator = Coordinator::Members(vec!["https://a:2379".into()]);
        assert_eq!(coordinator(&config).unwrap().state, State::Ok);
        config.group.user = None;
        assert_eq!(coordinator(&config).unwrap().state, State::Warn);
        config.store.encryption_key = Some("/etc/rekindle/key".into());
        assert_eq!(found(&weak, &config, "boundaries.store").state, State::Ok);
        assert_eq!(found(&weak, &config, "boundaries.swap").state, State::Warn);
    }
}
