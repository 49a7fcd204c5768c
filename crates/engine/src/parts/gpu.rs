//! The job's GPUs: the CUDA processes of its tree, and the GPUs on which they are restored.

pub(crate) mod capture;
pub mod placement;
pub mod put_back;
