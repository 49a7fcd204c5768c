//! The interposer: a shared object that the job loads by LD_PRELOAD. It has two purposes: a GPU snapshot takes a tenth
//! of the time, and processes that share GPU memory can have a snapshot at all. [`sharing`] is about the second; this
//! page is about the first.
//!
//! When the CUDA driver (580, measured) checkpoints a process, one of its threads inside the process calls libc's
//! `mmap` once, for all device memory, and then libc's `memcpy` once for each piece of 2 MiB, from a few pinned staging
//! buffers into that mapping. A restore does the reverse and ends with `munmap`. The hooks here act on exactly these
//! calls:
//!
//! ```text
//!  mmap    >= 4 MiB, anonymous, populated, armed, by libcuda   --> a shared mapping of the landing file   (landing)
//!          and from then on libcuda's own calls of memcpy     --> this                                   (got)
//!  memcpy  >= 256 KiB, one side in that mapping                --> split over threads, streamed           (copy)
//!  munmap  of that mapping                                     --> the end of it, and of memcpy's redirection
//!  ioctl of the driver, dlsym of its functions, cuMem*         --> recorded, and done    (rm, lookup, sharing)
//!  cuMemAlloc, cuMemFree of large memory                       --> made so that it can stay on the GPU  (kept)
//!  calls of NCCL                                              --> counted, and held for a snapshot       (nccl)
//!  cuMemCreate in host memory                                 --> copied, and made anew                 (host)
//!  sparse arrays, pools of host memory                        --> counted                               (unrestorable)
//!  cuInit                                                     --> marked while it lasts  (init)
//!  pthread_rwlock_rdlock by libcuda or NVML, if memory is shared --> polls while CUDA is locked            (api_lock)
//!  anything else                                               --> libc
//! ```
//!
//! `memcpy` is not a symbol of this object: the job's calls of it are bound to libc, and cost the same as without us.
//!
//! Armed means that the file `$REKINDLE_LANDING/<pid>` exists, with the pid as the process sees itself. The supervisor
//! creates it, with its pages allocated, once the process is locked, and removes or renames it after the restore. CRIU
//! stores the path of a shared file mapping and not its content, so the file is the GPU's part of the image. A file
//! that the interposer could not use is cut to length 0: then the memory is where the driver put it.
//!
//! # What a job can rely on
//! - An mmap or munmap that is not for us costs one compare and a jump through a pointer. A populated anonymous mapping
//!   of 4 MiB and more also costs a check for the landing file (about 1 us).
//! - Nothing is allocated and no lock is taken: during a checkpoint all other threads of the process are stopped, one
//!   of them perhaps in malloc or in the loader, with its lock. So the copy path makes only system calls, and
//!   information on libcuda comes from /proc/self/maps and its own headers and not from `dl_iterate_phdr`.
//! - `errno` changes only where libc changes it. Nothing here panics, exits or aborts. If anything is wrong, the driver
//!   gets its own mapping, and libc's copy.
//! - There is no link to libc: no symbol version can be missing in an old one (a missing version ends the process, a
//!   missing weak symbol is null). [`libc`] has the functions that are needed.
//! - A call of ioctl costs one compare, one of dlsym two or three; calls of the driver's, and names that begin with
//!   `cu` or `nc`, cost more.
//! - Between snapshots no thread of ours exists, except one that sleeps in a process that shares GPU memory
//!   ([`keeper`]). Helpers end by themselves 2 ms after the last copy (a snapshot's copies are less than 0.1 ms apart),
//!   and a new one costs 30 us. So CRIU dumps none, and nobody has to wake or count them.
//! - In a process that shares GPU memory a call of the driver costs 1 ns more, and some 35 ns if threads call it at the
//!   same time: its lock is tried before it is waited for.
//!
//! # Limits
//! - One landing mapping at a time: if a driver maps device memory twice in one checkpoint, the second is a normal
//!   mapping, and CRIU stores it. Slower, never wrong.
//! - A libcuda that was opened with RTLD_DEEPBIND, or linked to bind its own symbols, or a static program, does not
//!   call us: the plain path. One that has libc's memcpy from elsewhere than its global offset table, or whose table
//!   cannot be made writable, copies alone: slower, never wrong.
//! - The job's own LD_PRELOAD objects come after this one: their mmap and munmap are called through us, as they would
//!   be by libc's symbol. Their memcpy is not touched, except for libcuda's calls while there is a landing mapping:
//!   those end here.
#![cfg_attr(not(test), no_std)]
// The loops below implement memcpy, so the compiler must not turn them into calls of it.
#![no_builtins]
#![cfg_attr(test, allow(dead_code, reason = "the hooks are not part of a test program"))]
#![warn(unsafe_op_in_unsafe_fn, missing_debug_implementations, clippy::undocumented_unsafe_blocks)]

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!("rekindle runs on Linux, x86-64: the CUDA driver offers process checkpoints nowhere else");

mod api_lock;
mod armed;
mod copy;
mod cpu;
mod elf;
mod got;
mod helper;
#[cfg(not(test))]
mod hooks;
mod host;
mod init;
mod job;
mod keeper;
mod kept;
mod landing;
mod libc;
mod lock;
mod lookup;
mod maps;
mod nccl;
mod rm;
mod sharing;
mod stream;
mod sys;
mod unrestorable;

/// Reads the environment and finds the next functions after ours. Runs when the object is loaded, before the program;
/// until then the hooks use functions that need no preparation.
extern "C" fn prepare() {
    armed::read_environment();
    libc::find_next();
}

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static PREPARE: extern "C" fn() = prepare;

rekindle_abi::never_panics!(b"rekindle preload can panic");
