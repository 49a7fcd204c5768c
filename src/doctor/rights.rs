//! The rights of this process, which `run` would have too.

use super::{Check, trial};
use rekindle_os::{process, rights};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) euid: u32,
    /// Effective capabilities as a bit set (capabilities(7)); `None` if /proc does not show them.
    pub(super) capabilities: Option<u64>,
    pub(super) seccomp: Seccomp,
    /// Whether user 0 here is user 0 of the machine.
    pub(super) root_is_real: bool,
    /// `kernel.yama.ptrace_scope`; none without that security module.
    pub(super) ptrace_scope: Option<u32>,
}

/// A seccomp filter on this process, which all its children inherit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seccomp {
    None,
    Filtered,
}

pub(super) fn gather() -> Facts {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let scope = read("/proc/sys/kernel/yama/ptrace_scope").trim().parse().ok();
    Facts {
        euid: nix::unistd::geteuid().as_raw(),
        capabilities: rights::effective(),
        seccomp: match process::status("self", "Seccomp").as_deref() {
            None | Some("0") => Seccomp::None,
            Some(_) => Seccomp::Filtered,
        },
        root_is_real: rights::over_the_machine(),
        ptrace_scope: scope,
    }
}

/// Name and bit (linux/capability.h).
type Capability = (&'static str, u32);

/// Tried one by one with CRIU 4.2.1: without any of these no job is restored in its own namespaces. CRIU drops the
/// third in tasks that have fewer rights than itself, entering a mount namespace needs the fourth, and the last is for
/// the clock offsets in a time namespace, which no container has by default (CRIU 4.2.1: "Unable to set a monotonic
/// clock offset").
const ESSENTIAL: [Capability; 5] =
    [("CAP_SYS_ADMIN", 21), ("CAP_NET_ADMIN", 12), ("CAP_SETPCAP", 8), ("CAP_SYS_CHROOT", 18), ("CAP_SYS_TIME", 25)];
/// Without these, jobs of other users fail: their files, their ids, their memory.
const USEFUL: [Capability; 8] = [
    ("CAP_SYS_PTRACE", 19),
    ("CAP_CHOWN", 0),
    ("CAP_DAC_OVERRIDE", 1),
    // The plugin reads an image with it while CRIU has the rights of the job's user (native/plugin/src/rights.rs).
    ("CAP_DAC_READ_SEARCH", 2),
    ("CAP_FOWNER", 3),
    ("CAP_KILL", 5),
    ("CAP_SETGID", 6),
    ("CAP_SETUID", 7),
];
/// Nothing fails without these: CAP_SYS_ADMIN includes the first, and without the second pipes are smaller
/// (`memory.pipes`).
const INFORMATIONAL: [Capability; 2] = [("CAP_CHECKPOINT_RESTORE", 40), ("CAP_SYS_RESOURCE", 24)];

pub(super) fn judge(facts: &Facts, trial: &trial::Outcome) -> Vec<Check> {
    let mut checks = vec![user(facts), capabilities(facts, trial), seccomp(facts, trial)];
    checks.extend(ptrace(facts, trial));
    checks
}

fn user(facts: &Facts) -> Check {
    let name = "rights.user";
    match (facts.euid, facts.root_is_real) {
        (0, true) => Check::ok(name, "root"),
        (0, false) => Check::warn(
            name,
            "root of a user namespace (a rootless container), not of the machine: CRIU cannot work fully",
            "run it as root of the machine, or in a container that is not rootless",
        ),
        (uid, _) => Check::missing(
            name,
            format!("user {uid}; namespaces, CRIU and the CUDA checkpoint need root"),
            "run it with sudo, and set job.user to run the job as a user",
        ),
    }
}

fn capabilities(facts: &Facts, trial: &trial::Outcome) -> Check {
    let name = "rights.capabilities";
    let Some(bits) = facts.capabilities else {
        return Check::not_here(name, "unknown: /proc/self/status does not show them");
    };
    if facts.euid != 0 {
        return Check::not_here(name, "checked only for root");
    }
    let lacking = |wanted: &[Capability]| -> Vec<&'static str> {
        wanted.iter().filter(|(_, bit)| bits >> bit & 1 == 0).map(|(name, _)| *name).collect()
    };
    let (essential, useful, rest) = (lacking(&ESSENTIAL), lacking(&USEFUL), lacking(&INFORMATIONAL));
    let note = match rest.as_slice() {
        [] => String::new(),
        rest => format!(" ({} missing, not needed)", rest.join(" and ")),
    };
    let fix = |names: &[&str]| {
        let options: Vec<String> =
            names.iter().map(|n| format!("--cap-add={}", n.trim_start_matches("CAP_"))).collect();
        format!("run as root with all capabilities (Docker: --privileged, or {})", options.join(" "))
    };
    if !essential.is_empty() {
        let all = [essential, useful].concat();
        return Check::needed(name, trial, format!("without {}", all.join(", ")), fix(&all));
    }
    if !useful.is_empty() {
        let found = format!("without {}: jobs of users other than root cannot be restored{note}", useful.join(", "));
        return Check::warn(name, found, fix(&useful));
    }
    Check::ok(name, format!("all that CRIU needs{note}"))
}

fn seccomp(facts: &Facts, trial: &trial::Outcome) -> Check {
    let name = "rights.seccomp";
    match facts.seccomp {
        Seccomp::None => Check::ok(name, "no filter"),
        Seccomp::Filtered => Check::needed(
            name,
            trial,
            "this process has a seccomp filter: CRIU cannot suspend it, and the job inherits it",
            "start rekindle without one (Docker: --security-opt seccomp=unconfined; systemd: no SystemCallFilter=)",
        ),
    }
}

/// The value 3 forbids tracing for everybody, including root, until the next boot
/// (Documentation/admin-guide/LSM/Yama.rst).
fn ptrace(facts: &Facts, trial: &trial::Outcome) -> Option<Check> {
    let fix = "remove kernel.yama.ptrace_scope=3 from /etc/sysctl.d and reboot: it cannot be changed back at run time";
    (facts.ptrace_scope == Some(3))
        .then(|| Check::needed("rights.ptrace", trial, "kernel.yama.ptrace_scope = 3: no process can be traced", fix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    fn root() -> Facts {
        Facts {
            euid: 0,
            capabilities: Some(0x1ff_ffff_ffff),
            seccomp: Seccomp::None,
            root_is_real: true,
            ptrace_scope: Some(1),
        }
    }

    fn untried() -> trial::Outcome {
        trial::Outcome::NotTried("no criu".into())
    }

    fn find(facts: &Facts, trial: &trial::Outcome, name: &str) -> Check {
        judge(facts, trial).into_iter().find(|c| c.check == name).unwrap()
    }

    #[test]
    fn real_root_has_all_it_needs() {
        assert!(judge(&root(), &untried()).iter().all(|c| c.state == State::Ok));
        let container = Facts { capabilities: Some(0x1ff_feff_fffe), ..root() };
        let check = find(&container, &untried(), "rights.capabilities");
        assert_eq!(check.state, State::Warn, "without CAP_CHOWN jobs of other users are not restored");
        assert!(check.found.contains("CAP_CHOWN"), "{}", check.found);
    }

    #[test]
    fn another_user_can_not_run_and_root_of_a_namespace_only_perhaps() {
        let user = find(&Facts { euid: 1000, ..root() }, &untried(), "rights.user");
        assert_eq!(user.state, State::Missing);
        assert!(user.fix.unwrap().contains("sudo"));
        let rootless = find(&Facts { root_is_real: false, ..root() }, &untried(), "rights.user");
        assert_eq!(rootless.state, State::Warn);
    }

    #[test]
    fn lacking_capabilities_are_named_with_the_option_that_gives_them() {
        let docker = Facts { capabilities: Some(0xa804_25fb), ..root() };
        let check = find(&docker, &untried(), "rights.capabilities");
        assert_eq!(check.state, State::Missing);
        assert!(check.found.contains("CAP_SYS_ADMIN") && check.found.contains("CAP_NET_ADMIN"), "{}", check.found);
        assert!(check.fix.unwrap().contains("--cap-add=SYS_ADMIN"));
        assert_eq!(find(&docker, &trial::worked(), "rights.capabilities").state, State::Warn);
        let without = |bit: u32| Facts { capabilities: Some(0x1ff_ffff_ffff & !(1 << bit)), ..root() };
        for (_, bit) in ESSENTIAL {
            assert_eq!(find(&without(bit), &untried(), "rights.capabilities").state, State::Missing);
        }
        for (_, bit) in USEFUL {
            assert_eq!(find(&without(bit), &untried(), "rights.capabilities").state, State::Warn);
        }
        let other = Facts { euid: 1000, capabilities: Some(0), ..root() };
        assert_eq!(find(&other, &untried(), "rights.capabilities").state, State::NotHere);
        let unknown = Facts { capabilities: None, ..root() };
        assert_eq!(find(&unknown, &untried(), "rights.capabilities").state, State::NotHere);
    }

    #[test]
    fn a_filter_and_a_ban_on_tracing_stop_criu() {
        let facts = Facts { seccomp: Seccomp::Filtered, ptrace_scope: Some(3), ..root() };
        for name in ["rights.seccomp", "rights.ptrace"] {
            assert_eq!(find(&facts, &untried(), name).state, State::Missing);
            assert_eq!(find(&facts, &trial::worked(), name).state, State::Warn);
        }
    }
}
