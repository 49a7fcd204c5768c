//! Where the ranks of a communicator meet: shared memory, which an image of the job has with all else.

use std::ffi::c_int;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Ranks of one communicator.
pub(crate) const MOST: usize = 8;
/// Operations of a channel whose numbers are there.
pub(crate) const RING: usize = 4;

type Numbers = [AtomicU64; MOST];

/// One communicator. All zero at first.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Room {
    pub(crate) joined: AtomicU64,
    /// Collectives that each rank has begun.
    pub(crate) begun: Numbers,
    /// By operation, rank, and the rank that it is for.
    pub(crate) values: [[Numbers; MOST]; RING],
    /// By sender and receiver.
    pub(crate) sent: [Numbers; MOST],
    /// By receiver and sender.
    pub(crate) received: [Numbers; MOST],
    /// By operation, sender and receiver.
    pub(crate) carried: [[Numbers; MOST]; RING],
    /// Colour and key of each rank, by split.
    wishes: [Numbers; RING],
    /// Splits that each rank has begun.
    splitting: Numbers,
    /// The room that the first of a new communicator has taken, and for which split, by rank.
    rooms: Numbers,
}

/// All communicators that come from one unique id.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Building {
    name: AtomicU64,
    rooms_used: AtomicU64,
    pub(crate) rooms: [Room; 8000],
}

/// Waits, without CUDA.
pub(crate) fn wait(done: impl Fn() -> bool) {
    while !done() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Makes the memory for one unique id: who has it, the descriptor there, and a number that no other has.
pub(crate) fn make() -> io::Result<[u64; 3]> {
    // SAFETY: a string that ends with NUL.
    let fd = unsafe { libc::memfd_create(c"standin-nccl".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just made, and nobody else's.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(size_of::<Building>() as u64)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let name = now.as_secs().wrapping_mul(1_000_000_000) + u64::from(now.subsec_nanos());
    map(&file)?.name.store(name, Ordering::SeqCst);
    // It stays open: the other ranks come by it.
    let fd = file.into_raw_fd();
    Ok([u64::from(std::process::id()), u64::from(fd.unsigned_abs()), name])
}

/// The memory of this name.
pub(crate) fn open([pid, fd, name]: [u64; 3]) -> io::Result<&'static Building> {
    let file = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/fd/{fd}"))?;
    if file.metadata()?.len() != size_of::<Building>() as u64 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let building = map(&file)?;
    if building.name.load(Ordering::SeqCst) == name { Ok(building) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

fn map(file: &File) -> io::Result<&'static Building> {
    let (length, prot) = (size_of::<Building>(), libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: a new mapping at an address of the kernel's choice.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), length, prot, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as large as that, all atomics, and never unmapped.
    Ok(unsafe { &*address.cast::<Building>() })
}

impl Building {
    /// The number of a room that nobody has.
    pub(crate) fn new_room(&self) -> u64 {
        self.rooms_used.fetch_add(1, Ordering::SeqCst) + 1
    }
}

impl Room {
    /// Tells the others colour and key, waits for theirs, and returns the ranks of the same colour in their new order.
    pub(crate) fn split(&self, number: u64, rank: usize, ranks: usize, wish: [c_int; 2]) -> Vec<usize> {
        let wishes = &self.wishes[usize::try_from(number % RING as u64).unwrap_or(0)];
        let [color, key] = wish.map(|number| u64::from(number.cast_unsigned()));
        wishes[rank].store(color << 32 | key, Ordering::SeqCst);
        self.splitting[rank].store(number, Ordering::SeqCst);
        wait(|| self.splitting[..ranks].iter().all(|at| at.load(Ordering::SeqCst) >= number));
        let of = |rank: usize| wishes[rank].load(Ordering::SeqCst);
        let mut members: Vec<usize> = (0..ranks).filter(|other| of(*other) >> 32 == color).collect();
        members.sort_by_key(|other| (of(*other) & u64::from(u32::MAX), *other));
        members
    }

    /// The room of the new communicator: its first member takes one.
    pub(crate) fn split_room(&self, number: u64, members: &[usize], rank: usize, new: impl Fn() -> u64) -> usize {
        let first = members.first().copied().unwrap_or(rank);
        if first == rank {
            self.rooms[rank].store(number << 32 | new(), Ordering::SeqCst);
        }
        wait(|| self.rooms[first].load(Ordering::SeqCst) >> 32 >= number);
        usize::try_from(self.rooms[first].load(Ordering::SeqCst) & u64::from(u32::MAX)).unwrap_or(usize::MAX)
    }
}
