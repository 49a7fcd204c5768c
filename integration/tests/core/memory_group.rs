//! A control group with a limit of memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::supervisor::{LIMIT, comes};

static MADE: AtomicUsize = AtomicUsize::new(0);

/// Removed when it goes out of scope, once all in it have ended.
pub(crate) struct MemoryGroup {
    path: PathBuf,
    limit: &'static str,
    used: &'static str,
}

impl MemoryGroup {
    /// `None`, with the reason, where none can be made: it takes cgroup v1 with the memory controller, or v2 with it
    /// delegated.
    pub(crate) fn gate(limit: u64) -> Option<MemoryGroup> {
        let made = MemoryGroup::new(limit);
        let why = format!("no control group can be made: {}", made.as_ref().err().map_or("", String::as_str));
        rekindle_testing::needs("groups", made.ok(), &why)
    }

    fn new(limit: u64) -> Result<MemoryGroup, String> {
        let name = format!("rekindle-test-{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let one = Path::new("/sys/fs/cgroup/memory");
        let group = if one.join("memory.limit_in_bytes").exists() {
            MemoryGroup { path: one.join(name), limit: "memory.limit_in_bytes", used: "memory.usage_in_bytes" }
        } else {
            let path = Path::new("/sys/fs/cgroup").join(name);
            MemoryGroup { path, limit: "memory.max", used: "memory.current" }
        };
        fs::create_dir(&group.path).map_err(|error| format!("{}: {error}", group.path.display()))?;
        group.set(limit)?;
        Ok(group)
    }

    fn set(&self, bytes: u64) -> Result<(), String> {
        fs::write(self.path.join(self.limit), bytes.to_string()).map_err(|error| format!("{}: {error}", self.limit))
    }

    /// Sets the limit so that all in it may use so many bytes more. What ended a moment ago gives its memory back some
    /// time later.
    pub(crate) fn leave(&self, bytes: u64) {
        let (mut least, mut since) = (u64::MAX, Instant::now());
        while since.elapsed() < Duration::from_secs(1) {
            let now = self.used();
            if now.saturating_add(8 << 20) < least {
                (least, since) = (now, Instant::now());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        self.set(self.used() + bytes).unwrap();
    }

    /// Bytes that all in it use, without what the kernel takes back.
    fn used(&self) -> u64 {
        let read = |name| fs::read_to_string(self.path.join(name)).unwrap();
        let (used, cache) = (read(self.used), read("memory.stat"));
        let mut fields = cache.lines().filter_map(|line| line.split_once(' '));
        let (_, cache) = fields.find(|(name, _)| name.trim_start_matches("total_") == "inactive_file").unwrap();
        used.trim().parse::<u64>().unwrap().saturating_sub(cache.parse().unwrap())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        comes(LIMIT, || fs::remove_dir(&self.path).is_ok());
    }
}
