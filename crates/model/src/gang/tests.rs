use proptest::prelude::*;

use super::*;

#[test]
fn a_member_s_name_is_nobody_else_s() {
    assert_eq!(of_member("sort-0001-n12"), Some(("sort-0001", 12)));
    assert_eq!(of_member("a~sort-12345-n0"), Some(("a~sort-12345", 0)));
    for other in
        ["sort-0001", "sort-n1", "sort-001-n1", "sort-0001-n", "sort-0001-n01", "n1", "0001-n1"]
    {
        assert_eq!(of_member(other), None, "{other}");
    }
    let gang = JobId::new("sort-0001").unwrap();
    assert_eq!(of_member(member_of(&gang, 7).as_str()), Some(("sort-0001", 7)));
}

#[test]
fn a_lost_member_that_has_nothing_left_to_do_undoes_nothing() {
    let begun = GangState { made: true, begun: true, ..GangState::default() };
    let released = GangState { released: true, ..begun };
    let of = |gang, seen: &[Seen]| next(gang, true, EndRequest::default(), seen);
    for lost in [Seen::IsLost, Seen::Lost] {
        assert_eq!(of(begun, &[Seen::Done, Seen::Runs, lost]), Next::Release);
        assert_eq!(of(released, &[Seen::Done, Seen::Done, lost]), Next::Wait);
    }
    assert_eq!(of(released, &[Seen::Succeeded, Seen::Succeeded, Seen::IsLost]), Next::Wait);
    assert_eq!(of(released, &[Seen::Succeeded, Seen::Succeeded, Seen::Lost]), Next::Succeed);
    // The first one's outputs are gone with its host.
    let lost = Next::Judge(Verdict::Lost, Some(0));
    assert_eq!(of(released, &[Seen::IsLost, Seen::Succeeded, Seen::Lost]), lost);
    let failed = Next::Judge(Verdict::Failed, Some(1));
    assert_eq!(of(released, &[Seen::Succeeded, Seen::Failed, Seen::Lost]), failed);
    let without_mpi = next(released, false, EndRequest::default(), &[Seen::Succeeded, Seen::Lost]);
    assert_eq!(without_mpi, Next::Judge(Verdict::Lost, Some(1)));
}

#[test]
fn a_member_that_began_before_all_were_ready_fails() {
    let made = GangState { made: true, ..GangState::default() };
    for early in [Seen::Runs, Seen::Done, Seen::Succeeded] {
        let decided =
            next(made, false, EndRequest::default(), &[Seen::Ready, early, Seen::ComesUp]);
        assert_eq!(decided, Next::Judge(Verdict::Failed, Some(1)));
    }
}

/// A member's life, one step at a time.
#[derive(Debug, Clone, Copy)]
struct Life {
    seen: Seen,
    exit: Exit,
    /// It has no command.
    serves: bool,
}

/// How a member's command ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Exit {
    Well,
    Badly,
    /// Its host is lost, at any moment.
    Lost,
    /// Its host is lost while its outputs are fetched.
    LostLate,
    /// It has no command, and is there until it is released.
    Serves,
}

impl Life {
    fn step(&mut self, gang: GangState, is_told: bool) {
        self.seen = match self.seen {
            seen if seen.is_over() => seen,
            Seen::Missing => Seen::Missing,
            Seen::ComesUp | Seen::Ready | Seen::Runs if self.exit == Exit::Lost => Seen::IsLost,
            Seen::Done if self.exit == Exit::LostLate => Seen::IsLost,
            Seen::ComesUp | Seen::Ready | Seen::Runs | Seen::Done if is_told => Seen::Cancelled,
            Seen::ComesUp => Seen::Ready,
            Seen::Ready if gang.begun => Seen::Runs,
            Seen::Runs => match self.exit {
                Exit::Badly => Seen::Fails,
                Exit::Serves if !gang.released => Seen::Runs,
                Exit::LostLate if self.serves && !gang.released => Seen::Runs,
                Exit::Well | Exit::Serves | Exit::Lost | Exit::LostLate => Seen::Done,
            },
            Seen::Done => Seen::Succeeded,
            Seen::Fails => Seen::Failed,
            Seen::IsLost => Seen::Lost,
            seen => seen,
        };
    }
}

fn exits() -> impl Strategy<Value = Vec<Exit>> {
    let one = prop_oneof![
        8 => Just(Exit::Well),
        1 => Just(Exit::Badly),
        1 => Just(Exit::Lost),
        1 => Just(Exit::LostLate),
    ];
    proptest::collection::vec(one, 1..6)
}

proptest! {
    /// Members and their gang take steps in any order. All end as one, and none is left.
    #[test]
    fn a_gang_starts_and_ends_as_one(
        exits in exits(),
        mpi in any::<bool>(),
        turns in proptest::collection::vec(0_usize..7, 0..400),
        cancel_at in proptest::option::of(0_usize..400),
        now in any::<bool>(),
    ) {
        let new = |(rank, exit): (usize, &Exit)| {
            let exit = if mpi && rank > 0 && *exit == Exit::Well { Exit::Serves } else { *exit };
            Life { seen: Seen::Missing, exit, serves: mpi && rank > 0 }
        };
        let mut lives: Vec<Life> = exits.iter().enumerate().map(new).collect();
        let (mut gang, mut told, mut request) = (GangState::default(), false, EndRequest::default());
        let (mut runs, mut ended) = (1, None);
        // Then everybody takes turns, so all that can end does.
        let fair = (0..2000).map(|turn| turn % 7);
        for (at, turn) in turns.into_iter().chain(fair).enumerate() {
            if cancel_at == Some(at) {
                request = EndRequest { cancel: true, now };
            }
            if turn > 0 {
                if let Some(life) = lives.get_mut(turn - 1) {
                    life.step(gang, told);
                }
                continue;
            }
            let seen: Vec<Seen> = lives.iter().map(|life| life.seen).collect();
            match next(gang, mpi, request, &seen) {
                Next::Make => {
                    prop_assert!(gang.verdict.is_none());
                    lives.iter_mut().for_each(|life| if life.seen == Seen::Missing { life.seen = Seen::ComesUp });
                    gang.made = true;
                }
                Next::Begin => {
                    prop_assert!(seen.iter().all(|seen| *seen == Seen::Ready), "{seen:?}");
                    gang.begun = true;
                }
                Next::Release => {
                    prop_assert!(mpi && matches!(seen[0], Seen::Done | Seen::Succeeded));
                    gang.released = true;
                }
                Next::Judge(verdict, _) => {
                    prop_assert!(gang.verdict != Some(verdict), "it is judged once");
                    prop_assert!(!matches!((gang.verdict, verdict), (Some(_), Verdict::Failed | Verdict::Lost)));
                    gang.verdict = Some(verdict);
                }
                Next::EndMembers => told = true,
                Next::Succeed => {
                    let is_well = |(life, seen): (&Life, &Seen)| {
                        *seen == Seen::Succeeded || (life.serves && *seen == Seen::Lost)
                    };
                    prop_assert!(lives.iter().zip(&seen).all(is_well), "{seen:?}");
                    ended = Some(None);
                    break;
                }
                Next::End(verdict) => {
                    prop_assert!(seen.iter().all(|seen| seen.is_over() || *seen == Seen::Missing), "{seen:?}");
                    ended = Some(Some(verdict));
                    break;
                }
                Next::StartAgain => {
                    prop_assert!(!request.cancel, "nothing starts again that is cancelled");
                    prop_assert!(seen.iter().all(|seen| seen.is_over() || *seen == Seen::Missing));
                    runs += 1;
                    let again = |exit| match exit {
                        &Exit::Lost | &Exit::LostLate => &Exit::Well,
                        exit => exit,
                    };
                    lives = exits.iter().map(again).enumerate().map(new).collect();
                    (gang, told) = (GangState::default(), false);
                }
                Next::Wait => {}
            }
        }
        let ended = ended.expect("a gang does not wait for ever");
        prop_assert!(runs <= 2);
        match ended {
            None => prop_assert!(!exits.contains(&Exit::Badly)),
            Some(Verdict::Failed) => prop_assert!(exits.contains(&Exit::Badly)),
            Some(Verdict::Cancelled { .. }) => prop_assert!(request.cancel),
            Some(Verdict::Lost) => prop_assert!(false, "it starts again"),
        }
    }
}
