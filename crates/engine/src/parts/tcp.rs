//! TCP connections of the job.

pub(crate) mod capture;
pub(crate) mod put_back;
pub(crate) mod streams;
pub(crate) mod waiting;
