//! The sessions of each volume that are open now, over NBD and iSCSI.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use perigee_model::client::{Login, Over};
use perigee_model::{Problem, ProblemKind, VolumeName};

/// The most sessions that an error names.
const NAMED_MAX: usize = 8;

/// The sessions that are open at one volume server.
#[derive(Default)]
pub struct Logins {
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    logins: BTreeMap<u64, Login>,
    next: u64,
}

/// Keeps a session in the list until it is dropped.
pub struct LoginGuard {
    logins: Arc<Logins>,
    number: u64,
}

impl Logins {
    /// Ignores poisoning: the list is consistent at every step, and is only shown.
    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a session is open from now on.
    pub fn enter(self: &Arc<Self>, volume: VolumeName, over: Over, peer: String) -> LoginGuard {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let since_s = now.map_or(0, |since| since.as_secs());
        let mut open = self.lock();
        let number = open.next;
        open.next += 1;
        open.logins.insert(number, Login { volume, over, peer, since_s });
        LoginGuard { logins: Arc::clone(self), number }
    }

    /// All open sessions, the oldest first.
    pub fn list(&self) -> Vec<Login> {
        self.lock().logins.values().cloned().collect()
    }

    /// A conflict of a volume, with those who have it open.
    pub fn name_users(&self, volume: &VolumeName, mut problem: Problem) -> Problem {
        let open = self.lock();
        let its: Vec<&Login> =
            open.logins.values().filter(|login| login.volume == *volume).collect();
        if problem.kind == ProblemKind::Conflict && !its.is_empty() {
            let named = its.iter().take(NAMED_MAX);
            let mut named: Vec<_> =
                named.map(|login| format!("{} over {}", login.peer, login.over)).collect();
            if its.len() > NAMED_MAX {
                named.push(format!("{} more", its.len() - NAMED_MAX));
            }
            problem.why = format!("{} (open at {})", problem.why, named.join(", "));
        }
        problem
    }
}

impl Drop for LoginGuard {
    fn drop(&mut self) {
        self.logins.lock().logins.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_listed_until_it_ends() {
        let logins = Arc::<Logins>::default();
        let volume = VolumeName::new("data").expect("a name");
        let first = logins.enter(volume.clone(), Over::Nbd, "10.0.0.7:1024".into());
        let second = logins.enter(volume, Over::Iscsi, "iqn.a at 10.0.0.8:1024".into());
        let peers: Vec<_> = logins.list().into_iter().map(|login| login.peer).collect();
        assert_eq!(peers, ["10.0.0.7:1024", "iqn.a at 10.0.0.8:1024"]);
        let volume = VolumeName::new("data").expect("a name");
        let conflict = Problem::conflict("can't delete volume data", "open sessions: 2");
        let why = logins.name_users(&volume, conflict).why;
        let users =
            "open sessions: 2 (open at 10.0.0.7:1024 over nbd, iqn.a at 10.0.0.8:1024 over iscsi)";
        assert_eq!(why, users);
        drop(first);
        assert_eq!(logins.list().len(), 1);
        drop(second);
        assert!(logins.list().is_empty());
    }
}
