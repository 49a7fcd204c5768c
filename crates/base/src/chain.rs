//! Errors on one line.

use std::error::Error;

/// An error with all its causes on one line; causes that are already quoted are left out.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    without_numbers(&text)
}

/// The text without " (os error 2)", which Rust appends to the kernel's words: the words say it.
#[must_use]
pub fn without_numbers(text: &str) -> String {
    const BEGIN: &str = " (os error ";
    let mut parts = text.split(BEGIN);
    let mut clean = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.split_once(')') {
            Some((number, rest)) if number.bytes().all(|b| b.is_ascii_digit()) => clean.push_str(rest),
            _ => clean.extend([BEGIN, part]),
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot read x{0}")]
    struct Outer(&'static str, #[source] io::Error);

    #[test]
    fn numbers_of_errors_are_left_out() {
        let error = Outer("", io::Error::from_raw_os_error(2));
        assert_eq!(chain(&error), "cannot read x: No such file or directory");
        for (text, clean) in [("a (os error 2); b (os error 13)", "a; b"), ("a (os error x) b", "a (os error x) b")] {
            assert_eq!(without_numbers(text), clean);
        }
    }

    #[test]
    fn a_cause_is_not_said_twice() {
        let cause = || io::Error::other("no such file");
        assert_eq!(chain(&Outer("", cause())), "cannot read x: no such file");
        assert_eq!(chain(&Outer(": no such file", cause())), "cannot read x: no such file");
    }
}
