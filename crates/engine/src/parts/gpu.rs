//! The job's GPUs: the CUDA processes of its tree, and which GPUs they are restored on.

pub mod capture;
pub mod placement;
pub mod put_back;
