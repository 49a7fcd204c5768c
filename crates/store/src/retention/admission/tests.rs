use super::super::tests::{any_images, any_policy, each, facts, is_firm, last, shared};
use super::*;
use crate::retention::FactKind::{Bad, Good};
use crate::retention::Pin;
use crate::tests::at;
use proptest::prelude::*;

fn room(free: u64, min_free: u64) -> Room {
    Room { free, pending: 0, min_free }
}

fn ask(need: u64, facts: &[Facts], policy: &Policy, sizes: &Sizes, room: Room) -> Admission {
    admit(need, facts, policy, at(0), sizes, &room, Path::new("/store"))
}

fn gone(admission: &Admission) -> Vec<u32> {
    let Admission::AfterRemoving(removals) = admission else { panic!("{admission:?}") };
    removals.iter().map(|removal| removal.id.sequence()).collect()
}

fn refusal(admission: Admission) -> String {
    let Admission::Refuse(refusal) = admission else { panic!("{admission:?}") };
    refusal.to_string()
}

#[test]
fn an_image_must_leave_min_free() {
    let none = Sizes::default();
    let ask = |need, free, keep| ask(need, &[], &last(3), &none, room(free, keep));
    assert_eq!(ask(10, 30, 20), Admission::Admit);
    assert!(matches!(ask(11, 30, 20), Admission::Refuse(Refusal::Disk { need: 11, free: 30, keep: 20, freed: 0, .. })));
    assert!(matches!(ask(u64::MAX, 30, 20), Admission::Refuse(Refusal::Disk { .. })));
    let said = refusal(ask(11, 30, 20));
    assert!(said.contains("no image may be removed for it") && said.contains("store.min-free"), "{said}");
}

/// An image that is written as plain files, and packed afterwards.
#[test]
fn an_image_may_take_more_at_first() {
    let facts = facts(&[Good, Good]);
    let sizes = each(&facts, 10);
    let need = Need { lasting: 5, at_first: 50 };
    let policy = Policy { max_total: Some(25), ..last(9) };
    let ask = |free| admit(need, &facts, &policy, at(0), &sizes, &room(free, 1), Path::new("/store"));
    assert_eq!(ask(51), Admission::Admit, "all together it is within the bound in the end");
    assert_eq!(gone(&ask(50)), [1]);
    assert!(matches!(ask(40), Admission::Refuse(Refusal::Disk { need: 50, .. })));
    let tight = Policy { max_total: Some(24), ..policy };
    let asked = admit(need, &facts, &tight, at(0), &sizes, &room(51, 1), Path::new("/store"));
    assert_eq!(gone(&asked), [1]);
}

#[test]
fn the_oldest_go_for_the_next_one() {
    let facts = facts(&[Good, Good, Bad, Good]);
    let sizes = each(&facts, 10);
    let ask = |free| ask(10, &facts, &last(9), &sizes, room(free, 5));
    assert_eq!(ask(15), Admission::Admit);
    assert_eq!(gone(&ask(14)), [3], "a bad one before any good one");
    assert_eq!(gone(&ask(4)), [3, 1]);
    assert_eq!(gone(&ask(0)), [3, 1]);
    let Admission::AfterRemoving(removals) = ask(14) else { panic!() };
    assert_eq!(removals[0].why.to_string(), "to free space for the next image (store.min-free)");
    let hopeless = Room { min_free: 36, ..room(0, 0) };
    let said = refusal(admit(10, &facts, &last(9), at(0), &sizes, &hopeless, Path::new("/store")));
    assert!(said.contains("would free only 30 B") && said.contains("/store"), "{said}");
}

#[test]
fn what_no_rule_keeps_goes_before_what_one_does() {
    let facts = facts(&[Good, Bad, Good, Bad, Good]);
    let sizes = each(&facts, 10);
    let ask = |free| ask(10, &facts, &last(2), &sizes, room(free, 0));
    assert_eq!(gone(&ask(5)), [1]);
    assert_eq!(gone(&ask(0)), [1]);
    let facts = super::super::tests::facts(&[Good, Good, Bad, Good]);
    let sizes = each(&facts, 10);
    assert_eq!(gone(&super::tests::ask(30, &facts, &last(2), &sizes, room(0, 0))), [1, 3, 2]);
}

#[test]
fn the_bound_of_all_images_holds_with_the_next_one() {
    let mut facts = facts(&[Good, Good, Good]);
    let sizes = each(&facts, 10);
    let ask = |facts: &[Facts], need, max| {
        ask(need, facts, &Policy { max_total: Some(max), ..last(9) }, &sizes, room(1000, 0))
    };
    assert_eq!(ask(&facts, 10, 40), Admission::Admit);
    assert_eq!(gone(&ask(&facts, 10, 39)), [1]);
    assert_eq!(gone(&ask(&facts, 10, 20)), [1, 2]);
    let Admission::AfterRemoving(removals) = ask(&facts, 10, 39) else { panic!() };
    assert_eq!(removals[0].why, Why::MaxTotal);
    let said = refusal(ask(&facts, 10, 19));
    assert!(said.contains("store.max-total-size (19 B)") && said.contains("raise it to 20 B or more"), "{said}");
    facts[0].pin = Pin::Pinned;
    assert_eq!(gone(&ask(&facts, 10, 39)), [2]);
    assert!(refusal(ask(&facts, 10, 29)).contains("rekindle pin --remove"));
}

#[test]
fn what_comes_free_by_itself_costs_no_image() {
    let facts = facts(&[Good, Good]);
    let pending = Room { pending: 10, ..room(5, 5) };
    let answer = ask(10, &facts, &last(9), &each(&facts, 10), pending);
    assert_eq!(answer, Admission::AfterRemoving(Vec::new()), "not there yet, and nothing has to go");
}

#[test]
fn the_next_image_is_like_the_last() {
    assert_eq!(predict(1000, None), 1000);
    assert_eq!(predict(1000, Some(100)), 125);
    assert_eq!(predict(1000, Some(900)), 1000, "never more than the whole");
    assert_eq!(predict(u64::MAX, Some(u64::MAX)), u64::MAX);
}

proptest! {
    #[test]
    fn an_answer_keeps_its_word(
        (facts, pieces) in any_images(),
        policy in any_policy(),
        need in 0_u64..600,
        free in 0_u64..900,
        pending in 0_u64..100,
        min_free in 0_u64..300,
    ) {
        let (room, sizes) = (Room { free, pending, min_free }, shared(&pieces));
        let fits = |gone: &[ImageId]| {
            let freed = sizes.freed(gone);
            policy.max_total.is_none_or(|max| sizes.total() - freed + need <= max)
                && need + min_free <= free + pending + freed
        };
        let may_go: Vec<ImageId> = facts.iter().filter(|it| !is_firm(it, &facts)).map(|it| it.id).collect();
        match ask(need, &facts, &policy, &sizes, room) {
            Admission::Admit => prop_assert!(fits(&[]) && need + min_free <= free),
            Admission::AfterRemoving(removals) => {
                let gone: Vec<ImageId> = removals.iter().map(|it| it.id).collect();
                prop_assert!(fits(&gone));
                prop_assert!(gone.iter().all(|id| may_go.contains(id)));
                // And no more than necessary.
                if let Some((_, fewer)) = gone.split_last() {
                    prop_assert!(!fits(fewer));
                }
            }
            Admission::Refuse(refusal) => {
                prop_assert!(!fits(&may_go));
                prop_assert!(refusal.to_string().contains("store."));
            }
        }
    }
}
