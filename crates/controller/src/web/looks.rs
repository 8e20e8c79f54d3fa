//! What pages show now: looked at once for all open pages that show the same to callers with the same rights, however many they are.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::http::Uri;
use futures_util::future::{BoxFuture, FutureExt as _, Shared};
use perigee_model::Problem;
use perigee_model::limits::LIVE_PAGES;
use perigee_web::PageText;
use tokio::time::Instant;

use super::pages;
use crate::api::caller::{Caller, Rights};
use crate::cluster::Cluster;

/// So long after its end a look counts, and then the open pages look again.
pub const LOOK_EVERY: Duration = Duration::from_secs(3);

/// What a page showed.
#[derive(Debug, Clone)]
pub struct Seen {
    /// When the look had ended.
    pub at: Instant,
    /// What was seen is the same while this is the same.
    pub state: String,
    /// `None`: it could not be shown.
    text: Option<Arc<PageText>>,
}

/// A page's path with its query, and who looks.
type Key = (String, Rights);

fn key(caller: &Caller, uri: &Uri) -> Key {
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    (path.to_owned(), caller.rights())
}

struct Look {
    begun: Instant,
    seen: Shared<BoxFuture<'static, Seen>>,
}

impl Look {
    fn begin(look: BoxFuture<'static, Seen>) -> Self {
        Self { begun: Instant::now(), seen: look.shared() }
    }

    /// Whether it still goes on, or has ended just now.
    fn counts(&self) -> bool {
        match self.seen.peek() {
            Some(seen) => seen.at.elapsed() < LOOK_EVERY,
            // It goes on only while somebody waits for its end. One handle is that of `Looks`.
            None => self.seen.strong_count().is_some_and(|handles| handles > 1),
        }
    }
}

/// The last look of each page that is open.
#[derive(Default)]
pub struct Looks(Mutex<BTreeMap<Key, Look>>);

impl Looks {
    /// What a page shows this caller: as a look showed that has ended just now, or one that begins with this.
    pub async fn seen(&self, cluster: &Arc<Cluster>, caller: &Caller, uri: &Uri) -> Seen {
        let (cluster, looks_as, of) = (Arc::clone(cluster), caller.clone(), uri.clone());
        let look = async move {
            let page = pages::page(&cluster, &looks_as, &of).await;
            let (state, text) = match page.map(|page| Arc::new(PageText::of(&page))) {
                Ok(text) => (text.state.clone(), Some(text)),
                // This is another state: the page is fetched, and says why to the one who asks.
                Err(problem) => (format!("not shown: {:?}", problem.kind), None),
            };
            Seen { at: Instant::now(), state, text }
        };
        self.join(key(caller, uri), look.boxed()).await
    }

    /// A page for the one who asks for it now. If it has the state that its open page was told of, it is the one that was seen then.
    ///
    /// # Errors
    /// As [`pages::page`].
    pub async fn page(
        &self,
        cluster: &Arc<Cluster>,
        caller: &Caller,
        uri: &Uri,
        told: Option<&str>,
    ) -> Result<Arc<PageText>, Problem> {
        let key = key(caller, uri);
        if let Some(text) = told.and_then(|state| self.told(&key, state)) {
            return Ok(text);
        }
        let begun = Instant::now();
        let text = Arc::new(PageText::of(&pages::page(cluster, caller, uri).await?));
        self.replace(&key, begun, &text);
        Ok(text)
    }

    /// Those that count.
    fn current(&self) -> MutexGuard<'_, BTreeMap<Key, Look>> {
        let mut looks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        looks.retain(|_, look| look.counts());
        looks
    }

    /// The look that counts, or else this one, which begins when somebody waits for its end.
    fn join(&self, key: Key, look: BoxFuture<'static, Seen>) -> Shared<BoxFuture<'static, Seen>> {
        let mut looks = self.current();
        if let Some(look) = looks.get(&key) {
            return look.seen.clone();
        }
        let look = Look::begin(look);
        let seen = look.seen.clone();
        // There are as many as open pages, and those of pages that were closed just now. Somebody who opens and closes many shares nothing.
        if LIVE_PAGES.check(looks.len() + 1).is_ok() {
            looks.insert(key, look);
        }
        seen
    }

    fn told(&self, key: &Key, state: &str) -> Option<Arc<PageText>> {
        let looks = self.current();
        let seen = looks.get(key)?.seen.peek()?;
        seen.text.clone().filter(|_| seen.state == state)
    }

    /// A page that somebody has loaded is newer than what was seen before: the pages that are open show the same then, and not what was
    /// there before the change that its reader has made.
    fn replace(&self, key: &Key, begun: Instant, text: &Arc<PageText>) {
        let mut looks = self.current();
        let Some(look) = looks.get_mut(key).filter(|look| look.begun < begun) else { return };
        let (state, text) = (text.state.clone(), Some(Arc::clone(text)));
        let seen = std::future::ready(Seen { at: Instant::now(), state, text }).boxed().shared();
        // Only what somebody has waited for can be looked into.
        let _ = seen.clone().now_or_never();
        *look = Look { begun, seen };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use perigee_http::Peer;
    use perigee_model::tenant::Role;
    use perigee_model::{TenantName, UserName};
    use perigee_web::parts::Page;

    use super::*;

    fn caller(tenant: &str, user: &str, role: Role) -> Caller {
        let tenant = TenantName::new(tenant).expect("a name");
        let user = Some(UserName::new(user).expect("a name"));
        Caller { tenant, user, role, ..Caller::admin(&Peer::Local) }
    }

    fn text(of: &str) -> Arc<PageText> {
        Arc::new(PageText::of(&Page::new(of, "", Vec::new())))
    }

    /// Counts the looks.
    #[derive(Default)]
    struct Counted {
        looks: Looks,
        begun: Arc<AtomicU32>,
    }

    impl Counted {
        async fn seen(&self, path: &str, caller: &Caller) -> Seen {
            let begun = Arc::clone(&self.begun);
            let look = async move {
                let number = begun.fetch_add(1, Ordering::Relaxed) + 1;
                tokio::time::sleep(Duration::from_secs(1)).await;
                let text = text(&format!("look {number}"));
                Seen { at: Instant::now(), state: number.to_string(), text: Some(text) }
            };
            self.looks.join((path.to_owned(), caller.rights()), look.boxed()).await
        }

        fn begun(&self) -> u32 {
            self.begun.load(Ordering::Relaxed)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn many_open_pages_cost_one_look() {
        let counted = Counted::default();
        let (ann, abe) =
            (caller("acme", "ann", Role::Operator), caller("acme", "abe", Role::Operator));
        let all = (0..50).flat_map(|_| [&ann, &abe]).map(|of| counted.seen("/jobs", of));
        let all = futures_util::future::join_all(all).await;
        assert!(all.iter().all(|seen| seen.state == "1"), "{all:?}");
        assert_eq!((counted.begun(), counted.seen("/jobs", &ann).await.state.as_str()), (1, "1"));
        tokio::time::sleep(LOOK_EVERY).await;
        assert_eq!(counted.seen("/jobs", &ann).await.state, "2");
        assert_eq!(counted.seen("/jobs", &abe).await.state, "2");
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_gets_what_others_with_other_rights_have_seen() {
        let counted = Counted::default();
        let all = [
            caller("acme", "ann", Role::Operator),
            caller("acme", "amy", Role::Member),
            caller("acme", "al", Role::Member),
            caller("blue", "ann", Role::Operator),
            caller("default", "ann", Role::Operator),
            caller("default", "ann", Role::Admin),
        ];
        for (number, of) in (1..).zip(&all) {
            assert_eq!(counted.seen("/jobs", of).await.state, number.to_string(), "{of:?}");
            let key = ("/jobs".to_owned(), of.rights());
            assert!(counted.looks.told(&key, &number.to_string()).is_some(), "{of:?}");
            assert!(counted.looks.told(&key, &(number - 1).to_string()).is_none(), "{of:?}");
        }
        assert_eq!(counted.seen("/vms", &all[0]).await.state, "7");
    }

    #[tokio::test(start_paused = true)]
    async fn a_look_goes_on_when_the_page_that_has_begun_it_is_closed() {
        let counted = Counted::default();
        let ann = caller("acme", "ann", Role::Operator);
        let mut first = Box::pin(counted.seen("/", &ann));
        assert!((&mut first).now_or_never().is_none(), "it has begun");
        let mut second = Box::pin(counted.seen("/", &ann));
        assert!((&mut second).now_or_never().is_none(), "it waits for the same look");
        drop(first);
        assert_eq!((second.await.state.as_str(), counted.begun()), ("1", 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_look_that_nobody_waits_for_is_begun_anew() {
        let counted = Counted::default();
        let ann = caller("acme", "ann", Role::Operator);
        assert!(counted.seen("/", &ann).now_or_never().is_none(), "it has begun");
        assert_eq!(counted.seen("/", &ann).await.state, "2");
    }

    #[tokio::test(start_paused = true)]
    async fn a_page_that_was_loaded_is_what_open_pages_show() {
        let counted = Counted::default();
        let ann = caller("acme", "ann", Role::Operator);
        let before = Instant::now();
        assert_eq!(counted.seen("/", &ann).await.state, "1");
        let key = ("/".to_owned(), ann.rights());
        let loaded = text("loaded");
        counted.looks.replace(&key, before, &loaded);
        assert_eq!(counted.seen("/", &ann).await.state, "1", "that look was the later one");
        counted.looks.replace(&key, Instant::now(), &loaded);
        assert_eq!(counted.seen("/", &ann).await.state, loaded.state);
        assert!(counted.looks.told(&key, &loaded.state).is_some());
    }
}
