//! What only a thread itself can set: its personality (personality(2)), its memory policy (set_mempolicy(2)), and options of
//! prctl(2).

use std::io;

use super::guest::{Filters, Host};

/// Something that a thread sets for itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Setting {
    /// personality(2)
    Personality(u32),
    /// set_mempolicy(2): the mode with its flags, and the numbers of the nodes.
    MemoryPolicy(u32, Vec<u32>),
    /// prctl(2): an option and its value.
    Option(u64, u64),
}

/// How many nodes a policy may have: `MAX_NUMNODES` of the largest kernels.
const NODES: u32 = 1024;
const BYTES: usize = 128;

/// Makes a thread of a stopped process set something. It is stopped afterwards as before.
///
/// # Errors
/// The kernel's error for the tracing or the call: EPERM or EINVAL if the thread may not use one of the nodes.
pub fn set(pid: i32, tid: i32, setting: &Setting) -> io::Result<()> {
    let host = Host::of(pid)?;
    let mut guest = host.enter(tid, Filters::Suspended)?;
    match setting {
        Setting::Personality(persona) => guest.call(libc::SYS_personality, [u64::from(*persona), 0, 0]),
        Setting::MemoryPolicy(mode, nodes) if nodes.is_empty() => {
            guest.call(libc::SYS_set_mempolicy, [u64::from(*mode), 0, 0])
        }
        Setting::Option(option, value) => guest.call(libc::SYS_prctl, [*option, *value, 0]),
        Setting::MemoryPolicy(mode, nodes) => {
            let mut mask = [0_u8; BYTES];
            for node in nodes {
                let byte = usize::try_from(node / 8).ok().and_then(|at| mask.get_mut(at));
                *byte.ok_or(io::ErrorKind::InvalidInput)? |= 1 << (node % 8);
            }
            // The kernel takes one bit less than it is told.
            let most = u64::from(NODES) + 1;
            guest.call_with(&mask, libc::SYS_set_mempolicy, |place| [u64::from(*mode), place, most])
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::time::Duration;

    use super::*;
    use crate::process;
    use crate::ptrace::tests::Reaped;
    use crate::ptrace::{go_on, stop};

    #[test]
    fn another_process_sets_it_and_goes_on_as_before() {
        let shell = Command::new("sh")
            .args(["-c", "trap 'echo trapped' TRAP; while :; do read line && echo got $line; done"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = Reaped(shell.unwrap());
        let pid = child.0.id().cast_signed();
        let mut answers = || {
            io::Write::write_all(child.0.stdin.as_mut().unwrap(), b"line\n").unwrap();
            let mut answer = [0; 9];
            io::Read::read_exact(child.0.stdout.as_mut().unwrap(), &mut answer).unwrap();
            assert_eq!(&answer, b"got line\n");
        };
        answers();
        let handlers = || {
            let status = process::text(pid, "status").unwrap();
            status.lines().find(|line| line.starts_with("SigCgt:")).unwrap().to_owned()
        };
        let had = handlers();
        stop(pid, Duration::from_secs(5)).unwrap();
        set(pid, pid, &Setting::Personality(0x0004_0000)).unwrap();
        assert_eq!(process::text(pid, "personality").unwrap().trim(), "00040000");
        let bind = Setting::MemoryPolicy(2, vec![0]);
        match set(pid, pid, &bind) {
            // A kernel without NUMA.
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {}
            result => {
                result.unwrap();
                let policy = || process::text(pid, "numa_maps").unwrap().lines().next().unwrap().to_owned();
                assert!(policy().contains(" bind:0 "), "{}", policy());
                let none = Setting::MemoryPolicy(2, vec![1023]);
                assert_eq!(set(pid, pid, &none).unwrap_err().raw_os_error(), Some(libc::EINVAL));
                assert!(set(pid, pid, &Setting::MemoryPolicy(2, vec![1024])).is_err());
                set(pid, pid, &Setting::MemoryPolicy(0, vec![])).unwrap();
                assert!(policy().contains(" default "), "{}", policy());
            }
        }
        // The kernel takes the handler of a blocked signal away if it forces the signal, as a single step does with SIGTRAP.
        assert_eq!(handlers(), had);
        go_on(pid).unwrap();
        answers();
    }
}
