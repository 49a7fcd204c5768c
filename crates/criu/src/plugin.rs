//! The environment of our plugin in CRIU (`native/plugin/`).

use std::path::Path;

/// What our plugin does for CRIU.
#[derive(Debug, Clone, Copy)]
pub struct Plugin<'a> {
    /// A folder that contains only our plugin.
    pub folder: &'a Path,
    /// The devices that it accepts, as `native/plugin/src/accept.rs` reads them.
    pub devices: Option<&'a str>,
    /// The user whose file access rights CRIU gets instead of root's, if it works on files of a user.
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
    /// In the format that `native/plugin/src/rights.rs` parses.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}:", self.uid, self.gid)?;
        let groups: Vec<String> = self.groups.iter().map(ToString::to_string).collect();
        f.write_str(&groups.join(","))
    }
}
