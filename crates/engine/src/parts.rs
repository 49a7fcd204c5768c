//! What a job is made of besides its memory: for each kind of thing, how it is captured, and beside that how it is put back.
//!
//! | part | captured | put back |
//! |---|---|---|
//! | [`files`] | content, sizes and names of files | before CRIU opens them |
//! | [`landing`] | GPU memory, in files of the image | mapped by CRIU, read by the driver |
//! | [`gpu`] | the CUDA processes: locked, checkpointed | restored, on other GPUs if they moved |
//! | [`tcp`] | connections: kept or closed | ports that dead processes hold are freed |
//! | [`groups`] | control groups that the job made | made again and entered |
//! | [`devices`] | NVIDIA's devices in processes without CUDA | left out of the image |
//! | [`fds`] | descriptors on their way between processes | CRIU does; the snapshot waits for what it cannot do |
//! | [`locks`] | file locks, by CRIU | those that CRIU loses |
//! | [`access`] | what a process may be and have | compared before the job runs |

pub(crate) mod access;
pub mod devices;
pub(crate) mod fds;
pub mod files;
pub mod gpu;
pub(crate) mod groups;
pub(crate) mod landing;
pub(crate) mod locks;
pub(crate) mod tcp;
