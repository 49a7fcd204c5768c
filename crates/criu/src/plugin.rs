//! The environment of our plugin in CRIU (`native/plugin/`).

use std::path::Path;

/// What CRIU does not know by itself and accepts for us.
#[derive(Debug, Clone, Copy)]
pub struct Plugin<'a> {
    /// A folder with our plugin in it, and no other.
    pub folder: &'a Path,
    /// The devices that it accepts, as `native/plugin/src/accept.rs` reads them.
    pub devices: Option<&'a str>,
    /// Whose rights over files CRIU gets instead of root's, where it works on the files of a user.
    pub files: Option<FileRights<'a>>,
}

/// The file name of our plugin.
pub const PLUGIN_NAME: &str = "rekindle.so";

/// A user other than root, as the kernel judges access to files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileRights<'a> {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Supplementary group ids.
    pub groups: &'a [u32],
}

impl std::fmt::Display for FileRights<'_> {
    /// As `native/plugin/src/rights.rs` reads them.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}:", self.uid, self.gid)?;
        let groups: Vec<String> = self.groups.iter().map(ToString::to_string).collect();
        f.write_str(&groups.join(","))
    }
}
