//! Threads that are not scheduled as an ordinary program: a policy, a nice value, a deadline, clamps of the utilization, a time slice.
//!
//! CRIU (4.2) saves policy, priority and nice value, and ignores it if it cannot set them. It loses the clamps and the time slice, and
//! refuses an image with a policy that it does not know (SCHED_DEADLINE, SCHED_EXT: "Inconsistent sched params"), so the image says
//! SCHED_OTHER for those ([`rekindle_criu::image::forget_policies`]).

use std::collections::BTreeMap;
use std::io;

use rekindle_os::process;
use rekindle_os::scheduling::{Attributes, CLAMPS};
use rekindle_store::Manifest;
use rekindle_store::manifest::Scheduling;

/// The policies for ordinary programs: SCHED_OTHER, SCHED_BATCH, SCHED_IDLE, SCHED_EXT.
const ORDINARY: [u32; 4] = [0, 3, 5, 7];
/// SCHED_OTHER, SCHED_FIFO, SCHED_RR, SCHED_BATCH, SCHED_IDLE.
const CRIU_KNOWS: [u32; 5] = [0, 1, 2, 3, 5];
const NAMES: [&str; 8] =
    ["SCHED_OTHER", "SCHED_FIFO", "SCHED_RR", "SCHED_BATCH", "4", "SCHED_IDLE", "SCHED_DEADLINE", "SCHED_EXT"];

/// Threads of these processes, which are stopped, that are not scheduled as a program is that asks for nothing.
pub(crate) fn capture(tree: &[i32]) -> Vec<Scheduling> {
    let Ok(ours) = Attributes::of(0) else { return Vec::new() };
    let mut found: Vec<Scheduling> = Vec::new();
    for thread in tree.iter().flat_map(|pid| process::threads(*pid)) {
        let Some(mut own) = Attributes::of(thread).ok().and_then(|own| special(&own, &ours)) else { continue };
        let Some(inner) = process::inner_pid(thread) else { continue };
        match found.iter_mut().find(|other| Scheduling { threads: Vec::new(), ..(*other).clone() } == own) {
            Some(others) => others.threads.push(inner),
            None => {
                own.threads.push(inner);
                found.push(own);
            }
        }
    }
    found
}

/// Whether CRIU refuses to restore one of these policies.
pub(crate) fn is_unknown_to_criu(all: &[Scheduling]) -> bool {
    all.iter().any(|one| !CRIU_KNOWS.contains(&one.policy))
}

/// What a thread has, if that is anything special.
fn special(own: &Attributes, ours: &Attributes) -> Option<Scheduling> {
    let is_ordinary = ORDINARY.contains(&own.policy);
    let slice = |of: &Attributes| if ORDINARY.contains(&of.policy) { of.runtime } else { 0 };
    let clamps = (own.util_min, own.util_max);
    let scheduling = Scheduling {
        threads: Vec::new(),
        policy: own.policy,
        flags: own.flags,
        nice: own.nice,
        priority: own.priority,
        runtime_ns: if is_ordinary && own.runtime == slice(ours) { 0 } else { own.runtime },
        deadline_ns: if is_ordinary { 0 } else { own.deadline },
        period_ns: if is_ordinary { 0 } else { own.period },
        clamps: (clamps != (ours.util_min, ours.util_max)).then_some(clamps),
    };
    let nothing = Scheduling {
        threads: Vec::new(),
        policy: 0,
        flags: 0,
        nice: 0,
        priority: 0,
        runtime_ns: 0,
        deadline_ns: 0,
        period_ns: 0,
        clamps: None,
    };
    (scheduling != nothing).then_some(scheduling)
}

/// Gives it to the threads again, before they run. A failure does not prevent the job from running, and is reported.
pub(crate) fn put_back(root: i32, manifest: &Manifest) {
    if manifest.scheduling.is_empty() {
        return;
    }
    let Ok(ours) = Attributes::of(0) else { return };
    let threads = process::tree(root).into_iter().flat_map(process::threads);
    let threads: BTreeMap<i32, i32> =
        threads.filter_map(|thread| Some((process::inner_pid(thread)?, thread))).collect();
    for wanted in &manifest.scheduling {
        let those = wanted.threads.iter().filter_map(|inner| threads.get(inner).copied());
        let set: io::Result<()> = those.into_iter().try_for_each(|thread| give(thread, wanted, &ours));
        if let Err(error) = set {
            tracing::warn!(
                "threads {:?} of the job are not scheduled as before ({}): {error}{}",
                wanted.threads,
                described(wanted),
                hint(&error)
            );
        }
    }
}

fn give(thread: i32, wanted: &Scheduling, ours: &Attributes) -> io::Result<()> {
    let now = Attributes::of(thread)?;
    let has = special(&now, ours).map(|has| Scheduling { threads: wanted.threads.clone(), ..has });
    if has.as_ref() == Some(wanted) {
        return Ok(());
    }
    let (util_min, util_max) = wanted.clamps.unwrap_or_default();
    Attributes {
        policy: wanted.policy,
        flags: wanted.flags | wanted.clamps.map_or(0, |_| CLAMPS),
        nice: wanted.nice,
        priority: wanted.priority,
        runtime: wanted.runtime_ns,
        deadline: wanted.deadline_ns,
        period: wanted.period_ns,
        util_min,
        util_max,
        ..now
    }
    .set(thread)
}

fn described(wanted: &Scheduling) -> String {
    let name = usize::try_from(wanted.policy).ok().and_then(|policy| NAMES.get(policy));
    let name = name.map_or_else(|| wanted.policy.to_string(), |name| (*name).to_string());
    let priority = if wanted.priority > 0 { format!(", priority {}", wanted.priority) } else { String::new() };
    format!("{name}{priority}, nice {}", wanted.nice)
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => ". It needs CAP_SYS_NICE; SCHED_DEADLINE also that the thread may run on all processors",
        Some(libc::EBUSY) => ". Other deadlines leave no time for theirs: see /proc/sys/kernel/sched_rt_runtime_us",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attributes(policy: u32, nice: i32) -> Attributes {
        Attributes { policy, nice, runtime: 3, util_max: 1024, ..Attributes::default() }
    }

    #[test]
    fn only_what_is_special_is_noted() {
        let ours = attributes(0, 4);
        let special = |own: Attributes| super::special(&own, &ours);
        assert_eq!(special(attributes(0, 0)), None);
        assert_eq!(special(attributes(0, 4)).unwrap().nice, 4);
        let slice = special(Attributes { runtime: 9, ..attributes(0, 0) }).unwrap();
        assert_eq!((slice.runtime_ns, slice.clamps), (9, None));
        assert_eq!(special(Attributes { util_min: 7, ..attributes(0, 0) }).unwrap().clamps, Some((7, 1024)));
        let deadline = Attributes { runtime: 1, deadline: 2, period: 3, flags: 4, ..attributes(6, 0) };
        let noted = special(deadline).unwrap();
        assert_eq!((noted.runtime_ns, noted.deadline_ns, noted.period_ns, noted.flags), (1, 2, 3, 4));
        assert_eq!(described(&noted), "SCHED_DEADLINE, nice 0");
        let fifo = special(Attributes { priority: 5, ..attributes(1, -3) }).unwrap();
        assert_eq!(described(&fifo), "SCHED_FIFO, priority 5, nice -3");
        assert!(!is_unknown_to_criu(&[fifo.clone(), slice]) && is_unknown_to_criu(&[fifo.clone(), noted]));
        assert_eq!(described(&Scheduling { policy: 99, ..fifo }), "99, priority 5, nice -3");
    }

    #[test]
    fn a_thread_gets_it_again() {
        let ours = Attributes::of(0).unwrap();
        let changed = std::thread::spawn(move || {
            let thread = nix::unistd::gettid().as_raw();
            let other = Attributes { policy: 3, nice: 7, ..ours };
            other.set(0).unwrap();
            let noted = special(&other, &ours).unwrap();
            Attributes { policy: 5, ..other }.set(0).unwrap();
            give(thread, &noted, &ours).unwrap();
            assert_eq!(Attributes::of(0).unwrap(), other);
            let captured = capture(&[std::process::id().cast_signed()]);
            let inner = process::inner_pid(thread).unwrap();
            assert!(captured.contains(&Scheduling { threads: vec![inner], ..noted.clone() }), "{captured:?}");
            assert!(give(i32::MAX, &noted, &ours).is_err());
        });
        changed.join().unwrap();
    }
}
