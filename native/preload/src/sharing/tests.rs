//! Tests of the records, with a fake driver: a list of handles to return, and a list of calls.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::*;
use crate::{libc, lookup, rm};

#[derive(Debug, Default)]
struct Fake {
    /// Handles that the next calls return.
    handles: Vec<u64>,
    calls: Vec<String>,
    /// Whether exports fail.
    exports_fail: bool,
    /// What another thread does once the next handle is released.
    then: Option<fn()>,
    /// The calls under way when a handle was made.
    under_way: Option<u32>,
}

static FAKE: Mutex<Fake> =
    Mutex::new(Fake { handles: Vec::new(), calls: Vec::new(), exports_fail: false, then: None, under_way: None });
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn fake() -> MutexGuard<'static, Fake> {
    FAKE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn called(call: String) -> i32 {
    fake().calls.push(call);
    SUCCESS
}

unsafe extern "C" fn make(new: *mut u64, _: usize, _: usize, _: u64) -> i32 {
    let mut fake = fake();
    fake.under_way = table().map(|table| table.under_way.load(Ordering::Relaxed));
    let handle = fake.handles.remove(0);
    fake.calls.push(format!("make {handle}"));
    // SAFETY: the tests pass a live local.
    unsafe { *new = handle };
    SUCCESS
}

fn one(name: &'static str, number: u64) -> i32 {
    called(format!("{name} {number}"))
}

unsafe extern "C" fn fake_release(handle: u64) -> i32 {
    let then = fake().then.take();
    then.into_iter().for_each(|then| then());
    one("release", handle)
}

unsafe extern "C" fn fake_map(address: u64, _: u64, _: u64, handle: u64, _: u64) -> i32 {
    called(format!("map {address} {handle}"))
}

unsafe extern "C" fn fake_unmap(address: u64, _: u64) -> i32 {
    one("unmap", address)
}

unsafe extern "C" fn fake_access(address: u64, _: u64, _: *const [i32; 3], count: usize) -> i32 {
    called(format!("access {address} {count}"))
}

unsafe extern "C" fn fake_export(_: *mut i32, handle: u64, _: u32, _: u64) -> i32 {
    let code = one("export", handle);
    if fake().exports_fail { INVALID_VALUE } else { code }
}

unsafe extern "C" fn fake_properties(_: usize, handle: u64) -> i32 {
    one("properties", handle)
}

/// Installs the fake driver and an empty table.
pub(crate) fn begin() -> (MutexGuard<'static, ()>, &'static Table) {
    let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let functions = [
        (c"cuMemImportFromShareableHandle", make as *const ()),
        (c"cuMemCreate", make as *const ()),
        (c"cuMemRetainAllocationHandle", make as *const ()),
        (c"cuMemRelease", fake_release as *const ()),
        (c"cuMemMap", fake_map as *const ()),
        (c"cuMemUnmap", fake_unmap as *const ()),
        (c"cuMemSetAccess", fake_access as *const ()),
        (c"cuMemExportToShareableHandle", fake_export as *const ()),
        (c"cuMemGetAllocationPropertiesFromHandle", fake_properties as *const ()),
    ];
    for (name, function) in functions {
        let ours = lookup::instead(name.as_ptr(), function.cast_mut().cast());
        assert_ne!(ours.cast_const().cast(), function);
    }
    let table = table_or_new().unwrap();
    imports(table).for_each(|import| import.is_live.store(0, Ordering::Relaxed));
    exports(table).for_each(|export| export.handle.store(0, Ordering::Relaxed));
    mappings(table).for_each(|mapping| mapping.address.store(0, Ordering::Relaxed));
    table.obstacles.store(0, Ordering::Relaxed);
    RENAMED.store(false, Ordering::Relaxed);
    *fake() = Fake::default();
    (guard, table)
}

pub(crate) fn gives(handles: &[u64]) {
    fake().handles.extend(handles);
}

pub(crate) fn calls() -> Vec<String> {
    std::mem::take(&mut fake().calls)
}

fn import_one() -> u64 {
    let mut handle = 0;
    // SAFETY: the fake writes one handle.
    assert_eq!(unsafe { import(&raw mut handle, 0, DESCRIPTOR) }, SUCCESS);
    handle
}

fn live(table: &Table) -> Vec<(u64, u32, u32)> {
    let load = |import: &Import| {
        let [references, mappings] = [&import.references, &import.mappings].map(|count| count.load(Ordering::Relaxed));
        (import.name.load(Ordering::Relaxed), references, mappings)
    };
    imports(table).filter(|import| is_live(import)).map(load).collect()
}

fn map_at(address: u64, size: u64, name: u64) {
    // SAFETY: numbers, for the fake.
    assert_eq!(unsafe { map(address, size, 0, name, 0) }, SUCCESS);
}

#[test]
fn an_import_is_known_until_its_last_reference_and_mapping() {
    let (_guard, table) = begin();
    gives(&[70, 71]);
    let name = import_one();
    assert_eq!((name, live(table)), (70, vec![(70, 1, 0)]));
    map_at(0x1000, 0x100, name);
    map_at(0x1100, 0x100, name);
    map_at(0x9000, 0x100, 5);
    assert_eq!(live(table), [(70, 1, 2)]);
    // SAFETY: numbers, for the fake.
    unsafe {
        release(name);
        unmap(0x1000, 0x100);
        unmap(0x1100, 0x80);
    }
    // The driver's range counts, so a mapping that begins in it is over.
    assert_eq!(live(table), []);
    assert_eq!(mappings(table).count(), 0);
    let other = import_one();
    // SAFETY: as above.
    unsafe { release(other) };
    assert_eq!(live(table), []);
    let expected = ["make 70", "map 4096 70", "map 4352 70", "map 36864 5", "release 70", "unmap 4096", "unmap 4352"];
    assert_eq!(calls()[..7], expected);
}

#[test]
fn several_mappings_in_one_range_are_over_together() {
    let (_guard, table) = begin();
    gives(&[70]);
    let name = import_one();
    (0..4).for_each(|at| map_at(0x1000 + at * 0x100, 0x100, name));
    // SAFETY: numbers, for the fake.
    unsafe { unmap(0x1100, 0x200) };
    let left: Vec<u64> = mappings(table).map(|mapping| mapping.address.load(Ordering::Relaxed)).collect();
    assert_eq!((left, live(table)), (vec![0x1000, 0x1300], vec![(70, 1, 2)]));
}

#[test]
fn names_lead_to_handles_and_new_handles_are_no_names() {
    let (_guard, table) = begin();
    gives(&[70]);
    let name = import_one();
    // Imported again, as the keeper does it.
    let (_, entry) = named(table, name).unwrap();
    entry.handle.store(90, Ordering::Relaxed);
    RENAMED.store(true, Ordering::Relaxed);
    calls();
    gives(&[70, 70, 71, 90]);
    let mut made = 0;
    let mut retained = 0;
    // SAFETY: live locals and numbers, for the fake.
    unsafe {
        assert_eq!(create(&raw mut made, 1, std::ptr::null(), 0), SUCCESS);
        assert_eq!(retain(&raw mut retained, 0x1000), SUCCESS);
        map(0x1000, 0x100, 0, name, 0);
        properties(0, name);
        release(name);
        release(5);
    }
    assert_eq!((made, retained), (71, name));
    let expected = ["make 70", "make 70", "make 71", "release 70", "release 70", "make 90", "map 4096 90"];
    let calls = calls();
    assert_eq!(calls[..7], expected);
    assert_eq!(calls[7..], ["properties 90", "release 90", "release 5"]);
    // It was retained once.
    assert_eq!(live(table), [(70, 1, 1)]);
    // The name of a released import is an ordinary number.
    // SAFETY: numbers, for the fake.
    unsafe {
        release(name);
        unmap(0x1000, 0x100);
    }
    gives(&[70]);
    // SAFETY: a live local, for the fake.
    unsafe { create(&raw mut made, 1, std::ptr::null(), 0) };
    assert_eq!(made, 70);
}

#[test]
fn an_export_has_one_number_as_long_as_it_has_references() {
    let (_guard, table) = begin();
    let mut descriptor = 0;
    let mut export_one = |handle| {
        // SAFETY: a live local, for the fake.
        unsafe { export((&raw mut descriptor).expose_provenance(), handle, DESCRIPTOR, 0) };
        let known = exports(table).find(|export| export.handle.load(Ordering::Relaxed) == handle);
        known.map(|export| export.id.load(Ordering::Relaxed))
    };
    let first = export_one(40);
    assert!(first.is_some() && first == export_one(40) && first != export_one(41));
    gives(&[40]);
    let mut handle = 0;
    // SAFETY: as above.
    unsafe {
        retain(&raw mut handle, 0x1000);
        release(40);
    }
    assert_eq!(export_one(40), first);
    // SAFETY: as above.
    unsafe { release(40) };
    // The driver reuses the number for other memory.
    assert!(export_one(40) > first);
    // Memory of another process cannot be exported again by us.
    gives(&[42]);
    assert_eq!(import_one(), 42);
    assert_eq!(export_one(42), None);
}

#[test]
fn a_handle_that_the_driver_gives_again_at_once_is_the_new_import() {
    let (_guard, table) = begin();
    gives(&[50, 60]);
    assert_eq!([import_one(), import_one()], [50, 60]);
    map_at(0x1000, 0x100, 60);
    // SAFETY: a number, for the fake. The first entry becomes free.
    unsafe { release(50) };
    // The driver knows 60 no more, and another thread gets it.
    fake().then = Some(|| {
        gives(&[60]);
        import_one();
    });
    // SAFETY: as above.
    unsafe { release(60) };
    assert_eq!(live(table), [(60, 1, 0), (60, 0, 1)]);
    map_at(0x2000, 0x100, 60);
    assert_eq!(live(table), [(60, 1, 1), (60, 0, 1)]);
}

#[test]
fn an_export_that_fails_is_none() {
    let (_guard, table) = begin();
    let mut descriptor = -1;
    // SAFETY: a live local, for the fake.
    let mut export_one = || unsafe { export((&raw mut descriptor).expose_provenance(), 40, DESCRIPTOR, 0) };
    let known = || exports(table).filter(|export| export.handle.load(Ordering::Relaxed) == 40).count();
    fake().exports_fail = true;
    assert_eq!((export_one(), known()), (INVALID_VALUE, 0));
    fake().exports_fail = false;
    assert_eq!((export_one(), known()), (SUCCESS, 1));
    fake().exports_fail = true;
    assert_eq!((export_one(), known()), (INVALID_VALUE, 1), "it was exported before");
}

#[test]
fn what_cannot_be_recorded_is_an_obstacle() {
    let (_guard, table) = begin();
    gives(&[50]);
    map_at(0x1000, 0x100, import_one());
    // A signal handler has interrupted who has it.
    let held = CHANGING.take(sys::pid()).unwrap();
    // SAFETY: numbers, for the fake, here and below.
    assert_eq!(unsafe { unmap(0x1000, 0x100) }, SUCCESS);
    assert_eq!(table.obstacles.swap(0, Ordering::Relaxed), table::UNTRACKED);
    // SAFETY: as above.
    assert_eq!(unsafe { release(50) }, SUCCESS);
    assert_eq!(table.obstacles.swap(0, Ordering::Relaxed), table::UNTRACKED);
    drop(held);
    assert_eq!((wait().is_some(), table.obstacles.load(Ordering::Relaxed)), (true, 0));
}

#[test]
fn the_first_import_is_under_way() {
    let (_guard, table) = begin();
    // As before it.
    OWNER.store(0, Ordering::Relaxed);
    gives(&[50]);
    import_one();
    assert_eq!(fake().under_way, Some(1));
    assert!(!core::ptr::eq(table, super::table().unwrap()));
}

/// A stopped thread can be lent a moment while memory is released.
#[test]
fn a_call_that_begins_while_memory_is_released_has_the_handle_of_later() {
    let (_guard, table) = begin();
    gives(&[60]);
    let name = import_one();
    calls();
    table.state.store(table::LET_GO, Ordering::SeqCst);
    let begins = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            begins.wait();
            map_at(0x1000, 0x100, name);
        });
        begins.wait();
        // Time for a call that does not wait.
        std::thread::sleep(std::time::Duration::from_millis(100));
        table.imports[0].handle.store(61, Ordering::SeqCst);
        table.state.store(table::HELD, Ordering::SeqCst);
    });
    assert_eq!(calls(), ["map 4096 61"]);
    assert_eq!(table.under_way.load(Ordering::SeqCst), 0);
}

#[test]
fn access_is_kept_by_place() {
    let (_guard, table) = begin();
    gives(&[70]);
    let name = import_one();
    map_at(0x1000, 0x100, name);
    let set = |access: &[[i32; 3]]| {
        // SAFETY: as many as it says.
        unsafe { set_access(0x1000, 0x100, access.as_ptr(), access.len()) };
    };
    let kept = || {
        let mapping = mappings(table).next().unwrap();
        let used = mapping.accesses.load(Ordering::Relaxed) as usize;
        let flags =
            |access: &table::Access| (access.location.load(Ordering::Relaxed), access.flags.load(Ordering::Relaxed));
        mapping.access[..used].iter().map(flags).collect::<Vec<_>>()
    };
    set(&[[1, 0, 3], [1, 1, 1]]);
    set(&[[1, 1, 3]]);
    assert_eq!(kept(), [(0, 3), (1, 3)]);
    set(&(2..30).map(|gpu| [1, gpu, 3]).collect::<Vec<_>>());
    assert_eq!(kept().len(), table::MOST_ACCESS);
    assert_eq!(table.obstacles.load(Ordering::Relaxed), table::UNTRACKED);
}

#[test]
fn what_the_table_has_no_room_for_is_seen_all_the_same() {
    let (_guard, table) = begin();
    table.imports.iter().for_each(|import| import.is_live.store(1, Ordering::Relaxed));
    gives(&[7000]);
    assert_eq!(import_one(), 7000);
    assert!(named(table, 7000).is_none());
    table.imports.iter().for_each(|import| import.is_live.store(0, Ordering::Relaxed));
    table.exports.iter().for_each(|export| export.handle.store(1, Ordering::Relaxed));
    assert!(note_export(40, DESCRIPTOR).is_none());
    table.exports.iter().for_each(|export| export.handle.store(0, Ordering::Relaxed));
    // A mapping of a known import without a free entry could not be released.
    gives(&[71]);
    let name = import_one();
    table.mappings.iter().for_each(|mapping| mapping.address.store(1, Ordering::Relaxed));
    map_at(0x1000, 0x100, name);
    assert_eq!(table.obstacles.load(Ordering::Relaxed), table::UNTRACKED);
    table.mappings.iter().for_each(|mapping| mapping.address.store(0, Ordering::Relaxed));
}

/// The metadata that the fake kernel module passes on with an export.
static METADATA: Mutex<[u8; 64]> = Mutex::new([0; 64]);

unsafe extern "C" fn fake_ioctl(_: i32, _: usize, argument: usize) -> i32 {
    // SAFETY: the tests pass words.
    let words = unsafe { core::ptr::with_exposed_provenance::<[u32; 8]>(argument).read() };
    let params = words[4] as usize | (words[5] as usize) << 32;
    let at = |at| core::ptr::with_exposed_provenance_mut::<[u8; 64]>(params + at);
    match words[2] {
        // SAFETY: parameters of the size that the test says.
        0x3d0b => *METADATA.lock().unwrap() = unsafe { at(10).read() },
        // SAFETY: as above.
        0x3d08 => unsafe { at(14).write(*METADATA.lock().unwrap()) },
        _ => {}
    }
    0
}

fn ask(number: usize, words: &mut [u32]) {
    let request = 3 << 30 | size_of_val(words) << 16 | (b'F' as usize) << 8 | number;
    // SAFETY: words of this size.
    assert_eq!(unsafe { rm::call(-1, request, words.as_mut_ptr().expose_provenance()) }, 0);
}

fn control(command: u32, params: &mut [u8]) {
    let at = params.as_mut_ptr().expose_provenance();
    ask(0x2a, &mut [0xc1, 0xc1, command, 0, at as u32, (at >> 32) as u32, params.len() as u32, 0]);
}

#[test]
fn objects_of_others_are_counted_and_their_exporter_is_told() {
    let (_guard, table) = begin();
    libc::NEXT_IOCTL.store(fake_ioctl as *const () as *mut c_void, Ordering::Relaxed);
    let before = table.foreign.load(Ordering::Relaxed);
    let foreign = || table.foreign.load(Ordering::Relaxed) - before;
    // Two clients of this process: objects passed between them do not count as another process's.
    ask(0x2b, &mut [0, 0, 0xc1, 0x41, 0, 0, 0, 0]);
    ask(0x2b, &mut [0, 0, 0xc2, 0, 0, 0, 0, 0]);
    ask(0x34, &mut [0xc1, 0xc1, 7, 0xc2, 8, 0, 0]);
    assert_eq!(foreign(), 0);
    // One that failed, then one of another process.
    ask(0x34, &mut [0xc1, 0xc1, 9, 0xee, 8, 0, 31]);
    ask(0x34, &mut [0xc1, 0xc1, 9, 0xee, 8, 0, 0]);
    assert_eq!(foreign(), 1);
    ask(0x29, &mut [0xc1, 0xc1, 7, 0]);
    ask(0x29, &mut [0xc1, 0xc1, 9, 31]);
    assert_eq!(foreign(), 1);
    ask(0x29, &mut [0xc1, 0xc1, 9, 0]);
    assert_eq!(foreign(), 0);

    let tag = Tag { pid: 1001, id: 3, nonce: 9 };
    let mut params = [0; 2128];
    {
        let _noted = Noted::begin(Some(tag));
        params[10] = 1;
        control(0x3d0b, &mut params);
    }
    let mut info = [0; 80];
    {
        let noted = Noted::begin(None).unwrap();
        control(0x3d08, &mut info);
        assert_eq!(noted.tag(), Some(tag));
        // libcuda sees the metadata that libcuda wrote.
        assert!(info[14] == 1 && info[15..].iter().all(|byte| *byte == 0));
    }
    assert_eq!(METADATA.lock().unwrap()[48..52], *b"rkdl");
    // If libcuda uses these bytes itself, or has another layout, nothing is written there.
    for (mut params, used) in [(vec![0; 2128], 1), (vec![0; 2132], 0)] {
        let _noted = Noted::begin(Some(tag));
        params[10 + 50] = used;
        control(0x3d0b, &mut params);
        assert_eq!(METADATA.lock().unwrap()[48..52], [0, 0, used, 0]);
    }
    // Nothing is written if nobody is exporting.
    control(0x3d0b, &mut [0; 2128]);
    assert_eq!(METADATA.lock().unwrap()[48..52], [0; 4]);

    let mut objects = [0; 2128];
    objects[8] = 11;
    control(0x3d0c, &mut objects);
    objects[8] = 12;
    control(0x3d0c, &mut objects);
    control(0x1234, &mut objects);
    assert_eq!(foreign(), 2);
    // The end of a client ends all its objects.
    ask(0x29, &mut [0xc1, 0, 0xc1, 0]);
    assert_eq!(foreign(), 0);
    // Two objects of one import.
    {
        let _noted = Noted::begin(None);
        for object in [13, 14] {
            objects[8] = object;
            control(0x3d0c, &mut objects);
        }
    }
    assert_eq!(foreign(), 1);
    ask(0x29, &mut [0xc1, 0xc1, 14, 0]);
    ask(0x29, &mut [0xc1, 0xc1, 13, 0]);
    assert_eq!(foreign(), 0);
    ask(0x34, &mut [0xc2, 0xc2, 7, 0xc1, 8, 0, 0]);
    assert_eq!(foreign(), 1, "it is no client of ours any more");
    ask(0x29, &mut [0xc2, 0, 0xc2, 0]);
    assert_eq!(table.obstacles.load(Ordering::Relaxed), 0);
    control(0x3d06, &mut [0; 80]);
    assert_eq!(table.obstacles.load(Ordering::Relaxed), table::UNTRACKED);
}
