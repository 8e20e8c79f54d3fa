//! An XML document of a provider as a tree with limits. Attributes, comments and namespaces say nothing here and are left out.

use quick_xml::Reader;
use quick_xml::events::{BytesRef, Event};

/// Elements inside each other. EC2's answers have fewer than ten.
const DEPTH_MAX: usize = 32;
/// Elements in a document: 500 instances have some 100,000.
const ELEMENTS_MAX: usize = 1_000_000;

/// One element, the text right in it, and the elements in it.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Element {
    name: String,
    text: String,
    children: Vec<Element>,
}

impl Element {
    /// Reads a whole document.
    ///
    /// # Errors
    /// Why this is no XML document, or one that is too large.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned())?;
        let mut reader = Reader::from_str(text);
        // The elements that are open. The first one stands for the document.
        let mut open = vec![Self::default()];
        let mut elements = 0;
        loop {
            let event = reader.read_event().map_err(|error| error.to_string())?;
            let depth = open.len();
            let at = open.last_mut().expect("the document is open");
            match event {
                Event::Start(start) => {
                    let element = Self::named(start.local_name().as_ref());
                    open.push(element);
                    elements += 1;
                }
                Event::Empty(start) => {
                    at.children.push(Self::named(start.local_name().as_ref()));
                    elements += 1;
                }
                Event::End(_) if depth > 1 => {
                    let ended = open.pop().expect("one is open");
                    open.last_mut().expect("its parent is open").children.push(ended);
                }
                Event::End(_) => return Err("an element ends that did not begin".to_owned()),
                Event::Text(part) => {
                    at.text += &part.decode().map_err(|error| error.to_string())?;
                }
                Event::CData(part) => {
                    at.text += &part.decode().map_err(|error| error.to_string())?;
                }
                Event::GeneralRef(reference) => at.text.push(character(&reference)?),
                Event::DocType(_) => return Err("it has a document type".to_owned()),
                Event::Comment(_) | Event::Decl(_) | Event::PI(_) => {}
                Event::Eof => break,
            }
            if open.len() > DEPTH_MAX || elements > ELEMENTS_MAX {
                return Err(format!(
                    "it has more than {ELEMENTS_MAX} elements, or more than {DEPTH_MAX} in each other"
                ));
            }
        }
        let mut document = open.pop().expect("the document is open");
        match document.children.pop() {
            Some(root) if open.is_empty() && document.children.is_empty() => Ok(root),
            _ => Err("it is cut, or it is not one element".to_owned()),
        }
    }

    fn named(name: &[u8]) -> Self {
        Self { name: String::from_utf8_lossy(name).into_owned(), ..Self::default() }
    }

    /// Its name, without a namespace.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The first element at the end of this way of names, as in `placement/availabilityZone`.
    pub fn at(&self, way: &str) -> Option<&Self> {
        way.split('/').try_fold(self, |at, name| at.children.iter().find(|c| c.name == name))
    }

    /// The text at the end of this way; `None` if there is none, or it is empty.
    pub fn text(&self, way: &str) -> Option<&str> {
        self.at(way).map(|at| at.text.trim()).filter(|text| !text.is_empty())
    }

    /// The number at the end of this way.
    pub fn number(&self, way: &str) -> Option<u64> {
        self.text(way)?.parse().ok()
    }

    /// The items of the list at the end of this way. A list that is not there has none.
    pub fn items(&self, way: &str) -> impl Iterator<Item = &Self> {
        let list = self.at(way).map_or(&[][..], |list| &list.children);
        list.iter().filter(|item| item.name == "item")
    }

    /// The texts of the items of the list at the end of this way.
    pub fn texts(&self, way: &str) -> impl Iterator<Item = &str> {
        self.items(way).map(|item| item.text.trim())
    }
}

/// What `&lt;` and `&#60;` stand for. A document has no other entities, for it has no document type.
fn character(reference: &BytesRef<'_>) -> Result<char, String> {
    if let Some(character) = reference.resolve_char_ref().map_err(|error| error.to_string())? {
        return Ok(character);
    }
    match &**reference {
        b"lt" => Ok('<'),
        b"gt" => Ok('>'),
        b"amp" => Ok('&'),
        b"quot" => Ok('"'),
        b"apos" => Ok('\''),
        _ => Err("it has an entity that nobody knows".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_read() {
        let text = r#"<?xml version="1.0"?><R xmlns="x"><!-- --><a><item>1 &lt; &#50;</item><item/><other/></a><b> <c><![CDATA[<x>]]></c></b></R>"#;
        let root = Element::parse(text.as_bytes()).expect("a document");
        assert_eq!(root.texts("a").collect::<Vec<_>>(), ["1 < 2", ""]);
        assert_eq!((root.text("b/c"), root.text("b"), root.text("a/x")), (Some("<x>"), None, None));
        assert_eq!(root.items("nowhere").count(), 0);
    }

    #[test]
    fn what_is_no_document_is_refused() {
        let deep = "<a>".repeat(DEPTH_MAX) + &"</a>".repeat(DEPTH_MAX);
        for text in [
            "",
            "x",
            "<a>",
            "</a>",
            "<a></b>",
            "<a/><b/>",
            "<a>&x;</a>",
            "<a>&#0;</a>",
            "<a",
            "<!DOCTYPE a [<!ENTITY x \"y\">]><a>&x;</a>",
            &deep,
        ] {
            assert!(Element::parse(text.as_bytes()).is_err(), "{text}");
        }
        assert!(Element::parse(b"<a>\xff</a>").is_err());
    }
}
