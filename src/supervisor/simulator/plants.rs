//! Bugs that are planted between the simulator and the product, to see that the simulator finds them. Each is one that this
//! product had, or one that somebody could write.

/// A bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Plant {
    /// Rotation knows nothing of what is proven, and three images of a job that is about to die push out the last good one.
    RotationIgnoresProof,
    /// Rotation knows nothing of the line that the job is on since a rewind.
    RotationIgnoresTheLine,
    /// Rotation knows nothing of the image that is to be proven next, and where images come fast none is ever proven.
    RotationIgnoresWhatIsNext,
    /// A slot in memory is taken for the next image though it has the newest proven one, which is nowhere else.
    MemoryIgnoresProof,
    /// One failure is enough for a mark.
    MarkAfterOneFailure,
    /// Where no image can be used the job is started from nothing.
    ColdOverImages,
    /// A snapshot does not look for children that were killed.
    PoisonedImages,
    /// Two signals within 20 ms are two requests.
    TwoStops,
    /// A last image that is in memory only is told as success.
    MemoryIsSuccess,
    /// A snapshot that failed for a moment is tried again as late as any other.
    LateRetry,
    /// The way down to an older image waits as any other restart.
    BackOffOnTheWayDown,
    /// An image is told to be in the store before it is synced.
    StoredBeforeSync,
    /// The newest image is left out.
    SecondNewest,
    /// A proof that could not be written down is forgotten.
    ProofForgotten,
    /// An image that is gone since it was chosen is waited for.
    WaitsForWhatIsGone,
    /// Images that cannot be read for a moment are none.
    UnreadIsNone,
    /// A mark on an image in memory does not go with it to the store.
    MarkLeftBehind,
}

/// All of them.
pub(super) const ALL: [Plant; 17] = [
    Plant::RotationIgnoresProof,
    Plant::RotationIgnoresTheLine,
    Plant::RotationIgnoresWhatIsNext,
    Plant::MemoryIgnoresProof,
    Plant::MarkAfterOneFailure,
    Plant::ColdOverImages,
    Plant::PoisonedImages,
    Plant::TwoStops,
    Plant::MemoryIsSuccess,
    Plant::LateRetry,
    Plant::BackOffOnTheWayDown,
    Plant::StoredBeforeSync,
    Plant::SecondNewest,
    Plant::ProofForgotten,
    Plant::WaitsForWhatIsGone,
    Plant::UnreadIsNone,
    Plant::MarkLeftBehind,
];
