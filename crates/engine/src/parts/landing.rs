//! GPU memory in files of the image.

pub(crate) mod capture;
pub(crate) mod gate;
pub(crate) mod put_back;
mod shares;
