//! What only a thread itself can set, and how a record says it.

use rekindle_os::ptrace::Setting;

use crate::compare::Difference;
use crate::policy::memory_policy;

/// How to set the old value of something that differs; `None` if it is nothing that a thread sets, or has no value that
/// is known.
#[must_use]
pub fn setting(difference: &Difference) -> Option<Setting> {
    let value = difference.then.as_deref()?;
    match difference.row.item {
        "personality" => Some(Setting::Personality(u32::from_str_radix(value, 16).ok()?)),
        "memory-policy" => memory_policy(value),
        item => {
            let (_, option) = OPTIONS.iter().find(|(name, _)| *name == item)?;
            Some(Setting::Option(*option, value.parse().ok()?))
        }
    }
}

/// What prctl(2) sets, with the option that sets it (linux/prctl.h).
const OPTIONS: [(&str, u64); 5] =
    [("parent-death-signal", 1), ("dumpable", 4), ("secure-bits", 28), ("child-subreaper", 36), ("memory-merge", 67)];
