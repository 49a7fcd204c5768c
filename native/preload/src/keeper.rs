//! The keeper: a thread that releases other processes' memory, and maps it again, when the supervisor asks.
//!
//! It exists from the first memory that the process shares, and sleeps (futex) except for a snapshot or a restart; then
//! all other threads of the program are stopped. It is a libc thread, because the driver uses thread-local storage,
//! which gets no signals. Between snapshots it has no descriptor open.

use core::ffi::c_void;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicI32, Ordering};

use crate::sharing::{self, SUCCESS, driver};
use crate::{api_lock, host, kept, libc, sys};
use rekindle_abi::sharing::{self as table, Import, Mapping, Reply, Request, Table, Tag};

/// The process with a keeper; negative while a thread of it starts one.
static STARTED: AtomicI32 = AtomicI32::new(0);

/// How long the keeper waits for the supervisor: before anything has been released, and afterwards.
const FIRST_SECONDS: usize = 5;
const PATIENCE_SECONDS: usize = 120;

/// Number of entries that a probe uses.
const PROBED: usize = 16;

/// Whether process `pid` has a keeper. None if the caller has to start it. While another thread does so, there is none.
fn is_there(started: &AtomicI32, pid: i32) -> Option<bool> {
    let known = started.load(Ordering::Acquire);
    if known.abs() == pid {
        return Some(known == pid);
    }
    // Nobody, or the process that this one was forked from.
    match started.compare_exchange(known, -pid, Ordering::Acquire, Ordering::Acquire) {
        Ok(_) => None,
        Err(now) => Some(now == pid),
    }
}

/// Starts the keeper if it does not exist. A process without one can still share memory, but no snapshot is possible. Returns
/// whether it exists.
pub(crate) fn start(table: &'static Table) -> bool {
    let pid = sys::pid();
    if let Some(is_there) = is_there(&STARTED, pid) {
        return is_there;
    }
    api_lock::watch();
    let is_started = libc::start_thread(main, core::ptr::from_ref(table).cast_mut().cast());
    STARTED.store(if is_started { pid } else { 0 }, Ordering::Release);
    is_started
}

unsafe extern "C" fn main(table: *mut c_void) -> *mut c_void {
    sys::name_thread(c"rekindle-keeper");
    // SAFETY: what `start` gave: mapped for good.
    let table = unsafe { &*table.cast::<Table>() };
    table.keeper.store(sys::thread(), Ordering::Release);
    // It answers nothing before it has these.
    sharing::driver::find();
    kept::find_addresses();
    loop {
        let calls = table.calls.load(Ordering::Acquire);
        if calls == table.answered.load(Ordering::Relaxed) {
            sys::futex_wait(&table.calls, calls);
            continue;
        }
        match sys::socket_pair() {
            Ok([ours, theirs]) => {
                let _ = ours.set_receive_timeout(FIRST_SECONDS);
                table.socket.store(theirs.number(), Ordering::Relaxed);
                table.answered.store(calls, Ordering::Release);
                serve(table, ours, theirs);
                table.socket.store(-1, Ordering::Release);
            }
            Err(_) => {
                table.socket.store(-1, Ordering::Relaxed);
                table.answered.store(calls, Ordering::Release);
            }
        }
    }
    #[expect(unreachable_code, reason = "the type that the libc wants")]
    null_mut()
}

/// Handles requests until the supervisor has closed its end, or is silent for too long.
fn serve(table: &'static Table, ours: sys::File, theirs: sys::File) {
    let mut theirs = Some(theirs);
    while let Ok(Some((Request { what, index }, descriptor))) = ours.receive::<Request>() {
        // The supervisor has its end: this copy must be closed, so that closing the other one is noticed.
        if let Some(theirs) = theirs.take() {
            drop(theirs);
            let _ = ours.set_receive_timeout(PATIENCE_SECONDS);
        }
        let mut exported = None;
        let (code, count) = match what {
            table::BEGIN => (SUCCESS, 0),
            table::PROBE => probe(table, index != 0),
            table::RELEASE => release(table, index != 0),
            table::EXPORT => export(table, index, &mut exported),
            table::IMPORT => import(table, index, descriptor.as_ref()),
            table::MAP => map(table),
            table::GIVE => give(table, index, &mut exported),
            table::CREATE => create(table, index),
            _ => (-1, 0),
        };
        let reply = Reply { code, count };
        if ours.send(&reply, exported.as_ref()).is_err() {
            return;
        }
    }
}

fn is_gone(flag: &core::sync::atomic::AtomicU32) -> bool {
    flag.load(Ordering::Relaxed) != 0
}

fn accesses(mapping: &Mapping) -> impl Iterator<Item = [i32; 3]> {
    let used = mapping.accesses.load(Ordering::Relaxed) as usize;
    mapping.access.iter().take(used).map(|access| {
        let kind = access.location_kind.load(Ordering::Relaxed) as i32;
        [kind, access.location.load(Ordering::Relaxed), access.flags.load(Ordering::Relaxed) as i32]
    })
}

fn set_access(mapping: &Mapping, access: &[i32; 3]) -> i32 {
    let (address, size) = (mapping.address.load(Ordering::Relaxed), mapping.size.load(Ordering::Relaxed));
    driver::set_access(address, size, access)
}

/// Counts successes up to the first error.
fn until_error(codes: impl Iterator<Item = i32>) -> (i32, u32) {
    let mut count = 0;
    for code in codes {
        if code != SUCCESS {
            return (code, count);
        }
        count += 1;
    }
    (SUCCESS, count)
}

fn probe(table: &'static Table, with_kept: bool) -> (i32, u32) {
    // Sets access rights that are already set.
    let mapped = sharing::mappings(table).filter(|mapping| !is_gone(&mapping.is_gone)).take(PROBED);
    let set = mapped.flat_map(|mapping| accesses(mapping).map(move |access| set_access(mapping, &access)));
    let (code, count) = until_error(set);
    let first = table.exports.iter().position(|export| export.handle.load(Ordering::Relaxed) != 0);
    let (code, count) = match first {
        Some(at) if code == SUCCESS => export(table, at as u32, &mut None),
        _ => (code, count),
    };
    if code == SUCCESS && with_kept { until_error(try_imports(table)) } else { (code, count) }
}

/// Imports new memory of each GPU on which memory can stay, and releases it. If CUDA_VISIBLE_DEVICES names only some of a
/// machine's GPUs, the driver (580) imports nothing in a process that was restored on others: what is released would be lost.
fn try_imports(table: &'static Table) -> impl Iterator<Item = i32> {
    let mut tried = 0_u64;
    let kept = sharing::imports(table).filter(|import| sharing::is_live(import) && sharing::is_kept(import));
    let devices = kept.map(|import| import.device.load(Ordering::Relaxed)).filter(move |device| {
        let gpu = 1_u64.checked_shl(*device as u32).unwrap_or(0);
        let is_first = tried & gpu == 0;
        tried |= gpu;
        is_first
    });
    devices.map(|device| try_import(table, device))
}

fn try_import(table: &Table, device: i32) -> i32 {
    let mut own = 0;
    match kept::create(&mut own, kept::GRANULE, device) {
        SUCCESS => {}
        // It cannot be tried now.
        sharing::OUT_OF_MEMORY => return SUCCESS,
        code => return code,
    }
    let (mut number, mut imported) = (-1, 0);
    let exported = driver::export_untagged(&mut number, own);
    if exported != SUCCESS {
        return until_error([give_up(own), exported].into_iter()).0;
    }
    let file = sys::File::from_number(number);
    let code = driver::import(&mut imported, file.number(), sharing::DESCRIPTOR);
    if code == SUCCESS {
        return until_error([give_up(imported), give_up(own)].into_iter()).0;
    }
    // What was imported before can be imported again, and cannot be copied.
    let was_imported = |import: &Import| import.kept.load(Ordering::Relaxed) == table::HANDED;
    let is_one_there = sharing::imports(table).any(|import| sharing::is_live(import) && was_imported(import));
    if code != sharing::OUT_OF_MEMORY && !is_one_there {
        sharing::obstacle(table::NOT_IMPORTED);
    }
    until_error([give_up(own), code].into_iter()).0
}

/// Releases what was made for a try. If that fails, the driver still has it, as after a [`release`] that fails.
fn give_up(handle: u64) -> i32 {
    let code = driver::release(handle);
    if code != SUCCESS {
        sharing::obstacle(table::UNRELEASED);
    }
    code
}

/// Unmaps and releases other processes' memory, and with `with_kept` what can stay on the GPU. Host memory is copied first.
fn release(table: &'static Table, with_kept: bool) -> (i32, u32) {
    table.state.store(table::LET_GO, Ordering::Relaxed);
    let code = host::release_all(table);
    if code != SUCCESS {
        return (code, 0);
    }
    let is_meant = |import: &Import| !sharing::is_host(import) && (with_kept || !sharing::is_kept(import));
    let is_there =
        |mapping: &&Mapping| !is_gone(&mapping.is_gone) && sharing::import_of(table, mapping).is_none_or(is_meant);
    let unmapped = sharing::mappings(table).filter(is_there).map(|mapping| {
        let code = driver::unmap(mapping.address.load(Ordering::Relaxed), mapping.size.load(Ordering::Relaxed));
        mapping.is_gone.store((code == SUCCESS).into(), Ordering::Relaxed);
        code
    });
    let (code, _) = until_error(unmapped);
    if code != SUCCESS {
        return (code, 0);
    }
    let live = || sharing::imports(table).enumerate().filter(|(_, import)| sharing::is_live(import));
    for (at, import) in live().filter(|(_, import)| sharing::is_kept(import)) {
        // An image must not contain it. The supervisor has it, or can ask for it again.
        kept::close(at);
        import.id.store(0, Ordering::Relaxed);
    }
    let released = live().filter(|(_, import)| is_meant(import) && !is_gone(&import.is_gone));
    let (code, count) = until_error(released.map(|(_, import)| {
        // From now on it counts as released: a leftover reference is worse than one too few.
        import.is_gone.store(1, Ordering::Relaxed);
        let handle = import.handle.load(Ordering::Relaxed);
        let references = import.references.load(Ordering::Relaxed);
        until_error((0..references).map(|_| driver::release(handle))).0
    }));
    if code != SUCCESS {
        // The driver would copy it in a checkpoint, and have it twice afterwards.
        sharing::obstacle(table::UNRELEASED);
    }
    (code, count)
}

/// Hands over the descriptor of memory that can stay on the GPU.
fn give(table: &'static Table, index: u32, given: &mut Option<sys::File>) -> (i32, u32) {
    let at = index as usize;
    let is_it = |import: &&Import| sharing::is_live(import) && sharing::is_kept(import) && !is_gone(&import.is_gone);
    let Some(import) = table.imports.get(at).filter(is_it) else { return (-1, 0) };
    match kept::file(at, import) {
        Ok(file) => {
            *given = Some(file);
            (SUCCESS, 1)
        }
        Err(code) => (code, 0),
    }
}

/// Makes memory that can stay on the GPU anew.
fn create(table: &'static Table, index: u32) -> (i32, u32) {
    let is_it = |import: &&Import| sharing::is_live(import) && sharing::is_kept(import) && is_gone(&import.is_gone);
    let Some(import) = table.imports.get(index as usize).filter(is_it) else { return (-1, 0) };
    let is_its = |mapping: &&Mapping| mapping.import.load(Ordering::Relaxed) == index;
    let Some(mapping) = sharing::mappings(table).find(is_its) else { return (-1, 0) };
    let (size, device) = (mapping.size.load(Ordering::Relaxed), import.device.load(Ordering::Relaxed));
    let mut handle = 0;
    let code = kept::create(&mut handle, size, device);
    if code == SUCCESS {
        import.handle.store(handle, Ordering::Relaxed);
        import.kept.store(table::OWN, Ordering::Relaxed);
        import.is_gone.store(0, Ordering::Relaxed);
    }
    (code, 1)
}

fn export(table: &'static Table, index: u32, exported: &mut Option<sys::File>) -> (i32, u32) {
    let found = table.exports.get(index as usize).map(|export| (export, export.handle.load(Ordering::Relaxed)));
    let Some((export, handle @ 1..)) = found else { return (-1, 0) };
    let tag = Tag {
        pid: table.pid.load(Ordering::Relaxed) as u32,
        id: export.id.load(Ordering::Relaxed),
        nonce: table.nonce.load(Ordering::Relaxed),
    };
    let mut descriptor = -1;
    let code = driver::export(&mut descriptor, handle, export.kind.load(Ordering::Relaxed), tag);
    if code == SUCCESS {
        *exported = Some(sys::File::from_number(descriptor));
    }
    (code, 1)
}

fn import(table: &'static Table, index: u32, descriptor: Option<&sys::File>) -> (i32, u32) {
    let entry = table.imports.get(index as usize).filter(|import| is_gone(&import.is_gone));
    let (Some(import), Some(descriptor)) = (entry, descriptor) else { return (-1, 0) };
    let mut handle = 0;
    let code = driver::import(&mut handle, descriptor.number(), import.kind.load(Ordering::Relaxed));
    if code == SUCCESS {
        import.handle.store(handle, Ordering::Relaxed);
        import.is_gone.store(0, Ordering::Relaxed);
        if sharing::is_kept(import) {
            import.kept.store(table::HANDED, Ordering::Relaxed);
            // It can be exported no more. Without a descriptor there are no further snapshots, and the program continues.
            let _ = kept::keep_file(index as usize, import, descriptor);
            return (SUCCESS, 1);
        }
        sharing::RENAMED.store(true, Ordering::Relaxed);
    }
    (code, 1)
}

fn map(table: &'static Table) -> (i32, u32) {
    let load = |value: &core::sync::atomic::AtomicU64| value.load(Ordering::Relaxed);
    let code = host::make_all_again(table);
    if code != SUCCESS {
        return (code, 0);
    }
    let mapped = sharing::mappings(table).filter(|mapping| is_gone(&mapping.is_gone)).map(|mapping| {
        let Some(import) = sharing::import_of(table, mapping).filter(|import| !is_gone(&import.is_gone)) else {
            return -1;
        };
        let (address, size) = (load(&mapping.address), load(&mapping.size));
        let code = driver::map(address, size, load(&mapping.offset), load(&import.handle), load(&mapping.flags));
        if code != SUCCESS {
            return code;
        }
        mapping.is_gone.store(2, Ordering::Relaxed);
        until_error(accesses(mapping).map(|access| set_access(mapping, &access))).0
    });
    let (code, count) = until_error(mapped);
    if code != SUCCESS {
        return (code, count);
    }
    // With the references that the program had. An import has one; if the program had released that, the mapping keeps
    // it.
    let again = sharing::mappings(table).filter(|mapping| mapping.is_gone.load(Ordering::Relaxed) == 2);
    let (code, _) = until_error(again.map(|mapping| {
        mapping.is_gone.store(0, Ordering::Relaxed);
        let Some(import) = sharing::import_of(table, mapping) else { return -1 };
        // Once for each import, at its first mapping.
        let address = load(&mapping.address);
        let at = mapping.import.load(Ordering::Relaxed);
        let is_first = |other: &Mapping| other.import.load(Ordering::Relaxed) == at;
        if sharing::mappings(table).find(|other| is_first(other)).is_none_or(|other| load(&other.address) != address) {
            return SUCCESS;
        }
        match import.references.load(Ordering::Relaxed) {
            0 => driver::release(load(&import.handle)),
            references => until_error((1..references).map(|_| driver::retain(&mut 0, address))).0,
        }
    }));
    if code == SUCCESS {
        table.state.store(table::HELD, Ordering::Relaxed);
    }
    (code, count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_starts_it_and_nobody_has_it_before_it_is_there() {
        let started = AtomicI32::new(0);
        assert_eq!([is_there(&started, 7), is_there(&started, 7)], [None, Some(false)]);
        started.store(7, Ordering::Relaxed);
        assert_eq!(is_there(&started, 7), Some(true));
        // In a child that was forked then, or while it was started.
        assert_eq!(is_there(&started, 8), None);
        assert_eq!(is_there(&started, 9), None);
    }
}
