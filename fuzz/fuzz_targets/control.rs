//! The lines of the control socket: a request, as the supervisor reads it, and an answer, as a command does. What was
//! understood survives its way back onto a line.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rekindle::control::protocol::{Request, answer_line, parse_answer};

fn is_one_line(line: &[u8]) -> bool {
    line.iter().position(|byte| *byte == b'\n') == Some(line.len() - 1)
}

fuzz_target!(|bytes: &[u8]| {
    match Request::parse(bytes) {
        Ok(request) => {
            let line = request.to_line();
            assert!(is_one_line(&line));
            assert_eq!(Request::parse(&line).expect("what was read can be read again"), request);
        }
        // Why it was not understood is told to who sent it.
        Err(fault) => {
            let line = answer_line(Err(fault.clone()));
            assert!(is_one_line(&line));
            assert_eq!(parse_answer(&line).expect("a fault is an answer"), Err(fault));
        }
    }
    if let Ok(answer) = parse_answer(bytes) {
        let line = answer_line(answer.clone());
        assert!(is_one_line(&line));
        assert_eq!(parse_answer(&line).expect("what was read can be read again"), answer);
    }
});
