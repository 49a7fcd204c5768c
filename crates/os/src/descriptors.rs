//! How many descriptors this process may have open.
//!
//! Most systems start programs with a soft limit of 1024 (RLIMIT_NOFILE), because select(2) cannot use more, and a far higher
//! hard limit for programs that can. The soft limit is inherited, so it is raised only while it is needed: the job gets the
//! one that we were started with.

use std::io;
use std::sync::{Mutex, PoisonError};

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// For what is opened at the same time by other threads.
const SPARE: u64 = 64;

/// Room for more descriptors, until this is dropped. What is open then stays open.
#[derive(Debug)]
pub struct Room {
    more: u64,
}

/// What all [`Room`]s of this process have raised.
static RAISED: Mutex<Raised> = Mutex::new(Raised { more: 0, rooms: 0, before: None });

struct Raised {
    /// Asked for by all rooms together: what they have opened already is counted twice, which harms nothing.
    more: u64,
    rooms: u32,
    /// The soft limit before, if it was raised.
    before: Option<u64>,
}

/// There are too many.
#[derive(Debug, thiserror::Error)]
#[error("{wanted} descriptors are needed, and the hard limit is {limit}")]
pub struct TooMany {
    /// The number needed.
    pub wanted: u64,
    /// The hard limit.
    pub limit: u64,
}

/// Makes room for so many descriptors beside those that are open and those that others have made room for.
///
/// # Errors
/// [`TooMany`], as an [`io::Error`]; and when the limit cannot be read or set.
pub fn room_for(more: usize) -> io::Result<Room> {
    let mut raised = RAISED.lock().unwrap_or_else(PoisonError::into_inner);
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let open = u64::try_from(std::fs::read_dir("/proc/self/fd")?.count()).unwrap_or(u64::MAX);
    let more = u64::try_from(more).unwrap_or(u64::MAX);
    let wanted = [open, raised.more, SPARE].into_iter().fold(more, u64::saturating_add);
    if wanted > soft {
        if wanted > hard {
            return Err(io::Error::other(TooMany { wanted, limit: hard }));
        }
        setrlimit(Resource::RLIMIT_NOFILE, wanted, hard)?;
        raised.before = raised.before.or(Some(soft));
    }
    raised.more += more;
    raised.rooms += 1;
    Ok(Room { more })
}

/// Raises the soft limit to the hard one, for a process that starts no others.
///
/// # Errors
/// When the limit cannot be read or set.
pub fn raise() -> io::Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?)
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut raised = RAISED.lock().unwrap_or_else(PoisonError::into_inner);
        raised.more -= self.more;
        raised.rooms -= 1;
        if raised.rooms == 0
            && let Some(soft) = raised.before.take()
            && let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        {
            let _ = setrlimit(Resource::RLIMIT_NOFILE, soft.min(hard), hard);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_is_raised_for_as_long_as_it_is_needed() {
        let limits = || getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        let (before, hard) = limits();
        let low = 300.min(hard);
        setrlimit(Resource::RLIMIT_NOFILE, low, hard).unwrap();
        let little = room_for(1).unwrap();
        assert_eq!(limits(), (low, hard), "there is room");
        drop(little);
        let much = room_for(400).unwrap();
        let (raised, _) = limits();
        assert!(raised > 400 + SPARE, "{raised}");
        let besides = room_for(400).unwrap();
        let (both, _) = limits();
        assert!(both > 800 + SPARE, "{both}");
        drop(much);
        assert_eq!(limits(), (both, hard), "the other one stays");
        drop(besides);
        assert_eq!(limits(), (low, hard));
        let error = room_for(usize::MAX).unwrap_err().to_string();
        assert!(error.contains(&format!("the hard limit is {hard}")), "{error}");
        assert_eq!(limits(), (low, hard));
        setrlimit(Resource::RLIMIT_NOFILE, before, hard).unwrap();
    }
}
