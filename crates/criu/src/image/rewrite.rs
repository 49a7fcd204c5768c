//! Rewrites image files with changes. Unknown fields of a record are preserved.

use prost::Message;
use prost::encoding::{decode_varint, encode_varint};

use super::{COMMON, Error, Records, damaged, put};
use rekindle_os::beneath::Beneath;

/// Rewrites an image file if `change` returns a new record for any of its records.
pub(super) fn rewrite<M: Message + Default>(
    path: &Beneath,
    magic: u32,
    mut change: impl FnMut(M, &[u8]) -> Result<Option<Vec<u8>>, Error>,
) -> Result<(), Error> {
    let mut records = Records::open(path.clone(), magic)?;
    let mut bytes: Vec<u8> = [COMMON, magic].iter().flat_map(|word| word.to_le_bytes()).collect();
    let mut changed = false;
    loop {
        let at = records.at;
        let Some(entry) = records.next::<M>()? else { break };
        let record = records.bytes.get(at + 4..records.at).unwrap_or_default();
        let new = change(entry, record)?;
        changed |= new.is_some();
        let record = new.as_deref().unwrap_or(record);
        let length = u32::try_from(record.len()).ok();
        bytes.extend(length.ok_or_else(|| damaged(path, format!("a record at byte {at}")))?.to_le_bytes());
        bytes.extend(record);
    }
    if changed {
        put(path, &bytes)?;
    }
    Ok(())
}

/// A message without the numbers of this field; `None` if it cannot be parsed.
pub(super) fn without_number(record: &[u8], field: u64) -> Option<Vec<u8>> {
    let mut left = record;
    let mut kept = Vec::with_capacity(record.len());
    while !left.is_empty() {
        let before = left;
        let key = decode_varint(&mut left).ok()?;
        let length = match key & 7 {
            0 => {
                decode_varint(&mut left).ok()?;
                0
            }
            1 => 8,
            5 => 4,
            2 => usize::try_from(decode_varint(&mut left).ok()?).ok()?,
            _ => return None,
        };
        left = left.get(length..)?;
        if key != field << 3 {
            kept.extend_from_slice(before.get(..before.len() - left.len())?);
        }
    }
    Some(kept)
}

/// A message with changed fields: `change` gets the key and the content of each length-delimited field, and returns new
/// content to replace it. `None` if the message cannot be parsed.
pub(super) fn with_fields(
    record: &[u8],
    mut change: impl FnMut(u64, &[u8]) -> Option<Option<Vec<u8>>>,
) -> Option<Vec<u8>> {
    let mut left = record;
    let mut changed = Vec::with_capacity(record.len());
    while !left.is_empty() {
        let key = decode_varint(&mut left).ok()?;
        encode_varint(key, &mut changed);
        let length = match key & 7 {
            0 => {
                encode_varint(decode_varint(&mut left).ok()?, &mut changed);
                continue;
            }
            1 => 8,
            5 => 4,
            2 => usize::try_from(decode_varint(&mut left).ok()?).ok()?,
            _ => return None,
        };
        let (content, rest) = left.split_at_checked(length)?;
        left = rest;
        if key & 7 != 2 {
            changed.extend_from_slice(content);
            continue;
        }
        let new = change(key, content)?;
        let content = new.as_deref().unwrap_or(content);
        encode_varint(u64::try_from(content.len()).ok()?, &mut changed);
        changed.extend_from_slice(content);
    }
    Some(changed)
}
