//! The kernel's keys (keyrings(7)).

#![allow(unsafe_code, reason = "system calls without a wrapper; each block says why it is sound")]

use nix::libc;

/// `KEY_SPEC_SESSION_KEYRING`
const SESSION: libc::c_long = -3;

/// Gives this thread, and what it starts, a session keyring with a key in it, as a login does. Returns false where the
/// machine allows no keys.
#[must_use]
pub fn begin_session() -> bool {
    /// `KEYCTL_JOIN_SESSION_KEYRING`
    const JOIN: libc::c_long = 1;
    // SAFETY: numbers only.
    unsafe { libc::syscall(libc::SYS_keyctl, JOIN, 0) };
    let (kind, name) = (c"user", c"rekindle-test");
    let (content, length) = (name.as_ptr(), name.count_bytes());
    // SAFETY: two strings that end with NUL, and a buffer with its length.
    let key = unsafe { libc::syscall(libc::SYS_add_key, kind.as_ptr(), name.as_ptr(), content, length, SESSION) };
    key >= 0
}
