//! Where images are copied to.

/// Where an image is copied to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Destination {
    Store,
    Replica,
}
