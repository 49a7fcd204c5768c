//! The slots of libcuda's global offset table, through which it calls libc. While there is a region, those of `memcpy`
//! are redirected to [`crate::copy`]; calls of other objects are not changed. Those of [`crate::api_lock`] are
//! redirected for good.
//!
//! The old value of a slot is preserved: if functions are bound at their first call, it is the address of the stub that
//! binds them. The tables are usually read-only once they are filled (RELRO), so a page becomes writable for a moment.
//! Anything unexpected is left alone: then the driver copies alone, which is slower and as correct.
//!
//! Slots and old values are in this object's memory, so a forked child and an image have them too; a child passes its
//! calls on.

use core::ptr::with_exposed_provenance_mut;
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::elf::{self, Kind, Object};
use crate::landing::PAGE;
use crate::lock::Lock;
use crate::maps::{self, Mapping};
use crate::{copy, sys};

/// A redirected slot; address 0 if unused.
#[derive(Debug)]
struct Slot {
    address: AtomicUsize,
    old: AtomicUsize,
}

/// Linkers create one slot for calls and one for other uses of a function.
static SLOTS: [Slot; 8] = [const { Slot { address: AtomicUsize::new(0), old: AtomicUsize::new(0) } }; 8];
/// Held while slots are changed.
static CHANGING: Lock = Lock::new();

fn ours() -> usize {
    (copy::memcpy as *const ()).addr()
}

/// Redirects the calls of the libcuda that contains `caller` in its mapping `code`.
pub(crate) fn redirect(code: &Mapping, caller: usize) {
    let Some(_changing) = CHANGING.take(sys::pid()) else { return };
    // Slots of a region whose end was not noticed.
    put_all_back();
    let mut object = Object::new();
    if object.find(code, caller).is_none() {
        return;
    }
    slots(&object, b"memcpy\0", ours(), |part, address, old| {
        if let Some(slot) = SLOTS.iter().find(|slot| slot.address.load(Ordering::Relaxed) == 0) {
            slot.old.store(old, Ordering::Relaxed);
            slot.address.store(address, Ordering::Relaxed);
            if !store(part, address, ours()) {
                slot.address.store(0, Ordering::Relaxed);
            }
        }
    });
}

/// Redirects libcuda's and NVML's own calls of `name`, which ends with NUL, to `ours` permanently.
pub(crate) fn redirect_for_good(name: &[u8], ours: usize) {
    let Some(_changing) = CHANGING.take(sys::pid()) else { return };
    elf::objects(
        |mapping| mapping.is_libcuda || mapping.is_libnvml,
        |object| {
            slots(object, name, ours, |part, address, _| {
                store(part, address, ours);
            });
            true
        },
    );
}

/// Calls `visit` for each slot of this name that is not redirected to `ours`: with its mapping, its address and its
/// value.
fn slots(object: &Object, name: &[u8], ours: usize, mut visit: impl FnMut(&Mapping, usize, usize)) {
    object.slots(name, |address, kind| {
        let (Some(part), Some(old)) = (object.part(address, size_of::<usize>()), object.word(address)) else { return };
        // A pointer that libcuda can change may belong to another function by now.
        let is_fixed = kind == Kind::Slot || part.prot & sys::PROT_WRITE == 0;
        if is_fixed && old != 0 && old != ours {
            visit(part, address, old);
        }
    });
}

/// Undoes [`redirect`].
pub(crate) fn put_back() {
    if let Some(_changing) = CHANGING.take(sys::pid()) {
        put_all_back();
    }
}

fn put_all_back() {
    let taken = |slot: &&Slot| slot.address.load(Ordering::Relaxed) != 0;
    if !SLOTS.iter().any(|slot| taken(&slot)) {
        return;
    }
    maps::scan(|mapping| {
        for slot in SLOTS.iter().filter(taken) {
            let address = slot.address.load(Ordering::Relaxed);
            if mapping.start <= address && address < mapping.end {
                // libcuda may have been closed since, and the address may be used for something else.
                let is_there = mapping.is_libcuda && mapping.prot & sys::PROT_READ != 0;
                if !is_there || load(address) != ours() || store(mapping, address, slot.old.load(Ordering::Relaxed)) {
                    slot.address.store(0, Ordering::Relaxed);
                }
            }
        }
        true
    });
}

/// Reads an aligned address in a readable mapping.
fn load(address: usize) -> usize {
    // SAFETY: the caller's promise.
    unsafe { with_exposed_provenance_mut::<usize>(address).read_volatile() }
}

/// Writes to an address in `mapping`. Returns whether it did.
fn store(mapping: &Mapping, address: usize, value: usize) -> bool {
    // A table is in private, readable data.
    if !address.is_multiple_of(align_of::<usize>()) || mapping.prot & sys::PROT_EXEC != 0 || !mapping.is_private {
        return false;
    }
    let (page, is_locked) = (address / PAGE * PAGE, mapping.prot & sys::PROT_WRITE == 0);
    if is_locked && sys::protect(page, PAGE, mapping.prot | sys::PROT_WRITE).is_err() {
        return false;
    }
    // SAFETY: mapped, writable and aligned. Other threads read it as one word, before or after.
    unsafe { AtomicUsize::from_ptr(with_exposed_provenance_mut(address)) }.store(value, Ordering::Release);
    if is_locked {
        // If this fails the table stays writable, as it is in an object without RELRO.
        let _ = sys::protect(page, PAGE, mapping.prot);
    }
    true
}
