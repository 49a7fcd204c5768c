//! Copies of the process that copies: they are on their way when the call returns, as with the driver. The bus does one at a
//! time, in the order of the calls, and so does the GPU within itself.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, Sender};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::control::code;

/// What does copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Engine {
    Bus,
    Within,
}

type Work = Box<dyn FnOnce() -> Result<(), i32> + Send>;

/// By stream: copies that have not ended, and why one has failed.
static STREAMS: Mutex<BTreeMap<usize, (usize, Option<i32>)>> = Mutex::new(BTreeMap::new());
static ENDED: Condvar = Condvar::new();

fn streams() -> MutexGuard<'static, BTreeMap<usize, (usize, Option<i32>)>> {
    STREAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Begins a copy.
pub(crate) fn begin(engine: Engine, stream: usize, work: Work) -> Result<(), i32> {
    static ENGINES: [OnceLock<Sender<(usize, Work)>>; 2] = [OnceLock::new(), OnceLock::new()];
    let queue = ENGINES[engine as usize].get_or_init(|| {
        let (queue, works) = mpsc::channel::<(usize, Work)>();
        std::thread::spawn(move || {
            for (stream, work) in works {
                let result = work();
                let mut streams = streams();
                let known = streams.entry(stream).or_default();
                known.0 -= 1;
                known.1 = known.1.or_else(|| result.err());
                ENDED.notify_all();
            }
        });
        queue
    });
    streams().entry(stream).or_default().0 += 1;
    queue.send((stream, work)).map_err(|_| code::OPERATING_SYSTEM)
}

/// Whether all copies of a stream have ended, or why one has failed.
pub(crate) fn state(stream: usize) -> Result<(), i32> {
    match streams().get(&stream) {
        Some((1.., _)) => Err(code::NOT_READY),
        Some((0, Some(why))) => Err(*why),
        _ => Ok(()),
    }
}

/// Waits for them.
pub(crate) fn wait(stream: usize) -> Result<(), i32> {
    let has_some = |all: &mut BTreeMap<usize, (usize, Option<i32>)>| all.get(&stream).is_some_and(|known| known.0 > 0);
    drop(ENDED.wait_while(streams(), has_some).unwrap_or_else(PoisonError::into_inner));
    state(stream)
}
