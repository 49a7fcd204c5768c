//! The C structures of cuda.h, as CUDA 13.0 lays them out. Bytes that are reserved in CUDA 12 stay zero unless used,
//! and pointers to custom storage (13.5) are null: drivers from 570 on read them in the same way.
#![allow(unsafe_code, reason = "calls of the CUDA driver; each block says why it is sound")]

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

use super::uuid::GpuMapping;

/// The type of all checkpoint functions for a process: `CUresult f(int pid, T *)`, each with its own T.
pub(super) type ProcessFn = unsafe extern "C" fn(c_int, *mut c_void) -> c_int;
/// `CUresult cuDriverGetVersion(int *version)`.
pub(super) type GetVersionFn = unsafe extern "C" fn(*mut c_int) -> c_int;
/// `CUresult cuGetErrorName(CUresult, const char **)`.
pub(super) type ErrorTextFn = unsafe extern "C" fn(c_int, *mut *const std::ffi::c_char) -> c_int;

/// `CUcheckpointLockArgs`.
#[repr(C)]
pub(super) struct LockArgs {
    timeout_ms: c_uint,
    reserved0: c_uint,
    reserved1: [u64; 7],
}

impl LockArgs {
    pub(super) fn new(timeout_ms: u32) -> Self {
        Self { timeout_ms, reserved0: 0, reserved1: [0; 7] }
    }
}

/// `CUcheckpointGpuPair`.
#[repr(C)]
pub(super) struct GpuPair {
    old: [u8; 16],
    new: [u8; 16],
}

impl From<&GpuMapping> for GpuPair {
    fn from(mapping: &GpuMapping) -> Self {
        Self { old: mapping.old.bytes(), new: mapping.new.bytes() }
    }
}

/// `CUcheckpointRestoreArgs`. It points to pairs that must live until the call returns.
#[repr(C)]
pub(super) struct RestoreArgs {
    pairs: *const GpuPair,
    count: c_uint,
    reserved: [u8; 44],
    reserved1: u64,
}

impl RestoreArgs {
    /// `count` is the length of `pairs`; without pairs all 64 bytes are zero, as drivers before 580 require.
    pub(super) fn new(pairs: &[GpuPair], count: u32) -> Self {
        let pairs = if pairs.is_empty() { ptr::null() } else { pairs.as_ptr() };
        Self { pairs, count, reserved: [0; 44], reserved1: 0 }
    }
}

const _: () = assert!(size_of::<LockArgs>() == 64);
const _: () = assert!(size_of::<GpuPair>() == 32);
const _: () = assert!(size_of::<RestoreArgs>() == 64);
const _: () = assert!(std::mem::offset_of!(RestoreArgs, count) == 8);
const _: () = assert!(std::mem::offset_of!(RestoreArgs, reserved1) == 56);
