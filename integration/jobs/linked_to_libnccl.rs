//! A library that is linked to libnccl and calls it by its symbols, as PyTorch's does. Each function is NCCL's, with
//! `linked_` before its name; numbers of all sizes are passed as what fits all.
#![no_std]

use core::hint::black_box;

/// ncclUniqueId: by value it is passed on the stack.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId([u64; 16]);

macro_rules! linked {
    ($($linked:ident $real:ident($($argument:ident: $type:ty),*);)*) => {
        unsafe extern "C" {
            $(fn $real($($argument: $type),*) -> i32;)*
        }

        // The call is no jump: NCCL's caller is this object.
        $(#[unsafe(no_mangle)]
        pub unsafe extern "C" fn $linked($($argument: $type),*) -> i32 {
            black_box(unsafe { $real($($argument),*) })
        })*
    };
}

linked! {
    linked_ncclGetUniqueId ncclGetUniqueId(a: usize);
    linked_ncclCommInitRank ncclCommInitRank(a: usize, b: usize, c: UniqueId, d: usize);
    linked_ncclCommInitRankConfig ncclCommInitRankConfig(a: usize, b: usize, c: UniqueId, d: usize, e: usize);
    linked_ncclCommInitAll ncclCommInitAll(a: usize, b: usize, c: usize);
    linked_ncclCommSplit ncclCommSplit(a: usize, b: usize, c: usize, d: usize, e: usize);
    linked_ncclCommDestroy ncclCommDestroy(a: usize);
    linked_ncclCommAbort ncclCommAbort(a: usize);
    linked_ncclCommGetAsyncError ncclCommGetAsyncError(a: usize, b: usize);
    linked_ncclCommCount ncclCommCount(a: usize, b: usize);
    linked_ncclCommUserRank ncclCommUserRank(a: usize, b: usize);
    linked_ncclGroupStart ncclGroupStart();
    linked_ncclGroupEnd ncclGroupEnd();
    linked_ncclAllReduce ncclAllReduce(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize, g: usize);
    linked_ncclBroadcast ncclBroadcast(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize, g: usize);
    linked_ncclBcast ncclBcast(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize);
    linked_ncclSend ncclSend(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize);
    linked_ncclRecv ncclRecv(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize);
    linked_ncclAllGather ncclAllGather(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize);
    linked_ncclReduceScatter ncclReduceScatter(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize, g: usize);
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
