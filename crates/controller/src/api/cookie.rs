//! The cookie in which a browser keeps a user's token.
//!
//! It counts for the pages and for nothing else: below `/v1` and `/dav` a token has to be in the header `Authorization`, which no browser
//! sends by itself. Its name begins with `__Host-`, so browsers take it from this server only, over https, for all paths.

use axum::http::HeaderMap;
use axum::http::header::COOKIE;

/// Its name.
const NAME: &str = "__Host-perigee";

/// The page on which one logs in.
pub const LOGIN: &str = "/login";

/// What the first part of a path is for which the cookie counts. It also counts for the first page, `/`.
const PAGES: [&str; 10] =
    ["audit", "hosts", "jobs", "live", "queue", "rentals", "sites", "tenants", "vms", "volumes"];

/// Whether a path is one of the pages that only users see.
pub fn is_page(path: &str) -> bool {
    path == "/" || path.split('/').nth(1).is_some_and(|first| PAGES.contains(&first))
}

/// The token that a browser has for this path. To log out, a token need not be good.
pub fn token(headers: &HeaderMap, path: &str) -> Option<String> {
    if !is_page(path) {
        return None;
    }
    let lines = headers.get_all(COOKIE).iter().filter_map(|line| line.to_str().ok());
    let mut cookies = lines.flat_map(|line| line.split(';'));
    cookies.find_map(|cookie| {
        let (name, value) = cookie.trim().split_once('=')?;
        (name == NAME).then(|| value.to_owned())
    })
}

/// Has a browser keep the token for so many seconds.
pub fn set(token: &str, life_s: u64) -> String {
    format!("{NAME}={token}; Max-Age={life_s}; Path=/; Secure; HttpOnly; SameSite=Strict")
}

/// Has a browser forget it.
pub fn clear() -> String {
    set("", 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cookie_counts_for_the_pages_only() {
        let mut headers = HeaderMap::new();
        let value = "other=1; __Host-perigee=perigee_1_2";
        headers.insert(COOKIE, value.parse().expect("a value"));
        for path in ["/", "/jobs", "/jobs/a-0001", "/live"] {
            assert_eq!(token(&headers, path).as_deref(), Some("perigee_1_2"), "{path}");
        }
        for path in
            ["/v1/jobs", "/v1", "/dav/acme/a", "/metrics", "/login", "/jobsx", "", "//v1/me"]
        {
            assert_eq!(token(&headers, path), None, "{path}");
        }
    }

    #[test]
    fn a_cookie_is_for_this_server_over_https_and_for_no_script() {
        let cookie = set("perigee_1_2", 60);
        for part in [
            "__Host-perigee=perigee_1_2;",
            "Max-Age=60",
            "Path=/",
            "Secure",
            "HttpOnly",
            "SameSite=Strict",
        ] {
            assert!(cookie.contains(part), "{cookie}");
        }
        assert!(clear().contains("Max-Age=0"));
    }
}
