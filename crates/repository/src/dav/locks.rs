//! Locks of WebDAV (RFC 4918, 6 and 7): who has one keeps other clients of WebDAV from changing what it is of. They are kept in
//! memory, and end by themselves soon: a client that goes away keeps nobody out for long. The other doors know
//! nothing of them, and need not: a file is whole whoever writes it.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dav_server::davpath::DavPath;
use dav_server::ls::{DavLock, DavLockSystem, LsFuture};
use perigee_model::limits::DAV_LOCKS;
use perigee_model::{Problem, TenantName};
use xmltree::Element;

use crate::space::lock;

/// How long a lock lasts that is not asked for again.
const LASTS_MAX: Duration = Duration::from_secs(600);

/// All locks, and until when each lasts. They are few: each request looks at them one by one.
#[derive(Debug, Clone, Default)]
pub struct Locks(Arc<Mutex<Vec<(Instant, DavLock)>>>);

/// A path without the slash at its end.
fn plain(path: &DavPath) -> &[u8] {
    let bytes = path.as_bytes();
    bytes.strip_suffix(b"/").unwrap_or(bytes)
}

fn is_below(path: &[u8], above: &[u8]) -> bool {
    path.strip_prefix(above).is_some_and(|rest| rest.first() == Some(&b'/'))
}

/// Whether a lock is one of what is at this path.
fn covers(lock: &DavLock, path: &DavPath) -> bool {
    let (of, path) = (plain(&lock.path), plain(path));
    of == path || (lock.deep && is_below(path, of))
}

/// Whether a lock is of something below this path.
fn is_within(lock: &DavLock, path: &DavPath) -> bool {
    is_below(plain(&lock.path), plain(path))
}

impl Locks {
    /// Works with the locks that have not ended.
    fn now<T>(&self, act: impl FnOnce(&mut Vec<(Instant, DavLock)>) -> T) -> T {
        let mut locks = lock(&self.0);
        let now = Instant::now();
        locks.retain(|(until, _)| *until > now);
        act(&mut locks)
    }

    /// Forgets some of them. Whether there were any.
    fn forget(&self, is_meant: impl Fn(&DavLock) -> bool) -> bool {
        self.now(|locks| locks.extract_if(.., |(_, one)| is_meant(one)).count() > 0)
    }

    /// Whether one more lock of a tenant's files may be granted.
    ///
    /// # Errors
    /// `Invalid` if it has too many.
    pub fn check_room(&self, tenant: &TenantName) -> Result<(), Problem> {
        let top = format!("/{tenant}");
        let is_own = |(_, one): &&(Instant, DavLock)| {
            let path = plain(&one.path);
            path == top.as_bytes() || is_below(path, top.as_bytes())
        };
        let count = self.now(|locks| locks.iter().filter(is_own).count());
        DAV_LOCKS.check(count + 1).map(drop).map_err(|e| {
            e.problem("can't lock a file")
                .next("unlock others, or wait until they end by themselves")
        })
    }

    fn begin(&self, new: DavLock, lasts: Duration) -> Result<DavLock, DavLock> {
        self.now(|locks| {
            let excludes = |one: &DavLock| {
                let touches = covers(one, &new.path) || (new.deep && is_within(one, &new.path));
                touches && !(one.shared && new.shared)
            };
            match locks.iter().find(|(_, one)| excludes(one)) {
                Some((_, other)) => Err(other.clone()),
                None => {
                    locks.push((Instant::now() + lasts, new.clone()));
                    Ok(new)
                }
            }
        })
    }

    /// Whether these tokens let a user change what is at a path, and below it.
    fn admit(
        &self,
        path: &DavPath,
        principal: Option<&str>,
        deep: bool,
        tokens: &[String],
    ) -> Result<(), DavLock> {
        self.now(|locks| {
            let has = |one: &DavLock| {
                tokens.contains(&one.token) && one.principal.as_deref() == principal
            };
            let (mut is_in, mut shared) = (false, None);
            for (_, one) in locks.iter() {
                let is_here = covers(one, path);
                if !(is_here || deep && is_within(one, path)) {
                    continue;
                }
                match (has(one), one.shared && is_here) {
                    (true, _) => is_in |= is_here,
                    // One of those who share it is enough.
                    (false, true) => shared = shared.or(Some(one.clone())),
                    (false, false) => return Err(one.clone()),
                }
            }
            shared.filter(|_| !is_in).map_or(Ok(()), Err)
        })
    }
}

fn soon<'a, T: Send + 'a>(value: T) -> LsFuture<'a, T> {
    Box::pin(std::future::ready(value))
}

impl DavLockSystem for Locks {
    fn lock(
        &'_ self,
        path: &DavPath,
        principal: Option<&str>,
        owner: Option<&Element>,
        timeout: Option<Duration>,
        shared: bool,
        deep: bool,
    ) -> LsFuture<'_, Result<DavLock, DavLock>> {
        let lasts = timeout.unwrap_or(LASTS_MAX).min(LASTS_MAX);
        let new = DavLock {
            token: format!("urn:uuid:{}", uuid::Uuid::new_v4()),
            path: Box::new(path.clone()),
            principal: principal.map(str::to_owned),
            owner: owner.cloned().map(Box::new),
            timeout_at: None,
            timeout: Some(lasts),
            shared,
            deep,
        };
        soon(self.begin(new, lasts))
    }

    fn unlock(&'_ self, path: &DavPath, token: &str) -> LsFuture<'_, Result<(), ()>> {
        let is_meant = |one: &DavLock| one.token == token && covers(one, path);
        soon(if self.forget(is_meant) { Ok(()) } else { Err(()) })
    }

    fn refresh(
        &'_ self,
        path: &DavPath,
        token: &str,
        timeout: Option<Duration>,
    ) -> LsFuture<'_, Result<DavLock, ()>> {
        let lasts = timeout.unwrap_or(LASTS_MAX).min(LASTS_MAX);
        soon(self.now(|locks| {
            let mut own = locks.iter_mut();
            let own = own.find(|(_, one)| one.token == token && covers(one, path));
            let (until, one) = own.ok_or(())?;
            (*until, one.timeout) = (Instant::now() + lasts, Some(lasts));
            Ok(one.clone())
        }))
    }

    /// With `ignore_principal` the library asks whether a condition of a client is true: whether a lock with this token is of
    /// what is there.
    fn check(
        &'_ self,
        path: &DavPath,
        principal: Option<&str>,
        ignore_principal: bool,
        deep: bool,
        submitted_tokens: &[String],
    ) -> LsFuture<'_, Result<(), DavLock>> {
        if !ignore_principal {
            return soon(self.admit(path, principal, deep, submitted_tokens));
        }
        let is_so = self.now(|locks| {
            let mut here = locks.iter().filter(|(_, one)| covers(one, path));
            here.any(|(_, one)| submitted_tokens.contains(&one.token))
        });
        let none = || DavLock {
            token: String::new(),
            path: Box::new(path.clone()),
            principal: None,
            owner: None,
            timeout_at: None,
            timeout: None,
            shared: false,
            deep: false,
        };
        soon(if is_so { Ok(()) } else { Err(none()) })
    }

    fn discover(&'_ self, path: &DavPath) -> LsFuture<'_, Vec<DavLock>> {
        soon(self.now(|locks| {
            let here = locks.iter().filter(|(_, one)| covers(one, path));
            here.map(|(_, one)| one.clone()).collect()
        }))
    }

    fn delete(&'_ self, path: &DavPath) -> LsFuture<'_, Result<(), ()>> {
        self.forget(|one| plain(&one.path) == plain(path) || is_within(one, path));
        soon(Ok(()))
    }
}
