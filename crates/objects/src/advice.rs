//! What a program has said of its memory (madvise(2), mlock(2), mbind(2), mseal(2)), by ranges of addresses.
//!
//! The kernel shows it in /proc/PID/smaps and numa_maps, and counts all pages for that: 6 ms for a GiB of small ones. So it
//! is read while the job runs, of processes that are not too large, and used where a range is still the same when the job
//! stands still.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::policy;

/// Of each process, by the pid that we see.
#[derive(Debug, Clone, Default)]
pub struct Advice(BTreeMap<i32, Vec<Range>>);

/// A range of memory, and what was said of it: names of flags as in smaps(proc(5)), and a policy.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Range {
    start: u64,
    end: u64,
    said: String,
}

/// More memory than this is not looked at: the process cannot map any meanwhile.
const LARGEST: u64 = 1 << 30;

/// The flags of smaps that a program has asked for.
const FLAGS: [&str; 16] =
    ["gd", "lo", "lf", "sr", "rr", "dc", "dd", "wf", "hg", "nh", "mg", "nr", "ht", "um", "uw", "sl"];

/// A range of which nothing was said.
const NOTHING: &str = "-";

impl Advice {
    /// Reads it. Processes that are too large are left out.
    #[must_use]
    pub fn read(tree: &[i32]) -> Advice {
        let of = |pid: &i32| {
            let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
            let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
            let smaps = || std::fs::read_to_string(format!("/proc/{pid}/smaps")).ok();
            let policies = || std::fs::read_to_string(format!("/proc/{pid}/numa_maps")).unwrap_or_default();
            (pages.saturating_mul(PAGE) <= LARGEST).then(|| Some((*pid, parse(&smaps()?, &policies()))))?
        };
        Advice(tree.iter().filter_map(of).collect())
    }

    /// The item of a process whose memory is now as in this table (/proc/PID/maps). `None` if it was not read.
    pub(crate) fn of(&self, pid: i32, maps: &str) -> Option<String> {
        let still: BTreeMap<u64, u64> = maps.lines().filter_map(bounds).collect();
        let mut all: Vec<Range> = Vec::new();
        for range in self.0.get(&pid)?.iter().filter(|range| still.get(&range.start) == Some(&range.end)) {
            match all.last_mut() {
                Some(last) if last.end == range.start && last.said == range.said => last.end = range.end,
                _ => all.push(range.clone()),
            }
        }
        let mut text = String::new();
        for Range { start, end, said } in all {
            let _ = writeln!(text, "{start:x}-{end:x} {said}");
        }
        Some(text.trim_end().to_owned())
    }
}

const PAGE: u64 = 4096;

/// The addresses at the beginning of a line.
fn bounds(line: &str) -> Option<(u64, u64)> {
    let (start, end) = line.split(' ').next()?.split_once('-')?;
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    Some((number(start)?, number(end)?))
}

fn parse(smaps: &str, policies: &str) -> Vec<Range> {
    // Of memory without a policy of its own the kernel shows that of the thread.
    let common = policies.lines().next().and_then(policy::policy_of);
    let policies: BTreeMap<u64, &str> = policies
        .lines()
        .filter_map(|line| {
            let start = u64::from_str_radix(line.split(' ').next()?, 16).ok()?;
            policy::policy_of(line).filter(|policy| Some(*policy) != common).map(|policy| (start, policy))
        })
        .collect();
    let mut all: Vec<Range> = Vec::new();
    for line in smaps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let Some(range) = all.last_mut() else { continue };
            let flags = flags.split_whitespace().filter(|flag| FLAGS.contains(flag));
            let policy = policies.get(&range.start).map(|policy| policy.replace(' ', ""));
            let said: Vec<String> = flags.map(ToOwned::to_owned).chain(policy).collect();
            range.said = if said.is_empty() { NOTHING.to_owned() } else { said.join(" ") };
        } else if let Some((start, end)) = bounds(line) {
            all.push(Range { start, end, said: NOTHING.to_owned() });
        }
    }
    all
}

/// The ranges of which something else was said, then and now. Those that only one of them has are not compared.
pub(crate) fn differing(then: &str, now: &str) -> Vec<(String, String)> {
    let ranges = |text: &'_ str| -> Vec<Range> {
        let range = |line: &str| {
            let (start, end) = bounds(line)?;
            Some(Range { start, end, said: line.split_once(' ')?.1.to_owned() })
        };
        text.lines().filter_map(range).collect()
    };
    let now = ranges(now);
    let mut found = Vec::new();
    for then in ranges(then) {
        // Both are in order.
        let first = now.partition_point(|now| now.end <= then.start);
        let overlap = now.iter().skip(first).take_while(|now| now.start < then.end);
        for now in overlap.filter(|now| now.said != then.said) {
            let (start, end) = (then.start.max(now.start), then.end.min(now.end));
            let line = |said: &str| format!("{start:x}-{end:x} {said}");
            found.push((line(&then.said), line(&now.said)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "1000-2000 r--p 00000000 fe:00 247030    /usr/bin/cat\nSize:  4 kB\nVmFlags: rd mr mw me \n\
        2000-3000 r--p 00000000 fe:00 247030    /usr/bin/cat\nSize:  4 kB\nVmFlags: rd mr mw me \n\
        5000-9000 rw-p 00000000 00:00 0 \nVmFlags: rd wr mr mw me lo dd ac \n";
    const POLICIES: &str = "1000 default file=/usr/bin/cat\n2000 default x\n5000 prefer (many):0 anon=1\n";

    fn advice(smaps: &str, policies: &str) -> Advice {
        Advice(BTreeMap::from([(1, parse(smaps, policies))]))
    }

    #[test]
    fn what_was_said_is_known_of_memory_that_is_still_the_same() {
        let all = advice(SMAPS, POLICIES);
        let of = |maps| all.of(1, maps);
        let maps = "1000-2000 r--p\n2000-3000 r--p\n5000-9000 rw-p\n";
        assert_eq!(of(maps).unwrap(), "1000-3000 -\n5000-9000 lo dd prefer(many):0");
        assert_eq!(of(&maps.replace("9000", "8000")).unwrap(), "1000-3000 -");
        assert_eq!(all.of(2, maps), None);
        assert_eq!(advice(SMAPS, "").of(1, "5000-9000 rw-p").unwrap(), "5000-9000 lo dd");
    }

    #[test]
    fn only_ranges_that_both_have_are_compared() {
        let then = "1000-3000 -\n5000-9000 lo dd";
        let differ = |now: &str| differing(then, now).into_iter().map(|(then, now)| [then, now]).collect::<Vec<_>>();
        let none = Vec::<[String; 2]>::new();
        assert_eq!(differ(then), none);
        assert_eq!(differ(""), none);
        assert_eq!(differ("1000-2000 -\n2000-3000 -\n4000-5000 dd\n5000-9000 lo dd\n9000-a000 dd"), none);
        assert_eq!(differ("5000-9000 lo"), [["5000-9000 lo dd", "5000-9000 lo"]]);
        assert_eq!(
            differ("1000-5800 lo dd\n5800-6000 -"),
            [["1000-3000 -", "1000-3000 lo dd"], ["5800-6000 lo dd", "5800-6000 -"]]
        );
    }

    #[test]
    fn our_own_memory_is_read() {
        let pid = std::process::id().cast_signed();
        let advice = Advice::read(&[pid]);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let text = advice.of(pid, &maps).unwrap();
        assert!(text.lines().count() > 1 && differing(&text, &text).is_empty(), "{text}");
    }
}
