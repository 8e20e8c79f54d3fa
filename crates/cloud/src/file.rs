//! `providers.yaml`: who has machines for rent, by the names that users know the providers by.

use std::sync::Arc;

use crate::provider::Provider;

/// Why `providers.yaml` can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadProviders(String);

/// The providers that the text of a `providers.yaml` has, in the order of their names.
///
/// # Errors
/// If the text is no such file; the error names the provider and the field.
pub fn providers(file: &str) -> Result<Vec<Arc<dyn Provider>>, BadProviders> {
    let _ = file;
    Err(BadProviders("there are no providers yet".to_owned()))
}
