//! Names of files and folders that more than one module must know.

/// The manifest, in the folder of an image.
pub(super) const MANIFEST: &str = "manifest.json";
/// The chunk map, in the folder of a packed image.
pub(super) const CHUNKS: &str = "chunks";
/// The mark of a bad image, in its folder.
pub(super) const MARK: &str = "bad.json";
/// Tags and pin, in the folder of an image.
pub(super) const TAGS: &str = "tags.json";
/// Prefix of the name of an image or a job that is being removed.
pub(super) const DELETED_PREFIX: &str = ".del-";
