use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::Evidence;
use crate::tests::at;
use FactKind::{Bad, Good, Unknown};
use chrono::TimeDelta;
use proptest::prelude::*;

/// The sizes of images with shared pieces.
pub(super) fn shared(images: &Pieces) -> Sizes {
    let mut gathering = Gathering::default();
    for (id, pieces) in images {
        // All pieces have different sizes.
        pieces.iter().for_each(|piece| gathering.share(*id, *piece, 1 + u64::from(*piece) * 7));
    }
    gathering.finish(None)
}

pub(super) const NO_NEED: Room = Room { free: 0, pending: 0, min_free: 0 };

pub(super) fn fact(n: u32, seconds: i64, kind: FactKind) -> Facts {
    Facts {
        id: ImageId::new(n, at(seconds)),
        taken: at(seconds),
        kind,
        pin: Pin::None,
        in_use: Use::None,
        proof: Proof::None,
        evidence: Evidence::Taken,
        line: Line::Ours,
        whole: Whole::Itself,
    }
}

pub(super) fn facts(kinds: &[FactKind]) -> Vec<Facts> {
    (1..).zip(kinds).map(|(n, kind)| fact(n, 0, *kind)).collect()
}

pub(super) fn last(keep_last: u32) -> Policy {
    Policy { keep_last, ..Policy::default() }
}

/// Each image has this size and shares nothing.
pub(super) fn each(facts: &[Facts], bytes: u64) -> Sizes {
    let mut gathering = Gathering::<()>::default();
    facts.iter().for_each(|it| gathering.own(it.id, bytes));
    gathering.finish(None)
}

fn planned(facts: &[Facts], policy: &Policy) -> Plan {
    plan(facts, policy, at(0), &Sizes::default(), &NO_NEED)
}

/// The reasons, oldest image first.
fn reasons(plan: &Plan) -> Vec<String> {
    plan.decisions.iter().rev().map(|it| it.verdict.to_string()).collect()
}

fn removed(plan: &Plan) -> Vec<u32> {
    plan.removals().map(|id| id.sequence()).collect()
}

#[test]
fn reasons_read_well() {
    assert_eq!(
        reasons(&planned(&facts(&[Good, Bad, Good, Unknown, Bad, Good, Good, Bad]), &last(2))),
        [
            "older than the last 2",
            "bad, older than the last 2 bad ones",
            "older than the last 2",
            "cannot be read, so it is left alone",
            "bad, one of the last 2 bad ones",
            "one of the last 2",
            "newest good",
            "bad, one of the last 2 bad ones",
        ]
    );
}

const MINUTE: i64 = 60;
const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;

#[test]
fn hours_and_days_are_those_of_utc_and_reasons_are_joined() {
    // at(0) is 08:00:00 UTC.
    assert_eq!(at(0).to_string(), "2027-01-15 08:00:00 UTC");
    let times = [-2 * DAY, -9 * HOUR, -HOUR, -HOUR + 50 * MINUTE, -1, 0, 10 * MINUTE];
    let facts: Vec<Facts> = (1..).zip(times).map(|(n, seconds)| fact(n, seconds, Good)).collect();
    let policy = Policy { keep_last: 1, keep_hourly: 2, keep_daily: 3, ..Policy::default() };
    assert_eq!(
        reasons(&planned(&facts, &policy)),
        [
            "newest of its day",
            "newest of its day",
            "older than the last 1, not the newest in any of the last 2 hours or 3 days",
            "older than the last 1, not the newest in any of the last 2 hours or 3 days",
            "newest of its hour",
            "older than the last 1, not the newest in any of the last 2 hours or 3 days",
            "newest good, newest of its hour, newest of its day",
        ]
    );
}

#[test]
fn hours_without_an_image_do_not_count() {
    let facts: Vec<Facts> = (1..).zip([-50 * DAY, -20 * DAY, 0]).map(|(n, time)| fact(n, time, Good)).collect();
    assert_eq!(removed(&planned(&facts, &Policy { keep_hourly: 3, ..last(1) })), [0_u32; 0]);
    assert_eq!(removed(&planned(&facts, &Policy { keep_hourly: 2, ..last(1) })), [1]);
    assert_eq!(removed(&planned(&facts, &Policy { keep_daily: 2, ..last(1) })), [1]);
}

#[test]
fn a_bad_image_is_not_the_newest_of_its_hour() {
    let facts = [fact(1, 0, Good), fact(2, 60, Good), fact(3, 120, Bad), fact(4, 2 * HOUR, Good)];
    let plan = planned(&facts, &Policy { keep_hourly: 2, ..last(1) });
    assert_eq!(removed(&plan), [1]);
    assert_eq!(reasons(&plan)[1], "newest of its hour");
}

#[test]
fn the_young_are_kept_and_those_of_the_future_with_them() {
    let facts = [fact(1, -2 * HOUR - 1, Good), fact(2, -2 * HOUR, Good), fact(3, 5 * DAY, Good), fact(4, -DAY, Good)];
    let within = Policy { keep_within: Duration::from_secs(7200), ..last(1) };
    assert_eq!(
        reasons(&planned(&facts, &within)),
        ["older than the last 1, not younger than 2h", "younger than 2h", "taken later than now", "newest good"]
    );
    // The clock was set back; the newest image is still the newest.
    assert_eq!(removed(&planned(&facts, &last(1))), [1, 2, 3]);
}

#[test]
fn pinned_ones_stay() {
    let mut facts = facts(&[Good, Bad, Good, Bad, Good, Bad]);
    facts[0].pin = Pin::Pinned;
    facts[1].pin = Pin::Unreadable;
    facts[4].pin = Pin::Pinned;
    assert_eq!(
        reasons(&planned(&facts, &last(1))),
        [
            "pinned",
            "tags.json cannot be read, so it counts as pinned",
            "older than the last 1",
            "bad, older than the last 1 bad ones",
            "newest good, pinned",
            "bad, one of the last 1 bad ones",
        ]
    );
    let bound = Policy { max_total: Some(0), ..last(6) };
    let plan = plan(&facts, &bound, at(0), &each(&facts, 10), &NO_NEED);
    assert_eq!(removed(&plan), [3, 4, 6]);
    assert_eq!(plan.notes, [Note::MaxTotal { left: 30, max: 0 }]);
}

#[test]
fn without_a_good_image_all_stay() {
    let facts = facts(&[Bad, Bad, Bad]);
    assert_eq!(reasons(&planned(&facts, &last(1))), ["there is no good image"; 3]);
    let bound = Policy { max_total: Some(1), ..last(1) };
    assert_eq!(removed(&plan(&facts, &bound, at(0), &each(&facts, 10), &NO_NEED)), [0_u32; 0]);
}

#[test]
fn the_oldest_goes_first() {
    assert_eq!(removed(&planned(&facts(&[Good; 4]), &last(1))), [1, 2, 3]);
}

#[test]
fn a_bound_takes_bad_ones_first_and_no_more_than_it_must() {
    let facts = facts(&[Good, Good, Bad, Good, Good]);
    let bound = |max| Policy { max_total: Some(max), ..last(9) };
    let plan = |max| plan(&facts, &bound(max), at(0), &each(&facts, 10), &NO_NEED);
    assert_eq!(removed(&plan(50)), [0_u32; 0]);
    assert_eq!(removed(&plan(49)), [3]);
    assert_eq!(removed(&plan(39)), [1, 3]);
    assert_eq!(plan(39).decisions[4].verdict.to_string(), "beyond store.max-total-size (39 B)");
    assert_eq!((removed(&plan(10)), plan(10).notes), (vec![1, 2, 3, 4], vec![]));
    let said = plan(9).notes[0].to_string();
    assert!(
        said.contains("take 10 B, more than store.max-total-size (9 B)") && said.contains("pin --remove"),
        "{said}"
    );
}

#[test]
fn the_file_system_gets_what_it_must_have_or_nothing_goes_for_it() {
    let facts = facts(&[Good; 3]);
    let with =
        |free, min_free, pending| plan(&facts, &last(3), at(0), &each(&facts, 10), &Room { free, pending, min_free });
    assert_eq!(removed(&with(100, 100, 0)), [0_u32; 0]);
    assert_eq!(removed(&with(99, 100, 0)), [1]);
    assert_eq!(removed(&with(80, 100, 0)), [1, 2]);
    assert_eq!(removed(&with(80, 100, 10)), [1], "what comes free by itself counts");
    let hopeless = with(79, 100, 0);
    assert_eq!(removed(&hopeless), [0_u32; 0]);
    assert_eq!(hopeless.notes, [Note::MinFree { free: 79, min_free: 100, freed: 20 }]);
    assert!(hopeless.notes[0].to_string().contains("would free only 20 B, so none is removed"));
    // What the rules remove anyway counts.
    let freed_anyway = plan(&facts, &last(1), at(0), &each(&facts, 10), &Room { free: 0, pending: 0, min_free: 20 });
    assert_eq!((removed(&freed_anyway), freed_anyway.notes), (vec![1, 2], vec![]));
}

#[test]
fn shared_content_comes_free_with_the_last_image_that_has_it() {
    let facts = facts(&[Good; 4]);
    let pieces = [&[1_u8, 2][..], &[1, 2, 3], &[2, 3], &[3]];
    let sizes = shared(&facts.iter().zip(pieces).map(|(it, p)| (it.id, p.iter().copied().collect())).collect());
    assert_eq!((sizes.total(), sizes.freed(&[facts[0].id])), (8 + 15 + 22, 0));
    // Removing the first alone frees nothing; removing the second too does.
    let plan = |max| plan(&facts, &Policy { max_total: Some(max), ..last(9) }, at(0), &sizes, &NO_NEED);
    assert_eq!(removed(&plan(44)), [1, 2]);
    assert_eq!(removed(&plan(36)), [1, 2, 3]);
    assert_eq!((removed(&plan(22)), plan(22).notes), (vec![1, 2, 3], vec![]));
}

#[test]
fn the_oddest_clocks_do_no_harm() {
    let odd = [DateTime::<Utc>::MIN_UTC, DateTime::<Utc>::MAX_UTC, at(0)];
    let policy = Policy { keep_hourly: 2, keep_daily: 2, keep_within: Duration::MAX, ..last(1) };
    for now in odd {
        let facts: Vec<Facts> = (1..).zip(odd).map(|(n, taken)| Facts { taken, ..fact(n, 0, Good) }).collect();
        let plan = plan(&facts, &policy, now, &Sizes::default(), &NO_NEED);
        assert_eq!(plan.removals().count(), 0, "all are young or of the future");
    }
}

/// The pieces of each image.
pub(super) type Pieces = BTreeMap<ImageId, BTreeSet<u8>>;

/// Facts with a clock that jumps, in random order, and pieces of content.
pub(super) fn any_images() -> impl Strategy<Value = (Vec<Facts>, Pieces)> {
    let kind = prop_oneof![4 => Just(Good), 2 => Just(Bad), 1 => Just(Unknown)];
    let pin = prop_oneof![6 => Just(Pin::None), 1 => Just(Pin::Pinned), 1 => Just(Pin::Unreadable)];
    let pieces = prop::collection::btree_set(0_u8..24, 0..8);
    let proof = prop_oneof![3 => Just(Proof::None), 1 => Just(Proof::Proven)];
    let evidence = prop_oneof![3 => Just(Evidence::Taken), 1 => Just(Evidence::Refused), 1 => Just(Evidence::Rehearsed), 1 => Just(Evidence::Restored)];
    let line = prop_oneof![4 => Just(Line::Ours), 1 => Just(Line::Other)];
    let one = (kind, pin, (proof, evidence, line), -1_000_000_i64..1_000_000, pieces);
    let all = prop::collection::vec(one, 0..24).prop_map(|all| {
        let each = (1..).zip(all).map(|(n, (kind, pin, (proof, evidence, line), clock, pieces))| {
            let facts = Facts { pin, proof, evidence, line, ..fact(n, clock, kind) };
            (facts, (facts.id, pieces))
        });
        let (facts, pieces): (Vec<Facts>, BTreeMap<ImageId, BTreeSet<u8>>) = each.unzip();
        (facts, pieces)
    });
    all.prop_flat_map(|(facts, pieces)| (Just(facts).prop_shuffle(), Just(pieces)))
}

pub(super) fn any_policy() -> impl Strategy<Value = Policy> {
    (0_u32..6, 0_u32..6, 0_u32..4, 0_u64..400_000, prop::option::of(0_u64..1500)).prop_map(
        |(keep_last, keep_hourly, keep_daily, within, max_total)| Policy {
            keep_last,
            keep_hourly,
            keep_daily,
            keep_within: Duration::from_secs(within.saturating_sub(100_000)),
            max_total,
        },
    )
}

fn any_room() -> impl Strategy<Value = Room> {
    (0_u64..1000, 0_u64..200, prop_oneof![3 => Just(0_u64), 1 => 0_u64..1500])
        .prop_map(|(free, pending, min_free)| Room { free, pending, min_free })
}

/// Whether no rule or limit may remove it.
pub(super) fn is_firm(it: &Facts, facts: &[Facts]) -> bool {
    let newest = facts.iter().filter(|it| it.kind == Good).map(|it| it.id).max();
    let firm = it.pin != Pin::None || it.kind == Unknown || newest.is_none_or(|newest| newest == it.id);
    firm || is_newest_of_its_kind(it, facts)
}

/// The newest proven image, and the newest that was rehearsed or restored; and on the job's line, these and the newest.
fn is_newest_of_its_kind(it: &Facts, facts: &[Facts]) -> bool {
    let newest =
        |which: fn(&Facts) -> bool| facts.iter().filter(|it| it.kind == Good && which(it)).map(|it| it.id).max();
    let proven = newest(|it| it.proof == Proof::Proven);
    let ours = newest(|it| it.line == Line::Ours);
    let both = newest(|it| it.proof == Proof::Proven && it.line == Line::Ours);
    let shown = newest(|it| it.evidence.is_there());
    let ours_shown = newest(|it| it.evidence.is_there() && it.line == Line::Ours);
    [proven, ours, both, shown, ours_shown].contains(&Some(it.id))
}

proptest! {
    #[test]
    fn what_must_stay_stays((facts, pieces) in any_images(), policy in any_policy(), room in any_room(), now in -2_000_000_i64..2_000_000) {
        let sizes = shared(&pieces);
        let plan = plan(&facts, &policy, at(now), &sizes, &room);
        let gone: Vec<ImageId> = plan.removals().collect();
        // Each image has one decision, newest first, and kept images have a reason.
        prop_assert_eq!(plan.decisions.len(), facts.len());
        prop_assert!(plan.decisions.is_sorted_by(|a, b| a.id > b.id));
        prop_assert!(plan.decisions.iter().all(|it| !it.verdict.to_string().is_empty()));
        prop_assert!(gone.is_sorted());
        for it in facts.iter().filter(|it| is_firm(it, &facts)) {
            prop_assert!(!gone.contains(&it.id), "{it:?}");
        }
        if !facts.iter().any(|it| it.kind == Good) {
            prop_assert!(gone.is_empty());
        }
    }

    #[test]
    fn bounds_are_met_or_it_is_said((facts, pieces) in any_images(), policy in any_policy(), room in any_room()) {
        let sizes = shared(&pieces);
        let plan = plan(&facts, &policy, at(0), &sizes, &room);
        let gone: Vec<ImageId> = plan.removals().collect();
        let left = sizes.total() - sizes.freed(&gone);
        let may_go: Vec<ImageId> = facts.iter().filter(|it| !is_firm(it, &facts)).map(|it| it.id).collect();
        let at_best = sizes.freed(&may_go);
        if let Some(max) = policy.max_total {
            let can_be_met = sizes.total() - at_best <= max;
            prop_assert_eq!(left <= max, can_be_met);
            let said = plan.notes.contains(&Note::MaxTotal { left, max });
            prop_assert_eq!(said, !can_be_met);
        }
        let short = room.min_free.saturating_sub(room.free + room.pending);
        let can_be_met = at_best >= short;
        prop_assert_eq!(sizes.freed(&gone) >= short, can_be_met);
        prop_assert_eq!(plan.notes.iter().any(|note| matches!(note, Note::MinFree { .. })), !can_be_met);
    }

    #[test]
    fn bounds_take_no_more_than_they_must((facts, pieces) in any_images(), policy in any_policy(), room in any_room()) {
        let sizes = shared(&pieces);
        let plan = plan(&facts, &policy, at(0), &sizes, &room);
        let by_rules: Vec<ImageId> = by_rules(&facts, &policy, at(0)).removals().collect();
        let mut by_bounds: Vec<ImageId> = plan.removals().filter(|id| !by_rules.contains(id)).collect();
        let kind = |id: ImageId| facts.iter().find(|it| it.id == id).map(|it| it.kind);
        by_bounds.sort_by_key(|id| (kind(*id) == Some(Good), *id));
        let Some(last) = by_bounds.pop() else { return Ok(()) };
        // Without the last removal a limit would be exceeded.
        let gone = [by_rules, by_bounds].concat();
        let (freed, left) = (sizes.freed(&gone), sizes.total() - sizes.freed(&gone));
        let short = room.min_free.saturating_sub(room.free + room.pending);
        prop_assert!(policy.max_total.is_some_and(|max| left > max) || freed < short);
        // A good image is only removed after all removable bad ones, and the oldest is removed first.
        for it in facts.iter().filter(|it| !is_firm(it, &facts) && !gone.contains(&it.id) && it.id != last) {
            let order = |id| (kind(id) == Some(Good), id);
            prop_assert!(order(it.id) > order(last), "{it:?} stays and {last} goes");
        }
    }

    #[test]
    fn the_rules_without_bounds(images in any_images(), keep_last in 0_u32..6, keep_hourly in 0_u32..6, keep_daily in 0_u32..4) {
        let facts = images.0;
        let policy = Policy { keep_last, keep_hourly, keep_daily, ..Policy::default() };
        let gone: Vec<ImageId> = planned(&facts, &policy).removals().collect();
        let mut good: Vec<&Facts> = facts.iter().filter(|it| it.kind == Good).collect();
        good.sort_by_key(|it| Reverse(it.id));
        let bucket = |size: i64, count: u32, at: usize| {
            let time = |it: &Facts| it.taken.timestamp().div_euclid(size);
            let newer: BTreeSet<i64> = good[..at].iter().map(|it| time(it)).collect();
            !newer.contains(&time(good[at])) && newer.len() < usize::try_from(count).unwrap()
        };
        for (at, it) in good.iter().enumerate() {
            let wanted = it.pin != Pin::None
                || is_newest_of_its_kind(it, &facts)
                || at < usize::try_from(keep_last.max(1)).unwrap()
                || bucket(HOUR, keep_hourly, at)
                || bucket(DAY, keep_daily, at);
            prop_assert_eq!(!gone.contains(&it.id), wanted, "{:?}", it);
        }
        let mut bad: Vec<&Facts> = facts.iter().filter(|it| it.kind == Bad).collect();
        bad.sort_by_key(|it| Reverse(it.id));
        for (at, it) in bad.iter().enumerate() {
            let wanted =
                good.is_empty() || it.pin != Pin::None || at < usize::try_from(keep_last.max(1)).unwrap();
            prop_assert_eq!(!gone.contains(&it.id), wanted, "{:?}", it);
        }
    }

    #[test]
    fn planning_again_after_removing_removes_nothing((facts, pieces) in any_images(), policy in any_policy()) {
        let sizes = shared(&pieces);
        let gone: Vec<ImageId> = plan(&facts, &policy, at(0), &sizes, &NO_NEED).removals().collect();
        let left: Vec<Facts> = facts.into_iter().filter(|it| !gone.contains(&it.id)).collect();
        let sizes = shared(&pieces.into_iter().filter(|(id, _)| !gone.contains(id)).collect());
        // Hours whose image was removed by a limit do not count any more.
        let again: Vec<ImageId> = plan(&left, &policy, at(0), &sizes, &NO_NEED).removals().collect();
        prop_assert_eq!(again, []);
    }

    #[test]
    fn a_clock_that_jumps_changes_no_order(kinds in prop::collection::vec(-100_000_i64..100_000, 1..20), keep in 1_u32..5) {
        let facts: Vec<Facts> = (1..).zip(kinds).map(|(n, clock)| fact(n, clock, Good)).collect();
        let gone: Vec<ImageId> = planned(&facts, &last(keep)).removals().collect();
        let count = facts.len().saturating_sub(usize::try_from(keep).unwrap());
        prop_assert_eq!(gone, facts[..count].iter().map(|it| it.id).collect::<Vec<_>>());
    }
}

#[test]
fn the_newest_proven_image_stays_whatever_the_rules_and_bounds_say() {
    let mut facts = facts(&[Good, Good, Good, Bad, Good, Good]);
    for n in [0, 1, 3] {
        facts[n].proof = Proof::Proven;
    }
    let plan = planned(&facts, &last(2));
    assert_eq!(removed(&plan), [1, 3], "not 2; that the bad one is proven does not count");
    assert_eq!(reasons(&plan)[1], "newest proven");
    let tight = Policy { max_total: Some(0), ..last(1) };
    let plan = super::plan(&facts, &tight, at(0), &each(&facts, 10), &NO_NEED);
    assert_eq!(removed(&plan), [1, 3, 4, 5]);
    // Until a newer one is.
    facts[4].proof = Proof::Proven;
    assert_eq!(removed(&planned(&facts, &last(1))), [1, 2, 3]);
}

#[test]
fn the_newest_rehearsed_or_restored_image_stays_for_none_that_is_neither() {
    let mut facts = facts(&[Good, Good, Good, Bad, Good, Good]);
    (facts[0].evidence, facts[1].evidence, facts[3].evidence) =
        (Evidence::Restored, Evidence::Rehearsed, Evidence::Restored);
    let plan = planned(&facts, &last(1));
    assert_eq!(removed(&plan), [1, 3, 5], "not 2; that the bad one was restored does not count");
    assert_eq!(reasons(&plan)[1], "newest that was rehearsed or restored");
    let tight = Policy { max_total: Some(0), ..last(1) };
    let plan = super::plan(&facts, &tight, at(0), &each(&facts, 10), &NO_NEED);
    assert_eq!(removed(&plan), [1, 3, 4, 5]);
    // Until a newer one is.
    facts[4].evidence = Evidence::Rehearsed;
    assert_eq!(removed(&planned(&facts, &last(1))), [1, 2, 3]);
    // Of the job's line, too.
    facts[4].line = Line::Other;
    assert_eq!(removed(&planned(&facts, &last(1))), [1, 3]);
}

#[test]
fn what_the_job_went_back_to_stays_though_newer_ones_are_there() {
    let mut facts = facts(&[Good, Good, Good, Good, Good]);
    // The job was rewound from 4 to 1, and 5 was taken since.
    facts.iter_mut().for_each(|it| it.proof = Proof::Proven);
    (facts[4].proof, facts[1].line, facts[2].line, facts[3].line) =
        (Proof::None, Line::Other, Line::Other, Line::Other);
    let plan = planned(&facts, &last(1));
    assert_eq!(removed(&plan), [2, 3]);
    assert_eq!(reasons(&plan)[0], "newest proven");
    // As long as it is the only one, no limit removes it.
    let before = &facts[..4];
    let tight = Policy { max_total: Some(0), ..last(1) };
    let plan = super::plan(before, &tight, at(0), &each(before, 10), &NO_NEED);
    assert_eq!(removed(&plan), [2, 3]);
    assert_eq!(reasons(&plan)[0], "newest since the rewind, newest proven");
}

#[test]
fn images_that_come_faster_than_they_are_proven_do_not_push_out_all_that_could_be() {
    let of = |n: usize| facts(&vec![Good; n]);
    let waiting: Vec<ImageId> = of(5).iter().map(|it| it.id).collect();
    let mut all = of(5);
    await_proof(&mut all, &waiting);
    let plan = planned(&all, &last(2));
    assert_eq!(removed(&plan), [2, 3], "the first is proven first");
    assert_eq!(reasons(&plan)[0], "next to become proven");
    // It is proven: the next one is the first that exists.
    let mut left = vec![all[0], all[3], all[4], fact(6, 0, Good)];
    left[0].proof = Proof::Proven;
    await_proof(&mut left, &waiting[1..]);
    assert_eq!(
        left.iter().map(|it| it.proof).collect::<Vec<_>>(),
        [Proof::Proven, Proof::Awaited, Proof::None, Proof::None]
    );
    // Another image is removed before it, and it is removed before there is no space.
    let tight = Policy { max_total: Some(40), ..last(9) };
    let admit =
        |all: &[Facts]| admission::admit(10, all, &tight, at(0), &each(all, 10), &NO_NEED, std::path::Path::new("/"));
    let gone = |admission| match admission {
        admission::Admission::AfterRemoving(gone) => gone.iter().map(|it| it.id.sequence()).collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    assert_eq!(gone(admit(&left)), [5]);
    left.remove(2);
    left[2].pin = Pin::Pinned;
    let tight = Policy { max_total: Some(30), ..tight };
    let admission = admission::admit(10, &left, &tight, at(0), &each(&left, 10), &NO_NEED, std::path::Path::new("/"));
    assert_eq!(gone(admission), [4]);
    // A bad image is not waited for.
    let mut bad = facts(&[Bad, Good]);
    await_proof(&mut bad, &waiting);
    assert_eq!(bad[1].proof, Proof::Awaited);
}

#[test]
fn a_second_is_not_a_day() {
    let facts = [fact(1, 16 * HOUR - 1, Good), fact(2, 16 * HOUR, Good)];
    assert_eq!((facts[1].taken - facts[0].taken), TimeDelta::seconds(1));
    assert_eq!(removed(&planned(&facts, &Policy { keep_daily: 2, ..last(1) })), [0_u32; 0], "midnight is between");
}

#[test]
fn parts_of_group_images_are_left_to_the_group() {
    let mut facts = facts(&[Good, Good, Bad, Good]);
    facts.iter_mut().for_each(|it| it.whole = Whole::Group);
    assert_eq!(removed(&planned(&facts, &last(1))), [0_u32; 0]);
    let bound = Policy { max_total: Some(0), ..last(1) };
    let plan = plan(&facts, &bound, at(0), &each(&facts, 10), &NO_NEED);
    assert_eq!(removed(&plan), [3], "one that is marked as bad is no use to the group");
    assert_eq!(reasons(&plan)[0], "part of a group image: the group removes it");
}
