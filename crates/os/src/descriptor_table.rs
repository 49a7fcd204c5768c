//! The descriptors of another process (/proc/PID/fd, /proc/PID/fdinfo), read fast: a job stands still meanwhile, and may have
//! thousands. [`crate::process::descriptors`] is for all others.

use std::io;
use std::os::fd::{OwnedFd, RawFd};

use rustix::fs::{Dir, Mode, OFlags};
use rustix::path::DecInt;

/// The table of one process, with its two folders open: a path from the root of /proc would be looked up for each file.
#[derive(Debug)]
pub struct DescriptorTable {
    links: OwnedFd,
    infos: OwnedFd,
    numbers: Vec<RawFd>,
}

impl DescriptorTable {
    /// Opens and lists it.
    ///
    /// # Errors
    /// When the process is gone or of somebody else, or this process has no descriptors left.
    pub fn of(pid: i32) -> io::Result<DescriptorTable> {
        let folder = |name: &str| {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            rustix::fs::open(format!("/proc/{pid}/{name}"), flags, Mode::empty())
        };
        let links = folder("fd")?;
        let mut numbers = Vec::new();
        for entry in Dir::read_from(&links)? {
            numbers.extend(entry?.file_name().to_str().ok().and_then(|name| name.parse::<RawFd>().ok()));
        }
        numbers.sort_unstable();
        Ok(DescriptorTable { links, infos: folder("fdinfo")?, numbers })
    }

    /// The numbers, in order.
    #[must_use]
    pub fn numbers(&self) -> &[RawFd] {
        &self.numbers
    }

    /// What a descriptor leads to, as the kernel calls it; `None` if it is closed by now.
    #[must_use]
    pub fn target(&self, number: RawFd) -> Option<Vec<u8>> {
        let path = rustix::fs::readlinkat(&self.links, DecInt::new(number), Vec::with_capacity(PATH)).ok()?;
        Some(path.into_bytes())
    }

    /// Its file of fdinfo (proc_pid_fdinfo(5)); `None` if it is closed by now.
    #[must_use]
    pub fn info(&self, number: RawFd) -> Option<Vec<u8>> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.infos, DecInt::new(number), flags, Mode::empty()).ok()?;
        let mut content = Vec::with_capacity(INFO);
        loop {
            let room = content.capacity() - content.len();
            let read = rustix::io::read(&file, rustix::buffer::spare_capacity(&mut content)).ok()?;
            // The kernel gives as much as there is: less than was asked for is the end.
            if read < room {
                return Some(content);
            }
            content.reserve(content.len());
        }
    }
}

/// Longer than most, so that one system call is enough.
const PATH: usize = 128;
/// Longer than all but those of large epoll sets.
const INFO: usize = 1024;

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsRawFd;

    use super::*;

    fn own() -> DescriptorTable {
        DescriptorTable::of(std::process::id().cast_signed()).unwrap()
    }

    #[test]
    fn it_reads_what_the_kernel_says() {
        let file = File::open("/proc/self/stat").unwrap();
        let number = file.as_raw_fd();
        let table = own();
        assert!(table.numbers().contains(&number) && table.numbers().is_sorted());
        let target = String::from_utf8(table.target(number).unwrap()).unwrap();
        assert_eq!(target, format!("/proc/{}/stat", std::process::id()));
        let info = String::from_utf8(table.info(number).unwrap()).unwrap();
        assert!(info.starts_with("pos:\t0\n") && info.contains("flags:"), "{info}");
        assert_eq!((table.target(999_999), table.info(999_999)), (None, None));
        assert!(DescriptorTable::of(i32::MAX).is_err());
    }

    #[test]
    fn one_of_any_length_is_read_to_its_end() {
        use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
        use nix::sys::eventfd::EventFd;
        let set = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
        // Lengths around each size of the buffer.
        let members: Vec<EventFd> = (0..200).map(|_| EventFd::new().unwrap()).collect();
        for (n, member) in members.iter().enumerate() {
            set.add(member, EpollEvent::new(EpollFlags::EPOLLIN, n as u64)).unwrap();
            let number = std::os::fd::AsFd::as_fd(&set.0).as_raw_fd();
            let mut expected = Vec::new();
            File::open(format!("/proc/self/fdinfo/{number}")).unwrap().read_to_end(&mut expected).unwrap();
            assert_eq!(own().info(number), Some(expected), "with {n} members");
        }
    }
}
