//! The record as a file of an image: JSON with a name and a version, and capped. It is signed and hashed with the image's
//! other parts.

use serde::{Deserialize, Serialize};

use crate::record::Record;

/// Its name in the folder of an image.
pub const FILE_NAME: &str = "objects.json";
/// The version that is written, and the newest that is read.
pub const VERSION: u32 = 1;
/// A larger file is not parsed: some 100,000 sockets.
pub const MAX_BYTES: u64 = 512 << 20;

const FORMAT: &str = "rekindle-objects";

/// Why a record cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Damaged {
    /// It is no JSON of this form.
    #[error("the record of kernel objects is damaged")]
    Parse(#[source] serde_json::Error),
    /// It is another file.
    #[error("the record of kernel objects has the format {0:?}, not {FORMAT:?}")]
    Format(String),
    /// It is from a newer rekindle.
    #[error("the record of kernel objects has version {0}, and this rekindle reads version {VERSION}")]
    Newer(u32),
}

#[derive(Serialize)]
struct Written<'a> {
    format: &'a str,
    version: u32,
    record: &'a Record,
}

#[derive(Deserialize)]
struct Header {
    format: String,
    version: u32,
}

#[derive(Deserialize)]
struct Read {
    record: Record,
}

impl Record {
    /// The bytes of the file.
    ///
    /// # Errors
    /// Never, as far as is known: everything in a record can be written.
    pub fn to_bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        serde_json::to_vec(&Written { format: FORMAT, version: VERSION, record: self })
    }

    /// Reads what [`Record::to_bytes`] wrote.
    ///
    /// # Errors
    /// [`Damaged`] says why it cannot be used.
    pub fn parse(bytes: &[u8]) -> Result<Record, Damaged> {
        let header: Header = serde_json::from_slice(bytes).map_err(Damaged::Parse)?;
        if header.format != FORMAT {
            return Err(Damaged::Format(header.format));
        }
        if header.version != VERSION {
            return Err(Damaged::Newer(header.version));
        }
        let Read { record } = serde_json::from_slice(bytes).map_err(Damaged::Parse)?;
        Ok(record)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_was_written_is_read_and_nothing_else() {
        let record = Record { kernel: "6.18".into(), criu: "4.2.1".into(), processes: Vec::new(), names: Vec::new() };
        let bytes = record.to_bytes().unwrap();
        assert_eq!(Record::parse(&bytes).unwrap(), record);
        let text = String::from_utf8(bytes).unwrap();
        let other = |from: &str, to: &str| Record::parse(text.replace(from, to).as_bytes()).unwrap_err();
        assert!(matches!(other("rekindle-objects", "rekindle-image"), Damaged::Format(_)));
        assert!(matches!(other("\"version\":1", "\"version\":2"), Damaged::Newer(2)));
        assert!(matches!(other("\"kernel\"", "\"colonel\""), Damaged::Parse(_)));
        for length in 0..text.len() {
            assert!(Record::parse(&text.as_bytes()[..length]).is_err());
        }
    }

    proptest! {
        #[test]
        fn no_bytes_do_harm(bytes: Vec<u8>) {
            let _ = Record::parse(&bytes);
        }
    }
}
