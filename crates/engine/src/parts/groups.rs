//! Control groups that the job made.

pub(crate) mod capture;
pub(crate) mod put_back;
