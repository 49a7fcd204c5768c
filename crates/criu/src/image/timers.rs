//! Timers that are descriptors (timerfd_create(2)).

use prost::Message;

use super::rewrite::{rewrite, with_fields};
use super::{Error, FILES, damaged};
use crate::proto::TimerfdEntry;
use rekindle_os::beneath::Beneath;

/// Makes periodic timers fire again that had fired when the image was taken, and whose ticks nobody had read. The kernel
/// shows no time until the next tick for them, because it starts them again when they are read. CRIU 4.2 sets them with
/// that time, and zero stops a timer: a program that waits for it would wait for ever. The next tick after a restore comes
/// after one interval.
///
/// Leaves timers with an absolute time stopped that had fired: CRIU adds the present time to the zero, and they would fire
/// again. Returns how many timers were changed.
///
/// # Errors
/// When an image file is missing or damaged, or cannot be written.
pub fn restart_timers(dir: &Beneath) -> Result<usize, Error> {
    /// Field 12 of `file_entry`, length-delimited.
    const TIMER: u64 = 12 << 3 | 2;
    /// `TFD_TIMER_ABSTIME`: CRIU adds the present time.
    const ABSOLUTE: u32 = 1;
    let path = dir.join("files.img");
    let mut restarted = 0;
    rewrite(&path, FILES, |(), record| {
        let before = restarted;
        let new = with_fields(record, |key, content| {
            if key != TIMER {
                return Some(None);
            }
            let timer = TimerfdEntry::decode(content).ok()?;
            let is_stopped = (timer.value_s, timer.value_ns) == (0, 0);
            let goes_on = timer.ticks > 0 && (timer.interval_s, timer.interval_ns) != (0, 0);
            let set_flags = timer.set_flags & !ABSOLUTE;
            if !is_stopped || (!goes_on && set_flags == timer.set_flags) {
                return Some(None);
            }
            restarted += 1;
            let (value_s, value_ns) = if goes_on { (timer.interval_s, timer.interval_ns) } else { (0, 0) };
            Some(Some(TimerfdEntry { value_s, value_ns, set_flags, ..timer }.encode_to_vec()))
        });
        let new = new.ok_or_else(|| damaged(&path, "a record cannot be read"))?;
        Ok((restarted > before).then_some(new))
    })?;
    Ok(restarted)
}

#[cfg(test)]
mod tests {
    use super::super::tests::beneath;
    use super::*;
    use crate::image::{COMMON, Records};

    /// As `file_entry`.
    #[derive(Clone, PartialEq, Message)]
    struct File {
        #[prost(uint32, required, tag = "1")]
        kind: u32,
        #[prost(uint32, required, tag = "2")]
        id: u32,
        #[prost(message, optional, tag = "12")]
        timer: Option<TimerfdEntry>,
    }

    fn timer(id: u32, value: u64, interval: u64, ticks: u64, set_flags: u32) -> File {
        let timer = TimerfdEntry {
            id,
            flags: 2,
            owner: vec![8, 7],
            clock: 1,
            ticks,
            set_flags,
            value_s: 0,
            value_ns: value,
            interval_s: 0,
            interval_ns: interval,
        };
        File { kind: 17, id, timer: Some(timer) }
    }

    #[test]
    fn timers_that_have_fired_go_on_if_they_are_periodic_and_stay_stopped_if_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("files.img");
        let other = File { kind: 1, id: 9, timer: None };
        // Fired; running; fired once and for all; stopped; with an absolute time: fired, fired once and read, running.
        let files = [
            timer(1, 0, 5, 3, 0),
            timer(2, 4, 5, 3, 0),
            timer(3, 0, 0, 1, 0),
            timer(4, 0, 5, 0, 0),
            timer(5, 0, 5, 1, 1),
            timer(6, 0, 0, 0, 3),
            timer(7, 4, 0, 0, 1),
        ];
        let mut bytes: Vec<u8> = [COMMON, FILES].iter().flat_map(|word| word.to_le_bytes()).collect();
        for file in files.iter().chain([&other]) {
            bytes.extend(u32::try_from(file.encoded_len()).unwrap().to_le_bytes());
            bytes.extend(file.encode_to_vec());
        }
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(restart_timers(&beneath(dir.path())).unwrap(), 3);
        let mut expected = files.to_vec();
        expected[0] = timer(1, 5, 5, 3, 0);
        expected[4] = timer(5, 5, 5, 1, 0);
        expected[5] = timer(6, 0, 0, 0, 2);
        expected.push(other);
        let now: Vec<File> = Records::open(beneath(dir.path()).join("files.img"), FILES).unwrap().all().unwrap();
        assert_eq!(now, expected);
        assert_eq!(restart_timers(&beneath(dir.path())).unwrap(), 0);
    }
}
