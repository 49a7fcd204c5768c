//! Bugs that are planted between the simulator and the product, to test that the simulator finds them. Each is one that
//! this product had, or that is easy to make.

/// A bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Plant {
    /// Retention ignores proofs: three images of a job that is about to die replace the last good one.
    RotationIgnoresProof,
    /// Retention ignores the line that the job is on since a rewind.
    RotationIgnoresTheLine,
    /// Retention ignores the image that is to be proven next: if images are taken quickly, none is ever proven.
    RotationIgnoresWhatIsNext,
    /// Retention ignores the image that is being restored.
    RotationIgnoresTheRestore,
    /// The next image overwrites a slot in memory with the newest proven image, which exists nowhere else.
    MemoryIgnoresProof,
    /// One failure is enough to mark an image.
    MarkAfterOneFailure,
    /// If no image can be used, the job is started from the beginning.
    ColdOverImages,
    /// A snapshot ignores children that were killed.
    PoisonedImages,
    /// Two signals within 20 ms count as two requests.
    TwoStops,
    /// A final image that is only in memory is reported as success.
    MemoryIsSuccess,
    /// A snapshot that failed temporarily is retried as late as any other.
    LateRetry,
    /// The fall back to an older image waits like any other restart.
    BackOffOnTheWayDown,
    /// An image is reported as stored before it is synced.
    StoredBeforeSync,
    /// The newest image is not considered.
    SecondNewest,
    /// A proof that could not be written is forgotten.
    ProofForgotten,
    /// The restart waits for a chosen image that does not exist any more.
    WaitsForWhatIsGone,
    /// Images that cannot be read temporarily are treated as missing.
    UnreadIsNone,
    /// A mark on an image in memory is not copied to the store.
    MarkLeftBehind,
    /// A job goes back for the death of a rank however often it did before.
    GoesBackForEver,
    /// A snapshot under way goes on when a rank dies.
    ImageWithoutTheRank,
    /// A job that hangs proves the images of its hang by living on.
    HangProves,
    /// A job that hangs goes back to its newest image, which hangs.
    HangIsForgotten,
    /// An image that could not be stored is not tried again before the next snapshot.
    StoreIsGivenUp,
}

/// All of them.
pub(super) const ALL: [Plant; 23] = [
    Plant::RotationIgnoresProof,
    Plant::RotationIgnoresTheLine,
    Plant::RotationIgnoresWhatIsNext,
    Plant::RotationIgnoresTheRestore,
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
    Plant::GoesBackForEver,
    Plant::ImageWithoutTheRank,
    Plant::HangProves,
    Plant::HangIsForgotten,
    Plant::StoreIsGivenUp,
];
