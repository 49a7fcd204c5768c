//! /proc/self/maps: which file an address belongs to. Read in small pieces, because nothing may be allocated. It needs
//! no lock, and it shows objects before the loader's list does.

use core::mem::MaybeUninit;

use crate::sys::{File, PROT_EXEC, PROT_READ, PROT_WRITE};

/// A mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// Its offset in the file.
    pub(crate) offset: usize,
    /// Its device, as the kernel writes it: up to nine characters of seven bits.
    pub(crate) device: usize,
    /// 0 if it is not a file's.
    pub(crate) inode: usize,
    /// PROT_READ, PROT_WRITE and PROT_EXEC.
    pub(crate) prot: i32,
    /// Whether it is private.
    pub(crate) is_private: bool,
    /// Whether the file's name begins with `libcuda.so`: `libcuda.so.1`, or the target of that link.
    pub(crate) is_libcuda: bool,
    /// The same for `libnccl.so`.
    pub(crate) is_libnccl: bool,
    /// The same for `libnvidia-ml.so`.
    pub(crate) is_libnvml: bool,
}

impl Mapping {
    /// Whether both are of the same file, by the same name where that is libcuda's or NVML's. Not if they are of none.
    pub(crate) fn is_of_file(&self, other: &Mapping) -> bool {
        let file = |mapping: &Mapping| (mapping.device, mapping.inode, mapping.is_libcuda, mapping.is_libnvml);
        self.inode != 0 && file(self) == file(other)
    }
}

/// The mapping that contains `address`.
pub(crate) fn find(address: usize) -> Option<Mapping> {
    let mut found = None;
    scan(|mapping| {
        if (mapping.start..mapping.end).contains(&address) {
            found = Some(*mapping);
        }
        found.is_none()
    });
    found
}

/// Calls `visit` for all mappings in the order of their addresses, until it returns false.
pub(crate) fn scan(mut visit: impl FnMut(&Mapping) -> bool) {
    let Ok(file) = File::read_only(c"/proc/self/maps") else { return };
    let mut buffer = [const { MaybeUninit::<u8>::uninit() }; 4096];
    let mut line = Line::new();
    while let Ok(count) = file.read(buffer.as_mut_ptr().cast(), buffer.len()) {
        if count == 0 {
            return;
        }
        for byte in buffer.iter().take(count) {
            // SAFETY: the kernel wrote this many bytes.
            if let Some(mapping) = line.feed(unsafe { byte.assume_init() })
                && !visit(&mapping)
            {
                return;
            }
        }
    }
}

const LIBRARIES: [&[u8]; 3] = [b"libcuda.so", b"libnccl.so", b"libnvidia-ml.so"];

/// Parses one line: `start-end perms offset device inode path`.
struct Line {
    field: u8,
    mapping: Mapping,
    /// Bytes of each of LIBRARIES that the name has had so far; None when it is another name.
    names: [Option<usize>; LIBRARIES.len()],
    in_blank: bool,
}

impl Line {
    fn new() -> Line {
        let mapping = Mapping {
            start: 0,
            end: 0,
            offset: 0,
            device: 0,
            inode: 0,
            prot: 0,
            is_private: false,
            is_libcuda: false,
            is_libnccl: false,
            is_libnvml: false,
        };
        Line { field: 0, mapping, names: [Some(0); LIBRARIES.len()], in_blank: false }
    }

    /// Returns a mapping when its line is complete.
    fn feed(&mut self, byte: u8) -> Option<Mapping> {
        match (byte, self.field) {
            (b'\n', _) => {
                let mut mapping = self.mapping;
                let [is_libcuda, is_libnccl, is_libnvml] = [0, 1, 2].map(|at: usize| {
                    self.names
                        .get(at)
                        .copied()
                        .flatten()
                        .is_some_and(|had| LIBRARIES.get(at).map(|l| l.len()) == Some(had))
                });
                (mapping.is_libcuda, mapping.is_libnccl) = (is_libcuda, is_libnccl);
                mapping.is_libnvml = is_libnvml;
                *self = Line::new();
                return Some(mapping);
            }
            // The path, to the end of the line; its last part is the name.
            (b'/', 5) => self.names = [Some(0); LIBRARIES.len()],
            (_, 5) => {
                for (had, library) in self.names.iter_mut().zip(LIBRARIES) {
                    *had = match *had {
                        Some(at) if at == library.len() => Some(at),
                        Some(at) if library.get(at) == Some(&byte) => Some(at + 1),
                        _ => None,
                    };
                }
            }
            (b' ', _) => self.in_blank = true,
            _ => {
                if core::mem::take(&mut self.in_blank) {
                    self.field += 1;
                    if self.field == 5 {
                        return self.feed(byte);
                    }
                }
                let digit = char::from(byte).to_digit(16).map_or(0, |digit| digit as usize);
                match self.field {
                    0 if byte == b'-' => self.mapping.start = core::mem::take(&mut self.mapping.end),
                    0 => self.mapping.end = self.mapping.end.wrapping_mul(16).wrapping_add(digit),
                    1 => match byte {
                        b'r' => self.mapping.prot |= PROT_READ,
                        b'w' => self.mapping.prot |= PROT_WRITE,
                        b'x' => self.mapping.prot |= PROT_EXEC,
                        b'p' => self.mapping.is_private = true,
                        _ => {}
                    },
                    2 => self.mapping.offset = self.mapping.offset.wrapping_mul(16).wrapping_add(digit),
                    3 => self.mapping.device = self.mapping.device << 7 | usize::from(byte & 0x7f),
                    4 => self.mapping.inode = self.mapping.inode.wrapping_mul(10).wrapping_add(digit),
                    _ => {}
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Vec<Mapping> {
        let mut line = Line::new();
        text.bytes().filter_map(|byte| line.feed(byte)).collect()
    }

    #[test]
    fn lines_are_read() {
        let text = "7f00-7fff r-xp 00001000 08:01 1234                       /usr/lib/libcuda.so.580.1\n\
                    8000-9000 rw-p 00000000 00:00 0 \n\
                    7fffffffe000-7ffffffff000 rw-p 00000000 00:00 0                          [stack]\n\
                    a000-b000 r-xp 00000000 00:21 7    /tmp/a b/libcuda.so.1 (deleted)\n\
                    c000-d000 r-xp 00000000 00:21 8    /libcuda.so/libcudart.so.12\n\
                    e000-f000 r--s 00000000 00:21 9    /x/my-libcuda.so.1\n\
                    f000-f100 r-xp 00000000 00:21 10   /x/nccl/lib/libnccl.so.2\n";
        let mappings = parse(text);
        let found: Vec<_> = mappings.iter().map(|m| (m.start, m.end, m.inode, m.is_libcuda)).collect();
        let expected = [
            (0x7f00, 0x7fff, 1234, true),
            (0x8000, 0x9000, 0, false),
            (0x7fff_ffff_e000, 0x7fff_ffff_f000, 0, false),
            (0xa000, 0xb000, 7, true),
            (0xc000, 0xd000, 8, false),
            (0xe000, 0xf000, 9, false),
            (0xf000, 0xf100, 10, false),
        ];
        assert_eq!(found, expected);
        assert_eq!(mappings.iter().filter(|m| m.is_libnccl).map(|m| m.inode).collect::<Vec<_>>(), [10]);
        let rights: Vec<_> = mappings.iter().map(|m| (m.offset, m.prot, m.is_private)).collect();
        let expected =
            [(0x1000, 5, true), (0, 3, true), (0, 3, true), (0, 5, true), (0, 5, true), (0, 1, false), (0, 5, true)];
        assert_eq!(rights, expected);
    }

    #[test]
    fn a_file_is_known_by_its_device_and_its_number() {
        let text = "1000-2000 r--p 00000000 08:01 1234    /usr/lib/libnccl.so.2\n\
                    2000-3000 r-xp 00001000 08:01 1234    /usr/lib/libnccl.so.2\n\
                    4000-5000 rw-s 00000000 00:2b 1234    /data/table\n\
                    6000-7000 rw-p 00000000 00:00 0 \n\
                    8000-9000 rw-p 00000000 00:00 0 \n";
        let mappings = parse(text);
        let same = |one: usize| mappings.iter().map(|other| other.is_of_file(&mappings[one])).collect::<Vec<_>>();
        assert_eq!(same(0), [true, true, false, false, false]);
        assert_eq!(same(2), [false, false, true, false, false]);
        assert_eq!(same(3), [false; 5]);
    }

    #[test]
    fn our_own_code_is_found() {
        let here = parse as *const () as usize;
        let mapping = find(here).unwrap();
        assert!(mapping.start <= here && here < mapping.end && mapping.inode != 0 && !mapping.is_libcuda);
        assert_eq!(find(1), None);
    }
}
