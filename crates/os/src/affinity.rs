//! The processors that threads may run on (sched_setaffinity(2)).

use std::fmt;
use std::io;
use std::str::FromStr;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// A set of processors. As text it has the form of `taskset -c`: `0-3,8`.
#[derive(Clone, PartialEq, Eq)]
pub struct Processors(CpuSet);

impl Processors {
    /// Those of a thread, or of the calling one with 0.
    ///
    /// # Errors
    /// When there is no such thread (ESRCH), or the machine has more processors than fit (EINVAL; 1024).
    pub fn of(thread: i32) -> io::Result<Processors> {
        Ok(Processors(sched_getaffinity(Pid::from_raw(thread))?))
    }

    /// Those that are in both sets; `None` if there are none.
    #[must_use]
    pub fn within(&self, others: &Processors) -> Option<Processors> {
        let mut both = CpuSet::new();
        let mut is_empty = true;
        for number in self.numbers().filter(|number| others.has(*number)) {
            both.set(number).ok()?;
            is_empty = false;
        }
        (!is_empty).then_some(Processors(both))
    }

    /// A thread runs on these from now on.
    ///
    /// # Errors
    /// When there is no such thread (ESRCH), it may run on none of them (EINVAL: cpuset(7)), or it is not ours (EPERM).
    pub fn bind(&self, thread: i32) -> io::Result<()> {
        Ok(sched_setaffinity(Pid::from_raw(thread), &self.0)?)
    }

    fn has(&self, number: usize) -> bool {
        self.0.is_set(number).unwrap_or(false)
    }

    fn numbers(&self) -> impl Iterator<Item = usize> {
        (0..CpuSet::count()).filter(|number| self.has(*number))
    }
}

impl fmt::Display for Processors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut comma = "";
        for first in self.numbers().filter(|number| number.checked_sub(1).is_none_or(|before| !self.has(before))) {
            let last = (first..CpuSet::count()).take_while(|number| self.has(*number)).last().unwrap_or(first);
            match last == first {
                true => write!(f, "{comma}{first}")?,
                false => write!(f, "{comma}{first}-{last}")?,
            }
            comma = ",";
        }
        Ok(())
    }
}

impl fmt::Debug for Processors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Processors({self})")
    }
}

/// A text that is no set of processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a text that is no list of processors such as 0-3,8")]
pub struct NoList;

impl FromStr for Processors {
    type Err = NoList;

    fn from_str(text: &str) -> Result<Processors, NoList> {
        let mut set = CpuSet::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.parse::<usize>().ok().filter(|number| *number < CpuSet::count());
            let (first, last) = (number(first).ok_or(NoList)?, number(last).ok_or(NoList)?);
            if last < first {
                return Err(NoList);
            }
            (first..=last).try_for_each(|number| set.set(number)).map_err(|_| NoList)?;
        }
        Ok(Processors(set))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_written_as_they_are_read() {
        for text in ["0", "3", "0-1", "0-3,8", "1,3,5-7,1023"] {
            assert_eq!(text.parse::<Processors>().unwrap().to_string(), text);
        }
        assert_eq!("2,0-1,1".parse::<Processors>().unwrap().to_string(), "0-2");
        for text in ["", ",", "1,", "-1", "1-", "3-2", "a", "1024", "0-1024", "0-18446744073709551615"] {
            assert_eq!(text.parse::<Processors>(), Err(NoList), "{text}");
        }
    }

    #[test]
    fn a_thread_runs_where_it_is_bound() {
        // A thread of its own: others must not be bound.
        let bound = std::thread::spawn(|| {
            let all = Processors::of(0).unwrap();
            let last = all.numbers().last().unwrap();
            let one: Processors = last.to_string().parse().unwrap();
            one.bind(0).unwrap();
            assert_eq!(Processors::of(0).unwrap(), one);
            assert_eq!(all.within(&one), Some(one.clone()));
            let none = if last == 0 { "1" } else { "0" };
            assert_eq!(one.within(&none.parse().unwrap()), None);
        });
        bound.join().unwrap();
        assert_eq!(Processors::of(i32::MAX).unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }
}
