//! Whose process it is that a line of the kernel's log names: the job's, or another program's on the same GPU.
//!
//! The log has pids of the first PID namespace, also of processes that have ended since. So the pids and names that the
//! job had are remembered.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rekindle_os::process;

/// A process that a line names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Named {
    /// Its pid in the first namespace.
    pub(crate) pid: i32,
    /// Its name, at most 15 bytes.
    pub(crate) name: Option<String>,
}

impl std::fmt::Display for Named {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {}", self.pid)?;
        self.name.as_ref().map_or(Ok(()), |name| write!(f, " ({name})"))
    }
}

/// Whose it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Whose {
    /// The job's, of its present life.
    Job,
    /// The job's, of the life before.
    Before,
    /// Another program's.
    Other(Named),
    /// Nobody says.
    Unknown,
}

/// Processes of the present life of the job and of the one before, whose end may be told late.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Seen {
    root: i32,
    before: Pids,
    pids: Pids,
    /// When each of them was last seen.
    when: BTreeMap<i32, Instant>,
    names: BTreeSet<String>,
    /// The last pid that the kernel had given away at the last look.
    last: i32,
    /// The PCI addresses of the GPUs that it has had open, as the log has them; `None` for one whose address nobody
    /// says.
    gpus: BTreeSet<Option<String>>,
}

/// Processes by pid, with the time of their start, unless they were gone when we heard of them.
type Pids = BTreeMap<i32, Option<u64>>;

/// For so long a process that has ended is remembered. The log tells of a fault within seconds; much later another
/// program may have had its pid.
const REMEMBERED: Duration = Duration::from_secs(600);

/// Names of dead processes that are remembered. Some programs name theirs by numbers.
const NAMES: usize = 4096;

/// A process that a line names.
#[derive(Debug, Clone, Copy)]
enum Fate {
    /// It exists, or another one that has its pid now. It started then, if the kernel says.
    Alive(Option<u64>),
    Dead,
}

impl Fate {
    fn of(pid: i32) -> Fate {
        match Path::new(&format!("/proc/{pid}")).exists() {
            true => Fate::Alive(process::start_time(pid)),
            false => Fate::Dead,
        }
    }

    /// Whether it is the one of these that has this pid. Pids are used again.
    fn is_of(self, pids: &Pids, pid: i32) -> bool {
        pids.get(&pid).is_some_and(|start| match self {
            Fate::Dead => true,
            Fate::Alive(now) => now.is_some() && now == *start,
        })
    }
}

/// The same, for several threads.
#[derive(Debug, Clone, Default)]
pub(crate) struct Kin(Arc<Mutex<Seen>>);

impl Kin {
    /// A life with this root begins.
    pub(crate) fn life_begins(&self, root: i32) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.root = root;
        seen.before = std::mem::take(&mut seen.pids);
        seen.when.clear();
        seen.gpus.clear();
        drop(seen);
        self.look();
    }

    /// Looks what processes there are now. Cheap enough for each snapshot, too dear for each second.
    pub(crate) fn look(&self) {
        let root = self.0.lock().unwrap_or_else(PoisonError::into_inner).root;
        let tree = process::tree(root);
        let last = last_pid();
        let names: Vec<String> = tree.iter().filter_map(|pid| process::name(*pid)).collect();
        let gpus = open_gpus(&tree, Path::new("/proc/driver/nvidia/gpus"));
        let tree: Pids = tree.into_iter().map(|pid| (pid, process::start_time(pid))).collect();
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.sees(tree, names, Instant::now());
        seen.last = last;
        seen.gpus.extend(gpus);
    }

    /// One that has died.
    pub(crate) fn add(&self, pid: i32, name: &str) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A dead process that its parent has not heard of still says when it started.
        seen.pids.entry(pid).or_insert_with(|| process::start_time(pid));
        seen.when.insert(pid, Instant::now());
        seen.names.insert(name.to_owned());
    }

    /// The pids of the processes of this life and of the one before that have ended.
    pub(crate) fn dead(&self) -> BTreeSet<i32> {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let all = seen.pids.iter().chain(&seen.before);
        let has_ended = |pid: i32, start: Option<u64>| start.is_none() || process::start_time(pid) != start;
        all.filter(|(pid, start)| has_ended(**pid, **start)).map(|(pid, _)| *pid).collect()
    }

    /// Whether the job of this life may use the GPU with this PCI address.
    pub(crate) fn may_use(&self, gpu: &str) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).may_use(gpu)
    }

    /// Whose a process is that the log names.
    pub(crate) fn whose(&self, named: Option<Named>) -> Whose {
        let Some(named) = named else { return Whose::Unknown };
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let pid = named.pid;
        let in_tree = || process::tree(seen.root).contains(&pid);
        whose(&seen, named, in_first_namespace(), Fate::of(pid), in_tree)
    }

    /// Whose process a fault of the GPU with this PCI address struck. `None` if nobody says, and the job does not use
    /// that GPU: then it is another program's.
    pub(crate) fn struck(&self, gpu: &str, named: Option<Named>) -> Option<Whose> {
        let whose = self.whose(named);
        (whose != Whose::Unknown || self.may_use(gpu)).then_some(whose)
    }
}

impl Seen {
    /// These are there now. Forgets those that ended long ago.
    fn sees(&mut self, tree: Pids, names: Vec<String>, now: Instant) {
        self.when.extend(tree.keys().map(|pid| (*pid, now)));
        self.pids.extend(tree);
        self.when.retain(|_, at| now.saturating_duration_since(*at) < REMEMBERED);
        self.pids.retain(|pid, _| self.when.contains_key(pid));
        if self.names.len() > NAMES {
            self.names.clear();
        }
        self.names.extend(names);
    }

    /// Whether the job may use this GPU: it has had it open, or nobody knows which it has open.
    fn may_use(&self, gpu: &str) -> bool {
        self.gpus.is_empty() || self.gpus.iter().any(|one| one.as_ref().is_none_or(|one| one == &gpu.to_lowercase()))
    }
}

fn whose(seen: &Seen, named: Named, first: bool, fate: Fate, in_tree: impl FnOnce() -> bool) -> Whose {
    let same_name = named.name.as_ref().is_some_and(|name| seen.names.contains(name));
    let known = fate.is_of(&seen.pids, named.pid);
    if first && !known && fate.is_of(&seen.before, named.pid) {
        return Whose::Before;
    }
    let is_ours = match (first, matches!(fate, Fate::Alive(_))) {
        // Pids of another namespace say nothing here.
        (false, _) if named.name.is_none() => return Whose::Unknown,
        (false, _) => same_name,
        (true, true) => known || in_tree(),
        // The job may have started it since it was looked at.
        (true, false) => known || same_name && named.pid > seen.last,
    };
    if is_ours { Whose::Job } else { Whose::Other(named) }
}

/// The GPUs that these processes have open. `folder` has a folder for each, named by its PCI address.
fn open_gpus(pids: &[i32], folder: &Path) -> BTreeSet<Option<String>> {
    let targets = pids.iter().flat_map(|pid| process::descriptors(*pid));
    let minors: BTreeSet<u32> = targets.filter_map(|(_, target)| minor(&target)).collect();
    if minors.is_empty() {
        return BTreeSet::new();
    }
    let known = addresses(folder);
    minors.iter().map(|minor| known.get(minor).cloned()).collect()
}

/// The number of a GPU's device.
fn minor(device: &Path) -> Option<u32> {
    device.to_str()?.strip_prefix("/dev/nvidia")?.parse().ok()
}

/// The PCI addresses of GPUs by the numbers of their devices, as the kernel module tells them.
fn addresses(folder: &Path) -> BTreeMap<u32, String> {
    let gpus = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let of = |gpu: std::fs::DirEntry| {
        let text = std::fs::read_to_string(gpu.path().join("information")).ok()?;
        let minor = text.lines().find_map(|line| line.strip_prefix("Device Minor:"))?.trim().parse().ok()?;
        // The log leaves out the function.
        let address = gpu.file_name().to_str()?.split('.').next()?.to_lowercase();
        Some((minor, address))
    };
    gpus.filter_map(of).collect()
}

/// The last pid that was given away; 0 if nobody says.
fn last_pid() -> i32 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().last().and_then(|pid| pid.parse().ok()).unwrap_or_default()
}

/// Whether our pids are those of the kernel's log.
pub(super) fn in_first_namespace() -> bool {
    /// `PROC_PID_INIT_INO` (include/linux/proc_ns.h).
    const FIRST: u64 = 0xEFFF_FFFC;
    std::fs::metadata("/proc/self/ns/pid").is_ok_and(|namespace| namespace.ino() == FIRST)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(pid: i32, name: &str) -> Named {
        Named { pid, name: Some(name.into()) }
    }

    #[test]
    fn a_process_is_the_jobs_by_its_pid_and_after_its_end_by_its_name() {
        let seen = Seen {
            root: 6,
            before: [(3, Some(30)), (7, Some(70))].into(),
            pids: [(6, Some(160)), (7, Some(170)), (5000, None)].into(),
            when: BTreeMap::new(),
            names: ["pt_main_thread".into()].into(),
            last: 8,
            gpus: BTreeSet::new(),
        };
        let (ours, other) = (named(7, "x"), named(8, "Xorg"));
        let at = |named: &Named, first, fate, in_tree| whose(&seen, named.clone(), first, fate, || in_tree);
        let whose = |named: &Named, first, alive, in_tree| {
            let start = seen.pids.get(&named.pid).copied().flatten().unwrap_or(999);
            at(named, first, if alive { Fate::Alive(Some(start)) } else { Fate::Dead }, in_tree)
        };
        assert_eq!(whose(&ours, true, true, false), Whose::Job);
        assert_eq!(whose(&ours, true, false, false), Whose::Job, "it has died just now");
        assert_eq!(whose(&other, true, true, true), Whose::Job, "it has begun just now");
        assert_eq!(whose(&other, true, true, false), Whose::Other(other.clone()));
        assert_eq!(whose(&other, true, false, false), Whose::Other(other.clone()));
        assert_eq!(whose(&named(3, "x"), true, false, false), Whose::Before);
        // Another program has the pid now.
        let again = |pid| at(&named(pid, "x"), true, Fate::Alive(Some(500)), false);
        for pid in [3, 7, 5000] {
            assert_eq!(again(pid), Whose::Other(named(pid, "x")));
        }
        assert_eq!(at(&named(5000, "x"), true, Fate::Dead, false), Whose::Job, "it was gone when we heard of it");
        let old = named(5, "pt_main_thread");
        assert_eq!(whose(&old, true, false, false), Whose::Other(old.clone()), "it was there at the last look");
        let young = named(9, "pt_main_thread");
        assert_eq!(whose(&young, true, false, false), Whose::Job, "it began and died since the last look");
        assert_eq!(whose(&young, true, true, false), Whose::Other(young.clone()), "another program of that name");
        // In a container the pids are others.
        assert_eq!(whose(&named(7, "Xorg"), false, true, true), Whose::Other(named(7, "Xorg")));
        assert_eq!(whose(&named(4711, "pt_main_thread"), false, false, false), Whose::Job);
        assert_eq!(whose(&Named { pid: 7, name: None }, false, true, true), Whose::Unknown);
    }

    #[test]
    fn processes_that_ended_long_ago_are_forgotten() {
        let (mut seen, began) = (Seen::default(), Instant::now());
        for minute in 0..60 {
            let tree = [(6, Some(160)), (1000 + minute, Some(7))].into();
            seen.sees(tree, vec![format!("worker-{minute}")], began + Duration::from_secs(60) * minute.cast_unsigned());
        }
        assert_eq!(seen.pids.len(), 11, "the root, and ten minutes of others");
        let old = Named { pid: 1003, name: None };
        assert_eq!(
            whose(&seen, old.clone(), true, Fate::Dead, || false),
            Whose::Other(old),
            "another one has had its pid"
        );
        let young = Named { pid: 1058, name: None };
        assert_eq!(whose(&seen, young, true, Fate::Dead, || false), Whose::Job);
    }

    #[test]
    fn a_fault_that_names_nobody_concerns_the_job_only_on_its_gpus() {
        let dir = tempfile::tempdir().unwrap();
        for (address, number) in [("0000:3B:00.0", 0), ("0000:5d:00.0", 11)] {
            let gpu = dir.path().join(address);
            std::fs::create_dir(&gpu).unwrap();
            let text = format!("Model: \t\t NVIDIA H200\nBus Location: \t {address}\nDevice Minor: \t {number}\n");
            std::fs::write(gpu.join("information"), text).unwrap();
        }
        let known = addresses(dir.path());
        assert_eq!(known, [(0, "0000:3b:00".to_owned()), (11, "0000:5d:00".to_owned())].into());
        assert_eq!(minor(Path::new("/dev/nvidia11")), Some(11));
        for other in ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-caps/nvidia-cap1", "/dev/null"] {
            assert_eq!(minor(Path::new(other)), None);
        }
        let kin = |gpus: &[Option<&str>]| {
            let gpus = gpus.iter().map(|gpu| gpu.map(ToOwned::to_owned)).collect();
            Kin(Arc::new(Mutex::new(Seen { gpus, ..Seen::default() })))
        };
        let (ours, both) = (kin(&[Some("0000:3b:00")]), kin(&[Some("0000:3b:00"), None]));
        assert_eq!(ours.struck("0000:3b:00", None), Some(Whose::Unknown));
        assert_eq!(ours.struck("0000:5d:00", None), None);
        assert_eq!(both.struck("0000:5d:00", None), Some(Whose::Unknown), "it may be the other one");
        assert_eq!(kin(&[]).struck("0000:5d:00", None), Some(Whose::Unknown), "nobody knows");
        assert!(ours.struck("0000:5d:00", Some(named(1, "init"))).is_some());
    }

    #[test]
    fn own_processes_are_told_from_others() {
        let kin = Kin::default();
        let own = std::process::id().cast_signed();
        kin.life_begins(own);
        if in_first_namespace() {
            assert_eq!(kin.whose(Some(Named { pid: own, name: None })), Whose::Job);
            assert!(matches!(kin.whose(Some(named(1, "init"))), Whose::Other(_)));
        }
        assert_eq!(kin.whose(None), Whose::Unknown);
        assert_eq!(named(5, "python3").to_string(), "process 5 (python3)");
    }
}
