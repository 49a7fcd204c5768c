//! With the fake driver of the tests of [`crate::sharing`].

use super::*;
use crate::sharing::tests::{begin, calls, gives};

#[test]
fn host_memory_has_a_name_and_is_counted_once_it_is_exported() {
    let (_guard, table) = begin();
    let exported = |table: &Table| table.unrestorable[table::EXPORTED_HOST].load(Ordering::Relaxed);
    let before = exported(table);
    gives(&[70, 71]);
    let (mut device, mut host) = (0, 0);
    let [of_device, of_host] = [[1, 0, 1, 0, 0, 0, 0, 0], [1, 1, 3, 0, 0, 0, 0, 0]];
    // SAFETY: live locals.
    assert_eq!(unsafe { sharing::create(&raw mut device, 4096, &raw const of_device, 0) }, SUCCESS);
    // SAFETY: live locals.
    assert_eq!(unsafe { sharing::create(&raw mut host, 8192, &raw const of_host, 0) }, SUCCESS);
    let known: Vec<(u64, u64)> = all(table)
        .map(|(_, import)| (import.name.load(Ordering::Relaxed), import.size.load(Ordering::Relaxed)))
        .collect();
    assert_eq!((device, host, known), (70, 71, vec![(71, 8192)]));
    for name in [70, 71, 71] {
        // SAFETY: the fake writes nothing.
        unsafe { sharing::export(0, name, sharing::DESCRIPTOR, 0) };
    }
    assert_eq!(exported(table) - before, 1);
    // SAFETY: numbers, here and below.
    unsafe { sharing::map(0x1000, 8192, 0, 71, 0) };
    // SAFETY: as above.
    unsafe { sharing::release(71) };
    assert_eq!((exported(table) - before, all(table).count()), (1, 1), "it is mapped");
    // SAFETY: as above.
    unsafe { sharing::unmap(0x1000, 8192) };
    assert_eq!((exported(table) - before, all(table).count()), (0, 0));
    assert!(calls().contains(&"map 4096 71".to_owned()));
}
