//! How programs that look for NCCL's functions find ours.
//!
//! PyTorch and CuPy are linked to libnccl: the loader gives them our functions, because this object is first. JAX opens
//! the library and calls dlsym(3). A process can have two libraries that contain NCCL, of different versions, and a
//! program must get the one that the loader would give it: the next one of all libraries that have their symbols in common
//! (LD_PRELOAD, RTLD_GLOBAL), else the one in the libraries of the caller. The first call of a function by its symbol looks
//! there. If there is more than one NCCL, calls by symbol are passed on to the caller's own, uncounted. The first call of
//! each function checks whether there is more than one, by the names of their files. So does each new communicator, which
//! also checks whether the caller's NCCL is the one that is counted: another one can be within any library.
//!
//! NCCL has each function under a second name for tools (`pncclAllReduce`). Calls by those symbols are passed on, and
//! reported.

use core::ffi::{CStr, c_char, c_void};
use core::mem::transmute;
use core::ptr::{null_mut, with_exposed_provenance_mut};
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use super::{self as n, untracked};
use crate::{elf, libc};
use rekindle_abi::nccl::UNKNOWN;

/// NCCL's functions that ours replace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(super) enum Function {
    InitRank,
    InitRankConfig,
    InitRankScalable,
    InitAll,
    Split,
    Destroy,
    Abort,
    GroupStart,
    GroupEnd,
    Reduce,
    Broadcast,
    AllReduce,
    ReduceScatter,
    AllGather,
    AllToAll,
    Gather,
    Scatter,
    Send,
    Receive,
    AsyncError,
}

struct Entry {
    symbol: &'static CStr,
    /// None for a function that starts uncounted work: it is passed on.
    ours: Option<*const ()>,
    exported: *const (),
    real: AtomicPtr<c_void>,
    /// Not 0 once it was called by its symbol.
    was_called: AtomicU32,
}

// SAFETY: `ours` and `exported` are addresses of functions.
unsafe impl Sync for Entry {}

/// Not 0 once a process has more than one NCCL.
static SEVERAL: AtomicU32 = AtomicU32::new(0);

macro_rules! functions {
    ($($index:literal $symbol:ident = $ours:expr;)*) => {
        static FUNCTIONS: [Entry; [$($index),*].len()] = [$(Entry {
            symbol: match CStr::from_bytes_with_nul(concat!(stringify!($symbol), "\0").as_bytes()) {
                Ok(symbol) => symbol,
                Err(_) => c"",
            },
            ours: $ours,
            #[cfg(not(test))]
            exported: exported::$symbol as *const (),
            #[cfg(test)]
            exported: core::ptr::null(),
            real: AtomicPtr::new(null_mut()),
            was_called: AtomicU32::new(0),
        }),*];

        /// The names as symbols of this object.
        #[cfg(not(test))]
        mod exported {
            use core::arch::naked_asm;

            $(
                /// Keeps all registers of the caller, and jumps to our function or to NCCL's.
                #[unsafe(naked)]
                #[unsafe(no_mangle)]
                pub(super) unsafe extern "C" fn $symbol() {
                    naked_asm!(
                        "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9",
                        "mov rdi, [rsp + 48]",
                        "mov esi, {index}",
                        // Aligned: the return address and six registers.
                        "sub rsp, 8",
                        "call {choose}",
                        "add rsp, 8",
                        "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                        "jmp rax",
                        index = const $index,
                        choose = sym super::choose,
                    )
                }
            )*
        }
    };
}

macro_rules! ours {
    ($function:path) => {
        Some($function as *const ())
    };
}

// In the order of `Function`, then the functions that are only passed on.
functions! {
    0 ncclCommInitRank = ours!(n::init_rank);
    1 ncclCommInitRankConfig = ours!(n::init_rank_config);
    2 ncclCommInitRankScalable = ours!(n::init_rank_scalable);
    3 ncclCommInitAll = ours!(n::init_all);
    4 ncclCommSplit = ours!(n::split);
    5 ncclCommDestroy = ours!(n::destroy);
    6 ncclCommAbort = ours!(n::abort);
    7 ncclGroupStart = ours!(n::group_start);
    8 ncclGroupEnd = ours!(n::group_end);
    9 ncclReduce = ours!(n::reduce);
    10 ncclBroadcast = ours!(n::broadcast);
    11 ncclAllReduce = ours!(n::all_reduce);
    12 ncclReduceScatter = ours!(n::reduce_scatter);
    13 ncclAllGather = ours!(n::all_gather);
    14 ncclAlltoAll = ours!(n::all_to_all);
    15 ncclGather = ours!(n::gather);
    16 ncclScatter = ours!(n::scatter);
    17 ncclSend = ours!(n::send);
    18 ncclRecv = ours!(n::receive);
    19 ncclCommGetAsyncError = ours!(n::async_error);
    20 ncclAllReduceConfig = None;
    21 ncclBroadcastConfig = None;
    22 ncclReduceConfig = None;
    23 ncclAllGatherConfig = None;
    24 ncclReduceScatterConfig = None;
    25 ncclAlltoAllConfig = None;
    26 ncclGatherConfig = None;
    27 ncclScatterConfig = None;
    28 ncclPutSignal = None;
    29 ncclSignal = None;
    30 ncclWaitSignal = None;
    31 ncclCommShrink = None;
    32 ncclCommGrow = None;
    33 ncclGroupSimulateEnd = None;
    34 ncclDevCommCreate = None;
    35 pncclReduce = None;
    36 pncclBcast = None;
    37 pncclBroadcast = None;
    38 pncclAllReduce = None;
    39 pncclReduceScatter = None;
    40 pncclAllGather = None;
    41 pncclAlltoAll = None;
    42 pncclGather = None;
    43 pncclScatter = None;
    44 pncclSend = None;
    45 pncclRecv = None;
}

/// NCCL's function, of the type that nccl.h gives it.
macro_rules! real {
    ($function:ident, fn($($argument:ty),*)) => {{
        let real = crate::nccl::symbols::Function::$function.real();
        if real.is_null() {
            return 3; // ncclInternalError
        }
        // SAFETY: libnccl's function of this name (nccl.h 2.28 to 2.32).
        unsafe { core::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> i32>(real) }
    }};
}
pub(super) use real;

impl Function {
    pub(super) fn real(self) -> *mut c_void {
        FUNCTIONS.get(self as usize).map_or(null_mut(), |entry| entry.real.load(Ordering::Relaxed))
    }
}

impl Entry {
    fn is_ours(&self, found: *mut c_void) -> bool {
        let found = found.cast_const().cast();
        self.ours == Some(found) || found == self.exported
    }
}

/// The target of a call by symbol.
extern "C" fn choose(caller: usize, index: usize) -> *mut c_void {
    let Some(entry) = FUNCTIONS.get(index) else { return null_mut() };
    // Before the first call, and before a communicator is made: the known function may be of another NCCL, which a
    // program has found by dlsym. Its handles are not valid in this caller's NCCL.
    let makes_one = index <= Function::InitAll as usize;
    if makes_one || entry.was_called.load(Ordering::Relaxed) == 0 {
        look_for_others();
        entry.was_called.store(1, Ordering::Relaxed);
    }
    let known = entry.real.load(Ordering::Relaxed);
    let real = match known.is_null() || makes_one || SEVERAL.load(Ordering::Relaxed) != 0 {
        true => of_caller(entry, caller),
        false => known,
    };
    // Nothing is found where the caller is in no object, as code that was made at run time.
    let real = if real.is_null() { known } else { real };
    if makes_one && !known.is_null() && known != real {
        SEVERAL.store(1, Ordering::Relaxed);
    }
    let has_one = SEVERAL.load(Ordering::Relaxed) == 0;
    if real.is_null() {
        return absent as *const () as *mut c_void;
    }
    if known.is_null() {
        entry.real.store(real, Ordering::Relaxed);
    }
    match entry.ours {
        Some(ours) if has_one && (known.is_null() || known == real) => ours.cast_mut().cast(),
        _ => {
            untracked(UNKNOWN);
            real
        }
    }
}

/// The program was linked to NCCL, but there is none: without us the loader would have reported that.
unsafe extern "C" fn absent() -> i32 {
    2 // ncclSystemError
}

/// The function that the caller would have without us: the next of this name, else the one in the libraries of the caller's
/// object. Else the one of any NCCL.
fn of_caller(entry: &Entry, caller: usize) -> *mut c_void {
    let next = libc::next(entry.symbol);
    if !next.is_null() && !entry.is_ours(next) {
        return next;
    }
    let found = libc::in_libraries_of(caller, entry.symbol);
    if !found.is_null() && !entry.is_ours(found) {
        return found;
    }
    let found = elf::function(entry.symbol.to_bytes_with_nul(), |mapping| mapping.is_libnccl);
    found.map_or(null_mut(), with_exposed_provenance_mut)
}

fn of(symbol: *const c_char) -> Option<&'static Entry> {
    FUNCTIONS.iter().find(|entry| crate::lookup::is_named(symbol, entry.symbol))
}

/// The function for `symbol`, for which a library has `found`: ours if `found` is of the one NCCL that is counted.
pub(crate) fn instead(symbol: *const c_char, found: *mut c_void) -> *mut c_void {
    let Some(entry) = of(symbol) else { return found };
    if entry.is_ours(found) {
        // Only this object defines it: without us, nothing would be found.
        return if has_no_other(entry) { null_mut() } else { found };
    }
    let first = entry.real.compare_exchange(null_mut(), found, Ordering::Relaxed, Ordering::Relaxed);
    if first.is_err_and(|known| known != found) {
        untracked(UNKNOWN);
        return found;
    }
    // A program may look up all functions and never call the uncounted ones: they report themselves when they are
    // called.
    entry.ours.unwrap_or(entry.exported).cast_mut().cast()
}

/// Whether a search in all libraries would find our function of this name, but no NCCL.
pub(crate) fn is_absent(name: *const c_char) -> bool {
    of(name).is_some_and(has_no_other)
}

fn has_no_other(entry: &Entry) -> bool {
    let next = libc::next(entry.symbol);
    next.is_null() || entry.is_ours(next)
}

/// Checks whether the process has more than one NCCL by now.
pub(super) fn look_for_others() {
    if SEVERAL.load(Ordering::Relaxed) != 0 {
        return;
    }
    let mut inode = 0;
    elf::objects(
        |mapping| mapping.is_libnccl,
        |object| {
            let own = object.inode();
            let is_other = inode != 0 && own != inode;
            inode = own;
            if is_other {
                SEVERAL.store(1, Ordering::Relaxed);
            }
            !is_other
        },
    );
    if SEVERAL.load(Ordering::Relaxed) != 0 {
        untracked(UNKNOWN);
    }
}

#[cfg(test)]
pub(super) fn has_one_again() {
    SEVERAL.store(0, Ordering::Relaxed);
}

/// ncclCommUserRank.
pub(super) fn rank_of(communicator: u64) -> Option<u32> {
    number(c"ncclCommUserRank", communicator)
}

/// ncclCommCount.
pub(super) fn ranks_of(communicator: u64) -> Option<u32> {
    number(c"ncclCommCount", communicator)
}

/// The function of this name in the NCCL whose functions are known; null if there is none.
pub(super) fn beside_the_others(symbol: &CStr) -> *mut c_void {
    let known = FUNCTIONS.iter().map(|entry| entry.real.load(Ordering::Relaxed)).find(|real| !real.is_null());
    let found = known.map_or(null_mut(), |neighbour| libc::in_libraries_of(neighbour.addr(), symbol));
    if found.is_null() { libc::next(symbol) } else { found }
}

/// Asks the NCCL that made the communicator.
fn number(symbol: &CStr, communicator: u64) -> Option<u32> {
    let found = beside_the_others(symbol);
    if found.is_null() {
        return None;
    }
    // SAFETY: libnccl's function of this name.
    let ask = unsafe { transmute::<*mut c_void, unsafe extern "C" fn(u64, *mut i32) -> i32>(found) };
    let mut answer = -1;
    // SAFETY: the answer is written to a live local.
    let code = unsafe { ask(communicator, &raw mut answer) };
    (code == 0).then(|| u32::try_from(answer).ok()).flatten()
}
