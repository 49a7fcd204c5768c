//! /proc/PID/fdinfo/N (proc_pid_fdinfo(5)): position and flags of every descriptor, and what each kind adds.

use std::collections::BTreeMap;

use crate::compare::CLOSED;
use crate::inotify::FLAGS;
use crate::record::Items;

/// Adds the items of this file. `nameless` is the descriptor that has a file with this inode and device, whose name is gone.
pub(super) fn items(text: &str, nameless: impl Fn(u64, u64) -> Option<String>, items: &mut Items) {
    lines(text, nameless, items);
    let is = |item: &str| items.get(item).is_some_and(|value| value != "0");
    if items.contains_key("time-left") {
        // Of one that has fired and was not read the kernel shows no time left.
        let armed = if is("time-left") || is("interval") || is("ticks") { "yes" } else { "no" };
        // The time of a wall clock may have been set, and is another on another machine.
        let is_running = is("time-left") && items.get("clock").is_none_or(|clock| !clock.starts_with("clock 0"));
        put(items, "armed", armed);
        if !is_running {
            items.remove("time-left");
        }
    }
}

fn lines(text: &str, nameless: impl Fn(u64, u64) -> Option<String>, items: &mut Items) {
    for line in text.lines() {
        if line.starts_with("inotify wd") {
            match watched_file(line).and_then(|(inode, device)| nameless(inode, device)) {
                Some(file) => add(items, "inotify-nameless", format!("{} of {file}", watch(line))),
                None => inotify(line, items),
            }
        } else if let Some((name, value)) = line.split_once(':') {
            one(name, value.trim(), line, items);
        } else if line.starts_with("fanotify") {
            add(items, "fanotify", fanotify(line));
        }
    }
}

fn one(name: &str, value: &str, line: &str, items: &mut Items) {
    match name {
        "pos" => put(items, "position", value),
        "flags" => put(items, "flags", &flags(value)),
        "eventfd-count" => put(items, "count", value),
        "eventfd-semaphore" => put(items, "semaphore", value),
        "sigmask" => put(items, "signals", value),
        "clockid" => add(items, "clock", format!("clock {value}")),
        "settime flags" => add(items, "clock", format!("flags {value}")),
        "ticks" => put(items, "ticks", value),
        "it_value" => put(items, "time-left", &time(value)),
        "it_interval" => put(items, "interval", &time(value)),
        "lock" => add(items, "locks", lock(value)),
        // The pids in all namespaces, the innermost last.
        "NSpid" => put(items, "process", value.split_whitespace().last().unwrap_or(value)),
        "tfd" => {
            let (line, disarmed) = epoll(value);
            add(items, "epoll", line);
            disarmed.into_iter().for_each(|line| add(items, "epoll-disarmed", line));
        }
        _ if line.starts_with("fanotify") => add(items, "fanotify", fanotify(line)),
        _ => {}
    }
}

/// Without O_LARGEFILE, which means nothing to programs of 64 bits and depends on how a file was opened.
fn flags(value: &str) -> String {
    const LARGE_FILE: u32 = 0o100_000;
    match u32::from_str_radix(value, 8) {
        Ok(flags) => format!("0{:o}", flags & !LARGE_FILE),
        Err(_) => value.to_owned(),
    }
}

fn put(items: &mut Items, item: &str, value: &str) {
    items.insert(item.to_owned(), value.to_owned());
}

/// Adds a line to an item that can have several.
fn add(items: &mut Items, item: &str, line: String) {
    let value = items.entry(item.to_owned()).or_default();
    if !value.is_empty() {
        value.push('\n');
    }
    value.push_str(&line);
}

/// `(0, 49406829)`: seconds and nanoseconds, as nanoseconds.
fn time(value: &str) -> String {
    let numbers: Vec<u128> =
        value.trim_matches(['(', ')']).split(',').filter_map(|number| number.trim().parse().ok()).collect();
    match numbers[..] {
        [seconds, nanoseconds] => (seconds * 1_000_000_000 + nanoseconds).to_string(),
        _ => value.to_owned(),
    }
}

/// `1: POSIX  ADVISORY  WRITE 4711 00:2e:1029 0 EOF`, without number, process, and file.
fn lock(value: &str) -> String {
    let words: Vec<&str> = value.split_whitespace().skip(1).collect();
    match words[..] {
        [kind, mode, access, _pid, _file, start, end] => format!("{kind} {mode} {access} {start} {end}"),
        _ => words.join(" "),
    }
}

/// Numbers under which an epoll set with this fdinfo watches files, each with its index among those of the same number.
pub(super) fn watched(text: &str) -> Vec<(i32, u32)> {
    let mut counts: BTreeMap<i32, u32> = BTreeMap::new();
    let numbers = text.lines().filter_map(|line| line.strip_prefix("tfd:")?.split_whitespace().next()?.parse().ok());
    numbers
        .map(|number: i32| {
            let count = counts.entry(number).or_default();
            *count += 1;
            (number, *count - 1)
        })
        .collect()
}

/// Marks those of what an epoll set watches whose number no longer leads to the file, in the order of [`watched`].
pub(super) fn mark_closed(items: &mut Items, closed: &[bool]) {
    let Some(lines) = items.get_mut("epoll") else { return };
    let marked = |(at, line): (usize, &str)| match line.split_once(' ') {
        Some((_, rest)) if closed.get(at) == Some(&true) => format!("{CLOSED} {rest}"),
        _ => line.to_owned(),
    };
    *lines = lines.lines().enumerate().map(marked).collect::<Vec<_>>().join("\n");
}

/// `5 events: 1d data: 500000005 pos:0 ino:61af sdev:7`: descriptor, events and data. Also that it is disarmed, if it is.
///
/// One with EPOLLONESHOT that has reported an event has no events until the program asks again. Only the kernel brings it
/// there: epoll_ctl(2), with which CRIU adds it, always adds EPOLLERR and EPOLLHUP.
fn epoll(value: &str) -> (String, Option<String>) {
    /// EPOLLONESHOT, and what else does not change then: EPOLLET, EPOLLWAKEUP, EPOLLEXCLUSIVE.
    const ONCE: u32 = 1 << 30;
    const STAYS: u32 = 0xf << 28;
    const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP).cast_unsigned();
    let words: Vec<&str> = value.split_whitespace().collect();
    match words[..] {
        [descriptor, "events:", events, "data:", data, ..] => {
            let disarmed = u32::from_str_radix(events, 16).ok().filter(|set| set & !STAYS == 0 && set & ONCE != 0);
            let asked = disarmed.map_or_else(|| events.to_owned(), |set| format!("{:x}", set | ALWAYS));
            (format!("{descriptor} events {asked} data {data}"), disarmed.map(|_| format!("{descriptor} data {data}")))
        }
        _ => (words.join(" "), None),
    }
}

/// A watch: its number and its events, and apart its flags, which CRIU does not restore.
fn inotify(line: &str, items: &mut Items) {
    let line = watch(line);
    let mask = line.rsplit_once(' ').and_then(|(rest, mask)| Some((rest, u32::from_str_radix(mask, 16).ok()?)));
    match mask.filter(|(_, mask)| mask & FLAGS != 0) {
        Some((rest, mask)) => {
            add(items, "inotify", format!("{rest} {:x}", mask & !FLAGS));
            add(items, "inotify-flags", line);
        }
        None => add(items, "inotify", line),
    }
}

/// `inotify wd:1 ino:7bcf sdev:fe00000 mask:800afce ignored_mask:0 fhandle-bytes:8 ...`: the number and the mask. The file
/// can be another one of the same name.
fn watch(line: &str) -> String {
    let word = |name: &str| line.split_whitespace().find_map(|word| word.strip_prefix(name)).unwrap_or_default();
    format!("watch {} mask {}", word("wd:"), word("mask:"))
}

/// The inode and the device of what an inotify watch is on, as the kernel numbers them.
fn watched_file(line: &str) -> Option<(u64, u64)> {
    let number = |name: &str| {
        let word = line.split_whitespace().find_map(|word| word.strip_prefix(name))?;
        u64::from_str_radix(word, 16).ok()
    };
    Some((number("ino:")?, number("sdev:")?))
}

fn fanotify(line: &str) -> String {
    let kept = line.split_whitespace().filter(|word| {
        !["ino:", "sdev:", "fhandle-bytes:", "fhandle-type:", "f_handle:", "mnt_id:"]
            .iter()
            .any(|name| word.starts_with(name))
    });
    kept.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Vec<(String, String)> {
        let mut all = Items::new();
        items(
            text,
            |inode, device| ((inode, device) == (0x7b, 0xfe0_0001)).then(|| "descriptor 5 of 7".to_owned()),
            &mut all,
        );
        all.into_iter().collect()
    }

    fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
        expected.iter().map(|(item, value)| ((*item).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn what_belongs_to_the_machine_is_left_out() {
        let text = "pos:\t12\nflags:\t0100002\nmnt_id:\t29\nino:\t1029\nlock:\t1: POSIX  ADVISORY  WRITE 4711 00:2e:1029 0 EOF\n";
        assert_eq!(of(text), pairs(&[("flags", "02"), ("locks", "POSIX ADVISORY WRITE 0 EOF"), ("position", "12")]));
    }

    #[test]
    fn a_watch_of_a_file_without_a_name_says_who_has_it() {
        let text = "inotify wd:2 ino:7b sdev:fe00001 mask:708 ignored_mask:0 fhandle-bytes:8\n\
                    inotify wd:1 ino:7b sdev:fe00002 mask:708 ignored_mask:0 fhandle-bytes:8\n";
        let wanted = [("inotify", "watch 1 mask 708"), ("inotify-nameless", "watch 2 mask 708 of descriptor 5 of 7")];
        assert_eq!(of(text), pairs(&wanted));
    }

    #[test]
    fn files_of_an_epoll_set_are_marked_by_their_number() {
        let text = "tfd:        5 events:       1d data:  7 pos:0 ino:8 sdev:d\ntfd: 6 events: 1 data: 6\ntfd: 5 events: 1 data: 9\n";
        assert_eq!(watched(text), [(5, 0), (6, 0), (5, 1)]);
        let mut all = Items::new();
        items(text, |_, _| None, &mut all);
        mark_closed(&mut all, &[true, false, false]);
        assert_eq!(all["epoll"], "closed events 1d data 7\n6 events 1 data 6\n5 events 1 data 9");
    }

    /// As it is, and as CRIU adds it: EPOLLERR and EPOLLHUP are always reported.
    #[test]
    fn one_that_reported_its_only_event_is_disarmed() {
        let disarmed = of("tfd: 3 events: 40000000 data: 3\ntfd: 4 events: 40000019 data: 4\n");
        let added = of("tfd: 3 events: 40000018 data: 3\ntfd: 4 events: 40000019 data: 4\n");
        let epoll = ("epoll", "3 events 40000018 data 3\n4 events 40000019 data 4");
        assert_eq!(disarmed, pairs(&[epoll, ("epoll-disarmed", "3 data 3")]));
        assert_eq!(added, pairs(&[epoll]));
        assert_eq!(of("tfd: 3 events: c0000000 data: 3\n")[0].1, "3 events c0000018 data 3", "EPOLLET");
        assert_eq!(of("tfd: 3 events: 80000000 data: 3\n")[0].1, "3 events 80000000 data 3");
    }

    #[test]
    fn each_kind_has_its_own() {
        assert_eq!(
            of("eventfd-count:               a\neventfd-id: 3\neventfd-semaphore: 1\n"),
            pairs(&[("count", "a"), ("semaphore", "1")])
        );
        assert_eq!(
            of("clockid: 1\nticks: 0\nsettime flags: 01\nit_value: (1, 5)\nit_interval: (0, 0)\n"),
            pairs(&[
                ("armed", "yes"),
                ("clock", "clock 1\nflags 01"),
                ("interval", "0"),
                ("ticks", "0"),
                ("time-left", "1000000005")
            ])
        );
        assert_eq!(
            of(
                "tfd:        5 events:       1d data: 500000005  pos:0 ino:61af sdev:7\ntfd: 6 events: 1 data: 6 pos:0\n"
            ),
            pairs(&[("epoll", "5 events 1d data 500000005\n6 events 1 data 6")])
        );
        assert_eq!(
            of("inotify wd:1 ino:7bcf sdev:fe00000 mask:800afce ignored_mask:0 fhandle-bytes:8 f_handle:a\n"),
            pairs(&[("inotify", "watch 1 mask 800afce")])
        );
        assert_eq!(
            of("inotify wd:2 ino:7bcf sdev:fe00000 mask:84000006 ignored_mask:0\n"),
            pairs(&[("inotify", "watch 2 mask 6"), ("inotify-flags", "watch 2 mask 84000006")])
        );
        assert_eq!(of("Pid:\t4711\nNSpid:\t4711\t1003\n"), pairs(&[("process", "1003")]));
        assert_eq!(of("sigmask:\t0000000000010000\n"), pairs(&[("signals", "0000000000010000")]));
    }
}
