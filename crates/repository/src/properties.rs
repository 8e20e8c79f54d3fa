//! What clients note about files, and is nothing to anybody else: the dead properties of WebDAV (RFC 4918, 4). They go
//! with a file when it is renamed or copied, and stay when it is written anew.

use std::fs::File;

use perigee_model::Problem;
use perigee_model::limits::FILE_PROPERTIES_BYTES;
use rustix::fs::{XattrFlags, fsetxattr};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::space::attribute;

/// The extended attribute that has them.
const PROPERTIES: &str = "user.perigee.properties";

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Property {
    pub namespace: String,
    pub name: String,
    /// The whole element.
    pub xml: String,
}

impl Property {
    /// Whether it is this property. Names are the same only in the same namespace.
    pub fn is(&self, namespace: &str, name: &str) -> bool {
        self.namespace == namespace && self.name == name
    }
}

/// Those of a file; none if it has none.
pub fn read(file: &File) -> Vec<Property> {
    let text = attribute(file, PROPERTIES).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}

/// Whether somebody has noted something about a file, if only that there is nothing.
pub fn are_noted(file: &File) -> bool {
    attribute(file, PROPERTIES).is_some()
}

/// A text that [`write()`] takes.
///
/// # Errors
/// `NoSpace` if they are too long.
pub fn packed(properties: &[Property], what: &str) -> Result<String, Problem> {
    let text = serde_json::to_string(properties).map_err(|e| Problem::internal(what, e))?;
    FILE_PROPERTIES_BYTES.check(text.len()).map_err(|e| Problem::no_space(what, e))?;
    Ok(text)
}

/// Keeps all properties in an extended attribute of the file, whose size the filesystem limits (`ENOSPC`).
pub fn write(file: &File, packed: &str) -> Result<(), Errno> {
    fsetxattr(file, PROPERTIES, packed.as_bytes(), XattrFlags::empty())
}

/// A file takes the place of another one: what is noted stays.
pub fn carry_over(from: &File, to: &File) -> Result<(), Errno> {
    match attribute(from, PROPERTIES) {
        Some(noted) if !are_noted(to) => write(to, &noted),
        _ => Ok(()),
    }
}
