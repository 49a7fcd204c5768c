//! Descriptors that signal what arrives (O_ASYNC).

use rekindle_os::{attributes, process};

use crate::record::{self, Record};

/// Whether flags, in octal, say that signals are sent.
pub(crate) fn sends(flags: &str) -> bool {
    i32::from_str_radix(flags, 8).is_ok_and(|flags| flags & libc::O_ASYNC != 0)
}

/// Lets restored descriptors with O_ASYNC send their signals again: the image lets CRIU open FIFOs and terminals without
/// that flag, and signals of the others would name one of CRIU's descriptors.
pub fn send_again(record: &Record, tree: &[i32]) {
    for process in &record.processes {
        let sends = |descriptor: &&record::Descriptor| descriptor.items.get("flags").is_some_and(|flags| sends(flags));
        let numbers: Vec<i32> = process.descriptors.iter().filter(sends).map(|descriptor| descriptor.number).collect();
        if numbers.is_empty() {
            continue;
        }
        if let Some(pid) = tree.iter().find(|pid| process::inner_pid(**pid) == Some(process.pid)) {
            send(*pid, &numbers);
        }
    }
}

/// The same for descriptors of a process.
pub(crate) fn send(pid: i32, numbers: &[i32]) {
    let Ok(opened) = process::open_pidfd(pid) else { return };
    for number in numbers {
        let done = process::fetch_descriptor(&opened, *number)
            .and_then(|descriptor| attributes::send_signals(&descriptor, *number));
        if let Err(error) = done {
            tracing::warn!(
                "descriptor {number} of process {pid} may send no signals for what arrives (O_ASYNC), or name another descriptor in them: {error}"
            );
        }
    }
}
