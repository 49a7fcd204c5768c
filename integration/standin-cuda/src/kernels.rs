//! "Kernels" that another library starts, in streams: each begins when those before it in its stream have ended, and
//! runs beside the program. The thread of the driver has them advance; a lock waits until none is left.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// One step of a kernel. Returns whether it has ended; it is not called again then.
pub(crate) type Advance = unsafe extern "C" fn(*mut c_void) -> c_int;

struct Kernel {
    advance: Advance,
    argument: *mut c_void,
}

// SAFETY: whoever starts a kernel leaves its argument to it.
unsafe impl Send for Kernel {}

/// By stream, the first one first.
static STREAMS: Mutex<BTreeMap<usize, Vec<Kernel>>> = Mutex::new(BTreeMap::new());

/// Adds a kernel to a stream.
pub(crate) fn launch(stream: usize, advance: Advance, argument: *mut c_void) {
    let mut streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    streams.entry(stream).or_default().push(Kernel { advance, argument });
}

/// Has the kernels advance, as far as they get.
pub(crate) fn advance() {
    let mut streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    streams.retain(|_, stream| {
        // SAFETY: the contract of `launch`: the argument is the kernel's until it has ended.
        let over = stream.iter().take_while(|kernel| unsafe { (kernel.advance)(kernel.argument) } != 0).count();
        stream.drain(..over);
        !stream.is_empty()
    });
}

/// Whether none is left, of a stream or of all.
pub(crate) fn is_idle(stream: Option<usize>) -> bool {
    let streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    stream.map_or(streams.is_empty(), |stream| !streams.contains_key(&stream))
}

/// Waits until none is left; for ever without a limit. Returns whether that is so.
pub(crate) fn drain(timeout: Option<Duration>) -> bool {
    let began = Instant::now();
    loop {
        advance();
        if is_idle(None) {
            return true;
        }
        if timeout.is_some_and(|timeout| began.elapsed() > timeout) {
            return false;
        }
        std::thread::sleep(Duration::from_micros(500));
    }
}
