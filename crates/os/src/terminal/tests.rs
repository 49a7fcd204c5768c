use std::fs::File;

use super::*;

struct Pair {
    master: OwnedFd,
    terminal: OwnedFd,
}

impl Pair {
    fn new() -> Pair {
        let master: OwnedFd = File::options().read(true).write(true).open("/dev/ptmx").unwrap().into();
        let mut unlocked: libc::c_int = 0;
        control(&master, libc::TIOCSPTLCK, (&raw mut unlocked).cast()).unwrap();
        let terminal = open(&master).unwrap();
        let flags = OFlag::from_bits_retain(fcntl(&master, FcntlArg::F_GETFL).unwrap());
        fcntl(&master, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK)).unwrap();
        Pair { master, terminal }
    }

    fn change(&self, change: impl Fn(&mut libc::termios2)) {
        let mut settings = get(&self.terminal).unwrap();
        change(&mut settings);
        set(&self.terminal, &settings).unwrap();
    }

    /// Writes to the master, and waits until the terminal has processed it: then its echo is there.
    fn types(&self, text: &[u8], echo: &[u8]) {
        write(&self.master, text).unwrap();
        let mut seen = Vec::new();
        while !seen.ends_with(echo) {
            seen.extend(all(&self.master).unwrap());
            std::thread::yield_now();
        }
    }

    fn reads(&self) -> Vec<Vec<u8>> {
        let mut buffer = [0; 5000];
        let mut found = Vec::new();
        while let Ok(length) = read(&self.terminal, &mut buffer) {
            found.push(buffer[..length].to_vec());
        }
        found
    }

    /// Takes all, twice, and puts it back.
    fn is_emptied_and_filled(&self) -> Waiting {
        let waiting = take(&self.master).unwrap();
        assert!(take(&self.master).unwrap().is_empty());
        put_back(&self.master, waiting.clone()).unwrap();
        waiting
    }
}

/// Waits until nobody has the terminal open any more: a child of another test has its descriptors until its exec.
fn is_closed(master: &OwnedFd) {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    let mut polled = [PollFd::new(master.as_fd(), PollFlags::empty())];
    poll(&mut polled, PollTimeout::NONE).unwrap();
    assert_eq!(polled[0].revents(), Some(PollFlags::POLLHUP));
}

fn root() -> bool {
    rekindle_testing::root()
}

#[test]
fn output_is_put_back_as_it_was() {
    let pair = Pair::new();
    let before = get(&pair.terminal).unwrap();
    write(&pair.terminal, b"one\n\ttwo\r\n").unwrap();
    let waiting = pair.is_emptied_and_filled();
    assert_eq!((waiting.output.as_slice(), waiting.input.len()), (&b"one\r\n\ttwo\r\r\n"[..], 0));
    // A hostile image.
    for wrong in [
        Waiting { output: vec![b'x'; LONGEST + 1], ..Waiting::default() },
        Waiting { input: vec![Line { bytes: Vec::new(), end: End::OfFile }; HELD], ..Waiting::default() },
    ] {
        assert!(matches!(put_back(&pair.master, wrong), Err(Error::Full)));
    }
    // What was written meanwhile comes after it.
    write(&pair.terminal, b"four\n").unwrap();
    put_back(&pair.master, Waiting { output: b"three ".into(), ..Waiting::default() }).unwrap();
    let after = get(&pair.terminal).unwrap();
    assert_eq!((after.c_iflag, after.c_oflag, after.c_lflag), (before.c_iflag, before.c_oflag, before.c_lflag));
    assert_eq!(after.c_cc, before.c_cc);
    assert_eq!(all(&pair.master).unwrap(), b"three one\r\n\ttwo\r\r\nfour\r\n");
}

#[test]
fn more_output_than_the_kernel_processes_at_once() {
    let pair = Pair::new();
    while write(&pair.terminal, b"0123456789\n").is_ok() {}
    let waiting = pair.is_emptied_and_filled();
    assert!(waiting.output.len() > HELD, "{}", waiting.output.len());
    assert_eq!(all(&pair.master).unwrap(), waiting.output);
}

#[test]
fn input_keeps_its_lines_and_what_was_not_ended() {
    if !root() {
        return;
    }
    let pair = Pair::new();
    // ^C and ^D as characters, a line that is erased in part, an end of file after text, one alone, and an unfinished line.
    pair.types(b"a\x16\x03\x16\x04\n", b"\r\n");
    pair.change(|settings| settings.c_lflag &= !libc::ECHO);
    write(&pair.master, b"xyz\x7f\nwith\x04\x04par").unwrap();
    let wanted = |bytes: &[u8], end| Line { bytes: bytes.into(), end };
    let mut waiting = Waiting::default();
    while waiting.input.len() < 5 {
        waiting = pair.is_emptied_and_filled();
    }
    let lines = [
        wanted(b"a\x03\x04\n", End::Character),
        wanted(b"xy\n", End::Character),
        wanted(b"with", End::OfFile),
        wanted(b"", End::OfFile),
        wanted(b"par", End::None),
    ];
    assert_eq!((waiting.input.as_slice(), waiting.output.len()), (&lines[..], 0));
    // It can still be changed.
    write(&pair.master, b"\x7fst\n").unwrap();
    let mut read = pair.reads();
    while read.len() < 5 {
        read.extend(pair.reads());
    }
    assert_eq!(read, [&b"a\x03\x04\n"[..], b"xy\n", b"with", b"", b"past\n"]);
    assert_eq!(all(&pair.master).unwrap(), b"", "nothing is echoed twice");
}

#[test]
fn a_line_with_a_line_break_in_it_stays_one() {
    if !root() {
        return;
    }
    let pair = Pair::new();
    pair.types(b"a\x16\nb\n", b"b\r\n");
    assert_eq!(pair.is_emptied_and_filled().input.len(), 1);
    assert_eq!(pair.reads(), [b"a\nb\n"]);
}

#[test]
fn raw_input_is_put_back_as_it_was() {
    if !root() {
        return;
    }
    let pair = Pair::new();
    pair.change(|settings| {
        settings.c_lflag &= !(libc::ICANON | libc::ISIG);
        settings.c_cc[libc::VMIN] = 20;
    });
    pair.types(b"a\r\x03\x7f\x04", b"a\r\n^C^?^D");
    let waiting = pair.is_emptied_and_filled();
    assert_eq!(waiting.input, [Line { bytes: b"a\n\x03\x7f\x04".into(), end: End::None }]);
    assert_eq!((pair.reads(), all(&pair.master).unwrap()), (vec![b"a\n\x03\x7f\x04".to_vec()], Vec::new()));
}

#[test]
fn packet_mode_stays_on_and_a_change_of_state_is_not_lost() {
    let pair = Pair::new();
    packet_mode(&pair.master, true).unwrap();
    write(&pair.terminal, b"x\n").unwrap();
    assert_eq!(pair.is_emptied_and_filled().output, b"x\r\n");
    assert_eq!(all(&pair.master).unwrap(), b"\0x\r\n");
    // SAFETY: this request takes a number.
    unsafe { libc::ioctl(pair.terminal.as_raw_fd(), libc::TCFLSH, libc::TCOFLUSH) };
    assert!(matches!(take(&pair.master), Err(Error::State)));
    assert_eq!(all(&pair.master).unwrap(), [2], "TIOCPKT_FLUSHWRITE");
}

#[test]
fn a_terminal_that_was_closed_is_closed_after_its_output() {
    let Pair { master, terminal } = Pair::new();
    write(&terminal, b"last\n").unwrap();
    drop(terminal);
    is_closed(&master);
    let waiting = take(&master).unwrap();
    assert!(waiting.closed && waiting.output == b"last\r\n");
    put_back(&master, waiting.clone()).unwrap();
    let mut buffer = [0; 10];
    assert_eq!(read(&master, &mut buffer), Ok(6));
    is_closed(&master);
    assert_eq!(read(&master, &mut buffer), Err(nix::Error::EIO));
    // As in a restored job, where nobody has opened it yet.
    let Pair { master, terminal } = Pair::new();
    drop(terminal);
    put_back(&master, waiting).unwrap();
    assert_eq!(read(&master, &mut buffer), Ok(6));
    is_closed(&master);
    assert_eq!(read(&master, &mut buffer), Err(nix::Error::EIO));
}

#[test]
fn what_was_stopped_by_a_key_stays_stopped() {
    if !root() {
        return;
    }
    let pair = Pair::new();
    write(&pair.terminal, b"before\n").unwrap();
    write(&pair.master, b"\x13").unwrap();
    // The kernel processes the key later.
    while write(&pair.terminal, b".").is_ok() {
        std::thread::yield_now();
    }
    let waiting = pair.is_emptied_and_filled();
    assert!(waiting.output.starts_with(b"before\r\n"));
    assert_eq!(write(&pair.terminal, b"x"), Err(nix::Error::EAGAIN), "it is still stopped");
    assert_eq!(all(&pair.master).unwrap(), waiting.output);
}

#[test]
fn nothing_is_lost_where_settings_are_locked() {
    let pair = Pair::new();
    let mut locked = [0xff_u8; size_of::<libc::termios2>()];
    if !root() {
        return;
    }
    control(&pair.terminal, libc::TIOCSLCKTRMIOS, locked.as_mut_ptr().cast()).unwrap();
    assert!(take(&pair.master).unwrap().is_empty());
    pair.types(b"typed\n", b"typed\r\n");
    assert!(matches!(take(&pair.master), Err(Error::Locked)));
    assert_eq!(pair.reads(), [b"typed\n"]);
    write(&pair.terminal, b"out\n").unwrap();
    assert!(matches!(take(&pair.master), Err(Error::Locked)));
    assert_eq!(all(&pair.master).unwrap(), b"out\r\n");
}

#[test]
fn others_are_no_masters() {
    let file: OwnedFd = File::open("/dev/null").unwrap().into();
    assert_eq!(number(&file), None);
    let pair = Pair::new();
    assert!(number(&pair.master).is_some());
    assert!(!may_insert(&file) && (!root() || may_insert(&pair.terminal)));
}
