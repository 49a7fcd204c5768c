//! The plugin that CRIU loads.
//!
//! In a restore, before the threads run, the plugin asks each what only the thread itself can tell ([`ask`]), if
//! `REKINDLE_ANSWERS` names a descriptor for the answers.
//!
//! In a dump it makes CRIU accept NVIDIA's devices in processes that are not CUDA processes.
//!
//! CRIU (4.0 to 4.2) dumps neither an unknown character device ("Can't dump file 3 of that type [20666] (chr 195:255)")
//! nor a mapping of one, unless a plugin accepts it (`DUMP_EXT_FILE` in its files-ext.c, `HANDLE_DEVICE_VMA` in
//! proc_parse.c). This plugin accepts the devices that `REKINDLE_DEVICES` in CRIU's environment names ([`accept`]) and
//! does nothing else. rekindle replaces them while all processes are still stopped
//! (`rekindle_criu::image::without_devices`): no image names a plugin or a device, and no restore needs either.
//!
//! It also gives CRIU the file rights of the job's user ([`rights`], [`files`]), if `REKINDLE_FILES_AS` names one. For
//! that it is in CRIU's LD_PRELOAD too: CRIU then finds some functions of the C library here.
//!
//! # What CRIU can rely on
//! - There is no link to libc: no symbol version can be missing if CRIU has its own loader and libraries. `getenv`
//!   and `__errno_location` are weak; without the first nothing is accepted.
//! - Nothing is allocated, and nothing here panics. Without these variables each function behaves like that of the C
//!   library.
#![cfg_attr(not(test), no_std)]
// The compiler must not generate calls of a libc that is not linked.
#![no_builtins]
#![cfg_attr(test, allow(dead_code, reason = "the hooks are not part of a test program"))]
#![warn(unsafe_op_in_unsafe_fn, missing_debug_implementations, clippy::undocumented_unsafe_blocks)]

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!("rekindle runs on Linux, x86-64: the CUDA driver offers process checkpoints nowhere else");

mod accept;
mod ask;
#[cfg(not(test))]
mod files;
#[cfg(not(test))]
mod hooks;
mod rights;
mod sys;
mod tracee;
mod trusted;

rekindle_abi::never_panics!(b"rekindle plugin can panic");
