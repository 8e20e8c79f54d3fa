//! What one server decides about a volume's home: pure functions, which the store runs inside the
//! transactions of its catalog.
//!
//! ```text
//! not here --take--> here --depart--> departed --forget--> not here
//!    |               | ^                 |
//!    '--refuse       | '------return-----'   (the tenure that was offered is spent)
//!                    '--delete--> not here
//! not here --promote--> here                (a new incarnation; a replica becomes the volume)
//! here --supersede--> not here              (of the incarnation before; at the home that was lost)
//! ```
//!
//! There is one head at most, because each tenure begins at one server only: the old home gives the next
//! tenure to one server, durably and before that server hears of it; and it takes the volume back only
//! after that server has refused the tenure, durably and for good. A server that had the volume in that tenure, and
//! on which the volume was deleted, has not refused the tenure: the volume does not come back.

use super::{ServerAddresses, Tenure};

/// What one server has of one volume. `A` is how servers are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Residence<A = ServerAddresses> {
    /// Whether the volume is here.
    pub place: Place<A>,
    /// No tenure up to this one begins here any more: it did, or was refused.
    pub spent: Tenure,
    /// The highest tenure that began here.
    pub had: Tenure,
}

/// Whether a volume is at a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place<A = ServerAddresses> {
    /// It is not, and nothing of it is kept for another server.
    NotHere,
    /// It is.
    Here(Tenure),
    /// It was, and its layers are kept.
    Departed {
        /// The tenure at the server that it went to.
        tenure: Tenure,
        /// The server that it went to.
        to: A,
    },
}

/// Why a server does not do what it is asked to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HomeRefused<A: std::fmt::Debug = ServerAddresses> {
    /// The request is of another move than the one that is due.
    #[error("it is here with tenure {here}, and the request is about tenure {asked}")]
    OtherTenure {
        /// The present one.
        here: Tenure,
        /// The one in the request.
        asked: Tenure,
    },
    /// The server can't let go what it does not have.
    #[error("the volume is not here")]
    NotHere,
    /// It was given to somebody else in this tenure, or has been at other homes since.
    #[error("it departed with tenure {tenure} to {to:?}")]
    Departed {
        /// The tenure at the other home.
        tenure: Tenure,
        /// The other home.
        to: A,
    },
    /// The tenure was refused here, or is over.
    #[error("tenure {asked} was refused here or is over; tenures up to {spent} are")]
    Spent {
        /// The one that would begin.
        asked: Tenure,
        /// The highest that is.
        spent: Tenure,
    },
    /// The numbers of this volume have come to their end.
    #[error("it has moved as often as a volume can")]
    NoMoreTenures,
}

/// What to store; `None` when the request was already carried out.
type Decided<A> = Result<Option<Residence<A>>, HomeRefused<A>>;

impl<A: Clone + PartialEq + std::fmt::Debug> Residence<A> {
    /// Nothing is known of the volume.
    pub fn unknown() -> Self {
        Self { place: Place::NotHere, spent: Tenure(0), had: Tenure(0) }
    }

    /// A volume that is here.
    pub fn here(tenure: Tenure) -> Self {
        Self { place: Place::Here(tenure), spent: tenure, had: tenure }
    }

    /// The volume goes to another server. After a repeated request it has departed already.
    ///
    /// # Errors
    /// Unless the volume is here with this tenure, or went to that server in it.
    pub fn depart(&self, tenure: Tenure, to: &A) -> Decided<A> {
        match &self.place {
            Place::Here(here) if *here == tenure => {
                // A return may need the one after the next.
                if tenure.next().next().incarnation() != tenure.incarnation() {
                    return Err(HomeRefused::NoMoreTenures);
                }
                let (next, to) = (tenure.next(), to.clone());
                let place = Place::Departed { tenure: next, to };
                Ok(Some(Self { place, spent: self.spent.max(next), had: tenure }))
            }
            Place::Here(here) => Err(HomeRefused::OtherTenure { here: *here, asked: tenure }),
            Place::Departed { tenure: at, to: there }
                if *at == tenure.next() && there == to && self.spent == *at =>
            {
                Ok(None)
            }
            Place::Departed { tenure, to } => {
                Err(HomeRefused::Departed { tenure: *tenure, to: to.clone() })
            }
            Place::NotHere => Err(HomeRefused::NotHere),
        }
    }

    /// The server becomes the home, in the tenure after this one of the old home. Asked before the old
    /// home lets go, and again, inside the transaction, when it has.
    ///
    /// # Errors
    /// When the tenure was refused here or is over, or the volume is here with an earlier one.
    pub fn take(&self, tenure: Tenure) -> Decided<A> {
        let next = tenure.next();
        match &self.place {
            Place::Here(here) if *here >= next => Ok(None),
            Place::Here(here) => Err(HomeRefused::OtherTenure { here: *here, asked: tenure }),
            _ if next <= self.spent => Err(HomeRefused::Spent { asked: next, spent: self.spent }),
            _ => Ok(Some(Self::here(next))),
        }
    }

    /// The server never becomes the home in the tenure after this one. Where it has already, it stays it:
    /// then the answer says so, and the old home must not take the volume back.
    pub fn refuse(&self, tenure: Tenure) -> Option<Self> {
        let is_news = self.had < tenure.next() && self.spent < tenure.next();
        is_news.then(|| Self { spent: tenure.next(), ..self.clone() })
    }

    /// Whether the tenure after this one can't begin here any more, and never did. Then its old home may
    /// take the volume back.
    pub fn has_refused(&self, tenure: Tenure) -> bool {
        self.had < tenure.next() && self.spent >= tenure.next()
    }

    /// The volume is here again, after the other server has refused the next tenure. Where it never left,
    /// it can't leave in that tenure any more.
    ///
    /// # Errors
    /// When the volume did not leave in that tenure, or has been elsewhere since.
    pub fn take_back(&self, tenure: Tenure) -> Decided<A> {
        let offered = tenure.next();
        match &self.place {
            Place::Here(here) if *here > offered => Ok(None),
            Place::Here(here) if *here == tenure => Ok(Some(Self::here(offered.next()))),
            Place::Here(here) => Err(HomeRefused::OtherTenure { here: *here, asked: tenure }),
            Place::Departed { tenure: gone, .. } if *gone == offered && self.spent == *gone => {
                Ok(Some(Self::here(offered.next())))
            }
            Place::Departed { tenure, to } => {
                Err(HomeRefused::Departed { tenure: *tenure, to: to.clone() })
            }
            Place::NotHere => Err(HomeRefused::NotHere),
        }
    }

    /// A replica that this server has becomes the volume, in the first tenure of a new incarnation. What the
    /// server knows of the incarnation before is another [`Residence`].
    ///
    /// # Errors
    /// When that incarnation has been here already and has gone on since.
    pub fn promote(&self, tenure: Tenure) -> Decided<A> {
        match &self.place {
            Place::Here(here) if *here == tenure => Ok(None),
            Place::Here(here) => Err(HomeRefused::OtherTenure { here: *here, asked: tenure }),
            _ if tenure <= self.spent => {
                Err(HomeRefused::Spent { asked: tenure, spent: self.spent })
            }
            _ => Ok(Some(Self::here(tenure))),
        }
    }

    /// A replica has become the volume while this server, a home of it, was lost. No tenure of the incarnation
    /// of `lost` begins here any more. What is kept for a move stays, until that move's end.
    pub fn supersede(&self, lost: Tenure) -> Option<Self> {
        let spent = lost.last();
        let place = match &self.place {
            Place::Here(_) => Place::NotHere,
            other => other.clone(),
        };
        let after = Self { place, spent, had: self.had };
        (after != *self).then_some(after)
    }

    /// What was kept for the other server is not needed any more. `tenure` is the one at that server.
    pub fn forget(&self, tenure: Tenure) -> Option<Self> {
        match &self.place {
            Place::Departed { tenure: gone, .. } if *gone == tenure => {
                Some(Self { place: Place::NotHere, spent: self.spent.max(tenure), ..self.clone() })
            }
            _ => None,
        }
    }

    /// The volume is deleted here.
    #[must_use]
    pub fn delete(&self) -> Self {
        Self { place: Place::NotHere, ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Incarnation;

    type Server = Residence<char>;

    fn at(count: u64) -> Tenure {
        Tenure(Tenure::first(Incarnation(7)).0 + count)
    }

    fn departed(count: u64, to: char) -> Server {
        let (place, had) = (Place::Departed { tenure: at(count), to }, at(count - 1));
        Residence { place, spent: at(count), had }
    }

    #[test]
    fn a_volume_departs_to_one_server_only() {
        let gone = Server::here(at(0)).depart(at(0), &'b').unwrap().unwrap();
        assert_eq!(gone, departed(1, 'b'));
        assert_eq!(gone.depart(at(0), &'b'), Ok(None), "a repeated request");
        let elsewhere = HomeRefused::Departed { tenure: at(1), to: 'b' };
        assert_eq!(gone.depart(at(0), &'c'), Err(elsewhere));
        let late = HomeRefused::OtherTenure { here: at(2), asked: at(0) };
        assert_eq!(Server::here(at(2)).depart(at(0), &'b'), Err(late));
    }

    #[test]
    fn a_lost_home_that_was_superseded_never_has_the_volume_again() {
        let lost = Server::here(at(3)).supersede(at(1)).expect("it was here");
        assert_eq!(lost.place, Place::NotHere);
        assert_eq!(lost.supersede(at(1)), None, "a repeated request");
        assert!(lost.take(at(4)).is_err() && lost.take_back(at(3)).is_err());
        let gone = departed(4, 'b').supersede(at(3)).expect("news");
        assert!(gone.take(at(4)).is_err() && gone.take_back(at(3)).is_err(), "{gone:?}");
        assert_eq!(gone.forget(at(4)).expect("it kept layers").place, Place::NotHere);
    }

    #[test]
    fn a_replica_becomes_the_volume_once() {
        let first = Tenure::first(Incarnation(8));
        let here = Server::unknown().promote(first).unwrap().unwrap();
        assert_eq!(here, Server::here(first));
        assert_eq!(here.promote(first), Ok(None), "a repeated request");
        let gone = here.depart(first, &'b').unwrap().unwrap();
        assert!(gone.promote(first).is_err(), "a late request");
    }

    #[test]
    fn a_tenure_that_was_refused_never_begins() {
        let refused = Server::unknown().refuse(at(0)).unwrap();
        assert!(refused.has_refused(at(0)) && !refused.has_refused(at(1)));
        let spent = HomeRefused::Spent { asked: at(1), spent: at(1) };
        assert_eq!(refused.take(at(0)), Err(spent));
        assert_eq!(refused.take(at(2)), Ok(Some(Server::here(at(3)))), "the next move");
        let taken = Server::here(at(1));
        assert_eq!(taken.refuse(at(0)), None);
        assert!(!taken.has_refused(at(0)), "it is here already");
        assert!(!departed(2, 'c').has_refused(at(0)), "it was here, and has gone on");
        assert!(!taken.delete().has_refused(at(0)), "it was here, and was deleted");
        assert!(taken.delete().take(at(0)).is_err());
    }

    #[test]
    fn a_volume_that_was_taken_back_does_not_leave_with_a_late_request() {
        for before in [departed(1, 'b'), Server::here(at(0))] {
            let back = before.take_back(at(0)).unwrap().unwrap();
            assert_eq!(back, Server::here(at(2)));
            assert_eq!(back.take_back(at(0)), Ok(None), "a repeated request");
            assert!(back.depart(at(0), &'b').is_err());
        }
        assert!(departed(3, 'b').take_back(at(0)).is_err(), "a late return");
    }

    #[test]
    fn a_message_about_a_deleted_volume_does_not_fit_the_next_one_of_its_name() {
        let new = Tenure::first(Incarnation(8));
        assert!(Server::here(new).depart(at(0), &'b').is_err());
        assert_eq!(new.incarnation(), Incarnation(8));
        assert_eq!(at(3).incarnation(), Incarnation(7));
    }

    #[test]
    fn what_is_forgotten_can_be_taken_again_and_only_later() {
        let gone = departed(1, 'b');
        let forgotten = gone.forget(at(1)).unwrap();
        assert_eq!(gone.forget(at(3)), None);
        assert_eq!(forgotten.forget(at(1)), None, "a repeated request");
        assert!(forgotten.take(at(0)).is_err());
        assert_eq!(forgotten.take(at(1)), Ok(Some(Server::here(at(2)))));
    }
}
