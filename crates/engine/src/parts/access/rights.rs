//! Compares the rights of a job's processes with what a launch gives them.
//!
//! CRIU takes user and group ids, capabilities, no-new-privileges and seccomp filters from the image. It takes part of
//! that (the list of groups) from memory that another process of the same user can write during a dump. So these checks
//! use what the kernel says of each thread while the tree is stopped. It does not say the securebits, which are read from the
//! image.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;

use super::{Fault, Refused};
use crate::launch::Privileges;
use crate::launch::identity::Identity;
use rekindle_os::process;
use rekindle_store::manifest::JobRights;

/// CAP_KILL (linux/capability.h), with which the reaper forwards signals.
const CAP_KILL: u64 = 1 << 5;

/// `SECCOMP_MODE_DISABLED` in /proc/PID/status.
const NO_FILTER: u32 = 0;

/// A thread's rights, from /proc/PID/status.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Rights {
    /// Real, effective, saved, of files.
    users: Vec<u32>,
    groups: Vec<u32>,
    more_groups: BTreeSet<u32>,
    inheritable: u64,
    permitted: u64,
    effective: u64,
    bounding: u64,
    ambient: u64,
    no_new_privileges: bool,
    seccomp: u32,
}

impl Rights {
    fn parse(status: &str) -> Option<Rights> {
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let numbers = |name: &str| field(name)?.split_whitespace().map(|n| n.parse::<u32>().ok()).collect();
        let bits = |name: &str| u64::from_str_radix(field(name)?.trim(), 16).ok();
        let groups: Option<Vec<u32>> = numbers("Groups");
        Some(Rights {
            users: numbers("Uid")?,
            groups: numbers("Gid")?,
            more_groups: groups?.into_iter().collect(),
            inheritable: bits("CapInh")?,
            permitted: bits("CapPrm")?,
            effective: bits("CapEff")?,
            bounding: bits("CapBnd")?,
            ambient: bits("CapAmb")?,
            no_new_privileges: field("NoNewPrivs")?.trim() == "1",
            // A kernel without CONFIG_SECCOMP has no such line.
            seccomp: field("Seccomp").map_or(Some(NO_FILTER), |mode| mode.trim().parse().ok())?,
        })
    }

    /// `None` for a thread that has ended: in a running job threads come and go.
    fn of(pid: i32, thread: i32) -> Result<Option<Rights>, Refused> {
        let unread = |source| Refused::Unread { pid, source };
        let status = match process::text(pid, &format!("task/{thread}/status")) {
            Err(error) if error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH) => {
                return Ok(None);
            }
            status => status.map_err(unread)?,
        };
        let odd = || unread(std::io::Error::other("/proc/PID/status has an unexpected form"));
        Rights::parse(&status).map(Some).ok_or_else(odd)
    }
}

/// The rights that a launch gives.
pub(crate) struct Wanted<'a> {
    pub(crate) user: Option<&'a Identity>,
    pub(crate) privileges: Privileges,
    /// The rights of the processes at the snapshot, if the image records them.
    pub(crate) then: Option<&'a JobRights>,
}

impl Wanted<'_> {
    /// The job's user, if the job must have fewer rights than root.
    fn other_user(&self) -> Option<&Identity> {
        self.user.filter(|user| user.uid != 0)
    }
}

/// Checks each thread of these processes.
pub(crate) fn check(tree: &[i32], wanted: &Wanted<'_>) -> Result<(), Refused> {
    let own = std::process::id().cast_signed();
    let own = Rights::of(own, own)?.ok_or(Refused::NoProcess)?;
    for pid in tree {
        // A process that has ended has no rights, and CRIU gives it none.
        if process::has_ended(*pid) {
            continue;
        }
        for thread in process::threads(*pid) {
            let Some(rights) = Rights::of(*pid, thread)? else { continue };
            if let Some((what, fault)) = excess(&rights, wanted, &own) {
                return Err(Refused::Rights { process: shown(*pid), what, fault });
            }
        }
    }
    Ok(())
}

/// The rights of all these processes, for the manifest.
pub(crate) fn of(tree: &[i32], user: Option<&Identity>) -> Result<JobRights, Refused> {
    let mut all: Option<JobRights> = None;
    for pid in tree.iter().filter(|pid| process::state(**pid).is_some_and(|state| !matches!(state, 'Z' | 'X'))) {
        for thread in process::threads(*pid) {
            let Some(rights) = Rights::of(*pid, thread)? else { continue };
            let so_far = all.get_or_insert_with(|| JobRights {
                uid: user.map_or_else(|| nix::unistd::geteuid().as_raw(), |user| user.uid),
                groups: rights.more_groups.iter().copied().collect(),
                no_new_privileges: true,
                filtered: true,
            });
            so_far.groups.retain(|group| rights.more_groups.contains(group));
            so_far.no_new_privileges &= rights.no_new_privileges;
            so_far.filtered &= rights.seccomp != NO_FILTER;
        }
    }
    all.ok_or(Refused::NoProcess)
}

/// What a thread has more than a launch gives, in words, and the cause.
fn excess(rights: &Rights, wanted: &Wanted<'_>, own: &Rights) -> Option<(String, Fault)> {
    let then = wanted.then;
    if let Some(user) = wanted.other_user() {
        let Identity { uid, name, .. } = user;
        if rights.users.iter().any(|id| id != uid) {
            let what = format!("the user ids {}, but the job's user {name} is {uid}", listed(&rights.users));
            return Some((what, Fault::Image));
        }
        let theirs: BTreeSet<u32> = user.groups.iter().copied().chain([user.gid]).collect();
        let held: BTreeSet<u32> = rights.groups.iter().copied().chain(rights.more_groups.iter().copied()).collect();
        if let Some(group) = held.difference(&theirs).next() {
            let was = then.is_some_and(|then| then.groups.contains(group));
            return Some(match was {
                // The kernel reported this group at the snapshot, so the user's groups have changed since.
                true => (
                    format!(
                        "the group {group}, but user {name} is no longer a member: add {name} to the group to restore this image"
                    ),
                    Fault::Configuration,
                ),
                false => (format!("the group {group}, but user {name} is not a member"), Fault::Image),
            });
        }
        // Being in a group can also take access away, so a missing group counts.
        let kept = then.map_or(&[][..], |then| &then.groups).iter().find(|group| !rights.more_groups.contains(group));
        if let Some(group) = kept {
            return Some((format!("lost the group {group}, which it had at the snapshot"), Fault::Image));
        }
        let sets = [
            ("permitted", rights.permitted),
            ("effective", rights.effective),
            ("ambient", rights.ambient),
            ("inheritable", rights.inheritable & !own.inheritable),
            ("bounding", rights.bounding & !own.bounding),
        ];
        if let Some((set, bits)) = sets.into_iter().find(|(_, bits)| *bits != 0) {
            return Some((
                format!("the {set} capabilities {bits:#x}, but user {name} gets none of them"),
                Fault::Image,
            ));
        }
    }
    let was_fixed = then.map(|then| then.no_new_privileges);
    if !rights.no_new_privileges && (wanted.privileges == Privileges::Fixed || was_fixed == Some(true)) {
        return Some(match was_fixed {
            Some(true) => ("no no-new-privileges flag, but had it at the snapshot".into(), Fault::Image),
            _ => (
                "no no-new-privileges flag, but job.no-new-privileges is true: the image was taken without the flag. Set job.no-new-privileges = false to restore it"
                    .into(),
                Fault::Configuration,
            ),
        });
    }
    (rights.seccomp == NO_FILTER && then.is_some_and(|then| then.filtered))
        .then(|| ("no seccomp filter, but had one at the snapshot".into(), Fault::Image))
}

/// `SECBIT_KEEP_CAPS`, and the bits for script interpreters of Linux 6.14 with their locks: any process can set them, and they
/// give no rights.
const ANYBODYS: u32 = 1 << 4 | 0xf00;

/// Checks the securebits that a restore gives to the threads of a job of this user, where rekindle itself has `own`. With them a
/// set-user-ID program that gives up root's rights would not lose them.
pub(crate) fn check_securebits(all: &BTreeMap<i32, u32>, user: Option<&Identity>, own: u32) -> Result<(), Refused> {
    let Some(user) = user.filter(|user| user.uid != 0) else { return Ok(()) };
    match all.iter().map(|(thread, bits)| (thread, bits & !own & !ANYBODYS)).find(|(_, more)| *more != 0) {
        None => Ok(()),
        Some((thread, more)) => Err(Refused::Rights {
            process: format!("thread {thread}"),
            what: format!("the securebits {more:#x}, but user {} cannot set them", user.name),
            fault: Fault::Image,
        }),
    }
}

/// Checks the reaper, which stays root and has no capability but CAP_KILL.
pub(crate) fn check_reaper(root: i32, wanted: &Wanted<'_>) -> Result<(), Refused> {
    if wanted.other_user().is_none() {
        return Ok(());
    }
    let refuse = |what: String| Err(Refused::Rights { process: shown(root), what, fault: Fault::Image });
    for thread in process::threads(root) {
        let Some(rights) = Rights::of(root, thread)? else { continue };
        let more = (rights.permitted | rights.effective | rights.inheritable | rights.ambient) & !CAP_KILL;
        if more != 0 {
            return refuse(format!("the capabilities {more:#x}, but the reaper has only CAP_KILL"));
        }
    }
    // The name contains the hash of the content, and only the content counts: a reaper of another version is accepted.
    match crate::launch::reaper::is_genuine(root) {
        Ok(true) => Ok(()),
        Ok(false) => refuse("another executable than the reaper, and is the root of the job's process tree".into()),
        Err(source) => Err(Refused::Unread { pid: root, source }),
    }
}

/// A process in a message: its pid as the job sees it, and its name.
pub(crate) fn shown(pid: i32) -> String {
    let number = process::inner_pid(pid).unwrap_or(pid);
    let name: String = process::name(pid).unwrap_or_default().chars().filter(|c| !c.is_control()).collect();
    format!("process {number} ({name})")
}

fn listed(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOBODY: &str = "\
Name:\tjob
Uid:\t65534\t65534\t65534\t65534
Gid:\t65534\t65534\t65534\t65534
Groups:\t100 65534 
CapInh:\t0000000000000000
CapPrm:\t0000000000000000
CapEff:\t0000000000000000
CapBnd:\t000001ffffffffff
CapAmb:\t0000000000000000
NoNewPrivs:\t1
Seccomp:\t2
Seccomp_filters:\t1
";

    fn nobody() -> Identity {
        Identity { uid: 65534, gid: 65534, groups: vec![65534, 100], home: "/".into(), name: "nobody".into() }
    }

    fn then() -> JobRights {
        JobRights { uid: 65534, groups: vec![100, 65534], no_new_privileges: true, filtered: true }
    }

    #[test]
    fn a_thread_may_have_any_name() {
        let named = std::thread::spawn(|| {
            std::fs::write("/proc/thread-self/comm", b"\xe6\x97 \n:").unwrap();
            let (own, thread) = (std::process::id().cast_signed(), nix::unistd::gettid().as_raw());
            assert!(matches!(Rights::of(own, thread), Ok(Some(_))));
            assert!(matches!(Rights::of(own, i32::MAX), Ok(None)), "one that has ended");
        });
        named.join().unwrap();
    }

    fn found(from: &str, to: &str, privileges: Privileges, then: Option<&JobRights>) -> Option<(String, Fault)> {
        assert!(NOBODY.contains(from), "{from}");
        let user = nobody();
        let wanted = Wanted { user: Some(&user), privileges, then };
        let own = NOBODY.replace("CapBnd:\t000001ff", "CapBnd:\t000000ff");
        let rights = Rights::parse(&NOBODY.replace(from, to).replace("CapBnd:\t000001ff", "CapBnd:\t000000ff"));
        excess(&rights.unwrap(), &wanted, &Rights::parse(&own).unwrap())
    }

    #[test]
    fn each_right_that_a_launch_does_not_give_is_found() {
        let then = then();
        let fixed = |from: &str, to: &str| found(from, to, Privileges::Fixed, Some(&then));
        assert_eq!(fixed("", ""), None);
        let refused = [
            ("Uid:\t65534\t65534\t65534\t65534", "Uid:\t65534\t65534\t0\t65534", "user ids 65534 65534 0"),
            ("Uid:\t65534\t65534\t65534\t65534", "Uid:\t65534\t65534\t65534\t1", "user ids"),
            ("Gid:\t65534\t65534", "Gid:\t65534\t0", "the group 0"),
            ("Groups:\t100", "Groups:\t6 100", "the group 6"),
            ("Groups:\t100 65534", "Groups:\t65534", "lost the group 100"),
            ("CapInh:\t0000000000000000", "CapInh:\t0000000000000001", "inheritable"),
            ("CapPrm:\t0000000000000000", "CapPrm:\t0000000000000400", "permitted"),
            ("CapEff:\t0000000000000000", "CapEff:\t0000000000000400", "effective"),
            ("CapAmb:\t0000000000000000", "CapAmb:\t0000000000000400", "ambient"),
            ("CapBnd:\t000001ff", "CapBnd:\t000003ff", "bounding"),
            ("NoNewPrivs:\t1", "NoNewPrivs:\t0", "no-new-privileges"),
            ("Seccomp:\t2", "Seccomp:\t0", "seccomp"),
        ];
        for (from, to, words) in refused {
            let (what, fault) = fixed(from, to).unwrap_or_else(|| panic!("{to} passed"));
            assert!(what.contains(words) && fault == Fault::Image, "{to}: {what}");
        }
    }

    #[test]
    fn securebits_that_rekindle_does_not_have_are_found() {
        let (user, root) = (nobody(), Identity { uid: 0, ..nobody() });
        let check = |bits, own| check_securebits(&BTreeMap::from([(1001, 0), (1005, bits)]), Some(&user), own);
        assert!(check(0, 0).is_ok() && check(0x2f, 0x2f).is_ok() && check(0, 0x2f).is_ok());
        assert!(check(1 << 4 | 1 << 8 | 1 << 11, 0).is_ok(), "any process can set them");
        let error = check(1 << 2, 1).unwrap_err();
        assert!(error.to_string().contains("thread 1005 has the securebits 0x4"), "{error}");
        assert_eq!(error.fault(), Fault::Image);
        for user in [None, Some(&root)] {
            assert!(check_securebits(&BTreeMap::from([(1001, 4)]), user, 0).is_ok());
        }
    }

    #[test]
    fn what_changed_on_this_side_is_no_fault_of_the_image() {
        let mut then = then();
        then.groups.push(27);
        let (what, fault) = found("Groups:\t100", "Groups:\t27 100", Privileges::Fixed, Some(&then)).unwrap();
        assert!(what.contains("27") && fault == Fault::Configuration, "{what}");
        then = JobRights { no_new_privileges: false, ..self::then() };
        let (what, fault) = found("NoNewPrivs:\t1", "NoNewPrivs:\t0", Privileges::Fixed, Some(&then)).unwrap();
        assert!(what.contains("job.no-new-privileges = false") && fault == Fault::Configuration, "{what}");
        assert_eq!(found("NoNewPrivs:\t1", "NoNewPrivs:\t0", Privileges::MayGrow, Some(&then)), None);
        // An image of an earlier version records neither this nor groups and filters.
        assert_eq!(found("Seccomp:\t2", "Seccomp:\t0", Privileges::Fixed, None), None);
        assert_eq!(found("Groups:\t100 65534", "Groups:\t65534", Privileges::Fixed, None), None);
    }

    #[test]
    fn a_job_of_root_has_what_root_has() {
        let then = JobRights { uid: 0, groups: vec![0], no_new_privileges: false, filtered: false };
        let root = NOBODY
            .replace("65534", "0")
            .replace("CapEff:\t0", "CapEff:\t1")
            .replace("NoNewPrivs:\t1", "NoNewPrivs:\t0");
        let rights = Rights::parse(&root).unwrap();
        for user in [None, Some(Identity { uid: 0, ..nobody() })] {
            let mut wanted = Wanted { user: user.as_ref(), privileges: Privileges::MayGrow, then: Some(&then) };
            assert_eq!(excess(&rights, &wanted, &rights), None);
            wanted.privileges = Privileges::Fixed;
            assert!(excess(&rights, &wanted, &rights).unwrap().0.contains("no-new-privileges"));
        }
    }
}
