//! A page as a document: what stands around it, and the few pages that have a form of their own.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::LazyLock;

use askama::Template;
use perigee_model::percent::encoded_path;
use perigee_model::tenant::Role;

use crate::parts::{Link, Log, Page, link};

/// The style sheet.
pub const STYLE: &str = include_str!("../assets/style.css");
/// The script that keeps a page fresh. Pages can be read without it.
pub const SCRIPT: &str = include_str!("../assets/page.js");

/// The script that shows a VM's console or screen.
pub const CONSOLE: &str = include_str!("../assets/console.js");
/// The terminal, and the viewer of screens, compressed with gzip: `scripts/vendor-web`.
pub const TERMINAL: &[u8] = include_bytes!("../assets/vendor/xterm.mjs.gz");
/// The style sheet of the terminal.
pub const TERMINAL_STYLE: &str = include_str!("../assets/vendor/xterm.css");
/// The same of the viewer of screens.
pub const VIEWER: &[u8] = include_bytes!("../assets/vendor/novnc.mjs.gz");

static STYLE_PATH: LazyLock<String> = LazyLock::new(|| versioned("/web/style.css", STYLE));
static SCRIPT_PATH: LazyLock<String> = LazyLock::new(|| versioned("/web/page.js", SCRIPT));

static CONSOLE_PATH: LazyLock<String> = LazyLock::new(|| versioned("/web/console.js", CONSOLE));
static TERMINAL_PATH: LazyLock<String> = LazyLock::new(|| versioned("/web/xterm.mjs", TERMINAL));
static TERMINAL_STYLE_PATH: LazyLock<String> =
    LazyLock::new(|| versioned("/web/xterm.css", TERMINAL_STYLE));
static VIEWER_PATH: LazyLock<String> = LazyLock::new(|| versioned("/web/novnc.mjs", VIEWER));

/// Where the style sheet is: another one has another path, so that browsers may keep it.
pub fn style_path() -> &'static str {
    &STYLE_PATH
}

/// Where the script is, in the same way.
pub fn script_path() -> &'static str {
    &SCRIPT_PATH
}

/// Where the terminal is.
pub fn terminal_path() -> &'static str {
    &TERMINAL_PATH
}

/// Where the viewer of screens is.
pub fn viewer_path() -> &'static str {
    &VIEWER_PATH
}

fn versioned(path: &str, content: impl AsRef<[u8]>) -> String {
    format!("{path}?v={}", digest(content))
}

/// A number that says whether two texts are the same. It protects from nothing.
fn digest(text: impl AsRef<[u8]>) -> String {
    let mut hasher = DefaultHasher::new();
    text.as_ref().hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// What stands around a page.
#[derive(Debug, Clone, Default)]
pub struct Frame {
    /// Who looks, as the audit log names them; empty: nobody knows.
    pub who: String,
    /// What they may do, which says which pages there are for them.
    pub role: Option<Role>,
    /// They have logged in here.
    pub can_log_out: bool,
    /// The page's own path with its query.
    pub path: String,
    /// Whether it is kept fresh.
    pub is_live: bool,
    /// Whether it shows a console or a screen.
    pub has_machine: bool,
}

/// What a page with a console or a screen has beside others.
struct OfMachine {
    style: &'static str,
    script: &'static str,
}

/// A link to a page at the head of each page.
struct Tab {
    link: Link,
    is_here: bool,
}

/// The pages that there are for a role. The one that is shown is `here`.
fn tabs(role: Option<Role>, here: &str) -> Vec<Tab> {
    let Some(role) = role else { return Vec::new() };
    let all = [
        ("Overview", "/", Role::Member),
        ("Jobs", "/jobs", Role::Member),
        ("Queue", "/queue", Role::Member),
        ("VMs", "/vms", Role::Member),
        ("Volumes", "/volumes", Role::Member),
        ("Hosts", "/hosts", Role::Admin),
        ("Sites", "/sites", Role::Member),
        ("Rented", "/rentals", Role::Admin),
        ("Tenants", "/tenants", Role::Operator),
        ("Changes", "/audit", Role::Operator),
    ];
    let open = all.into_iter().filter(|(_, _, least)| role >= *least);
    open.map(|(text, href, _)| Tab { link: link(text, href), is_here: href == here }).collect()
}

/// A page's parts as HTML, and what tells whether they have changed.
#[derive(Debug, Clone)]
pub struct PageText {
    title: String,
    main: String,
    /// Two pages with the same state show the same, but for their logs.
    pub state: String,
}

#[derive(Template)]
#[template(path = "main.html")]
struct Main<'a> {
    page: &'a Page,
}

#[derive(Template)]
#[template(path = "log.html")]
struct LogText<'a> {
    log: &'a Log,
}

#[derive(Template)]
#[template(path = "login.html")]
struct LogIn<'a> {
    problem: &'a str,
    to: &'a str,
    fingerprint: &'a str,
}

#[derive(Template)]
#[template(path = "document.html")]
struct Document<'a> {
    title: &'a str,
    style: &'a str,
    script: &'a str,
    machine: Option<OfMachine>,
    tabs: Vec<Tab>,
    who: &'a str,
    can_log_out: bool,
    live: String,
    state: &'a str,
    main: &'a str,
    log: String,
}

/// Writing to a `String` does not fail, and no template of ours calls anything that does.
fn text(template: &impl Template) -> String {
    template.render().unwrap_or_else(|error| format!("can't write the page: {error}"))
}

impl PageText {
    /// Of a page.
    pub fn of(page: &Page) -> Self {
        let main = text(&Main { page });
        Self { title: page.title.clone(), state: digest(&main), main }
    }

    /// As a document, with a job's log below the page's parts if there is one.
    pub fn document(&self, log: Option<&Log>, frame: &Frame) -> String {
        let log = log.map(|log| text(&LogText { log })).unwrap_or_default();
        document(&self.title, frame, (&self.main, &self.state, log))
    }
}

/// A page without a log as a document.
pub fn render(page: &Page, frame: &Frame) -> String {
    PageText::of(page).document(None, frame)
}

/// The page on which one logs in. `fingerprint` is that of the cluster's authority; empty without TLS.
pub fn login(problem: &str, to: &str, fingerprint: &str) -> String {
    let main = text(&LogIn { problem, to, fingerprint });
    document("Log in", &Frame::default(), (&main, "", String::new()))
}

fn document(title: &str, frame: &Frame, (main, state, log): (&str, &str, String)) -> String {
    let path = frame.path.split('?').next().unwrap_or_default();
    // The page of a thing belongs to the list of its kind.
    let list = path.split('/').nth(1).map(|first| format!("/{first}")).unwrap_or_default();
    let live = if frame.is_live {
        format!("/live?of={}", encoded_path(&frame.path))
    } else {
        String::new()
    };
    text(&Document {
        title,
        style: style_path(),
        script: script_path(),
        machine: frame
            .has_machine
            .then(|| OfMachine { style: &TERMINAL_STYLE_PATH, script: &CONSOLE_PATH }),
        tabs: tabs(frame.role, &list),
        who: &frame.who,
        can_log_out: frame.can_log_out,
        live,
        state,
        main,
        log,
    })
}
