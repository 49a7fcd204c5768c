//! What only a thread itself can tell: in a dump as the image has it, in a restore as our plugin in CRIU has asked it
//! (`native/plugin/src/ask.rs` has the format).

use std::collections::BTreeMap;

use crate::record::{Items, Record};

/// What the threads of a job have answered, by their ids as the job sees them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answers(BTreeMap<i32, Told>);

/// What one has told, of itself and of its process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Told {
    thread: Items,
    process: Items,
}

/// Items that come from answers. Of those each thread, and each process, has the first.
pub(crate) const OF_THREAD: [&str; 4] = ["alternate-stack", "rseq", "parent-death-signal", "clear-at-end"];
pub(crate) const OF_PROCESS: [&str; 7] = [
    "dumpable",
    "signal-actions",
    "interval-timers",
    "timer-times",
    "memory-barriers",
    "child-subreaper",
    "secure-bits",
];

/// Whether an item comes from an answer that is missing on one side: a CRIU that loads no plugins asks nobody.
pub(crate) fn is_unknown(item: &str, then: &Items, now: &Items) -> bool {
    [&OF_THREAD[..], &OF_PROCESS].iter().any(|items| {
        items.contains(&item)
            && [then, now].iter().any(|side| !items.first().is_some_and(|first| side.contains_key(*first)))
    })
}

impl Answers {
    /// Parses them. Lines that are not known are left out.
    #[must_use]
    pub fn parse(text: &str) -> Answers {
        let mut all = BTreeMap::new();
        let mut current: Option<&mut Told> = None;
        for line in text.lines() {
            let mut words = line.split(' ');
            let (Some(name), values) = (words.next(), words.collect::<Vec<_>>()) else { continue };
            if name == "thread" {
                let id = values.first().and_then(|id| id.parse().ok());
                current = id.map(|id| all.entry(id).or_insert_with(Told::default));
            } else if let Some(told) = &mut current {
                told.add(name, &values);
            }
        }
        Answers(all)
    }
}

impl Told {
    fn add(&mut self, name: &str, values: &[&str]) {
        match (name, values) {
            ("signal", [number, handler, flags, restorer, mask]) => {
                let number = i32::from_str_radix(number, 16).unwrap_or_default();
                let action = format!("{number}: handler {handler} flags {flags} restorer {restorer} mask {mask}");
                line(&mut self.process, "signal-actions", &action);
            }
            ("interval-timer", [which, interval, left]) => {
                let clock = ["real", "virtual", "profiling"];
                let clock = which.parse().ok().and_then(|which: usize| clock.get(which)).unwrap_or(which);
                let us = |value: &str| value.parse::<u64>().unwrap_or_default().saturating_mul(1000);
                let timer = format!("{clock} interval {} left {}", us(interval), us(left));
                line(&mut self.process, "interval-timers", &timer);
            }
            ("timer", [id, interval, left]) => {
                line(&mut self.process, "timer-times", &format!("{id} interval {interval} left {left}"));
            }
            ("alternate-stack", [address, flags, size]) => {
                let stack = format!("{address} flags {} size {size}", stack_flags(flags));
                self.thread.insert(name.to_owned(), stack);
            }
            ("rseq", [address, size, signature]) => {
                self.thread.insert(name.to_owned(), format!("{address} size {size} signature {signature}"));
            }
            (_, [value]) if OF_THREAD.contains(&name) => {
                self.thread.insert(name.to_owned(), (*value).to_owned());
            }
            (_, [value]) if OF_PROCESS.contains(&name) => {
                self.process.insert(name.to_owned(), (*value).to_owned());
            }
            _ => {}
        }
    }
}

/// Without SS_ONSTACK: it says where the thread is now, which is known from its registers. In a thread that runs a signal
/// handler on this stack, CRIU asks on a stack of its own, and our plugin on that of the thread.
fn stack_flags(flags: &str) -> String {
    const ON_STACK: u32 = 1;
    u32::from_str_radix(flags, 16).map_or_else(|_| flags.to_owned(), |flags| format!("{:x}", flags & !ON_STACK))
}

/// Adds a line to an item.
fn line(items: &mut Items, item: &str, line: &str) {
    let lines = items.entry(item.to_owned()).or_default();
    if !lines.is_empty() {
        lines.push('\n');
    }
    lines.push_str(line);
}

impl Record {
    /// Adds what the threads have answered. Threads that are not in the record are left out.
    pub fn add(&mut self, Answers(mut answers): Answers) {
        for process in &mut self.processes {
            for thread in &mut process.threads {
                let Some(told) = answers.remove(&thread.tid) else { continue };
                thread.items.extend(told.thread);
                if thread.tid == process.pid {
                    process.items.extend(told.process);
                }
            }
        }
    }

    /// How many threads have answered.
    #[must_use]
    pub fn answered(&self) -> usize {
        let threads = self.processes.iter().flat_map(|process| &process.threads);
        threads.filter(|thread| OF_THREAD.first().is_some_and(|first| thread.items.contains_key(*first))).count()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::record::{Process, Thread};
    use crate::{compare, table};

    const TEXT: &str = "thread 12\nalternate-stack 7f00 2 2000\nparent-death-signal 9\nsignal 2 55 14000004 7f 0\n\
        signal 11 0 0 0 0\ninterval-timer 0 0 5000000\ntimer 0 0 100000000000\ndumpable 1\nof-tomorrow 7\n\
        thread 13\nalternate-stack 0 2 0\n";

    fn record(text: &str) -> Record {
        let thread = |tid| Thread { tid, items: Items::new() };
        let process = Process {
            pid: 12,
            name: "x".into(),
            items: Items::new(),
            threads: vec![thread(12), thread(13)],
            descriptors: Vec::new(),
            mappings: Vec::new(),
        };
        let mut record =
            Record { kernel: "6.18".into(), criu: "4.2".into(), processes: vec![process], names: Vec::new() };
        record.add(Answers::parse(text));
        record
    }

    fn items(then: &str, now: &str) -> Vec<&'static str> {
        compare(&record(then), &record(now)).into_iter().map(|difference| difference.row.item).collect()
    }

    #[test]
    fn an_answer_that_changed_is_found_and_one_that_is_missing_is_not_compared() {
        assert_eq!(record(TEXT).answered(), 2);
        assert!(items(TEXT, TEXT).is_empty());
        assert!(items(TEXT, "").is_empty() && items("", TEXT).is_empty());
        let other = |from: &str, to: &str| items(TEXT, &TEXT.replace(from, to));
        assert_eq!(other("signal 2 55", "signal 2 56"), ["signal-actions"]);
        assert_eq!(other("signal 2 55 14000004 7f 0\n", ""), ["signal-actions"]);
        assert_eq!(other("dumpable 1", "dumpable 0"), ["dumpable"]);
        assert_eq!(other("parent-death-signal 9", "parent-death-signal 0"), ["parent-death-signal"]);
        assert_eq!(other("alternate-stack 7f00", "alternate-stack 7f10"), ["alternate-stack"]);
        assert_eq!(other("alternate-stack 7f00 2", "alternate-stack 7f00 0"), ["alternate-stack"]);
    }

    #[test]
    fn a_thread_may_run_on_its_alternate_stack() {
        let (then, now) = (TEXT.replace("7f00 2 ", "7f00 0 "), TEXT.replace("7f00 2 ", "7f00 1 "));
        assert!(items(&then, &now).is_empty());
        // SS_AUTODISARM
        assert!(items(&then.replace("7f00 0", "7f00 80000000"), &then.replace("7f00 0", "7f00 80000001")).is_empty());
        assert_eq!(items(&then, &then.replace("7f00 0", "7f00 80000000")), ["alternate-stack"]);
    }

    #[test]
    fn a_timer_goes_on_and_none_is_lost() {
        let other = |from: &str, to: &str| items(TEXT, &TEXT.replace(from, to));
        // It may have fired, if that was due.
        assert!(other("interval-timer 0 0 5000000\n", "").is_empty());
        assert!(other("5000000", "4000000").is_empty());
        assert_eq!(other("interval-timer 0 0 5000000", "interval-timer 0 1 5000000"), ["interval-timers"]);
        assert_eq!(other("5000000", "50000000"), ["interval-timers"]);
        assert!(other("100000000000", "99000000000").is_empty());
        assert_eq!(other("timer 0 0 100000000000\n", ""), ["timer-times"]);
        assert_eq!(other("timer 0 0 100000000000", "timer 0 0 0"), ["timer-times"]);
        assert_eq!(other("100000000000", "2000000000000"), ["timer-times"]);
    }

    #[test]
    fn the_table_knows_each_answer() {
        assert!(OF_THREAD.iter().all(|item| table::find(table::Of::Thread, item).is_some()));
        assert!(OF_PROCESS.iter().all(|item| table::find(table::Of::Process, item).is_some()));
    }

    proptest! {
        #[test]
        fn no_text_does_harm(text in "([a-z-]{0,8} ?[0-9a-f ]{0,12}\n){0,20}") {
            let _ = Answers::parse(&text);
        }
    }
}
