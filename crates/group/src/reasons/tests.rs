//! The JSON of each reason, and its words.

use std::fmt::Debug;

use serde::de::DeserializeOwned;

use super::*;

const ONE: Rank = Rank(1);
const FOUR: Number = Number(4);

/// Whether each value is written and read as this JSON, and has these words.
fn are<T: Serialize + DeserializeOwned + fmt::Display + PartialEq + Debug>(
    all: impl IntoIterator<Item = (T, &'static str, &'static str)>,
) {
    for (value, json, words) in all {
        assert_eq!(serde_json::to_string(&value).unwrap(), json);
        assert_eq!(serde_json::from_str::<T>(json).unwrap(), value);
        assert_eq!(value.to_string(), words);
    }
}

#[test]
fn reasons_of_the_group() {
    let late = |phase, ranks: &[u32]| Reason::TimedOut { phase, ranks: ranks.iter().copied().map(Rank).collect() };
    let refused = |why| Reason::Refused { rank: ONE, why };
    are([
        (Reason::Begins, r#""begins""#, "the group begins"),
        (Reason::NewRun, r#""new-run""#, "a new run"),
        (Reason::Resumed, r#""resumed""#, "resumed"),
        (Reason::Rewound(FOUR), r#"{"rewound":4}"#, "rewound to group image 4"),
        (Reason::MemberLost(ONE), r#"{"member-lost":1}"#, "rank 1 is lost"),
        (Reason::CoordinatorLost(ONE), r#"{"coordinator-lost":1}"#, "rank 1 ended its job: it lost the coordinator"),
        (
            Reason::JobFailed { rank: ONE, why: "the job ended: exit code 1".into() },
            r#"{"job-failed":{"rank":1,"why":"the job ended: exit code 1"}}"#,
            "rank 1: the job ended: exit code 1",
        ),
        (
            Reason::NotStarted { rank: ONE, why: StartFailure::NoPart(FOUR) },
            r#"{"not-started":{"rank":1,"why":{"no-part":4}}}"#,
            "rank 1: this machine does not have its part of group image 4",
        ),
        (
            Reason::NotStarted { rank: ONE, why: StartFailure::Other("no memory".into()) },
            r#"{"not-started":{"rank":1,"why":{"other":"no memory"}}}"#,
            "rank 1: no memory",
        ),
        (late(Phase::Start, &[]), r#"{"timed-out":{"phase":"start","ranks":[]}}"#, "not ready in time: the group"),
        (
            late(Phase::Lock, &[0, 2]),
            r#"{"timed-out":{"phase":"lock","ranks":[0,2]}}"#,
            "not locked in time: rank 0, rank 2",
        ),
        (
            late(Phase::Disconnect, &[2]),
            r#"{"timed-out":{"phase":"disconnect","ranks":[2]}}"#,
            "not disconnected in time: rank 2",
        ),
        (late(Phase::Dump, &[2]), r#"{"timed-out":{"phase":"dump","ranks":[2]}}"#, "not dumped in time: rank 2"),
        (
            late(Phase::Resume, &[2]),
            r#"{"timed-out":{"phase":"resume","ranks":[2]}}"#,
            "not running again after a snapshot: rank 2",
        ),
        (
            refused(SnapshotRefusal::JobBlocks),
            r#"{"refused":{"rank":1,"why":"job-blocks"}}"#,
            "rank 1: the job blocks snapshots now",
        ),
        (
            refused(SnapshotRefusal::NotPrepared),
            r#"{"refused":{"rank":1,"why":"not-prepared"}}"#,
            "rank 1: it was not prepared",
        ),
        (
            refused(SnapshotRefusal::Other("no memory".into())),
            r#"{"refused":{"rank":1,"why":{"other":"no memory"}}}"#,
            "rank 1: no memory",
        ),
        (Reason::JobOver(ONE), r#"{"job-over":1}"#, "rank 1: its job is over"),
        (
            Reason::JobCompleted(ONE),
            r#"{"job-completed":1}"#,
            "the job of rank 1 has completed, so no snapshot can be taken",
        ),
        (Reason::PartsGone, r#""parts-gone""#, "not all of its parts are there any more"),
        (
            Reason::RewindFailed { to: FOUR, why: Box::new(Reason::PartsGone) },
            r#"{"rewind-failed":{"to":4,"why":"parts-gone"}}"#,
            "cannot go back to group image 4: not all of its parts are there any more. The job continues from where it \
             was",
        ),
    ]);
}

#[test]
fn reasons_for_the_end_of_a_run() {
    are([
        (Missing::JobEnd(vec![ONE]), r#"{"job-end":[1]}"#, "rank 1 did not end its job in time"),
        (Missing::Report(vec![ONE]), r#"{"report":[1]}"#, "rank 1 did not report in time that nothing runs"),
        (Missing::Members(vec![Rank(0), ONE]), r#"{"members":[0,1]}"#, "rank 0, rank 1 did not join in time"),
        (
            Missing::Record(FOUR),
            r#"{"record":4}"#,
            "the coordinator has no record of group image 4, and not all of its parts are there",
        ),
        (Missing::RewoundImage, r#""rewound-image""#, "the group image that the job was rewound to no longer exists"),
        (
            Missing::Parts(FOUR),
            r#"{"parts":4}"#,
            "not all parts of group image 4 or of an older one are there: start the machines that have them, or all \
             with --fresh, from the beginning",
        ),
        (
            Missing::Rank(ONE),
            r#"{"rank":1}"#,
            "another supervisor runs as rank 1. Stop it, or give this machine another number (--node-rank, \
             group.node-rank)",
        ),
        (Missing::FreshMembers, r#""fresh-members""#, "not all machines were started with --fresh in time"),
        (
            Missing::Departure(vec![ONE]),
            r#"{"departure":[1]}"#,
            "rank 1 of the run before did not leave the group in time: end the supervisors there",
        ),
        (Missing::NextRun, r#""next-run""#, "the group's leader did not begin the next run in time"),
    ]);
    let (within, last) = (Duration::from_secs(30), || Reason::MemberLost(ONE));
    are([
        (
            Failure::Restarts { most: 10, within, last: last() },
            r#"{"restarts":{"most":10,"within":{"secs":30,"nanos":0},"last":{"member-lost":1}}}"#,
            "10 restarts within 30s (restart.max-restarts); the last time: rank 1 is lost",
        ),
        (
            Failure::InARow { times: 8, last: last() },
            r#"{"in-a-row":{"times":8,"last":{"member-lost":1}}}"#,
            "the job failed or could not be started 8 times in a row; the last time: rank 1 is lost",
        ),
        (
            Failure::NoImage { last: last() },
            r#"{"no-image":{"last":{"member-lost":1}}}"#,
            "there is no group image to continue from, and restart.cold-start is \"never\"; the last time: rank 1 is \
             lost",
        ),
        (
            Failure::EarlyDeaths { times: 3, within, last: last() },
            r#"{"early-deaths":{"times":3,"within":{"secs":30,"nanos":0},"last":{"member-lost":1}}}"#,
            "there is no good group image, and the job died 3 times within 30s (restart.min-uptime) after a start from \
             the beginning; the last time: rank 1 is lost",
        ),
        (
            Failure::EachImage(FOUR),
            r#"{"each-image":4}"#,
            "the job failed again and again after each group image, the newest of them group image 4",
        ),
        (
            Failure::Never { rank: ONE, why: "rule 1: out of memory".into() },
            r#"{"never":{"rank":1,"why":"rule 1: out of memory"}}"#,
            "rank 1: rule 1: out of memory",
        ),
    ]);
    are([
        (
            Mismatch::Size { image: FOUR, parts: 2, size: 3 },
            r#"{"size":{"image":4,"parts":2,"size":3}}"#,
            "group image 4 has parts of 2 machines, and the group has 3 (group.nodes): start it with --nodes 2, or all \
             machines with --fresh, from the beginning",
        ),
        (
            Mismatch::Fresh { with: ONE, without: Rank(0) },
            r#"{"fresh":{"with":1,"without":0}}"#,
            "rank 1 was started with --fresh and rank 0 was not: start all machines with it, or none",
        ),
        (
            Mismatch::Configuration { rank: ONE, why: StartFailure::Other("no GPU".into()) },
            r#"{"configuration":{"rank":1,"why":{"other":"no GPU"}}}"#,
            "rank 1: no GPU",
        ),
    ]);
}

#[test]
fn reasons_why_a_request_is_refused() {
    are([
        (RequestRefusal::NotBegun, r#""not-begun""#, "the group has not begun"),
        (RequestRefusal::RunOver, r#""run-over""#, "the run is over"),
        (RequestRefusal::Stopping, r#""stopping""#, "the run is being stopped"),
        (
            RequestRefusal::StillSuspending,
            r#""still-suspending""#,
            "the job is being suspended: try again when it is suspended",
        ),
        (RequestRefusal::Suspending, r#""suspending""#, "the job is being suspended"),
        (RequestRefusal::Suspended, r#""suspended""#, "the job is suspended: resume it first"),
        (RequestRefusal::SuspendedAlready, r#""suspended-already""#, "the job is suspended already"),
        (RequestRefusal::NotSuspended, r#""not-suspended""#, "the job is not suspended"),
        (RequestRefusal::NotRunning, r#""not-running""#, "the job does not run: it waits to be started"),
        (RequestRefusal::NoImage(FOUR), r#"{"no-image":4}"#, "there is no group image 4"),
        (
            RequestRefusal::BeforeFresh(FOUR),
            r#"{"before-fresh":4}"#,
            "group image 4 is from before the job was started from the beginning (--fresh)",
        ),
        (
            RequestRefusal::PartsMissing { image: FOUR, ranks: vec![Rank(0), ONE] },
            r#"{"parts-missing":{"image":4,"ranks":[0,1]}}"#,
            "group image 4 cannot be used: the part of rank 0, rank 1 is not there",
        ),
        (
            RequestRefusal::Failed(Reason::JobCompleted(ONE)),
            r#"{"failed":{"job-completed":1}}"#,
            "the job of rank 1 has completed, so no snapshot can be taken",
        ),
    ]);
}

#[test]
fn what_was_asked_for_is_no_loss() {
    let wanted = [Reason::Begins, Reason::NewRun, Reason::Resumed, Reason::Rewound(FOUR)];
    assert!(wanted.iter().all(|why| !why.is_loss() && why.ranks().is_empty()));
    assert!(Reason::MemberLost(ONE).is_loss());
    let failed = Reason::RewindFailed { to: FOUR, why: Box::new(Reason::MemberLost(ONE)) };
    assert!(failed.is_loss() && failed.ranks() == [ONE]);
}

#[test]
fn a_long_text_is_cut_between_two_characters() {
    let longest = "x".repeat(Detail::LONGEST);
    assert_eq!(Detail::from(longest.as_str()).to_string(), longest);
    let cut = Detail::from("ü".repeat(Detail::LONGEST)).to_string();
    assert!(cut.len() <= Detail::LONGEST && cut.len() > Detail::LONGEST - 8, "{}", cut.len());
    assert_eq!(cut.trim_end_matches("...").trim_matches('ü'), "");
}

#[test]
fn what_no_supervisor_writes_is_refused() {
    let deep = format!("{}\"begins\"{}", r#"{"rewind-failed":{"to":1,"why":"#.repeat(1000), "}}".repeat(1000));
    let long = format!(r#"{{"job-failed":{{"rank":1,"why":"{}"}}}}"#, "x".repeat(Detail::LONGEST + 1));
    for text in [
        "the group begins",
        r#""the group begins""#,
        r#""Begins""#,
        r#"{"begins":1}"#,
        r#"{"member-lost":-1}"#,
        r#"{"member-lost":4294967296}"#,
        r#"{"member-lost":1,"new-run":null}"#,
        r#"{"timed-out":{"phase":"lunch","ranks":[]}}"#,
        r#"{"timed-out":{"phase":"lock"}}"#,
        r#"{"timed-out":{"phase":"lock","ranks":[],"more":1}}"#,
        &deep,
        &long,
    ] {
        assert!(serde_json::from_str::<Reason>(text).is_err(), "{}", &text[..text.len().min(80)]);
    }
}
