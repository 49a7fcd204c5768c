//! The parts of a job besides its memory: for each kind, how it is captured and how it is put back.
//!
//! | part | captured | put back |
//! |---|---|---|
//! | [`files`] | content, sizes and names of files | before CRIU opens them |
//! | `landing` | GPU memory, in files of the image | mapped by CRIU, read by the driver |
//! | [`gpu`] | the CUDA processes: locked, checkpointed | restored, on other GPUs if they moved |
//! | `tcp` | connections: kept, with what arrives during the dump, or closed; the snapshot waits for those that are not accepted yet | ports that dead processes use are freed |
//! | `backlog` | connections by UNIX sockets that are not accepted yet, by CRIU; the snapshot waits for those with data | by CRIU |
//! | `groups` | control groups that the job made | created again and entered |
//! | `affinity` | threads that are bound to processors | bound again, to those that we may use |
//! | `scheduling` | policies, nice values, deadlines, clamps | what CRIU does not set |
//! | `posix_timers` | POSIX timers, by CRIU; what it would get wrong is corrected in the image | by CRIU |
//! | `cpu_time` | how much processor time was used | nothing: it is told that it begins at 0 |
//! | `timers` | timers that are descriptors | set to the time at which they fire |
//! | [`devices`] | NVIDIA's devices in processes without CUDA | left out of the image |
//! | `datagrams` | the senders of datagrams that wait in UNIX sockets | the datagrams are sent again by these |
//! | `fds` | descriptors in flight between processes | by CRIU; the snapshot waits for those that CRIU cannot restore |
//! | `eventfds` | eventfds, by CRIU; semaphores and large counts are described in the image | by CRIU, and what is described is made for it |
//! | `events` | nothing: the snapshot waits until events of inotify and fanotify are read | watches by CRIU |
//! | `pending` | nothing: urgent data and errors that wait in sockets are refused | |
//! | `terminals` | what waits in pseudo-terminals, which are empty while CRIU works | written into them again, in the running job, too |
//! | `locks` | file locks, by CRIU | those that CRIU loses |
//! | `listeners` | UNIX sockets, by CRIU | the user whom their clients see |
//! | `objects` | a record of what the kernel has of each task | compared before the job runs; set again where the kernel lets us |
//! | `settings` | personality and memory policy of each thread, in the record | set by the thread itself, before it runs |
//! | `tasks` | nothing: threads that do not share all with their process, and children of clone(2), are refused | |
//! | `sessions` | by CRIU; sessions that a restore would take apart are refused | a daemon leads its session |
//! | `access` | rights and open files of each process | compared before the job runs |

pub(crate) mod access;
pub(crate) mod affinity;
pub(crate) mod backlog;
pub(crate) mod cpu_time;
pub(crate) mod datagrams;
pub mod devices;
pub(crate) mod eventfds;
pub(crate) mod events;
pub(crate) mod fds;
pub(crate) mod files;
pub mod gpu;
pub(crate) mod groups;
pub(crate) mod kept;
pub(crate) mod landing;
pub(crate) mod listeners;
pub(crate) mod locks;
pub(crate) mod objects;
pub(crate) mod pending;
pub(crate) mod posix_timers;
pub(crate) mod scheduling;
pub(crate) mod sessions;
pub(crate) mod settings;
pub(crate) mod tasks;
pub(crate) mod tcp;
pub(crate) mod terminals;
pub(crate) mod timers;
pub(crate) mod unrestorable;
