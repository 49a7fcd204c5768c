//! Images that the writer itself is reading, to replicate or to restore them: no rule removes them in the meantime.
//! This is in memory only; the readers end with the process, too.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::id::ImageId;

/// The images.
#[derive(Debug, Clone, Default)]
pub(super) struct Held(Arc<Mutex<Vec<ImageId>>>);

/// Protects one image until this is dropped.
#[derive(Debug)]
pub struct Hold {
    all: Held,
    id: ImageId,
}

impl Held {
    fn lock(&self) -> MutexGuard<'_, Vec<ImageId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn hold(&self, id: ImageId) -> Hold {
        self.lock().push(id);
        Hold { all: self.clone(), id }
    }

    pub(super) fn ids(&self) -> Vec<ImageId> {
        self.lock().clone()
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut all = self.all.lock();
        if let Some(at) = all.iter().position(|id| *id == self.id) {
            all.swap_remove(at);
        }
    }
}
