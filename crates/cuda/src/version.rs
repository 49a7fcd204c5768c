//! The version of the installed NVIDIA driver, as its kernel module reports it; needs no library.

use std::fmt;
use std::fs;

/// The version of an NVIDIA driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverVersion {
    text: String,
    major: u32,
}

impl DriverVersion {
    /// The version in `text`, for example `580.159.04`. `None` if it contains anything but digits and dots.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let mut parts = text.split('.');
        let major = parts.next()?.parse().ok()?;
        let mut minors = 0;
        for part in parts {
            part.parse::<u32>().ok()?;
            minors += 1;
        }
        (minors > 0).then(|| Self { text: text.to_owned(), major })
    }

    /// The major version: 570 introduced the checkpoint functions, 580 the GPU pairs of a restore.
    #[must_use]
    pub fn major(&self) -> u32 {
        self.major
    }
}

impl fmt::Display for DriverVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The driver whose kernel module is loaded. `None` without one, and under WSL, which has no module of its own.
#[must_use]
pub fn installed() -> Option<DriverVersion> {
    if let Some(version) = stand_in() {
        return Some(version);
    }
    let loaded = |path: &str| fs::read_to_string(path).ok();
    loaded("/sys/module/nvidia/version")
        .and_then(|text| DriverVersion::parse(&text))
        .or_else(|| loaded("/proc/driver/nvidia/version").and_then(|text| from_proc(&text)))
}

/// The version that a test of a debug build sets. A release build ignores it.
fn stand_in() -> Option<DriverVersion> {
    let named = cfg!(debug_assertions).then(|| std::env::var("REKINDLE_TEST_DRIVER").ok()).flatten();
    DriverVersion::parse(&named?)
}

/// `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build ...`: the words before the
/// number differ between the open and the closed module. The second line holds GCC's version.
fn from_proc(text: &str) -> Option<DriverVersion> {
    text.lines().find(|line| line.starts_with("NVRM version"))?.split_whitespace().find_map(DriverVersion::parse)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kernel_modules_tell_their_version() {
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (a@b)  Tue Jan\n\
                    GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n";
        let version = from_proc(open).unwrap();
        assert_eq!((version.to_string().as_str(), version.major()), ("580.159.04", 580));
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104  Fri Sep 22 12:00:00 UTC 2023\n";
        assert_eq!(from_proc(closed).unwrap().major(), 535);
        assert_eq!(from_proc("GCC version: gcc version 12.3.0\n"), None);
    }

    #[test]
    fn only_numbers_with_dots_are_versions() {
        assert_eq!(DriverVersion::parse("580.159.04\n").unwrap().to_string(), "580.159.04");
        for bad in ["", "580", "x86_64", "580.", "580.a", ".580", "2023-01-01"] {
            assert_eq!(DriverVersion::parse(bad), None, "{bad}");
        }
    }
}
