//! A YAML document as a tree whose every value knows its line, and readers that name line and
//! field where a value is not what was asked for.
//!
//! Scalars stay as they were written: whether `1.10` is a number or a text depends on the field,
//! not on YAML's guess.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::options::{DuplicateKeyPolicy, NonFiniteFloatPolicy};
use serde_saphyr::{SnippetMode, Spanned};

use crate::Problem;
use crate::limits::DOCUMENT_BYTES;
use crate::problem::ProblemKind;

/// A document that was parsed; errors name it.
#[derive(Debug)]
pub struct Document<'a> {
    name: &'a str,
    text: &'a str,
    root: Spanned<Node>,
}

#[derive(Debug)]
enum Node {
    Null,
    /// A number or a truth value: how it was written stands in the document's text.
    Plain,
    Text(String),
    List(Vec<Spanned<Node>>),
    Map(Vec<(Spanned<String>, Spanned<Node>)>),
}

/// A value in the document and the way to it, `volumes[0].mount`.
#[derive(Debug)]
pub struct Field<'a> {
    document: &'a Document<'a>,
    node: &'a Spanned<Node>,
    path: String,
}

impl<'a> Document<'a> {
    /// `name` is what errors call the document.
    ///
    /// # Errors
    /// [`Problem`] when the text is not one YAML document, has a field twice, or is too large.
    pub fn parse(name: &'a str, text: &'a str) -> Result<Self, Problem> {
        Self::parse_with(name, text, DuplicateKeyPolicy::Error)
    }

    /// As [`Self::parse`]; of a field that is there twice the last one counts, as in most programs that read YAML.
    ///
    /// # Errors
    /// As [`Self::parse`].
    pub fn parse_as_others_do(name: &'a str, text: &'a str) -> Result<Self, Problem> {
        Self::parse_with(name, text, DuplicateKeyPolicy::LastWins)
    }

    fn parse_with(
        name: &'a str,
        text: &'a str,
        duplicate_keys: DuplicateKeyPolicy,
    ) -> Result<Self, Problem> {
        DOCUMENT_BYTES.check(text.len()).map_err(|error| error.problem(name))?;
        let options = serde_saphyr::options! {
            duplicate_keys: duplicate_keys,
            non_finite_float_policy: NonFiniteFloatPolicy::PassThrough,
            // What is in it may be no text.
            ignore_binary_tag_for_string: true,
        };
        let root = serde_saphyr::from_str_with_options(text, options).map_err(|error| {
            let at = error.location();
            let (line, column) = at.map_or((1, 1), |at| (at.line().max(1), at.column().max(1)));
            let why = why(&error, text, line);
            let (line, column) = if why == TAB { tab_at(text, line) } else { (line, column) };
            Problem::invalid(format!("{name}:{line}:{column}"), why)
                .next("the file must be one YAML document with lines `field: value`")
        })?;
        Ok(Self { name, text, root })
    }

    /// The whole of it.
    pub fn root(&'a self) -> Field<'a> {
        Field { document: self, node: &self.root, path: String::new() }
    }

    fn problem(&self, line: u64, path: &str, why: impl fmt::Display) -> Problem {
        let (name, line) = (self.name, line.max(1));
        let separator = if path.is_empty() { "" } else { ": " };
        Problem::new(ProblemKind::Invalid, format!("{name}:{line}{separator}{path}"), why)
    }
}

/// Where the tab is of which the parser has said that it is at a line, or after it.
fn tab_at(text: &str, line: u64) -> (u64, u64) {
    let skipped = usize::try_from(line.saturating_sub(1)).unwrap_or(usize::MAX);
    let lines = (line..).zip(text.lines().skip(skipped));
    let mut with_tab = lines.filter_map(|(number, content)| {
        let before = content.chars().position(|c| c == '\t')?;
        Some((number, before as u64 + 1))
    });
    with_tab.next().unwrap_or((line, 1))
}

const TAB: &str = "there is a tab: YAML wants spaces";

/// Why a text is no YAML, in our words: the library's are for those who program with it.
fn why(error: &serde_saphyr::Error, text: &str, line: u64) -> String {
    match error.without_snippet() {
        serde_saphyr::Error::DuplicateMappingKey { key: Some(key), .. } => {
            return format!("the field {key:?} is there already");
        }
        serde_saphyr::Error::DuplicateMappingKey { .. } => {
            return "this field is there already".to_owned();
        }
        serde_saphyr::Error::MultipleDocuments { .. } => {
            return "a second document begins above, with `---`".to_owned();
        }
        serde_saphyr::Error::Eof { .. } => return "it is empty".to_owned(),
        _ => {}
    }
    let options = serde_saphyr::render_options! { snippets: SnippetMode::Off };
    let said = error.render_with_options(options).to_string();
    let known = SYNTAX.iter().find(|(mark, _)| said.contains(mark));
    if let Some((_, why)) = known {
        return (*why).to_owned();
    }
    let index = usize::try_from(line.saturating_sub(1)).unwrap_or(usize::MAX);
    let line = text.lines().nth(index).unwrap_or_default();
    let indent = &line[..line.len() - line.trim_start().len()];
    let content = line.trim_start();
    if indent.contains('\t') {
        TAB.to_owned()
    } else if content.starts_with(['@', '`', '%', '&', '*', '!']) {
        "a text that begins with such a sign has to be in quotes".to_owned()
    } else if content.matches(": ").count() > 1 {
        "a value with `: ` in it has to be in quotes".to_owned()
    } else if !content.contains(':') && !content.starts_with('-') {
        "a line `field: value` is wanted here".to_owned()
    } else {
        "from here on it is no YAML: look at indentation, quotes and brackets here and in the line above"
            .to_owned()
    }
}

/// What the parser says, in part, and what that means for who has written the text.
const SYNTAX: [(&str, &str); 9] = [
    ("quoted scalar", "a quote is opened and not closed, here or in a line above"),
    ("found a tab", TAB),
    ("tabs disallowed", TAB),
    ("unclosed bracket", "a bracket is opened here and closed nowhere"),
    (
        "mapping values are not allowed",
        "a `: ` is not possible here: put the value in quotes, or look at the indentation",
    ),
    (
        "unknown anchor",
        "the name after `*` was given to nothing before: if it is a text, put it in quotes",
    ),
    ("simple key expect", "a line `field: value` is wanted here"),
    ("unexpected end of stream", "a quote or a bracket is opened and not closed"),
    ("invalid indentation", "the line is not indented as those that belong with it"),
];

impl<'a> Field<'a> {
    /// What is wrong with this value.
    pub fn problem(&self, why: impl fmt::Display) -> Problem {
        self.document.problem(self.node.referenced.line(), &self.path, why)
    }

    /// A field that was left out, or left empty.
    pub fn is_null(&self) -> bool {
        matches!(self.node.value, Node::Null)
    }

    /// Whether it is a sequence of values.
    pub fn is_list(&self) -> bool {
        matches!(self.node.value, Node::List(_))
    }

    /// Whether it is a mapping of names to values.
    pub fn is_map(&self) -> bool {
        matches!(self.node.value, Node::Map(_))
    }

    /// The value as it is written in the document.
    ///
    /// # Errors
    /// [`Problem`] when it is a list or a mapping, or empty.
    pub fn text(&self) -> Result<&'a str, Problem> {
        match &self.node.value {
            Node::Text(text) => Ok(text),
            Node::Plain => self.as_written().ok_or_else(|| self.problem("write it in quotes")),
            Node::Null => Err(self.problem("it is empty")),
            Node::List(_) => Err(self.problem("one value is wanted, not a list")),
            Node::Map(_) => Err(self.problem("one value is wanted, not fields below it")),
        }
    }

    fn as_written(&self) -> Option<&'a str> {
        let span = self.node.defined.span();
        let start = usize::try_from(span.byte_offset()?).ok()?;
        let length = usize::try_from(span.byte_len()?).ok()?;
        self.document.text.get(start..start.checked_add(length)?)
    }

    /// The text as whatever can be parsed from it.
    ///
    /// # Errors
    /// [`Problem`] with the parser's words.
    pub fn parse<T, E: fmt::Display>(
        &self,
        parse: impl FnOnce(&'a str) -> Result<T, E>,
    ) -> Result<T, Problem> {
        parse(self.text()?).map_err(|why| self.problem(why))
    }

    /// The values of a list, in their order.
    ///
    /// # Errors
    /// [`Problem`] when it is not a list.
    pub fn list(&self) -> Result<Vec<Field<'a>>, Problem> {
        let Node::List(items) = &self.node.value else {
            return Err(self.problem("a list is wanted, with lines `- value`"));
        };
        let item = |(index, node)| Field {
            document: self.document,
            node,
            path: format!("{}[{index}]", self.path),
        };
        Ok(items.iter().enumerate().map(item).collect())
    }

    /// Keys and values in the order of the file.
    ///
    /// # Errors
    /// [`Problem`] when it is not a mapping.
    pub fn entries(&self) -> Result<Vec<(&'a str, Field<'a>)>, Problem> {
        let Node::Map(entries) = &self.node.value else {
            return Err(self.problem("fields are wanted, with lines `name: value`"));
        };
        let entry = |(key, node): &'a (Spanned<String>, Spanned<Node>)| {
            (
                key.value.as_str(),
                Field { document: self.document, node, path: self.child(&key.value) },
            )
        };
        Ok(entries.iter().map(entry).collect())
    }

    fn child(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// The fields named, in this order; those left out or left empty are `None`.
    ///
    /// # Errors
    /// [`Problem`] when it is not a mapping, or has a field that is none of these.
    pub fn fields<const N: usize>(
        &self,
        names: [&str; N],
    ) -> Result<[Option<Field<'a>>; N], Problem> {
        let mut found = [const { None }; N];
        for (key, field) in self.entries()? {
            match names.iter().position(|name| *name == key) {
                Some(index) => found[index] = Some(field).filter(|f| !f.is_null()),
                None => return Err(self.unknown(key, &names)),
            }
        }
        Ok(found)
    }

    /// What is wrong with the name of a field below this value.
    pub fn name_problem(&self, key: &str, why: impl fmt::Display) -> Problem {
        let line = match &self.node.value {
            Node::Map(entries) => entries.iter().find(|(k, _)| k.value == key),
            _ => None,
        }
        .map_or(1, |(k, _)| k.referenced.line());
        self.document.problem(line, &self.child(key), why)
    }

    fn unknown(&self, key: &str, names: &[&str]) -> Problem {
        self.name_problem(key, "there is no such field")
            .next(format!("fields here: {}", names.join(", ")))
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Node, E> {
        Ok(Node::Plain)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Node, E> {
        Ok(Node::Plain)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Node, E> {
        Ok(Node::Plain)
    }

    fn visit_i128<E>(self, _: i128) -> Result<Node, E> {
        Ok(Node::Plain)
    }

    fn visit_u128<E>(self, _: u128) -> Result<Node, E> {
        Ok(Node::Plain)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Node, E> {
        Ok(Node::Plain)
    }

    fn visit_str<E>(self, text: &str) -> Result<Node, E> {
        Ok(Node::Text(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<Node, E> {
        Ok(Node::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Node, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Node::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Node::Map(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_yaml_is_said_in_our_words_with_line_and_column() {
        let mut wrong = Vec::new();
        for (text, at, expected) in [
            ("a: 1\nb: 2\na: 3\n", "f:3:1", "\"a\" is there already"),
            ("a: 1\n---\nb: 2\n", "f:3:1", "second document"),
            ("a:\n\t- b\n", "f:2", "tab"),
            ("a: 1\n\tb: 2\n", "f:2:1", "tab"),
            ("a: b: c\n", "f:1:5", "quotes"),
            ("a: [1, 2\nb: 3\n", "f:", "bracket"),
            ("a: \"x\nb: 1\n", "f:", "quote"),
            ("a: 1\nbroken\nb: 2\n", "f:", "`field: value`"),
            ("a: *x\n", "f:1", "quotes"),
            ("a: @x\n", "f:1", "quotes"),
            ("a: 1\n  b: 2\n", "f:2", ""),
            ("a:\n  - b\n c: d\n", "f:3", ""),
        ] {
            let problem = Document::parse("f", text).expect_err(text);
            let shown = problem.to_string();
            let foreign =
                ["Policy", "Options", "set ", "scan", "token", "from_str", "mapping values"];
            if !shown.starts_with(at)
                || !shown.contains(expected)
                || foreign.iter().any(|word| problem.why.contains(word))
            {
                wrong.push(format!("{text:?}: {shown}"));
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    #[test]
    fn a_number_that_is_none_is_a_text_like_others() {
        let document = Document::parse("f", "a: .nan\n").expect("it is YAML");
        let [a] = document.root().fields(["a"]).expect("fields");
        assert_eq!(a.expect("it is there").text(), Ok(".nan"));
    }

    #[test]
    fn a_field_that_is_there_twice_is_only_refused_in_files_of_our_own() {
        let text = "a: 1\na: 2\n";
        let document = Document::parse_as_others_do("f", text).expect("the last one counts");
        let [a] = document.root().fields(["a"]).expect("fields");
        assert_eq!(a.expect("it is there").text(), Ok("2"));
        assert!(Document::parse("f", text).is_err());
    }
}
