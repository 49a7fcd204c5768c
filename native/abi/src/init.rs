//! How the interposer shows that a thread of its process is in the middle of cuInit.

use core::ffi::CStr;

/// The name of a memfd that is mapped for as long as that: in /proc/PID/maps behind `/memfd:`, and in CRIU's image. Its
/// content means nothing.
pub const NAME: &CStr = c"rekindle-cuinit";

/// The name of a symbolic link in the folder of landing files. While it is there, no process begins with cuInit: it waits before
/// the call, and so before the mark.
pub const CLOSED: &str = "cuinit-waits";
