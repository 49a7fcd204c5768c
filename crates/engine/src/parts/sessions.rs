//! Sessions whose leader is dead.
//!
//! CRIU (4.2) makes a session by the process that leads it. A process that the root has adopted, and that leads no session, therefore
//! gets one of its own in the image ([`rekindle_criu::image::adopt_daemons`]), with those below it. That is right for a daemon that
//! forked twice, and takes a session apart in which there are others.

use super::unrestorable::Unrestorable;
use rekindle_criu::image::{self, Member};
use rekindle_os::process;

const REMEDY: &str = "let its parent live as long as its children (in a shell, `setsid sh -c 'a & b & wait'`), or start each of the \
                      processes with a setsid of its own";

/// Checks that the sessions and process groups of these processes can be made again. The first is the root of the image.
pub(crate) fn check(tree: &[i32]) -> Result<(), Unrestorable> {
    let number = |number: i32| u32::try_from(number).unwrap_or(0);
    let member = |pid: &i32| {
        let found = process::relations(*pid)?;
        let [parent, group, session] = [found.parent, found.group, found.session].map(number);
        Some(Member { pid: number(*pid), parent, group, session })
    };
    let members: Vec<Member> = tree.iter().filter_map(member).collect();
    image::torn_session(&members).and_then(|pid| i32::try_from(pid).ok()).map_or(Ok(()), |pid| Err(refused(pid)))
}

/// Of a process, whose pid is as we see it.
pub(crate) fn refused(pid: i32) -> Unrestorable {
    let what = "shares a session or a process group with other processes, and its parent has ended (as after `setsid sh -c 'a & b &'`), \
                so a restore would take the session apart";
    Unrestorable::of(pid, what, REMEDY)
}
