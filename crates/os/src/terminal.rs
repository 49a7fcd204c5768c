//! What waits in a pseudo-terminal, taken out and put back as it was.
//!
//! A program writes to the terminal, and another one reads the result from the master: that is the output. What is written to
//! the master is the input. What waits has been through the line discipline, so it must not go through it once more: `\n` would
//! become `\r\n` twice, and typed text would be echoed again.
//!
//! A line of input ends with the character that ends lines, or where the end of file was typed. What follows the last one can
//! still be changed by whoever types. It is read after the terminal was told for a moment that there are no lines.
#![allow(unsafe_code, reason = "calls of the kernel; each block says why it is sound")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{read, write};

/// What the line discipline holds; more waits before it, and is not processed yet.
const HELD: usize = 4095;
/// What waits before it is less than this.
const LONGEST: usize = 64 << 10;
/// The kernel stores pieces of this size with little loss: 22 KB fit into a terminal, and of larger ones 14 (Linux 6.18).
const PIECE: usize = 1000;
/// How long the kernel may take to make room for what is put back.
const ROOM: Duration = Duration::from_secs(1);
/// `__DISABLED_CHAR`: no key has this function.
const NONE: u8 = 0;

/// What waits in a terminal.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Waiting {
    /// What the master will read.
    pub output: Vec<u8>,
    /// What programs will read from the terminal.
    pub input: Vec<Line>,
    /// All programs have closed the terminal: after the output the master gets an error.
    pub closed: bool,
}

/// A line of input.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Line {
    /// With the character that ends it, if one does.
    pub bytes: Vec<u8>,
    /// What ends it.
    pub end: End,
}

/// What ends a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// Its last character.
    Character,
    /// The end of file, which is no character of it.
    OfFile,
    /// Nothing yet; or the terminal has no lines.
    None,
}

impl Waiting {
    /// Whether nothing waits that would have to be put back.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.output.is_empty() && self.input.is_empty() && !self.closed
    }

    /// With what ends each line.
    fn input_length(&self) -> usize {
        self.input.iter().map(|line| line.bytes.len() + 2).sum()
    }

    fn after(mut self, first: Waiting) -> Waiting {
        let Waiting { mut output, mut input, .. } = first;
        output.append(&mut self.output);
        input.append(&mut self.input);
        Waiting { output, input, closed: self.closed }
    }
}

/// Why a terminal cannot be emptied.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The master is in packet mode and has not read a change of state, which cannot be put back.
    #[error("its reader has not read a change of state (packet mode). A snapshot is possible once it has")]
    State,
    /// More than can be put back.
    #[error("more input waits than could be put back. A snapshot is possible once some of it is read")]
    Full,
    /// Something waits, and the settings cannot be changed for a moment (`TIOCSLCKTRMIOS`).
    #[error("its settings are locked, and something waits in it. A snapshot is possible once that is read")]
    Locked,
    /// The kernel refused.
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl From<nix::Error> for Error {
    fn from(error: nix::Error) -> Error {
        Error::Io(error.into())
    }
}

/// The number of the terminal of a master; `None` if this is no master.
#[must_use]
pub fn number(master: &OwnedFd) -> Option<u32> {
    let mut number: libc::c_uint = 0;
    control(master, libc::TIOCGPTN, (&raw mut number).cast()).ok().map(|()| number)
}

/// Takes what waits in the terminal of a master out of it. Nobody else may use the terminal meanwhile. If it fails, it is all
/// there.
///
/// # Errors
/// When not all of it could be put back, or the kernel refuses.
pub fn take(master: &OwnedFd) -> Result<Waiting, Error> {
    let Some(opened) = Opened::new(master)? else { return Ok(Waiting::default()) };
    if is_locked(&opened.terminal)? {
        let waits = ready(master, PollFlags::POLLIN)? | ready(&opened.terminal, PollFlags::POLLIN)?;
        return if waits.contains(PollFlags::POLLIN) { Err(Error::Locked) } else { Ok(Waiting::default()) };
    }
    let taken = opened.take()?;
    if taken.input_length() > HELD || taken.input.iter().any(|line| opened.unused(&line.bytes).is_none()) {
        opened.put(&taken)?;
        return Err(Error::Full);
    }
    Ok(taken)
}

/// Puts back what was taken, before all that has come since. Nobody else may use the terminal meanwhile.
///
/// # Errors
/// When the kernel refuses.
pub fn put_back(master: &OwnedFd, waiting: Waiting) -> Result<(), Error> {
    if waiting.is_empty() {
        return Ok(());
    }
    if waiting.output.len() > LONGEST || waiting.input_length() > HELD {
        return Err(Error::Full);
    }
    let Some(opened) = Opened::new(master)? else { return Err(io::Error::from_raw_os_error(libc::EIO).into()) };
    let since = opened.take()?;
    opened.put(&since.after(waiting))
}

/// A terminal with its settings, which are set again when this is dropped.
struct Opened<'a> {
    master: &'a OwnedFd,
    flags: OFlag,
    is_packet: bool,
    was_closed: bool,
    terminal: OwnedFd,
    settings: libc::termios2,
}

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        let _ = set(&self.terminal, &self.settings);
        if self.is_packet {
            let _ = packet_mode(self.master, true);
        }
        let _ = fcntl(self.master, FcntlArg::F_SETFL(self.flags));
    }
}

impl Opened<'_> {
    /// `None` if the terminal is locked, so that no program can have it.
    fn new(master: &OwnedFd) -> Result<Option<Opened<'_>>, Error> {
        let events = ready(master, PollFlags::POLLPRI)?;
        let is_packet = is_packet(master)?;
        if is_packet && events.contains(PollFlags::POLLPRI) {
            return Err(Error::State);
        }
        let flags = OFlag::from_bits_retain(fcntl(master, FcntlArg::F_GETFL)?);
        let terminal = match open(master) {
            Err(error) if error.raw_os_error() == Some(libc::EIO) => return Ok(None),
            terminal => terminal?,
        };
        let settings = get(&terminal)?;
        let was_closed = events.contains(PollFlags::POLLHUP);
        let opened = Opened { master, flags, is_packet, was_closed, terminal, settings };
        if is_packet {
            packet_mode(master, false)?;
        }
        fcntl(master, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        Ok(Some(opened))
    }

    fn has_lines(&self) -> bool {
        self.settings.c_lflag & (libc::ICANON | libc::EXTPROC) == libc::ICANON
    }

    fn take(&self) -> Result<Waiting, Error> {
        let input = self.take_input()?;
        Ok(Waiting { output: all(self.master)?, input, closed: self.was_closed })
    }

    fn take_input(&self) -> Result<Vec<Line>, Error> {
        let mut lines = Vec::new();
        // It could not be put back, so it is left to who else works on the terminal.
        if !may_insert(&self.terminal) {
            return Ok(lines);
        }
        if self.has_lines() {
            let mut buffer = [0; HELD + 1];
            // Each is a character at least, or an end of file, which needs as much room.
            while lines.len() <= HELD {
                let Some(length) = some(read(&self.terminal, &mut buffer))? else { break };
                let bytes = buffer.get(..length).unwrap_or_default().to_vec();
                let is_ended = bytes.last().is_some_and(|last| self.ends_a_line(*last));
                lines.push(Line { bytes, end: if is_ended { End::Character } else { End::OfFile } });
            }
            let mut settings = self.settings;
            settings.c_lflag &= !libc::ICANON;
            settings.c_cc[libc::VMIN] = 1;
            if let Err(error) = self.change(&settings) {
                self.put_input(&lines)?;
                return Err(error);
            }
        }
        let rest = all(&self.terminal)?;
        if !rest.is_empty() {
            lines.push(Line { bytes: rest, end: End::None });
        }
        set(&self.terminal, &self.settings)?;
        Ok(lines)
    }

    fn ends_a_line(&self, byte: u8) -> bool {
        let of = |key: usize| self.settings.c_cc[key] != NONE && self.settings.c_cc[key] == byte;
        byte == b'\n' || of(libc::VEOL) || (self.settings.c_lflag & libc::IEXTEN != 0 && of(libc::VEOL2))
    }

    /// Two characters that are none of these and end no line.
    fn unused(&self, bytes: &[u8]) -> Option<[u8; 2]> {
        let mut free = (1..=u8::MAX).filter(|byte| !bytes.contains(byte) && !self.ends_a_line(*byte));
        Some([free.next()?, free.next()?])
    }

    fn put(&self, waiting: &Waiting) -> Result<(), Error> {
        self.put_output(&waiting.output)?;
        self.put_input(&waiting.input)
    }

    fn put_output(&self, output: &[u8]) -> Result<(), Error> {
        if output.is_empty() {
            return Ok(());
        }
        let mut settings = self.settings;
        settings.c_oflag &= !libc::OPOST;
        self.change(&settings)?;
        let mut left = output;
        // What is written fills the kernel's buffers in other pieces than it was, and may need more room.
        if output.len() > HELD {
            let fits = output.iter().take(HELD).take_while(|byte| insert(self.master, **byte).is_ok()).count();
            left = output.get(fits..).unwrap_or_default();
        }
        let (mut is_begun, mut was_stopped, deadline) = (false, false, Instant::now() + ROOM);
        while !left.is_empty() {
            match some(write(&self.terminal, left.get(..PIECE).unwrap_or(left)))? {
                Some(written @ 1..) => {
                    left = left.get(written..).unwrap_or_default();
                    is_begun = true;
                }
                // There is room, so it was stopped: by a key, or by a program.
                _ if !is_begun && !was_stopped && settings.c_iflag & libc::IXON != 0 => {
                    was_stopped = true;
                    settings.c_iflag &= !libc::IXON;
                    self.change(&settings)?;
                }
                _ if !is_begun && left.len() <= HELD && left.len() == output.len() => {
                    left.iter().try_for_each(|byte| insert(self.master, *byte))?;
                    break;
                }
                // The kernel makes room a little later.
                _ if Instant::now() < deadline => {
                    let mut asked = [PollFd::new(self.terminal.as_fd(), PollFlags::POLLOUT)];
                    poll(&mut asked, PollTimeout::from(1_u8))?;
                }
                _ => return Err(io::Error::from_raw_os_error(libc::ENOBUFS).into()),
            }
        }
        set(&self.terminal, &self.settings)?;
        if was_stopped && self.settings.c_cc[libc::VSTOP] != NONE {
            insert(&self.terminal, self.settings.c_cc[libc::VSTOP])?;
        }
        Ok(())
    }

    /// No key but two has a function meanwhile, and nothing is echoed.
    fn put_input(&self, lines: &[Line]) -> Result<(), Error> {
        for line in lines {
            let Some([eof, literal]) = self.unused(&line.bytes) else { return Err(Error::Full) };
            let mut settings = self.settings;
            // Without it, output that a key had stopped would begin again.
            settings.c_iflag &= libc::IXON;
            settings.c_lflag &= libc::ICANON | libc::EXTPROC;
            let keys = [libc::VEOL, libc::VEOL2].map(|key| (key, settings.c_cc[key]));
            settings.c_cc = [NONE; 19];
            if self.has_lines() {
                settings.c_lflag |= libc::IEXTEN;
                for (key, byte) in keys.into_iter().chain([(libc::VEOF, eof), (libc::VLNEXT, literal)]) {
                    settings.c_cc[key] = byte;
                }
                if self.settings.c_lflag & libc::IEXTEN == 0 {
                    settings.c_cc[libc::VEOL2] = NONE;
                }
            }
            self.change(&settings)?;
            let last = line.bytes.len().saturating_sub(1);
            for (at, byte) in line.bytes.iter().enumerate() {
                let ends = self.has_lines() && self.ends_a_line(*byte);
                if ends && (at < last || line.end != End::Character) {
                    insert(&self.terminal, literal)?;
                }
                insert(&self.terminal, *byte)?;
            }
            if line.end == End::OfFile {
                insert(&self.terminal, eof)?;
            }
        }
        Ok(set(&self.terminal, &self.settings)?)
    }

    /// Settings that were locked stay as they are.
    fn change(&self, settings: &libc::termios2) -> Result<(), Error> {
        set(&self.terminal, settings)?;
        let now = get(&self.terminal)?;
        let same = now.c_iflag == settings.c_iflag
            && now.c_oflag == settings.c_oflag
            && now.c_lflag == settings.c_lflag
            && now.c_cc == settings.c_cc;
        if same {
            return Ok(());
        }
        set(&self.terminal, &self.settings)?;
        Err(Error::Locked)
    }
}

/// Reads what is there, of a descriptor that does not wait.
fn all(from: &OwnedFd) -> Result<Vec<u8>, Error> {
    let mut found = Vec::new();
    let mut buffer = [0; HELD + 1];
    while found.len() < LONGEST {
        match some(read(from, &mut buffer)) {
            Ok(None | Some(0)) => break,
            Ok(Some(length)) => found.extend_from_slice(buffer.get(..length).unwrap_or_default()),
            Err(error) if found.is_empty() => return Err(error),
            Err(_) => break,
        }
    }
    Ok(found)
}

/// `None` if there is nothing yet.
fn some(outcome: nix::Result<usize>) -> Result<Option<usize>, Error> {
    match outcome {
        Ok(length) => Ok(Some(length)),
        Err(nix::Error::EAGAIN) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn ready(descriptor: &OwnedFd, events: PollFlags) -> Result<PollFlags, Error> {
    let mut asked = [PollFd::new(descriptor.as_fd(), events)];
    poll(&mut asked, PollTimeout::ZERO)?;
    Ok(asked[0].revents().unwrap_or(PollFlags::empty()))
}

fn control(on: &OwnedFd, request: libc::Ioctl, argument: *mut libc::c_void) -> io::Result<()> {
    // SAFETY: each caller passes what its request reads or writes, and it lives until the call returns.
    let result = unsafe { libc::ioctl(on.as_raw_fd(), request, argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn is_packet(master: &OwnedFd) -> io::Result<bool> {
    let mut on: libc::c_int = 0;
    control(master, libc::TIOCGPKT, (&raw mut on).cast())?;
    Ok(on != 0)
}

fn packet_mode(master: &OwnedFd, on: bool) -> io::Result<()> {
    let mut on = libc::c_int::from(on);
    control(master, libc::TIOCPKT, (&raw mut on).cast())
}

/// The terminal itself, without a path, so that it is the right one also if it is of another mount.
fn open(master: &OwnedFd) -> io::Result<OwnedFd> {
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_NONBLOCK | libc::O_CLOEXEC;
    // SAFETY: this request takes a number.
    let opened = unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags) };
    if opened < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has made this descriptor for us, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(opened) })
}

fn get(terminal: &OwnedFd) -> io::Result<libc::termios2> {
    // SAFETY: it is made of numbers.
    let mut settings: libc::termios2 = unsafe { std::mem::zeroed() };
    control(terminal, libc::TCGETS2, (&raw mut settings).cast())?;
    Ok(settings)
}

/// Whether some settings cannot be changed. For the kernel this has the form of settings, with a bit for each that is locked.
fn is_locked(terminal: &OwnedFd) -> io::Result<bool> {
    // SAFETY: it is made of numbers.
    let mut locked: libc::termios2 = unsafe { std::mem::zeroed() };
    // The kernel's older form of settings, which is the beginning of the newer one.
    control(terminal, libc::TIOCGLCKTRMIOS, (&raw mut locked).cast())?;
    let flags = locked.c_iflag | locked.c_oflag | locked.c_cflag | locked.c_lflag;
    Ok(flags != 0 || locked.c_cc.iter().any(|key| *key != 0))
}

fn set(terminal: &OwnedFd, settings: &libc::termios2) -> io::Result<()> {
    let mut settings = *settings;
    control(terminal, libc::TCSETS2, (&raw mut settings).cast())
}

/// Puts a character into what is read from here, as if it had come from the other end: at once and past a stop.
fn insert(into: &OwnedFd, mut byte: u8) -> io::Result<()> {
    control(into, libc::TIOCSTI, (&raw mut byte).cast())
}

/// Whether that is possible. It needs CAP_SYS_ADMIN in the first user namespace, which the kernel asks for before it looks at the
/// character.
fn may_insert(into: &OwnedFd) -> bool {
    control(into, libc::TIOCSTI, std::ptr::null_mut()).is_err_and(|error| error.raw_os_error() == Some(libc::EFAULT))
}

#[cfg(test)]
mod tests;
