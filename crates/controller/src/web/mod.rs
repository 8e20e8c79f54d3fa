//! The pages that people look at in a browser, beside the API. The crate `perigee-web` makes the HTML.
//!
//! What a page shows it has from the functions that answer the API's routes, for the same caller, and only what the table of callers
//! lets this caller ask the API for ([`ask::Ask`]). So a page shows nothing that the API would not say.
//!
//! | question | file |
//! |---|---|
//! | Which path is which page? | `pages.rs`; what is at the API behind it: `ask.rs` |
//! | How does one log in and out? | `login.rs`; the cookie: `api/cookie.rs`; which request of a browser counts: `http/src/guard.rs` |
//! | How does an open page stay fresh, and a job's log? | `live.rs` |
//! | What do many open pages cost? | one look for all that show the same: `looks.rs` |
//! | What can be done on a page? | `actions.rs` |
//! | How does a page get a VM's console or screen? | `machine.rs` |
//! | How does a refusal become a page, and what is a browser told to keep to? | `answer.rs` |

mod actions;
mod answer;
mod ask;
mod live;
mod login;
mod looks;
mod machine;
mod pages;

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::get;

use crate::api;
use crate::cluster::Cluster;
use live::LivePages;
use looks::Looks;

/// What the handlers of pages share.
#[derive(Clone)]
pub struct Web {
    cluster: Arc<Cluster>,
    live: Arc<LivePages>,
    looks: Arc<Looks>,
}

type Shared = State<Web>;

/// What is served beside [`pages::PATHS`] and [`actions::PATHS`]: each as a row of the table of callers has it.
#[cfg(test)]
const OTHERS: [&str; 14] = [
    "GET /live",
    "GET /jobs/{job}/output.tar",
    "GET /login",
    "POST /login",
    "POST /logout",
    "GET /authority.pem",
    "GET /web/style.css",
    "GET /web/page.js",
    "GET /vms/{vm}/console/attach",
    "GET /vms/{vm}/vnc",
    "GET /web/console.js",
    "GET /web/xterm.css",
    "GET /web/xterm.mjs",
    "GET /web/novnc.mjs",
];

/// Every method and path of the pages.
#[cfg(test)]
pub fn routes() -> Vec<String> {
    let shown = pages::PATHS.iter().map(|path| format!("GET {path}"));
    let asked =
        actions::PATHS.iter().flat_map(|path| [format!("GET {path}"), format!("POST {path}")]);
    shown.chain(asked).chain(OTHERS.map(str::to_owned)).collect()
}

/// All that the controller serves: the API, and the pages.
pub fn router(cluster: Arc<Cluster>) -> Router {
    let web = Web { cluster: Arc::clone(&cluster), live: Arc::default(), looks: Arc::default() };
    let mut router = Router::new();
    for path in pages::PATHS {
        router = router.route(path, get(pages::show));
    }
    for path in actions::PATHS {
        router = router.route(path, get(pages::show).post(actions::act));
    }
    let pages = router
        .route("/live", get(live::page))
        .route("/jobs/{job}/output.tar", get(pages::output))
        .route(api::cookie::LOGIN, get(login::form).post(login::log_in))
        .route("/logout", axum::routing::post(login::log_out))
        .route("/authority.pem", get(login::authority))
        .route("/web/style.css", get(answer::style))
        .route("/web/page.js", get(answer::script))
        .route("/vms/{vm}/console/attach", get(machine::attach_console))
        .route("/vms/{vm}/vnc", get(machine::view_screen))
        .route("/web/console.js", get(answer::console))
        .route("/web/xterm.css", get(answer::terminal_style))
        .route("/web/xterm.mjs", get(answer::terminal))
        .route("/web/novnc.mjs", get(answer::viewer))
        .with_state(web)
        .layer(from_fn_with_state(Arc::clone(&cluster), api::admit))
        .layer(from_fn(answer::finish));
    api::router(cluster).merge(pages)
}

#[cfg(test)]
mod tests {
    use super::{actions, pages};
    use crate::api::cookie;

    #[test]
    fn a_cookie_counts_for_each_page_and_each_action() {
        for path in pages::PATHS.iter().chain(&actions::PATHS) {
            assert!(cookie::is_page(path), "{path}");
        }
    }
}
