//! The options that stand before or after each command.

use std::path::PathBuf;

use crate::output::Format;

/// The options that all commands share.
#[derive(Debug, Clone)]
pub struct Context {
    /// The controller's address, if the user names one.
    pub api: Option<String>,
    /// The directory with the operator's certificate.
    pub operator: PathBuf,
    /// How results are printed.
    pub format: Format,
}
