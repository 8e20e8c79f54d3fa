//! What PROPPATCH changes: notes of clients, and the time of a file's last change. The library lets nobody set a property of its
//! own, so that time comes to [`patch`] under another name.

use axum::http::StatusCode;
use dav_server::fs::{DavProp, FsResult};
use perigee_model::ProblemKind;
use xml::name::Name;
use xml::reader::{EventReader, XmlEvent};
use xml::writer::{EventWriter, XmlEvent as Written};
use xmltree::Element;

use super::refused;
use crate::http::headers::unix_time_ms;
use crate::listing::unix_ms;
use crate::path::Location;
use crate::properties::Property;
use crate::view::View;

const DAV: &str = "DAV:";
const MICROSOFT: &str = "urn:schemas-microsoft-com:";

/// Before the namespace of a property that the library would not let through.
const LIVE: &str = "perigee:live:";

/// Below `propertyupdate`, `set` and `prop`.
const PROPERTY_DEPTH: usize = 4;

/// A property that is the time of the last change, with what reads it: the standard's, Nextcloud's and Windows'.
fn reader_of(namespace: &str, name: &str) -> Option<fn(&str) -> Option<u64>> {
    match (namespace, name) {
        (DAV, "getlastmodified") | (MICROSOFT, "Win32LastModifiedTime") => Some(http_date_ms),
        (DAV, "lastmodified") => Some(unix_time_ms),
        _ => None,
    }
}

fn http_date_ms(text: &str) -> Option<u64> {
    httpdate::parse_http_date(text.trim()).ok().map(unix_ms)
}

/// A body of PROPPATCH in which the time has its other name. One without it stays as it is.
pub fn to_live(body: &[u8]) -> Option<Vec<u8>> {
    let mut is_changed = false;
    let mut writer = EventWriter::new(Vec::new());
    let mut depth = 0_usize;
    for event in EventReader::new(body) {
        let event = event.ok()?;
        match &event {
            XmlEvent::StartElement { name, attributes, namespace } => {
                depth += 1;
                let of = name.namespace.as_deref().unwrap_or_default();
                let is_time = depth == PROPERTY_DEPTH && reader_of(of, &name.local_name).is_some();
                let other = format!("{LIVE}{of}");
                let mut known = namespace.clone();
                let mut name = name.borrow();
                is_changed |= is_time;
                if is_time {
                    known.force_put("live", other.as_str());
                    name = Name::qualified(name.local_name, other.as_str(), Some("live"));
                }
                let attributes = attributes.iter().map(|one| one.borrow()).collect();
                let namespace = std::borrow::Cow::Borrowed(&known);
                writer.write(Written::StartElement { name, attributes, namespace }).ok()?;
            }
            XmlEvent::EndElement { .. } => {
                depth -= 1;
                writer.write(Written::EndElement { name: None }).ok()?;
            }
            other => {
                if let Some(same) = other.as_writer_event() {
                    writer.write(same).ok()?;
                }
            }
        }
    }
    Some(if is_changed { writer.into_inner() } else { body.to_vec() })
}

/// Changes all of them, or none.
pub async fn patch(
    view: &View,
    at: Location,
    changes: Vec<(bool, DavProp)>,
) -> FsResult<Vec<(StatusCode, DavProp)>> {
    let (mut modified_ms, mut notes, mut answers) = (None, Vec::new(), Vec::new());
    for (is_set, DavProp { name, prefix, namespace, xml }) in changes {
        let namespace = namespace.unwrap_or_default();
        let live = namespace.strip_prefix(LIVE).map(str::to_owned);
        let (of, prefix) = match &live {
            Some(of) => (of.clone(), Some("T".to_owned())),
            None => (namespace, prefix),
        };
        let status = match (&live, is_set) {
            (Some(of), true) => {
                let text = xml.as_deref().and_then(|xml| Element::parse(xml).ok());
                let text = text.and_then(|element| element.get_text().map(|text| text.to_string()));
                modified_ms = text.and_then(|text| reader_of(of, &name)?(&text));
                if modified_ms.is_some() { StatusCode::OK } else { StatusCode::CONFLICT }
            }
            (Some(_), false) => StatusCode::FORBIDDEN,
            (None, _) => {
                let xml = xml.filter(|_| is_set).and_then(|xml| String::from_utf8(xml).ok());
                notes.push((of.clone(), name.clone(), xml));
                StatusCode::OK
            }
        };
        // Without a namespace the library needs no prefix either.
        let prefix = prefix.filter(|_| !of.is_empty());
        let namespace = (!of.is_empty()).then_some(of);
        answers.push((status, DavProp { name, prefix, namespace, xml: None }));
    }
    let mut others = StatusCode::OK;
    if answers.iter().any(|(status, _)| *status != StatusCode::OK) {
        others = StatusCode::FAILED_DEPENDENCY;
    } else if !notes.is_empty() {
        match view.change_properties(at.clone(), |properties| note(properties, notes)).await {
            Err(problem) if problem.kind == ProblemKind::NoSpace => {
                others = StatusCode::INSUFFICIENT_STORAGE;
            }
            changed => changed.map_err(refused)?,
        }
    }
    if let (StatusCode::OK, Some(modified_ms)) = (others, modified_ms) {
        view.set_modified(at, modified_ms).await.map_err(refused)?;
    }
    let end = |status| if status == StatusCode::OK { others } else { status };
    Ok(answers.into_iter().map(|(status, prop)| (end(status), prop)).collect())
}

/// Each has a namespace, a name, and what is noted; or nothing, and is forgotten.
fn note(properties: &mut Vec<Property>, notes: Vec<(String, String, Option<String>)>) {
    for (namespace, name, xml) in notes {
        properties.retain(|one| !one.is(&namespace, &name));
        properties.extend(xml.map(|xml| Property { namespace, name, xml }));
    }
}

/// A property as the library has it.
pub fn shown(property: Property) -> DavProp {
    let Property { namespace, name, xml } = property;
    let namespace = (!namespace.is_empty()).then_some(namespace);
    DavProp { name, prefix: None, namespace, xml: Some(xml.into_bytes()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_time_has_another_name() {
        let body = br#"<?xml version="1.0"?><D:propertyupdate xmlns:D="DAV:" xmlns:x="urn:x"><D:set><D:prop>
            <D:getlastmodified>Sun, 06 Nov 1994 08:49:37 GMT</D:getlastmodified><x:getlastmodified a="b">n</x:getlastmodified>
            </D:prop></D:set></D:propertyupdate>"#;
        let body = to_live(body).expect("a body");
        let tree = Element::parse(&body[..]).expect("XML");
        let props =
            tree.get_child("set").and_then(|set| set.get_child("prop")).expect("properties");
        let found: Vec<_> = props.children.iter().filter_map(|one| one.as_element()).collect();
        assert_eq!(found[0].namespace.as_deref(), Some("perigee:live:DAV:"));
        assert_eq!(found[1].namespace.as_deref(), Some("urn:x"));
        assert_eq!(found[1].attributes.len(), 1);
        let other =
            b"<propertyupdate xmlns='DAV:'><set><prop><x xmlns=''/></prop></set></propertyupdate>";
        assert_eq!(to_live(other).as_deref(), Some(&other[..]));
        assert_eq!(http_date_ms("Sun, 06 Nov 1994 08:49:37 GMT"), Some(784_111_777_000));
    }
}
