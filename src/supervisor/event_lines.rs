//! The events of a run as lines on standard output, for `run --json`.
//!
//! A thread of its own writes them: a reader that is stuck must not stop the owner.

use std::io::{self, Write};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use crate::telemetry::events::Event;

/// Writes events to standard output.
#[derive(Debug)]
pub(super) struct EventLines {
    /// `None` when no more are sent.
    sender: Option<Sender<String>>,
    thread: Option<JoinHandle<()>>,
}

impl EventLines {
    pub(super) fn start() -> io::Result<EventLines> {
        let (sender, lines) = channel::<String>();
        let write = move || {
            for line in lines {
                let mut out = io::stdout().lock();
                // A reader that is gone must not end the job: the events are in the journal, too.
                let _ = writeln!(out, "{line}").and_then(|()| out.flush());
            }
        };
        let thread = std::thread::Builder::new().name("events".into()).spawn(write)?;
        Ok(EventLines { sender: Some(sender), thread: Some(thread) })
    }

    pub(super) fn write(&self, event: &Event) {
        if let (Some(sender), Ok(line)) = (&self.sender, event.to_line()) {
            let _ = sender.send(line);
        }
    }
}

impl Drop for EventLines {
    /// Writes the remaining lines.
    fn drop(&mut self) {
        self.sender = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
