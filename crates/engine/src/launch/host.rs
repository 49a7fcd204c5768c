//! The machine on which an image is taken.

use rekindle_os::process;
use rekindle_store::manifest::Host;

/// Describes this machine. Unknown facts are empty: the result is for comparing, not for deciding.
#[must_use]
pub fn describe() -> Host {
    let uname = nix::sys::utsname::uname().ok();
    let text = |part: Option<&std::ffi::OsStr>| part.map(|p| p.to_string_lossy().into_owned()).unwrap_or_default();
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name));
        line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim().to_string()).unwrap_or_default()
    };
    Host {
        name: text(uname.as_ref().map(nix::sys::utsname::UtsName::nodename)),
        boot_id: process::boot_id().unwrap_or_default(),
        kernel: text(uname.as_ref().map(nix::sys::utsname::UtsName::release)),
        arch: text(uname.as_ref().map(nix::sys::utsname::UtsName::machine)),
        cpu_model: field("model name"),
        cpu_flags: field("flags").split_whitespace().map(ToString::to_string).collect(),
    }
}
