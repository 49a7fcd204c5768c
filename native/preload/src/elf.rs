//! Reads a loaded object from its memory (ELF-64, gABI chapters 4 and 5, and the x86-64 psABI).
//!
//! Nothing is trusted: every address is looked up in the object's own readable mappings before it is read, and anything
//! that differs from what linkers for x86-64 produce ends the search.

use core::mem::MaybeUninit;
use core::ptr::with_exposed_provenance;
use core::slice;

use crate::maps::{self, Mapping};
use crate::sys::{PROT_EXEC, PROT_READ};

/// Maximum number of mappings of an object: usually four or five, and a few more if protections were changed.
const MOST_PARTS: usize = 32;
/// An object has about 30 dynamic tags and a dozen program headers.
const MOST_TAGS: usize = 256;
const MOST_HEADERS: usize = 64;

const EHDR_SIZE: usize = 64;
const PHDR_SIZE: usize = 56;
const RELA_SIZE: usize = 24;
const SYM_SIZE: usize = 24;

/// The relocation types that put a function's address into memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// R_X86_64_JUMP_SLOT or R_X86_64_GLOB_DAT: only calls and address-taking code read it.
    Slot,
    /// R_X86_64_64: a pointer in the object's data.
    Pointer,
}

/// The mappings of an object's file, sorted by address, and its load address.
#[derive(Debug)]
pub(crate) struct Object {
    parts: [MaybeUninit<Mapping>; MOST_PARTS],
    count: usize,
    base: usize,
}

/// The address of the function of this name (ending with NUL), in a loaded object with such a mapping.
pub(crate) fn function(name: &[u8], is_wanted: impl Fn(&Mapping) -> bool) -> Option<usize> {
    let mut found = None;
    objects(is_wanted, |object| {
        found = object.defined(name);
        found.is_none()
    });
    found
}

/// Looks at the object whose code is at this address.
pub(crate) fn at<T>(address: usize, look: impl FnOnce(&Object) -> Option<T>) -> Option<T> {
    // Not returned: the compiler would copy it with the job's memcpy.
    let mut object = Object::new();
    object.find(&maps::find(address)?, address)?;
    look(&object)
}

/// Calls `visit` for the loaded objects with such a mapping of their code, until it returns false.
pub(crate) fn objects(is_wanted: impl Fn(&Mapping) -> bool, mut visit: impl FnMut(&Object) -> bool) {
    maps::scan(|mapping| {
        if mapping.inode == 0 || mapping.prot & PROT_EXEC == 0 || !is_wanted(mapping) {
            return true;
        }
        let mut object = Object::new();
        // The code may begin anywhere in its first page, because lld does not align it.
        let places = [mapping.start, mapping.start | 0xfff];
        places.into_iter().find_map(|place| object.find(mapping, place)).is_none_or(|()| visit(&object))
    });
}

/// The content of the dynamic section.
#[derive(Debug, Default)]
struct Dynamic {
    symbols: usize,
    strings: usize,
    rela: usize,
    rela_size: usize,
    /// Relocations at the beginning of `rela` that name no symbol.
    relative: usize,
    plt: usize,
    plt_size: usize,
}

impl Object {
    pub(crate) const fn new() -> Object {
        Object { parts: [const { MaybeUninit::uninit() }; MOST_PARTS], count: 0, base: 0 }
    }

    /// Finds the object with `address`, which is in the mapping `code`. A file can be mapped more than once: the object
    /// is the one whose program headers explain that mapping. Memory of no file is not read: other threads may unmap it.
    pub(crate) fn find(&mut self, code: &Mapping, address: usize) -> Option<()> {
        self.count = 0;
        let mut fits = true;
        maps::scan(|mapping| {
            if mapping.is_of_file(code) {
                fits = self.parts.get_mut(self.count).map(|part| part.write(*mapping)).is_some();
                self.count += usize::from(fits);
            }
            fits
        });
        self.base = if fits { self.base_below(code, address)? } else { return None };
        Some(())
    }

    /// The start of the object: a loader maps all of it in one piece, the holes too. Other mappings of its file are not
    /// read, because whoever made them may unmap them, and those above and below cannot be told from its own.
    fn base_below(&self, code: &Mapping, address: usize) -> Option<usize> {
        let mut end = None;
        for part in self.parts().iter().rev().filter(|part| part.start <= code.start) {
            if end.is_some_and(|end| part.end != end) {
                return None;
            }
            end = Some(part.start);
            if part.offset == 0 && self.is_base(part.start, code, address) {
                return Some(part.start);
            }
        }
        None
    }

    /// Its load address.
    pub(crate) fn base(&self) -> usize {
        self.base
    }

    /// By the name of its file.
    pub(crate) fn is_libcuda(&self) -> bool {
        self.parts().first().is_some_and(|part| part.is_libcuda)
    }

    /// Of its file.
    pub(crate) fn inode(&self) -> usize {
        self.parts().first().map_or(0, |part| part.inode)
    }

    fn parts(&self) -> &[Mapping] {
        // SAFETY: as many were written, and `count` is at most the length of the array.
        unsafe { slice::from_raw_parts(self.parts.as_ptr().cast(), self.count) }
    }

    /// The readable mapping of the object that contains these bytes.
    pub(crate) fn part(&self, address: usize, length: usize) -> Option<&Mapping> {
        let end = address.checked_add(length)?;
        let mut readable = self.parts().iter().filter(|part| part.prot & PROT_READ != 0);
        readable.find(|part| part.start <= address && end <= part.end)
    }

    pub(crate) fn word(&self, address: usize) -> Option<usize> {
        self.part(address, size_of::<usize>())?;
        // SAFETY: mapped and readable; libcuda is running its code, so that it stays.
        Some(unsafe { with_exposed_provenance::<usize>(address).read_unaligned() })
    }

    fn is_at(&self, address: usize, text: &[u8]) -> bool {
        if self.part(address, text.len()).is_none() {
            return false;
        }
        // SAFETY: as above.
        let found = |at| unsafe { with_exposed_provenance::<u8>(address + at).read_volatile() };
        text.iter().enumerate().all(|(at, byte)| found(at) == *byte)
    }

    /// Calls `visit` with the address of each program header, its type and its virtual address.
    fn headers(&self, base: usize, mut visit: impl FnMut(usize, usize, usize)) -> Option<()> {
        // e_ident: ELF, 64 bits, little-endian, version 1. e_type 3: a shared object; e_machine 62: x86-64.
        let ident = self.word(base)? & 0x00ff_ffff_ffff_ffff == 0x0001_0102_464c_457f;
        let kind = self.word(base.checked_add(16)?)? & 0xffff_ffff == 62 << 16 | 3;
        let table = base.checked_add(self.word(base.checked_add(32)?)?)?;
        let sizes = self.word(base.checked_add(48)?)?;
        let count = self.word(base.checked_add(EHDR_SIZE - 8)?)? & 0xffff;
        if !ident || !kind || sizes >> 48 != PHDR_SIZE || sizes >> 32 & 0xffff != EHDR_SIZE || count > MOST_HEADERS {
            return None;
        }
        for number in 0..count {
            let header = table.checked_add(number * PHDR_SIZE)?;
            self.part(header, PHDR_SIZE)?;
            visit(header, self.word(header)? & 0xffff_ffff, self.word(header + 16)?);
        }
        Some(())
    }

    fn is_base(&self, base: usize, code: &Mapping, address: usize) -> bool {
        const PT_LOAD: usize = 1;
        let mut found = false;
        let read = self.headers(base, |header, kind, start| {
            if let (PT_LOAD, Some(offset), Some(size)) = (kind, self.word(header + 8), self.word(header + 40)) {
                let placed = base.wrapping_add(start).wrapping_sub(offset) == code.start.wrapping_sub(code.offset);
                found |= placed && address.wrapping_sub(base.wrapping_add(start)) < size;
            }
        });
        read.is_some() && found
    }

    /// The target of a dynamic tag. glibc adds the load address to some of them, other loaders to none.
    fn pointer(&self, value: usize) -> usize {
        if self.part(value, 1).is_some() { value } else { self.base.wrapping_add(value) }
    }

    fn dynamic(&self) -> Option<Dynamic> {
        const PT_DYNAMIC: usize = 2;
        let mut section = None;
        self.headers(self.base, |_, kind, start| {
            if kind == PT_DYNAMIC {
                section = Some(self.base.wrapping_add(start));
            }
        })?;
        let section = section?;
        let mut found = Dynamic::default();
        for number in 0..MOST_TAGS {
            let tag = section.checked_add(number * 16)?;
            let value = self.word(tag.checked_add(8)?)?;
            match self.word(tag)? {
                0 => return Some(found),                  // DT_NULL
                2 => found.plt_size = value,              // DT_PLTRELSZ
                5 => found.strings = self.pointer(value), // DT_STRTAB
                6 => found.symbols = self.pointer(value), // DT_SYMTAB
                7 => found.rela = self.pointer(value),    // DT_RELA
                8 => found.rela_size = value,             // DT_RELASZ
                9 if value != RELA_SIZE => return None,   // DT_RELAENT
                11 if value != SYM_SIZE => return None,   // DT_SYMENT
                20 if value != 7 => return None,          // DT_PLTREL, which is DT_RELA
                23 => found.plt = self.pointer(value),    // DT_JMPREL
                0x6fff_fff9 => found.relative = value,    // DT_RELACOUNT
                _ => {}
            }
        }
        None
    }

    /// Calls `visit` for each place in memory that the loader fills with the address of the function `name`, which ends
    /// with NUL. A place can occur twice.
    pub(crate) fn slots(&self, name: &[u8], mut visit: impl FnMut(usize, Kind)) -> Option<()> {
        let dynamic = self.dynamic()?;
        let skipped = dynamic.relative.checked_mul(RELA_SIZE)?;
        let rest = (dynamic.rela.checked_add(skipped)?, dynamic.rela_size.saturating_sub(skipped));
        for (table, size) in [(dynamic.plt, dynamic.plt_size), rest] {
            // The table is in one mapping, which bounds the loop.
            if size == 0 || self.part(table, size).is_none() {
                continue;
            }
            for number in 0..size / RELA_SIZE {
                let entry = table + number * RELA_SIZE;
                let info = self.word(entry + 8)?;
                let kind = match (info & 0xffff_ffff, self.word(entry + 16)?) {
                    (6 | 7, _) => Kind::Slot,
                    (1, 0) => Kind::Pointer,
                    _ => continue,
                };
                if self.is_named(&dynamic, info >> 32, name) {
                    visit(self.base.wrapping_add(self.word(entry)?), kind);
                }
            }
        }
        Some(())
    }

    /// The address of the function `name` that the object defines. Its symbols are searched linearly: the table ends
    /// where the strings begin, with all linkers.
    pub(crate) fn defined(&self, name: &[u8]) -> Option<usize> {
        const STT_FUNC: usize = 2;
        let dynamic = self.dynamic()?;
        let count = dynamic.strings.checked_sub(dynamic.symbols)? / SYM_SIZE;
        for number in 1..count {
            let symbol = dynamic.symbols.checked_add(number * SYM_SIZE)?;
            let head = self.word(symbol)?;
            let (kind, section) = (head >> 32 & 0xf, head >> 48);
            if kind == STT_FUNC && section != 0 && self.is_named(&dynamic, number, name) {
                return Some(self.base.wrapping_add(self.word(symbol + 8)?));
            }
        }
        None
    }

    fn is_named(&self, dynamic: &Dynamic, symbol: usize, name: &[u8]) -> bool {
        // The number has 32 bits.
        let Some(symbol) = dynamic.symbols.checked_add(symbol * SYM_SIZE) else { return false };
        let text = self.word(symbol).and_then(|word| dynamic.strings.checked_add(word & 0xffff_ffff));
        text.is_some_and(|text| self.is_at(text, name))
    }
}

#[cfg(test)]
mod tests {
    use core::ffi::{c_int, c_void};
    use core::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::sys;

    unsafe extern "C" {
        fn memcpy(to: *mut c_void, from: *const c_void, length: usize) -> *mut c_void;
        fn getpid() -> c_int;
    }

    fn found_around(address: usize) -> Option<Object> {
        let mut object = Object::new();
        object.find(&maps::find(address).unwrap(), address).map(|()| object)
    }

    fn values(object: &Object, name: &[u8]) -> Vec<usize> {
        let mut values = Vec::new();
        object.slots(name, |slot, _| values.push(object.word(slot).unwrap())).unwrap();
        values
    }

    #[test]
    fn the_slots_of_this_program_hold_what_the_loader_put_there() {
        let this = found_around(found_around as *const () as usize).unwrap();
        let copies = values(&this, b"memcpy\0");
        assert!(!copies.is_empty() && copies.iter().all(|value| *value == memcpy as *const () as usize));
        assert!(values(&this, b"getpid\0").contains(&(getpid as *const () as usize)));
        assert_eq!(values(&this, b"memcp\0"), []);
        assert_eq!(values(&this, b"emcpy\0"), []);
    }

    #[test]
    fn a_function_is_found_where_it_is_defined() {
        let own = maps::find(found_around as *const () as usize).unwrap().inode;
        let found = |name: &[u8]| function(name, |mapping| mapping.inode != own);
        assert_eq!(found(b"getpid\0"), Some(getpid as *const () as usize));
        // Data, and names that are the beginning or end of another one.
        assert_eq!([found(b"environ\0"), found(b"getpi\0"), found(b"etpid\0")], [None; 3]);
        // Here the symbol is undefined, not defined.
        assert_eq!(function(b"getpid\0", |mapping| mapping.inode == own), None);
        assert_eq!(function(b"getpid\0", |mapping| mapping.is_libcuda), None);
    }

    #[test]
    fn other_objects_and_addresses_that_are_none_do_no_harm() {
        // libc's tables are another linker's, and it uses its own functions.
        assert!(found_around(getpid as *const () as usize).is_some());
        let local = 1;
        assert!(found_around((&raw const local).addr()).is_none(), "a stack");
        let mut object = Object::new();
        let code = maps::find(found_around as *const () as usize).unwrap();
        assert!(object.find(&code, code.end + (1 << 40)).is_none());
        assert!(object.word(usize::MAX - 3).is_none() && object.word(0).is_none());
    }

    #[test]
    fn memory_that_another_thread_unmaps_is_not_read() {
        let (local, is_over) = (1, AtomicBool::new(false));
        // libc, and its file once more, below it.
        let there = getpid as *const () as usize;
        let found = maps::find(there).unwrap();
        let text = std::fs::read_to_string("/proc/self/maps").unwrap();
        let line = text.lines().find(|line| line.starts_with(&format!("{:x}-", found.start))).unwrap();
        let path = std::ffi::CString::new(&line[line.find('/').unwrap()..]).unwrap();
        let library = sys::File::read_only(&path).unwrap();
        let base = found_around(there).unwrap().base();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    // Memory, and the file of an object, as a debugger's library reads it.
                    for (flags, file) in [(sys::MAP_ANONYMOUS, -1), (0, library.number())] {
                        let place = base - (1 << 24);
                        let page = sys::map(place, 4096, PROT_READ, sys::MAP_PRIVATE | flags, file, 0).unwrap();
                        sys::unmap(page, 4096).unwrap();
                    }
                }
            });
            for _ in 0..500 {
                assert!(found_around((&raw const local).addr()).is_none());
                assert!(found_around(there).is_some_and(|found| found.base() == base));
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }

    const IMAGE: usize = 512;

    /// A small object: headers, dynamic section, one relocation with a symbol, and tables.
    fn image(relocated_by: usize) -> Vec<u8> {
        let mut bytes = vec![0_u8; IMAGE];
        let mut put = |at: usize, words: &[usize]| {
            for (word, to) in words.iter().zip(bytes[at..].chunks_exact_mut(8)) {
                to.copy_from_slice(&word.to_le_bytes());
            }
        };
        put(0, &[0x0001_0102_464c_457f, 0, 1 << 32 | 62 << 16 | 3, 0, 64, 0, 56 << 48 | 64 << 32, 2]);
        put(64, &[5 << 32 | 1, 0, 0, 0, IMAGE, IMAGE, 4096]);
        put(120, &[6 << 32 | 2, 176, 176, 176, 144, 144, 8]);
        let at = |address: usize| address + relocated_by;
        put(176, &[5, at(464), 6, at(416), 23, at(344), 2, 24, 20, 7, 7, at(368), 8, 48, 0x6fff_fff9, 1, 9, 24, 0, 0]);
        put(344, &[480, 1 << 32 | 7, 0]);
        put(368, &[488, 8, 3, 488, 1 << 32 | 1, 0]);
        put(440, &[1]);
        bytes[465..472].copy_from_slice(b"memcpy\0");
        bytes
    }

    /// The object is placed before an unreadable page: a read beyond the mapping ends the test.
    #[test]
    fn a_damaged_object_is_read_within_its_bounds() {
        let around = sys::MAP_PRIVATE | sys::MAP_ANONYMOUS;
        let pages = sys::map(0, 8192, PROT_READ | sys::PROT_WRITE, around, -1, 0).unwrap();
        sys::protect(pages + 4096, 4096, sys::PROT_NONE).unwrap();
        let start = pages + 4096 - IMAGE;
        let end = pages + 4096;
        let part = Mapping {
            start,
            end,
            offset: 0,
            device: 0,
            inode: 1,
            prot: PROT_READ,
            is_private: true,
            is_libcuda: true,
            is_libnccl: false,
            is_libnvml: false,
        };
        let mut object = Object::new();
        object.parts[0].write(part);
        (object.count, object.base) = (1, start);
        let found = |bytes: &[u8]| {
            // SAFETY: room for the image, which nobody else knows of.
            unsafe { std::ptr::copy(bytes.as_ptr(), core::ptr::with_exposed_provenance_mut(start), IMAGE) };
            let mut slots = Vec::new();
            let whole = object.slots(b"memcpy\0", |slot, kind| slots.push((slot.wrapping_sub(start), kind)));
            (object.is_base(start, &part, start + 100), whole.is_some(), slots)
        };
        let expected = (true, true, vec![(480, Kind::Slot), (488, Kind::Pointer)]);
        // With addresses as glibc leaves them, and as other loaders do.
        assert_eq!((found(&image(0)), found(&image(start))), (expected.clone(), expected));
        let mut refused = 0;
        for relocated_by in [0, start] {
            for at in 0..IMAGE {
                for flip in [1, 2, 8, 0x10, 0x80, 0xff] {
                    let mut bytes = image(relocated_by);
                    bytes[at] ^= flip;
                    refused += usize::from(!found(&bytes).1);
                }
            }
        }
        assert!(refused > 500, "{refused}");
        sys::unmap(pages, 8192).unwrap();
    }
}
