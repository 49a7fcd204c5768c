//! A process: what its threads have together.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;

use rekindle_os::process as os_process;
use rekindle_os::undo;

use super::descriptor;
use super::identity::Named;
use super::thread;
use super::{OUTSIDE, Pids, Sockets, field, innermost, mappings, pending, text};
use crate::record::{self, Items};

/// What was read.
#[derive(Debug)]
pub(super) struct Raw {
    /// As we see it.
    pub(super) pid: i32,
    stat: String,
    limits: Option<String>,
    groups: Option<String>,
    maps: String,
    timers: Option<String>,
    undoes: Option<bool>,
    /// How the kernel shares processor time with other sessions (sched(7)), and whether it merges equal pages (prctl(2)).
    autogroup: Option<String>,
    merging: Option<String>,
    /// Files of one line, by item.
    lines: Vec<(&'static str, Option<String>)>,
    links: Vec<(&'static str, Option<String>)>,
    threads: Vec<thread::Raw>,
    pub(super) table: descriptor::Table,
    /// Read apart, on more threads.
    pub(super) descriptors: Vec<descriptor::Raw>,
}

/// Files of one line.
const LINES: [(&str, &str); 3] =
    [("oom-score-adj", "oom_score_adj"), ("core-filter", "coredump_filter"), ("login-uid", "loginuid")];
const LINKS: [(&str, &str); 3] = [("executable", "exe"), ("directory", "cwd"), ("root", "root")];

impl Raw {
    pub(super) fn read(pid: i32, tree: &[i32]) -> Raw {
        let file = |name: &str| text(&format!("/proc/{pid}/{name}"));
        let link = |name: &str| {
            let target = std::fs::read_link(format!("/proc/{pid}/{name}")).ok()?;
            Some(String::from_utf8_lossy(target.as_os_str().as_bytes()).into_owned())
        };
        let stat = file("stat").unwrap_or_default();
        let mut threads: Vec<thread::Raw> =
            os_process::threads(pid).into_iter().map(|tid| thread::Raw::read(pid, tid)).collect();
        threads.sort_unstable_by_key(|thread| thread.tid);
        Raw {
            pid,
            stat,
            limits: file("limits"),
            groups: file("cgroup"),
            maps: file("maps").unwrap_or_default(),
            timers: file("timers"),
            undoes: undoes(pid, &threads, tree),
            autogroup: file("autogroup"),
            merging: file("ksm_stat"),
            lines: LINES.iter().map(|(item, name)| (*item, file(name))).collect(),
            links: LINKS.iter().map(|(item, name)| (*item, link(name))).collect(),
            threads,
            table: descriptor::Table::of(pid),
            descriptors: Vec::new(),
        }
    }

    /// Each of its threads, as we see it and as the job does.
    pub(super) fn ids(&self) -> BTreeMap<i32, i32> {
        self.threads.iter().filter_map(|thread| Some((thread.tid, thread.inner()?))).collect()
    }

    /// Its control groups, as /proc shows them.
    pub(super) fn groups(&self) -> Option<&str> {
        self.groups.as_deref()
    }

    /// Its memory, as /proc shows it.
    pub(super) fn maps(&self) -> &str {
        &self.maps
    }

    /// Its record, and the file of each mapping. `of_root` are the control groups of the tree's root.
    pub(super) fn record(
        self,
        of_root: &str,
        pids: &Pids,
        identity: &Named,
        sockets: &Sockets,
    ) -> Option<(record::Process, Vec<mappings::File>)> {
        let leader = self.threads.iter().find(|thread| thread.tid == self.pid)?;
        let status = &leader.status;
        let pid = innermost(status, "NSpid")?;
        let mut items = Items::new();
        let mut put = |item: &str, value: Option<String>| {
            if let Some(value) = value {
                items.insert(item.to_owned(), value);
            }
        };
        let is_dead = field(status, "State").is_some_and(|state| state.starts_with(['Z', 'X']));
        let fields = Stat::of(&self.stat);
        put("parent", fields.as_ref().and_then(|stat| stat.parent()).map(|parent| pids.inner(parent)));
        put("process-group", innermost(status, "NSpgid").map(|id| id.to_string()));
        put("session", innermost(status, "NSsid").map(|id| id.to_string()));
        put("start-time", fields.as_ref().and_then(|stat| stat.number(22)).map(|ticks| ticks.to_string()));
        // `/autogroup-7 nice 0`: the number is the kernel's own.
        put(
            "autogroup",
            self.autogroup.as_deref().and_then(|line| line.rsplit(' ').next()).map(|nice| nice.trim().into()),
        );
        let merges =
            self.merging.as_deref().and_then(|text| text.lines().find_map(|line| line.strip_prefix("ksm_merge_any: ")));
        put("memory-merge", merges.map(|merges| if merges == "yes" { "1" } else { "0" }.to_owned()));
        put("exit-signal", fields.as_ref().and_then(|stat| stat.number(38)).map(|signal| signal.to_string()));
        if is_dead {
            // It has nothing else any more.
            let name = leader.name();
            let (threads, descriptors, mappings) = (Vec::new(), Vec::new(), Vec::new());
            return Some((record::Process { pid, name, items, threads, descriptors, mappings }, Vec::new()));
        }
        // The kernel lets only the leader of a session take a terminal; the others get it when they are forked.
        let leads = innermost(status, "NSsid") == Some(pid);
        put(
            if leads { "terminal" } else { "inherited-terminal" },
            fields.as_ref().and_then(|stat| stat.number(7)).filter(|tty| *tty != 0).map(|tty| tty.to_string()),
        );
        put("layout", fields.as_ref().map(Stat::layout));
        for (item, name) in [
            ("umask", "Umask"),
            ("ignored-signals", "SigIgn"),
            ("caught-signals", "SigCgt"),
            ("pending-signals", "ShdPnd"),
        ] {
            put(
                item,
                field(status, name).map(|mask| if item == "pending-signals" { pending(mask) } else { mask.to_owned() }),
            );
        }
        put("limits", self.limits.as_deref().map(limits));
        put("control-groups", self.groups.as_deref().map(|own| groups(own, of_root)));
        put("timers", self.timers.as_deref().filter(|text| !text.is_empty()).map(|text| timers(text, pids)));
        put("undo-list", self.undoes.map(|has| if has { "yes" } else { "no" }.to_owned()));
        for (item, text) in self.lines {
            put(item, text.map(|text| text.trim().to_owned()));
        }
        for (item, target) in self.links {
            put(item, target);
        }
        let name = leader.name();
        let mut threads: Vec<record::Thread> = self.threads.into_iter().filter_map(thread::Raw::record).collect();
        threads.sort_unstable_by_key(|thread| thread.tid);
        let descriptors =
            self.descriptors.into_iter().map(|raw| raw.record(self.pid, pids, identity, sockets)).collect();
        let (mappings, files) = mappings::of(&self.maps).into_iter().unzip();
        Some((record::Process { pid, name, items, threads, descriptors, mappings }, files))
    }
}

/// Whether a process undoes something at its end (`SEM_UNDO`). One with threads has a list in any case, so that cannot be
/// known; and so has one that once had threads, so a list means nothing where there are no semaphores. The root of the tree
/// is the reaper, which uses none.
fn undoes(pid: i32, threads: &[thread::Raw], tree: &[i32]) -> Option<bool> {
    let root = tree.first().filter(|root| **root != pid)?;
    if threads.len() > 1 {
        return None;
    }
    let has_list = undo::has_list(pid, *root).ok()?;
    Some(has_list && undo::has_semaphores(pid).unwrap_or(false))
}

/// The words of /proc/PID/stat behind the name, which may have any characters (proc_pid_stat(5)).
struct Stat<'a>(Vec<&'a str>);

impl Stat<'_> {
    fn of(stat: &str) -> Option<Stat<'_>> {
        let (_, rest) = stat.rsplit_once(')')?;
        Some(Stat(rest.split_whitespace().collect()))
    }

    /// A field by its number in the manual page: the state is 3.
    fn word(&self, number: usize) -> Option<&str> {
        self.0.get(number.checked_sub(3)?).copied()
    }

    fn number(&self, number: usize) -> Option<i64> {
        self.word(number)?.parse().ok()
    }

    fn parent(&self) -> Option<i32> {
        self.word(4)?.parse().ok()
    }

    /// The addresses of program, stack, heap, arguments and environment.
    fn layout(&self) -> String {
        let fields = (26..=28).chain(45..=51);
        fields.filter_map(|number| self.word(number)).collect::<Vec<_>>().join(" ")
    }
}

/// A line for each limit: its name, the soft one, the hard one.
fn limits(text: &str) -> String {
    let lines = text.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    lines.collect::<Vec<_>>().join("\n")
}

/// A line for each hierarchy of control groups: its controllers or its name, and the path below that of the root. Numbers of
/// hierarchies are those of a boot.
fn groups(own: &str, of_root: &str) -> String {
    let parts = |line: &str| -> Option<(String, String)> {
        let (name, path) = line.split_once(':')?.1.split_once(':')?;
        Some((name.to_owned(), path.to_owned()))
    };
    let roots: BTreeMap<String, String> = of_root.lines().filter_map(parts).collect();
    let line = |(name, path): (String, String)| {
        let below = roots.get(&name).and_then(|root| path.strip_prefix(root.trim_end_matches('/')));
        let below = below.filter(|below| below.is_empty() || below.starts_with('/')).unwrap_or(&path);
        format!("{name}:{}", below.trim_start_matches('/'))
    };
    own.lines().filter_map(parts).map(line).collect::<Vec<_>>().join("\n")
}

/// The table of timers, a line for each, with the ids that the job sees. One whose thread has ended signals nobody, as one
/// of SIGEV_NONE. A clock of CPU time can be that of the thread itself or one with its number.
fn timers(text: &str, pids: &Pids) -> String {
    let mut all: Vec<String> = Vec::new();
    for line in text.lines() {
        let (name, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.trim();
        match name {
            "ID" => all.push(format!("timer {value}")),
            "notify" => {
                let (kind, id) = value.rsplit_once('.').unwrap_or((value, ""));
                let target = id.parse().map_or_else(|_| id.to_owned(), |id| pids.inner(id));
                let nobody = kind.starts_with("none") || target == OUTSIDE;
                let whom = if nobody { "nobody".to_owned() } else { format!("{kind}.{target}") };
                all.last_mut().into_iter().for_each(|timer| timer.push_str(&format!(" for {whom}")));
            }
            "ClockID" => {
                let is_of_cpu_time = value.parse::<i32>().is_ok_and(|clock| clock < 0 || matches!(clock, 2 | 3));
                let clock = if is_of_cpu_time { "of CPU time" } else { value };
                all.last_mut().into_iter().for_each(|timer| timer.push_str(&format!(" clock {clock}")));
            }
            // The signal of one that signals nobody means nothing.
            _ => {}
        }
    }
    all.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_and_blanks_does_not_move_the_fields() {
        let words: Vec<String> = (3..=52).map(|number| number.to_string()).collect();
        let stat = format!("7 (a) b ) {}", words.join(" "));
        let stat = Stat::of(&stat).unwrap();
        assert_eq!((stat.parent(), stat.number(22), stat.number(52)), (Some(4), Some(22), Some(52)));
        assert_eq!(stat.layout(), "26 27 28 45 46 47 48 49 50 51");
        assert!(Stat::of("no process").is_none());
    }

    #[test]
    fn control_groups_are_those_below_the_root() {
        let root = "4:memory:/slurm/job\n1:name=x:/\n0::/a/b\n";
        assert_eq!(groups(root, root), "memory:\nname=x:\n:");
        assert_eq!(groups("9:memory:/slurm/job/own\n1:name=x:/y\n0::/a/bc\n", root), "memory:own\nname=x:y\n:a/bc");
    }

    #[test]
    fn timers_name_the_threads_that_the_job_sees() {
        let text = "ID: 0\nsignal: 34/00007f0000000000\nnotify: signal/tid.4711\nClockID: 1\n";
        let pids = Pids([(4711, 1003)].into());
        assert_eq!(timers(text, &pids), "timer 0 for signal/tid.1003 clock 1");
        let ended = timers(text, &Pids(BTreeMap::new()));
        assert_eq!(ended, "timer 0 for nobody clock 1");
        assert_eq!(ended, timers(&text.replace("signal/tid", "none/pid"), &pids), "as it is restored");
        let of_cpu_time = |clock: &str| timers(&text.replace("ClockID: 1", clock), &pids);
        assert_eq!(of_cpu_time("ClockID: 3"), of_cpu_time("ClockID: -37682"));
    }
}
