//! POSIX timers (timer_create(2)): captured and put back by CRIU, from an image that is corrected where it would create others
//! ([`criu::image::correct_posix_timers`]). What cannot be known is refused.

use rekindle_criu as criu;
use rekindle_os::beneath::Beneath;
use rekindle_os::process;

/// The first timer of a process whose owner nobody knows, by its id: it counts the CPU time of the thread that made it, signals
/// no thread, and there are several.
pub(crate) fn unknown(pid: i32) -> Option<u32> {
    let text = process::text(pid, "timers").ok().filter(|text| !text.is_empty())?;
    let found = unknown_in(&text)?;
    (process::threads(pid).len() > 1).then_some(found)
}

/// Reads `/proc/PID/timers`.
fn unknown_in(text: &str) -> Option<u32> {
    /// CLOCK_THREAD_CPUTIME_ID as the kernel shows it: of the thread that made the timer.
    const OF_THIS_THREAD: &str = "-2";
    let mut id = None;
    let mut signals_a_thread = false;
    for line in text.lines() {
        match line.split_once(": ") {
            Some(("ID", number)) => id = number.parse().ok(),
            Some(("notify", how)) => signals_a_thread = how.contains("/tid."),
            Some(("ClockID", OF_THIS_THREAD)) if !signals_a_thread => return id,
            _ => {}
        }
    }
    None
}

/// Corrects the timers of the image. Returns one that a restore would get wrong.
pub(crate) fn correct(dir: &Beneath) -> Result<Option<criu::image::UnknownTimer>, criu::image::Error> {
    let (corrected, unknown) = criu::image::correct_posix_timers(dir)?;
    if corrected > 0 {
        tracing::debug!(corrected, "corrected POSIX timers that CRIU would not create as they are");
    }
    Ok(unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_of_an_unknown_thread_is_found() {
        let timer = |id: u32, notify: &str, clock: i32| {
            format!("ID: {id}\nsignal: 35/0000000000000000\nnotify: {notify}\nClockID: {clock}\n")
        };
        let fine = timer(0, "signal/pid.7", 1) + &timer(1, "signal/tid.8", -2) + &timer(2, "none/pid.7", -6);
        assert_eq!((unknown_in(""), unknown_in(&fine)), (None, None));
        assert_eq!(unknown_in(&(fine.clone() + &timer(5, "signal/pid.7", -2))), Some(5));
        assert_eq!(unknown_in(&(timer(6, "none/pid.7", -2) + &fine)), Some(6));
        assert_eq!(unknown(std::process::id().cast_signed()), None);
    }
}
