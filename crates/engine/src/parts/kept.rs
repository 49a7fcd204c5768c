//! GPU memory that stays on the GPU while its processes are checkpointed, and that rekindle copies itself.

pub(crate) mod capture;
pub(crate) mod put_back;
