//! Tests of allocations that can stay, with a fake driver: one call can fail, and all are listed.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::*;
use crate::lookup;

const MIB: usize = 1 << 20;
/// CUDA_ERROR_OUT_OF_MEMORY.
const FULL: i32 = 2;

#[derive(Debug)]
struct Fake {
    calls: Vec<String>,
    fails: &'static str,
    made: u64,
}

static FAKE: Mutex<Fake> = Mutex::new(Fake { calls: Vec::new(), fails: "", made: 0 });

fn fake() -> MutexGuard<'static, Fake> {
    FAKE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lists a call; whether it succeeds.
fn called(name: &str, what: &str) -> i32 {
    let mut fake = fake();
    fake.calls.push(format!("{name} {what}").trim_end().to_owned());
    if fake.fails == name { FULL } else { SUCCESS }
}

fn new_number() -> u64 {
    let mut fake = fake();
    fake.made += 1;
    fake.made
}

fn calls() -> Vec<String> {
    std::mem::take(&mut fake().calls)
}

unsafe extern "C" fn driver_allocate(pointer: *mut u64, size: usize) -> i32 {
    // SAFETY: a live local of the tests.
    unsafe { *pointer = 5 };
    called("allocate", &size.to_string())
}

unsafe extern "C" fn driver_free(address: u64) -> i32 {
    called("free", &address.to_string())
}

unsafe extern "C" fn make(new: *mut u64, size: u64, _: *const u32, _: u64) -> i32 {
    // SAFETY: a live local of the caller.
    unsafe { *new = 70 + new_number() };
    called("create", &size.to_string())
}

unsafe extern "C" fn reserve_addresses(new: *mut u64, size: u64, _: u64, _: u64, _: u64) -> i32 {
    // SAFETY: a live local of the caller.
    unsafe { *new = new_number() << 32 };
    called("reserve", &size.to_string())
}

unsafe extern "C" fn unreserve_addresses(_: u64, size: u64) -> i32 {
    called("unreserve", &size.to_string())
}

unsafe extern "C" fn map_it(_: u64, size: u64, _: u64, _: u64, _: u64) -> i32 {
    called("map", &size.to_string())
}

unsafe extern "C" fn unmap_it(_: u64, size: u64) -> i32 {
    called("unmap", &size.to_string())
}

unsafe extern "C" fn set_access(_: u64, _: u64, access: *const [i32; 3], _: usize) -> i32 {
    // SAFETY: one description, as `driver::set_access` passes.
    let [_, device, flags] = unsafe { *access };
    called("access", &format!("{device} {flags}"))
}

unsafe extern "C" fn release_it(_: u64) -> i32 {
    called("release", "")
}

/// What another thread frees while the next call waits for the GPU; then it allocates as much.
static FREED_MEANWHILE: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" fn wait_for_all() -> i32 {
    match FREED_MEANWHILE.swap(0, Ordering::Relaxed) {
        0 => {}
        address => {
            assert_eq!(free_one(address), SUCCESS);
            allocate_one(16 * MIB);
        }
    }
    called("synchronize", "")
}

/// What is asked of this stream, which captures if it is 8.
unsafe extern "C" fn is_capturing(stream: u64, status: *mut i32) -> i32 {
    // SAFETY: a live local of the caller.
    unsafe { *status = (stream == 8).into() };
    SUCCESS
}

unsafe extern "C" fn wait_for_one(stream: u64) -> i32 {
    called("wait for", &stream.to_string())
}

unsafe extern "C" fn wait_for_one_of_this_thread(stream: u64) -> i32 {
    called("wait for own", &stream.to_string())
}

unsafe extern "C" fn driver_free_async(address: u64, stream: u64) -> i32 {
    called("free async", &format!("{address} {stream}"));
    if address == 5 { SUCCESS } else { INVALID_VALUE }
}

unsafe extern "C" fn peer(_: u64, _: u32) -> i32 {
    called("peer", "")
}

unsafe extern "C" fn no_handle(_: *mut c_void, _: u64) -> i32 {
    INVALID_VALUE
}

/// The current device: that of the context which was pushed last.
static DEVICE: AtomicI32 = AtomicI32::new(0);

unsafe extern "C" fn device(device: *mut i32) -> i32 {
    // SAFETY: a live local of the caller.
    unsafe { *device = DEVICE.load(Ordering::Relaxed) };
    SUCCESS
}

unsafe extern "C" fn context(context: *mut u64) -> i32 {
    // SAFETY: a live local of the caller.
    unsafe { *context = 100 };
    SUCCESS
}

unsafe extern "C" fn push_context(context: u64) -> i32 {
    DEVICE.store(context as i32 - 100, Ordering::Relaxed);
    SUCCESS
}

unsafe extern "C" fn pop_context(_: *mut u64) -> i32 {
    DEVICE.store(0, Ordering::Relaxed);
    SUCCESS
}

unsafe extern "C" fn no_attribute(value: *mut i32, _: i32, _: i32) -> i32 {
    // SAFETY: a live local of the caller.
    unsafe { *value = 0 };
    SUCCESS
}

/// The fake driver, an empty table, and allocations of 16 MiB and more that can stay.
fn start() -> (MutexGuard<'static, ()>, &'static Table) {
    let (guard, table) = sharing::tests::begin();
    let hooked = [
        (c"cuMemAlloc_v2", driver_allocate as *const ()),
        (c"cuMemFree_v2", driver_free as *const ()),
        (c"cuMemCreate", make as *const ()),
        (c"cuMemMap", map_it as *const ()),
        (c"cuMemUnmap", unmap_it as *const ()),
        (c"cuMemSetAccess", set_access as *const ()),
        (c"cuMemRelease", release_it as *const ()),
        (c"cuMemFreeAsync", driver_free_async as *const ()),
        (c"cuMemFreeAsync_ptsz", driver_free_async as *const ()),
        (c"cuCtxEnablePeerAccess", peer as *const ()),
        (c"cuIpcGetMemHandle", no_handle as *const ()),
    ];
    for (name, function) in hooked {
        assert_ne!(lookup::instead(name.as_ptr(), function.cast_mut().cast()).cast_const().cast(), function);
    }
    let plain = [
        (&CURRENT_DEVICE, device as *const ()),
        (&CURRENT_CONTEXT, context as *const ()),
        (&PUSH, push_context as *const ()),
        (&POP, pop_context as *const ()),
        (&SYNCHRONIZE, wait_for_all as *const ()),
        (&CAPTURING.legacy, is_capturing as *const ()),
        (&CAPTURING.per_thread, is_capturing as *const ()),
        (&STREAM_SYNCHRONIZE.legacy, wait_for_one as *const ()),
        (&STREAM_SYNCHRONIZE.per_thread, wait_for_one_of_this_thread as *const ()),
        (&ATTRIBUTE, no_attribute as *const ()),
        (&RESERVE, reserve_addresses as *const ()),
        (&UNRESERVE, unreserve_addresses as *const ()),
    ];
    for (plain, function) in plain {
        plain.set(function.cast_mut().cast());
    }
    PEERS.iter().for_each(|peers| peers.store(0, Ordering::Relaxed));
    table.ipc_refused.store(0, Ordering::Relaxed);
    FREED_MEANWHILE.store(0, Ordering::Relaxed);
    *fake() = Fake { calls: Vec::new(), fails: "", made: 0 };
    begin(16 * MIB);
    (guard, table)
}

fn allocate_one(size: usize) -> u64 {
    let mut address = 0;
    // SAFETY: a live local.
    assert_eq!(unsafe { allocate(&raw mut address, size) }, SUCCESS);
    address
}

fn free_one(address: u64) -> i32 {
    // SAFETY: a number, for the fake.
    unsafe { free(address) }
}

fn live(table: &Table) -> usize {
    sharing::imports(table).filter(|import| sharing::is_live(import)).count()
}

#[test]
fn large_allocations_are_made_so_that_they_can_stay_and_freed_whole() {
    let (_guard, table) = start();
    assert_eq!(allocate_one(16 * MIB - 1), 5);
    assert_eq!((calls(), live(table)), (vec![format!("allocate {}", 16 * MIB - 1)], 0));
    let address = allocate_one(33 * MIB);
    let size = 34 * MIB;
    let made = [format!("reserve {size}"), format!("create {size}"), format!("map {size}"), "access 0 3".to_owned()];
    assert_eq!(calls(), made);
    let (mapping, import) = find(table, |start, _| start == address).unwrap();
    assert_eq!(mapping.size.load(Ordering::Relaxed), size as u64);
    assert_eq!(import.kept.load(Ordering::Relaxed), table::OWN);
    assert_eq!(import.id.load(Ordering::Relaxed), 0, "it has no descriptor");
    assert!(is_in(address) && is_in(address + size as u64 - 1));
    assert!(!is_in(address - 1) && !is_in(address + size as u64));
    assert_eq!(free_one(address), SUCCESS);
    // What the GPU still does with it comes first.
    let freed = ["synchronize".to_owned(), format!("unmap {size}"), "release".to_owned(), format!("unreserve {size}")];
    assert_eq!((calls(), live(table)), (freed.to_vec(), 0));
    // The driver says what it says of an address that it does not know.
    free_one(address);
    assert_eq!(calls(), [format!("free {address}")]);
}

#[test]
fn what_is_freed_in_the_order_of_a_stream_is_freed_when_that_has_come_so_far() {
    let (_guard, table) = start();
    let size = 16 * MIB;
    let freed =
        |wait: &str| vec![wait.to_owned(), format!("unmap {size}"), "release".to_owned(), format!("unreserve {size}")];
    let address = allocate_one(size);
    calls();
    // SAFETY: numbers, for the fake, here and below.
    assert_eq!(unsafe { free_async(address, 7) }, SUCCESS);
    assert_eq!((calls(), live(table)), (freed("wait for 7"), 0));
    let address = allocate_one(size);
    calls();
    // SAFETY: as above.
    assert_eq!(unsafe { free_async_per_thread(address, 0) }, SUCCESS);
    assert_eq!((calls(), live(table)), (freed("wait for own 0"), 0));
    // A wait would end the capture.
    let address = allocate_one(size);
    calls();
    // SAFETY: as above.
    assert_eq!(unsafe { free_async(address, 8) }, INVALID_VALUE);
    assert_eq!((calls(), live(table)), (vec![format!("free async {address} 8")], 1));
    fake().fails = "wait for";
    // SAFETY: as above.
    assert_eq!((unsafe { free_async(address, 7) }, live(table)), (FULL, 1));
    fake().fails = "";
    calls();
    // All else is the driver's.
    // SAFETY: as above.
    assert_eq!(unsafe { free_async(5, 8) }, SUCCESS);
    assert_eq!(calls(), ["free async 5 8"]);
    free_one(address);
}

#[test]
fn none_stays_unless_it_is_wanted() {
    let (_guard, table) = start();
    begin(0);
    assert_eq!(allocate_one(64 * MIB), 5);
    assert_eq!((calls(), live(table)), (vec![format!("allocate {}", 64 * MIB)], 0));
}

#[test]
fn where_a_call_fails_what_it_had_is_given_back_and_the_driver_allocates() {
    let (_guard, table) = start();
    let own = format!("allocate {}", 16 * MIB);
    let cases: [(&str, &[&str]); 4] = [
        ("reserve", &[]),
        ("create", &["unreserve"]),
        ("map", &["release", "unreserve"]),
        ("access", &["unmap", "release", "unreserve"]),
    ];
    for (fails, undone) in cases {
        fake().fails = fails;
        let mut address = 0;
        // SAFETY: a live local.
        assert_eq!(unsafe { allocate(&raw mut address, 16 * MIB) }, SUCCESS, "{fails}");
        let calls = calls();
        let after = calls.iter().position(|call| call.starts_with(fails)).unwrap() + 1;
        let names: Vec<&str> = calls[after..].iter().filter_map(|call| call.split(' ').next()).collect();
        // A failed call may have written a number: the driver refuses to give that back, which harms nothing.
        let expected: Vec<&str> = undone.iter().copied().chain(["allocate"]).collect();
        assert!(names.ends_with(&expected), "{fails}: {names:?}");
        assert_eq!((calls.last(), address, live(table)), (Some(&own), 5, 0), "{fails}");
    }
}

#[test]
fn a_full_table_leaves_allocations_to_the_driver() {
    let (_guard, table) = start();
    table.imports.iter().for_each(|import| import.is_live.store(1, Ordering::Relaxed));
    assert_eq!(allocate_one(16 * MIB), 5);
    table.imports.iter().for_each(|import| import.is_live.store(0, Ordering::Relaxed));
    let calls = calls();
    let last: Vec<&str> = calls.iter().rev().take(4).filter_map(|call| call.split(' ').next()).collect();
    assert_eq!(last, ["allocate", "unreserve", "release", "unmap"]);
}

#[test]
fn what_two_threads_free_at_once_is_freed_once_and_nothing_else_is() {
    let (_guard, table) = start();
    let address = allocate_one(16 * MIB);
    FREED_MEANWHILE.store(address, Ordering::Relaxed);
    assert_eq!(free_one(address), INVALID_VALUE);
    let left: Vec<u64> = sharing::mappings(table).map(|mapping| mapping.address.load(Ordering::Relaxed)).collect();
    assert_eq!((live(table), left.len()), (1, 1), "the other thread's has the same entries");
    assert_ne!(left[0], address);
    assert_eq!(free_one(left[0]), SUCCESS);
}

#[test]
fn memory_that_the_gpu_still_uses_is_not_freed() {
    let (_guard, table) = start();
    let address = allocate_one(16 * MIB);
    fake().fails = "synchronize";
    assert_eq!(free_one(address), FULL);
    assert_eq!(live(table), 1);
    fake().fails = "";
    assert_eq!(free_one(address), SUCCESS);
}

#[test]
fn peers_have_access_to_what_is_there_and_to_what_comes() {
    let (_guard, table) = start();
    let before = allocate_one(16 * MIB);
    calls();
    // Device 1 may access the memory of device 0, whose context is 100; the current context is that of device 1.
    DEVICE.store(1, Ordering::Relaxed);
    // SAFETY: numbers, for the fake.
    assert_eq!(unsafe { enable_peer(100, 0) }, SUCCESS);
    DEVICE.store(0, Ordering::Relaxed);
    assert_eq!(calls(), ["peer", "access 1 3"]);
    let after = allocate_one(16 * MIB);
    assert_eq!(calls()[3..], ["access 0 3", "access 1 3"]);
    // A restart gives it again.
    for address in [before, after] {
        let (mapping, _) = find(table, |start, _| start == address).unwrap();
        assert_eq!(mapping.accesses.load(Ordering::Relaxed), 2);
        free_one(address);
    }
}

#[test]
fn refused_handles_of_memory_that_can_stay_are_counted() {
    let (_guard, table) = start();
    let address = allocate_one(16 * MIB);
    let refused = || table.ipc_refused.load(Ordering::Relaxed);
    // SAFETY: the fake writes nothing.
    unsafe { ipc_handle(core::ptr::null_mut(), 5) };
    assert_eq!(refused(), 0);
    // SAFETY: as above.
    unsafe { ipc_handle(core::ptr::null_mut(), address + 4096) };
    assert_eq!(refused(), 1);
    free_one(address);
}

unsafe extern "C" {
    fn getrlimit(resource: i32, limits: *mut [u64; 2]) -> i32;
    fn setrlimit(resource: i32, limits: *const [u64; 2]) -> i32;
    fn dup2(from: i32, to: i32) -> i32;
    #[link_name = "close"]
    fn libc_close(number: i32) -> i32;
}

/// Sets the soft limit of descriptors; the one before.
fn limit(soft: u64) -> u64 {
    let mut limits = [0; 2];
    // SAFETY: live locals, here and below.
    assert_eq!(unsafe { getrlimit(7, &raw mut limits) }, 0);
    let [before, hard] = limits;
    // SAFETY: as above.
    assert_eq!(unsafe { setrlimit(7, &[soft.min(hard), hard]) }, 0);
    before
}

#[test]
fn three_quarters_of_the_descriptors_are_the_programs() {
    let (_guard, table) = start();
    let before = limit(200);
    let all: Vec<u64> = (0..60).map(|_| allocate_one(16 * MIB)).collect();
    limit(before);
    // The rest is the driver's, from whom there is an address of 5.
    assert_eq!((live(table), all.iter().filter(|address| **address == 5).count()), (50, 10));
    all.iter().filter(|address| **address != 5).for_each(|address| assert_eq!(free_one(*address), SUCCESS));
    assert_eq!(live(table), 0);
}

#[test]
fn a_descriptor_that_the_program_closed_is_neither_used_nor_closed() {
    let (_guard, table) = start();
    let address = allocate_one(16 * MIB);
    let (mapping, import) = find(table, |start, _| start == address).unwrap();
    let at = mapping.import.load(Ordering::Relaxed) as usize;
    let null = File::open("/dev/null").unwrap();
    let is_null = |number: i32| {
        std::fs::read_link(format!("/proc/self/fd/{number}")).is_ok_and(|to| to.as_os_str() == "/dev/null")
    };
    let held = || {
        let folder = File::open(std::env::temp_dir()).unwrap();
        let lent = sys::File::from_number(folder.as_raw_fd());
        keep_file(at, import, &lent).unwrap();
        lent.into_number();
        import.kept.store(table::HANDED, Ordering::Relaxed);
        assert!(file(at, import).is_ok());
        FILES[at].load(Ordering::Relaxed) - 1
    };
    let number = held();
    let before = limit(number as u64);
    let code = file(at, import).map(drop).unwrap_err();
    limit(before);
    assert_eq!(code, table::NO_DESCRIPTOR, "it could not have the number again after a snapshot");
    // The program closes it and opens a file of its own, which gets the number.
    // SAFETY: open descriptors.
    assert_eq!(unsafe { dup2(null.as_raw_fd(), number) }, number);
    assert_eq!(file(at, import).map(drop).unwrap_err(), table::LOST);
    close(at);
    assert!(is_null(number));
    // The same in a child by fork.
    let again = held();
    // SAFETY: as above.
    assert_eq!(unsafe { dup2(null.as_raw_fd(), again) }, again);
    close_all();
    assert!(is_null(again));
    assert_eq!(free_one(address), SUCCESS);
    for number in [number, again] {
        drop(sys::File::from_number(number));
    }
}

#[test]
fn a_number_that_the_program_closed_belongs_to_no_other_memory() {
    let (_guard, table) = start();
    let folder = std::env::temp_dir();
    let is_open = |number: i32| std::fs::read_link(format!("/proc/self/fd/{number}")).is_ok_and(|to| to == folder);
    let entry = |address| {
        let (mapping, import) = find(table, |start, _| start == address).unwrap();
        (mapping.import.load(Ordering::Relaxed) as usize, import)
    };
    // All are of one file, as all device memory is of one device.
    let held = |(at, import): (usize, _)| {
        let file = File::open(&folder).unwrap();
        let lent = sys::File::from_number(file.as_raw_fd());
        keep_file(at, import, &lent).unwrap();
        lent.into_number();
        FILES[at].load(Ordering::Relaxed) - 1
    };
    let [first, second] = [16, 20].map(|size| allocate_one(size * MIB));
    let [one, two] = [first, second].map(entry);
    let [_, number] = [one, two].map(held);
    // SAFETY: a descriptor of the test.
    assert_eq!(unsafe { libc_close(number) }, 0);
    assert_eq!(held(one), number, "the next one gets its number");
    assert!(own_number(two.0).is_none() && own_number(one.0) == Some(number));
    // Its own number, the lowest one that is free.
    let number = held(one);
    // SAFETY: a descriptor of the test.
    assert_eq!(unsafe { libc_close(number) }, 0);
    assert_eq!(held(one), number);
    assert!(is_open(number), "it is not closed as the one before");
    [first, second].into_iter().for_each(|address| assert_eq!(free_one(address), SUCCESS));
    assert!(!is_open(number));
}

#[test]
fn descriptors_are_out_of_the_way_and_end_with_their_memory_and_in_children() {
    let (_guard, table) = start();
    let folder = std::env::temp_dir();
    let is_open = |number: i32| std::fs::read_link(format!("/proc/self/fd/{number}")).is_ok_and(|to| to == folder);
    let held = |address| {
        let (mapping, import) = find(table, |start, _| start == address).unwrap();
        let at = mapping.import.load(Ordering::Relaxed) as usize;
        let file = File::open(&folder).unwrap();
        let lent = sys::File::from_number(file.as_raw_fd());
        keep_file(at, import, &lent).unwrap();
        lent.into_number();
        assert_eq!(import.id.load(Ordering::Relaxed), 1);
        FILES[at].load(Ordering::Relaxed) - 1
    };
    let [first, second] = [16, 20].map(|size| allocate_one(size * MIB));
    let [one, two] = [first, second].map(held);
    let limit = sys::descriptor_limit();
    assert!(one as usize >= LEAST_DESCRIPTOR.min(limit - limit / 4), "{one}");
    assert!(is_open(one) && is_open(two));
    free_one(first);
    assert!(!is_open(one) && is_open(two));
    // As in a child.
    close_all();
    assert!(!is_open(two));
    free_one(second);
}
