use super::*;

const ALL: [Type; 6] = [
    Type::WriteExclusive,
    Type::ExclusiveAccess,
    Type::WriteExclusiveRegistrantsOnly,
    Type::ExclusiveAccessRegistrantsOnly,
    Type::WriteExclusiveAllRegistrants,
    Type::ExclusiveAccessAllRegistrants,
];

fn names() -> [NexusName; 3] {
    ["a", "b", "c"].map(Arc::from)
}

/// a and b are registered with the keys 1 and 2, c is not; a has reserved.
fn held(kind: Type) -> (Reservations, [NexusName; 3]) {
    let [a, b, c] = names();
    let mut r = Reservations::default();
    r.register(&a, Some(0), 1, false).unwrap();
    r.register(&b, Some(0), 2, false).unwrap();
    r.reserve(&a, 1, kind).unwrap();
    (r, [a, b, c])
}

#[test]
fn spc4_5_13_1_who_may_do_what() {
    use Access::{Full, Nothing, Read};
    let expected = [
        (Full, Read, Read),
        (Full, Nothing, Nothing),
        (Full, Full, Read),
        (Full, Full, Nothing),
        (Full, Full, Read),
        (Full, Full, Nothing),
    ];
    for (kind, (holder, registrant, stranger)) in ALL.into_iter().zip(expected) {
        let (r, [a, b, c]) = held(kind);
        assert_eq!([r.access(&a), r.access(&b), r.access(&c)], [holder, registrant, stranger]);
        assert_eq!(r.is_held_by(&b), kind.is_of_all());
    }
    let [a, ..] = names();
    assert_eq!(Reservations::default().access(&a), Full);
}

#[test]
fn spc4_5_13_7_a_registration_is_changed_with_its_key_only() {
    let [a, b, _] = names();
    let mut r = Reservations::default();
    assert_eq!(r.register(&a, Some(5), 1, false), Err(Refusal::Conflict));
    r.register(&a, Some(0), 0, false).unwrap();
    assert_eq!((r.generation, r.registrants.len()), (0, 0), "nothing was registered");
    r.register(&a, Some(0), 1, true).unwrap();
    assert_eq!((r.generation, r.key_of(&a), r.persist), (1, Some(1), true));
    assert_eq!(r.register(&a, Some(0), 2, false), Err(Refusal::Conflict));
    r.register(&a, Some(1), 2, false).unwrap();
    assert_eq!((r.generation, r.key_of(&a), r.persist), (2, Some(2), false));
    r.register(&a, None, 3, false).unwrap();
    r.register(&b, None, 3, false).unwrap();
    assert_eq!((r.generation, r.key_of(&a), r.key_of(&b)), (4, Some(3), Some(3)));
    r.register(&a, Some(3), 0, false).unwrap();
    assert_eq!((r.generation, r.key_of(&a)), (5, None));
    for n in 0..MAX_REGISTRANTS - 1 {
        r.register(&n.to_string().into(), Some(0), 9, false).unwrap();
    }
    assert_eq!(r.register(&a, Some(0), 1, false), Err(Refusal::Full));
}

#[test]
fn spc4_5_13_11_3_who_leaves_takes_his_reservation_with_him() {
    for kind in ALL {
        let (mut r, [a, b, c]) = held(kind);
        let changed = r.register(&a, Some(1), 0, false).unwrap();
        let registrants_only = matches!(
            kind,
            Type::WriteExclusiveRegistrantsOnly | Type::ExclusiveAccessRegistrantsOnly
        );
        let told =
            if registrants_only { vec![(b.clone(), Told::ReservationsReleased)] } else { vec![] };
        assert_eq!(changed.told, told, "{kind:?}");
        // All registrants hold one of all; the last one's end is its end.
        assert_eq!(r.held.is_some(), kind.is_of_all());
        r.register(&b, Some(2), 0, false).unwrap();
        assert_eq!((r.held.clone(), r.access(&c)), (None, Access::Full));
    }
}

#[test]
fn spc4_5_13_9_and_11_2_reserve_and_release() {
    for kind in ALL {
        let (mut r, [a, b, c]) = held(kind);
        r.reserve(&a, 1, kind).unwrap();
        assert_eq!(r.reserve(&c, 0, kind), Err(Refusal::Conflict));
        assert_eq!(r.reserve(&a, 2, kind), Err(Refusal::Conflict));
        let other = if kind == Type::WriteExclusive { ALL[1] } else { ALL[0] };
        assert_eq!(r.reserve(&a, 1, other), Err(Refusal::Conflict));
        let again = r.reserve(&b, 2, kind);
        assert_eq!(
            again,
            if kind.is_of_all() { Ok(Changed::default()) } else { Err(Refusal::Conflict) }
        );

        assert_eq!(r.release(&a, 9, kind), Err(Refusal::Conflict));
        assert_eq!(r.release(&a, 1, other), Err(Refusal::Release));
        if !kind.is_of_all() {
            r.release(&b, 2, kind).unwrap();
            assert!(r.held.is_some(), "it is not his");
        }
        let generation = r.generation;
        let changed = r.release(&a, 1, kind).unwrap();
        let told =
            if kind.lets_registrants() { vec![(b, Told::ReservationsReleased)] } else { vec![] };
        assert_eq!((changed.told, r.held.clone()), (told, None));
        assert_eq!(r.generation, generation);
        assert_eq!(r.release(&a, 1, kind), Ok(Changed::default()));
    }
}

#[test]
fn spc4_5_13_11_4_preempt_takes_registration_and_reservation() {
    for kind in ALL {
        let (mut r, [a, b, _]) = held(kind);
        let new = Type::ExclusiveAccess;
        let of = if kind.is_of_all() { 0 } else { 1 };
        assert_eq!(r.preempt(&b, 1, of, new), Err(Refusal::Conflict));
        let changed = r.preempt(&b, 2, of, new).unwrap();
        assert_eq!(changed.told, [(a.clone(), Told::RegistrationsPreempted)]);
        assert_eq!(changed.preempted, std::slice::from_ref(&a));
        assert_eq!(r.held, Some(Held { by: b.clone(), kind: new }));
        assert_eq!((r.access(&a), r.access(&b), r.generation), (Access::Nothing, Access::Full, 3));
    }
    // Of one that has nothing reserved, its registration alone.
    let (mut r, [a, b, _]) = held(Type::WriteExclusive);
    let changed = r.preempt(&a, 1, 2, Type::ExclusiveAccess).unwrap();
    assert_eq!(changed.preempted, [b]);
    assert_eq!(r.held, Some(Held { by: a.clone(), kind: Type::WriteExclusive }));
    assert_eq!(r.preempt(&a, 1, 2, Type::WriteExclusive), Err(Refusal::Conflict));
    assert_eq!(r.preempt(&a, 1, 0, Type::WriteExclusive), Err(Refusal::ActionKey));
    // One's own: the type changes.
    r.preempt(&a, 1, 1, Type::ExclusiveAccess).unwrap();
    assert_eq!(r.held.unwrap().kind, Type::ExclusiveAccess);
    assert_eq!(r.registrants.len(), 1);
}

#[test]
fn spc4_5_13_11_4_who_stays_is_told_of_another_type() {
    let (mut r, [a, b, c]) = held(Type::WriteExclusiveRegistrantsOnly);
    r.register(&c, Some(0), 3, false).unwrap();
    let changed = r.preempt(&b, 2, 1, Type::WriteExclusive).unwrap();
    let told = [(a, Told::RegistrationsPreempted), (c, Told::ReservationsReleased)];
    assert_eq!(changed.told, told);
}

#[test]
fn spc4_5_13_11_6_clear_ends_everything() {
    let (mut r, [a, b, c]) = held(Type::ExclusiveAccess);
    assert_eq!(r.clear(&c, 0), Err(Refusal::Conflict));
    let changed = r.clear(&b, 2).unwrap();
    assert_eq!(changed.told, [(a, Told::ReservationsPreempted)]);
    assert_eq!((r.registrants.len(), r.held.clone(), r.generation), (0, None, 3));
}

#[test]
fn spc4_5_13_8_register_and_move_hands_the_reservation_over() {
    for ends in [false, true] {
        let (mut r, [a, b, c]) = held(Type::WriteExclusive);
        assert_eq!(r.hand_over(&b, 2, &c, 7, ends), Err(Refusal::Conflict));
        assert_eq!(r.hand_over(&a, 1, &c, 0, ends), Err(Refusal::ActionKey));
        r.hand_over(&a, 1, &c, 7, ends).unwrap();
        assert_eq!((r.is_held_by(&c), r.key_of(&c)), (true, Some(7)));
        assert_eq!((r.key_of(&a), r.access(&a)), ((!ends).then_some(1), Access::Read));
    }
    let (mut r, [a, _, c]) = held(Type::WriteExclusiveAllRegistrants);
    assert_eq!(r.hand_over(&a, 1, &c, 7, false), Err(Refusal::Conflict));
}

#[test]
fn spc2_7_21_reserve_6_is_of_one_until_a_reset() {
    let [a, b, _] = names();
    let mut r = Reservations::default();
    r.reserve_unit(&a).unwrap();
    r.reserve_unit(&a).unwrap();
    assert_eq!(r.reserve_unit(&b), Err(Refusal::Conflict));
    assert_eq!((r.access(&a), r.access(&b)), (Access::Full, Access::Reserved));
    r.release_unit(&b).unwrap();
    assert_eq!(r.access(&b), Access::Reserved);
    r.forget_reserved(Some(&b));
    assert_eq!(r.access(&b), Access::Reserved);
    r.forget_reserved(None);
    r.reserve_unit(&b).unwrap();
    r.release_unit(&b).unwrap();
    r.register(&a, Some(0), 1, false).unwrap();
    assert_eq!(r.reserve_unit(&a), Err(Refusal::Conflict));
    assert_eq!(r.release_unit(&a), Err(Refusal::Conflict));
}
