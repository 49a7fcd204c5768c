//! The kernel's log: messages about processes killed for lack of memory, and about GPU faults.
//!
//! It is a second source. In a container it is often missing or not readable; then there are no messages.
//!
//! The log has a clock of its own: it is not corrected as the others are, and after weeks it differs from them by
//! minutes. So a thread reads messages as they come, and they have the time at which they were read.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use super::kin::Named;
use rekindle_os::{clock, exits};

/// A message that concerns a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Notice {
    /// The kernel killed this process for lack of memory; the pid is that of the initial PID namespace.
    OutOfMemory {
        pid: i32,
        /// Its name, at most 15 bytes.
        name: String,
    },
    /// The NVIDIA driver reported a fault.
    Xid {
        /// The GPU's PCI address, `0000:3b:00`.
        gpu: String,
        xid: u32,
        /// The process, if the driver knows it.
        process: Option<Named>,
    },
}

/// The log from some point on.
#[derive(Debug)]
pub(crate) struct KernelLog {
    file: File,
}

impl KernelLog {
    /// Reads messages from now on.
    ///
    /// # Errors
    /// When we cannot read it.
    pub(crate) fn from_now() -> io::Result<KernelLog> {
        let mut file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg")?;
        file.seek(SeekFrom::End(0))?;
        Ok(KernelLog { file })
    }

    /// Waits until there is something to read, at most so long.
    pub(crate) fn wait(&self, limit: Duration) {
        // Where the kernel refuses, it is as if nothing had come.
        if exits::wait(&[self.file.as_fd()], Some(limit)).is_err() {
            std::thread::sleep(limit);
        }
    }

    /// The messages since then, or since the last call, with the time since the machine's boot by the log's own clock.
    pub(crate) fn read(&mut self) -> Vec<(Duration, Notice)> {
        /// Maximum size of a record (`CONSOLE_EXT_LOG_MAX`, kernel/printk).
        const RECORD: usize = 8192;
        let (mut found, mut buffer) = (Vec::new(), [0; RECORD]);
        loop {
            match self.file.read(&mut buffer) {
                Ok(0) => return found,
                Ok(length) => {
                    let record = String::from_utf8_lossy(buffer.get(..length).unwrap_or_default()).into_owned();
                    // "priority,number,time,flags;text", then lines that begin with a space.
                    let Some((head, text)) = record.split_once(';') else { continue };
                    let at = head.split(',').nth(2).and_then(|micros| micros.parse().ok()).unwrap_or_default();
                    let notice = text.lines().next().and_then(parse);
                    found.extend(notice.map(|notice| (Duration::from_micros(at), notice)));
                }
                // Messages that were not read in time are overwritten; the next read continues after them (EPIPE).
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return found,
            }
        }
    }
}

/// Messages longer ago are forgotten: they did not end the job.
pub(crate) const RECENT: Duration = Duration::from_secs(120);
/// How long to wait for a message at a time; in between, the end of the run is noticed.
const WAIT: Duration = Duration::from_secs(10);

/// What the log has said lately.
#[derive(Debug)]
struct Heard {
    log: KernelLog,
    /// Whether a thread reads messages as they come.
    at_once: bool,
    /// When they came, since the boot.
    notices: Vec<(Duration, Notice)>,
}

impl Heard {
    fn read(&mut self) {
        let (read, now) = (self.log.read(), clock::since_boot());
        let at_once = self.at_once;
        // Without the thread the log's own clock is all there is.
        self.notices.extend(read.into_iter().map(|(at, notice)| (if at_once { now } else { at }, notice)));
        self.notices.retain(|(at, _)| *at + RECENT >= now);
    }
}

/// Hears what the log says, for as long as it exists.
#[derive(Debug, Clone)]
pub(crate) struct Listener(Arc<Mutex<Heard>>);

impl Listener {
    /// Hears messages from now on. Gives `spawn` the work of the thread that reads them.
    ///
    /// # Errors
    /// When we cannot read the log.
    pub(crate) fn new(spawn: impl FnOnce(Box<dyn FnOnce() + Send>)) -> io::Result<Listener> {
        let log = KernelLog::from_now()?;
        // It is waited for without the lock. Both read from the same place.
        let waits = KernelLog { file: log.file.try_clone()? };
        let heard = Arc::new(Mutex::new(Heard { log, at_once: false, notices: Vec::new() }));
        let weak = Arc::downgrade(&heard);
        spawn(Box::new(move || listen(&waits, &weak)));
        Ok(Listener(heard))
    }

    /// Forgets what was said until now.
    pub(crate) fn forget(&self) {
        let mut heard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        heard.read();
        heard.notices.clear();
    }

    /// The messages since then, at most [`RECENT`] ago, with the time since the machine's boot.
    pub(crate) fn notices(&self) -> Vec<(Duration, Notice)> {
        let mut heard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        heard.read();
        heard.notices.clone()
    }
}

fn listen(log: &KernelLog, heard: &Weak<Mutex<Heard>>) {
    while let Some(heard) = heard.upgrade() {
        let mut now = heard.lock().unwrap_or_else(PoisonError::into_inner);
        now.read();
        now.at_once = true;
        drop(now);
        drop(heard);
        log.wait(WAIT);
    }
}

/// Parses a line, if it concerns us.
#[must_use]
pub(crate) fn parse(line: &str) -> Option<Notice> {
    killed(line).or_else(|| xid(line))
}

/// "Memory cgroup out of memory: Killed process 4711 (python) total-vm:...", and without a cgroup "Out of memory:
/// Killed ...".
fn killed(line: &str) -> Option<Notice> {
    let (before, rest) = line.split_once("ut of memory: Killed process ")?;
    before.ends_with(['O', 'o']).then_some(())?;
    let (pid, rest) = rest.split_once(" (")?;
    // The name may contain any byte.
    let (name, _) = rest.split_once(") total-vm:").or_else(|| rest.split_once(')'))?;
    Some(Notice::OutOfMemory { pid: pid.parse().ok()?, name: name.to_owned() })
}

/// "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus." pid may be `<unknown>` or
/// missing.
fn xid(line: &str) -> Option<Notice> {
    let (_, rest) = line.split_once("NVRM: Xid (")?;
    let (gpu, rest) = rest.split_once("): ")?;
    let (number, rest) = rest.split_once(',').unwrap_or((rest, ""));
    let xid = number.trim().parse().ok()?;
    let pid = rest.trim_start().strip_prefix("pid=");
    let digits = |text: &str| text.chars().take_while(char::is_ascii_digit).collect::<String>();
    let pid = pid.and_then(|text| digits(text).parse().ok());
    let name = rest.split_once(" name=").map(|(_, text)| text.split(", ").next().unwrap_or(text));
    // Some drivers write the number alone.
    let name = name.map(|name| name.trim_end_matches(',')).filter(|name| !name.is_empty() && *name != "<unknown>");
    let process = pid.map(|pid| Named { pid, name: name.map(ToOwned::to_owned) });
    Some(Notice::Xid { gpu: gpu.trim_start_matches("PCI:").to_owned(), xid, process })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_was_killed_for_want_of_memory_is_named() {
        let memcg = "Memory cgroup out of memory: Killed process 4711 (python3) total-vm:1063052kB, anon-rss:204800kB, \
                     file-rss:6144kB, shmem-rss:0kB, UID:0 pgtables:468kB oom_score_adj:0";
        let named = |pid, name: &str| Some(Notice::OutOfMemory { pid, name: name.into() });
        assert_eq!(parse(memcg), named(4711, "python3"));
        let machine = "Out of memory: Killed process 99 (a (b) c) total-vm:1kB";
        assert_eq!(parse(machine), named(99, "a (b) c"));
        assert_eq!(parse("oom_reaper: reaped process 4711 (python3), now anon-rss:0kB"), None);
        assert_eq!(parse("systemd[1]: Killed process 4711"), None);
    }

    #[test]
    fn xid_lines_of_several_drivers_are_understood() {
        let fault = |gpu: &str, xid, process: Option<(i32, Option<&str>)>| {
            let process = process.map(|(pid, name)| Named { pid, name: name.map(Into::into) });
            Some(Notice::Xid { gpu: gpu.into(), xid, process })
        };
        for (line, expected) in [
            (
                "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python3, GPU has fallen off the bus.",
                fault("0000:3b:00", 79, Some((4711, Some("python3")))),
            ),
            (
                "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate.",
                fault("0000:10:1c", 63, Some((1896, None))),
            ),
            (
                "NVRM: Xid (PCI:0000:e4:00): 43, pid=30217, name=pt_main_thread, channel 0x00000008",
                fault("0000:e4:00", 43, Some((30217, Some("pt_main_thread")))),
            ),
            (
                "NVRM: Xid (PCI:0000:e4:00): 109, pid=30218, name=pt_main_thread, channel 0x00000008, errorString CTX SWITCH TIMEOUT, Info 0x4c00a",
                fault("0000:e4:00", 109, Some((30218, Some("pt_main_thread")))),
            ),
            ("NVRM: Xid (PCI:0000:5d:00): 45, pid=99, name=a b", fault("0000:5d:00", 45, Some((99, Some("a b"))))),
            (
                "NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics SM Warp Exception on (GPC 7, TPC 0, SM 0)",
                fault("0000:cb:00", 13, None),
            ),
            ("NVRM: Xid (PCI:0000:08:00): 31, Ch 0000003b, intr 10000000. MMU Fault", fault("0000:08:00", 31, None)),
            ("NVRM: Xid (0000:03:00): 45", fault("0000:03:00", 45, None)),
            ("nvidia-nvswitch1: SXid (PCI:0000:aa:00.0): 24007, Severity 1", None),
            ("NVRM: Xid (PCI:0000:3b:00): none", None),
            ("NVRM: GPU at PCI:0000:48:00: GPU-5fc0bcec", None),
        ] {
            assert_eq!(parse(line), expected, "{line}");
        }
    }

    /// The log's clock may differ from the others by minutes.
    #[test]
    fn a_message_that_is_read_as_it_comes_has_the_time_of_that() {
        let heard = |at_once, stamp: Duration| {
            let mut file = tempfile::tempfile().unwrap();
            let line = format!("4,1,{},-;NVRM: Xid (PCI:0000:3b:00): 109, pid=1, name=x\n", stamp.as_micros());
            io::Write::write_all(&mut file, line.as_bytes()).unwrap();
            file.rewind().unwrap();
            let mut heard = Heard { log: KernelLog { file }, at_once, notices: Vec::new() };
            let before = clock::since_boot();
            heard.read();
            (before, heard.notices)
        };
        for stamp in [Duration::ZERO, clock::since_boot() + 2 * RECENT] {
            let (before, notices) = heard(true, stamp);
            assert_eq!(notices.len(), 1);
            assert!(before <= notices[0].0 && notices[0].0 <= clock::since_boot());
        }
        let stamp = Duration::from_secs(clock::since_boot().as_secs());
        assert_eq!(heard(false, stamp).1[0].0, stamp, "it may have come long ago");
        // A machine that has just booted has no message that is old.
        if let Some(old) = stamp.checked_sub(2 * RECENT) {
            assert!(heard(false, old).1.is_empty());
        }
    }

    /// A message written to the log is read back; earlier messages are not.
    #[test]
    fn the_log_is_read_from_where_it_was_opened() {
        if !rekindle_testing::root() {
            return;
        }
        let write = |text: &str| {
            OpenOptions::new()
                .write(true)
                .open("/dev/kmsg")
                .and_then(|mut f| io::Write::write_all(&mut f, text.as_bytes()))
        };
        let mark = std::process::id();
        let line = |xid: u32| format!("rekindle test: NVRM: Xid (PCI:{mark}:00:00): {xid}, pid=1, name=x, nothing\n");
        let told = write(&line(1)).is_ok();
        if !rekindle_testing::require("kmsg", told, "the kernel's log cannot be written") {
            return;
        }
        let mut log = KernelLog::from_now().unwrap();
        write(&line(2)).unwrap();
        let ours = |notices: Vec<(Duration, Notice)>| -> Vec<u32> {
            let gpu = format!("{mark}:00:00");
            notices
                .iter()
                .filter_map(|n| match &n.1 {
                    Notice::Xid { gpu: g, xid, .. } if *g == gpu => Some(*xid),
                    _ => None,
                })
                .collect()
        };
        assert_eq!(ours(log.read()), [2]);
        assert_eq!(ours(log.read()), [0; 0]);
        // A thread reads it as it comes.
        let listener = Listener::new(|work| drop(std::thread::spawn(work))).unwrap();
        let listens = |is: &dyn Fn(&Heard) -> bool| {
            let until = std::time::Instant::now() + Duration::from_secs(20);
            while !is(&listener.0.lock().unwrap()) && std::time::Instant::now() < until {
                std::thread::sleep(Duration::from_millis(2));
            }
            is(&listener.0.lock().unwrap())
        };
        assert!(listens(&|heard| heard.at_once));
        write(&line(3)).unwrap();
        assert!(listens(&|heard| ours(heard.notices.clone()) == [3]));
        assert_eq!(ours(listener.notices()), [3]);
        listener.forget();
        write(&line(4)).unwrap();
        assert_eq!(ours(listener.notices()), [4]);
    }
}
