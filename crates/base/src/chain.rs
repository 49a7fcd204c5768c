//! Errors on one line.

use std::error::Error;

/// An error with all its causes on one line; a cause that its parent quotes already is left out.
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
    text
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot read x{0}")]
    struct Outer(&'static str, #[source] io::Error);

    #[test]
    fn a_cause_is_not_said_twice() {
        let cause = || io::Error::other("no such file");
        assert_eq!(chain(&Outer("", cause())), "cannot read x: no such file");
        assert_eq!(chain(&Outer(": no such file", cause())), "cannot read x: no such file");
    }
}
