//! A thread with its own async runtime and connections.

use std::future::Future;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use crate::error::{Error, Result};
use crate::members::{Known, Members};
use crate::options::Options;

/// The thread. A drop ends it and all its tasks.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) members: Arc<Members>,
    handle: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    pub(crate) fn start(name: &str, options: &Options, known: Arc<Mutex<Known>>) -> Result<Running> {
        let runtime = Builder::new_current_thread().enable_all().build().map_err(Error::Thread)?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new().name(name.to_owned());
        let thread = thread.spawn(move || drop(runtime.block_on(stopped))).map_err(Error::Thread)?;
        let members = Arc::new(Members::new(options.clone(), known));
        Ok(Running { members, handle, stop: Some(stop), thread: Some(thread) })
    }

    /// Runs the future on our thread, which has the connections, and waits for its result on the caller's thread.
    pub(crate) fn wait<T>(&self, work: impl Future<Output = T>) -> T {
        self.handle.block_on(work)
    }

    /// Runs a task on our thread.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.handle.spawn(work);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.stop.take());
        let Some(thread) = self.thread.take() else { return };
        // A callback may drop its own runtime.
        if thread.thread().id() != std::thread::current().id() {
            let _ = thread.join();
        }
    }
}
