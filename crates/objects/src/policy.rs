//! Memory policies (set_mempolicy(2), mbind(2)), as the kernel writes them.

use rekindle_os::ptrace::Setting;

/// The modes of linux/mempolicy.h, as the kernel writes them (`mpol_to_str` in its mm/mempolicy.c).
const MODES: [(&str, u32); 7] = [
    ("default", 0),
    ("prefer (many)", 5),
    ("prefer", 1),
    ("bind", 2),
    ("weighted interleave", 6),
    ("interleave", 3),
    ("local", 4),
];

const FLAGS: [(&str, u32); 3] = [("static", 1 << 15), ("relative", 1 << 14), ("balancing", 1 << 13)];

/// The policy in a line of numa_maps: the address, and the policy, whose name can have a blank.
pub(crate) fn policy_of(line: &str) -> Option<&str> {
    let (_, rest) = line.split_once(' ')?;
    let (name, _) = MODES.iter().find(|(name, _)| rest.starts_with(name))?;
    let end = rest.get(name.len()..)?.find([' ', '\n']).map_or(rest.len(), |at| name.len() + at);
    rest.get(..end)
}

/// `bind=static:0-1,3`
pub(crate) fn memory_policy(value: &str) -> Option<Setting> {
    let (mode, nodes) = value.split_once(':').unwrap_or((value, ""));
    let (name, flags) = mode.split_once('=').unwrap_or((mode, ""));
    let number =
        |table: &[(&str, u32)], wanted: &str| table.iter().find(|(name, _)| *name == wanted).map(|(_, number)| *number);
    let mut mode = number(&MODES, name)?;
    for flag in flags.split('|').filter(|flag| !flag.is_empty()) {
        mode |= number(&FLAGS, flag)?;
    }
    /// More nodes than any kernel has.
    const TOO_MANY: u32 = 1 << 16;
    let mut all = Vec::new();
    for range in nodes.split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if last >= TOO_MANY {
            return None;
        }
        all.extend(first..=last);
    }
    Some(Setting::MemoryPolicy(mode, all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_read_as_the_kernel_writes_them() {
        let of = |line: &str| policy_of(line).map(ToOwned::to_owned);
        assert_eq!(of("5616 default file=/usr/bin/cat mapped=2").as_deref(), Some("default"));
        assert_eq!(of("5616 bind=static:0-1,3 anon=1").as_deref(), Some("bind=static:0-1,3"));
        assert_eq!(of("5616 prefer (many):0 heap").as_deref(), Some("prefer (many):0"));
        assert_eq!(of("5616 local\n").as_deref(), Some("local"));
        assert_eq!(of("5616 from-a-newer-kernel:1 x"), None);
        let policy = |mode: u32, nodes: &[u32]| Some(Setting::MemoryPolicy(mode, nodes.to_vec()));
        assert_eq!(memory_policy("default"), policy(0, &[]));
        assert_eq!(memory_policy("bind=static:0-1,3"), policy(2 | 1 << 15, &[0, 1, 3]));
        assert_eq!(memory_policy("weighted interleave:2"), policy(6, &[2]));
        assert_eq!(memory_policy("bind=static|balancing:0"), policy(2 | 1 << 15 | 1 << 13, &[0]));
        for odd in ["", "x", "bind:", "bind:x", "bind=x:1", "bind:0-99999999", "bind:1-"] {
            assert!(memory_policy(odd).is_none() || odd == "bind:", "{odd}");
        }
    }
}
