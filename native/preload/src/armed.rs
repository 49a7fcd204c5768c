//! Whether the supervisor wants this process's device memory in a landing file, and that file.

use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use rekindle_abi::init::CLOSED;
use rekindle_abi::variables::{COPY_THREADS, KEEP_MEMORY, LANDING};

use crate::kept;
use crate::sys::{self, Errno, File};

/// The number of bytes before the value of a variable.
const fn beginning(name: &str) -> usize {
    name.len() + 1
}

/// Byte number `at` of what stands before the value of a variable.
fn expected(name: &str, at: usize) -> Option<u8> {
    if at == name.len() { Some(b'=') } else { name.as_bytes().get(at).copied() }
}

/// Maximum length of the folder's path; with a longer one the interposer does nothing.
const ROOM: usize = 1024;

static PATH: [AtomicU8; ROOM] = [const { AtomicU8::new(0) }; ROOM];
/// Length of PATH; 0 if there is none.
static LENGTH: AtomicUsize = AtomicUsize::new(0);
/// The number from the environment; 0 if it is not set.
static WANTED_THREADS: AtomicUsize = AtomicUsize::new(0);

/// The number of copying threads in the environment.
pub(crate) fn wanted_threads() -> usize {
    WANTED_THREADS.load(Ordering::Relaxed)
}

/// Reads our variables. From /proc and not from libc, because `environ` is set by a constructor that may run after
/// ours. If /proc is not mounted, the interposer does nothing.
pub(crate) fn read_environment() {
    let Ok(file) = File::read_only(c"/proc/self/environ") else { return };
    let mut buffer = [const { MaybeUninit::<u8>::uninit() }; 4096];
    let mut parser = Parser::new();
    while let Ok(count) = file.read(buffer.as_mut_ptr().cast(), buffer.len()) {
        if count == 0 {
            break;
        }
        for byte in buffer.iter().take(count) {
            // SAFETY: the kernel wrote this many bytes.
            parser.feed(unsafe { byte.assume_init() });
        }
    }
    let (folder, threads, keep) = parser.finish();
    WANTED_THREADS.store(threads, Ordering::Relaxed);
    kept::begin(keep);
    LENGTH.store(folder, Ordering::Relaxed);
}

/// Parses `NAME=value` texts that end with NUL, byte by byte, because there is no room for an environment, which can
/// have megabytes.
struct Parser {
    /// Number of bytes of the current text so far.
    at: usize,
    is_folder: bool,
    threads: Number,
    keep: Number,
    /// Length of the folder being read; `None` if it is too long.
    folder: Option<usize>,
    found_folder: usize,
}

/// A variable that is a number.
struct Number {
    name: &'static str,
    /// Whether the current text is it so far.
    is_it: bool,
    value: usize,
    /// 0 if it is not set.
    found: usize,
}

impl Number {
    fn new(name: &'static str) -> Number {
        Number { name, is_it: true, value: 0, found: 0 }
    }

    fn feed(&mut self, at: usize, byte: u8) {
        match expected(self.name, at) {
            Some(expected) => self.is_it &= expected == byte,
            None if byte.is_ascii_digit() => {
                self.value = self.value.wrapping_mul(10).wrapping_add(usize::from(byte - b'0'));
            }
            None => self.is_it = false,
        }
    }

    /// The text has ended, after so many bytes.
    fn end_text(&mut self, length: usize) {
        // The first entry of a name counts, as for getenv; the name must have been read completely.
        if self.is_it && length > beginning(self.name) && self.found == 0 {
            self.found = self.value;
        }
        self.is_it = true;
        self.value = 0;
    }
}

impl Parser {
    fn new() -> Parser {
        let folder = Some(0);
        let (threads, keep) = (Number::new(COPY_THREADS), Number::new(KEEP_MEMORY));
        Parser { at: 0, is_folder: true, threads, keep, folder, found_folder: 0 }
    }

    fn feed(&mut self, byte: u8) {
        if byte == 0 {
            self.end_text();
            return;
        }
        if self.is_folder {
            match expected(LANDING, self.at) {
                Some(expected) => self.is_folder = expected == byte,
                None => self.folder_byte(byte),
            }
        }
        self.threads.feed(self.at, byte);
        self.keep.feed(self.at, byte);
        self.at = self.at.wrapping_add(1);
    }

    fn folder_byte(&mut self, byte: u8) {
        let Some(length) = self.folder else { return };
        // A relative folder would change with the working directory.
        let slot = PATH.get(length).filter(|_| length > 0 || byte == b'/');
        self.folder = slot.map(|slot| {
            slot.store(byte, Ordering::Relaxed);
            length + 1
        });
    }

    fn end_text(&mut self) {
        if self.is_folder && self.at > beginning(LANDING) && self.found_folder == 0 {
            self.found_folder = self.folder.unwrap_or(0);
        }
        self.threads.end_text(self.at);
        self.keep.end_text(self.at);
        self.at = 0;
        self.is_folder = self.found_folder == 0;
        self.folder = Some(0);
    }

    /// The length of the folder, the threads, and the size from which on memory can stay.
    fn finish(mut self) -> (usize, usize, usize) {
        self.end_text();
        (self.found_folder, self.threads.found, self.keep.found)
    }
}

/// Opens this process's landing file; `None` if there is none, and so nothing to do.
pub(crate) fn open() -> Option<File> {
    let opened: Option<Result<File, Errno>> = with_path(b"", File::open_no_follow);
    opened?.ok()
}

/// How many processes copy on the CPUs of this one at the same time, with it: the target of a symbolic link beside the
/// landing file. 1 if there is none.
pub(crate) fn shares() -> usize {
    let mut target = [0; 8];
    let length = with_path(b".shares", |path| sys::read_link(path, &mut target).unwrap_or(0));
    parse_shares(target.iter().take(length.unwrap_or(0)))
}

fn parse_shares<'a>(digits: impl Iterator<Item = &'a u8>) -> usize {
    let mut number = 0_usize;
    for byte in digits {
        if !byte.is_ascii_digit() {
            return 1;
        }
        number = number.wrapping_mul(10).wrapping_add(usize::from(byte - b'0'));
    }
    number.max(1)
}

/// Whether the supervisor locks the CUDA processes, so that no other may begin.
pub(crate) fn is_closed() -> bool {
    let is_there = |path: *const u8| sys::read_link(path, &mut [0; 8]).is_ok();
    with_file(|push| CLOSED.as_bytes().iter().for_each(|byte| push(*byte)), is_there).unwrap_or(false)
}

/// Calls `work` with the path of this process's landing file, followed by `suffix` and NUL. It is not returned, because
/// a copy of it would be a call of the job's memcpy.
fn with_path<T>(suffix: &[u8], work: impl FnOnce(*const u8) -> T) -> Option<T> {
    let name = |push: &mut dyn FnMut(u8)| {
        // Determined each time: a forked child is another process, without a landing file.
        let pid = sys::pid().unsigned_abs();
        let mut divisor = 1_000_000_000;
        while divisor > 0 {
            if pid >= divisor {
                push(b'0' + (pid / divisor % 10) as u8);
            }
            divisor /= 10;
        }
        suffix.iter().for_each(|byte| push(*byte));
    };
    with_file(name, work)
}

/// The same with the name that `name` gives, byte by byte.
fn with_file<T>(name: impl FnOnce(&mut dyn FnMut(u8)), work: impl FnOnce(*const u8) -> T) -> Option<T> {
    let length = LENGTH.load(Ordering::Relaxed);
    if length == 0 {
        return None;
    }
    let mut path = [const { MaybeUninit::<u8>::uninit() }; ROOM + 24];
    let mut end = 0;
    let mut push = |byte: u8| {
        if let Some(slot) = path.get_mut(end) {
            slot.write(byte);
            end += 1;
        }
    };
    for byte in PATH.iter().take(length) {
        push(byte.load(Ordering::Relaxed));
    }
    push(b'/');
    name(&mut push);
    push(0);
    Some(work(path.as_ptr().cast()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, because the folder is in a static.
    #[test]
    fn the_variables_are_found_among_others() {
        let parse = |environment: &[u8]| {
            let mut parser = Parser::new();
            environment.iter().for_each(|byte| parser.feed(*byte));
            let (length, threads, keep) = parser.finish();
            assert_eq!(keep, 0);
            let folder: Vec<u8> = PATH.iter().take(length).map(|byte| byte.load(Ordering::Relaxed)).collect();
            (String::from_utf8(folder).unwrap(), threads)
        };
        let expect = |folder: &str, threads| (folder.to_string(), threads);
        assert_eq!(parse(b""), expect("", 0));
        assert_eq!(parse(b"A=1\0REKINDLE_LANDING=/run/x\0B=2\0"), expect("/run/x", 0));
        assert_eq!(parse(b"REKINDLE_COPY_THREADS=12\0REKINDLE_LANDING=/y"), expect("/y", 12));
        assert_eq!(parse(b"REKINDLE_LANDING=relative\0"), expect("", 0));
        assert_eq!(parse(b"REKINDLE_LANDING=\0REKINDLE_LANDING"), expect("", 0));
        assert_eq!(parse(b"XREKINDLE_LANDING=/x\0REKINDLE_LANDINGS=/x\0\0"), expect("", 0));
        assert_eq!(parse(b"REKINDLE_LANDING=/first\0REKINDLE_LANDING=/second-longer\0"), expect("/first", 0));
        assert_eq!(parse(b"REKINDLE_COPY_THREADS=4x\0"), expect("", 0));
        let mut parser = Parser::new();
        b"REKINDLE_KEEP_MEMORY=16777216\0REKINDLE_COPY_THREADS=3".iter().for_each(|byte| parser.feed(*byte));
        assert_eq!(parser.finish(), (0, 3, 16_777_216));
        let long = [b"REKINDLE_LANDING=", b"/".repeat(ROOM + 1).as_slice(), b"\0A=1"].concat();
        assert_eq!(parse(&long), expect("", 0));
    }

    #[test]
    fn the_number_of_processes_is_at_least_one() {
        let parse = |text: &str| parse_shares(text.as_bytes().iter());
        assert_eq!((parse(""), parse("0"), parse("4"), parse("12"), parse("4x")), (1, 1, 4, 12, 1));
    }
}
