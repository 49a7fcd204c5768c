//! What a process inherits from its parent, beyond arguments and environment: signal actions, signal mask, umask.
//!
//! A caller may leave any of it in a state that breaks a supervisor silently. If SIGCHLD is ignored, the kernel reaps
//! our children itself and their exit status is lost (wait(2)). A blocked signal never arrives.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use std::io;

/// Resets inherited state that a supervisor cannot work with: SIGCHLD gets its default action, and no signal stays
/// blocked. Call it before other threads are started, because they inherit the mask.
///
/// # Errors
/// When the kernel refuses, which is not expected.
pub fn put_right() -> io::Result<()> {
    // SAFETY: sets the default action.
    if unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) } == libc::SIG_ERR {
        return Err(io::Error::last_os_error());
    }
    nix::sys::signal::SigSet::empty().thread_set_mask()?;
    Ok(())
}

/// Whether a signal is ignored. If the caller set it to be ignored (`nohup`, or a shell for background commands), it is
/// not meant to end us.
#[must_use]
pub fn is_ignored(signal: i32) -> bool {
    // SAFETY: an all-zero sigaction is a valid one.
    let mut now: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: a null new action only asks; `now` is a live local.
    let asked = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut now) };
    asked == 0 && now.sa_sigaction == libc::SIG_IGN
}

/// Gives these signals their default action again.
pub fn let_end_us(signals: &[i32]) {
    for signal in signals.iter().filter(|signal| !is_ignored(**signal)) {
        // SAFETY: sets the default action. A number that is no signal is refused, and nothing changes.
        unsafe { libc::signal(*signal, libc::SIG_DFL) };
    }
}

/// Files that this process creates from now on are accessible to their owner only, including CRIU's images (CRIU asks
/// for 0644). Returns the previous mask.
pub fn own_files_only() -> u32 {
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077)).bits()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ignored_signal_is_told_from_others() {
        // Rust's runtime ignores it.
        assert!(is_ignored(libc::SIGPIPE));
        assert!(!is_ignored(libc::SIGWINCH) && !is_ignored(-1));
    }
}
