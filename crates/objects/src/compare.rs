//! Compares two records by the table.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::record::{CLOSED_IN_IMAGE, Descriptor, Items, LEFT_OUT, Mapping, Process, Record};
use crate::table::{self, How, Means, Of, Row};
use crate::{advice, answers};

/// An item that differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Its line of the table.
    pub row: Row,
    /// The process, as the job sees it, and its name.
    pub process: (i32, String),
    /// The thread or the number of the descriptor.
    pub at: Option<i32>,
    /// What it was; `None` if it was not there.
    pub then: Option<String>,
    /// What it is now.
    pub now: Option<String>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (pid, name) = &self.process;
        match (self.row.of, self.at) {
            (Of::Thread, Some(tid)) if tid != *pid => write!(f, "thread {tid} of process {pid} ({name})")?,
            (Of::Descriptor, Some(number)) => write!(f, "descriptor {number} of process {pid} ({name})")?,
            _ => write!(f, "process {pid} ({name})")?,
        }
        write!(f, ": {}: ", self.row.what)?;
        let value = |value: Option<String>| match value {
            Some(value) => shortened(&value),
            None => "nothing".to_owned(),
        };
        let (mut then, mut now) = (self.then.clone(), self.now.clone());
        if self.row.how == How::Lines {
            let only = (without(then.as_deref(), now.as_deref()), without(now.as_deref(), then.as_deref()));
            // Otherwise they have the same lines, some of them more often.
            if only != (None, None) {
                (then, now) = only;
            }
        }
        if let (How::Ranges, Some(all), Some(of_now)) = (self.row.how, &self.then, &self.now) {
            let (all, of_now): (Vec<String>, Vec<String>) = advice::differing(all, of_now).into_iter().unzip();
            (then, now) = (Some(all.join("\n")), Some(of_now.join("\n")));
        }
        write!(f, "was {}, is {}", value(then), value(now))
    }
}

/// The lines that the other value does not have.
fn without(value: Option<&str>, other: Option<&str>) -> Option<String> {
    let known: BTreeSet<&str> = other.into_iter().flat_map(str::lines).collect();
    let own: Vec<&str> = value?.lines().filter(|line| !known.contains(line)).collect();
    (!own.is_empty()).then(|| own.join("\n"))
}

/// A value can be as long as a job likes.
fn shortened(value: &str) -> String {
    /// Characters of a value in a message.
    const SHOWN: usize = 160;
    let line = value.replace('\n', "; ");
    match line.char_indices().nth(SHOWN) {
        Some((at, _)) => format!("{}...", line.get(..at).unwrap_or_default()),
        None => line,
    }
}

/// What differs between a record and what is there now.
#[must_use]
pub fn compare(then: &Record, now: &Record) -> Vec<Difference> {
    let mut found = Vec::new();
    let here: BTreeMap<i32, &Process> = now.processes.iter().map(|process| (process.pid, process)).collect();
    // Each once, whatever the record says.
    let processes: BTreeMap<i32, &Process> = then.processes.iter().map(|process| (process.pid, process)).collect();
    let kernel = if then.kernel == now.kernel { Kernel::Same } else { Kernel::Other };
    let names = Names::of(then);
    for process in processes.values() {
        match here.get(&process.pid) {
            Some(now) => {
                Pair { then: process, now, there: &processes, kernel, names: &names, found: &mut found }.compare();
            }
            None => found.extend(presence(Of::Process, "process", process, None, true)),
        }
    }
    let more = now.processes.iter().filter(|process| !processes.contains_key(&process.pid));
    found.extend(more.filter_map(|process| presence(Of::Process, "process", process, None, false)));
    found
}

/// The kernel that wrote the record, and the one here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kernel {
    Same,
    /// It may know items that the other does not, and brings other memory of its own.
    Other,
}

/// Whether an item is missing because a kernel does not have it, and for no other reason.
fn comes_with_the_kernel(item: &str) -> bool {
    const ITEMS: [&str; 11] = [
        "umask",
        "no-new-privileges",
        "seccomp",
        "semaphore",
        "huge-pages",
        "personality",
        "memory-policy",
        "rseq",
        "memory-barriers",
        "memory-merge",
        "autogroup",
    ];
    ITEMS.contains(&item) || table::OPTIONS.iter().any(|option| option.name == item)
}

/// That something exists only then, or only now.
fn presence(of: Of, item: &str, process: &Process, at: Option<i32>, was: bool) -> Option<Difference> {
    let there = |is: bool| is.then(|| "there".to_owned());
    Some(Difference {
        row: table::find(of, item)?,
        process: (process.pid, process.name.clone()),
        at,
        then: there(was),
        now: there(!was),
    })
}

/// The same process, then and now.
struct Pair<'a> {
    then: &'a Process,
    now: &'a Process,
    /// The processes of then.
    there: &'a BTreeMap<i32, &'a Process>,
    kernel: Kernel,
    names: &'a Names<'a>,
    found: &'a mut Vec<Difference>,
}

impl Pair<'_> {
    fn compare(mut self) {
        self.items(Of::Process, None, &self.then.items, &self.now.items);
        self.threads();
        self.descriptors();
        self.mappings();
    }

    fn threads(&mut self) {
        let (then, now) = (self.then, self.now);
        let here: BTreeMap<i32, &Items> = now.threads.iter().map(|thread| (thread.tid, &thread.items)).collect();
        for thread in &then.threads {
            match here.get(&thread.tid) {
                Some(now) => self.items(Of::Thread, Some(thread.tid), &thread.items, now),
                None => self.found.extend(presence(Of::Thread, "thread", then, Some(thread.tid), true)),
            }
        }
        let more = here.keys().filter(|tid| then.threads.iter().all(|thread| thread.tid != **tid));
        self.found.extend(more.filter_map(|tid| presence(Of::Thread, "thread", then, Some(*tid), false)));
    }

    fn descriptors(&mut self) {
        let (then, now) = (self.then, self.now);
        let here: BTreeMap<i32, &Descriptor> = now.descriptors.iter().map(|now| (now.number, now)).collect();
        let mut known = BTreeSet::new();
        for descriptor in &then.descriptors {
            let number = descriptor.number;
            known.insert(number);
            match here.get(&number) {
                Some(_) if descriptor.items.contains_key(LEFT_OUT) => {}
                Some(now) if was_closed(&descriptor.items, &now.items) => {
                    self.closed(number, &descriptor.items, &now.items);
                }
                Some(now) => self.items(Of::Descriptor, Some(number), &descriptor.items, &now.items),
                None => self.found.extend(presence(Of::Descriptor, "descriptor", then, Some(number), true)),
            }
        }
        let more = here.keys().filter(|number| !known.contains(*number));
        self.found.extend(more.filter_map(|number| presence(Of::Descriptor, "descriptor", then, Some(*number), false)));
    }

    /// What a program loses with a connection that the image has closed. To be closed is what happens to connections, but the
    /// program must learn it by an error: the end of what it reads would look complete.
    fn closed(&mut self, number: i32, then: &Items, now: &Items) {
        let lost = match then.get("state").map(String::as_str) {
            Some("connecting") => Some("state"),
            // It had been closed before, by the other end.
            Some("closed") => Some("readable"),
            _ => None,
        };
        let lost = lost.and_then(|item| table::find(Of::Descriptor, item));
        let lost = lost.filter(|row| differs(row.how, then.get(row.item), now.get(row.item)));
        let told = lost.map(|row| (Row { means: Means::Told, ..row }, then.get(row.item).cloned()));
        let has_ended = then.get("state").is_some_and(|state| state == "closed")
            || then.get("shutdown").is_some_and(|over| over != table::OVER[0]);
        let lacks_data = differs(How::AtLeast, then.get("readable"), now.get("readable"));
        let wanted = if has_ended && !lacks_data { then.get("error").cloned() } else { Some(table::ERROR.to_owned()) };
        let fails = |row: &Row| now.get("error").is_some_and(|now| differs(row.how, wanted.as_ref(), Some(now)));
        let error = table::find(Of::Descriptor, "error").filter(fails);
        let process = (self.then.pid, self.then.name.clone());
        self.found.extend(told.into_iter().chain(error.map(|row| (row, wanted))).map(|(row, then)| Difference {
            row,
            process: process.clone(),
            at: Some(number),
            then,
            now: now.get(row.item).cloned(),
        }));
    }

    fn mappings(&mut self) {
        let Some(row) = table::find(Of::Mapping, "mapping") else { return };
        let now: BTreeMap<u64, &Mapping> = self.now.mappings.iter().map(|mapping| (mapping.start, mapping)).collect();
        let then: BTreeMap<u64, &Mapping> = self.then.mappings.iter().map(|mapping| (mapping.start, mapping)).collect();
        let gaps = Gaps::of(&self.then.mappings, self.kernel);
        let is_not_the_jobs = |mapping: &Mapping| {
            gaps.touch(mapping) || (self.kernel == Kernel::Other && is_of_the_kernel(&mapping.name))
        };
        let starts: BTreeSet<u64> = then.keys().chain(now.keys()).copied().collect();
        for start in starts {
            let (then, now) = (then.get(&start), now.get(&start));
            let left_out = [then, now].into_iter().flatten().any(|mapping| is_not_the_jobs(mapping));
            let is_same = match (then, now) {
                (Some(then), Some(now)) => self.names.is_same(then, now),
                _ => false,
            };
            if !is_same && !left_out {
                self.found.push(Difference {
                    row,
                    process: (self.then.pid, self.then.name.clone()),
                    at: None,
                    then: then.map(ToString::to_string),
                    now: now.map(ToString::to_string),
                });
            }
        }
    }

    /// An item that only one of them has is none of the other object, or was not known to its kernel.
    fn items(&mut self, of: Of, at: Option<i32>, then: &Items, now: &Items) {
        let names: BTreeSet<&String> = then.keys().chain(now.keys()).collect();
        // CRIU makes a file without a name under another one if that name has been given to another file since.
        let is_nameless = [then, now].iter().all(|items| items.get("deleted").is_some_and(|deleted| deleted == "yes"));
        for name in names {
            if answers::is_unknown(name, then, now) {
                continue;
            }
            let (then, now) = (then.get(name), now.get(name));
            let Some(row) = table::find(of, name).filter(|row| differs(row.how, then, now)) else { continue };
            let is_unknown = self.kernel == Kernel::Other && then.is_some() != now.is_some();
            if is_unknown && comes_with_the_kernel(name) {
                continue;
            }
            if row.item == "path" && is_nameless {
                continue;
            }
            let program = (row.item == "executable").then(|| self.program(then, now));
            let mut means = match program.flatten() {
                Some(Name::Gone) => continue,
                Some(Name::Other) => Means::Told,
                None => row.means,
            };
            if matches!(row.item, "session" | "process-group") && self.has_another_leader(then, now) {
                means = Means::Told;
            }
            self.found.push(Difference {
                row: Row { means, ..row },
                process: (self.then.pid, self.then.name.clone()),
                at,
                then: then.cloned(),
                now: now.cloned(),
            });
        }
    }
}

/// What a program is called that is the same file as before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Name {
    /// It has no name.
    Gone,
    /// It has another of its names: a program that looks at /proc/self/exe can notice.
    Other,
}

impl Pair<'_> {
    /// What has become of the name of the program, if `now` is the file of `then`. A program is mapped, too.
    fn program(&self, then: Option<&String>, now: Option<&String>) -> Option<Name> {
        let (then, now) = (then?, now?);
        let mapping = self.then.mappings.iter().find(|mapping| mapping.name == *then);
        let is_same = self.names.lead_to_one_file(mapping.and_then(|mapping| mapping.names), then, now);
        is_same.then(|| if is_nameless(then) && is_nameless(now) { Name::Gone } else { Name::Other })
    }

    /// A session or process group whose leader has ended cannot be made: a process of that session leads it now.
    fn has_another_leader(&self, then: Option<&String>, now: Option<&String>) -> bool {
        let process = |value: Option<&String>| self.there.get(&value?.parse().ok()?).copied();
        let session = |process: &Process| process.items.get("session").cloned();
        process(then).is_none() && process(now).is_some_and(|leader| session(leader) == session(self.then))
    }
}

/// A connection that the image has closed on purpose ([`crate::table`] is for what is lost): all else of it is new.
fn was_closed(then: &Items, now: &Items) -> bool {
    let is_tcp = |items: &Items| items.get("protocol").is_some_and(|protocol| protocol == "6");
    let state = |items: &Items| items.get("state").cloned().unwrap_or_default();
    let is_on_purpose = || match state(then).as_str() {
        "connected" => then.contains_key(CLOSED_IN_IMAGE),
        // It was not there yet, or no more.
        then => matches!(then, "connecting" | "closed"),
    };
    is_tcp(then) && is_tcp(now) && state(now) == "closed" && is_on_purpose()
}

/// Memory that each kernel gives every process: the vDSO and its data. CRIU puts that of another kernel elsewhere, and leaves
/// the old one as a copy.
fn is_of_the_kernel(name: &str) -> bool {
    ["[vdso]", "[vvar]", "[vvar_vclock]", "[vsyscall]"].contains(&name)
}

/// The names of the files that had several.
struct Names<'a> {
    files: &'a [BTreeSet<String>],
    /// Whether one of them is gone.
    is_gone: Vec<bool>,
}

impl Names<'_> {
    fn of(record: &Record) -> Names<'_> {
        let is_gone = record.names.iter().map(|names| names.iter().any(|name| is_nameless(name))).collect();
        Names { files: &record.names, is_gone }
    }

    fn is_same(&self, then: &Mapping, now: &Mapping) -> bool {
        let place = |mapping: &Mapping| (mapping.start, mapping.end, mapping.offset);
        place(then) == place(now)
            && then.access == now.access
            && self.lead_to_one_file(then.names, &then.name, &now.name)
    }

    /// Whether the file that is called `now` is that of `then`, which had those names.
    fn lead_to_one_file(&self, names: Option<usize>, then: &str, now: &str) -> bool {
        let had = |name: &str| names.and_then(|at| self.files.get(at)).is_some_and(|names| names.contains(name));
        let was_gone = is_nameless(then) || names.and_then(|at| self.is_gone.get(at)).is_some_and(|gone| *gone);
        then == now || had(now) || (was_gone && is_nameless(now))
    }
}

/// Whether the name of a file is gone. One that had several, and none now, has the last of any of them.
fn is_nameless(name: &str) -> bool {
    let is_memory = ["/memfd:", "/dev/zero", "/SYSV"].iter().any(|mark| name.starts_with(mark));
    name.ends_with(" (deleted)") && !is_memory
}

/// Memory that is not in the image, or is another kernel's, in order and joined.
struct Gaps(Vec<(u64, u64)>);

impl Gaps {
    fn of(mappings: &[Mapping], kernel: Kernel) -> Gaps {
        let is_other = |mapping: &Mapping| kernel == Kernel::Other && is_of_the_kernel(&mapping.name);
        let left_out = mappings.iter().filter(|mapping| mapping.name == LEFT_OUT || is_other(mapping));
        let mut all: Vec<(u64, u64)> = left_out.map(|mapping| (mapping.start, mapping.end)).collect();
        all.sort_unstable();
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for (start, end) in all {
            match joined.last_mut() {
                Some((_, last)) if start <= *last => *last = end.max(*last),
                _ => joined.push((start, end)),
            }
        }
        Gaps(joined)
    }

    /// Whether it is, overlaps, or is the neighbour of one: the kernel may join what is there now with its neighbours.
    fn touch(&self, mapping: &Mapping) -> bool {
        let Gaps(all) = self;
        let after = all.partition_point(|(_, end)| *end < mapping.start);
        all.get(after).is_some_and(|(start, _)| *start <= mapping.end)
    }
}

fn differs(how: How, then: Option<&String>, now: Option<&String>) -> bool {
    match how {
        How::Equal => then != now,
        How::Lines => lines(then) != lines(now),
        How::Watched => watch_others(then, now),
        How::Flags => match (octal(then), octal(now)) {
            (Some(then), Some(now)) => (then ^ now) & !ONLY_AT_OPEN != 0,
            _ => then != now,
        },
        How::AtLeast => match (number(then, 10), number(now, 10)) {
            (Some(then), Some(now)) => now < then,
            _ => then != now,
        },
        How::AtLeastThese => match (number(then, 16), number(now, 16)) {
            // It was not known: see `read::thread`.
            (None, Some(_)) if then.is_none() => false,
            (Some(then), Some(now)) => then & !now != 0,
            _ => then != now,
        },
        How::Over => {
            let over = |value: &String| table::OVER.iter().position(|over| over == value);
            match (then.and_then(over), now.and_then(over)) {
                (Some(then), Some(now)) => now < then,
                _ => then != now,
            }
        }
        // It may have fired meanwhile, in both.
        How::TimeLeft => match (number(then, 10), number(now, 10)) {
            (Some(then), Some(now)) => now > then.saturating_add(CLOCKS_DIFFER),
            _ => false,
        },
        How::Ranges => match (then, now) {
            (Some(then), Some(now)) => !advice::differing(then, now).is_empty(),
            // One of them was too large.
            _ => false,
        },
        How::TimesLeft => have_other_times(then, now),
        How::Never => then != now,
    }
}

/// How long a restore may take from the first timer that it starts to the look at all of them, in nanoseconds.
const STARTED_WITHIN: u64 = 600_000_000_000;
/// A timer with less time left may have fired meanwhile, and one that fires once is over then.
const MAY_FIRE: u64 = 10_000_000_000;

/// Whether two sets of timers differ in more than the time that passes.
fn have_other_times(then: Option<&String>, now: Option<&String>) -> bool {
    fn times(value: Option<&String>) -> BTreeMap<&str, u64> {
        let lines = value.into_iter().flat_map(|text| text.lines());
        let lines = lines.filter_map(|line| line.rsplit_once(' '));
        lines.filter_map(|(timer, left)| Some((timer, left.parse().ok()?))).collect()
    }
    let (then, now) = (times(then), times(now));
    // One that repeats may have begun anew.
    let interval = |timer: &str| timer.split(' ').rev().nth(1).and_then(|interval| interval.parse().ok()).unwrap_or(0);
    let most = |timer: &str, left: u64| if left > MAY_FIRE { left } else { left.max(interval(timer)) };
    let is_lost = |timer: &str, left: u64| match now.get(timer).copied().unwrap_or_default() {
        // It was not running, or it is over.
        0 => left > MAY_FIRE,
        now => now > most(timer, left).saturating_add(CLOCKS_DIFFER) || now.saturating_add(STARTED_WITHIN) < left,
    };
    then.iter().any(|(timer, left)| is_lost(timer, *left)) || now.keys().any(|timer| !then.contains_key(timer))
}

/// O_DIRECTORY and O_TMPFILE (which contains it) say what open(2) may open, and nothing about the file that it opened. CRIU
/// opens a file whose name is gone by another name, and without them.
const ONLY_AT_OPEN: u64 = 0o20_200_000;

/// How a record marks a file that an epoll set watches under a number that leads to another file by now, or to none.
pub(crate) const CLOSED: &str = "closed";

fn lines(value: Option<&String>) -> Vec<&str> {
    let mut lines: Vec<&str> = value.into_iter().flat_map(|text| text.lines()).collect();
    lines.sort_unstable();
    lines
}

/// Whether two epoll sets watch different files. A file whose number was closed has a restored set under another number that
/// leads to it: the events and the data that it reports are the same, and nobody could name it by the old number.
fn watch_others(then: Option<&String>, now: Option<&String>) -> bool {
    let (then, now) = (lines(then), lines(now));
    let mut count: BTreeMap<&str, i64> = BTreeMap::new();
    now.iter().for_each(|line| *count.entry(line).or_default() += 1);
    then.iter().for_each(|line| *count.entry(line).or_default() -= 1);
    let mut closed: BTreeMap<&str, i64> = BTreeMap::new();
    for (line, count) in count.into_iter().filter(|(_, count)| *count != 0) {
        match line.split_once(' ') {
            Some((CLOSED, what)) => *closed.entry(what).or_default() += count,
            Some((_, what)) if count > 0 => *closed.entry(what).or_default() += count,
            // A number that was open leads elsewhere now.
            _ => return true,
        }
    }
    closed.into_values().any(|count| count != 0)
}

/// Nanoseconds by which two readings of a timer's clock may differ.
const CLOCKS_DIFFER: u64 = 1_000_000_000;

fn octal(value: Option<&String>) -> Option<u64> {
    u64::from_str_radix(value?, 8).ok()
}

fn number(value: Option<&String>, radix: u32) -> Option<u64> {
    u64::from_str_radix(value?, radix).ok()
}

impl fmt::Display for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}-{:x} {} {:x} {}", self.start, self.end, self.access, self.offset, self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Thread;

    fn items(pairs: &[(&str, &str)]) -> Items {
        pairs.iter().map(|(item, value)| ((*item).to_owned(), (*value).to_owned())).collect()
    }

    fn process(pid: i32) -> Process {
        Process {
            pid,
            name: "job".into(),
            items: items(&[("umask", "0022"), ("from-a-newer-version", "1")]),
            threads: vec![Thread { tid: pid, items: items(&[("timer-slack", "50000")]) }],
            descriptors: vec![Descriptor { number: 3, items: items(&[("kind", "eventfd"), ("count", "5")]) }],
            mappings: vec![Mapping { start: 1, end: 2, access: "rw-p".into(), offset: 0, ..Mapping::default() }],
        }
    }

    fn record(processes: Vec<Process>) -> Record {
        Record { processes, ..Record::default() }
    }

    fn words(found: &[Difference]) -> Vec<String> {
        found.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn each_object_is_named_with_both_values() {
        let (then, mut now) = (record(vec![process(1001), process(1002)]), record(vec![process(1001), process(1003)]));
        let changed = &mut now.processes[0];
        changed.items = items(&[("umask", "0077")]);
        changed.threads[0].items = items(&[("timer-slack", "1")]);
        changed.descriptors[0].number = 4;
        changed.mappings[0].end = 3;
        let found = compare(&then, &now);
        assert_eq!(
            words(&found),
            [
                "process 1001 (job): umask: was 0022, is 0077",
                "process 1001 (job): timer slack: was 50000, is 1",
                "descriptor 3 of process 1001 (job): whether it exists: was there, is nothing",
                "descriptor 4 of process 1001 (job): whether it exists: was nothing, is there",
                "process 1001 (job): address, size, protection, file and offset: was 1-2 rw-p 0 , is 1-3 rw-p 0 ",
                "process 1002 (job): whether it exists: was there, is nothing",
                "process 1003 (job): whether it exists: was nothing, is there",
            ]
        );
        assert_eq!(found[1].row.means, Means::PutBack);
        assert!(compare(&then, &then).is_empty());
    }

    #[test]
    fn a_connection_that_was_closed_is_no_difference() {
        let socket = |state: &str, port: &str| {
            let mut items = items(&[
                ("kind", "socket"),
                ("protocol", "6"),
                ("state", state),
                ("address", port),
                ("SO_KEEPALIVE", "1"),
            ]);
            if state == "connected" {
                items.insert(CLOSED_IN_IMAGE.into(), "yes".into());
            }
            items
        };
        let with = |items: Items| {
            let mut process = process(1);
            process.descriptors[0].items = items;
            record(vec![process])
        };
        // It has to learn by an error that it was closed: what it has read would look complete.
        let erring = |error: &str, mut items: Items| {
            items.insert("error".into(), error.into());
            items
        };
        let (then, now) = (erring("0", socket("connected", "a:1")), socket("closed", "b:2"));
        assert!(compare(&with(then.clone()), &with(erring("1", now.clone()))).is_empty());
        let found = compare(&with(then.clone()), &with(erring("0", now.clone())));
        assert!(found.len() == 1 && found[0].row.item == "error" && found[0].row.means == Means::PutBack, "{found:?}");
        // One inside the job is in the image: it must not be closed.
        let mut inside = then.clone();
        inside.remove(CLOSED_IN_IMAGE);
        let found = compare(&with(inside), &with(erring("1", now.clone())));
        assert!(found.iter().any(|it| it.row.item == "state" && it.row.means == Means::Refused), "{found:?}");
        // The other end had closed it, and all was read.
        let ended = |length: &str| {
            let mut items = then.clone();
            items.extend([("shutdown".into(), "to receive".into()), ("readable".into(), length.into())]);
            items
        };
        let mut now = erring("0", now);
        now.insert("readable".into(), "0".into());
        assert!(compare(&with(ended("0")), &with(now.clone())).is_empty());
        assert_eq!(compare(&with(ended("3")), &with(now)).len(), 1, "what it had not read is lost");
        let told = |then: Items, now: Items| {
            let found = compare(&with(then), &with(now));
            assert!(found.iter().all(|difference| difference.row.means == Means::Told), "{found:?}");
            found.into_iter().map(|difference| difference.row.item).collect::<Vec<_>>()
        };
        assert_eq!(told(socket("connecting", "a:1"), socket("closed", "b:2")), ["state"]);
        let unread = |length: &str| {
            let mut items = socket("closed", "a:1");
            items.insert("readable".into(), length.into());
            items
        };
        assert_eq!(told(unread("3"), unread("0")), ["readable"]);
        assert_eq!(told(unread("3"), unread("3")), [""; 0]);
        assert_eq!(compare(&with(socket("listens", "a:1")), &with(socket("closed", "a:1"))).len(), 1);
        assert_eq!(compare(&with(socket("closed", "a:1")), &with(socket("connected", "a:1"))).len(), 1);
    }

    #[test]
    fn a_session_whose_leader_has_ended_is_a_new_one() {
        let with = |session: &str, leader: i32| {
            let member = |pid| Process { items: items(&[("session", session)]), ..process(pid) };
            let leader = Process { items: items(&[("session", "1000")]), ..process(leader) };
            record(vec![leader, member(1003), member(1004)])
        };
        let means = |then, now| compare(&then, &now).into_iter().map(|found| found.row.means).collect::<Vec<_>>();
        // A daemon, and a child of it, whose leader is 1003 now.
        assert_eq!(means(with("1002", 1001), with("1003", 1001)), [Means::Told; 2]);
        assert_eq!(means(with("1002", 1002), with("1003", 1002)), [Means::Refused; 2], "its leader is there");
        assert_eq!(means(with("1002", 1001), with("1001", 1001)), [Means::Refused; 2], "the session of another");
    }

    #[test]
    fn a_name_that_is_gone_is_not_compared() {
        let with = |path: &str, deleted: &str| {
            let mut process = process(1);
            process.descriptors[0].items = items(&[("kind", "file"), ("path", path), ("deleted", deleted)]);
            record(vec![process])
        };
        assert!(compare(&with("/a", "yes"), &with("/a.cr_link", "yes")).is_empty());
        assert_eq!(compare(&with("/a", "no"), &with("/b", "no")).len(), 1);
        assert_eq!(compare(&with("/a", "yes"), &with("/b", "no")).len(), 2);
    }

    #[test]
    fn a_file_without_a_name_may_have_had_several() {
        let with = |name: &str, end: u64| {
            let mut process = process(1);
            let mapping = Mapping { start: 10, end, access: "r--p".into(), offset: 0, name: name.into(), names: None };
            process.mappings = vec![mapping];
            record(vec![process])
        };
        assert!(compare(&with("/a (deleted)", 20), &with("/b (deleted)", 20)).is_empty());
        for (then, now, end) in [
            ("/a (deleted)", "/b", 20),
            ("/a", "/b", 20),
            ("/a (deleted)", "/b (deleted)", 30),
            ("/memfd:a (deleted)", "/memfd:b (deleted)", 20),
        ] {
            assert_eq!(compare(&with(then, 20), &with(now, end)).len(), 1, "{then} {now}");
        }
    }

    /// CRIU gives a file one name in all processes.
    #[test]
    fn a_file_with_several_names_is_one_file() {
        let with = |name: &str, names: Option<usize>| {
            let mut process = process(1);
            process.items = items(&[("executable", name)]);
            let mapping = Mapping { start: 10, end: 20, access: "r--p".into(), offset: 0, name: name.into(), names };
            process.mappings = vec![mapping];
            let files = [["/a", "/b"], ["/c", "/d (deleted)"]];
            let names = files.map(|names| names.into_iter().map(ToOwned::to_owned).collect()).into();
            Record { names, ..record(vec![process]) }
        };
        for (then, names, now) in [
            ("/a", Some(0), "/b"),
            ("/c", Some(1), "/d (deleted)"),
            ("/d (deleted)", Some(1), "/c"),
            // CRIU makes it under another name if that one has been given to another file since.
            ("/c", Some(1), "/d.cr_link (deleted)"),
            ("/e (deleted)", None, "/e.cr_link (deleted)"),
        ] {
            let found = compare(&with(then, names), &with(now, None));
            let is_told = |found: &Difference| found.row.item == "executable" && found.row.means == Means::Told;
            assert!(found.iter().all(is_told), "{then} {now} {found:?}");
            assert_eq!(found.is_empty(), then.starts_with("/e"), "{then} {now}");
        }
        for (then, names, now) in [
            ("/a", Some(0), "/c"),
            ("/a", Some(0), "/b (deleted)"),
            ("/c", Some(1), "/a"),
            ("/a", None, "/b"),
            ("/a", Some(9), "/b"),
            ("/e", None, "/e (deleted)"),
        ] {
            assert_eq!(compare(&with(then, names), &with(now, None)).len(), 2, "{then} {now}");
        }
    }

    #[test]
    fn what_was_left_out_on_purpose_is_no_difference() {
        let mut then = process(1);
        then.mappings = [(10, 20), (20, 30), (50, 60)]
            .map(|(start, end)| Mapping {
                start,
                end,
                access: "rw-s".into(),
                offset: 0,
                name: "/dev/nvidia0".into(),
                names: None,
            })
            .into();
        then.mappings[1].leave_out();
        then.descriptors[0].leave_out();
        let mut now = process(1);
        now.descriptors[0].items = items(&[("kind", "file"), ("path", "/dev/null")]);
        // Joined with the one before it.
        now.mappings = vec![Mapping { start: 10, end: 30, access: "rw-p".into(), offset: 0, ..Mapping::default() }];
        let found = compare(&record(vec![then.clone()]), &record(vec![now.clone()]));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].then.as_deref().unwrap().starts_with("32-3c"), "{found:?}");
        now.descriptors.clear();
        assert_eq!(compare(&record(vec![then]), &record(vec![now])).len(), 2, "it must be there");
    }

    /// A newer kernel knows more, and its vDSO is larger.
    #[test]
    fn another_kernel_is_no_difference() {
        let mapping = |start, end, access: &str, name: &str| Mapping {
            start,
            end,
            access: access.into(),
            offset: 0,
            name: name.into(),
            names: None,
        };
        let (mut then, mut now) = (process(1), process(1));
        then.mappings.extend([mapping(0x5000, 0x9000, "r--p", "[vvar]"), mapping(0x9000, 0xb000, "r-xp", "[vdso]")]);
        now.mappings.extend([
            mapping(0x5000, 0x9000, "r--p", ""),
            mapping(0x9000, 0xb000, "r-xp", ""),
            mapping(0x2_0000, 0x2_6000, "r--p", "[vvar]"),
            mapping(0x2_6000, 0x2_8000, "r-xp", "[vdso]"),
        ]);
        then.items.remove("umask");
        now.descriptors[0].items.insert("semaphore".into(), "0".into());
        let of = |process: &Process, kernel: &str| Record { kernel: kernel.into(), ..record(vec![process.clone()]) };
        assert!(compare(&of(&then, "6.1"), &of(&now, "6.18")).is_empty());
        assert_eq!(compare(&of(&then, "6.18"), &of(&now, "6.18")).len(), 6);
        // All else counts, whatever the kernel.
        now.descriptors[0].items.insert("count".into(), "6".into());
        now.mappings[0].end = 4;
        assert_eq!(compare(&of(&then, "6.1"), &of(&now, "6.18")).len(), 2);
    }

    /// A record without a signature can be anybody's: it may cost no more than reading it.
    #[test]
    fn a_large_record_takes_no_longer_than_its_length() {
        let many = 200_000;
        let strangers = record((0..many).map(process).collect());
        assert_eq!(compare(&strangers, &record(vec![])).len(), 200_000);
        let mut then = process(1);
        let at = |n: u64| Mapping { start: 4 * n, end: 4 * n + 1, access: "r".into(), offset: 0, ..Mapping::default() };
        then.mappings = (0..many.unsigned_abs().into()).map(at).collect();
        then.mappings.iter_mut().step_by(2).for_each(Mapping::leave_out);
        assert_eq!(compare(&record(vec![then]), &record(vec![process(1)])).len(), 100_000);
        let again = record((0..many).map(|_| process(1)).collect());
        assert_eq!(compare(&again, &record(vec![process(1)])).len(), 0);
    }

    /// As CRIU restores them: a file under a number that leads to it.
    #[test]
    fn an_epoll_set_may_watch_what_was_closed_under_another_number() {
        let differ = |then: &str, now: &str| differs(How::Watched, Some(&then.to_owned()), Some(&now.to_owned()));
        assert!(!differ("5 events 1 data 5\nclosed events 1d data 7", "9 events 1d data 7\n5 events 1 data 5"));
        assert!(!differ("closed events 1 data 1", "closed events 1 data 1"));
        assert!(!differ("closed events 1 data 1\nclosed events 1 data 1", "7 events 1 data 1\n8 events 1 data 1"));
        for (then, now) in [
            ("5 events 1 data 5", "6 events 1 data 5"),
            ("closed events 1 data 5", "6 events 1 data 6"),
            ("closed events 1 data 5", ""),
            ("", "6 events 1 data 5"),
            ("closed events 1 data 5\nclosed events 1 data 5", "6 events 1 data 5"),
            ("5 events 1 data 5", "closed events 1 data 5"),
        ] {
            assert!(differ(then, now), "{then:?} {now:?}");
        }
    }

    #[test]
    fn lines_have_no_order_and_time_passes() {
        let some = |text: &str| Some(text.to_owned());
        assert!(!differs(How::Lines, some("a\nb").as_ref(), some("b\na").as_ref()));
        assert!(differs(How::Lines, some("a\nb").as_ref(), some("a").as_ref()));
        // O_DIRECTORY and O_TMPFILE are of the past once the file is open; O_NONBLOCK is not.
        for (then, now, is_other) in [
            ("0200000", "00", false),
            ("020200002", "02", false),
            ("02", "00", true),
            ("04002", "02", true),
            ("x", "0", true),
        ] {
            assert_eq!(differs(How::Flags, some(then).as_ref(), some(now).as_ref()), is_other, "{then} {now}");
        }
        let differ = |how, then: &str, now: &str| differs(how, some(then).as_ref(), some(now).as_ref());
        assert!(!differ(How::TimeLeft, "500", "400") && differ(How::TimeLeft, "500", "2000000000"));
        assert!(!differ(How::Over, "no", "to receive") && differ(How::Over, "to send and to receive", "to receive"));
        assert!(differ(How::Over, "no", "odd") && !differ(How::Over, "odd", "odd"));
        assert!(!differ(How::AtLeast, "5", "6") && differ(How::AtLeast, "5", "4"));
        assert!(!differ(How::AtLeastThese, "04", "0c") && differ(How::AtLeastThese, "0c", "04"));
        let lines = Difference {
            row: table::find(Of::Process, "limits").unwrap(),
            then: some("a 1\nb 2\nc 3"),
            now: some("b 2\na 1"),
            ..compare(&record(vec![process(1)]), &record(vec![])).remove(0)
        };
        assert!(lines.to_string().ends_with("was c 3, is nothing"), "{lines}");
        let twice = Difference { then: some("a\na"), now: some("a"), ..lines };
        assert!(twice.to_string().ends_with("was a; a, is a"), "{twice}");
        let long = Difference {
            then: some(&"x\n".repeat(1000)),
            ..compare(&record(vec![process(1)]), &record(vec![])).remove(0)
        };
        assert!(long.to_string().len() < 400);
    }
}
