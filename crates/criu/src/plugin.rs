//! The environment of our plugin in CRIU (`native/plugin/`).

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// What our plugin does for CRIU.
#[derive(Debug, Clone, Copy)]
pub struct Plugin<'a> {
    /// A folder that contains only our plugin.
    pub folder: &'a Path,
    /// The devices that it accepts, as `native/plugin/src/accept.rs` reads them.
    pub devices: Option<&'a str>,
    /// Where it writes what the stopped threads answer, as `native/plugin/src/ask.rs` asks them.
    pub answers: Option<BorrowedFd<'a>>,
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

/// Whether a program has an interpreter that loads shared objects (elf(5)). One that is no ELF file, such as a script, is taken to
/// start one that has.
pub(crate) fn is_dynamic(program: &Path) -> bool {
    /// The offset of the program headers in a 64-bit file, and of their size and count.
    const TABLE: usize = 32;
    const ENTRY: usize = 54;
    const COUNT: usize = 56;
    /// `PT_INTERP`
    const INTERPRETER: [u8; 4] = [3, 0, 0, 0];
    let read = || -> io::Result<bool> {
        let file = File::open(program)?;
        let mut header = [0; 64];
        file.read_exact_at(&mut header, 0)?;
        if !header.starts_with(b"\x7fELF\x02\x01") {
            return Ok(true);
        }
        let short = |at: usize| header.get(at..at + 2).map_or(0, |bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
        let table = header.get(TABLE..TABLE + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes);
        for index in 0..short(COUNT) {
            let mut kind = [0; 4];
            file.read_exact_at(&mut kind, table.saturating_add(u64::from(index) * u64::from(short(ENTRY))))?;
            if kind == INTERPRETER {
                return Ok(true);
            }
        }
        Ok(false)
    };
    read().unwrap_or(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_static_program_is_told_from_others() {
        assert!(is_dynamic(Path::new("/bin/sh")));
        assert!(is_dynamic(Path::new("/nowhere")));
        let folder = tempfile::tempdir().unwrap();
        let (source, program) = (folder.path().join("x.c"), folder.path().join("x"));
        std::fs::write(&source, "int main(void) { return 0; }").unwrap();
        assert!(is_dynamic(&source), "a script");
        let built = std::process::Command::new("cc").arg("-static").arg(&source).arg("-o").arg(&program).status();
        if built.is_ok_and(|status| status.success()) {
            assert!(!is_dynamic(&program));
        }
    }
}
