//! Files of the job.

mod aside;
pub(crate) mod capture;
mod content;
pub(crate) mod moved;
pub(crate) mod nameless;
pub(crate) mod place;
pub(crate) mod put_back;
pub(crate) mod record;
pub(crate) mod rights;
pub(crate) mod rollback;
mod tracked;
