//! Makes text that a job may have chosen safe for a terminal, and for a log that is read on one.
//!
//! Names of processes, command lines, paths, tags and output contain bytes that the job chose. A terminal executes some
//! of them (ECMA-48: move the cursor, set the title, answer as if it were typed), and some change the order of a line
//! so that it reads as another one (Unicode's directional marks). They are shown as escapes: `\x1b`, `\u{202e}`. A
//! backslash is not changed.
//!
//! This is done where text is output: in `src/cli/output.rs`, in the log, and in the output of `report` and
//! to the service manager. Clean text is not changed.

use std::borrow::Cow;
use std::fmt::Write;

/// Whether a terminal may execute it, or show the rest of the line in another order.
#[must_use]
pub(crate) fn is_harmful(c: char) -> bool {
    // C0, DEL and C1; marks of direction; separators of lines and paragraphs, then more marks; isolates.
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// One line of text: line breaks count as harmful too.
#[must_use]
pub(crate) fn line(text: &str) -> Cow<'_, str> {
    escaped(text, |_| false)
}

/// Text of several lines.
#[must_use]
pub(crate) fn lines(text: &str) -> Cow<'_, str> {
    escaped(text, |c| matches!(c, '\n' | '\t'))
}

/// The same for a JSON document: harmful characters can only be in its strings, which have their own escapes.
#[must_use]
pub(crate) fn json(text: &str) -> Cow<'_, str> {
    replaced(
        text,
        |c| c == '\n',
        |c, into| {
            let mut units = [0; 2];
            for unit in c.encode_utf16(&mut units) {
                let _ = write!(into, "\\u{unit:04x}");
            }
        },
    )
}

fn escaped(text: &str, is_fine: fn(char) -> bool) -> Cow<'_, str> {
    replaced(text, is_fine, |c, into| {
        let _ = match u32::from(c) {
            code @ ..0x80 => write!(into, "\\x{code:02x}"),
            code => write!(into, "\\u{{{code:x}}}"),
        };
    })
}

fn replaced(text: &str, is_fine: fn(char) -> bool, show: fn(char, &mut String)) -> Cow<'_, str> {
    let is_bad = |c: char| is_harmful(c) && !is_fine(c);
    if !text.contains(is_bad) {
        return Cow::Borrowed(text);
    }
    let mut clean = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_bad(c) { show(c, &mut clean) } else { clean.push(c) }
    }
    Cow::Owned(clean)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BAD: &str = "a\u{1b}]0;pwned\u{7}b\r\n\tc\u{7f}\u{9b}31m\u{202e}gpj.exe\u{2066}d\\e é漢";

    #[test]
    fn what_a_terminal_obeys_is_shown() {
        let shown = "a\\x1b]0;pwned\\x07b\\x0d\\x0a\\x09c\\x7f\\u{9b}31m\\u{202e}gpj.exe\\u{2066}d\\e é漢";
        assert_eq!(line(BAD), shown);
        assert_eq!(line(shown), shown);
        assert_eq!(lines(BAD), shown.replace("\\x0a\\x09", "\n\t"));
        assert!(matches!(line("plain, é漢\\x1b"), Cow::Borrowed(_)));
    }

    #[test]
    fn json_means_the_same() {
        let value = serde_json::json!({ BAD: [BAD, 1, null] });
        let text = serde_json::to_string_pretty(&value).unwrap();
        let clean = json(&text);
        assert!(!clean.contains(|c| is_harmful(c) && c != '\n') && clean != text);
        assert_eq!(serde_json::from_str::<serde_json::Value>(&clean).unwrap(), value);
    }
}
