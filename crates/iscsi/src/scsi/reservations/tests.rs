use super::super::command::Range;
use super::*;

fn port(name: &str) -> Port {
    Port(name.into())
}

fn out(action: u8, kind: u8, key: u64, action_key: u64) -> Out {
    Out { action, scope_type: kind, key, action_key, kept: false }
}

fn read() -> Command {
    Command::Read { range: Range { offset: 0, length_bytes: 512 }, fua: false }
}

fn write() -> Command {
    Command::Write { range: Range { offset: 0, length_bytes: 512 }, fua: false }
}

/// `a` and `b` are registered with keys 1 and 2, and `a` has reserved.
fn reserved(kind: u8) -> Reservations {
    let mut state = Reservations::default();
    for (name, key) in [("a", 1), ("b", 2)] {
        state.change(&port(name), &out(0, 0, 0, key)).expect("a registration");
    }
    state.change(&port("a"), &out(1, kind, 1, 0)).expect("a reservation");
    state
}

#[test]
fn each_kind_lets_others_do_what_it_says() {
    for (kind, registered, unknown) in [
        (1, (true, false), (true, false)),
        (3, (false, false), (false, false)),
        (5, (true, true), (true, false)),
        (6, (true, true), (false, false)),
        (7, (true, true), (true, false)),
        (8, (true, true), (false, false)),
    ] {
        let state = reserved(kind);
        let may = |name| (state.allows(&port(name), &read()), state.allows(&port(name), &write()));
        assert_eq!(may("a"), (true, true), "kind {kind}");
        assert_eq!(may("b"), registered, "kind {kind}");
        assert_eq!(may("c"), unknown, "kind {kind}");
    }
}

#[test]
fn only_the_right_key_changes_anything() {
    let mut state = reserved(1);
    let before = state.clone();
    for wrong in
        [out(0, 0, 7, 9), out(1, 1, 7, 0), out(2, 1, 7, 0), out(3, 0, 7, 0), out(4, 1, 7, 1)]
    {
        assert_eq!(state.change(&port("b"), &wrong), Err(Outcome::Conflict));
    }
    assert_eq!(state.change(&port("c"), &out(1, 1, 0, 0)), Err(Outcome::Conflict));
    assert_eq!(state, before);
}

#[test]
fn a_reservation_ends_with_its_holder_s_registration() {
    let mut state = reserved(5);
    let effects = state.change(&port("a"), &out(0, 0, 1, 0)).expect("it goes");
    assert_eq!(effects.attentions, [(port("b"), 0x2a04)]);
    assert!(state.allows(&port("c"), &write()));
}

#[test]
fn a_reservation_that_all_hold_ends_with_the_last_one() {
    let mut state = reserved(8);
    state.change(&port("a"), &out(0, 0, 1, 0)).expect("it goes");
    assert!(!state.allows(&port("c"), &read()) && state.allows(&port("b"), &write()));
    state.change(&port("b"), &out(0, 0, 2, 0)).expect("it goes");
    assert!(state.allows(&port("c"), &read()) && state.is_empty());
}

#[test]
fn preempting_the_holder_takes_over() {
    let mut state = reserved(3);
    let effects = state.change(&port("b"), &out(5, 1, 2, 1)).expect("it is preempted");
    assert_eq!(effects.attentions, [(port("a"), 0x2a05)]);
    assert_eq!(effects.aborted, [port("a")]);
    assert!(state.allows(&port("b"), &write()) && !state.allows(&port("a"), &write()));
    assert!(state.allows(&port("a"), &read()), "the new kind is write exclusive");
    assert_eq!(state.key_of(&port("a")), None);
}

#[test]
fn preempting_another_leaves_the_reservation() {
    let mut state = reserved(1);
    state.change(&port("a"), &out(4, 1, 1, 2)).expect("it is preempted");
    assert_eq!(state.key_of(&port("b")), None);
    assert!(state.allows(&port("a"), &write()) && !state.allows(&port("b"), &write()));
    assert_eq!(state.change(&port("a"), &out(4, 1, 1, 9)), Err(Outcome::Conflict));
}

#[test]
fn clear_takes_everything() {
    let mut state = reserved(1);
    let effects = state.change(&port("b"), &out(3, 0, 2, 0)).expect("all is cleared");
    assert_eq!(effects.attentions, [(port("a"), 0x2a03)]);
    assert!(state.is_empty());
}

#[test]
fn a_release_of_another_kind_is_refused() {
    let mut state = reserved(1);
    let refused = state.change(&port("a"), &out(2, 3, 1, 0));
    assert_eq!(refused, Err(Outcome::Check(Sense::INVALID_RELEASE)));
    state.change(&port("b"), &out(2, 1, 2, 0)).expect("nothing to release is no fault");
    assert!(!state.allows(&port("b"), &write()));
}

#[test]
fn the_old_way_and_the_new_way_exclude_each_other() {
    let mut state = Reservations::default();
    assert_eq!(state.reserve(&port("a")), Outcome::DONE);
    assert_eq!(state.reserve(&port("b")), Outcome::Conflict);
    assert!(!state.allows(&port("b"), &Command::TestUnitReady));
    assert_eq!(state.change(&port("b"), &out(0, 0, 0, 5)), Err(Outcome::Conflict));
    state.release(&port("b"));
    assert!(!state.allows(&port("b"), &read()));
    state.release(&port("a"));
    assert_eq!(reserved(1).reserve(&port("a")), Outcome::Conflict);
}

#[test]
fn what_is_kept_is_what_was_there() {
    let state = reserved(6);
    let text = serde_json::to_string(&state).expect("JSON");
    assert_eq!(serde_json::from_str::<Reservations>(&text).expect("the same"), state);
}

#[test]
fn reports_say_keys_holder_and_names() {
    let state = reserved(1);
    let data = |action| match state.report(action, 1000) {
        Outcome::Good(data) => data.to_vec(),
        other => panic!("{other:?}"),
    };
    assert_eq!(data(0)[..8], [0, 0, 0, 2, 0, 0, 0, 16]);
    assert_eq!(data(1)[4..], [0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0]);
    let full = data(3);
    assert_eq!(usize::from(full[7]) + 8, full.len());
    assert_eq!((full[8 + 12], full[8 + 13], full[8 + 24]), (1, 1, 0x45));
    assert_eq!(state.report(4, 1000), Outcome::Check(Sense::invalid_field(1)));
}
