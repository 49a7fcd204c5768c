//! A command line as the files of a store and the journal have it: text in which no byte is lost.
//!
//! JSON is Unicode, and a word of a command is any bytes but NUL. A word that is UTF-8 is written as it is. In any other,
//! each byte that is not text is written as NUL and two hexadecimal digits.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// The command line as text. Two command lines have the same text only if they are equal.
#[must_use]
pub fn text_of<W: AsRef<OsStr>>(command: impl IntoIterator<Item = W>) -> Vec<String> {
    command.into_iter().map(|word| text(word.as_ref().as_bytes())).collect()
}

fn text(word: &[u8]) -> String {
    let chunk = |chunk: std::str::Utf8Chunk<'_>| {
        let odd: String = chunk.invalid().iter().map(|byte| format!("\0{byte:02x}")).collect();
        chunk.valid().to_owned() + &odd
    };
    word.utf8_chunks().map(chunk).collect()
}

/// The command line that has this text.
#[must_use]
pub fn command_of(text: &[String]) -> Vec<OsString> {
    text.iter().map(|text| OsString::from_vec(word(text))).collect()
}

fn word(text: &str) -> Vec<u8> {
    let mut parts = text.split('\0');
    let first = parts.next().unwrap_or_default().as_bytes().to_vec();
    parts.fold(first, |mut word, part| {
        let byte = part.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok()).filter(|byte| *byte >= 0x80);
        // What is not written by us stays as it is, but for the NUL, which no command can have.
        word.extend(byte);
        word.extend_from_slice(part.as_bytes().get(if byte.is_some() { 2 } else { 0 }..).unwrap_or_default());
        word
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn words_that_are_not_text_stay_different() {
        let command = |word: &[u8]| vec![OsString::from("prog"), OsString::from_vec(word.to_vec())];
        let written = text_of(command(b"a\xff\xc3b"));
        assert_eq!(written, ["prog", "a\0ff\0c3b"]);
        assert_ne!(written, text_of(command(b"a\xfe\xc3b")));
        assert_ne!(text_of(command("\u{fffd}".as_bytes())), text_of(command(b"\xff")));
        assert_eq!(text_of(command("größe \\xff".as_bytes())), ["prog", "größe \\xff"]);
        // Written by somebody else.
        for odd in ["\0", "\0g", "a\0é", "\x0000"] {
            assert!(!command_of(&[odd.to_owned()])[0].as_bytes().contains(&0), "{odd:?}");
        }
    }

    proptest! {
        #[test]
        fn no_byte_is_lost(command: Vec<Vec<u8>>) {
            let command: Vec<OsString> = command
                .into_iter()
                .map(|word| OsString::from_vec(word.into_iter().filter(|byte| *byte != 0).collect()))
                .collect();
            prop_assert_eq!(command_of(&text_of(&command)), command);
        }
    }
}
