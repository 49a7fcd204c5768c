//! Memory that processes share: `cuMemCreate` and its kin, and CUDA IPC.
//!
//! An allocation is a file; whoever has its descriptor can map it. A checkpoint takes the content to host memory and
//! closes the file, and a restore makes a new one: who has the old one mapped then looks at memory that is nobody's. As
//! with the driver, a process that has something of another one is checkpointed, and not restored.
//!
//! Host memory is checkpointed, and not restored: that of a NUMA node fails the restore, and the other is not where it was.
//!
//! Handles are used again at once when they are free, as the driver does it at times.
//!
//! A large import has two objects of the resource manager. With the driver (580) that is so for some on machines with
//! several GPUs.

use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};

use crate::control::{SIZE, code};
use crate::memory::{PIECE, map, map_file, unmap};
use crate::rm;

/// The first handle.
const FIRST: u64 = 0x7f00_0000_0001;
/// Imports of this size have two objects.
const TWO_OBJECTS: usize = 32 << 20;

#[derive(Debug)]
struct Allocation {
    /// None while checkpointed.
    file: Option<OwnedFd>,
    size: usize,
    /// The resource manager's numbers of what is another's.
    foreign: Vec<u32>,
    references: u32,
    kind: Kind,
}

/// Where an allocation is (CUmemLocationType).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Device,
    /// Host memory: the processor's mapping of it is not restored.
    Host,
    /// Host memory of a NUMA node: the restore fails.
    Numa,
}

impl Allocation {
    fn is_own(&self) -> bool {
        self.foreign.is_empty()
    }
}

#[derive(Debug)]
struct View {
    address: usize,
    size: usize,
    offset: usize,
    allocation: usize,
    can_be_used: bool,
}

/// What this process has.
#[derive(Debug)]
pub(crate) struct Shared {
    has_begun: bool,
    allocations: Vec<Option<Allocation>>,
    reserved: Vec<(usize, usize)>,
    views: Vec<View>,
}

fn index(handle: u64) -> usize {
    usize::try_from(handle.wrapping_sub(FIRST)).unwrap_or(usize::MAX)
}

impl Shared {
    pub(crate) const fn new() -> Self {
        Self { has_begun: false, allocations: Vec::new(), reserved: Vec::new(), views: Vec::new() }
    }

    fn begin(&mut self) -> Result<(), i32> {
        if !self.has_begun {
            rm::begin()?;
            self.has_begun = true;
        }
        Ok(())
    }

    fn allocation(&mut self, handle: u64) -> Result<&mut Allocation, i32> {
        let found = self.allocations.get_mut(index(handle)).and_then(Option::as_mut);
        found.filter(|allocation| allocation.references > 0).ok_or(code::INVALID_VALUE)
    }

    fn add(&mut self, file: OwnedFd, size: usize, foreign: Vec<u32>) -> u64 {
        let kind = Kind::Device;
        let allocation = Some(Allocation { file: Some(file), size, foreign, references: 1, kind });
        let at = self.allocations.iter().position(Option::is_none).unwrap_or(self.allocations.len());
        if at == self.allocations.len() {
            self.allocations.push(allocation);
        } else {
            self.allocations[at] = allocation;
        }
        FIRST + at as u64
    }

    /// `location` is a CUmemLocationType.
    pub(crate) fn create(&mut self, size: usize, location: u32) -> Result<u64, i32> {
        self.begin()?;
        let kind = match location {
            2 => Kind::Host,
            3 => Kind::Numa,
            _ => Kind::Device,
        };
        if size == 0 || !size.is_multiple_of(PIECE) {
            return Err(code::INVALID_VALUE);
        }
        let file = rm::device_file(size).map_err(|_| code::OUT_OF_MEMORY)?;
        let handle = self.add(file, size, Vec::new());
        self.allocation(handle)?.kind = kind;
        Ok(handle)
    }

    pub(crate) fn export(&mut self, handle: u64) -> Result<i32, i32> {
        let file = self.allocation(handle)?.file.as_ref().ok_or(code::ILLEGAL_STATE)?;
        let copy = file.try_clone().map_err(|_| code::OPERATING_SYSTEM)?;
        rm::export(copy.as_raw_fd())?;
        Ok(copy.into_raw_fd())
    }

    /// The descriptor stays the caller's.
    pub(crate) fn import(&mut self, descriptor: i32) -> Result<u64, i32> {
        self.begin()?;
        if descriptor < 0 {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the caller keeps it open.
        let file = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let file = std::fs::File::from(file.try_clone_to_owned().map_err(|_| code::INVALID_VALUE)?);
        let length = file.metadata().map_err(|_| code::INVALID_VALUE)?.len();
        let size = usize::try_from(length).ok().and_then(|length| length.checked_sub(SIZE));
        let size = size.ok_or(code::INVALID_VALUE)?;
        let objects = rm::import(descriptor, if size < TWO_OBJECTS { 1 } else { 2 })?;
        Ok(self.add(file.into(), size, objects))
    }

    pub(crate) fn release(&mut self, handle: u64) -> Result<(), i32> {
        self.allocation(handle)?.references -= 1;
        self.drop_if_over(index(handle))
    }

    fn drop_if_over(&mut self, at: usize) -> Result<(), i32> {
        let is_over = self.allocations.get(at).and_then(Option::as_ref).is_some_and(|known| known.references == 0)
            && self.views.iter().all(|view| view.allocation != at);
        match is_over.then(|| self.allocations[at].take()).flatten() {
            Some(allocation) => allocation.foreign.into_iter().try_for_each(rm::free),
            None => Ok(()),
        }
    }

    pub(crate) fn retain(&mut self, address: usize) -> Result<u64, i32> {
        let is_in = |view: &&View| address.wrapping_sub(view.address) < view.size;
        let at = self.views.iter().find(is_in).ok_or(code::INVALID_VALUE)?.allocation;
        self.allocations[at].as_mut().ok_or(code::INVALID_VALUE)?.references += 1;
        Ok(FIRST + at as u64)
    }

    pub(crate) fn size(&mut self, handle: u64) -> Result<usize, i32> {
        Ok(self.allocation(handle)?.size)
    }

    pub(crate) fn reserve(&mut self, size: usize) -> Result<usize, i32> {
        let address = map(0, size, libc::PROT_NONE)?;
        self.reserved.push((address, size));
        Ok(address)
    }

    pub(crate) fn unreserve(&mut self, address: usize, size: usize) -> Result<(), i32> {
        let at = self.reserved.iter().position(|known| *known == (address, size)).ok_or(code::INVALID_VALUE)?;
        if self.views.iter().any(|view| view.address.wrapping_sub(address) < size) {
            return Err(code::INVALID_VALUE);
        }
        self.reserved.swap_remove(at);
        unmap(address, size);
        Ok(())
    }

    pub(crate) fn map(&mut self, address: usize, size: usize, offset: usize, handle: u64) -> Result<(), i32> {
        let is_in = |&(start, length): &(usize, usize)| start <= address && address + size <= start + length;
        let is_free =
            self.views.iter().all(|view| view.address + view.size <= address || address + size <= view.address);
        let allocation = self.allocation(handle)?;
        if size == 0 || offset + size > allocation.size {
            return Err(code::INVALID_VALUE);
        }
        if !is_free || !self.reserved.iter().any(is_in) {
            return Err(code::INVALID_VALUE);
        }
        self.views.push(View { address, size, offset, allocation: index(handle), can_be_used: false });
        Ok(())
    }

    pub(crate) fn unmap(&mut self, address: usize, size: usize) -> Result<(), i32> {
        let is_in = |view: &View| address <= view.address && view.address + view.size <= address + size;
        let (gone, left): (Vec<View>, Vec<View>) = std::mem::take(&mut self.views).into_iter().partition(is_in);
        self.views = left;
        if gone.iter().map(|view| view.size).sum::<usize>() != size {
            // Part of a mapping, or what is none.
            self.views.extend(gone);
            return Err(code::INVALID_VALUE);
        }
        map(address, size, libc::PROT_NONE)?;
        gone.iter().try_for_each(|view| self.drop_if_over(view.allocation))
    }

    pub(crate) fn set_access(&mut self, address: usize, size: usize) -> Result<(), i32> {
        let is_in = |view: &&mut View| address <= view.address && view.address + view.size <= address + size;
        let mut found = 0;
        for view in self.views.iter_mut().filter(is_in) {
            if !view.can_be_used {
                let file = self.allocations[view.allocation].as_ref().and_then(|known| known.file.as_ref());
                map_file(view.address, view.size, file.ok_or(code::ILLEGAL_STATE)?, SIZE + view.offset)?;
                view.can_be_used = true;
            }
            found += view.size;
        }
        if found == size { Ok(()) } else { Err(code::INVALID_VALUE) }
    }

    /// Whether these bytes can be used; mappings lie side by side.
    pub(crate) fn holds(&self, start: usize, end: usize) -> bool {
        let usable = self.views.iter().filter(|view| view.can_be_used);
        let common = |view: &View| end.min(view.address + view.size).saturating_sub(start.max(view.address));
        usable.map(common).sum::<usize>() == end - start
    }

    /// What another process needs to open the memory at `address` by CUDA IPC: whose, and the descriptor there.
    pub(crate) fn ipc_handle(&mut self, address: usize) -> Result<[i32; 2], i32> {
        let view = self.views.iter().find(|view| view.address == address).ok_or(code::INVALID_VALUE)?;
        let allocation = self.allocations[view.allocation].as_ref().ok_or(code::INVALID_VALUE)?;
        let file = allocation.file.as_ref().ok_or(code::ILLEGAL_STATE)?;
        // SAFETY: no precondition.
        Ok([unsafe { libc::getpid() }, file.as_raw_fd()])
    }

    pub(crate) fn ipc_open(&mut self, [pid, descriptor]: [i32; 2]) -> Result<usize, i32> {
        self.begin()?;
        let path = format!("/proc/{pid}/fd/{descriptor}");
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).map_err(|_| code::INVALID_VALUE)?;
        let length = file.metadata().map_err(|_| code::INVALID_VALUE)?.len();
        let size = usize::try_from(length).ok().and_then(|length| length.checked_sub(SIZE));
        let size = size.ok_or(code::INVALID_VALUE)?;
        let object = rm::duplicate(pid)?;
        let handle = self.add(file.into(), size, vec![object]);
        let address = self.reserve(size)?;
        self.map(address, size, 0, handle)?;
        self.set_access(address, size)?;
        self.release(handle)?;
        Ok(address)
    }

    pub(crate) fn ipc_close(&mut self, address: usize) -> Result<(), i32> {
        let view = self.views.iter().find(|view| view.address == address).ok_or(code::INVALID_VALUE)?;
        let size = view.size;
        self.unmap(address, size)?;
        self.unreserve(address, size)
    }

    fn own(&mut self) -> impl Iterator<Item = &mut Allocation> {
        self.allocations.iter_mut().flatten().filter(|allocation| allocation.is_own())
    }

    /// Where what is ours can be read or written for a moment: address and length of each.
    pub(crate) fn open_own(&mut self) -> Result<Vec<(usize, usize)>, i32> {
        let open = |allocation: &mut Allocation| {
            let file = allocation.file.as_ref().ok_or(code::ILLEGAL_STATE)?;
            Ok((map_file(0, allocation.size, file, SIZE)?, allocation.size))
        };
        self.own().map(open).collect()
    }

    /// What the device no longer has.
    pub(crate) fn close(&mut self) -> Result<(), i32> {
        for view in &self.views {
            map(view.address, view.size, libc::PROT_NONE)?;
        }
        for allocation in self.allocations.iter_mut().flatten() {
            if let (Some(file), true) = (allocation.file.take(), allocation.is_own()) {
                // Whoever has a descriptor of it has nothing.
                // SAFETY: our own descriptor.
                unsafe { libc::pwrite(file.as_raw_fd(), [0_u8; 64].as_ptr().cast(), 64, 0) };
            }
        }
        Ok(())
    }

    /// The device has room for it again; the content is to come.
    pub(crate) fn reopen(&mut self) -> Result<(), i32> {
        if !self.allocations.iter().flatten().all(Allocation::is_own) {
            return Err(code::NOT_SUPPORTED);
        }
        if self.allocations.iter().flatten().any(|allocation| allocation.kind == Kind::Numa) {
            return Err(code::UNKNOWN);
        }
        for allocation in self.own() {
            allocation.file = Some(rm::device_file(allocation.size).map_err(|_| code::OUT_OF_MEMORY)?);
        }
        for view in self.views.iter().filter(|view| view.can_be_used) {
            let known = self.allocations[view.allocation].as_ref().filter(|known| known.kind != Kind::Host);
            let Some(file) = known.map(|known| known.file.as_ref()) else { continue };
            map_file(view.address, view.size, file.ok_or(code::ILLEGAL_STATE)?, SIZE + view.offset)?;
        }
        Ok(())
    }
}
