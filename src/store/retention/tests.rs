use super::*;
use crate::store::tests::at;
use FactKind::{Bad, Good, Unknown};
use proptest::prelude::*;

fn facts(kinds: &[FactKind]) -> Vec<Facts> {
    (1..).zip(kinds).map(|(n, kind)| Facts { id: ImageId::new(n, at(0)), kind: *kind }).collect()
}

/// The reasons, oldest image first.
fn reasons(kinds: &[FactKind], keep_last: u32) -> Vec<String> {
    let plan = plan(&facts(kinds), &Policy { keep_last });
    plan.decisions.iter().rev().map(|it| it.verdict.to_string()).collect()
}

#[test]
fn reasons_read_well() {
    assert_eq!(
        reasons(&[Good, Bad, Good, Unknown, Bad, Good, Good, Bad], 2),
        [
            "older than the last 2",
            "bad, older than the last 2 bad ones",
            "older than the last 2",
            "can not be read here, so it is not touched",
            "bad, one of the last 2 bad ones",
            "one of the last 2",
            "newest good",
            "bad, one of the last 2 bad ones",
        ]
    );
}

#[test]
fn without_a_good_image_all_stay() {
    assert_eq!(reasons(&[Bad, Bad, Bad], 1), ["there is no good image"; 3]);
}

#[test]
fn the_oldest_goes_first() {
    let plan = plan(&facts(&[Good; 4]), &Policy { keep_last: 1 });
    let removed: Vec<u32> = plan.removals().map(|id| id.sequence()).collect();
    assert_eq!(removed, [1, 2, 3]);
}

fn any_facts() -> impl Strategy<Value = Vec<Facts>> {
    let kind = prop_oneof![3 => Just(Good), 2 => Just(Bad), 1 => Just(Unknown)];
    // A clock that jumps about, and an order that is none.
    let one = (kind, -100_000_i64..100_000);
    let all = prop::collection::vec(one, 0..30).prop_map(|all| {
        let ids = (1..).zip(all);
        ids.map(|(n, (kind, clock))| Facts { id: ImageId::new(n, at(clock)), kind }).collect::<Vec<_>>()
    });
    all.prop_shuffle()
}

proptest! {
    #[test]
    fn invariants(facts in any_facts(), keep_last in 0_u32..6) {
        let plan = plan(&facts, &Policy { keep_last });
        let removed: Vec<ImageId> = plan.removals().collect();
        let kept = |kind| {
            let mut ids: Vec<_> =
                facts.iter().filter(|it| it.kind == kind && !removed.contains(&it.id)).map(|it| it.id).collect();
            ids.sort();
            ids
        };
        let all = |kind| facts.iter().filter(|it| it.kind == kind).count();
        let limit = usize::try_from(keep_last.max(1)).unwrap();

        // Each has one decision, newest first.
        prop_assert_eq!(plan.decisions.len(), facts.len());
        prop_assert!(plan.decisions.is_sorted_by(|a, b| a.id > b.id));
        // The newest good one stays, and as many as were asked for.
        let newest = facts.iter().filter(|it| it.kind == Good).map(|it| it.id).max();
        prop_assert_eq!(kept(Good).last().copied(), newest);
        prop_assert_eq!(kept(Good).len(), all(Good).min(limit));
        // What goes is older than what stays of its kind.
        for kind in [Good, Bad] {
            let gone = facts.iter().filter(|it| it.kind == kind && removed.contains(&it.id)).map(|it| it.id).max();
            if let (Some(gone), Some(oldest)) = (gone, kept(kind).first()) {
                prop_assert!(gone < *oldest);
            }
        }
        // What is not known stays; bad ones are bounded only when there is something good.
        prop_assert_eq!(kept(Unknown).len(), all(Unknown));
        let bad = if newest.is_some() { all(Bad).min(limit) } else { all(Bad) };
        prop_assert_eq!(kept(Bad).len(), bad);
    }

    #[test]
    fn planning_again_after_removing_removes_nothing(facts in any_facts(), keep_last in 0_u32..6) {
        let removed: Vec<ImageId> = plan(&facts, &Policy { keep_last }).removals().collect();
        let left: Vec<Facts> = facts.into_iter().filter(|it| !removed.contains(&it.id)).collect();
        prop_assert_eq!(plan(&left, &Policy { keep_last }).removals().count(), 0);
    }
}
