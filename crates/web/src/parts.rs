//! What a page is made of. Every text here is plain text: the templates escape it.

/// How a thing is, as colour beside its word.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tone {
    /// It needs no colour.
    #[default]
    Plain,
    /// It is over, or not wanted.
    Muted,
    /// All is well.
    Good,
    /// Somebody should look at it.
    Warn,
    /// Something does not work.
    Bad,
}

impl Tone {
    /// Its class in the style sheet.
    pub fn class(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Muted => "muted",
            Self::Good => "good",
            Self::Warn => "warn",
            Self::Bad => "bad",
        }
    }
}

/// A part of a whole, as a bar of 100 units beside its figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bar {
    /// What is promised to VMs or volumes.
    pub allocated: u64,
    /// What is in use.
    pub used: u64,
}

impl Bar {
    /// Both as shares of a whole; more than the whole is shown as the whole. What is not known is shown as nothing.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to 100")]
    pub fn of(allocated: Option<f64>, used: Option<f64>, whole: f64) -> Option<Self> {
        let share =
            |part: Option<f64>| (part.unwrap_or(0.0) / whole * 100.0).clamp(0.0, 100.0) as u64;
        (whole > 0.0 && (allocated.is_some() || used.is_some()))
            .then(|| Self { allocated: share(allocated), used: share(used) })
    }
}

/// A cell of a table, or a fact's value.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cell {
    /// What it says.
    pub text: String,
    /// Where it leads; empty: nowhere.
    pub href: String,
    /// A status has a colour too.
    pub tone: Tone,
    /// It is a figure, which stands at the right.
    pub is_number: bool,
    /// It is a command line, or another text of a machine.
    pub is_code: bool,
    /// More words below it; may be empty.
    pub note: String,
    /// A bar below it.
    pub bar: Option<Bar>,
}

impl Cell {
    /// A text.
    pub fn text(text: impl ToString) -> Self {
        Self { text: text.to_string(), ..Self::default() }
    }

    /// A text that leads somewhere.
    pub fn link(text: impl ToString, href: impl Into<String>) -> Self {
        Self { text: text.to_string(), href: href.into(), ..Self::default() }
    }

    /// A figure with its unit.
    pub fn number(text: impl ToString) -> Self {
        Self { text: text.to_string(), is_number: true, ..Self::default() }
    }

    /// A command line.
    pub fn code(text: impl ToString) -> Self {
        Self { text: text.to_string(), is_code: true, ..Self::default() }
    }

    /// A word with its colour.
    pub fn status(text: impl ToString, tone: Tone) -> Self {
        Self { text: text.to_string(), tone, ..Self::default() }
    }

    /// Whether it has a colour.
    pub fn is_toned(&self) -> bool {
        self.tone != Tone::Plain
    }

    /// The same with more words below it.
    #[must_use]
    pub fn note(self, note: impl Into<String>) -> Self {
        Self { note: note.into(), ..self }
    }

    /// The same with a bar.
    #[must_use]
    pub fn bar(self, bar: Option<Bar>) -> Self {
        Self { bar, ..self }
    }
}

/// A column's heading. Those of figures stand at the right, as the figures do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// What its cells are.
    pub text: &'static str,
    /// Its cells are figures.
    pub is_number: bool,
}

/// The headings of texts, and of figures, which begin with `#`.
pub fn heads(texts: &[&'static str]) -> Vec<Head> {
    let head = |text: &&'static str| match text.strip_prefix('#') {
        Some(text) => Head { text, is_number: true },
        None => Head { text, is_number: false },
    };
    texts.iter().map(head).collect()
}

/// A table. The first cell of a row is the row's heading.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    /// What its rows are, for those who don't see the page.
    pub caption: String,
    /// As many as each row has cells.
    pub heads: Vec<Head>,
    /// The rows that are shown.
    pub rows: Vec<Vec<Cell>>,
    /// What is said if there is no row.
    pub empty: String,
}

/// Something that is wrong, and what to do about it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trouble {
    /// How bad it is.
    pub tone: Tone,
    /// What it is, in a few words.
    pub what: String,
    /// The page of the thing; empty: none.
    pub href: String,
    /// Why, or since when.
    pub why: String,
    /// What to do next; mostly a command line.
    pub next: String,
}

/// A way to somewhere, or an action.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Link {
    /// What it says.
    pub text: String,
    /// Where it leads.
    pub href: String,
}

/// A link.
pub fn link(text: impl Into<String>, href: impl Into<String>) -> Link {
    Link { text: text.into(), href: href.into() }
}

/// A field in which one looks for names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Find {
    /// The page that shows what is found.
    pub action: String,
    /// What was looked for; empty: nothing.
    pub value: String,
    /// What is looked for: `jobs`.
    pub of: &'static str,
}

/// Asks whether something is to be done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Confirm {
    /// Where the answer goes.
    pub action: String,
    /// What the button says.
    pub button: String,
    /// The page to go back to.
    pub back: String,
}

/// A site on the map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spot {
    /// Its place.
    pub x: i32,
    /// Its place.
    pub y: i32,
    /// Its name.
    pub name: String,
    /// How many hosts it has, in words.
    pub note: String,
}

/// A link between two sites on the map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// From where.
    pub from: (i32, i32),
    /// To where.
    pub to: (i32, i32),
    /// Where its label stands, about in the middle.
    pub middle: (i32, i32),
    /// Its round trip and rate; empty where there is no room for them.
    pub label: String,
    /// The same with its sites, for whoever points at it.
    pub words: String,
    /// How wide it is: 1 to 3.
    pub width: usize,
}

/// The sites and the links between them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Map {
    /// What is to be seen, for those who don't see the page.
    pub words: String,
    /// The sites.
    pub spots: Vec<Spot>,
    /// The links.
    pub lines: Vec<Line>,
}

/// A line of a curve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stroke {
    /// What it is.
    pub name: &'static str,
    /// Its points, as SVG has them, in an area of 600 by 100.
    pub points: String,
}

/// A part of a curve's width, with words for whoever points there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// Where it begins, of 600.
    pub x: u64,
    /// How wide it is; 0: a moment.
    pub width: u64,
    /// What was there.
    pub words: String,
}

/// Something over time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Curve {
    /// What it is.
    pub title: &'static str,
    /// Its means and highest values, for those who don't see it.
    pub words: String,
    /// Its highest value.
    pub most: String,
    /// One line, or two.
    pub strokes: Vec<Stroke>,
    /// Moments at which a VM came to another host.
    pub moves: Vec<Mark>,
    /// What was when.
    pub marks: Vec<Mark>,
}

/// Curves of the same time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Curves {
    /// All of them.
    pub all: Vec<Curve>,
    /// When they begin.
    pub from: String,
    /// When they end.
    pub to: String,
}

/// A VM's console or screen, which a script shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// What it is: `console` or `screen`.
    pub kind: &'static str,
    /// What it is of, for those who don't see the page.
    pub label: String,
    /// The path of its WebSocket.
    pub socket: String,
    /// The path of the program that shows it.
    pub library: &'static str,
}

/// A part of a page, with a heading.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Section {
    /// Unique in the page.
    pub id: String,
    /// Its heading.
    pub heading: String,
    /// The command line that shows or does the same; empty: none.
    pub command: String,
    /// Paragraphs.
    pub texts: Vec<String>,
    /// What is wrong.
    pub troubles: Vec<Trouble>,
    /// A field to look for something.
    pub find: Option<Find>,
    /// Names and values.
    pub facts: Vec<(&'static str, Cell)>,
    /// A table.
    pub table: Option<Table>,
    /// A map.
    pub map: Option<Map>,
    /// A console or a screen.
    pub machine: Option<Machine>,
    /// Curves.
    pub curves: Option<Curves>,
    /// A question.
    pub confirm: Option<Confirm>,
    /// Where it goes on.
    pub links: Vec<Link>,
}

impl Section {
    /// One with nothing in it yet.
    pub fn new(
        id: impl Into<String>,
        heading: impl Into<String>,
        command: impl Into<String>,
    ) -> Self {
        Self { id: id.into(), heading: heading.into(), command: command.into(), ..Self::default() }
    }

    /// With a table, whose caption is the heading.
    #[must_use]
    pub fn table(self, texts: &[&'static str], rows: Vec<Vec<Cell>>, empty: &str) -> Self {
        let (caption, empty) = (self.heading.clone(), empty.to_owned());
        let table = Table { caption, heads: heads(texts), rows, empty };
        Self { table: Some(table), ..self }
    }

    /// With names and values. Those without a value are left out.
    #[must_use]
    pub fn facts(self, facts: Vec<(&'static str, Cell)>) -> Self {
        let facts = facts.into_iter().filter(|(_, cell)| !cell.text.is_empty()).collect();
        Self { facts, ..self }
    }

    /// With a further link.
    #[must_use]
    pub fn linked(mut self, text: impl Into<String>, href: impl Into<String>) -> Self {
        self.links.push(link(text, href));
        self
    }
}

/// The end of a log, to which lines are added while the page is open.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Log {
    /// What it is of, for those who don't see the page.
    pub label: String,
    /// The command line that shows the same.
    pub command: String,
    /// What is added to the address of the page's events so that further lines come with them; empty: none come.
    pub live: String,
    /// What is said of the lines before these; may be empty.
    pub note: String,
    /// The lines that are shown.
    pub lines: Vec<LoggedLine>,
}

/// A line of a log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoggedLine {
    /// Its text, with what stands before it.
    pub text: String,
    /// The command wrote it to its standard error.
    pub is_error: bool,
}

/// A page without what stands around it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Page {
    /// Its heading.
    pub title: String,
    /// The command line that shows the same; empty: none.
    pub command: String,
    /// Something to know about all that is shown; may be empty.
    pub notice: String,
    /// Its parts.
    pub sections: Vec<Section>,
}

impl Page {
    /// One with these parts.
    pub fn new(
        title: impl Into<String>,
        command: impl Into<String>,
        sections: Vec<Section>,
    ) -> Self {
        Self { title: title.into(), command: command.into(), sections, ..Self::default() }
    }

    /// Without the links to pages below this path, which the one who looks may not see.
    #[must_use]
    pub fn without_links(mut self, below: &str) -> Self {
        for section in &mut self.sections {
            let rows = section.table.iter_mut().flat_map(|table| table.rows.iter_mut().flatten());
            let facts = section.facts.iter_mut().map(|(_, cell)| cell);
            for cell in rows.chain(facts).filter(|cell| cell.href.starts_with(below)) {
                cell.href.clear();
            }
        }
        self
    }
}
